"""What holds for all requests of a proxy: the choices of whoever runs it, and what was learnt of its models."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from dyn_relay.formats.sglang.codec import Codec
from dyn_relay.formats.sglang.stops import Stops
from dyn_relay.formats.sglang.widths import Widths
from dyn_relay.formats.weights import WeightPolicy


@dataclass(frozen=True, slots=True)
class Rules:
    """Shared by all exchanges of a format."""

    #: An abort that nobody explains is a failed attempt.
    resume_aborts: bool = False
    #: Which weights may continue an answer.
    weights: WeightPolicy = field(default_factory=WeightPolicy)
    #: Answers say in `meta_info` which rows to replay were computed again.
    tells_recomputed: bool = False
    #: How rows to replay are spelled.
    codec: Codec = field(default_factory=Codec)
    #: What is known of each model, with a tokenizer and without: that has ids of its own that end an answer.
    stops: defaultdict[tuple[str | None, bool | None], Stops] = field(default_factory=lambda: defaultdict(Stops))
    #: What is known of each model's rows to replay, by its name and theirs.
    widths: defaultdict[tuple[str | None, str], Widths] = field(default_factory=lambda: defaultdict(Widths))

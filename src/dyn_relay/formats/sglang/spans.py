"""Which weights made which tokens: `meta_info.weight_versions`, spans `{version, start, end}` of output tokens."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from msgspec import Raw

from dyn_relay.formats.sglang.wire import Foreign, NotJson, raw, read


@dataclass(slots=True)
class Span:
    """Tokens `start` (included) to `end` (not) come from `version`."""

    version: object
    start: int
    end: int


_spans = msgspec.json.Decoder(list[Span])


def label(version: object) -> str | None:
    """A version as one that can be told from others, whatever JSON it is; None if it was not told."""
    return None if version is None else str(version)


def parse(value: Raw) -> list[Span] | None:
    """An engine's own spans; None if they are not of the known shape."""
    try:
        return read(_spans, value)
    except (Foreign, NotJson):
        return None


def stated(value: Raw, tokens: int) -> list[Span] | None:
    """An engine's own spans of an answer of `tokens` tokens; None if they do not cover it, each token once."""
    spans = parse(value) or []
    edges = [0, *(span.end for span in spans)]
    tiled = all(span.start == edge <= span.end for span, edge in zip(spans, edges, strict=False))
    return spans if spans and tiled and edges[-1] == tokens else None


def known(spans: list[Span]) -> bool:
    """The version of each token has been told. If not, the answer gets no spans: they would not cover it."""
    return all(span.version is not None for span in spans)


def shift(spans: list[Span], by: int) -> list[Span]:
    """The same spans `by` tokens later."""
    return [Span(span.version, span.start + by, span.end + by) for span in spans]


def merge(spans: list[Span]) -> list[Span]:
    """Without empty spans, equal neighbours as one; a lone empty span stays: engines send it for 0 tokens."""
    result: list[Span] = []
    for span in spans:
        if result and result[-1].start == result[-1].end:
            result.pop()
        if result and span.start == span.end:
            continue
        if result and result[-1].version == span.version and result[-1].end == span.start:
            result[-1] = Span(span.version, result[-1].start, span.end)
        else:
            result.append(span)
    return result


def render(spans: list[Span]) -> Raw:
    """As SGLang writes them."""
    return raw([{"version": span.version, "start": span.start, "end": span.end} for span in merge(spans)])


def of_marks(marks: list[tuple[int, object]], tokens: int) -> list[Span]:
    """Spans over `tokens` tokens from the points where the scalar `weight_version` was seen to change.

    An event that brings several tokens and a new version is taken to bring them all under the new one. So the spans of
    a cut stream, whose client has the tokens already, are exact to one event.
    """
    ends = [start for start, _ in marks[1:]] + [tokens]
    return [Span(version, start, end) for (start, version), end in zip(marks, ends, strict=True)] if marks else []

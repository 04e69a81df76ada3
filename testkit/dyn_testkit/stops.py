"""Stop strings, as SGLang's scheduler looks for them: in the text of the last few tokens of a request's own output.

After each token, and never in the prompt: SGLang 0.5.23, `schedule_batch.py` (`tail_str`, `_check_str_based_finish`,
`check_match_stop_str_prefix`) and `sampling_params.py` (`stop_str_max_len`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from dyn_testkit.tokenizer import Tokenizer


@dataclass(frozen=True)
class StopStrings:
    """The stop strings of one request. Special tokens have their text here, even if the answer skips them."""

    stops: tuple[str, ...]
    tokenizer: Tokenizer

    @cached_property
    def _window(self) -> int:
        return max((len(self.tokenizer.encode(stop)) for stop in self.stops), default=0) + 1

    def _tail(self, output: Sequence[int]) -> str:
        return self.tokenizer.decode(output[-self._window :])

    def found(self, output: Sequence[int]) -> str | None:
        """The first listed stop string that is in the text of the last tokens."""
        tail = self._tail(output) if self.stops else ""
        return next((stop for stop in self.stops if stop in tail), None)

    def begun(self, output: Sequence[int]) -> bool:
        """Does the text end as a stop string begins, or contain one? Then a stream holds its event back."""
        tail = self._tail(output) if self.stops else ""
        return any(
            stop in tail or any(tail.endswith(stop[:length]) for length in range(1, len(stop)))
            for stop in self.stops
            if stop and tail
        )

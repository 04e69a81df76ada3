"""Stop strings, as SGLang's scheduler looks for them: in the text of the last few tokens of a request's own output.

After each token, and never in the prompt: SGLang 0.5.23, `schedule_batch.py` (`tail_str`, `_check_str_based_finish`,
`_locate_str_stop_finished_len`,
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

    def _tail(self, output: Sequence[int], more: int = 0) -> Sequence[int]:
        return output[-self._window - more :]

    def found(self, output: Sequence[int], new: int = 1) -> tuple[str, int] | None:
        """The first listed stop string in the text of the last tokens, and at how many tokens it is whole.

        `new`: so many of the tokens came in one forward pass, and have not been looked at.
        """
        if not self.stops:
            return None
        tail = self._tail(output, new - 1)
        text = self.tokenizer.decode(tail)
        stop = next((stop for stop in self.stops if stop in text), None)
        if stop is None:
            return None
        early = (less for less in range(new - 1, 0, -1) if stop in self.tokenizer.decode(tail[:-less]))
        return stop, len(output) - next(early, 0)

    def begun(self, output: Sequence[int]) -> bool:
        """Does the text end as a stop string begins, or contain one? Then a stream holds its event back."""
        text = self.tokenizer.decode(self._tail(output)) if self.stops else ""
        return any(
            stop in text or any(text.endswith(stop[:length]) for length in range(1, len(stop)))
            for stop in self.stops
            if stop and text
        )

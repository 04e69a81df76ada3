"""The history of a run, written as it happens: each entry goes to the file at once and is not kept here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import msgspec

from dyn_chaos import measures
from dyn_chaos.load import Plan
from dyn_testkit import checkers
from dyn_testkit.history import Entry, History, Record, Reference, Run, without_answer

#: What an undisturbed engine says to a request.
References = Callable[[Plan], Reference]


class Recorder:
    """Writes a history. A context manager."""

    def __init__(self, path: Path, references: References, run: Run, *, whole: bool) -> None:
        """`whole`: keep every answer; otherwise each is checked at once, and kept only if something is found."""
        self._file = path.open("wb")
        self._encode = msgspec.json.Encoder().encode
        self._references = references
        #: A single answer cannot be excused: that needs the faults and the rows, which the last check of all has.
        self._strict = Run(tolerance=run.tolerance)
        self._whole = whole
        self.note(run)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def note(self, entry: Entry) -> None:
        """Write one entry; it is in the file whatever becomes of this process."""
        self._file.write(self._encode(entry) + b"\n")
        self._file.flush()

    def ended(self, plan: Plan, record: Record | None) -> None:
        """A request ended, or with None was given up."""
        reference = self._references(plan)
        if record is not None and not self._whole:
            alone = History(self._strict, {record.key: record}, {record.key: reference})
            if not checkers.check(alone):
                self.note(without_answer(record, measures.tokens(record)))
                return
        self.note(reference)
        if record is not None:
            self.note(record)

"""What an answer says of its own time covers all of its attempts."""

from __future__ import annotations

from collections.abc import Iterator

from dyn_testkit.checkers.base import Finding, subjects
from dyn_testkit.history import History


def check(history: History) -> Iterator[Finding]:
    """Needs the router's rows. Of a request that is not migratable the engine's own words are handed on."""
    rows = {row["rid"]: row for row in history.rows}
    for subject in subjects(history):
        row, said = rows.get(subject.answer.meta.get("id")), subject.answer.meta.get("e2e_latency")
        sent = [attempt for attempt in row["attempts"] if attempt["cause"] != "connect"] if row is not None else []
        if row is None or not row["migratable"] or said is None or len(sent) < 2:
            continue
        # Its clock began to run before anything came of its first attempt.
        began = min(attempt["ended"] if attempt["first_token"] is None else attempt["first_token"] for attempt in sent)
        least = (sent[-1]["last_token"] or sent[-1]["started"]) - began
        if not least <= said <= row["duration"]:
            what = f"e2e_latency {said:.3f} s; its tokens alone took {least:.3f} s, all of it {row['duration']:.3f} s"
            yield Finding(subject.record.key, "latency", what)

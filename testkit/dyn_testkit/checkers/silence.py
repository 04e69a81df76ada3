"""Nobody waits for a worker that has gone silent for longer than the router bears."""

from __future__ import annotations

from collections.abc import Iterator

from dyn_testkit.checkers.base import Finding
from dyn_testkit.history import History


def check(history: History) -> Iterator[Finding]:
    """Needs the router's rows and the time of its patience.

    While clients do not read, nobody can tell whose silence it is. What cannot be continued is waited for as long as
    somebody answers for its engine.
    """
    patience = history.run.silence
    if patience is None or any("clients" in fault.harms for fault in history.faults):
        return
    for fault in history.faults:
        if not {"health", "answers"} <= set(fault.harms):
            continue
        for row in history.rows:
            if not row["migratable"] and fault.target in history.run.grpc and "lease" not in fault.harms:
                continue
            for attempt in row["attempts"]:
                since = row["time"] - history.run.began
                waited = min(since + attempt["ended"], fault.until or since + attempt["ended"]) - fault.at
                if attempt["url"] == fault.target and since + attempt["started"] < fault.at and waited > patience:
                    what = f"attempt {attempt['number']} at {attempt['worker']} went on for {waited:.0f} s"
                    yield Finding(row["rid"], "silence", f"{what} into its {fault.kind}")

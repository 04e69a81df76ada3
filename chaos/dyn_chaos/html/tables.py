"""The parts of the report's page that are there without a script: the head, the checks, the table of recovery."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from html import escape

from dyn_chaos.html.lanes import Drawing
from dyn_chaos.measures import Recovery, Spread
from dyn_testkit import checkers
from dyn_testkit.checkers import CHECKERS, Finding
from dyn_testkit.history import History

#: Findings of a check that are shown without a click.
OPEN = 12


def text(value: object) -> str:
    """Anything, as text in a page."""
    return escape(str(value))


def _quoted(words: str) -> str:
    """A docstring's line: what is between backticks is code."""
    return re.sub("`(.*?)`", r"<code>\1</code>", text(words))


def _settings(settings: Mapping[str, object]) -> Iterator[str]:
    """Those that were said in words."""
    for name, value in settings.items():
        if isinstance(value, str) and value:
            yield f"{text(name)} <code>{text(value)}</code>"


def head(history: History, findings: Sequence[Finding], drawing: Drawing) -> str:
    """The run's name, verdict and counts."""
    run = history.run
    lanes = drawing.lanes
    verdict = '<span class="verdict bad">FAIL</span>' if findings else '<span class="verdict good">pass</span>'
    origin = [f"seed {run.seed}", *([f"commit {run.commit}"] if run.commit else [])]
    count = Counter(lane.status for lane in lanes)
    others = "".join(f", {count[status]} {status}" for status in ("refused", "left") if count[status])
    attempts = [attempt for lane in lanes for attempt in lane.attempts]
    tiles: list[tuple[str, str, str]] = [
        (f"{len(lanes):,}", "requests", f"{count['whole']} whole{others}"),
        (f"{count['failed']:,}", "failed", "not whole, though the client waited"),
        (f"{len(findings):,}", "findings", "of all checks"),
        (f"{sum(lane.tokens for lane in lanes):,}", "tokens", "that clients got"),
        (f"{len(history.faults):,}", "faults", ", ".join(sorted({fault.kind for fault in history.faults})) or "none"),
    ]
    if history.rows:
        moved = sum(lane.moved for lane in lanes)
        cuts = sum(attempt.cut for attempt in attempts)
        tiles.insert(2, (f"{moved:,}", "moved", f"{len(attempts)} attempts, {cuts} of them cut"))
    return (
        f"<h1>{text(run.name or 'campaign')} {verdict}</h1>"
        f'<p class="origin">{" · ".join([*map(text, origin), *_settings(run.settings)])}</p>'
        '<ul class="tiles">'
        + "".join(
            f'<li class="{"alarm" if value != "0" and name in ("failed", "findings") else ""}">'
            f"<b>{value}</b> {text(name)}<small>{text(more)}</small></li>"
            for value, name, more in tiles
        )
        + "</ul>"
    )


def checks(history: History, findings: Sequence[Finding], made: Collection[str], lanes: Mapping[str, int]) -> str:
    """An item a check, with its findings, each a link to its lane."""
    by_check: defaultdict[str, list[Finding]] = defaultdict(list)
    for finding in findings:
        by_check[finding.check].append(finding)
    names = [*made, *(name for name in by_check if name not in made)]
    return "".join(_check(name, by_check[name], _idle(name, history), lanes) for name in names)


def _check(name: str, found: Sequence[Finding], idle: str, lanes: Mapping[str, int]) -> str:
    about = (getattr(checkers, name).__doc__ or "").splitlines()[0] if name in CHECKERS else "Of this campaign."
    if found:
        items = "".join(_items(found, lanes))
        listed = f"<ul>{items}</ul>"
        if len(found) > OPEN:
            listed = f"<details><summary>{len(found)} findings</summary>{listed}</details>"
        state, said = "bad", f"{len(found)} found"
    else:
        listed, state, said = "", "idle" if idle else "good", idle or "holds"
    return (
        f'<li class="{state}"><b>{text(name)}</b> <span class="state">{text(said)}</span>'
        f'<span class="about">{_quoted(about)}</span>{listed}</li>'
    )


def _items(found: Iterable[Finding], lanes: Mapping[str, int]) -> Iterator[str]:
    for finding in found:
        key = text(finding.key)
        if finding.key in lanes:
            key = f'<a href="#lane-{lanes[finding.key]}">{key}</a>'
        yield f"<li>{key} {text(finding.message)}</li>"


def _idle(name: str, history: History) -> str:
    """Why a check had nothing to judge; "" if it had something."""
    if name in ("leak", "leases"):
        return "" if history.samples else "no samples"
    if name == "exactly_once":
        return "" if history.run.traced else "no rows"
    if name == "rows":
        return "" if history.rows else "no rows"
    if name == "exclusion":
        return "" if history.rows and history.run.workers else "no rows"
    if name == "experts" and not any(each.body.get("return_routed_experts") for each in history.records.values()):
        return "nobody asked for them"
    judged = history.references or any(record.checked for record in history.records.values())
    return "" if judged else "no references"


def recovery(phases: Sequence[Recovery]) -> str:
    """Percentiles of both kinds of gaps, a phase of the run a row."""
    columns = "".join(f"<th>{name}</th>" for name in ("n", "p50", "p90", "p99", "worst"))
    rows = "".join(
        f"<tr><th>{text(each.phase)}</th>{_cells(each.pauses)}{_cells(each.resumptions)}</tr>" for each in phases
    )
    return (
        '<thead><tr><td></td><th colspan="5">longest pause of a stream</th>'
        '<th colspan="5">from a cut to the first token of the continuation</th></tr>'
        f"<tr><td></td>{columns}{columns}</tr></thead><tbody>{rows}</tbody>"
    )


def _cells(spread: Spread | None) -> str:
    if spread is None:
        return '<td class="begins">0</td>' + "<td>–</td>" * 4
    numbers = (spread.p50, spread.p90, spread.p99, spread.worst)
    return f'<td class="begins">{spread.count}</td>' + "".join(f"<td>{_seconds(number)}</td>" for number in numbers)


def _seconds(number: float) -> str:
    return f"{number * 1000:.0f} ms" if number < 1 else f"{number:.2f} s" if number < 100 else f"{number:.0f} s"

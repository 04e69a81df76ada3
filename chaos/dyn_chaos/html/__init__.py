"""A run as one page of HTML: its verdict, its checks, a lane a request, its numbers. It loads nothing from anywhere."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from importlib.resources import files
from string import Template

import msgspec

from dyn_chaos import measures
from dyn_chaos.html import tables
from dyn_chaos.html.lanes import draw, places
from dyn_testkit.checkers import CHECKERS, Finding
from dyn_testkit.history import History

#: Its name in the folder of a run.
REPORT = "report.html"

#: One script each; they share one scope, in this order.
SCRIPTS = ("base", "view", "charts", "lane", "timeline", "details", "page")

_ASSETS = files(__package__) / "assets"


def render(history: History, findings: Sequence[Finding], checks: Collection[str] = tuple(CHECKERS)) -> str:
    """The page of a history and of what was found in it. `checks`: those that were made, by name."""
    drawing = draw(history, findings)
    script = "\n".join(_asset(f"{name}.js") for name in SCRIPTS)
    return Template(_asset("page.html")).substitute(
        title=tables.text(history.run.name or "campaign"),
        style=_asset("page.css"),
        head=tables.head(history, findings, drawing),
        checks=tables.checks(history, findings, checks, places(drawing)),
        recovery=tables.recovery(measures.recovery(history)),
        data=_inert(msgspec.json.encode(drawing).decode()),
        script=f'"use strict";\n(() => {{\n{script}\n}})();',
    )


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _inert(text: str) -> str:
    """JSON in which nothing can end the element that it is in."""
    return re.sub("[<>&\u2028\u2029]", lambda found: f"\\u{ord(found[0]):04x}", text)


__all__ = ["render"]

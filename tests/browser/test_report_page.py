"""The report in a real browser: it draws without an error, asks the network for nothing, and does what it says."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from dyn_chaos.html import render
from dyn_testkit.history import History
from tests.browser.chromium import Page, browse, find
from tests.recorded_runs import bare, stormy

#: Some frames later everything has been drawn.
DRAWN = """new Promise(done => {
    let left = 3;
    const next = () => left-- ? requestAnimationFrame(next) : done();
    next();
})"""
SHOWN = "[...document.querySelectorAll('.lane')].filter(lane => lane.offsetHeight).map(lane => lane.lane.key)"
CHOSEN = "document.querySelector('.lane.chosen')?.lane.key ?? null"


@pytest.fixture
def program() -> str:
    found = find()
    if found is None and os.environ.get("DYN_NEEDS_BROWSER"):
        pytest.fail("there is no Chromium: apt-get install chromium-headless-shell")
    if found is None:
        pytest.skip("NO CHROMIUM: the report is not looked at; apt-get install chromium-headless-shell")
    return found


@asynccontextmanager
async def opened(program: str, folder: Path, seen: History, findings: Any = ()) -> AsyncIterator[Page]:
    """The page of a history in a window of its own. Nothing may go wrong in it, and nothing may leave it."""
    file = folder / "report.html"
    file.write_text(render(seen, findings), encoding="utf-8")
    with trio.fail_after(60):
        async with browse(program, folder / "profile") as page:
            await page.resize(1400, 900)
            await page.open(file.as_uri())
            await page.ask(DRAWN)
            yield page
            assert page.errors == []
            assert page.requests == [file.as_uri()]


async def click(page: Page, selector: str) -> None:
    """As a user does: in the middle of what can be seen of the element."""
    box = await page.ask(f"""(() => {{
        const element = document.querySelector({json.dumps(selector)});
        element.scrollIntoView({{block: "nearest"}});
        const box = element.getBoundingClientRect();
        return {{x: box.x + box.width / 2, y: box.y + box.height / 2}};
    }})()""")
    for kind in ("mousePressed", "mouseReleased"):
        await page.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **box)
    await page.ask(DRAWN)


async def test_a_report_works(program: str, tmp_path: Path) -> None:
    seen, findings = stormy(300)
    async with opened(program, tmp_path, seen, findings) as page:
        assert await page.ask("document.title.startsWith('storm </script>')")
        assert sorted(await page.ask(SHOWN)) == sorted(seen.records)
        await _links(page)
        await _filters(page, len(seen.records))
        await _zooms(page)
        await click(page, ".fault")
        assert "the process ended </script>" in await page.ask("document.getElementById('details').innerText")
        assert await page.ask("document.querySelectorAll('#charts path').length") == 3


async def _links(page: Page) -> None:
    """A finding's link brings its lane into view and tells about it, even if the lane was filtered out."""
    await click(page, "button[data-kind=left]")
    assert await page.ask(SHOWN) == ["gone"]
    for link, key in enumerate(("moved", "failed")):
        await page.ask(f"document.querySelectorAll('#checks a')[{link}].id = 'link-{link}'")
        await click(page, f"#link-{link}")
        assert await page.ask(CHOSEN) == key
        assert await page.ask("""(() => {
            const lane = document.querySelector(".lane.chosen").getBoundingClientRect();
            const top = document.querySelector(".top.axis").getBoundingClientRect().bottom;
            return top <= lane.top && lane.bottom <= innerHeight;
        })()""")
        assert await page.ask("document.querySelectorAll('.lane.chosen .cut').length > 0")
    said = await page.ask("document.getElementById('details').innerText")
    assert "exactly_once 2 rows" in said
    assert "rid-failed" in said


async def _filters(page: Page, everything: int) -> None:
    for kind, keys in (("failed", ["failed"]), ("moved", ["moved"]), ("with findings", ["moved", "failed"])):
        await click(page, f"button[data-kind='{kind}']")
        assert await page.ask(SHOWN) == keys
    await click(page, "button[data-kind=all]")
    await click(page, "#search")
    await page.call("Input.insertText", text="RID-01")
    assert await page.ask(SHOWN) == [f"{number:03d}" for number in range(10, 20)]
    assert await page.ask("document.getElementById('count').textContent") == f"10 of {everything}"
    await page.ask("document.getElementById('search').select()")
    await page.call("Input.insertText", text="")
    await page.call("Input.dispatchKeyEvent", type="keyDown", key="Delete", windowsVirtualKeyCode=46)
    assert len(await page.ask(SHOWN)) == everything


async def _zooms(page: Page) -> None:
    axis = "[...document.querySelectorAll('#axis text')].map(text => parseFloat(text.textContent))"
    await click(page, "#all")
    whole = await page.ask(axis)
    for _ in range(4):
        await click(page, "#in")
    near = await page.ask(axis)
    assert near[-1] - near[0] < (whole[-1] - whole[0]) / 4
    await click(page, "#near")
    assert 0 < len(await page.ask(SHOWN)) < 60
    await click(page, "#near")
    await click(page, "#all")
    assert await page.ask(axis) == whole


@pytest.mark.parametrize("seen", [History(), bare()], ids=["empty", "bare"])
async def test_a_report_without_rows_faults_and_samples_works(program: str, tmp_path: Path, seen: History) -> None:
    async with opened(program, tmp_path, seen) as page:
        assert await page.ask(SHOWN) == list(seen.records)
        assert await page.ask("document.querySelectorAll('.lane path').length") == len(seen.records) // 2

"""`docs/fields.md`: current, complete, and every test that it names is there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fields import SECTIONS, named, page

from dyn_relay.formats.sglang.admission import TABLE
from dyn_relay.formats.sglang.answer import RULES
from dyn_relay.formats.sglang.continuation import BOUND_TO_WORKER, REWRITTEN, REWRITTEN_SAMPLING
from dyn_testkit.worker import fields, schema

ROOT = Path(__file__).parents[2]
CAPTURES = ROOT / "tests" / "contract" / "captures"
#: Rows of the admission table that are about the whole request.
NO_FIELDS = {"batch", "body", "content-type", "content-encoding"}
#: Fields of `meta_info` that only other releases have.
OTHER_RELEASES = {
    *("output_token_sampling_length", "output_token_sampling_logprobs_length"),
    *("spec_accept_token_num", "spec_draft_token_num", "spec_accept_histogram"),
}


def test_it_is_current() -> None:
    assert (ROOT / "docs" / "fields.md").read_text() == page(), "run: python -m tests.fields > docs/fields.md"


def test_every_field_is_in_it_once_and_shown() -> None:
    for section in SECTIONS:
        assert len(set(section.names)) == len(section.names)
        for name in section.names:
            assert section.becomes(name)
            assert section.shown(name)


def test_every_test_that_it_names_is_there() -> None:
    wanted = set(named())
    files = sorted({name.partition("::")[0] for name in wanted})
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-o",
        "addopts=",
        "-p",
        "no:cacheprovider",
        *files,
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True, timeout=300)
    there = set(done.stdout.splitlines())
    there |= {line.partition("[")[0] for line in there}
    assert sorted(wanted - there) == []


def test_the_proxy_handles_no_other_fields() -> None:
    """What the code has a rule for is a field of the contract."""
    top = {row.field for row in TABLE if row.where == "top level"} | {*REWRITTEN, *BOUND_TO_WORKER}
    assert top - NO_FIELDS <= set(fields.REQUEST)
    sampling = {row.field for row in TABLE if row.where == "`sampling_params`"} | {*REWRITTEN_SAMPLING}
    assert sampling <= set(fields.SAMPLING)
    assert set(RULES) - OTHER_RELEASES <= set(fields.META_INFO)


def test_the_mock_worker_reads_no_other_fields() -> None:
    assert set(schema.FIELDS) | {"input_ids"} <= set(fields.REQUEST)


def answers() -> Iterator[dict[str, Any]]:
    """All answers and events that stock was recorded to send."""
    for path in sorted(CAPTURES.glob("*/[su]_*.wire")):
        for found in re.finditer(rb"(?:^|\n)(?:data: )?([{\[].*)", path.read_bytes()):
            try:
                value = json.loads(found[1])
            except ValueError:
                continue
            yield from value if isinstance(value, list) else [value]


def recorded() -> list[tuple[str, str]]:
    names: set[tuple[str, str]] = set()
    for value in answers():
        inside = value["error"] if isinstance(value.get("error"), dict) else {}
        if "meta_info" not in value and "error" not in value:
            inside, value = value, {}
        meta = value.get("meta_info", {})
        names |= {("ANSWER", name) for name in value} | {("ERROR", name) for name in inside}
        names |= {("META_INFO", name) for name in meta}
        names |= {("FINISH_REASON", name) for name in meta.get("finish_reason") or {}}
    return sorted(names)


@pytest.mark.parametrize("kind", ["ANSWER", "META_INFO", "FINISH_REASON", "ERROR"])
def test_no_field_that_was_recorded_is_missing(kind: str) -> None:
    found = {name for place, name in recorded() if place == kind}
    assert found
    assert found <= set(getattr(fields, kind))

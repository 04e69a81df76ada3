"""Formats of other distributions: found, chosen, and blamed by name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from dyn_relay.cli import main
from dyn_relay.config import OPTIONS, Config, ConfigError, load
from dyn_relay.config.__main__ import reference
from dyn_relay.formats import catalog
from dyn_relay.formats.sglang.format import SglangFormat

Distribute = Callable[[str, str], None]


@pytest.fixture
def distribute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Distribute]:
    """Put a distribution of this name, which declares these formats, where Python finds it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in (name for option in OPTIONS for name in option.variables):
        monkeypatch.delenv(name, raising=False)

    def add(name: str, formats: str) -> None:
        info = tmp_path / f"{name}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[{catalog.GROUP}]\n{formats}\n")
        catalog.installed.cache_clear()

    yield add
    catalog.installed.cache_clear()


def write(folder: Path, code: str) -> None:
    (folder / "a_format_of_mine.py").write_text(code)


def test_the_built_in_format_is_an_entry_point_of_ours() -> None:
    [point] = catalog.installed()["sglang"]
    assert point.dist is not None
    assert (point.dist.name, point.load()) == ("dyn-relay", SglangFormat)


def test_a_format_of_another_distribution_is_made_with_the_options(tmp_path: Path, distribute: Distribute) -> None:
    distribute("other", "other = a_format_of_mine:made")
    write(tmp_path, "def made(on_abort, weights, **others): return on_abort, weights.text, others")
    made = catalog.make("other", "resume", "same", tell_recomputed_rows=True, trust_client_bootstrap=True)
    others = {"tells_recomputed": True, "paired": False, "trusts_bootstrap": True}
    assert made == ("resume", "same", others)  # type: ignore[comparison-overlap]
    assert Config(format="other").format == "other"
    assert isinstance(catalog.make("sglang"), SglangFormat)


@pytest.mark.parametrize("source", ["--format", "DYN_GENERATE_FORMAT", "DYN_FORMAT", "relay.toml"])
def test_an_unknown_name_lists_what_is_there(source: str, tmp_path: Path, distribute: Distribute) -> None:
    distribute("other", "another = x:y\nmine = x:y")
    file = tmp_path / "relay.toml"
    file.write_text('format = "nobodys"' if source == "relay.toml" else "")
    flags = {"format": "nobodys"} if source == "--format" else {}
    environ = {source: "nobodys"} if source.startswith("DYN_") else {}
    with pytest.raises(ConfigError) as caught:
        load(flags, environ, str(file))
    where = str(file) if source == "relay.toml" else source
    wanted = f"format: no format is named 'nobodys'; installed are: another, mine, sglang (from {where})"
    assert str(caught.value) == wanted


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (None, "ModuleNotFoundError(\"No module named 'a_format_of_mine'\")"),
        ("import nowhere_at_all", "ModuleNotFoundError(\"No module named 'nowhere_at_all'\")"),
        ("1 / 0", "ZeroDivisionError('division by zero')"),
        ("", "AttributeError("),
        ("made = 1", "a_format_of_mine:made cannot be called"),
    ],
)
def test_a_broken_one_names_its_distribution(
    code: str | None, words: str, tmp_path: Path, distribute: Distribute, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start, and only if it is the chosen one."""
    monkeypatch.delitem(sys.modules, "a_format_of_mine", raising=False)
    distribute("other", "broken = a_format_of_mine:made")
    if code is not None:
        write(tmp_path, code)
    with pytest.raises(ConfigError, match=r"format: 'broken', of the distribution other 1\.2, .*--format") as caught:
        load({"format": "broken"}, {})
    assert words in str(caught.value)
    load({"format": "sglang"}, {})


def test_a_name_that_two_claim_is_refused(distribute: Distribute) -> None:
    """Whoever is installed must not change what a name means."""
    distribute("other", "sglang = x:y")
    with pytest.raises(ConfigError, match=r"claimed by several distributions: dyn-relay [0-9.]+, other 1\.2"):
        Config()


def test_two_names_of_the_variable() -> None:
    """The documented one is enough; both may be set if they agree; a flag is above both."""
    assert load({}, {"DYN_GENERATE_FORMAT": "sglang"}).origins["format"] == "DYN_GENERATE_FORMAT"
    assert load({}, {"DYN_FORMAT": "sglang"}).origins["format"] == "DYN_FORMAT"
    both = {"DYN_FORMAT": "sglang", "DYN_GENERATE_FORMAT": "sglang"}
    assert load({}, both).origins["format"] == "DYN_GENERATE_FORMAT"
    differ = both | {"DYN_FORMAT": "another"}
    with pytest.raises(ConfigError, match="format: DYN_GENERATE_FORMAT and DYN_FORMAT differ"):
        load({}, differ)
    assert load({"format": "sglang"}, differ).origins["format"] == "--format"


def test_help_and_the_page_are_the_same_on_every_machine(distribute: Distribute) -> None:
    runner = CliRunner()
    before = runner.invoke(main, ["serve", "--help"]).output, reference()
    distribute("other", "outlandish = x:y")
    assert (runner.invoke(main, ["serve", "--help"]).output, reference()) == before
    assert "outlandish" not in "".join(before)

"""Formats of other distributions: found, chosen, and blamed by name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest
import structlog
from click.testing import CliRunner

from dyn_relay import app
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
    (folder / "a_format_of_mine.py").write_text(dedent(code))


def test_the_built_in_format_is_an_entry_point_of_ours() -> None:
    [point] = catalog.installed()["sglang"]
    assert point.dist is not None
    assert (point.dist.name, point.load()) == ("dyn-relay", SglangFormat)


def test_a_format_of_another_distribution_is_made_with_the_options(tmp_path: Path, distribute: Distribute) -> None:
    distribute("other", "other = a_format_of_mine:made")
    code = """
        from dyn_relay.formats.sglang.format import SglangFormat
        def made(on_abort, weights, **others):
            found = SglangFormat()
            found.options = on_abort, weights.text, others
            return found
    """
    write(tmp_path, code)
    made = catalog.make("other", "resume", "same", tell_recomputed_rows=True, trust_client_bootstrap=True)
    others = {"tells_recomputed": True, "paired": False, "trusts_bootstrap": True}
    assert made.options == ("resume", "same", others)  # type: ignore[attr-defined]
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
        ("raise SystemExit(3)", "SystemExit(3)"),
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


OURS = "from dyn_relay.formats.sglang.format import SglangFormat as Ours"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("class made: pass", ", cannot be made: TypeError('made() takes no arguments')"),
        ("def made(on_abort, weights, *, tells_recomputed): pass", "unexpected keyword argument 'paired'"),
        ("def made(*a, **k): raise RuntimeError('boom')", ", cannot be made: RuntimeError('boom')"),
        ("def made(*a, **k): raise SystemExit(3)", ", cannot be made: SystemExit(3)"),
        ("def made(*a, **k): raise ValueError('no pairs')", "other 1.2: no pairs"),
        ("def made(*a, **k): return None", "gives None, which is no format: it has no `name`, it has no `paths`"),
        ("class made:\n  def __init__(self, *a, **k): pass", "which is no format: it has no `name`"),
        (f"{OURS}\nclass made(Ours): info_paths = property(lambda self: 1 / 0)", "ZeroDivisionError"),
        (f"{OURS}\nclass made(Ours): paths = ['/generate']", "`paths` is no frozenset"),
        (f"{OURS}\nclass made(Ours): explain = None", "it has no method `explain`"),
        (f"{OURS}\nclass made(Ours): codec = None", "`codec` is no `Codec`"),
        (f"{OURS}\nclass made(Ours): codec = type(Ours.codec)", "`codec` is no `Codec`"),
    ],
)
@pytest.mark.parametrize("command", ["check", "serve"])
def test_one_that_cannot_be_used_is_told_before_anything_listens(
    command: str, code: str, words: str, tmp_path: Path, distribute: Distribute, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By both commands, in the same words, with whose it is and where it was chosen."""
    monkeypatch.delitem(sys.modules, "a_format_of_mine", raising=False)
    distribute("other", "mine = a_format_of_mine:made")
    write(tmp_path, code)
    done = CliRunner().invoke(main, [command, "--format", "mine"])
    assert done.exit_code == 2, done.output
    assert "format: 'mine', of the distribution other 1.2" in done.output
    assert words in done.output
    assert "(from --format)" in done.output


def test_a_check_makes_the_format_with_the_options(
    tmp_path: Path, distribute: Distribute, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "a_format_of_mine", raising=False)
    distribute("other", "mine = a_format_of_mine:made")
    write(
        tmp_path,
        f"{OURS}\ndef made(on_abort, *a, **k):\n  if on_abort == 'resume': raise ValueError('no')\n  return Ours()",
    )
    runner = CliRunner()
    assert runner.invoke(main, ["check", "--format", "mine"]).exit_code == 0
    assert runner.invoke(main, ["check", "--format", "mine", "--on-abort", "resume"]).exit_code == 2


def test_an_exception_may_be_the_formats_fault() -> None:
    with structlog.testing.capture_logs() as lines:
        app._report("mine", KeyError("x"))
        app._report("sglang", KeyError("x"))
    words = "a request failed because of a defect of the proxy"
    assert [line["event"] for line in lines] == [f"{words}, or of the format mine", words]


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

"""The example of a format from outside is a distribution of its own: it installs and passes its tests from a copy."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.process.kit import ENV

EXAMPLE = Path(__file__).parents[2] / "examples" / "sglang_zstd"
#: What builds and runs of the checkout may have left there.
LEFT = shutil.ignore_patterns("__pycache__", ".*", "build", "dist")


def run(*command: object, folder: Path) -> str:
    done = subprocess.run([*map(str, command)], cwd=folder, env=ENV, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the folder, and beside it an environment where it is installed; that sees our packages, no network."""
    folder = tmp_path_factory.mktemp("elsewhere")
    copied = shutil.copytree(EXAMPLE, folder / "copy", ignore=LEFT)
    run(sys.executable, "-m", "venv", "--without-pip", "venv", folder=folder)
    python = folder / "venv" / "bin" / "python"
    ours = sysconfig.get_paths(vars={"base": str(folder / "venv"), "platbase": str(folder / "venv")})["purelib"]
    # `addsitedir` follows the links of editable installations there, which a bare path would not.
    (Path(ours) / "ours.pth").write_text(f"import site; site.addsitedir({sysconfig.get_paths()['purelib']!r})\n")
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check")
    run(*pip, "--no-index", "--no-deps", "--no-build-isolation", copied, folder=folder)
    shutil.rmtree(copied / "src")  # what is imported is what was installed
    return copied


def test_it_passes_its_own_tests(copy: Path) -> None:
    """Codec, laws and the whole proxy; nothing of it is imported from the checkout."""
    python = copy.parent / "venv" / "bin" / "python"
    where = run(python, "-c", "import sglang_zstd; print(sglang_zstd.__file__)", folder=copy)
    assert where.startswith(str(copy.parent))
    out = run(python, "-m", "pytest", "-p", "no:cacheprovider", "-vv", folder=copy)
    for test in ("test_codec.py::test_a_join_is_that_of_the_bytes", "test_laws.py::test_equivalence"):
        assert f"{test} PASSED" in out
    assert not {"SKIPPED", "XFAIL", "FAILED"} & set(out.split())


def test_it_is_chosen_by_its_name(copy: Path) -> None:
    python = copy.parent / "venv" / "bin" / "python"
    code = "from dyn_relay.formats import catalog; print(type(catalog.make('sglang-zstd')).__module__)"
    assert run(python, "-c", code, folder=copy) == "sglang_zstd\n"

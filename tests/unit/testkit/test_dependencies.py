"""`pip install '.[testkit]'` is enough for everything in the testkit."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]
#: Whoever uses the plugin has it.
GIVEN = {"pytest", "dyn_relay", "dyn_testkit"}
#: Packages that are imported under another name than they are installed by.
NAMES = {"pyzmq": "zmq", "protobuf": "google"}


def imported(tree):
    """The packages that a module imports, anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]


def test_what_it_imports_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["testkit"]]
    packages = [re.match(r"[\w-]+", line)[0].replace("-", "_") for line in lines]
    declared = {NAMES.get(package, package) for package in packages}
    trees = [ast.parse(path.read_text()) for path in (ROOT / "testkit").rglob("*.py")]
    needed = {name for tree in trees for name in imported(tree)} - GIVEN - set(sys.stdlib_module_names)
    assert {"h11", "httpx", "trio"} <= needed
    assert needed <= declared, needed - declared

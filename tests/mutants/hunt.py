"""Hunts each mutant with `dyn-chaos simulate`; exits with 1 if one escapes. `hunt.py [NAME ...]`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from mutants import MUTANTS, SIDECARS, Mutant
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
#: Seeds after which a mutant has escaped.
SEEDS = 400


def plant(mutant: Mutant, folder: Path) -> None:
    """A copy of the proxy with the bug in it. Raises `ValueError` if the code has changed under the mutant."""
    shutil.copytree(ROOT / "src" / "dyn_relay", folder / "dyn_relay")
    path = folder / "dyn_relay" / mutant.file
    text = path.read_text()
    if text.count(mutant.before) != 1:
        raise ValueError(f"{mutant.name}: {mutant.file} holds {text.count(mutant.before)} of {mutant.before!r}")
    path.write_text(text.replace(mutant.before, mutant.after))


def hunt(mutant: Mutant) -> tuple[bool, list[str]]:
    """Was it found, and: seed, what was found, the smallest plan, in words."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        folder = Path(name)
        plant(mutant, folder)
        which = [f"--{mutant.scenario}"] if mutant.scenario else []
        command = [Path(sys.executable).with_name("dyn-chaos"), "simulate", *which, "--seeds", SEEDS, "--out", folder]
        run = subprocess.run(
            [str(word) for word in command],
            env={**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "200"},
            capture_output=True,
            text=True,
        )
        seed = re.search(r"seed=(\d+)", run.stdout)
        checks = sorted(set(re.findall(r"^\w\S* (\w+): ", run.stdout, re.MULTILINE)))
        small = re.search(r"^(\d+ requests and \d+ faults)", run.stdout, re.MULTILINE)
        if seed is None or small is None:
            return False, [run.stdout[-500:] + run.stderr[-500:], "", ""]
        return True, [seed[1], ", ".join(checks), small[1]]


def main() -> None:
    """Hunt those that are named, or all."""
    wanted = [mutant for mutant in MUTANTS + SIDECARS if not sys.argv[1:] or mutant.name in sys.argv[1:]]
    table = Table("mutant", "found", "seed", "checks that object", "smallest")
    escaped = 0
    for mutant in wanted:
        found, words = hunt(mutant)
        escaped += not found
        table.add_row(mutant.name, "yes" if found else "[bold red]NO[/]", *words)
        print(f"{mutant.name}: {'found' if found else 'ESCAPED'} {words}", flush=True)
    Console(width=160).print(table)
    sys.exit(escaped > 0)


if __name__ == "__main__":
    main()

"""The parts that all benchmarks share: `--check`, a table of figures beside their targets, one JSON object."""

import argparse
import json
from collections.abc import Mapping
from typing import Any

Targets = Mapping[str, tuple[str, float]]
"""Targets by the name of their figure: `<=` or `>=`, and the number."""


def parser(about: str | None) -> argparse.ArgumentParser:
    """A command line with `--check`; its `--help` begins with the module's docstring."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--check", action="store_true", help="exit 1 where a figure misses its target")
    return made


def report(name: str, figures: Mapping[str, float], targets: Targets, *, check: bool, **more: Any) -> int:
    """Prints the figures and, as its last line, one JSON object with them and with `more`. Returns the exit status: 1
    with `check` where a figure that has a target misses it."""
    missed = []
    for key, value in figures.items():
        kind, target = targets.get(key, ("", 0.0))
        met = not kind or (value <= target if kind == "<=" else value >= target)
        missed += [] if met else [key]
        print(f"{key:36} {value:14,.3f}  {f'{kind} {target:g}' if kind else '':12} {'' if met else 'MISSED'}")
    rounded = {key: round(value, 6) for key, value in figures.items()}
    print(json.dumps({"benchmark": name, "holds": not missed, **rounded, **more}))
    return int(check and bool(missed))

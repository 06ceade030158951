"""What benchmarks share: `--check`, a table of figures beside their targets with one JSON object as the last line, and
real runs of the product."""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Targets = Mapping[str, tuple[str, float]]
"""By the name of a figure: `<=` or `>=`, and the number."""


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


def quickstart(folder: Path, settings: Mapping[str, object]) -> list[dict[str, Any]]:
    """Runs `grpo configs/quickstart` with other `settings` in `folder`, and returns the lines of metrics.jsonl that are
    of training steps. Raises CalledProcessError where it fails, which has said why on standard error."""
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "grpo.cli", "configs/quickstart", "--output_dir", str(folder), *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("time/step_s")]

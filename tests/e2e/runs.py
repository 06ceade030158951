"""`grpo` as its user runs it, and what a run's folder holds."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.grpo import run_folder
from tests.support import END_S

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(sys.executable).parent


@dataclass(frozen=True, slots=True)
class Run:
    """A run's folder, whether the run goes on or has ended."""

    folder: Path

    @property
    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return summary

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Lines of `metrics.jsonl`; one that is being written is left out."""
        if not (file := self.folder / "metrics.jsonl").exists():
            return []
        lines = file.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Those of training steps; the others are of evaluations."""
        return [line for line in self.metrics if "reward/mean" in line]

    @property
    def rewards(self) -> list[float]:
        """The mean of each step."""
        return [line["reward/mean"] for line in self.steps]

    @property
    def batch_size(self) -> int:
        settings = json.loads((self.folder / "run.json").read_text())["programs"]["orch"]["settings"]
        return int(settings["batch_size"])

    def by_step(self, key: str) -> dict[int, float]:
        """A metric of each line that has it."""
        return {int(line["progress/step"]): line[key] for line in self.metrics if key in line}


def grpo(
    *words: object, cwd: Path = ROOT, program: Path = PROGRAMS / "grpo", variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs the command to its end."""
    command, environment = [program, *map(str, words)], os.environ | dict(variables or {})
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=END_S)


def done(*words: object, **how: Any) -> str:
    """What the command prints; it must come to a good end."""
    ended = grpo(*words, **how)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def told(*words: str | Path) -> str:
    """What the command prints in this process, which has the imports already; it must come to a good end."""
    ended = run_folder.grpo(*words)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def trained(preset: str, folder: Path, *words: object, **how: Any) -> Run:
    """A finished run of the preset."""
    done(preset, "--output_dir", folder, *words, **how)
    return Run(folder)

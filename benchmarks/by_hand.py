"""Three programs by hand beside `grpo`, which divides the cores among them: `python -m benchmarks.by_hand [--check]`.

The quickstart, in turns; of each run the median of a step's seconds, and of every turn the ratio of both.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from grpo.transport.ports import free_port

from benchmarks.report import parser, report

TARGETS = {"ratio": ("<=", 1.2)}
WARM_UP = 2
"""First steps that are not counted."""
END_S = 900
NAMES = ("time/step_s", "time/train_s", "time/generate_s")


def medians(run: Path) -> dict[str, float]:
    """Seconds of a run's steps."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if NAMES[0] in row][WARM_UP:]
    return {name: statistics.median(row[name] for row in rows if name in row) for name in NAMES}


def environment() -> dict[str, str]:
    """Returns the environment variables of a program that a person starts."""
    return {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}


def by_grpo(run: Path, steps: int) -> None:
    """One command."""
    words = ["quickstart", "--output_dir", str(run), "--max_steps", str(steps), "--orch.eval.num_examples", "0"]
    with (run.parent / f"{run.name}.log").open("wb") as log:
        command = [sys.executable, "-m", "grpo.cli", *words]
        subprocess.run(command, stdout=log, stderr=log, check=True, timeout=END_S, env=environment())


def by_hand(run: Path, steps: int) -> None:
    """Three commands, with what docs/runs.md says of them; nobody divides the cores."""
    common, port = ["quickstart", "--output_dir", str(run)], str(free_port())
    words = {
        "infer": ["--port", port],
        "trainer": ["--max_steps", str(steps)],
        "orchestrator": ["--max_steps", str(steps), "--eval.num_examples", "0"],
    }
    words["orchestrator"] += ["--client.base_url", f"http://127.0.0.1:{port}/v1"]
    started = []
    try:
        for name, own in words.items():
            with (run.parent / f"{run.name}.{name}.log").open("wb") as log:
                command = [sys.executable, "-m", f"{name}.cli", *common, *own]
                started.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment()))
        for process in started[1:]:
            if process.wait(END_S):
                raise SystemExit(f"a program has ended with {process.returncode}; see {run.parent}")
    finally:
        for process in started:
            process.terminate()
            process.wait(60)


def main() -> int:
    """Returns the exit status."""
    line = parser(__doc__)
    line.add_argument("--steps", type=int, default=25)
    line.add_argument("--turns", type=int, default=3)
    options = line.parse_args()
    ratios = []
    with tempfile.TemporaryDirectory(prefix="by_hand_", ignore_cleanup_errors=True) as folder:
        for turn in range(options.turns):
            found = []
            for how in (by_grpo, by_hand):
                run = Path(folder) / f"{how.__name__}_{turn}"
                how(run, options.steps)
                found.append(medians(run))
                seconds = ", ".join(f"{name} {value:.3f}" for name, value in found[-1].items())
                print(f"{how.__name__}: {seconds} (load {os.getloadavg()[0]:.1f})", flush=True)
            ratios.append(found[1][NAMES[0]] / found[0][NAMES[0]])
    figures = {"ratio": statistics.median(ratios)}
    return report("by_hand", figures, TARGETS, check=options.check, ratios=[round(one, 2) for one in ratios])


if __name__ == "__main__":
    raise SystemExit(main())

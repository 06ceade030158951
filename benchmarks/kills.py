"""`kill -9` of the orchestrator at random moments of a run, and what becomes of its rollouts.

    python -m benchmarks.kills [--kills 50] [--check]

Runs `grpo configs/quickstart` with the real server and the real trainer, kills the orchestrator at a random moment
after start-up, goes on with `--resume_step -1`, and so on, until the run is finished. Then takes the ledger apart.
Claims: every rollout that was issued is trained in one step or dropped with its reason; none is trained twice; the
prompts that were trained are those, and as often, of a run that nobody interrupts.
"""

import argparse
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from orchestrator.buffer import Buffer
from orchestrator.envs.registry import make_environment

PRESET = "configs/quickstart"
STEPS_A_KILL = 2


def grpo(folder: Path, num_steps: int, *, resume: bool) -> "subprocess.Popen[str]":
    """A start of the run."""
    command = [sys.executable, "-m", "grpo.cli", PRESET, "--output_dir", str(folder), "--max_steps", str(num_steps)]
    command += ["--orch.eval.num_examples", "0", "--train.ckpt.interval", "5", "--train.ckpt.keep_last", "2"]
    command += ["--restarts", "0"]  # so that all programs end with it
    command += ["--resume_step", "-1"] if resume else []
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def status(folder: Path) -> dict[str, Any]:
    """What the orchestrator says of itself; nothing before it has joined."""
    try:
        fields: dict[str, Any] = json.loads((folder / "status" / "orch.json").read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return fields


def kill_one(folder: Path, num_steps: int, draw: random.Random, *, resume: bool) -> str:
    """Starts, kills the orchestrator at a random moment, and waits until all programs have ended. What it was doing."""
    before = status(folder).get("pid")
    process = grpo(folder, num_steps, resume=resume)
    since_s, first = time.monotonic(), None
    step_goal, delay_s = draw.randint(0, 3), draw.uniform(0.0, 0.8)
    while True:
        now = status(folder)
        if now.get("step") is not None and now["pid"] != before:
            first = now["step"] if first is None else first
            if now["step"] >= first + step_goal:
                break
        if process.poll() is not None:
            raise SystemExit(f"grpo ended by itself: {process.communicate()[1][-2000:]}")
        if time.monotonic() - since_s > 300:
            raise SystemExit("the orchestrator did not come to its step")
        time.sleep(0.01)
    time.sleep(delay_s)
    now = status(folder) or now
    try:
        os.kill(now["pid"], signal.SIGKILL)
    except ProcessLookupError:
        raise SystemExit(f"the orchestrator has ended by itself: {process.communicate()[1][-4000:]}") from None
    process.communicate(timeout=120)
    return f"{now['state']} in step {now['step']}"


def expected_examples(folder: Path, num: int) -> list[int]:
    """The examples of the first `num` groups of a run that nobody interrupts."""
    settings = json.loads((folder / "run.json").read_bytes())["programs"]["orch"]["settings"]
    [env] = settings["env"]
    keys = [str(example["prompt"]) for example in make_environment(env["id"], env["args"]).dataset("train")]
    buffer = Buffer({env["id"]: keys}, seed=settings["seed"])
    return [buffer.issue(group).index for group in range(num)]


def figures(folder: Path) -> dict[str, Any]:
    """From the ledger alone."""
    with sqlite3.connect(folder / "ledger.sqlite") as database:
        rows = database.execute("SELECT id, group_id, example, state, reason, step FROM rollouts").fetchall()
    states = Counter(row[3] if row[3] != "dropped" else f"dropped: {row[4]}" for row in rows)
    trained = {row[1]: row[2] for row in rows if row[3] == "trained"}
    by_step = Counter(row[5] for row in rows if row[3] == "trained")
    return {
        "issued": len(rows),
        "fates": dict(states),
        "steps_trained": len(by_step),
        "rollouts_a_step": sorted(set(by_step.values())),
        "same_prompts": Counter(trained.values()) == Counter(expected_examples(folder, len(trained))),
    }


def main() -> None:
    """Prints a table and, last, one JSON object; with --check, exits with 1 on a miss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="exit with 1 unless the claims hold")
    options = parser.parse_args()
    draw, num_steps = random.Random(options.seed), STEPS_A_KILL * options.kills + 5
    with tempfile.TemporaryDirectory() as parent:
        folder, since_s = Path(parent) / "run", time.monotonic()
        for number in range(options.kills):
            doing = kill_one(folder, num_steps, draw, resume=number > 0)
            print(f"kill {number + 1:3d}: {doing}", flush=True)
        last = grpo(folder, num_steps, resume=options.kills > 0)
        _, errors = last.communicate(timeout=1200)
        if last.returncode:
            raise SystemExit(errors[-2000:])
        found = figures(folder)
        summary = json.loads((folder / "summary.json").read_bytes())
    for name, value in found.items():
        print(f"{name:<20}{value}")
    holds = (
        found["same_prompts"]
        and found["steps_trained"] == summary["steps"] == num_steps
        and len(found["rollouts_a_step"]) == 1
        and set(found["fates"]) <= {"trained", "dropped: restarted"}
    )
    result = {"benchmark": "kills", "holds": holds, "kills": options.kills, "steps": num_steps, **found}
    print(json.dumps(result | {"seconds": round(time.monotonic() - since_s, 1)}))
    if options.check and not holds:
        sys.exit(1)


if __name__ == "__main__":
    main()

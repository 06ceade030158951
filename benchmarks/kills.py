"""`kill -9` at random moments of real runs, and what becomes of them.

    python -m benchmarks.kills [--kills 60] [--seed 0] [--same] [--check]

Runs `grpo configs/quickstart`, by turns over the filesystem and over ZeroMQ, and kills at random moments the server,
its engine, the trainer, the orchestrator, an environment's process and the launcher. What is killed below the launcher,
it starts again; after a kill of the launcher itself the same command is given again.

Claims: the run comes to its last step; every rollout that was issued has one fate and each step its own rollouts
(`grpo prove`); no process and nothing in /dev/shm is left, after a launcher was killed and at the end.
With `--same`, one more run of one sampling order is compared with one that nobody interrupts, bit for bit.
"""

import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from benchmarks.report import parser, report
from tests.chaos.launched import Launched, shared
from tests.e2e.runs import Run, done
from tests.support import options, until

TARGETS = ("infer", "engine", "train", "orch", "worker", "launcher")
RECOVERING = {"train.ckpt.interval": 3, "restarts": 100}
ONE_ORDER = {
    "orch.max_async_level": 0,
    "orch.max_off_policy_steps": 0,
    "orch.sampling.seed": 7,
    "infer.vllm": '{"max_num_seqs": 1}',
    "orch.batch_size": 16,
    "orch.rollouts_per_example": 8,
    "max_steps": 12,
}
"""Sequences are sampled one by one, since the bits of a log-probability may depend on what is sampled beside it."""
SAME = {"orch": 1, "train": 1, "worker": 1, "engine": 1, "launcher": 0}
"""What is killed of the run that is compared, and how many steps after the kill before it. The launcher is killed while
it starts the server again, whose engine was killed."""
KILLS_A_RUN = 10


def killed_run(
    folder: Path,
    settings: Mapping[str, object],
    targets: Iterable[tuple[str, int]],
    draw: random.Random,
    *,
    within_s: float,
) -> Iterator[str]:
    """One run with kills of `targets`, each so many steps after the one before and at a moment of the `within_s` that
    follow; yields what was killed, and nothing for those that the run's end came before. Raises AssertionError where a
    claim does not hold."""
    words, run, before = options({**RECOVERING, **settings}), Run(folder), shared()
    launched = Launched(folder, *words)
    try:
        for name, num_steps in targets:
            wait_for_step(launched, run, last_step(run) + num_steps, name)
            time.sleep(draw.uniform(0.0, within_s))
            if (process := launched.program(name)) is None:
                continue
            yield f"{name} after step {last_step(run)}"
            process.kill()
            if name == "launcher":
                launched.end()
                launched = Launched(folder, *words)
        code, errors = launched.end()
        assert code == 0, errors
        done("prove", folder)
        until(lambda: not shared() - before, log=lambda: str(shared() - before))
    finally:
        launched.close()


def wait_for_step(launched: Launched, run: Run, goal: int, name: str) -> None:
    """Returns when the run has come to this step and has such a process, or has ended."""
    until(
        lambda: launched.launcher.poll() is not None or (last_step(run) >= goal and launched.program(name) is not None)
    )


def last_step(run: Run) -> int:
    """The newest step that has its metrics."""
    return max((int(line["progress/step"]) for line in run.steps), default=0)


def check_same(parent: Path, draw: random.Random) -> None:
    """A run with kills over ZeroMQ comes to the policy of one without, over the filesystem. The server is killed by its
    engine, with which it ends. Raises AssertionError."""
    policies = []
    for transport, targets in (("zmq", SAME), ("filesystem", {})):
        folder, settings = parent / transport, ONE_ORDER | {"rollout_transport.type": transport}
        killed = [*killed_run(folder, settings, targets.items(), draw, within_s=0.5)]
        print(f"compared, {transport}: {', '.join(killed) or 'nothing killed'}", flush=True)
        newest = folder / f"broadcasts/step_{ONE_ORDER['max_steps']:06}/adapter_model.safetensors"
        policies.append(newest.read_bytes())
    assert policies[0] == policies[1], "the run with kills came to another policy"


def main() -> int:
    """The command."""
    command = parser(__doc__)
    command.add_argument("--kills", type=int, default=60)
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--same", action="store_true", help="compare the policies of a killed and of a whole run")
    given = command.parse_args()
    draw, killed, since_s, broken = random.Random(given.seed), Counter[str](), time.monotonic(), 0
    with tempfile.TemporaryDirectory() as parent:
        try:
            number = 0
            while (missing := given.kills - killed.total()) > 0:
                names = draw.choices(TARGETS, k=min(KILLS_A_RUN, missing))
                targets = [(name, draw.choice((0, 0, 1, 2))) for name in names]
                transport = ("filesystem", "zmq")[number % 2]
                settings = {"max_steps": 2 * len(targets) + 4, "rollout_transport.type": transport}
                for doing in killed_run(Path(parent, f"run{number}"), settings, targets, draw, within_s=4.0):
                    killed[doing.partition(" ")[0]] += 1
                    print(f"kill {killed.total():3d}, {transport}: {doing}", flush=True)
                number += 1
            if given.same:
                check_same(Path(parent), draw)
        except AssertionError as failure:
            print(failure, file=sys.stderr)
            broken = 1
    figures = {f"kills of {name}": float(killed[name]) for name in TARGETS} | {"broken claims": float(broken)}
    figures["seconds"] = time.monotonic() - since_s
    return report("kills", figures, {"broken claims": ("<=", 0.0)}, check=given.check)


if __name__ == "__main__":
    raise SystemExit(main())

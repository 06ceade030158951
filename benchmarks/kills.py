"""`kill -9` at random moments of real runs, and what becomes of them.

    python -m benchmarks.kills [--kills 60] [--seed 0] [--check]

Runs `grpo configs/quickstart`, by turns over the filesystem and over ZeroMQ, and kills at random moments the server,
its engine, the trainer, the orchestrator, an environment's process and the launcher. What is killed below the launcher,
it starts again; after a kill of the launcher itself the same command is given again.

Claims: the run comes to its last step; every rollout that was issued has one fate and each step its own rollouts
(`grpo ledger --check`); no process and nothing in /dev/shm is left, after a launcher was killed and at the end.
With `--same`, one more run of one sampling order is compared with one that nobody interrupts, bit for bit.
"""

import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.report import parser, report

ROOT = Path(__file__).parent.parent
MARK = "GRPO_KILLS"
TARGETS = ("infer", "engine", "train", "orch", "worker", "launcher")
MODULES = {"infer": "infer.cli", "train": "trainer.cli", "orch": "orchestrator.cli"}
SMALL = {
    "--orch.batch_size": "32",
    "--orch.sampling.max_tokens": "4",
    "--orch.eval.num_examples": "8",
    "--orch.eval.eval_base_model": "false",
    "--train.ckpt.interval": "3",
    "--restarts": "100",
}
ONE_ORDER = {
    "--orch.max_async_level": "0",
    "--orch.max_off_policy_steps": "0",
    "--orch.sampling.seed": "7",
    "--infer.vllm": '{"max_num_seqs": 1}',
    "--orch.batch_size": "16",
    "--orch.rollouts_per_example": "8",
}
"""Sequences are sampled one by one, since the bits of a log-probability may depend on what is sampled beside it."""
KILLS_A_RUN = 10
LEFT_S, STEP_S, END_S = 120.0, 500.0, 500.0


@dataclass
class Run:
    """A run's folder, and the launcher that works in it now."""

    folder: Path
    options: dict[str, str]
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    launcher: "subprocess.Popen[bytes] | None" = None
    seen: set[psutil.Process] = field(default_factory=set)

    def start(self) -> None:
        """The same command each time."""
        command = [sys.executable, "-m", "grpo.cli", "configs/quickstart", "--output_dir", str(self.folder)]
        with self.folder.with_suffix(".log").open("ab") as log:
            self.launcher = subprocess.Popen(
                [*command, *(word for pair in (SMALL | self.options).items() for word in pair)],
                cwd=ROOT,
                env=os.environ | {MARK: self.mark},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def processes(self) -> list[psutil.Process]:
        """Whatever lives and was started by this run, wherever it has got to. An engine gives itself a name, over its
        environment: it is known by those that were seen below the others."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark:
                    self.seen.update((process, *process.children(recursive=True)))
        return [process for process in self.seen if _lives(process)]

    def target(self, name: str) -> psutil.Process | None:
        """The process of this kind, if there is one now."""
        for process in self.processes():
            with suppress(psutil.Error):
                words = process.cmdline()
                if name == "launcher" and process.pid == (self.launcher and self.launcher.pid):
                    return process
                if name == "engine" and is_engine(process):
                    return process
                if name in MODULES and words[1:4] == ["-P", "-m", MODULES[name]] and not is_engine(process):
                    return process
                if name == "worker" and any("orchestrator.workers" in word for word in words):
                    return process
        return None

    def step(self) -> int:
        """The newest step that has a line in metrics.jsonl."""
        with suppress(OSError):
            lines = (self.folder / "metrics.jsonl").read_text().splitlines(keepends=True)
            whole = [line for line in lines if "reward/mean" in line and line.endswith("\n")]
            steps = [json.loads(line)["progress/step"] for line in whole]
            return int(max(steps, default=0))
        return 0

    def log(self) -> str:
        """The end of what the launchers printed."""
        return self.folder.with_suffix(".log").read_text(errors="replace")[-3000:]

    def until_nothing_is_left(self) -> None:
        """Raises `SystemExit` where something is."""
        deadline = time.monotonic() + LEFT_S
        while left := self.processes():
            if time.monotonic() > deadline:
                raise SystemExit(f"left behind: {left}\n{self.log()}")
            time.sleep(0.1)

    def end(self) -> None:
        """Kills what there is."""
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()


def is_engine(process: psutil.Process) -> bool:
    """Whether it is the engine of a server: its child, which is called as vLLM does, or like the server itself where it
    was forked from that."""
    server, words = process.parent(), process.cmdline()
    if server is None or server.cmdline()[1:4] != ["-P", "-m", MODULES["infer"]]:
        return False
    return words == server.cmdline() or "EngineCore" in " ".join(words)


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def shared() -> set[str]:
    """This user's files in /dev/shm that no process has in its memory."""
    mapped = set[str]()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            mapped.update(re.findall(r" /dev/shm/(\S+)", maps.read_text()))
    return {file.name for file in Path("/dev/shm").iterdir()} - mapped


def kill_one(run: Run, name: str, draw: random.Random) -> str | None:
    """Kills one of that kind when the run has come some steps further, or at once where it is just starting. What was
    killed, and after which step; None where the run had come to its end before."""
    assert run.launcher is not None
    goal, delay_s = run.step() + draw.choice((0, 0, 1, 2)), draw.uniform(0.0, 4.0)
    deadline = time.monotonic() + STEP_S
    while run.step() < goal or run.target(name) is None:
        if run.launcher.poll() is not None:
            return None
        if time.monotonic() > deadline:
            raise SystemExit(f"the run did not come to step {goal} with its {name}\n{run.log()}")
        time.sleep(0.05)
    time.sleep(delay_s)
    if (process := run.target(name)) is None:
        return None
    run.processes()
    doing = f"{name} after step {run.step()}"
    process.kill()
    if name == "launcher":
        run.launcher.wait()
        run.until_nothing_is_left()
        run.start()
    return doing


def killed_run(parent: Path, options: dict[str, str], targets: list[str], draw: random.Random) -> Iterator[str]:
    """One run with these kills; yields what was killed. Raises `SystemExit` where a claim does not hold."""
    run, before = Run(folder=parent / uuid.uuid4().hex[:8], options=options), shared()
    try:
        run.start()
        assert run.launcher is not None
        for name in targets:
            if (doing := kill_one(run, name, draw)) is not None:
                yield doing
        if run.launcher.wait(END_S) != 0:
            raise SystemExit(f"the run failed: {run.log()}")
        run.until_nothing_is_left()
        check = [sys.executable, "-m", "grpo.cli", "ledger", str(run.folder), "--check"]
        done = subprocess.run(check, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"the ledger does not hold: {done.stdout}{done.stderr}")
        deadline = time.monotonic() + LEFT_S
        while left := shared() - before:
            if time.monotonic() > deadline:
                raise SystemExit(f"left in /dev/shm: {left}")
            time.sleep(0.2)
    finally:
        run.end()


def last_policy(folder: Path, step: int) -> bytes:
    """The adapter after this step."""
    return (folder / "broadcasts" / f"step_{step:06d}" / "adapter_model.safetensors").read_bytes()


def same_policy(parent: Path, num_steps: int, targets: list[str], draw: random.Random) -> bool:
    """Whether a run with kills over ZeroMQ comes to the policy of one without, over the filesystem."""
    options = ONE_ORDER | {"--max_steps": str(num_steps)}
    folders = []
    for name, chosen, transport in (("killed", targets, "zmq"), ("whole", [], "filesystem")):
        (parent / name).mkdir()
        list(killed_run(parent / name, options | {"--rollout_transport.type": transport}, chosen, draw))
        folders += [path for path in (parent / name).iterdir() if path.is_dir()]
    one, other = (last_policy(folder, num_steps) for folder in folders)
    return one == other


def main() -> int:
    """The command."""
    command = parser(__doc__)
    command.add_argument("--kills", type=int, default=60)
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--same", action="store_true", help="compare the policies of a killed and of a whole run")
    options = command.parse_args()
    draw, killed, since_s, broken = random.Random(options.seed), Counter[str](), time.monotonic(), 0
    with tempfile.TemporaryDirectory() as parent:
        try:
            number = 0
            while (missing := options.kills - killed.total()) > 0:
                transport = ("filesystem", "zmq")[number % 2]
                targets = draw.choices(TARGETS, k=min(KILLS_A_RUN, missing))
                settings = {"--max_steps": str(2 * len(targets) + 4), "--rollout_transport.type": transport}
                for doing in killed_run(Path(parent), settings, targets, draw):
                    killed[doing.partition(" ")[0]] += 1
                    print(f"kill {killed.total():3d}, {transport}: {doing}", flush=True)
                number += 1
            if options.same:
                last = ["orch", "train", "launcher", "engine", "infer", "worker"]
                broken = int(not same_policy(Path(parent), 6, last, draw))
        except SystemExit as failure:
            print(failure, file=sys.stderr)
            broken = 1
    figures = {f"kills of {name}": float(killed[name]) for name in TARGETS} | {"broken claims": float(broken)}
    figures["seconds"] = time.monotonic() - since_s
    return report("kills", figures, {"broken claims": ("<=", 0.0)}, check=options.check)


if __name__ == "__main__":
    raise SystemExit(main())

"""The commands of docs/checkpoints.md, as they stand there."""

import re
import shlex
import signal
import time
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from tests.trainer.forked import Forked, forked
from tests.trainer.models import tiny_batch
from transport.batches.filesystem import BatchSender
from transport.run import RunFolder, current_run_id
from transport.status import read_status

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "checkpoints.md").read_text()


def commands(folder: Path) -> list[list[str]]:
    """What the page gives to grpo-train in each of its commands, with their output below `folder`."""
    lines = [line for block in re.findall(r"^```sh\n(.*?)^```", PAGE, flags=re.M | re.S) for line in block.splitlines()]
    found = [[word.replace("outputs/", f"{folder}/") for word in shlex.split(line)] for line in lines]
    assert all(words[0] == "grpo-train" for words in found)
    return [words[1:] for words in found]


def until(reached: Callable[[], bool], trainer: Forked) -> None:
    deadline = time.monotonic() + 120
    while not reached():
        assert trainer.process.is_alive(), trainer.stderr
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_same_command_goes_on_and_a_step_that_is_not_finite_is_kept(tmp_path: Path) -> None:
    [keep] = commands(tmp_path)
    output = tmp_path / "long"
    with forked(tmp_path / "kept", keep) as trainer:
        until(lambda: current_run_id(output) is not None and (output / "batches").is_dir(), trainer)
        run = RunFolder(path=output, run_id=str(current_run_id(output)))
        with BatchSender(run.batches, run_id=run.run_id, hwm=20) as sender:
            for step in range(1, 12):
                sender.send(step, [[replace(tiny_batch((6, 9), seed=step), run_id=run.run_id, step=step)]])
            until(lambda: (read_status(run.status / "train.json") or {}).get("step") == 12, trainer)
            until((output / "checkpoints" / "step_000010" / "trainer" / "STABLE").exists, trainer)
            trainer.process.kill()
            assert trainer.end() == -signal.SIGKILL
            bad = tiny_batch((6, 9), seed=12)
            bad.temperatures[9] = 1e-40  # logits over it are infinite
            sender.send(12, [[replace(bad, run_id=run.run_id, step=12)]])
            with forked(tmp_path / "resumed", keep) as resumed:
                assert resumed.end() == 1
    assert (output / "failed" / "step_000012" / "rank_0.msgpack").exists()

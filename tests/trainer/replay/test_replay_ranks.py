"""A step of two ranks that is not finite by the second one's batch: every rank names the command that finds it."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.trainer.checkpoints.test_resuming_ranks import ARGUMENTS
from tests.trainer.forked import forked_ranks
from tests.trainer.models import tiny_batch
from tests.trainer.replay.test_replay import spoiled
from trainer.replay.replay import NOT_FINITE, replay
from transport.batches.filesystem import FilesystemBatchSender
from transport.run import found_run


def test_the_command_that_the_error_names_finds_the_rank_at_fault(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = found_run(tmp_path / "run")
    first, second = tiny_batch((6, 9), seed=1), spoiled(tiny_batch((4, 8), seed=2), 4 + 5)
    number = int(first.loss_mask.sum() + second.loss_mask.sum())
    with FilesystemBatchSender(run.batches, run_id=run.run_id) as sender:
        place = {"run_id": run.run_id, "step": 1, "num_loss_tokens": number}
        sender.send(1, [[replace(batch, rank=rank, **place)] for rank, batch in enumerate((first, second))])
        arguments = [*ARGUMENTS, "--model", str(tiny_model), "--output_dir", str(run.path), "--run_id", run.run_id]
        with forked_ranks(tmp_path / "logs", arguments) as ranks:
            assert [rank.end() for rank in ranks] == [1, 1]
    folder = run.path / "failed" / "step_000001"
    assert all(f"To see where it comes from: grpo-train --replay {folder}\n" in rank.stderr for rank in ranks)
    assert {path.name for path in folder.iterdir()} == {"rank_0.msgpack", "rank_1.msgpack", "REPLAY.txt"}
    assert replay(folder) == NOT_FINITE
    ok, fault = capsys.readouterr().out.split("rank 1, from the checkpoint of step 0\n")
    assert ok.splitlines()[1].startswith("finite now: loss ")
    assert fault.startswith("micro-batch 0, sample 1 (rollout 2/1), policy: token 5 of 8 ")

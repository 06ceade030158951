"""A step that is not finite: what is kept of it, and what its replay finds."""

import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from configs.common import make_parser
from configs.train import TrainSettings
from tests.trainer.bench import UNMASKED, Bench, settings_for
from tests.trainer.forked import forked
from tests.trainer.models import hint_for, pair_of, tiny_batch, tiny_policy
from trainer.checkpoints.files import CheckpointStore
from trainer.checkpoints.resuming import checkpoint_store
from trainer.errors import NonFiniteError, ResumeError
from trainer.loop import run
from trainer.objective import Objective
from trainer.parallel import ONE
from trainer.replay.diagnosis import Diagnosis, Finding
from trainer.replay.replay import FINITE, NOT_FINITE, replay
from transport.batches.filesystem import FilesystemBatchSender
from transport.codec import decode, encode
from transport.errors import StorageError
from transport.records import MicroBatch
from transport.run import RunFolder, found_run

HUGE = 3e38
"""Finite, and a little below float32's largest number."""


def spoiled(batch: MicroBatch, token: int, advantage: float = HUGE) -> MicroBatch:
    """One token has an advantage with which the importance ratio makes an infinite coefficient."""
    advantages = batch.per_token(batch.advantages).copy()
    advantages[token] = advantage
    logprobs = batch.inference_logprobs.copy()
    logprobs[token] = -30.0  # far less likely than under the trainer's policy
    return replace(batch, advantages=advantages, inference_logprobs=logprobs)


def two_micro_batches(step: int, run_id: str = "run") -> list[MicroBatch]:
    first, second = tiny_batch((6, 9), seed=step), tiny_batch((5, 7, 4), seed=step + 100)
    number = int(first.loss_mask.sum() + second.loss_mask.sum())
    place = {"run_id": run_id, "step": step, "num_micro_batches": 2, "num_loss_tokens": number}
    return [replace(first, **place), replace(second, index=1, **place)]


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[RunFolder]:
    """A run whose step 3 was refused: token 4 of sample 1 (rollout 103/1) in micro-batch 1."""
    folder = found_run(tmp_path_factory.mktemp("failed") / "run")
    with FilesystemBatchSender(folder.batches, run_id=folder.run_id) as sender:
        for step in (1, 2, 3):
            first, second = two_micro_batches(step, folder.run_id)
            sender.send(step, [[first, spoiled(second, 5 + 4) if step == 3 else second]])
        options = {"output_dir": str(folder.path), "run_id": folder.run_id, "optimizer": "adamw", "num_threads": 1}
        with pytest.raises(NonFiniteError, match=r"step 3 is not finite: the loss is .*Version 2 is the last good one"):
            run(settings_for(tiny_model, loss=UNMASKED, **options), tiny_model)
        yield folder


def failed_file(folder: RunFolder) -> Path:
    return folder.path / "failed" / "step_000003" / "rank_0.msgpack"


def test_the_last_good_state_and_the_batch_are_kept_though_no_checkpoint_was_asked_for(failed: RunFolder) -> None:
    store = checkpoint_store(failed.path, failed.run_id)
    assert store.steps() == [2]
    assert [batch.step for batch in decode(failed_file(failed).read_bytes())] == [3, 3]
    assert (failed.broadcasts / "step_000002" / "STABLE").exists()
    assert not (failed.broadcasts / "step_000003").exists()


def test_a_replay_names_micro_batch_sample_token_and_term(
    failed: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay(failed_file(failed)) == NOT_FINITE
    head, finding, summary = capsys.readouterr().out.splitlines()
    assert head == f"step 3 of run {failed.run_id}, rank 0, from the checkpoint of step 2"
    token = decode(failed_file(failed).read_bytes())[1].token_ids[5 + 4]
    start = f"micro-batch 1, sample 1 (rollout 103/1), policy: token 4 of 7 (id {token}): its coefficient is inf"
    assert finding.startswith(start)
    assert "advantage 3e+38, log-ratio " in finding
    assert summary.startswith("not finite: loss ")


def test_a_replay_of_a_batch_that_is_finite_says_so(
    failed: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # the batch that step 3 should have been, in the place where the filesystem channel has it
    sender = FilesystemBatchSender(failed.batches, run_id=failed.run_id)
    sender.send(3, [two_micro_batches(3, failed.run_id)])
    sender.close()
    assert replay(failed.batches / "step_000003" / "rank_0.msgpack") == FINITE
    assert capsys.readouterr().out.splitlines()[-1].startswith("finite now: loss ")


def test_a_replay_changes_nothing_in_the_run(failed: RunFolder) -> None:
    def state() -> dict[str, tuple[int, int]]:
        files = (path for path in failed.path.rglob("*") if path.is_file())
        return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in files}

    before = state()
    replay(failed_file(failed))
    assert state() == before


def test_the_folder_of_a_step_is_replayed_as_its_file_is(failed: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay(failed_file(failed)) == NOT_FINITE
    of_file = capsys.readouterr().out
    assert replay(failed_file(failed).parent) == NOT_FINITE
    assert capsys.readouterr().out == of_file


def test_of_several_ranks_each_is_replayed_and_the_one_at_fault_is_found(
    failed: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = failed.path / "elsewhere" / "step_000003"
    folder.mkdir(parents=True)
    first, second = two_micro_batches(3, failed.run_id)
    place = {"num_micro_batches": 1, "index": 0}
    (folder / "rank_0.msgpack").write_bytes(encode([replace(first, **place)]))
    for rank in (2, 10):  # in the order of their numbers, which is not that of their names
        (folder / f"rank_{rank}.msgpack").write_bytes(encode([replace(second, rank=rank, **place)]))
    (folder / "rank_x.msgpack").write_bytes(b"not a rank's")
    assert replay(folder) == FINITE
    told = capsys.readouterr().out.splitlines()
    heads = [f"step 3 of run {failed.run_id}, rank {rank}, from the checkpoint of step 2" for rank in (0, 2, 10)]
    assert told[::2] == [*heads, "all ranks together, in one process"]
    assert all(line.startswith("finite now: loss ") for line in told[1::2])
    (folder / "rank_2.msgpack").write_bytes(encode([replace(spoiled(second, 9), rank=2, **place)]))
    assert replay(folder) == NOT_FINITE
    told = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in told] == [
        *(heads[0], "finite now"),
        *(heads[1], "micro-batch 0, sample 1 (rollout 103/1), policy", "not finite"),
        *(heads[2], "finite now"),
    ]


def test_a_folder_without_a_ranks_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ResumeError, match=r"--replay .*: has no rank_0\.msgpack; give a step's folder"):
        replay(tmp_path)


def test_the_error_and_its_command_are_kept_beside_the_batch(failed: RunFolder) -> None:
    folder = failed_file(failed).parent
    assert {path.name for path in folder.iterdir()} == {"rank_0.msgpack", "REPLAY.txt"}
    why, _, told, _, command = (folder / "REPLAY.txt").read_text().splitlines()
    assert why.startswith("step 3 is not finite: the loss is ")
    assert why.endswith("; it was not applied. Version 2 is the last good one.")
    assert told == "To see where it comes from:"
    assert command == f"    grpo-train --replay {folder}"


def test_the_command_that_the_error_names_does_the_same(failed: RunFolder, tmp_path: Path) -> None:
    words = (failed_file(failed).parent / "REPLAY.txt").read_text().split()
    with forked(tmp_path / "logs", words[words.index("grpo-train") + 1 :]) as replaying:
        assert replaying.end() == NOT_FINITE, replaying.stderr
        assert "sample 1 (rollout 103/1), policy: token 4 of 7" in replaying.stdout


def test_replay_takes_a_path_and_nothing_else(tmp_path: Path) -> None:
    for arguments in (["--replay"], ["train.yaml", "--replay", "x"], ["--replay", "x", "--seed", "1"]):
        result = subprocess.run([sys.executable, "-m", "trainer.cli", *arguments], capture_output=True, text=True)
        assert result.returncode == 2
        assert result.stderr == (
            "error: command line: --replay takes one folder or file, and the run's own settings hold for it\n"
        )


def test_help_names_the_command() -> None:
    parser, _ = make_parser(TrainSettings, "grpo-train")
    assert "--replay PATH" in parser.format_help()


def test_a_batch_without_the_checkpoint_before_it_cannot_be_replayed(failed: RunFolder) -> None:
    batch = failed.path / "failed" / "step_000001" / "rank_0.msgpack"
    batch.parent.mkdir()
    batch.write_bytes(encode(two_micro_batches(1, failed.run_id)))
    with pytest.raises(ResumeError, match=r"needs the checkpoint of step 0, and .* has those of the steps \[2\]"):
        replay(batch)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ResumeError, match=r"--replay .*none: No such file or directory; give a step's folder"):
        replay(tmp_path / "none")


def test_a_refused_first_step_keeps_the_state_that_the_run_began_with(tiny_model: Path, tmp_path: Path) -> None:
    bench = Bench(tiny_model, tmp_path, optimizer="adamw", loss=UNMASKED)
    bench.send(1, spoiled(tiny_batch((6,)), 3))
    with pytest.raises(NonFiniteError, match=r"Version 0 is the last good one, .* grpo-train --replay .*step_000001"):
        bench.trainer.train()
    bench.trainer.close()
    checkpoint = checkpoint_store(tmp_path, "run").read(0)
    assert checkpoint.metrics is None
    assert bench.channel.checkpointed == {}


def test_a_checkpoint_that_is_there_is_not_written_again(tiny_model: Path, tmp_path: Path) -> None:
    bench = Bench(tiny_model, tmp_path, optimizer="adamw", loss=UNMASKED, ckpt={"interval": 1})
    bench.send(1, tiny_batch((6,)))
    bench.send(2, replace(spoiled(tiny_batch((6,)), 3), step=2))
    with pytest.raises(NonFiniteError):
        bench.trainer.train()
    bench.trainer.close()
    assert checkpoint_store(tmp_path, "run").steps() == [1]
    assert bench.channel.checkpointed == {0: 1}


def test_a_full_disk_does_not_hide_that_the_step_was_refused(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise StorageError("No space left on device")

    monkeypatch.setattr(CheckpointStore, "write", full)
    bench = Bench(tiny_model, tmp_path, optimizer="adamw", loss=UNMASKED)
    bench.send(1, spoiled(tiny_batch((6,)), 3))
    with pytest.raises(NonFiniteError, match=r"step 1 is not finite.* could not be kept for a replay: No space left"):
        bench.trainer.train()
    bench.trainer.close()


# --- what a diagnosis finds ---


class Patient:
    """A policy with an objective, and what is found in its batches."""

    def __init__(self, folder: Path, **loss: Any) -> None:
        settings = settings_for(folder, loss=UNMASKED | loss)
        self.policy = tiny_policy(folder)
        objective = Objective(self.policy, settings.loss, ONE, sequence_len=128)
        self.diagnosis = Diagnosis(self.policy, objective, settings.loss)

    def findings(self, *batches: MicroBatch) -> list[Finding]:
        assert not self.diagnosis.outcome(batches).is_finite
        return list(self.diagnosis.findings(batches))

    def break_token(self, token: int) -> None:
        """Its embedding is no number: whatever comes after it in its sample is not finite."""
        with torch.no_grad():
            self.policy._causal_lm.get_input_embeddings().weight[token] = math.nan


def plain(lengths: tuple[int, ...], **changes: Any) -> MicroBatch:
    """Without tokens 60 to 63."""
    batch = tiny_batch(lengths)
    return replace(batch, **({"token_ids": np.minimum(batch.token_ids, 59).astype(np.int32)} | changes))


def with_token(batch: MicroBatch, place: int, token: int) -> MicroBatch:
    ids = batch.token_ids.copy()
    ids[place] = token
    return replace(batch, token_ids=ids)


def test_a_log_probability_that_is_no_number_is_found_in_its_sample(tiny_model: Path) -> None:
    patient = Patient(tiny_model)
    batch = plain((5, 8))
    temperatures = batch.temperatures.copy()
    temperatures[5 + 6] = 1e-42  # logits divided by it are infinite
    (finding,) = patient.findings(replace(batch, temperatures=temperatures))
    assert (finding.micro_batch, finding.part, finding.term) == (0, "sample 1 (rollout 0/1)", "policy")
    assert finding.why == f"token 6 of 8 (id {batch.token_ids[5 + 6]}): its log-probability is nan"


def test_many_tokens_are_named_by_the_first_ones(tiny_model: Path) -> None:
    patient = Patient(tiny_model)
    patient.break_token(60)
    (finding,) = patient.findings(with_token(plain((12, 5)), 0, 60))
    assert finding.part == "sample 0 (rollout 0/0)"
    assert finding.why.count("its log-probability is nan") == 5
    assert finding.why.endswith("; and more tokens")


def test_a_term_that_overflows_is_told_from_a_coefficient_that_does(tiny_model: Path) -> None:
    patient = Patient(tiny_model)
    batch = plain((6,))
    logprobs = batch.inference_logprobs.copy()
    with torch.no_grad():
        from trainer.batch import packed_tokens

        logprobs[batch.loss_mask] = patient.policy.logprobs(packed_tokens(batch, patient.policy.device)).numpy()
    advantages = np.zeros(6, np.float32)
    advantages[3] = HUGE  # the ratio is 1, so that the coefficient is 3e38, and the token's log-probability below -1.2
    assert logprobs[3] < -1.2
    (finding,) = patient.findings(replace(batch, advantages=advantages, inference_logprobs=logprobs))
    assert finding.why.startswith(f"token 3 of 6 (id {batch.token_ids[3]}): its term, -")
    assert "overflows" in finding.why


def test_a_gradient_that_overflows_behind_finite_terms_is_found_by_its_token(tiny_model: Path) -> None:
    patient = Patient(tiny_model)
    batch = plain((6,))
    advantages = np.zeros(6, np.float32)
    advantages[4] = 1e37
    (finding,) = patient.findings(replace(batch, advantages=advantages))
    assert finding.why.startswith(f"token 4 of 6 (id {batch.token_ids[4]}): its gradient (advantage 1e+37, ")


def test_tokens_that_are_finite_alone_and_not_together_are_said_to_be_so(tiny_model: Path) -> None:
    patient = Patient(tiny_model)
    batch = plain((6,))
    for exponent in np.arange(34.0, 38.5, 0.25):  # where the sum of squares overflows, and none of them alone
        advantages = np.full(6, 10.0**exponent, np.float32)
        advantages[0] = 0
        one = replace(batch, advantages=advantages, inference_logprobs=np.full(6, -4.0, np.float32) * batch.loss_mask)
        if not patient.diagnosis.outcome([one]).is_finite:
            break
    (finding,) = patient.findings(one)
    assert finding.term == "policy"


def test_a_hint_that_is_not_finite_is_found_by_its_aligned_tokens(tiny_model: Path) -> None:
    patient = Patient(tiny_model, alpha_sdpo=1.0)
    patient.break_token(60)
    batch = plain((5, 9))
    hint = hint_for(batch, 1, places=(4, 5, 6, 7), before=3)
    context = hint.teacher_token_ids.copy()
    context[:] = np.minimum(context, 59)
    context[8] = 60  # token 5 of the sample as the context has it; tokens 6 and 7 come after it
    bad = replace(hint, teacher_token_ids=context)
    (found,) = patient.findings(replace(batch, hints=((1, bad),), num_hint_tokens=4))
    assert (found.part, found.term) == ("hint of sample 1 (rollout 0/1)", "sdpo")
    for place in (6, 7):
        name = f"token {place} (id {batch.token_ids[5 + place]}), token {place + 3} with the hint: its divergence"
        assert name in found.why


def test_a_preference_pair_that_is_not_finite_is_found_by_its_tokens(tiny_model: Path) -> None:
    patient = Patient(tiny_model, beta_replay=1.0)
    patient.break_token(60)
    good, bad = pair_of([5, 6], [7, 8], [9]), pair_of([5, 6], [7, 8], [9, 60, 11])
    found = patient.findings(replace(plain((5,)), pairs=(good, bad), num_pairs=2))
    assert [(one.part, one.term) for one in found] == [("pair 1 (of 2 of 3 teachers)", "dpo")]
    assert found[0].why.endswith("rejected token 2 (id 11): its log-probability is nan")
    assert "chosen" not in found[0].why


def test_micro_batches_that_are_finite_alone_are_said_to_be_so(tiny_model: Path) -> None:
    patient = Patient(tiny_model)
    batch, factor = plain((6,)), 1.0

    def scaled(index: int) -> MicroBatch:
        advantages = np.zeros(6, np.float32)
        advantages[3] = factor
        return replace(batch, advantages=advantages, index=index, num_micro_batches=8)

    norm = 0.0
    while math.isfinite(patient.diagnosis.outcome([scaled(0)]).grad_norm):
        norm, factor = patient.diagnosis.outcome([scaled(0)]).grad_norm, factor * 2
    factor /= 2  # the largest that is finite alone; the norm is below 3.4e38 and twice it is not
    assert norm > 0
    (finding,) = patient.findings(*(scaled(index) for index in range(8)))
    assert finding.why == "each micro-batch is finite alone; this one's gradient is the largest"

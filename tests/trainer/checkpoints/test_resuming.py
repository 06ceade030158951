"""Resuming a run: from which checkpoint, with which settings, and what the other programs see of it."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from tests.trainer.bench import UNMASKED, Bench, settings_for
from tests.trainer.models import pair_of, save_tiny_model, tiny_batch
from trainer.checkpoints.files import CheckpointStore
from trainer.checkpoints.resuming import _check_settings, checkpoint_store
from trainer.checkpoints.saving import MANY_STEPS, Checkpointing
from trainer.errors import ResumeError
from trainer.loop import run
from trainer.parallel import ONE
from transport import faults
from transport.batches.filesystem import FilesystemBatchReceiver, FilesystemBatchSender
from transport.checkpoints import Checkpoints
from transport.errors import CorruptError, DeadlineError, RunFolderError, StaleRunError, StorageError
from transport.folders import step_folder
from transport.records import PolicyManifest
from transport.run import RunFolder, current_run_id, found_run, only_one, recorded_settings
from transport.status import read_status
from transport.weights.filesystem import verify_policy

NUM_STEPS = 6


class Run:
    """A founded run with its batches, and a sender that removes what a checkpoint has passed."""

    def __init__(self, folder: RunFolder, model: Path) -> None:
        self.folder, self.model = folder, model
        self.store = checkpoint_store(folder.path, folder.run_id)

    def train(self, *, steps: int = NUM_STEPS, resume: int | None = None, **changes: Any) -> None:
        """As one process would, from joining to the end."""
        ckpt = {"interval": 2, "resume_step": resume} | changes.pop("ckpt", {})
        options = {"output_dir": str(self.folder.path), "max_steps": steps, "num_threads": 1, "optimizer": "adamw"}
        changes["loss"] = UNMASKED | changes.get("loss", {})
        if resume is None:
            options["run_id"] = self.folder.run_id
        run(settings_for(self.model, **(options | changes), ckpt=ckpt), self.model)

    def weights(self, step: int = NUM_STEPS) -> dict[str, torch.Tensor]:
        return dict(self.store.read(step).parts["weights"])

    def manifest(self, version: int) -> PolicyManifest:
        folder = step_folder(self.folder.broadcasts, version)
        return verify_policy(folder, run_id=self.folder.run_id, version=version)[0]

    def batches(self) -> list[str]:
        return sorted(path.name for path in self.folder.batches.glob("step_*"))


@contextmanager
def founded(folder: Path, model: Path, *, num_steps: int = NUM_STEPS) -> Iterator[Run]:
    one = found_run(folder)
    with FilesystemBatchSender(one.batches, run_id=one.run_id, hwm=num_steps) as sender:
        for step in range(1, num_steps + 1):
            sender.send(step, [[replace(tiny_batch((6, 9), seed=step), run_id=one.run_id, step=step)]])
        sender.finish(num_steps)
        yield Run(one, model)


@pytest.fixture
def started(tmp_path: Path, tiny_model: Path) -> Iterator[Run]:
    with founded(tmp_path / "run", tiny_model) as one:
        yield one


@contextmanager
def founded_with_pairs(folder: Path, model: Path, *, since: int) -> Iterator[Run]:
    """Four batches, of which those from `since` on have a pair."""
    one = found_run(folder)
    with FilesystemBatchSender(one.batches, run_id=one.run_id, hwm=4) as sender:
        for step in range(1, 5):
            batch = replace(tiny_batch((6, 9), seed=step), run_id=one.run_id, step=step)
            pairs = (pair_of([1, 2], [step, 4], [5]),) if step >= since else ()
            sender.send(step, [[replace(batch, pairs=pairs, num_pairs=len(pairs))]])
        sender.finish(4)
        yield Run(one, model)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_goes_on_from_a_checkpoint_before_its_first_pair(tmp_path: Path, tiny_model: Path) -> None:
    loss = {"adv_tau": 0.0, "beta_replay": 1.0}
    with founded_with_pairs(tmp_path / "whole", tiny_model, since=3) as whole:
        whole.train(steps=4, loss=loss)
    with founded_with_pairs(tmp_path / "parts", tiny_model, since=3) as parts:
        parts.train(steps=2, loss=loss)
        parts.train(steps=4, loss=loss, resume=-1)
    assert same(whole.weights(4), parts.weights(4))
    assert not same(whole.weights(2), whole.weights(4))


def test_a_run_in_two_parts_comes_to_the_weights_of_one_in_a_single_part(
    started: Run, tmp_path: Path, tiny_model: Path
) -> None:
    with founded(tmp_path / "straight", tiny_model) as straight:
        straight.train()
    started.train(steps=3)
    assert started.store.steps() == [2, 3]  # where one was due, and at the end
    started.train(resume=-1)
    assert started.store.steps() == [2, 3, 4, 6]
    assert same(started.weights(), straight.weights())
    assert not same(started.weights(), started.weights(4))
    assert (
        started.manifest(6).files["adapter_model.safetensors"]
        == straight.manifest(6).files["adapter_model.safetensors"]
    )


def test_without_an_interval_no_checkpoint_is_written(started: Run) -> None:
    started.train(ckpt={"interval": None})
    assert started.store.steps() == []


def test_a_checkpoint_lets_the_sender_remove_the_batches_that_it_has_passed(started: Run) -> None:
    started.train(steps=3)
    deadline = threading.Event()
    for _ in range(100):
        if started.batches() == ["step_000004", "step_000005", "step_000006"]:
            break
        deadline.wait(0.05)
    assert started.batches() == ["step_000004", "step_000005", "step_000006"]
    started.train(resume=-1)


def test_the_last_checkpoints_and_the_multiples_are_kept(started: Run) -> None:
    started.train(ckpt={"interval": 1, "keep_last": 1, "keep_interval": 4})
    assert started.store.steps() == [4, 6]


class Killed(BaseException):
    """Ends a trainer in the middle."""


@contextmanager
def killed_at(point: str, nth: int) -> Iterator[None]:
    """As `kill -9` does, but that what is being written is written to its end."""
    left = [nth]

    def kill(name: str) -> None:
        left[0] -= name == point
        if name == point and left[0] == 0:
            raise Killed

    faults.on_point = kill
    try:
        with pytest.raises(Killed):
            yield
    finally:
        faults.on_point = None


def test_versions_that_are_published_already_are_left_as_they_are(started: Run) -> None:
    with killed_at("step.applied", 4):
        started.train(steps=4)
    before = {version: started.manifest(version) for version in range(4)}
    assert started.store.steps() == [2]
    started.train(steps=4, resume=-1)  # from step 2: versions 2 and 3 again
    assert {version: started.manifest(version) for version in range(4)} == before
    assert all(manifest.attempt == 0 for manifest in before.values())
    assert started.manifest(4).attempt == 0


def test_a_version_that_is_damaged_or_missing_is_published_again_with_its_metrics(started: Run) -> None:
    started.train(steps=4)
    weights = step_folder(started.folder.broadcasts, 4) / "adapter_model.safetensors"
    expected, told = weights.read_bytes(), json.loads(weights.with_name("metrics.json").read_text())
    weights.write_bytes(expected[:-1])
    started.train(steps=4, resume=-1)
    assert (started.manifest(4).attempt, weights.read_bytes()) == (1, expected)
    assert json.loads(weights.with_name("metrics.json").read_text())["loss/total"] == told["loss/total"] != 0


def test_a_run_that_ended_before_its_first_checkpoint_begins_again(
    started: Run, tmp_path: Path, tiny_model: Path
) -> None:
    with founded(tmp_path / "straight", tiny_model) as straight:
        straight.train()
    started.train(steps=3, ckpt={"interval": None})
    started.train(resume=-1)
    assert same(started.weights(), straight.weights())


def test_an_earlier_step_can_be_resumed_and_what_came_after_it_is_set_aside(tmp_path: Path, tiny_model: Path) -> None:
    with founded(tmp_path / "run", tiny_model) as one:
        kept = {path.name: path for path in one.folder.batches.glob("step_*")}
        copies = {name: {f.name: f.read_bytes() for f in path.iterdir()} for name, path in kept.items()}
        one.train()
        before = one.weights()
    Checkpoints(one.folder).go_back_to(2, role="orch")
    for name, contents in copies.items():  # as a resumed orchestrator sends them again
        folder = one.folder.batches / name
        folder.mkdir(exist_ok=True)
        for file, data in contents.items():
            (folder / file).write_bytes(data)
    one.train(resume=2)
    assert same(one.weights(), before)
    [aside] = one.folder.superseded.iterdir()
    assert {path.name for path in (aside / "checkpoints").iterdir()} == {"step_000004", "step_000006"}
    assert all((path / "trainer" / "STABLE").exists() for path in (aside / "checkpoints").iterdir())
    assert {path.name for path in (aside / "broadcasts").iterdir()} == {f"step_{step:06d}" for step in range(3, 7)}


def test_a_receiver_that_resumes_an_earlier_step_takes_back_what_it_said(started: Run) -> None:
    acks = started.folder.batches / "acks" / "rank_0.json"
    receiver = FilesystemBatchReceiver(started.folder.batches, run_id=started.folder.run_id)
    receiver.receive(1, timeout_s=1)
    receiver.receive(2, timeout_s=1)
    receiver.checkpointed(2)
    receiver.resumed(1)
    receiver.close()
    said = json.loads(acks.read_text())
    assert (said["received"], said["checkpointed"], said["wanted"]) == (1, 1, 0)


def test_a_finished_run_can_be_given_more_steps(started: Run, tmp_path: Path, tiny_model: Path) -> None:
    with founded(tmp_path / "straight", tiny_model) as straight:
        straight.train()
    started.train(steps=4)
    started.train(steps=4, resume=-1)
    assert started.store.steps() == [2, 4]
    started.train(steps=6, resume=-1)
    assert same(started.weights(), straight.weights())


@pytest.mark.parametrize(
    ("settings", "followed"),
    [
        ({"lr_scheduler_type": "constant"}, []),
        ({"lr_scheduler_type": "linear"}, ["learning rate"]),
        ({"lr_scheduler_type": "constant", "noise_scheduler": {"enabled": True}}, ["noise"]),
        ({"lr_scheduler_type": "cosine", "noise_scheduler": {"enabled": True}}, ["learning rate", "noise"]),
    ],
)
def test_a_warning_names_what_follows_another_max_steps(
    settings: dict[str, Any], followed: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    before = settings_for(Path("model"), max_steps=20, **settings).model_dump(mode="json")
    _check_settings(before, before, "it has")
    assert not caplog.records
    _check_settings(before, before | {"max_steps": 30}, "it has")
    said = [record.getMessage() for record in caplog.records]
    assert [line.partition(": the ")[0] for line in said] == ["max_steps is 30, it has 20"] * len(followed)
    assert all(word in line for word, line in zip(followed, said, strict=True))


def test_settings_that_decide_the_result_must_be_the_same_and_are_named(started: Run) -> None:
    started.train(steps=2)
    changes = {"learning_rate": 0.5, "loss": {"kl_tau": 0.25}}
    with pytest.raises(
        ResumeError,
        match=r"learning_rate is 0\.5, the checkpoint of step 2 has 0\.01; loss\.kl_tau is 0\.25, .* has 0\.0; set ",
    ):
        started.train(resume=-1, **changes)
    recorded = recorded_settings(started.folder.path, "train")
    assert recorded is not None
    assert recorded["learning_rate"] == 0.01


def test_other_settings_may_change_and_are_recorded(started: Run) -> None:
    started.train(steps=2)
    started.train(resume=-1, wait_timeout_s=9.0, weight_broadcast={"keep_last": 3}, ckpt={"interval": 3})
    recorded = recorded_settings(started.folder.path, "train")
    assert recorded is not None
    assert (recorded["wait_timeout_s"], recorded["ckpt"]["interval"]) == (9.0, 3)


def test_a_run_without_checkpoints_must_begin_again_with_its_settings(started: Run) -> None:
    started.train(steps=2, ckpt={"interval": None})
    with pytest.raises(ResumeError, match=r"seed is 9, the run was started with 42"):
        started.train(resume=-1, seed=9)


def test_another_base_model_is_refused(started: Run, tmp_path: Path) -> None:
    started.train(steps=2)
    other = save_tiny_model(tmp_path / "other", rms_norm_eps=1e-5)
    with pytest.raises(ResumeError, match=r"is the base [0-9a-f]{32}, and the run in .* trains [0-9a-f]{32}; give"):
        Run(started.folder, other).train(resume=-1)


def test_another_base_model_is_refused_without_a_checkpoint_too(started: Run, tmp_path: Path) -> None:
    started.train(steps=2, ckpt={"interval": None})
    assert started.store.steps() == []
    other = save_tiny_model(tmp_path / "other", rms_norm_eps=1e-5)
    with pytest.raises(ResumeError, match=r"is the base [0-9a-f]{32}, and the run in .* trains [0-9a-f]{32}; give"):
        Run(started.folder, other).train(resume=-1)
    started.train(resume=-1)
    assert started.store.steps() == [2, 4, 6]


@pytest.mark.parametrize("asked", [-1, 4])
def test_a_folder_without_a_run_cannot_be_resumed(tmp_path: Path, tiny_model: Path, asked: int) -> None:
    settings = settings_for(tiny_model, output_dir=str(tmp_path / "none"), ckpt={"resume_step": asked})
    with pytest.raises(
        ResumeError, match=rf"ckpt.resume_step is {asked}, and .*none holds no run; give the output_dir"
    ):
        run(settings, tiny_model)
    assert not (tmp_path / "none").exists()


def test_a_step_without_a_checkpoint_is_refused_with_those_that_have_one(started: Run) -> None:
    started.train(steps=4)
    with pytest.raises(ResumeError, match=r"ckpt.resume_step is 3, .* of the steps \[2, 4\]; name one of those"):
        started.train(resume=3)


def test_a_damaged_checkpoint_is_not_passed_over_silently(started: Run) -> None:
    started.train(steps=4)
    (started.store.path(4) / "weights.safetensors").write_bytes(b"torn")
    with pytest.raises(CorruptError, match=r"trainer/weights\.safetensors has 4 bytes, the manifest says"):
        started.train(resume=-1)


def test_a_run_that_a_trainer_works_in_cannot_be_resumed(started: Run) -> None:
    started.train(steps=2)
    with (
        only_one(started.folder.path, "train"),
        pytest.raises(RunFolderError, match="another grpo-train is at work in"),
    ):
        started.train(resume=-1)
    started.train(resume=-1)


def test_the_run_id_that_is_asked_for_must_be_that_of_the_run(started: Run) -> None:
    started.train(steps=2)
    with pytest.raises(StaleRunError, match="another"):
        started.train(resume=-1, run_id="another")


def test_a_resumed_run_keeps_its_id(started: Run) -> None:
    started.train(steps=2)
    started.train(resume=-1)
    assert current_run_id(started.folder.path) == started.folder.run_id


def test_a_checkpoint_that_cannot_be_written_stops_the_run_with_the_reason(tiny_model: Path, tmp_path: Path) -> None:
    bench = Bench(tiny_model, tmp_path, max_steps=4, ckpt={"interval": 1}, optimizer="adamw")
    (tmp_path / "checkpoints").write_text("in the way")
    for step in range(1, 5):
        bench.send(step, tiny_batch((6,), seed=step) if step == 1 else replace(tiny_batch((6,), seed=step), step=step))
    with pytest.raises(StorageError, match=r"checkpoints/step_000001/trainer cannot be written"):
        bench.trainer.train()
    bench.trainer.close()
    assert bench.channel.checkpointed == {}


def test_a_disk_that_does_not_answer_ends_the_wait_for_a_checkpoint(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(CheckpointStore, "write", lambda *_: answers.wait(20))
    bench = Bench(tiny_model, tmp_path, max_steps=1, ckpt={"interval": 1}, optimizer="adamw", wait_timeout_s=0.2)
    bench.send(1, tiny_batch((6,)))
    with pytest.raises(
        DeadlineError,
        match=r"waited 0\.2 s for the checkpoint to be written to .*/checkpoints/step_000001/trainer; see",
    ):
        bench.trainer.train()
    status = read_status(bench.status_path) or {}
    assert status["state"] == "waiting"
    assert status["waiting_for"] == f"the checkpoint in {tmp_path}/checkpoints/step_000001/trainer"
    answers.set()
    bench.trainer.close()
    assert bench.channel.checkpointed == {}


def test_the_batch_channel_hears_of_a_checkpoint_only_when_it_is_complete(tiny_model: Path, tmp_path: Path) -> None:
    bench = Bench(tiny_model, tmp_path, max_steps=3, ckpt={"interval": 1}, optimizer="adamw")
    complete: list[str] = []
    told: list[list[int]] = []
    store = checkpoint_store(tmp_path, "run")
    bench.trainer._receiver.checkpointed = lambda step: told.append([step, *store.steps()])  # type: ignore[method-assign]
    for step in range(1, 4):
        bench.send(step, replace(tiny_batch((6,), seed=step), step=step))
    faults.on_point = complete.append
    try:
        bench.trainer.train()
    finally:
        faults.on_point = None
    assert told[-1] == [3, 1, 2, 3]
    assert all(step in steps for step, *steps in told)
    assert complete.count("checkpoint.written") == 3


def checkpointing(folder: Path, **ckpt: Any) -> Checkpointing:
    """That of a run whose channel and state nobody asks."""
    settings = settings_for(folder, ckpt=ckpt)
    absent: Any = None
    return Checkpointing(
        settings.ckpt,
        checkpoint_store(folder, "run"),
        absent,
        base_model="",
        run_id="run",
        recorded={},
        receiver=absent,
        ranks=ONE,
        status=absent,
        timeout_s=1.0,
    )


@pytest.mark.parametrize("max_steps", [-1, MANY_STEPS + 1])
def test_a_long_run_that_never_lets_a_batch_go_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, max_steps: int
) -> None:
    long = checkpointing(tmp_path)
    long.begin(max_steps)
    assert len(caplog.records) == (max_steps > MANY_STEPS)  # how long a run of -1 becomes is not known yet
    for step in range(1, MANY_STEPS):
        long.after_step(step, None)
    assert len(caplog.records) == (max_steps > MANY_STEPS)
    long.after_step(MANY_STEPS, None)
    long.after_step(MANY_STEPS + 1, None)
    (record,) = caplog.records
    assert record.getMessage().startswith("ckpt.interval is not set: no batch is ever removed from the disk")


def test_a_run_that_is_no_longer_than_that_is_not_warned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    short = checkpointing(tmp_path)
    short.begin(MANY_STEPS)
    for step in range(1, MANY_STEPS + 1):
        short.after_step(step, None)
    assert not caplog.records


def test_a_long_run_with_checkpoints_is_not_warned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpointing(tmp_path, interval=10).begin(10 * MANY_STEPS)
    assert not caplog.records


def test_metrics_tell_what_checkpoints_cost(tiny_model: Path, tmp_path: Path) -> None:
    bench = Bench(tiny_model, tmp_path, max_steps=2, ckpt={"interval": 1}, optimizer="adamw")
    for step in (1, 2):
        bench.send(step, replace(tiny_batch((6,), seed=step), step=step))
    bench.trainer.train()
    assert bench.metrics(2)["time/checkpoint_s"] > 0
    assert "time/write_checkpoint_s" in bench.metrics(2)

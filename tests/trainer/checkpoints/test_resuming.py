"""Resuming a run: from which checkpoint, with which settings, and what the other programs see of it."""

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo.configs.errors import SettingsError
from grpo.trainer.checkpoint import CheckpointStore, checkpoint_to_resume
from grpo.trainer.errors import ResumeError
from grpo.trainer.loop import Trainer
from grpo.trainer.startup import run
from grpo.transport.batches.filesystem import BatchSender
from grpo.transport.checkpoints import Checkpoints
from grpo.transport.errors import CorruptError, DeadlineError, RunFolderError, StorageError
from grpo.transport.folders import step_folder
from grpo.transport.records import PolicyManifest
from grpo.transport.run import RunFolder, create_run, recorded_settings
from grpo.transport.status import read_status
from grpo.transport.weights.store import verify_policy
from msgspec.structs import replace

from tests.trainer.bench import UNMASKED, Bench, settings_for
from tests.trainer.models import hint_for, tiny_batch

NUM_STEPS = 6


class Run:
    """A founded run with its batches."""

    def __init__(self, folder: RunFolder, model: Path) -> None:
        self.folder, self.model = folder, model
        self.store = CheckpointStore(folder)

    def train(self, *, steps: int = NUM_STEPS, back_to: int | None = None, **changes: Any) -> None:
        """As one process would, from joining to the end."""
        options: dict[str, Any] = {
            "output_dir": str(self.folder.path),
            "run_id": self.folder.run_id,  # so that it is the launcher's to say whether batches come
            "max_steps": steps,
            "num_threads": 1,
            "optimizer": "adamw",
            "ppo_epochs": 2,
        }
        changes["ckpt"] = {"interval": 2, "keep_last": None, "resume_step": back_to} | changes.get("ckpt", {})
        changes["loss"] = UNMASKED | changes.get("loss", {})
        run(settings_for(self.model, **(options | changes)), self.model)

    def weights(self, step: int = NUM_STEPS) -> dict[str, torch.Tensor]:
        return dict(self.store.read(step)[1]["weights"])

    def manifest(self, version: int) -> PolicyManifest:
        folder = step_folder(self.folder.broadcasts, version)
        return verify_policy(folder, run_id=self.folder.run_id, version=version)[0]


@contextmanager
def founded(folder: Path, model: Path, *, num_steps: int = NUM_STEPS, hinted: bool = False) -> Iterator[Run]:
    one = create_run(folder)
    with BatchSender(one.batches, run_id=one.run_id, hwm=num_steps) as sender:
        for step in range(1, num_steps + 1):
            batch = tiny_batch((6, 9), seed=step, run_id=one.run_id, step=step)
            hints = ((1, hint_for(batch, 1, places=(4, 5, 7), before=3)),) if hinted else ()
            sender.send(step, [[replace(batch, hints=hints)]])
        sender.finish(num_steps)
        yield Run(one, model)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Run:
    """A run that was never stopped."""
    with founded(tmp_path_factory.mktemp("straight") / "run", tiny_model) as one:
        one.train()
    return one


@pytest.fixture
def started(tmp_path: Path, tiny_model: Path) -> Iterator[Run]:
    with founded(tmp_path / "run", tiny_model) as one:
        yield one


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_in_two_parts_comes_to_the_weights_of_one_in_a_single_part(started: Run, straight: Run) -> None:
    started.train(steps=3)
    assert started.store.steps() == [2, 3]  # where one was due, and at the end
    started.train()
    assert started.store.steps() == [2, 3, 4, 6]
    assert same(started.weights(), straight.weights())
    assert not same(started.weights(), started.weights(4))
    ours, theirs = (one.manifest(6).files["adapter_model.safetensors"] for one in (started, straight))
    assert ours == theirs


def test_a_run_in_two_parts_goes_on_with_the_teacher_that_it_had(tmp_path: Path, tiny_model: Path) -> None:
    """Which keeps half of itself at each step and takes the rest from the weights."""
    loss = {"alpha_sdpo": 0.5, "sdpo": {"teacher": "ema", "ema_decay": 0.5}}
    weights = []
    for name, parts in (("straight", (3,)), ("stopped", (2, 3))):
        with founded(tmp_path / name, tiny_model, num_steps=3, hinted=True) as one:
            for steps in parts:
                one.train(steps=steps, loss=loss, ppo_epochs=1, ckpt={"interval": 1})
            weights.append(one.weights(3))
            before, after = (one.store.read(step)[1]["average"] for step in (2, 3))
            for name, weight in weights[-1].items():
                torch.testing.assert_close(after[name], 0.5 * before[name] + 0.5 * weight)
    assert same(*weights)


def test_the_last_checkpoints_and_the_multiples_are_kept(started: Run) -> None:
    started.train(ckpt={"interval": 1, "keep_last": 1, "keep_interval": 4})
    assert started.store.steps() == [4, 6]


class Killed(BaseException):
    """Ends a trainer in the middle."""


@contextmanager
def killed_after(step: int) -> Iterator[None]:
    """As `kill -9` does, once a step is applied, but that what is being written is written to its end."""
    publish = Trainer.publish

    def kill(trainer: Trainer, number: int) -> None:
        if number == step:
            raise Killed
        publish(trainer, number)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):  # noqa: PT012 (the test says what)
        patch.setattr(Trainer, "publish", kill)
        yield


def test_versions_that_are_published_already_are_left_as_they_are(started: Run) -> None:
    with killed_after(4):
        started.train(steps=4)
    before = {version: started.manifest(version) for version in range(4)}
    assert started.store.steps() == [2]
    started.train(steps=4)  # from step 2: versions 2 and 3 again
    assert {version: started.manifest(version) for version in range(4)} == before


def test_a_version_that_is_damaged_or_missing_is_published_again_with_its_metrics(started: Run) -> None:
    started.train(steps=4)
    weights = step_folder(started.folder.broadcasts, 4) / "adapter_model.safetensors"
    expected, told = weights.read_bytes(), json.loads(weights.with_name("metrics.json").read_text())
    weights.write_bytes(expected[:-1])
    started.train(steps=4)
    assert weights.read_bytes() == expected
    assert json.loads(weights.with_name("metrics.json").read_text())["loss/total"] == told["loss/total"] != 0


def test_a_run_that_ended_before_its_first_checkpoint_begins_again(started: Run, straight: Run) -> None:
    started.train(steps=3, ckpt={"interval": None})
    started.train()
    assert same(started.weights(), straight.weights())


def test_an_earlier_step_can_be_resumed_and_what_came_after_it_is_set_aside(tmp_path: Path, tiny_model: Path) -> None:
    with founded(tmp_path / "run", tiny_model) as one:
        shutil.copytree(one.folder.batches, tmp_path / "batches")
        one.train()
        before = one.weights()
    Checkpoints(one.folder).go_back_to(2, role=None)
    # as a resumed orchestrator sends them again
    shutil.copytree(tmp_path / "batches", one.folder.batches, dirs_exist_ok=True)
    one.train(back_to=2)
    assert same(one.weights(), before)
    [aside] = one.folder.superseded.iterdir()
    assert {path.name for path in (aside / "checkpoints").iterdir()} == {"step_000004", "step_000006"}
    assert all((path / "trainer" / "STABLE").exists() for path in (aside / "checkpoints").iterdir())
    assert {path.name for path in (aside / "broadcasts").iterdir()} == {f"step_{step:06d}" for step in range(3, 7)}


def test_settings_that_decide_the_result_must_be_the_same_and_are_named(started: Run) -> None:
    started.train(steps=2)
    with pytest.raises(SettingsError, match=r"loss\.kl_tau .*0\.25(.|\n)*max_grad_norm .*0\.5"):
        started.train(max_grad_norm=0.5, loss={"kl_tau": 0.25})
    recorded = recorded_settings(started.folder.path, "train")
    assert recorded is not None
    assert recorded["max_grad_norm"] == 1.0


def test_another_loss_holds_from_the_checkpoint_on_where_it_may_change(started: Run, tmp_path: Path) -> None:
    code = tmp_path / "own.py"
    code.write_text("def loss(tokens):\n    return -tokens.advantages * tokens.logprobs\n")
    own = {"loss": {"import_path": f"{code}:loss"}}
    with killed_after(4):
        started.train(**own)
    code.write_text(code.read_text().replace("-tokens", "-2 * tokens"))
    with pytest.raises(SettingsError, match=r"own\.py"):
        started.train(**own)
    with pytest.raises(DeadlineError):  # of the batches that are to be made anew
        started.train(**own, resume_with_changed_code=True, wait_timeout_s=0.2)
    [aside] = started.folder.superseded.iterdir()
    assert {path.name for path in (aside / "broadcasts").iterdir()} == {"step_000003"}


@pytest.mark.parametrize(
    ("before", "change"),
    [
        ({}, {"learning_rate": 0.5}),
        ({"lr_scheduler_type": "linear"}, {"max_steps": 5}),
        ({"lr_scheduler_type": "linear"}, {"warmup_steps": 3}),
        ({}, {"lr_scheduler_type": "linear"}),
    ],
    ids=lambda settings: "-".join(settings),
)
def test_another_schedule_holds_from_the_checkpoint_on_and_is_recorded(
    started: Run, before: dict[str, Any], change: dict[str, Any]
) -> None:
    [(key, value)] = change.items()
    with killed_after(4):
        started.train(**before)
    with pytest.raises(DeadlineError):  # of the batches that are to be made anew
        started.train(**(before | change), wait_timeout_s=0.2)
    [aside] = started.folder.superseded.iterdir()
    assert "step_000004" in {path.name for path in (aside / "batches").iterdir()}
    assert {path.name for path in (aside / "broadcasts").iterdir()} == {"step_000003"}
    fields = json.loads((started.folder.path / "run.json").read_text())["programs"]["train"]
    assert fields["settings"][key] == value
    assert key in {one["key"] for one in fields["changes"]}


def test_8_bit_state_of_another_number_of_ranks_is_refused_with_the_keys_to_set(started: Run) -> None:
    codes = {f"adamw_8bit/rank_{rank}/w/state1": torch.zeros(2, dtype=torch.uint8) for rank in (0, 1)}
    started.store.write(
        2, {"weights": {"w": torch.zeros(2)}, "optimizer": codes}, base_model="base", settings={}, metrics=None
    )
    for gpus, is_refused in ((1, True), (2, False), (4, True)):
        settings = settings_for(started.model, optimizer="adamw_8bit", gpus=gpus)
        with pytest.raises(ResumeError, match=r"gpus and nodes") if is_refused else nullcontext():
            assert checkpoint_to_resume(settings, started.folder, frozenset()) is not None


def test_a_step_without_a_checkpoint_is_refused_with_those_that_have_one(started: Run) -> None:
    started.train(steps=4)
    with pytest.raises(RunFolderError, match=r"ckpt\.resume_step .*\[2, 4\]"):
        started.train(back_to=3)


def test_a_damaged_checkpoint_is_not_passed_over_silently(started: Run) -> None:
    started.train(steps=4)
    (started.store.path(4) / "weights.safetensors").write_bytes(b"torn")
    with pytest.raises(CorruptError, match=r"trainer/weights\.safetensors.*resume_step: 2"):
        started.train()
    shutil.rmtree(step_folder(started.folder.checkpoints, 4))
    (started.store.path(2) / "weights.safetensors").write_bytes(b"torn")
    with pytest.raises(CorruptError, match="resume_step: 0"):
        started.train()


def test_a_checkpoint_that_cannot_be_written_stops_the_run_with_the_reason(tiny_model: Path, tmp_path: Path) -> None:
    bench = Bench(tiny_model, tmp_path, max_steps=4, ckpt={"interval": 1}, optimizer="adamw")
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(StorageError, match="checkpoints"):
        bench.train(*(tiny_batch((6,), seed=step) for step in range(1, 5)))
    bench.trainer.close()


def test_a_disk_that_does_not_answer_ends_the_wait_for_a_checkpoint(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(CheckpointStore, "write", lambda *_, **__: answers.wait(120))
    bench = Bench(tiny_model, tmp_path, max_steps=1, ckpt={"interval": 1}, optimizer="adamw", wait_timeout_s=0.5)
    bench.send(1, tiny_batch((6,)))
    with pytest.raises(DeadlineError):
        bench.trainer.train()
    status = read_status(bench.status_path) or {}
    assert status["state"] == "waiting"
    assert status["waiting_for"] == f"the checkpoint in {tmp_path}/checkpoints/step_000001/trainer"
    answers.set()
    bench.trainer.close()

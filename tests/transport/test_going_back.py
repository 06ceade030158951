"""A run that goes back: what receivers said of later batches is no longer held against those that are made anew."""

import logging
import threading
import time
from pathlib import Path

import pytest

from tests.transport.samples import equal, micro_batch
from tests.transport.test_channels import Batches, receive
from transport.batches.filesystem import FilesystemBatchReceiver, FilesystemBatchSender
from transport.batches.store import StepStore
from transport.checkpoints import TRAINER, Checkpoints
from transport.errors import DeadlineError
from transport.folders import step_folder
from transport.run import RunFolder


class Rounds:
    """Counts how often a sender's thread has removed what checkpoints have passed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._done, remove = threading.Semaphore(0), StepStore.remove_up_to

        def counted(store: StepStore, step: int) -> None:
            remove(store, step)
            self._done.release()

        monkeypatch.setattr(StepStore, "remove_up_to", counted)

    def one_begins_and_ends(self) -> None:
        while self._done.acquire(blocking=False):
            pass
        for _ in range(2):  # the first may have begun before
            assert self._done.acquire(timeout=60)


def trained_to(step: int, channel: Batches, run: RunFolder) -> None:
    """A run with a checkpoint of every fourth step, which has ended."""
    sender, receiver = channel.sender(), channel.receiver()
    for number in range(1, step + 1):
        sender.send(number, [[micro_batch(step=number)]])
        assert receive(receiver, number).step == number
        if number % 4 == 0:
            (step_folder(run.checkpoints, number) / TRAINER).mkdir(parents=True)
            receiver.checkpointed(number)
            deadline_s = time.monotonic() + 60
            while step_folder(run.batches, number).exists():
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
    sender.close()
    receiver.close()


@pytest.mark.parametrize("how", ["a step that is named", "the newest checkpoint was removed by hand"])
@pytest.mark.parametrize("kind", ["filesystem", "zmq"])
def test_a_batch_that_leaves_before_the_trainer_says_where_it_goes_on_is_not_lost(
    kind: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel, run = Batches(kind, tmp_path), RunFolder(path=tmp_path, run_id="run")
    trained_to(8, channel, run)
    if how == "a step that is named":
        Checkpoints(run).go_back_to(4, role="orch")
    else:
        (step_folder(run.checkpoints, 8) / TRAINER).rmdir()
    assert Checkpoints(run).settle() == 4
    rounds = Rounds(monkeypatch)
    sender = channel.sender(hwm=1, send_timeout_s=0.2)
    sender.send(5, [[micro_batch(step=5, seed=5)]])
    if kind == "filesystem":
        rounds.one_begins_and_ends()
    with pytest.raises(DeadlineError, match="for the trainer to receive batch 5"):
        sender.send(6, [[micro_batch(step=6)]])
    receiver = channel.receiver()
    receiver.resumed(4)
    assert equal(receive(receiver, 5), micro_batch(step=5, seed=5))
    channel.close()


def test_what_a_trainer_has_said_of_steps_that_stay_stays(tmp_path: Path) -> None:
    channel, run = Batches("filesystem", tmp_path), RunFolder(path=tmp_path, run_id="run")
    trained_to(5, channel, run)
    assert Checkpoints(run).settle() == 5
    assert [path.name for path in (run.batches / "acks").iterdir()] == ["rank_0.json"]
    assert not run.superseded.exists()


def corrupt(folder: Path, step: int) -> None:
    (step_folder(folder, step) / "rank_0.msgpack").write_bytes(b"torn")


def test_a_corrupt_batch_that_is_made_anew_is_not_asked_for_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunFolder(path=tmp_path, run_id="run")
    with FilesystemBatchSender(run.batches, run_id="run") as sender:
        sender.send(1, [[micro_batch()]])
    corrupt(run.batches, 1)
    with FilesystemBatchReceiver(run.batches, run_id="run") as receiver, pytest.raises(DeadlineError):
        receiver.receive(1, timeout_s=0.1)
    assert Checkpoints(run).settle() == 0  # both programs end, and are resumed
    [aside] = run.superseded.iterdir()
    assert [path.name[:11] for path in (aside / "batches" / "quarantine").iterdir()] == ["step_000001"]
    with FilesystemBatchSender(run.batches, run_id="run") as sender:
        sender.send(1, [[micro_batch(seed=1)]])
    caplog.clear()
    with FilesystemBatchReceiver(run.batches, run_id="run") as receiver:
        assert receive(receiver, 1).step == 1
    assert not caplog.records


def test_what_an_earlier_process_found_corrupt_neither_asks_nor_counts_where_the_batch_is_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        (tmp_path / "quarantine" / f"step_000001.{number}").mkdir(parents=True)
    (tmp_path / "acks").mkdir()
    stale = '{"run_id": "run", "received": 0, "checkpointed": 0, "wanted": 1, "attempt": 3}'
    (tmp_path / "acks" / "rank_0.json").write_text(stale)
    rounds = Rounds(monkeypatch)
    StepStore(tmp_path, run_id="run").write(1, [b"torn"])
    with (
        caplog.at_level(logging.WARNING),
        FilesystemBatchSender(tmp_path, run_id="run"),
        FilesystemBatchReceiver(tmp_path, run_id="run") as receiver,
    ):
        rounds.one_begins_and_ends()
        assert not caplog.records
        with pytest.raises(DeadlineError):  # and not CorruptError: it came corrupt for the first time
            receiver.receive(1, timeout_s=0.1)

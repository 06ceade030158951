"""Errors in the thread in which a sender serves its receivers."""

import errno
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.transport.samples import equal, micro_batch
from tests.transport.test_channels import Batches, receive
from transport.batches.filesystem import FilesystemBatchReceiver, FilesystemBatchSender
from transport.batches.serving import Serving
from transport.batches.store import StepStore
from transport.errors import TransportError
from transport.folders import step_folder
from transport.status import PeerWatch, StatusFile, read_status

STALE = OSError(errno.ESTALE, "Stale file handle")


def until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def failing(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, *errors: Exception) -> None:
    """Lets a method of every store in the folder raise these, one after the other, in threads of their own."""
    left, method = list(errors), getattr(StepStore, name)

    def fails(store: StepStore, *args: object, **options: object) -> object:
        if left and store.folder.is_relative_to(folder) and threading.current_thread() is not threading.main_thread():
            raise left.pop(0)
        return method(store, *args, **options)

    monkeypatch.setattr(StepStore, name, fails)


@pytest.mark.parametrize("kind", ["filesystem", "zmq"])
def test_a_sender_goes_on_after_an_error_of_the_file_system(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing(monkeypatch, tmp_path, "remove_up_to", STALE, STALE)
    channel = Batches(kind, tmp_path)
    sender, receiver = channel.sender(), channel.receiver()
    for step in (1, 2):
        sender.send(step, [[micro_batch(step=step)]])
        assert receive(receiver, step).step == step
    receiver.checkpointed(1)
    until(lambda: not step_folder(channel.folder, 1).exists())
    assert step_folder(channel.folder, 2).exists()
    channel.close()
    [record] = caplog.records
    assert "will try again for 60 s: [Errno 116] Stale file handle" in record.getMessage()


def test_a_batch_that_could_not_be_sent_again_is_sent_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        FilesystemBatchSender(tmp_path, run_id="run") as sender,
        FilesystemBatchReceiver(tmp_path, run_id="run") as receiver,
    ):
        sender.send(1, [[micro_batch(seed=7)]])
        failing(monkeypatch, tmp_path, "write", OSError(errno.EIO, "Input/output error"))
        (step_folder(tmp_path, 1) / "rank_0.msgpack").write_bytes(b"torn")
        assert equal(receive(receiver, 1), micro_batch(seed=7))


def test_a_request_whose_handling_fails_is_handled_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer says once where it goes on."""
    channel = Batches("zmq", tmp_path)
    sender, receiver = channel.sender(), channel.receiver()
    for step in (1, 2, 3):
        sender.send(step, [[micro_batch(step=step)]])
        assert receive(receiver, step).step == step
    receiver.checkpointed(2)
    until(lambda: not step_folder(channel.folder, 2).exists())
    failing(monkeypatch, tmp_path, "steps", STALE)
    receiver.resumed(1)
    sender.send(2, [[micro_batch(step=2)]])
    assert receive(receiver, 2).step == 2
    channel.close()


@pytest.mark.parametrize("kind", ["filesystem", "zmq"])
def test_another_error_ends_the_thread_and_the_next_call_raises_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, tmp_path, "remove_up_to", ZeroDivisionError("a fault of ours"))
    channel = Batches(kind, tmp_path)
    sender, receiver = channel.sender(hwm=1), channel.receiver()
    receiver.checkpointed(0)
    for call in (lambda: sender.send(2, [[micro_batch(step=2)]]), lambda: sender.finish(2)):
        with pytest.raises(TransportError, match="serves the trainer no more, by ZeroDivisionError: a fault of ours"):
            until(call)
    channel.close()


def test_rounds_that_fail_for_too_long_end_the_thread_and_one_that_succeeds_begins_the_count_anew() -> None:
    def fail(errors: list[OSError | None], patience_s: float) -> tuple[Serving, int]:
        left = list(errors)

        def do_round() -> None:
            error = left.pop(0) if left else None
            if error is not None:
                raise error

        serving = Serving(do_round, name="test", patience_s=patience_s, changed=threading.Condition())
        serving.start()
        until(lambda: not left or serving.error is not None)
        serving.close()
        return serving, len(left)

    serving, num_left = fail([STALE] * 9, patience_s=0.0)
    assert (serving.error, num_left) == (STALE, 7)
    serving, num_left = fail([STALE, None, STALE, None], patience_s=0.0)
    assert (serving.error, num_left) == (None, 0)
    serving.check()


def test_a_status_file_that_is_stale_is_not_there_now_and_ends_nobodys_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "train.json"
    StatusFile(path).set("training", step=1)
    watch, errors = PeerWatch(path, name="grpo-train"), [STALE, STALE, OSError(errno.EACCES, "Permission denied")]
    read = Path.read_bytes

    def fails(self: Path) -> bytes:
        if errors:
            raise errors.pop(0)
        return read(self)

    monkeypatch.setattr(Path, "read_bytes", fails)
    watch.check()
    assert read_status(path) is None
    with pytest.raises(PermissionError):
        read_status(path)
    fields = read_status(path)
    assert fields == json.loads(read(path))

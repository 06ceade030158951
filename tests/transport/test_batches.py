"""The contract of batch channels, on both backends; what only sockets have; what strangers can do."""

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from grpo.transport.batches.filesystem import BatchReceiver, BatchSender, FilesystemBatchReceiver
from grpo.transport.batches.store import StepStore
from grpo.transport.batches.zmq import ZmqBatchReceiver, ZmqBatchSender
from grpo.transport.errors import CorruptError, DeadlineError, StaleRunError, StorageError, TransportError
from grpo.transport.folders import step_folder
from grpo.transport.keys import SharedKey
from grpo.transport.ports import free_port
from grpo.transport.records import MicroBatch

from tests.support import until
from tests.transport.samples import damage, equal, micro_batch

KEY, OTHER_KEY = SharedKey("a secret of enough characters"), SharedKey("another secret, as long as that")


class Batches:
    """Makes both ends of one channel, and remakes them as a restart of a process would."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder, self.port, self.checkpointed = kind, folder / "batches", free_port(), 0
        self._open: list[BatchSender | BatchReceiver] = []

    def steps(self) -> list[int]:
        return StepStore(self.folder, run_id="run").steps()

    def sender(self, run_id: str = "run", **options: Any) -> BatchSender:
        options = {"send_timeout_s": 60, "checkpointed": lambda: self.checkpointed, **options}
        made: BatchSender
        if self.kind == "filesystem":
            made = BatchSender(self.folder, run_id=run_id, **options)
        else:
            made = ZmqBatchSender(self.folder, run_id=run_id, **{"port": self.port, "key": KEY, **options})
        self._open.append(made)
        return made

    def receiver(self, rank: int = 0, run_id: str = "run", num_ranks: int = 1, **options: Any) -> BatchReceiver:
        made: BatchReceiver
        place: dict[str, Any] = {"run_id": run_id, "rank": rank, "num_ranks": num_ranks}
        if self.kind == "filesystem":
            made = FilesystemBatchReceiver(self.folder, **place)
        else:
            made = ZmqBatchReceiver(**place, **{"port": self.port, "key": KEY, **options})
        self._open.append(made)
        return made

    def close(self) -> None:
        for end in self._open:
            end.close()


@pytest.fixture(params=["filesystem", "zmq"])
def batches(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Batches]:
    made = Batches(request.param, tmp_path)
    yield made
    made.close()


@pytest.fixture
def sockets(tmp_path: Path) -> Iterator[Batches]:
    made = Batches("zmq", tmp_path)
    yield made
    made.close()


def receive(receiver: BatchReceiver, step: int, timeout_s: float = 60) -> MicroBatch:
    """The only micro-batch of a step."""
    received = receiver.receive(step, timeout_s=timeout_s)
    assert received is not None
    (batch,) = received
    return batch


# --- both backends ---


def test_each_rank_receives_its_own_micro_batches_in_the_order_in_which_it_asks(batches: Batches) -> None:
    sender, receivers = batches.sender(num_ranks=2), [batches.receiver(r, num_ranks=2) for r in range(2)]
    ranks = [[micro_batch(rank=r, index=i, of=2, seed=10 * r + i) for i in range(2)] for r in range(2)]
    sender.send(1, ranks)
    sender.send(2, [[micro_batch(step=2, rank=r)] for r in range(2)])
    for receiver, sent in zip(receivers, ranks, strict=True):
        for _ in range(2):  # twice equals once
            received = receiver.receive(1, timeout_s=60)
            assert received is not None
            assert all(equal(a, b) for a, b in zip(sent, received, strict=True))
        assert receive(receiver, 2).step == 2


def test_fewer_ranks_than_a_step_was_split_over_receive_all_of_it_and_more_are_refused(batches: Batches) -> None:
    sender = batches.sender(num_ranks=3)
    sender.send(1, [[micro_batch(rank=r)] for r in range(3)])
    received = [batches.receiver(r, num_ranks=2).receive(1, timeout_s=60) or () for r in range(2)]
    assert [[batch.rank for batch in of_rank] for of_rank in received] == [[0, 2], [1]]
    with pytest.raises(TransportError, match="split over 3"):
        batches.receiver(0, num_ranks=4).receive(1, timeout_s=60)


def test_a_receiver_waits_for_a_step_that_comes_later_and_checks_meanwhile(batches: Batches) -> None:
    receiver, checks = batches.receiver(), list[int]()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(receiver.receive, 1, timeout_s=60, check=lambda: checks.append(1))
        until(lambda: checks)
        batches.sender().send(1, [[micro_batch()]])
        assert waiting.result()


def test_a_wait_that_is_too_long_names_the_other_side(batches: Batches) -> None:
    sender = batches.sender(hwm=1, send_timeout_s=0.1)
    with pytest.raises(DeadlineError, match=r"orchestrator.*batch 3"):
        batches.receiver().receive(3, timeout_s=0.05)
    sender.close()
    sender = batches.sender(hwm=1, send_timeout_s=0.1)
    sender.send(1, [[micro_batch(step=1)]])
    with pytest.raises(DeadlineError, match=r"trainer.*batch 1"):
        sender.send(2, [[micro_batch(step=2)]])


def test_either_end_may_restart_and_nothing_is_lost(batches: Batches) -> None:
    sender, receiver = batches.sender(), batches.receiver()
    for step in (1, 2):
        sender.send(step, [[micro_batch(step=step)]])
    assert receive(receiver, 1).step == 1
    sender.close()
    (batches.folder / ".step_000003.abc.tmp").mkdir()
    sender = batches.sender()
    assert not list(batches.folder.glob(".*"))
    sender.send(3, [[micro_batch(step=3)]])
    assert receive(receiver, 2).step == 2
    receiver.close()
    sender.finish(3)
    again = batches.receiver()
    assert [receive(again, step).step for step in (1, 2, 3)] == [1, 2, 3]
    assert again.receive(4, timeout_s=60) is None


def test_steps_that_the_trainer_has_a_checkpoint_of_make_room_for_new_ones(batches: Batches) -> None:
    sender, receiver = batches.sender(), batches.receiver()
    for step in range(1, 7):
        batches.checkpointed = 2 if step >= 4 else 0
        sender.send(step, [[micro_batch(step=step, seed=step, lengths=(40 - 5 * step, 3))]])
        assert equal(receive(receiver, step), micro_batch(step=step, seed=step, lengths=(40 - 5 * step, 3)))
        if step == 3:
            assert batches.steps() == [1, 2, 3]
    assert batches.steps() == [3, 4, 5, 6]
    again = batches.receiver()
    assert [receive(again, step).step for step in (3, 4, 5, 6)] == [3, 4, 5, 6]


def test_what_a_rank_only_asks_for_is_not_received(batches: Batches) -> None:
    sender, receiver = batches.sender(), batches.receiver()
    for step in (1, 2):
        sender.send(step, [[micro_batch(step=step)]])
        receive(receiver, step)
    with pytest.raises(DeadlineError):
        receive(receiver, 3, timeout_s=0.3)
    assert sender.received() == 2


def test_a_sender_that_is_too_far_ahead_is_slowed_and_nothing_is_dropped(batches: Batches) -> None:
    sender, receiver, sent, steps = batches.sender(hwm=3), batches.receiver(), list[int](), list(range(1, 9))

    def send_all() -> None:
        for step in steps:
            sender.send(step, [[micro_batch(step=step)]])
            sent.append(step)

    with ThreadPoolExecutor() as pool:
        pool.submit(send_all)
        until(lambda: len(sent) == 3)
        time.sleep(0.2)
        assert len(sent) == 3
        assert [receive(receiver, step).step for step in steps] == steps
    assert sent == steps


@pytest.mark.parametrize(
    ("wrong", "kind"), [({"step": 2}, CorruptError), ({"of": 2}, CorruptError), ({"run_id": "other"}, StaleRunError)]
)
def test_a_sender_refuses_what_is_not_the_step_and_rank(
    batches: Batches, wrong: dict[str, Any], kind: type[Exception]
) -> None:
    with pytest.raises(kind):
        batches.sender().send(1, [[micro_batch(**wrong)]])


def test_a_batch_of_another_run_is_refused(batches: Batches) -> None:
    batches.sender(run_id="old").send(1, [[micro_batch(run_id="old")]])
    with pytest.raises(StaleRunError):
        batches.receiver().receive(1, timeout_s=60)


@pytest.mark.parametrize(
    ("name", "how"), [("rank_0.msgpack", "flip"), ("rank_0.msgpack", "remove"), ("manifest.json", "flip")]
)
def test_a_damaged_batch_is_an_error_that_names_it(batches: Batches, name: str, how: str) -> None:
    sender = batches.sender()
    sender.send(1, [[micro_batch(seed=7)]])
    sender.close()
    folder, store = step_folder(batches.folder, 1), StepStore(batches.folder, run_id="run")
    assert store.is_whole(1)
    damage(folder / name, how)
    assert not store.is_whole(1)
    batches.sender()
    with pytest.raises(TransportError, match="batch 1"):
        batches.receiver().receive(1, timeout_s=60)


def test_a_step_that_is_there_stays_and_another_batch_of_it_is_an_error(batches: Batches) -> None:
    sender, receiver = batches.sender(), batches.receiver()
    sender.send(1, [[micro_batch(seed=1)]])
    with pytest.raises(StorageError):
        sender.send(1, [[micro_batch(seed=2)]])
    assert equal(receive(receiver, 1), micro_batch(seed=1))


def test_a_full_disk_is_an_error_that_loses_nothing(batches: Batches, small_disk: Callable[[Path], None]) -> None:
    small_disk(batches.folder)
    sender, receiver = batches.sender(), batches.receiver()
    sender.send(1, [[micro_batch(step=1, lengths=(4000,))]])
    with pytest.raises(StorageError):
        sender.send(2, [[micro_batch(step=2, lengths=(40_000,))]])
    assert not list(batches.folder.glob(".*"))
    sender.close()
    sender = batches.sender()
    sender.send(2, [[micro_batch(step=2, lengths=(4000,))]])
    assert [receive(receiver, step).step for step in (1, 2)] == [1, 2]


# --- sockets and strangers ---


def refused(receiver: BatchReceiver) -> str:
    """What a receiver says at a deadline by which it knows that the other side has another key."""

    def said() -> str | None:
        with pytest.raises(DeadlineError) as raised:
            receiver.receive(1, timeout_s=0.1)
        return message if "another key" in (message := str(raised.value)) else None

    return until(said) or ""


def test_a_key_that_is_too_short_and_a_port_in_use_are_refused(sockets: Batches) -> None:
    with pytest.raises(TransportError):
        SharedKey("short")
    sockets.sender()
    with pytest.raises(TransportError, match=str(sockets.port)):
        sockets.sender()


def test_who_has_another_key_gets_nothing_and_is_told_how_to_give_both_the_same(sockets: Batches) -> None:
    sockets.sender().send(1, [[micro_batch()]])
    assert re.search(r"another key.*output_dir.*key_var", refused(sockets.receiver(key=OTHER_KEY)))
    assert receive(sockets.receiver(), 1).step == 1


@pytest.mark.parametrize("key", [None, OTHER_KEY])
def test_what_has_not_the_key_is_not_asked_and_is_named_by_the_deadline(
    sockets: Batches, key: SharedKey | None
) -> None:
    receiver = sockets.receiver()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as impostor:
        impostor.linger = 0
        if key is not None:
            key.encrypt(impostor, serves=True)
        impostor.bind(f"tcp://127.0.0.1:{sockets.port}")
        refused(receiver)
        assert not impostor.poll(0)
    sockets.sender().send(1, [[micro_batch()]])
    assert receive(receiver, 1).step == 1


@contextmanager
def asking(sockets: Batches, key: SharedKey | None) -> Iterator[Any]:
    """A socket that sends what it likes."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        if key is not None:
            key.encrypt(socket, serves=False)
        socket.connect(f"tcp://127.0.0.1:{sockets.port}")
        yield socket


QUESTION = {"run_id": "run", "rank": 0, "num_ranks": 1, "step": 2**60}


@pytest.mark.parametrize("key", [None, OTHER_KEY])
def test_strangers_learn_nothing_remove_nothing_and_end_nothing(sockets: Batches, key: SharedKey | None) -> None:
    sender, receiver = sockets.sender(), sockets.receiver()
    for step in (1, 2):
        sender.send(step, [[micro_batch(step=step)]])
    with asking(sockets, key) as stranger:
        ask = msgspec.msgpack.encode(QUESTION | {"step": 1})
        for frames in ([b"\xff"], [b"", b""], [ask], [ask, b""], [b"a"] * 50, [bytes(10_000_000)]):
            with contextlib.suppress(zmq.Again):  # nothing can be sent once the handshake was refused
                stranger.send_multipart(frames, zmq.NOBLOCK)
        assert not stranger.poll(300)
        assert [receive(receiver, step).step for step in (1, 2)] == [1, 2]
    assert sockets.steps() == [1, 2]
    sender.finish(2)


def test_an_absurd_question_of_who_has_the_key_harms_nobody(sockets: Batches) -> None:
    sender, receiver = sockets.sender(), sockets.receiver()
    with asking(sockets, KEY) as absurd:
        places = [(0, 0), (0, -1), (0, 2**61), (2**60, 1), (2, 2)]
        asks = [QUESTION, *({**QUESTION, "rank": rank, "num_ranks": num, "step": 1} for rank, num in places)]
        for frames in ([b"\xff"], [b"", b""], *([msgspec.msgpack.encode(ask)] for ask in asks)):
            absurd.send_multipart(frames)
        sender.send(1, [[micro_batch()]])
        assert receive(receiver, 1).step == 1
        with absurd.get_monitor_socket(zmq.EVENT_DISCONNECTED) as lost:
            absurd.send(bytes(10_000_000))
            assert lost.poll(60_000), "a question has at most 4 KiB"
            absurd.disable_monitor()
        sender.send(2, [[micro_batch(step=2)]])
        assert receive(receiver, 2).step == 2
    assert sockets.steps() == [1, 2]

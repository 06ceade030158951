"""What only sockets have: keys, strangers, damaged messages, reconnects."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.transport.samples import equal, free_port, micro_batch
from transport.batches import zmq as channel
from transport.batches.store import StepStore
from transport.batches.zmq import ZmqBatchReceiver, ZmqBatchSender
from transport.curve import SharedKey, is_loopback
from transport.errors import DeadlineError, TransportError

KEY, OTHER_KEY = SharedKey("a secret of enough characters"), SharedKey("another secret, as long as that")


def test_both_ends_with_the_same_key_understand_each_other(tmp_path: Path) -> None:
    port = free_port()
    with (
        ZmqBatchSender(tmp_path, run_id="run", port=port, key=KEY) as sender,
        ZmqBatchReceiver(tmp_path / "q", run_id="run", port=port, key=KEY) as receiver,
    ):
        sender.send(1, [[micro_batch()]])
        received = receiver.receive(1, timeout_s=60)
        assert received is not None
        assert equal(received[0], micro_batch())


@pytest.mark.parametrize("key", [None, OTHER_KEY], ids=["no key", "another key"])
def test_a_stranger_gets_nothing(tmp_path: Path, key: SharedKey | None) -> None:
    port = free_port()
    with (
        ZmqBatchSender(tmp_path, run_id="run", port=port, key=KEY) as sender,
        ZmqBatchReceiver(tmp_path / "q", run_id="run", port=port, key=key) as receiver,
    ):
        sender.send(1, [[micro_batch()]])
        with pytest.raises(DeadlineError, match="not connected"):
            receiver.receive(1, timeout_s=0.7)


def test_an_address_that_others_reach_is_refused_without_a_key(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match=r"'0\.0\.0\.0' can be reached from other machines, and no key is set"):
        ZmqBatchSender(tmp_path, run_id="run", host="0.0.0.0", port=free_port())
    ZmqBatchSender(tmp_path, run_id="run", host="0.0.0.0", port=free_port(), key=KEY).close()


def test_loopback_is_told_from_what_others_reach() -> None:
    assert all(is_loopback(host) for host in ("localhost", "127.0.0.1", "127.3.2.1", "::1"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "192.0.2.1", "*"))


def test_a_key_that_is_too_short_is_refused() -> None:
    with pytest.raises(TransportError, match="has 5 characters, expected at least 16; make one with: openssl"):
        SharedKey("short")


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    port = free_port()
    with (
        ZmqBatchSender(tmp_path, run_id="run", port=port),
        pytest.raises(
            TransportError, match=rf"localhost:{port} cannot be bound: Address already in use .*give another"
        ),
    ):
        ZmqBatchSender(tmp_path / "other", run_id="run", port=port)


def test_requests_that_nobody_understands_are_answered_and_harm_nobody(tmp_path: Path) -> None:
    port = free_port()
    with (
        ZmqBatchSender(tmp_path, run_id="run", port=port) as sender,
        ZmqBatchReceiver(tmp_path / "q", run_id="run", port=port) as receiver,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as stranger,
    ):
        stranger.linger = 0
        stranger.connect(f"tcp://127.0.0.1:{port}")
        for nonsense in ([b"\xff\xff"], [b""], [b"\x93\x01\x02\x03"], [b"a"] * 50):
            stranger.send_multipart(nonsense)
            assert stranger.poll(60_000)
            assert b"refused" in stranger.recv_multipart()[0]
        sender.send(1, [[micro_batch()]])
        assert receiver.receive(1, timeout_s=60) is not None


def test_a_message_damaged_on_its_way_is_set_aside_and_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, damaged = free_port(), []
    decode = channel.decode

    def decode_damaged_once(message: memoryview) -> object:
        if damaged:
            return decode(message)
        damaged.append(1)
        return decode(bytes(message[:-9]))

    monkeypatch.setattr(channel, "decode", decode_damaged_once)
    with (
        ZmqBatchSender(tmp_path / "s", run_id="run", port=port) as sender,
        ZmqBatchReceiver(tmp_path / "q", run_id="run", port=port) as receiver,
    ):
        sender.send(1, [[micro_batch(seed=3)]])
        received = receiver.receive(1, timeout_s=60)
        assert received is not None
        assert equal(received[0], micro_batch(seed=3))
    assert [path.name for path in (tmp_path / "q").iterdir()] == ["step_000001.rank_0.attempt_1"]


def test_a_receiver_outlives_several_restarts_of_the_sender(tmp_path: Path) -> None:
    port, received = free_port(), []

    def receive_all() -> None:
        with ZmqBatchReceiver(tmp_path / "q", run_id="run", port=port) as receiver:
            for step in range(1, 9):
                batches = receiver.receive(step, timeout_s=60)
                assert batches is not None
                received.append(batches[0].step)

    thread = threading.Thread(target=receive_all)
    thread.start()
    for first in (1, 3, 5, 7):
        with ZmqBatchSender(tmp_path / "s", run_id="run", port=port) as sender:
            for step in (first, first + 1):
                sender.send(step, [[micro_batch(step=step)]])
            deadline = time.monotonic() + 60
            while first > 1 and len(received) < first and time.monotonic() < deadline:
                time.sleep(0.01)
    with ZmqBatchSender(tmp_path / "s", run_id="run", port=port):
        thread.join(60)
    assert received == list(range(1, 9))


def test_a_batch_is_handed_out_once_it_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender that is killed before the batch is in its spool would make it anew, and another one."""
    port, may_write = free_port(), threading.Event()
    write = StepStore.write

    def held_back(store: StepStore, step: int, messages: Any, **options: Any) -> None:
        assert may_write.wait(30)
        write(store, step, messages, **options)

    monkeypatch.setattr(StepStore, "write", held_back)
    with (
        ZmqBatchSender(tmp_path / "spool", run_id="run", port=port) as sender,
        ZmqBatchReceiver(tmp_path / "quarantine", run_id="run", port=port) as receiver,
    ):
        sending = threading.Thread(target=sender.send, args=(1, [[micro_batch()]]))
        sending.start()
        with pytest.raises(DeadlineError, match="deliver batch 1"):
            receiver.receive(1, timeout_s=1.0)
        may_write.set()
        sending.join(30)
        assert receiver.receive(1, timeout_s=30) is not None

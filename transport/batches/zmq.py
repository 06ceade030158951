"""Batches over ZeroMQ: each rank of the trainer asks the orchestrator for step n, and gets its bytes.

    rank → sender   Ask
    sender → rank   Answer, the messages

A question stays open until the step is on the sender's disk. It is asked again after every connect, so that a restart
of either side in any order loses nothing. Connections are encrypted with CURVE, on loopback too, and only holders of
the run's key can make one. Both sides exchange ZeroMQ heartbeats.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import zmq
import zmq.utils.monitor
from grpo.transport.batches.filesystem import BatchReceiver, BatchSender, nothing
from grpo.transport.batches.store import REMEDY, decode_checked, parts_of
from grpo.transport.codec import MAX_MESSAGE_BYTES
from grpo.transport.errors import CorruptError, DeadlineError, StaleRunError, TransportError
from grpo.transport.folders import Buffer, file_entry, map_file
from grpo.transport.keys import SharedKey
from grpo.transport.records import FileEntry, MicroBatch, Natural, Record, require

log = logging.getLogger(__name__)
_HEARTBEAT_MS, _SILENCE_MS = 1000, 5000
_WAIT_MS = 200
_MAX_ASK_BYTES = 4096
_NO_HANDSHAKE = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_REPEAT_S = 20.0
"""A question that has no answer is asked again so often."""
_OTHER_KEY = (
    "what listens there has another key than this run's: give both programs one output_dir, or the same secret in the "
    "environment variable that rollout_transport.key_var names"
)


class Ask(Record, frozen=True, kw_only=True):
    """A rank's question for a step; it has received all earlier ones."""

    run_id: str
    rank: Natural
    num_ranks: Annotated[int, msgspec.Meta(ge=1, le=2**16)]
    """Ranks that the trainer has now: what was split over more is divided among them."""
    step: Natural

    def __post_init__(self) -> None:
        require(self.rank < self.num_ranks, f"rank {self.rank} asks, of {self.num_ranks} ranks")


class Answer(Record, frozen=True, kw_only=True):
    """The answer to the question for this step."""

    kind: Literal["batch", "finished", "refused"]
    step: Natural
    entries: tuple[FileEntry, ...] = ()
    """Size and digest of each message of the batch."""
    reason: str = ""
    """Why it is refused."""


def _new_socket(kind: int, *, max_bytes: int) -> zmq.Socket[bytes]:
    socket = zmq.Context().socket(kind)
    socket.linger = 0
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    return socket


def _address(host: str, port: int) -> str:
    return f"{'127.0.0.1' if host == 'localhost' else host}:{port}"


class ZmqBatchSender(BatchSender):
    """Binds to `host:port` and serves the store."""

    def __init__(
        self, folder: Path, *, host: str = "localhost", port: int = 5555, key: SharedKey, **options: Any
    ) -> None:
        """`options` are those of every sender."""
        super().__init__(folder, **options)
        self._received = dict.fromkeys(range(self._num_ranks), 0)
        self._open: dict[int, tuple[bytes, Ask]] = {}
        """By rank, the question that has no answer yet, and the identity of the socket that sent it."""
        self._error: BaseException | None = None
        self._last_step: int | None = None
        self._closing = threading.Event()
        self._socket = _new_socket(zmq.ROUTER, max_bytes=_MAX_ASK_BYTES)
        key.encrypt(self._socket, serves=True)
        try:
            self._socket.bind(f"tcp://{_address(host, port)}")
        except zmq.ZMQError as error:
            self._socket.context.destroy()
            where = f"rollout_transport {host}:{port} cannot be bound"
            raise TransportError(f"{where}: {error.strerror}; give another host or port") from error
        self._news = os.eventfd(0)
        """Wakes the thread that serves: a step is on disk, or the end has come."""
        self._thread = threading.Thread(target=self._serve, name="batch-zmq", daemon=True)
        self._thread.start()

    def received(self) -> int:
        if self._error is not None:
            why = f"{type(self._error).__name__}: {self._error}"
            raise TransportError(f"the sender of batches serves the trainer no more: {why}") from self._error
        return min(self._received.values())

    def finish(self, last_step: int) -> None:
        self.received()
        super().finish(last_step)
        self._last_step = last_step
        os.eventfd_write(self._news, 1)

    def close(self) -> None:
        """Waits until every rank that has asked knows of the end, at most as long as a heartbeat may take."""
        if self._closing.is_set():
            return
        deadline = time.monotonic() + _SILENCE_MS / 1000
        while self._somebody_waits() and time.monotonic() < deadline:
            time.sleep(0.005)
        self._closing.set()
        os.eventfd_write(self._news, 1)
        self._thread.join()
        os.close(self._news)
        self._socket.context.destroy(linger=_HEARTBEAT_MS)

    def send(self, step: int, ranks: Sequence[Sequence[MicroBatch]]) -> None:
        super().send(step, ranks)
        os.eventfd_write(self._news, 1)

    def _somebody_waits(self) -> bool:
        """Returns whether a rank that has asked does not know yet that no more steps come."""
        if self._last_step is None or self._error is not None or not any(self._received.values()):
            return False
        return bool(self._open) or min(self._received.values()) < self._last_step

    def _serve(self) -> None:
        """Consumes the ranks' questions. Waits for them, and for the steps that they ask for. Ends with `close`, or an
        error, which the next call raises."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._news, zmq.POLLIN)
        try:
            while not self._closing.is_set():
                ready = dict(poller.poll())
                if self._news in ready:
                    os.eventfd_read(self._news)
                if self._socket in ready:
                    identity, *frames = self._socket.recv_multipart()
                    try:
                        ask = msgspec.msgpack.decode(b"".join(frames), type=Ask)
                        self._open[ask.rank] = identity, ask
                    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                        log.warning("a question for batches gets no answer: %s", error)
                for rank, (identity, ask) in list(self._open.items()):
                    if (answered := self._answer(ask)) is not None:
                        answer, messages = msgspec.msgpack.encode(answered[0]), answered[1]
                        self._socket.send_multipart([identity, answer, *messages], copy=False)
                        del self._open[rank]
        except BaseException as error:  # nobody is above a thread
            log.exception("the sender of batches serves the trainer no more")
            self._error = error

    def _answer(self, ask: Ask) -> tuple[Answer, Sequence[Buffer]] | None:
        """Returns the answer to a question and its messages, or None where there is none yet."""
        try:
            if ask.run_id != self._store.run_id:
                raise StaleRunError("it serves another run")
            for part in parts_of(ask.step, self._num_ranks, ask.rank, ask.num_ranks):
                self._received[part] = max(0, ask.step - 1)
            found = self._store.messages(ask.step, ask.rank, ask.num_ranks, read=map_file)
        except TransportError as error:
            return Answer(kind="refused", step=ask.step, reason=str(error)), ()
        if found is not None:
            entries = tuple(entry for _, entry in found)
            return Answer(kind="batch", step=ask.step, entries=entries), [message for message, _ in found]
        finished = self._store.finished_before(ask.step)
        return (Answer(kind="finished", step=ask.step), ()) if finished else None


class ZmqBatchReceiver(BatchReceiver):
    """Connects to the orchestrator at `host:port`."""

    def __init__(
        self,
        *,
        run_id: str,
        rank: int = 0,
        num_ranks: int = 1,
        host: str = "localhost",
        port: int = 5555,
        key: SharedKey,
    ) -> None:
        self._run_id, self._rank, self._num_ranks = run_id, rank, num_ranks
        self._where = _address(host, port)
        self._socket = _new_socket(zmq.DEALER, max_bytes=MAX_MESSAGE_BYTES)
        self._socket.immediate = True  # questions are for a connection that is there
        key.encrypt(self._socket, serves=False)
        self._events = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | _NO_HANDSHAKE)
        """Tell that a connection was lost, and the question with it, or that none can be made."""
        self._socket.connect(f"tcp://{self._where}")
        self._asked: Ask | None = None
        """The question that has no answer yet."""
        self._asked_s = 0.0
        """When it was asked, on the monotonic clock."""
        self._state = "not connected"

    def receive(
        self, step: int, *, timeout_s: float, check: Callable[[], None] = nothing
    ) -> tuple[MicroBatch, ...] | None:
        deadline = time.monotonic() + timeout_s
        while (answered := self._answer(step)) is None:
            if time.monotonic() > deadline:
                waited = f"waited {timeout_s:g} s for the orchestrator to deliver batch {step}"
                raise DeadlineError(f"{waited} from {self._where} ({self._state})")
            check()
        answer, messages = answered
        if answer.kind == "finished":
            return None
        if answer.kind == "refused" or len(messages) != len(answer.entries):
            raise StaleRunError(f"the orchestrator at {self._where} refuses batch {step}: {answer.reason}")
        self._ask(step + 1)  # it travels while this one is trained
        for message, entry in zip(messages, answer.entries, strict=True):
            if file_entry(message) != entry:
                raise CorruptError(f"batch {step} from {self._where} is corrupt; {REMEDY}")
        place = {"rank": self._rank, "num_ranks": self._num_ranks}
        return decode_checked(messages, run_id=self._run_id, step=step, **place)

    def close(self) -> None:
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._events.close()
            self._socket.context.destroy(linger=0)

    def _ask(self, step: int) -> None:
        """Asks for `step`, where there is a connection."""
        place = {"rank": self._rank, "num_ranks": self._num_ranks}
        ask = Ask(run_id=self._run_id, step=step, **place)
        with contextlib.suppress(zmq.Again):
            self._socket.send(msgspec.msgpack.encode(ask), zmq.NOBLOCK)
            self._asked, self._state, self._asked_s = ask, "connected", time.monotonic()

    def _answer(self, step: int) -> tuple[Answer, Sequence[Buffer]] | None:
        """Returns the answer to a question for `step`, or None where none has come within 0.2 s."""
        while self._events.poll(0):
            self._on_event(zmq.utils.monitor.recv_monitor_message(self._events)["event"])
        is_old = time.monotonic() - self._asked_s > _REPEAT_S  # another who has the key may have asked in its place
        if self._asked is None or self._asked.step != step or is_old:
            self._ask(step)
        if not self._socket.poll(_WAIT_MS):
            return None
        head, *messages = [frame.buffer for frame in self._socket.recv_multipart(copy=False)]
        try:
            answer = msgspec.msgpack.decode(head, type=Answer)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CorruptError(f"the orchestrator at {self._where} answers what cannot be read: {error}") from error
        if answer.step != step:
            return None  # it was asked earlier
        self._asked = None
        return answer, messages

    def _on_event(self, event: int) -> None:
        """Notes that there is no connection, and warns once where the key is the reason."""
        self._asked = None
        if event == zmq.EVENT_DISCONNECTED:
            self._state = "not connected" if self._state == "connected" else self._state
            return
        if self._state != _OTHER_KEY:
            self._state = _OTHER_KEY
            log.warning("%s: %s", self._where, _OTHER_KEY)
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:  # after which ZeroMQ tries no more by itself
            with contextlib.suppress(zmq.ZMQError):
                self._socket.disconnect(f"tcp://{self._where}")
            self._socket.connect(f"tcp://{self._where}")

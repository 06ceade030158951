"""Batches over ZeroMQ: the orchestrator binds, each rank of the trainer connects and asks for the step it wants.

    rank → sender   {kind: next | got | checkpointed, run_id, rank, step}
    sender → rank   {kind: batch, run_id, step, kept} | {kind: kept, step} | {kind: finished, last_step} |
                    {kind: refused, reason}, and the message

`next` is sent again after every reconnect, so a restart of either side in any order loses nothing; a batch that comes
twice is recognised by its step and ignored. Sent steps lie in a spool on the sender's disk until a checkpoint has
passed them (written without fsync: the spool survives the process, not a power cut); at most `hwm` of them may be
unreceived, then `send` waits. A batch travels while it is written; the receiver hands it out once it hears that it is
kept, so that no trainer has a batch that a killed sender would make anew. Both sides exchange ZeroMQ heartbeats.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgpack
import zmq
import zmq.utils.monitor

from transport import faults
from transport.batches.base import BatchReceiver, BatchSender, check_delivery, nothing, too_slow
from transport.batches.serving import Serving
from transport.batches.store import StepStore
from transport.codec import decode
from transport.curve import SharedKey, require_key_beyond_loopback
from transport.errors import (
    CorruptError,
    DeadlineError,
    MissingRankError,
    SchemaVersionError,
    StaleRunError,
    TransportError,
)
from transport.folders import Buffer
from transport.records import MicroBatch

logger = logging.getLogger(__name__)
HEARTBEAT_MS = 1000
HEARTBEAT_TIMEOUT_MS = 5000
MAX_ATTEMPTS = 3
_POLL_MS = 200
_CONTROL_BYTES = 1 << 24


def _new_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = 0  # bounded by `hwm` steps in `send`; a limit in frames would drop them
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    return socket


def _unpack(frame: Buffer) -> dict[str, Any]:
    """A control frame. Raises `CorruptError`."""
    if len(frame) > _CONTROL_BYTES:
        raise CorruptError(f"control frame of {len(frame)} bytes, at most {_CONTROL_BYTES} are read")
    try:
        fields: Any = msgpack.unpackb(frame, strict_map_key=True)
    except (ValueError, msgpack.UnpackException, RecursionError, TypeError) as error:
        raise CorruptError(f"control frame is not msgpack: {error!r}") from error
    if not isinstance(fields, dict):
        raise CorruptError(f"control frame is a {type(fields).__name__}, expected a map")
    return fields


def _number(fields: dict[str, Any], name: str) -> int:
    value = fields.get(name)
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise CorruptError(f"control frame has {name} = {value!r}, expected a number from 0")
    return value


class ZmqBatchSender(BatchSender):
    """Binds to `host:port` and serves the steps in `spool`, a folder of its own."""

    def __init__(
        self,
        spool: Path,
        *,
        run_id: str,
        num_ranks: int = 1,
        host: str = "localhost",
        port: int = 5555,
        hwm: int = 10,
        send_timeout_s: float = 1200.0,
        key: SharedKey | None = None,
    ) -> None:
        """`num_ranks` says before the first `send` on how many ranks the removal of an earlier sender's steps waits."""
        require_key_beyond_loopback(host, key)
        self._store, self._hwm, self._send_timeout_s = StepStore(spool, run_id=run_id), hwm, send_timeout_s
        self._store.prepare()
        self._recent: dict[int, list[Buffer]] = {}
        self._kept: set[int] = set()
        """Of the recent steps those that are in the spool."""
        self._owed: dict[bytes, int] = {}
        """Ranks that have a step and do not know yet that it is kept."""
        self._received: dict[int, int] = {}
        self._checkpointed: dict[int, int] = {}
        self._is_passed = False
        """Whether steps that checkpoints have passed are to be removed."""
        self._requests: deque[tuple[bytes, list[bytes]]] = deque()
        """From whom, and what: not yet handled, at most one."""
        self._waiting: dict[bytes, tuple[int, int]] = {}
        self._num_ranks = num_ranks
        self._last_step: int | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = _new_socket(self._context, zmq.ROUTER)
        self._authenticator = None if key is None else key.guard_server(self._context, self._socket)
        try:
            self._socket.bind(f"tcp://{'127.0.0.1' if host == 'localhost' else host}:{port}")
        except zmq.ZMQError as error:
            self._end_sockets()
            where = f"rollout_transport {host}:{port} cannot be bound"
            raise TransportError(f"{where}: {error.strerror}; give another host or port") from error
        self._wake_receive = self._context.socket(zmq.PAIR)
        self._wake_send = self._context.socket(zmq.PAIR)
        self._wake_receive.bind("inproc://wake")
        self._wake_send.connect("inproc://wake")
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_receive, zmq.POLLIN)
        self._serving = Serving(
            self._serve, name="batch-zmq", patience_s=send_timeout_s, changed=self._changed, wake=self._wake
        )
        self._serving.start()

    def send(self, step: int, ranks: Sequence[Sequence[MicroBatch]]) -> None:
        messages = self._store.encode(step, ranks)
        with self._changed:
            self._num_ranks = len(ranks)
            self._changed.wait_for(
                lambda: self._serving.error is not None or len(self._recent) < self._hwm, self._send_timeout_s
            )
            self._serving.check()
            if len(self._recent) >= self._hwm:
                raise too_slow(self._send_timeout_s, list(self._recent))
            self._recent[step] = messages
            self._wake_send.send(b"")
        self._store.write(step, messages, durable=False)  # while the first bytes are on their way
        with self._changed:
            self._kept.add(step)
            self._forget_received()
            self._changed.notify_all()
            self._wake_send.send(b"")
        faults.point("batch.sent")

    def finish(self, last_step: int) -> None:
        self._serving.check()
        self._store.write_finished(last_step)
        with self._changed:
            self._last_step = last_step
            self._wake_send.send(b"")

    def close(self) -> None:
        """Waits until every rank that took part knows of the end, at most as long as a heartbeat may take."""
        if self._closed:
            return
        self._closed = True
        with self._changed:
            if self._last_step is not None and self._received:
                last_step = self._last_step
                self._changed.wait_for(
                    lambda: (
                        self._serving.error is not None or all(step > last_step for step in self._received.values())
                    ),
                    HEARTBEAT_TIMEOUT_MS / 1000,
                )
        self._serving.close()
        self._end_sockets()

    def _wake(self) -> None:
        with self._changed:
            self._wake_send.send(b"")

    def _end_sockets(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.destroy(linger=HEARTBEAT_MS)

    def _serve(self) -> None:
        """Consumes a request of a rank; waits for it, and for `send`, a fifth of a second."""
        ready = dict(self._poller.poll(_POLL_MS))
        if self._wake_receive in ready:
            self._wake_receive.recv()
        if self._socket in ready and not self._requests:
            identity, *frames = self._socket.recv_multipart()
            self._requests.append((identity, frames))
        if self._requests:
            self._handle(*self._requests[0])
            self._requests.popleft()
        if self._is_passed:
            self._remove_passed()
        self._say_kept()
        for identity, (rank, step) in list(self._waiting.items()):
            self._answer(identity, rank, step)

    def _handle(self, identity: bytes, frames: list[bytes]) -> None:
        try:
            fields = _unpack(frames[0] if frames else b"")
            kind, rank, step = fields.get("kind"), _number(fields, "rank"), _number(fields, "step")
        except CorruptError as error:
            self._refuse(identity, f"request not understood: {error}")
            return
        if fields.get("run_id") != self._store.run_id:
            self._refuse(identity, f"the orchestrator serves run {self._store.run_id}, not {fields.get('run_id')}")
            return
        with self._changed:
            if kind == "next":
                self._waiting[identity] = (rank, step)
                self._received[rank] = max(self._received.get(rank, 0), step - 1)
            elif kind == "got":
                self._received[rank] = max(self._received.get(rank, 0), step)
            elif kind == "checkpointed":
                self._checkpointed[rank] = max(self._checkpointed.get(rank, 0), step)
                self._is_passed = True
            elif kind == "resumed":
                self._rewind(identity, rank, step)
            self._forget_received()
            self._changed.notify_all()

    def _rewind(self, identity: bytes, rank: int, step: int) -> None:
        """Takes `rank` to have received and kept what is up to `step`, and tells it which later ones are gone."""
        held = {*self._store.steps(), *self._recent}
        newest = max((self._checkpointed.get(rank, 0), *held))
        if gone := [later for later in range(step + 1, newest + 1) if later not in held]:
            self._reply(identity, {"kind": "gone", "first": gone[0], "last": gone[-1]})
        self._waiting = {other: wanted for other, wanted in self._waiting.items() if wanted[0] != rank}
        self._received[rank] = self._checkpointed[rank] = step

    def _forget_received(self) -> None:
        received = min(self._received.get(rank, 0) for rank in range(self._num_ranks))
        for step in [step for step in self._kept if step <= received]:
            del self._recent[step]
            self._kept.remove(step)

    def _remove_passed(self) -> None:
        with self._changed:
            self._store.remove_up_to(min(self._checkpointed.get(rank, 0) for rank in range(self._num_ranks)))
        self._is_passed = False

    def _is_kept(self, step: int) -> bool:
        with self._changed:
            return step in self._kept or step not in self._recent

    def _say_kept(self) -> None:
        for identity, step in list(self._owed.items()):
            if self._is_kept(step):
                self._reply(identity, {"kind": "kept", "step": step})
                del self._owed[identity]

    def _answer(self, identity: bytes, rank: int, step: int) -> None:
        """Sends what `rank` waits for, if it is there."""
        try:
            message = self._message(rank, step)
        except TransportError as error:
            del self._waiting[identity]
            self._refuse(identity, str(error))
            return
        if message is not None:
            kept = self._is_kept(step)
            self._reply(identity, {"kind": "batch", "run_id": self._store.run_id, "step": step, "kept": kept}, message)
            if not kept:
                self._owed[identity] = step
        elif self._store.finished_before(step):
            self._reply(identity, {"kind": "finished", "last_step": step - 1})
            with self._changed:
                self._received[rank] = max(self._received.get(rank, 0), step)
                self._changed.notify_all()
        else:
            return
        del self._waiting[identity]

    def _message(self, rank: int, step: int) -> Buffer | None:
        with self._changed:
            messages = self._recent.get(step)
        if messages is None:
            return self._store.read_message(step, rank)
        if rank >= len(messages):
            raise MissingRankError(step, len(messages), rank)
        return messages[rank]

    def _refuse(self, identity: bytes, reason: str) -> None:
        self._reply(identity, {"kind": "refused", "reason": reason})

    def _reply(self, identity: bytes, control: dict[str, Any], message: Buffer = b"") -> None:
        self._socket.send_multipart([identity, msgpack.packb(control), message], copy=False)


class ZmqBatchReceiver(BatchReceiver):
    """Connects to the orchestrator at `host:port`."""

    def __init__(
        self,
        quarantine: Path,
        *,
        run_id: str,
        rank: int = 0,
        host: str = "localhost",
        port: int = 5555,
        key: SharedKey | None = None,
    ) -> None:
        self._run_id, self._rank, self._quarantine = run_id, rank, quarantine
        self._where = f"{'127.0.0.1' if host == 'localhost' else host}:{port}"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = _new_socket(self._context, zmq.DEALER)
        if key is not None:
            key.guard_client(self._socket)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._socket.connect(f"tcp://{self._where}")
        self._connected = False
        self._asked_for = 0

    def receive(
        self, step: int, *, timeout_s: float, check: Callable[[], None] = nothing
    ) -> tuple[MicroBatch, ...] | None:
        deadline, attempts, batches = time.monotonic() + timeout_s, 0, None
        if self._connected and self._asked_for != step:
            self._ask(step)
        while True:
            frames = self._next_message(step, deadline, timeout_s, check)
            try:
                control = _unpack(frames[0])
                if control.get("kind") == "finished":
                    return None
                if control.get("kind") == "refused":
                    raise StaleRunError(f"the orchestrator at {self._where} refused: {control.get('reason')}")
                if control.get("kind") == "gone":
                    first, last = _number(control, "first"), _number(control, "last")
                    logger.warning(
                        "the orchestrator has removed batches %d to %d; it must send them again", first, last
                    )
                    continue
                if control.get("step") != step:  # came twice, or before a reconnect
                    continue
                if control.get("kind") == "batch":
                    self._ask(step + 1)  # it travels while this one is decoded and trained
                    batches = self._decode(control, frames[-1], step)
                if batches is None or not (control.get("kind") == "kept" or control.get("kept") is True):
                    continue
            except (CorruptError, SchemaVersionError) as error:
                attempts += 1
                aside = self._set_aside(step, attempts, frames)
                logger.error("batch %d is corrupt, asking for it again; it lies in %s: %s", step, aside, error)
                if attempts == MAX_ATTEMPTS:
                    raise CorruptError(f"batch {step} was corrupt {attempts} times, lastly: {error}") from error
                self._ask(step)
                continue
            faults.point("batch.received")
            self._say("got", step)
            faults.point("batch.acknowledged")
            return batches

    def checkpointed(self, step: int) -> None:
        self._say("checkpointed", step)

    def resumed(self, step: int) -> None:
        self._say("resumed", step)

    def close(self) -> None:
        if not self._context.closed:
            self._socket.disable_monitor()
            self._monitor.close()
            self._context.destroy(linger=HEARTBEAT_MS)

    def _next_message(
        self, step: int, deadline: float, timeout_s: float, check: Callable[[], None]
    ) -> list[memoryview]:
        """The next message; asks for `step` after every connect. Raises `DeadlineError`."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        while (left_s := deadline - time.monotonic()) > 0:
            ready = dict(poller.poll(min(_POLL_MS, int(left_s * 1000) + 1)))
            if self._monitor in ready:
                event = zmq.utils.monitor.recv_monitor_message(self._monitor)["event"]
                self._connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
                if self._connected:
                    self._ask(step)
            if self._socket in ready:
                return [frame.buffer for frame in self._socket.recv_multipart(copy=False)]
            check()
        state = "connected" if self._connected else "not connected"
        waited = f"waited {timeout_s:g} s for the orchestrator to deliver batch {step}"
        raise DeadlineError(f"{waited} from {self._where} ({state})")

    def _decode(self, control: dict[str, Any], message: memoryview, step: int) -> tuple[MicroBatch, ...]:
        if control.get("run_id") != self._run_id:
            raise StaleRunError(f"batch of run {control.get('run_id')}, this is run {self._run_id}")
        batches = decode(message)
        check_delivery(batches, run_id=self._run_id, step=step, rank=self._rank)
        return batches

    def _set_aside(self, step: int, attempt: int, frames: list[memoryview]) -> Path:
        aside = self._quarantine / f"step_{step:06d}.rank_{self._rank}.attempt_{attempt}"
        aside.parent.mkdir(parents=True, exist_ok=True)
        aside.write_bytes(b"".join(frames))
        faults.point("batch.quarantined")
        return aside

    def _ask(self, step: int) -> None:
        self._asked_for = step
        self._say("next", step)

    def _say(self, kind: str, step: int) -> None:
        fields = {"kind": kind, "run_id": self._run_id, "rank": self._rank, "step": step}
        self._socket.send(msgpack.packb(fields))

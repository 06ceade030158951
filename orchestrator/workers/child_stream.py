"""The orchestrator's socket, as the two threads of an environment's process use it."""

import asyncio
import os
import queue
import socket
import threading
import traceback
from collections import deque
from collections.abc import Callable

import msgspec

from orchestrator.workers.wire import HEADER, Request

MAX_BUFFERED_BYTES = 8 << 20
"""Of frames that the orchestrator has not read; who sends more waits."""


class Inbox:
    """Requests on their way from the thread that reads them to the one that serves them."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._deliver: Callable[[Request], None] = self._queue.put

    def put(self, request: Request) -> None:
        """Called by the thread that reads."""
        with self._lock:
            self._deliver(request)

    def get(self) -> Request:
        """The next one, until they are delivered."""
        return self._queue.get()

    def deliver_to(self, deliver: Callable[[Request], None]) -> None:
        """From now on `deliver` gets all requests, those that wait as well, on the thread that reads."""
        with self._lock:
            while not self._queue.empty():
                deliver(self._queue.get())
            self._deliver = deliver


def read_requests(connection: socket.socket, inbox: Inbox) -> None:
    """Puts requests into the inbox; ends the whole process at the end of the stream, also where it is cut off."""
    decoder = msgspec.msgpack.Decoder(Request)
    stream = connection.makefile("rb")
    try:
        while len(header := stream.read(HEADER.size)) == HEADER.size:
            inbox.put(decoder.decode(stream.read(HEADER.unpack(header)[0])))
    except (ConnectionError, TimeoutError):
        pass
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


class Outbox:
    """Sends frames from an event loop, which it never blocks: what does not fit into the socket waits its turn."""

    def __init__(self, connection: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        self._connection, self._loop = connection, loop
        self._waiting: deque[memoryview] = deque()
        self._num_bytes = 0
        self._room = asyncio.Event()
        self._room.set()
        self._lock = threading.Lock()

    def send(self, data: bytes) -> None:
        """At once, where the socket takes it."""
        with self._lock:
            self._waiting.append(memoryview(data))
            self._num_bytes += len(data)
            if len(self._waiting) > 1:
                waits = False
            else:
                self._push()
                waits = bool(self._waiting)
        if waits:
            self._loop.add_writer(self._connection, self._go_on)
        if self._num_bytes > MAX_BUFFERED_BYTES:
            self._room.clear()

    def send_between(self, data: bytes) -> None:
        """From another thread than the loop's, unless frames wait, or the socket has no room."""
        with self._lock:
            if self._waiting:
                return
            try:
                num = self._connection.send(data, socket.MSG_DONTWAIT)
            except OSError:
                return
            if num < len(data):
                self._waiting.append(memoryview(data)[num:])
                self._num_bytes += len(data) - num
                self._loop.call_soon_threadsafe(self._loop.add_writer, self._connection, self._go_on)

    async def drain(self) -> None:
        """Waits while too much is buffered."""
        if not self._room.is_set():
            await self._room.wait()

    def flush(self, limit_s: float) -> None:
        """Sends what waits, and blocks for at most `limit_s` meanwhile. The last thing that it does."""
        with self._lock:
            self._connection.settimeout(limit_s)
            for data in self._waiting:
                self._connection.sendall(data)
            self._waiting.clear()

    def _push(self) -> None:
        while self._waiting:
            data = self._waiting[0]
            try:
                num = self._connection.send(data, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:  # nobody is there any more; the thread that reads ends the process
                self._waiting.clear()
                self._num_bytes = 0
                return
            self._num_bytes -= num
            if num < len(data):
                self._waiting[0] = data[num:]
            else:
                self._waiting.popleft()

    def _go_on(self) -> None:
        with self._lock:
            self._push()
            if not self._waiting:
                self._loop.remove_writer(self._connection)
        if self._num_bytes <= MAX_BUFFERED_BYTES:
            self._room.set()

"""A stream of bytes each way over a WebSocket, between an environment server and its orchestrators.

Binary messages carry the stream, in pieces that mean nothing. Text messages are a word, or a number: of bytes that were
passed on at the other end and may be followed by as many. At most WINDOW_BYTES are under way each way, so that both
ends can read at once all that comes: a process that reads nothing neither fills memory nor keeps the WebSocket's
heartbeat, or its end, from being seen.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from types import TracebackType

import aiohttp
from aiohttp import web

PROTOCOL = "grpo-env.1"
"""The WebSocket's subprotocol: what is said above, with the frames of `wire` in the stream."""
ENDED, GOING_AWAY = 4000, 1001
"""Close codes of a server whose process has ended, with an `Obituary` as reason, and of one that is ended itself."""
HEARTBEAT_S = 36.0
"""Silence after which the other end is asked for a sign of life, for which it has half as long."""
PIECE_BYTES = 1 << 16
WINDOW_BYTES = 1 << 22
BUFFER_BYTES = 1 << 20
"""Waits to be sent before `drain` waits."""
MAX_MESSAGE_BYTES = 1 << 20

WebSocket = aiohttp.ClientWebSocketResponse | web.WebSocketResponse


class Tunnel:
    """One end, while it is entered with `async with`. Leaving it does not close the WebSocket."""

    def __init__(self, socket: WebSocket, on_word: Callable[[str], None] = lambda word: None) -> None:
        """`on_word` is told each word from the other end."""
        self._socket, self._on_word = socket, on_word
        self._arrived: deque[bytes] = deque()
        self._num_arrived = 0
        """Bytes that are not acknowledged yet."""
        self._num_passed_on = 0
        """Those of them that can be."""
        self._num_read = 0
        """Bytes of what was read last, which count as passed on when more is read."""
        self._words: deque[str] = deque()
        self._outgoing: deque[memoryview] = deque()
        self._num_outgoing, self._room = 0, WINDOW_BYTES
        self._arrival, self._work, self._progress = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.over = asyncio.Event()
        """The WebSocket has been closed, or its other end is gone: nothing is sent, and nothing more arrives."""
        self.close_code: int | None = None
        self.close_reason = ""
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Tunnel":
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._speak())]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def send(self, data: bytes) -> None:
        """Buffers what is to be sent; once the tunnel is over, drops it."""
        if self.over.is_set() or not data:
            return
        self._outgoing.append(memoryview(data))
        self._num_outgoing += len(data)
        self._work.set()

    def say(self, word: str) -> None:
        """Sends a word, before all that waits."""
        self._words.append(word)
        self._work.set()

    async def drain(self, limit_bytes: int = BUFFER_BYTES) -> None:
        """Waits until no more than this is buffered, or the tunnel is over."""
        while self._num_outgoing > limit_bytes and not self.over.is_set():
            self._progress.clear()
            await self._progress.wait()

    async def read(self) -> bytes:
        """What arrives next; a call that was cancelled loses nothing. Empty at the end.

        By calling again one says that what was read before has been passed on, and its room may be used again.
        """
        self._num_passed_on += self._num_read
        self._num_read = 0
        if self._num_passed_on >= WINDOW_BYTES // 4:
            self.say(str(self._num_passed_on))
            self._num_arrived -= self._num_passed_on
            self._num_passed_on = 0
        while not self._arrived and not self.over.is_set():
            self._arrival.clear()
            await self._arrival.wait()
        data = self._arrived.popleft() if self._arrived else b""
        self._num_read = len(data)
        return data

    async def _listen(self) -> None:
        """Consumes: the WebSocket's messages. Waits for: them. Unblocked by: the other end, or its missing heartbeat.
        Ends when: the WebSocket is closed, gone, or says what none of ours would."""
        try:
            while self._take(await self._socket.receive()):
                pass
        finally:
            self.over.set()
            for event in (self._arrival, self._progress, self._work):
                event.set()

    def _take(self, message: aiohttp.WSMessage) -> bool:
        """Whether another message may follow."""
        if message.type is aiohttp.WSMsgType.BINARY:
            self._arrived.append(message.data)
            self._num_arrived += len(message.data)
            self._arrival.set()
            return self._num_arrived <= WINDOW_BYTES
        if message.type is aiohttp.WSMsgType.TEXT:
            if message.data.isdecimal():
                self._room = min(WINDOW_BYTES, self._room + int(message.data))
                self._work.set()
            else:
                self._on_word(message.data)
            return True
        if message.type is aiohttp.WSMsgType.CLOSE:
            self.close_code, self.close_reason = message.data, message.extra or ""
        return False

    async def _speak(self) -> None:
        """Consumes: what is to be sent, and words. Waits for: them, and room at the other end. Unblocked by: `send`,
        `say`, and acknowledgements. Ends when: the tunnel is over."""
        with contextlib.suppress(ConnectionError, aiohttp.ClientError):  # `_listen` is told, too
            while not self.over.is_set():
                if self._words:
                    await self._socket.send_str(self._words.popleft())
                elif self._outgoing and self._room:
                    await self._send_a_piece()
                else:
                    self._work.clear()
                    await self._work.wait()

    async def _send_a_piece(self) -> None:
        data = self._outgoing.popleft()
        size = min(len(data), PIECE_BYTES, self._room)
        if size < len(data):
            self._outgoing.appendleft(data[size:])
        self._room -= size
        await self._socket.send_bytes(bytes(data[:size]))
        self._num_outgoing -= size
        self._progress.set()

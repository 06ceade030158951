"""Where a borrower gets a lender's manifest and file descriptors: a Unix socket without a name in any folder.

Its address is abstract, so that it ends with its process and leaves nothing behind. Both sides ask the kernel who the
other is, and deal only with processes of their own user. Processes in containers meet where they share a network
namespace.

The connection stays open as long as both live: its end tells a borrower that its lender has ended, however that
happened, and in whatever container. A process that is killed loses its memory before its connections end, though, by
as much as a tenth of a second where it has much. Who must know that the lender's memory was still there sends a byte,
which the lender's thread sends back: a process that is being torn down runs no thread.
"""

import logging
import os
import select
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transport.errors import CorruptError, DeadlineError, SharedBaseError

log = logging.getLogger(__name__)

EXCHANGE_S = 30.0
"""For one exchange, once two processes have met."""
GIVE_S = 4.0
"""For each part of what a lender gives to one borrower; meanwhile no other gets its sign of life."""
ANSWER_S = 10.0
"""How long a lender has for a sign of life; its thread may be giving another borrower an offer, or wait for Python."""
ASK_AGAIN_S = 0.2
MAX_DESCRIPTORS = 16
MAX_BYTES = 1 << 28
_LENGTH = struct.Struct("!Q")
_PEER = struct.Struct("3i")
"""SO_PEERCRED: process, user and group."""
_SIGN = b"?"
"""Of life: asked for and given by the same byte."""

Offer = tuple[bytes, Sequence[int]]
"""A manifest and the descriptors that travel with it."""


class BrokenOff(CorruptError):
    """An offer that ended before it was whole, as where its lender ends."""


class Link:
    """A borrower's connection to its lender. It closes itself when nobody has it any more."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._descriptor = connection.detach()
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self._is_silent = False

    def is_broken(self) -> bool:
        """Whether the lender has ended, as far as is seen without asking it, or has once not answered. Never waits."""
        if self._is_silent:
            return True
        try:
            return not os.read(self._descriptor, 1)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def answers(self, *, timeout_s: float = ANSWER_S) -> bool:
        """Whether the lender gives a sign of life that is asked for now. One that gives none in time counts as ended
        from then on."""
        if self.is_broken():
            return False
        self._is_silent = not self._echoed(timeout_s)
        return not self._is_silent

    def _echoed(self, timeout_s: float) -> bool:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        try:
            os.write(self._descriptor, _SIGN)
            return bool(poll.poll(1000 * timeout_s)) and os.read(self._descriptor, 1) == _SIGN
        except OSError:
            return False

    def close(self) -> None:
        """Tells the lender that nothing is borrowed any more. To be called last."""
        self._close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a borrower was given."""

    data: bytes
    """A manifest."""
    descriptors: list[int]
    """The borrower's to close."""
    link: Link


class Door:
    """Gives an offer to everybody who asks, in a thread of its own, for as long as this process lives.

    Each gets what `offer` returns then.
    """

    def __init__(self, address: str, offer: Callable[[], Offer]) -> None:
        """Raises `SharedBaseError` where another process has the address."""
        self._offer = offer
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(f"\0{address}")
        except OSError as error:
            self._socket.close()
            raise SharedBaseError(
                f"another process lends base weights for this output_dir and device ({error.strerror}); end it, or "
                "give another output_dir"
            ) from None
        self._socket.listen()
        threading.Thread(target=self._serve, name="lend-base-weights", daemon=True).start()

    def _serve(self) -> None:
        """Waits for borrowers, for what they ask and for their ends; ends with the process."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._socket:
                        if (borrower := self._served()) is not None:
                            selector.register(borrower, selectors.EVENT_READ, borrower)
                    elif not _echo(key.data):
                        selector.unregister(key.data)
                        key.data.close()

    def _served(self) -> socket.socket | None:
        """The next borrower, once it has the offer; None where it got none."""
        connection, _ = self._socket.accept()
        try:
            _give(connection, self._offer)
        except Exception as error:  # whatever went wrong, the next borrower is another
            connection.close()
            log.warning("a borrower of the base weights got none: %s: %s", type(error).__name__, error)
            return None
        connection.setblocking(False)
        return connection


def _echo(borrower: socket.socket) -> bool:
    """Gives the sign of life that a borrower asks for. False where it has ended, or does not read what it is sent."""
    try:
        return bool(asked := borrower.recv(1)) and borrower.send(asked) == 1
    except OSError:
        return False


def _give(connection: socket.socket, offer: Callable[[], Offer]) -> None:
    connection.settimeout(GIVE_S)
    _check_user(connection)
    data, descriptors = offer()
    socket.send_fds(connection, [_LENGTH.pack(len(data))], list(descriptors))
    connection.sendall(data)


def ask(address: str, *, timeout_s: float, whom: str, exchange_s: float = EXCHANGE_S) -> Answer:
    """The offer at an address, once somebody makes it, who then has `exchange_s` for each part of it.

    Raises `DeadlineError`, which names `whom` one waits for, `BrokenOff` and other errors of `transport.errors`.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(exchange_s)
            connection.connect(f"\0{address}")
            data, descriptors = _taken(connection)
            return Answer(data=data, descriptors=descriptors, link=Link(connection))
        except (ConnectionRefusedError, BlockingIOError):  # nobody is there, or too many wait for who is
            connection.close()
        except BaseException as error:
            connection.close()
            if isinstance(error, OSError):
                raise BrokenOff(f"the offer of base weights broke off: {error}") from error
            raise
        if time.monotonic() >= deadline_s:
            raise DeadlineError(f"waited {timeout_s:g} s for {whom}")
        time.sleep(ASK_AGAIN_S)


def _taken(connection: socket.socket) -> tuple[bytes, list[int]]:
    _check_user(connection)
    head, descriptors, _, _ = socket.recv_fds(connection, _LENGTH.size, MAX_DESCRIPTORS)
    try:
        (size,) = _LENGTH.unpack(head + _received(connection, _LENGTH.size - len(head)))
        if size > MAX_BYTES:
            raise CorruptError(f"the offer of base weights has {size} bytes, expected at most {MAX_BYTES}")
        return _received(connection, size), descriptors
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def _received(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        if not (part := connection.recv(min(size - len(data), 1 << 20))):
            raise ConnectionError(f"closed after {len(data)} of {size} bytes")
        data += part
    return bytes(data)


def _check_user(connection: socket.socket) -> None:
    """Raises `SharedBaseError` where the other process is another user's."""
    process, user, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if user != os.getuid():
        raise SharedBaseError(f"process {process} of user {user} is at the other end, expected user {os.getuid()}")

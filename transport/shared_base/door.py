"""Where a borrower gets a lender's manifest and file descriptors: a Unix socket without a name in any folder.

Its address is abstract, so that it ends with its process and leaves nothing behind. Both sides ask the kernel who the
other is, and deal only with processes of their own user. Processes in containers meet where they share a network
namespace.

The connection stays open as long as both live, and nothing more is said on it: its end tells a borrower that its lender
has ended, however that happened, and in whatever container.
"""

import logging
import os
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
ASK_AGAIN_S = 0.2
MAX_DESCRIPTORS = 16
MAX_BYTES = 1 << 28
_LENGTH = struct.Struct("!Q")
_PEER = struct.Struct("3i")
"""SO_PEERCRED: process, user and group."""

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

    def is_broken(self) -> bool:
        """Whether the lender has ended. Never waits."""
        try:
            return not os.read(self._descriptor, 1)
        except BlockingIOError:
            return False
        except OSError:
            return True

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
        """Waits for borrowers, and for their ends; ends with the process."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._socket:
                        if (borrower := self._served()) is not None:
                            selector.register(borrower, selectors.EVENT_READ)
                    else:  # borrowers say nothing: it has ended
                        selector.unregister(key.fileobj)
                        key.fileobj.close()  # type: ignore[union-attr]

    def _served(self) -> socket.socket | None:
        """The next borrower, once it has the offer; None where it got none."""
        connection, _ = self._socket.accept()
        try:
            _give(connection, self._offer)
        except Exception as error:  # whatever went wrong, the next borrower is another
            connection.close()
            log.warning("a borrower of the base weights got none: %s: %s", type(error).__name__, error)
            return None
        return connection


def _give(connection: socket.socket, offer: Callable[[], Offer]) -> None:
    connection.settimeout(EXCHANGE_S)
    _check_user(connection)
    data, descriptors = offer()
    socket.send_fds(connection, [_LENGTH.pack(len(data))], list(descriptors))
    connection.sendall(data)


def ask(address: str, *, timeout_s: float, whom: str) -> Answer:
    """The offer at an address, once somebody makes it.

    Raises `DeadlineError`, which names `whom` one waits for, `BrokenOff` and other errors of `transport.errors`.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(f"\0{address}")
            data, descriptors = _taken(connection)
            return Answer(data=data, descriptors=descriptors, link=Link(connection))
        except ConnectionRefusedError:
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
    connection.settimeout(EXCHANGE_S)
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

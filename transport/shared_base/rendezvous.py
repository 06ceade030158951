"""The Unix socket on which an importer gets an exporter's manifest and file descriptors.

Its address is abstract: it ends with its process and leaves nothing behind. Both sides ask the kernel who the other is
and deal only with processes of their own user. Processes in containers meet where they share a network namespace.

The connection stays open as long as both processes live, so that its end tells an importer that its exporter has ended,
however that happened.
"""

import contextlib
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence

from transport.errors import SharedBaseError

log = logging.getLogger(__name__)

EXCHANGE_S = 30.0
"""Deadline of one exchange, once two processes have met."""
MAX_DESCRIPTORS = 16
_PEER = struct.Struct("3i")
"""SO_PEERCRED: process, user and group."""

Offer = tuple[bytes, Sequence[int]]
"""A manifest and the descriptors that travel with it."""


def serve(address: str, make_offer: Callable[[], Offer]) -> None:
    """Starts a thread that gives each importer what `make_offer` returns, as long as this process lives.

    Raises `SharedBaseError` where another process has the address.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(f"\0{address}")
    except OSError as error:
        listener.close()
        raise SharedBaseError(
            f"another process shares base weights for this output_dir and device ({error.strerror}); end it, or give "
            "another output_dir"
        ) from None
    listener.listen()
    threading.Thread(target=_serve, args=(listener, make_offer), name="export-base-weights", daemon=True).start()


def _serve(listener: socket.socket, make_offer: Callable[[], Offer]) -> None:
    """The loop that serves importers one after the other, and holds their connections. Waits for connections; ends with
    the process."""
    while True:
        connection, _ = listener.accept()
        try:
            connection.settimeout(EXCHANGE_S)
            _check_user(connection)
            _give(connection, *make_offer())
        except Exception as error:  # whatever went wrong, the next importer is another
            connection.close()
            log.warning("an importer of the base weights got none: %s: %s", type(error).__name__, error)
        else:
            threading.Thread(target=_hold, args=(connection,), name="importer", daemon=True).start()


def _hold(connection: socket.socket) -> None:
    """Keeps a connection open until its importer ends."""
    connection.settimeout(None)
    with connection, contextlib.suppress(OSError):
        connection.recv(1)


def _give(connection: socket.socket, manifest: bytes, descriptors: Sequence[int]) -> None:
    """The manifest travels in a memfd of its own, so that all is one message of any size."""
    with os.fdopen(os.memfd_create("grpo-manifest", os.MFD_CLOEXEC), "wb") as file:
        file.write(manifest)
        file.flush()
        socket.send_fds(connection, [b"!"], [file.fileno(), *descriptors])


def fetch(address: str) -> tuple[bytes, list[int], socket.socket]:
    """A manifest, its descriptors, which are the caller's to close, and the connection to the exporter.

    Raises OSError where nobody is there or the exporter ends meanwhile, and `SharedBaseError` where it is another
    user's.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(EXCHANGE_S)
        connection.connect(f"\0{address}")
        _check_user(connection)
        _, descriptors, _, _ = socket.recv_fds(connection, 1, MAX_DESCRIPTORS)
        connection.setblocking(False)
        if not descriptors:
            raise ConnectionError("the server closed the connection without an offer; see its log")
        with os.fdopen(descriptors.pop(0), "rb") as file:
            file.seek(0)
            return file.read(), descriptors, connection
    except BaseException:
        connection.close()
        raise


def is_open(connection: socket.socket) -> bool:
    """Whether the process at the other end of a non-blocking connection lives."""
    try:
        return connection.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def _check_user(connection: socket.socket) -> None:
    process, user, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if user != os.getuid():
        raise SharedBaseError(f"process {process} of user {user} is at the other end, expected user {os.getuid()}")

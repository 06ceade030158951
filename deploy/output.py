"""What becomes of a command whose output nobody reads any more, as in `grpo … | head`."""

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

UNREAD = 141
"""The exit code of a command that only prints: 128 + SIGPIPE, as of other tools."""
_NOBODY_READS = (errno.EPIPE, errno.EIO)
"""The other end of a pipe, or a terminal, is gone."""


@contextlib.contextmanager
def ends_unread() -> Iterator[None]:
    """For a command that only prints: it ends without a word where nobody reads."""
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        _to_nobody(sys.stdout.fileno())
        raise SystemExit(UNREAD) from None


def go_on_unread() -> None:
    """For a command that does more than to print: from now on, what nobody reads is dropped."""
    sys.stdout, sys.stderr = _unbroken(sys.stdout), _unbroken(sys.stderr)


def _unbroken(stream: TextIO | None) -> TextIO:
    """None is a stream that was closed before the program began."""
    if stream is None:
        return Path(os.devnull).open("w")
    stream.flush()
    raw = _Unbroken(stream.fileno(), "w", closefd=False)
    buffer = io.BufferedWriter(raw)
    return io.TextIOWrapper(buffer, encoding=stream.encoding, errors=stream.errors, line_buffering=True)


class _Unbroken(io.FileIO):
    def write(self, data: "ReadableBuffer", /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _NOBODY_READS:
                raise
        _to_nobody(self.fileno())
        return super().write(data)


def _to_nobody(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)

"""Ports for programs that are about to start."""

import argparse
import errno
import secrets
import socket

_FIRST, _END = 10_000, 32_000
"""Below the ports that Linux gives to anybody who asks for a free one: a stranger could get such a port before the
program listens there, or while it is started again."""


def free_port(host: str = "127.0.0.1") -> int:
    """Returns a port that nobody uses now, of an address of this machine. Raises OSError where there is none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for _ in range(1000):
        port = _FIRST + secrets.randbelow(_END - _FIRST)
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return port
    raise OSError(f"of 1000 ports of {host} none is free; name one that is")


def listening_socket(host: str, port: int) -> socket.socket:
    """Returns a socket bound to the address, so that a port in use shows before a model is loaded. Raises OSError
    with the way out."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        mend = "give another port with --port, or, with --host, an address of this machine"
        raise OSError(f"cannot bind to {host}:{port}: {error.strerror}; {mend}") from None
    return sock


def port_number(text: str) -> int:
    """Returns the port that an option names; 0 is any that is free. For argparse."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: expected a port from 0 to 65535")
    return int(text)

"""The key of a run's sockets, which the program that makes the run writes into its folder.

CURVE encrypts every connection over ZeroMQ, on loopback too, with a key pair that both ends derive from the key: who
does not have it gets no connection. It compares in constant time, as those do who look at the token.
"""

import hashlib
import ipaddress
import socket as net
from typing import Any

import zmq
from grpo.transport.errors import TransportError
from zmq.utils import z85

_MIN_KEY_CHARACTERS = 16


class SharedKey:
    """A secret text of at least 16 characters, which both ends have."""

    def __init__(self, secret: str) -> None:
        if len(secret) < _MIN_KEY_CHARACTERS:
            raise TransportError(
                f"the transport's key has {len(secret)} characters, expected at least {_MIN_KEY_CHARACTERS}; "
                "make one with: openssl rand -hex 32"
            )
        private = z85.encode(hashlib.sha256(f"grpo server {secret}".encode()).digest())
        self._pair = zmq.curve_public(private), private
        self.token = hashlib.sha256(f"grpo token {secret}".encode()).hexdigest()
        """Shows over HTTP that one has the key, without telling it."""

    def encrypt(self, socket: "zmq.Socket[Any]", *, serves: bool) -> None:
        """Makes a socket encrypt its connections, which only holders of the key can make: nobody else knows the public
        key of the side that `serves`, and a handshake without it fails. Call before `bind` or `connect`."""
        socket.curve_publickey, socket.curve_secretkey = self._pair if serves else zmq.curve_keypair()
        if serves:
            socket.curve_server = True
        else:
            socket.curve_serverkey = self._pair[0]


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        addresses = {info[4][0] for info in net.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(str(address).partition("%")[0]).is_loopback for address in addresses)

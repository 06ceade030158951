"""The key of a run's sockets, which whoever makes the run writes into its folder.

Every request and every answer is signed with it, on loopback too: whoever has not the key is not answered. Where other
machines reach the socket, CURVE encrypts the connection as well, with a key pair that both ends derive from the key.
"""

import hashlib
import hmac
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
        self._secret = hashlib.sha256(f"grpo signing {secret}".encode()).digest()
        private = z85.encode(hashlib.sha256(f"grpo server {secret}".encode()).digest())
        self._pair = zmq.curve_public(private), private
        self.token = hashlib.sha256(f"grpo token {secret}".encode()).hexdigest()
        """What shows over HTTP that one has the key, and does not tell it."""

    def sign(self, data: bytes) -> bytes:
        """Returns the signature of `data`, 32 bytes."""
        return hashlib.blake2b(data, key=self._secret, digest_size=32).digest()

    def has_signed(self, data: bytes, signature: bytes) -> bool:
        """Returns whether `signature` is that of `data`, in a time that tells nothing."""
        return hmac.compare_digest(self.sign(data), signature)

    def encrypt(self, socket: "zmq.Socket[Any]", *, serves: bool) -> None:
        """Has a socket encrypt its connections, which only holders of the key can make: nobody else knows the public
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

"""The key of a run's batch sockets, which whoever makes the run writes into its folder.

Every request and every answer is signed with it, on loopback too: whoever has not the key is not answered. Where other
machines reach the socket, CURVE encrypts and authenticates the connection as well, with key pairs that both ends derive
from the same key.
"""

import hashlib
import hmac
import ipaddress
import socket as net
from types import SimpleNamespace
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from transport.errors import TransportError

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
        self._server, self._client = (_key_pair(role, secret) for role in ("server", "client"))

    def sign(self, data: bytes) -> bytes:
        """Returns the signature of `data`, 32 bytes."""
        return hashlib.blake2b(data, key=self._secret, digest_size=32).digest()

    def has_signed(self, data: bytes, signature: bytes) -> bool:
        """Returns whether `signature` is that of `data`, in a time that tells nothing."""
        return hmac.compare_digest(self.sign(data), signature)

    def encrypt_server(
        self, context: "zmq.Context[zmq.Socket[bytes]]", socket: "zmq.Socket[Any]"
    ) -> ThreadAuthenticator:
        """Lets only holders of the key connect to `socket`; call before `bind`. Stop what is returned at the end."""
        authenticator = ThreadAuthenticator(context)
        authenticator.start()
        admits = SimpleNamespace(callback=lambda domain, key: key == self._client[0])
        authenticator.configure_curve_callback(domain="*", credentials_provider=admits)
        socket.curve_publickey, socket.curve_secretkey = self._server
        socket.curve_server = True
        return authenticator

    def encrypt_client(self, socket: "zmq.Socket[Any]") -> None:
        """Proves the key to the server, and has it prove its own; call before `connect`."""
        socket.curve_publickey, socket.curve_secretkey = self._client
        socket.curve_serverkey = self._server[0]


def _key_pair(role: str, secret: str) -> tuple[bytes, bytes]:
    private = z85.encode(hashlib.sha256(f"grpo {role} {secret}".encode()).digest())
    return zmq.curve_public(private), private


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        addresses = {info[4][0] for info in net.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(str(address).partition("%")[0]).is_loopback for address in addresses)

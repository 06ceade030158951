"""Encryption and authentication of ZeroMQ sockets from one shared key.

Both ends derive both CURVE key pairs from the same secret text, so that there is one thing to hand out: whoever has
it may connect, and nobody else. Loopback needs none; an address that others reach is refused without one.
"""

import hashlib
import ipaddress
import socket as net
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from transport.errors import TransportError

_MIN_KEY_CHARACTERS = 16


class SharedKey:
    """The key pairs of server and client, derived from `secret` (at least 16 characters)."""

    def __init__(self, secret: str) -> None:
        if len(secret) < _MIN_KEY_CHARACTERS:
            raise TransportError(
                f"the transport's key has {len(secret)} characters, expected at least {_MIN_KEY_CHARACTERS}; "
                "make one with: openssl rand -hex 32"
            )
        self._server, self._client = (_key_pair(role, secret) for role in ("server", "client"))

    def guard_server(self, context: "zmq.Context[zmq.Socket[bytes]]", socket: "zmq.Socket[Any]") -> ThreadAuthenticator:
        """Lets only holders of the key connect to `socket`; call before `bind`. Stop what is returned at the end."""
        authenticator = ThreadAuthenticator(context)
        authenticator.start()
        authenticator.configure_curve_callback(domain="*", credentials_provider=_OnlyThis(self._client[0]))
        socket.curve_publickey, socket.curve_secretkey = self._server
        socket.curve_server = True
        return authenticator

    def guard_client(self, socket: "zmq.Socket[Any]") -> None:
        """Proves the key to the server, and has it prove its own; call before `connect`."""
        socket.curve_publickey, socket.curve_secretkey = self._client
        socket.curve_serverkey = self._server[0]


class _OnlyThis:
    """Admits one public key."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


def _key_pair(role: str, secret: str) -> tuple[bytes, bytes]:
    private = z85.encode(hashlib.sha256(f"grpo {role} {secret}".encode()).digest())
    return zmq.curve_public(private), private


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        addresses = {info[4][0] for info in net.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(str(address).partition("%")[0]).is_loopback for address in addresses)


def require_key_beyond_loopback(host: str, key: SharedKey | None) -> None:
    """Raises `TransportError` where `host` can be reached by others and there is no key."""
    if key is None and not is_loopback(host):
        raise TransportError(
            f"rollout_transport.host = {host!r} can be reached from other machines, and no key is set; set the "
            "environment variable that rollout_transport.key_var names, on both sides, or bind to localhost"
        )

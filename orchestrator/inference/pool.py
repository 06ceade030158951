"""Which servers there are, and which of them get requests: plain state, without clock or I/O.

A server that has just been found, cannot be reached, or has lost a version is out of the routing. Only the weight sync,
which has seen it prove the versions in use, puts it in.
"""

import asyncio
import logging
from collections.abc import Sequence

log = logging.getLogger(__name__)


class ServerPool:
    """The servers, in the routing or out of it."""

    def __init__(self, base_urls: Sequence[str] = ()) -> None:
        """`base_urls` with or without `/v1`; none where servers are found later. All begin out of the routing."""
        self._out = {url.rstrip("/").removesuffix("/v1"): "it is not up yet" for url in base_urls}
        self._servers = list(self._out)
        self.routed: tuple[str, ...] = ()
        """Servers that get requests."""
        self.versions: frozenset[int] = frozenset()
        """Versions that every server in the routing has proved."""
        self.unknown = ""
        """Why no server is known, where they are found by name."""
        self.changed = asyncio.Event()
        """Wakes all who wait for it when a server is found, gone, ejected or readmitted."""

    @property
    def servers(self) -> tuple[str, ...]:
        """All servers that are known."""
        return tuple(self._servers)

    @property
    def out(self) -> dict[str, str]:
        """Servers that get no requests, and why."""
        return dict(self._out)

    def eject(self, server: str, why: str) -> None:
        """Takes a server out of the routing; the latest reason counts. Does nothing where the server is not known."""
        if server in self.routed:
            log.warning("%s gets no more requests until it has proved the versions in use: %s", server, why)
            self._out[server] = why
            self._change()
        elif server in self._out:
            self._out[server] = why

    def readmit(self, server: str) -> None:
        """Puts a server that has proved `versions` into the routing."""
        if self._out.pop(server, None) is not None:
            log.info("%s gets requests", server)
            self._change()

    def found(self, server: str) -> None:
        """Adds a server. It gets requests once it is readmitted."""
        if server not in self._servers:
            log.info("%s has been found", server)
            self._servers.append(server)
            self._out[server] = "it has been found, and has yet to prove the versions in use"
            self._change()

    def gone(self, server: str, why: str) -> None:
        """Forgets a server."""
        log.warning("%s gets no more requests: %s", server, why)
        self._servers.remove(server)
        self._out.pop(server, None)
        self._change()

    def _change(self) -> None:
        self.routed = tuple(server for server in self._servers if server not in self._out)
        self.changed.set()
        self.changed.clear()

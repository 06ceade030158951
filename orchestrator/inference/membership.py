"""Which servers there are, and which of them get requests: plain state, without clock or I/O.

A server that cannot be reached, that has lost a version, or that has just been found is out of the routing. Only
whoever has seen it prove the versions in use puts it in.
"""

import logging
from collections.abc import Sequence

from orchestrator.background import Bell

log = logging.getLogger(__name__)


class Membership:
    """The servers, in the routing or out of it."""

    def __init__(self, servers: Sequence[str]) -> None:
        """`servers` are in the routing."""
        self._out: dict[str, str] = {}
        self._leaving: set[str] = set()
        self._admission = dict.fromkeys(servers, 0)
        self._num_admissions = 0
        self._routed = tuple(self._admission)
        self.watched = False
        """Whether somebody puts servers back. While nobody does, all servers are tried rather than none."""
        self.versions: frozenset[int] = frozenset()
        """What every server in the routing has proved."""
        self.changed = Bell()
        """Rings when a server is found, forgotten, taken out or put back."""

    @property
    def servers(self) -> tuple[str, ...]:
        """All that are known."""
        return tuple(self._admission)

    @property
    def routed(self) -> tuple[str, ...]:
        """Servers that get requests."""
        return self._routed

    @property
    def out(self) -> dict[str, str]:
        """Servers that get none, and why."""
        return dict(self._out)

    @property
    def returning(self) -> tuple[str, ...]:
        """Servers that get none, but may prove that they can."""
        return tuple(server for server in self._out if server not in self._leaving)

    @property
    def leaving(self) -> tuple[str, ...]:
        """Servers that get none, and shall get none."""
        return tuple(self._leaving)

    def admission(self, server: str) -> int:
        """Number of the server's newest admission; tells its times in the routing apart."""
        return self._admission[server]

    # --- in and out of the routing ---

    def take_out(self, server: str, why: str) -> None:
        """The server gets no more requests; the latest reason counts. Without effect on one that is not known."""
        if server not in self._admission:
            return
        if server not in self._out:
            log.warning("%s gets no more requests until it has proved the versions in use: %s", server, why)
            self._out[server] = why
            self._change()
        self._out[server] = why

    def admit(self, server: str) -> None:
        """The server, which has proved `versions`, gets requests again, unless it is leaving."""
        if server in self._out and server not in self._leaving:
            del self._out[server]
            self._num_admissions += 1
            self._admission[server] = self._num_admissions
            log.info("%s gets requests again", server)
            self._change()

    # --- servers that are found and that vanish ---

    def find(self, server: str) -> None:
        """A server that was not known, or was leaving, is there. It gets requests once it is admitted."""
        if server in self._leaving or server not in self._admission:
            self._leaving.discard(server)
            self._admission.setdefault(server, 0)
            self._out[server] = "it has been found, and has yet to prove the versions in use"
            log.info("%s has been found", server)
            self._change()

    def leave(self, server: str, why: str) -> None:
        """The server gets no more requests; what it has may end."""
        if server in self._admission and server not in self._leaving:
            self._leaving.add(server)
            self._out[server] = why
            log.warning("%s gets no more requests: %s", server, why)
            self._change()

    def forget(self, server: str) -> None:
        """The server, which was leaving, is not known any more."""
        if server in self._leaving:
            self._leaving.discard(server)
            del self._out[server], self._admission[server]
            log.info("%s is forgotten", server)
            self._change()

    def _change(self) -> None:
        self._routed = tuple(server for server in self._admission if server not in self._out)
        self.changed.ring()

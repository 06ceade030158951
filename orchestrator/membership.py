"""Which of the servers get requests: plain state, without clock or I/O.

A server that cannot be reached, or that has lost a version, is taken out. Only whoever has seen it prove the versions
in use puts it back.
"""

import logging
from collections.abc import Sequence

from orchestrator.background import Bell

log = logging.getLogger(__name__)


class Membership:
    """The servers, in the routing or out of it."""

    def __init__(self, servers: Sequence[str]) -> None:
        self._out: dict[str, str] = {}
        self._num_admissions = dict.fromkeys(servers, 0)
        self.watched = False
        """Whether somebody puts servers back. While nobody does, all servers are tried rather than none."""
        self.versions: frozenset[int] = frozenset()
        """What every server in the routing has proved."""
        self.changed = Bell()
        """Rings when a server is taken out or put back."""

    @property
    def routed(self) -> tuple[str, ...]:
        """Servers that get requests."""
        return tuple(server for server in self._num_admissions if server not in self._out)

    @property
    def out(self) -> dict[str, str]:
        """Servers that get none, and why."""
        return dict(self._out)

    def admission(self, server: str) -> int:
        """How often the server has been put back; tells its times in the routing apart."""
        return self._num_admissions[server]

    def take_out(self, server: str, why: str) -> None:
        """The server gets no more requests; the latest reason counts."""
        if server not in self._out:
            log.warning("%s gets no more requests until it has proved the versions in use: %s", server, why)
            self.changed.ring()
        self._out[server] = why

    def admit(self, server: str) -> None:
        """The server, which has proved `versions`, gets requests again."""
        if self._out.pop(server, None) is not None:
            self._num_admissions[server] += 1
            log.info("%s gets requests again", server)
            self.changed.ring()

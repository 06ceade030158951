"""Finds servers by name: every address that the DNS has for it is one."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable

from configs.client import ElasticSettings
from orchestrator.background import in_thread
from orchestrator.inference.client import ServerError, ServerPool

log = logging.getLogger(__name__)

LOOK_UP_S = 30.0
"""What one look-up, and one question whether a server is still there, may take."""


async def addresses_of(hostname: str) -> list[str]:
    """All IPv4 and IPv6 addresses of the name. Raises OSError where the DNS has none, or does not answer."""
    try:
        async with asyncio.timeout(LOOK_UP_S):
            found = await in_thread(socket.getaddrinfo, hostname, None, type=socket.SOCK_STREAM)
    except TimeoutError:
        raise OSError(f"no answer from the DNS within {LOOK_UP_S:g} s") from None
    except UnicodeError as error:
        raise OSError(f"it is no name that the DNS knows: {error}") from None
    return sorted({str(address[0]) for *_, address in found})


class Discovery:
    """Keeps the known servers equal to the addresses of one name."""

    def __init__(
        self,
        servers: ServerPool,
        settings: ElasticSettings,
        *,
        look_up: Callable[[str], Awaitable[list[str]]] = addresses_of,
    ) -> None:
        """`look_up` gives the addresses of a name, and raises OSError."""
        self._servers, self._members = servers, servers.membership
        self._settings, self._look_up = settings, look_up
        self._failure: str | None = None

    async def wait_for_any(self) -> None:
        """Returns when a server has been found. Raises ServerError after the servers' timeout."""
        limit_s = self._servers.timeout_s
        try:
            async with asyncio.timeout(limit_s):
                while not self._members.servers:
                    await self.sync()
                    if not self._members.servers:
                        await asyncio.sleep(self._settings.sync_interval)
        except TimeoutError:
            name = self._settings.hostname
            raise ServerError(
                f"waited client.timeout = {limit_s:g} s for an address of client.elastic.hostname = {name!r}: "
                f"{self._failure or 'no answer'}; start the servers, or mend the name"
            ) from None

    async def watch(self) -> None:
        """Consumes: the addresses of the name. Waits for: the clock, and the DNS. Unblocked by: them. Ends when: it is
        cancelled."""
        while True:
            await self.sync()
            await asyncio.sleep(self._settings.sync_interval)

    async def sync(self) -> None:
        """One look-up: finds servers that are new, lets those go that the DNS has no more, and forgets those of them
        that do not answer. Where the look-up fails, all stay as they are."""
        try:
            addresses = await self._look_up(self._settings.hostname)
        except OSError as error:
            self._say_failed(str(error))
        else:
            self._failure = None
            self._follow([self._url(address) for address in addresses])
        await asyncio.gather(*(self._forget_if_dead(server) for server in self._members.leaving))

    def _follow(self, found: list[str]) -> None:
        for server in found:
            self._members.find(server)
        for server in set(self._members.servers) - set(found):
            self._members.leave(server, f"the DNS has it no more for {self._settings.hostname}")

    def _say_failed(self, error: str) -> None:
        if error != self._failure:
            known = f"the {len(known)} that are known stay" if (known := self._members.servers) else "none is known yet"
            log.warning("looking for servers called %s failed, %s: %s", self._settings.hostname, known, error)
        self._failure = error

    async def _forget_if_dead(self, server: str) -> None:
        try:
            async with asyncio.timeout(LOOK_UP_S):
                answers = await self._servers.sickness(server) is None
        except TimeoutError:
            answers = False
        if not answers:
            self._members.forget(server)

    def _url(self, address: str) -> str:
        host = f"[{address}]" if ":" in address else address
        return f"http://{host}:{self._settings.port}"

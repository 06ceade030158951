"""Keeps the routing true: finds servers by name or by the run's folder, asks each how it is, brings in those that are
out of the routing."""

import asyncio
import logging
import socket
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from grpo.configs.client import ElasticSettings
from grpo.orchestrator.background import in_thread
from grpo.orchestrator.inference.client import MIN_PAUSE_S, ServerError, Unreachable
from grpo.orchestrator.inference.weight_sync import WeightSync
from grpo.orchestrator.monitoring.metrics import Figures
from grpo.transport.http import ServerLoad
from grpo.transport.status import AWAY, FAILED, FINISHED, read_status, server_of

log = logging.getLogger(__name__)

LOOK_UP_S = 30.0
"""Deadline for one look-up."""
MAX_PAUSE_S = 0.5
"""Longest pause between two questions to a server that is away."""


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


def servers_in(folder: Path) -> list[str]:
    """The servers that say in this folder that they are there. Raises OSError where none does."""
    said = {path: read_status(path) for path in sorted(folder.glob("infer.*.json"))}
    gone = (FAILED, FINISHED, AWAY)
    if there := [server_of(path) for path, fields in said.items() if fields and fields["state"] not in gone]:
        return there
    raise OSError("none has said there where it is; start grpo-infer with the same output_dir")


class ServerWatch:
    """One task for each server that is known. A server that falls silent is abandoned, and what it was to answer goes
    elsewhere; one that is out of the routing is asked until it has proved the versions in use."""

    def __init__(
        self,
        sync: WeightSync,
        *,
        interval_s: float,
        timeout_s: float,
        elastic: ElasticSettings | None = None,
        folder: Path = Path(),
        look_up: Callable[[str], Awaitable[list[str]]] = addresses_of,
    ) -> None:
        """`interval_s` between two questions to a server; `timeout_s` without an answer is silence. `folder`: where
        servers say where they are, that are not found by name."""
        self._sync, self._client, self._pool = sync, sync.client, sync.pool
        self._interval_s, self._timeout_s = interval_s, timeout_s
        self._elastic, self._folder, self._look_up = elastic, folder, look_up
        self._loads: dict[str, ServerLoad] = {}
        """The newest report of each server."""
        self._load: dict[str, float] = {}
        """By metric, since the newest report of any server, at `_reported_s`."""
        self._integrals: defaultdict[str, float] = defaultdict(float)
        """Load times seconds, from the first report to the newest one."""
        self._first_s = self._reported_s = 0.0

    async def run(self) -> None:
        """Consumes: the servers' answers, and the addresses of their name. Waits for: servers, the DNS, the clock.
        Unblocked by: them, and every change of the routing. Ends when: it is cancelled. Raises ServerError where a
        server is lost and versions are broadcast, and before the run has begun what is no matter of time."""
        tasks: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            if self._elastic is not None:
                group.create_task(self._discover(self._elastic))
            while True:
                self._sync.check_complete()
                for server in self._pool.servers:
                    if server not in tasks or tasks[server].done():
                        tasks[server] = group.create_task(self._tend(server))
                await self._pool.changed.wait()

    def figures(self) -> Figures:
        """Returns the load of the servers in the routing, as means over time; nothing before any has reported."""
        if not self._load:
            return Figures()
        now_s = asyncio.get_running_loop().time()
        means = {
            name: (self._integrals[name] + load * (now_s - self._reported_s), now_s - self._first_s)
            for name, load in self._load.items()
        }
        return Figures(means=means, values={"perf/servers": float(len(self._pool.routed))})

    def _report(self, server: str, load: ServerLoad) -> None:
        now_s = asyncio.get_running_loop().time()
        self._first_s = self._first_s if self._load else now_s
        for name, value in self._load.items():
            self._integrals[name] += value * (now_s - self._reported_s)
        self._reported_s, self._loads[server] = now_s, load
        loads = [self._loads[one] for one in self._pool.routed if one in self._loads] or [load]
        self._load = {
            "perf/server_running": sum(one.num_running for one in loads),
            "perf/server_waiting": sum(one.num_waiting for one in loads),
            "perf/server_kv_use": max(one.kv_use for one in loads),
        }

    async def _tend(self, server: str) -> None:
        """Ends when the server is not known any more."""
        clock = asyncio.get_running_loop().time
        answered_s, pause_s = clock(), MIN_PAUSE_S
        while server in self._pool.servers:
            try:
                info = await self._client.info(server, within_s=self._timeout_s)
                answered_s = clock()
                if server not in self._pool.routed:
                    await self._sync.catch_up(server, info)
                if info.load is not None:
                    self._report(server, info.load)
                pause_s = MIN_PAUSE_S
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._interval_s):
                        while server in self._pool.routed:
                            await self._pool.changed.wait()
            except (ServerError, ValueError) as error:
                if not isinstance(error, Unreachable):
                    self._sync.refused(server, error)
                self._pool.eject(server, str(error))
                if clock() - answered_s >= self._timeout_s:
                    silent = f"no answer within client.health_timeout_s = {self._timeout_s:g} s"
                    self._client.abandon(server, f"{silent}: {error}")
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _discover(self, elastic: ElasticSettings) -> None:
        """Keeps the known servers equal to the addresses of one name, or to those that the folder tells. Where a
        look-up fails, all stay as they are."""
        pool, name = self._pool, elastic.hostname
        where = str(self._folder) if name is None else f"the DNS for client.elastic.hostname = {name!r}"
        while True:
            try:
                if name is None:
                    found = await in_thread(servers_in, self._folder)
                else:
                    addresses = await self._look_up(name)
                    found = [f"http://{f'[{one}]' if ':' in one else one}:{elastic.port}" for one in addresses]
            except OSError as error:
                why = f"there is no server in {where}: {error}"
                if why != pool.unknown:
                    log.warning("%s; %d servers stay", why, len(pool.servers))
                pool.unknown = why
            else:
                pool.unknown = ""
                for server in found:
                    pool.found(server)
                for server in set(pool.servers) - set(found):
                    self._client.abandon(server, why := f"it is no more in {where}")
                    pool.gone(server, why)
            await asyncio.sleep(elastic.sync_interval)

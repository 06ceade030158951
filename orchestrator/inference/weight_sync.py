"""Carries policy versions from the trainer to every server, and believes them only with proof."""

import asyncio
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

from grpo.orchestrator.inference.client import PolicyClient, RequestRefused, ServerError, ServersAway, Unreachable
from grpo.transport.http import CanaryFigures, LoadReport, LoadRequest, ServerInfo, Unloaded, UnloadRequest
from grpo.transport.records import Tolerance
from grpo.transport.weights.store import HeldVersion

log = logging.getLogger(__name__)

A = TypeVar("A")
REQUESTS = "requests in flight"
"""Who needs a version that nobody has pinned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryReport:
    """Proof that a version is live on all servers."""

    version: int
    load_s: float
    """Seconds until the last server had it."""
    canary_max_abs: float
    """Largest difference between the trainer's and any server's log-probabilities of the canary, in nats; with the
    version's noise too, where it has any."""
    canary_base_max_abs: float
    """The same of the base model: what the two programs differ by without any training."""


class WeightSync:
    """Loads and unloads versions on all servers alike, and brings in those that come late or were away."""

    def __init__(
        self,
        client: PolicyClient,
        *,
        alias: str,
        adapters: Sequence[str] = (),
        check: Callable[[str, ServerInfo], None] = lambda server, info: None,
        broadcast: bool = False,
    ) -> None:
        """`alias` is the name by which chat users get the newest version. `adapters` are the names of a version's,
        where it has several, each of which a server must prove. `check` raises ValueError for a server that does not
        fit the run. `broadcast`: all servers receive a version together or not at all."""
        self.client, self.pool = client, client.pool
        self._alias, self._adapters, self._broadcast = alias, tuple(adapters), broadcast
        self.check = check
        self.run_id = ""
        """Id of the run, which is set before any version is loaded."""
        self.timed: Callable[[str, int], AbstractContextManager[None]] = lambda server, version: nullcontext()
        """Entered while a server loads and proves a version."""
        self.noted: Callable[[str, LoadReport], None] = lambda server, report: None
        """Called when a server has proved a version."""
        self.infos: dict[str, ServerInfo] = {}
        """Answer of each server when it was brought in."""
        self.tolerances: dict[str, Tolerance] = {}
        """The widest that each server was held to for any part of its newest version."""
        self._turn = asyncio.Lock()
        """Held while versions are loaded or unloaded: one after the other."""
        self._has_begun = False
        self._loading: int | None = None
        self.snapshots: dict[int, str | None] = {}
        """Digests of the versions in use, and of the one that is being loaded; None until the first server says it."""
        self.noisy: set[int] = set()
        """Those of them that have noise."""
        self._draining: dict[int, str | None] = {}
        """Digests of versions that nobody needs any more, and whose last requests run."""
        self._proved: defaultdict[str, dict[int, LoadReport]] = defaultdict(dict)

    @property
    def loading(self) -> tuple[int, frozenset[str]] | None:
        """The version that servers are loading, and those that have not proved it yet."""
        return None if self._loading is None else (self._loading, frozenset(self._behind(self._loading)))

    def _behind(self, version: int) -> list[str]:
        return [server for server in self.pool.routed if not self._has_proved(server, version)]

    def _has_proved(self, server: str, version: int) -> bool:
        report = self._proved[server].get(version)
        return report is not None and self.snapshots[version] in (None, report.snapshot)

    # --- new versions ---

    async def load(self, version: int, *, snapshot: str | None = None, noisy: bool = False) -> CanaryReport:
        """Makes `version` live on every server in the routing, another time where another snapshot of it is. Waits for
        a server where there is none. `snapshot`: its digest, None: whichever is published. `noisy`: the version has
        noise, which each server must prove as well.

        Raises ServerError where a server refuses the version or cannot prove it, or none is in service in time.
        """
        async with self._turn:
            return await self._load(version, snapshot=snapshot, noisy=noisy)

    async def _load(self, version: int, *, snapshot: str | None, noisy: bool) -> CanaryReport:
        since_s, deadline_s = time.monotonic(), asyncio.get_running_loop().time() + self.client.timeout_s
        self._loading = version
        self.snapshots[version] = snapshot
        if noisy:
            self.noisy.add(version)
        while not self.pool.routed or self._behind(version):
            if self.pool.routed:
                await self._on_each(self._behind(version), lambda server: self._load_on(server, version))
            else:
                await self.client.until_changed(deadline_s)
        self._loading, self.pool.versions = None, frozenset(self.snapshots)
        reports = [self._proved[server][version] for server in self.pool.routed]
        return CanaryReport(
            version=version,
            load_s=time.monotonic() - since_s,
            canary_max_abs=max(one.max_abs for report in reports for one in figures(report)),
            canary_base_max_abs=max(report.canary.base_max_abs for report in reports),
        )

    async def _load_on(self, server: str, version: int) -> None:
        """Without effect where another snapshot of the version is wanted meanwhile."""
        servers = self.pool.servers
        before = servers[: servers.index(server)] if self._broadcast else ()
        request = LoadRequest(
            run_id=self.run_id,
            version=version,
            alias=self._alias if version == max(self.snapshots) else None,
            rank_offset=1 + sum(self.infos[other].num_workers for other in before),
            snapshot=self.snapshots[version],
        )
        with self.timed(server, version):
            report = await self.client.once(server, "POST", "/policy/load", LoadReport, request)
        if self.snapshots.get(version) not in (None, report.snapshot):
            return
        check_proof(server, version, report, noisy=version in self.noisy, adapters=self._adapters)
        self._proved[server][version] = report
        widest = max(figures(report), key=lambda one: (one.measure, one.tolerance))
        self.tolerances[server] = Tolerance(gap=widest.tolerance, measure=widest.measure)
        if version in self.snapshots:
            self.snapshots[version] = report.snapshot
        self.noted(server, report)

    # --- old versions ---

    def has_slots(self, versions: Collection[int], *, noisy: bool) -> bool:
        """Whether each server can hold all of these at once."""
        num_adapters = len(versions) * max(1, len(self._adapters)) * (2 if noisy else 1)
        return all(info.num_slots is None or num_adapters <= info.num_slots for info in self.infos.values())

    async def keep_only(self, pinned: Mapping[int, Mapping[str, int]]) -> dict[int, HeldVersion]:
        """Unloads the versions that nobody has pinned. Returns those that servers hold: the pinned ones, and those
        whose last requests have not ended, which a server may have to read from disk again."""
        async with self._turn:
            return await self._keep_only(pinned)

    async def _keep_only(self, pinned: Mapping[int, Mapping[str, int]]) -> dict[int, HeldVersion]:
        unneeded = sorted(self.snapshots.keys() - pinned.keys())
        digests = dict(self.snapshots) | self._draining
        for version in unneeded:
            del self.snapshots[version]
        self.noisy &= pinned.keys()
        self.pool.versions = frozenset(self.snapshots)
        self._draining |= {version: digests[version] for version in unneeded}
        for version in unneeded:
            await self._on_each(self.pool.routed, lambda server, version=version: self._unload_on(server, version))  # type: ignore[misc]
        if self._draining:
            infos = await self._on_each(self.pool.routed, self.client.info)
            running = sum((Counter(info.in_flight) for info in infos), Counter[int]())
            self._draining = {version: digest for version, digest in self._draining.items() if running[version]}
            pinned = {version: {REQUESTS: running[version]} for version in self._draining} | dict(pinned)
        held = self.pool.versions | self._draining.keys()
        return {
            version: HeldVersion(snapshot=digests.get(version), pins=dict(pinned[version])) for version in sorted(held)
        }

    async def adopt(self, version: int) -> None:
        """Has the servers unload what an earlier orchestrator of this run had them load, but for `version`."""

        async def one(server: str) -> None:
            info = await self.client.info(server)
            for left in set(info.live) - {version} if info.run_id == self.run_id else ():
                await self._unload_on(server, left)

        await self._on_each(self.pool.routed, one)

    async def _unload_on(self, server: str, version: int) -> None:
        self._proved[server].pop(version, None)
        try:
            await self.client.once(server, "POST", "/policy/unload", Unloaded, UnloadRequest(version=version))
        except RequestRefused as error:
            if error.kind != "not_live":
                raise

    async def _on_each(self, servers: Sequence[str], ask: Callable[[str], Awaitable[A]]) -> list[A]:
        """The answers of servers but those that turn out to be gone, or at fault where there are others: those are
        ejected. Raises ServerError."""

        async def one(server: str) -> list[A]:
            try:
                return [await ask(server)]
            except ServerError as error:
                if not (isinstance(error, Unreachable) or self.client.can_do_without(server, error)):
                    raise
                self.pool.eject(server, str(error))
                return []

        return [answer for answers in await asyncio.gather(*map(one, servers)) for answer in answers]

    # --- servers that come, and come back ---

    async def wait_for_servers(self) -> None:
        """Returns when a server is in the routing; where versions are broadcast, when all are. Raises ServerError: one
        that was never there may be looked for at the wrong address, and another start does not mend that."""
        deadline_s = asyncio.get_running_loop().time() + self.client.timeout_s
        while not self.pool.routed or (self._broadcast and self.pool.out):
            try:
                await self.client.until_changed(deadline_s)
            except ServersAway as error:
                raise ServerError(str(error)) from None
        self._has_begun = True

    def check_complete(self) -> None:
        """Raises ServersAway where a server is lost and versions are broadcast, which nobody can catch up with."""
        if self._broadcast and self._has_begun and (out := self.pool.out):
            gone = "; ".join(f"{server}: {why}" for server, why in out.items())
            raise ServersAway(f"with weight_broadcast.type: nccl no server can be missing; start again: {gone}")

    def refused(self, server: str, error: ServerError | ValueError) -> None:
        """A server does not fit the run, or cannot prove a version, which is no matter of time. Raises that as long as
        the run has not begun."""
        if not self._has_begun:
            raise error
        if str(error) != self.pool.out.get(server):
            log.error("%s stays out of the routing: %s", server, error)

    async def catch_up(self, server: str, info: ServerInfo) -> None:
        """Has the server prove every version in use, in order, and unload the others of this run; then puts it into
        the routing. A restarted server has lost its requests, which go to other servers. Raises ServerError and what
        `check` raises."""
        self.check(server, info)
        self.infos[server] = info
        wanted = self.snapshots
        if wanted and wanted.keys().isdisjoint(info.live):
            self.client.abandon(server, "it serves none of the versions in use")
        self._proved[server] = {}
        others = set(info.live) if wanted and info.run_id == self.run_id else set[int]()
        while True:  # versions come into use and go out of it meanwhile
            if left := (others | self._proved[server].keys()) - wanted.keys():
                await self._unload_on(server, min(left))
                others.discard(min(left))
            elif missing := [version for version in wanted if not self._has_proved(server, version)]:
                await self._load_on(server, min(missing))
            else:
                break
        self.pool.readmit(server)


def figures(report: LoadReport) -> list[CanaryFigures]:
    """Returns the figures of the canary without the version's noise, with it where it has any, and of the other
    adapters."""
    with_noise = [] if report.noise is None else [report.noise]
    return [report.canary, *with_noise, *report.adapters.values()]


def check_proof(
    server: str, version: int, report: LoadReport, *, noisy: bool = False, adapters: Sequence[str] = ()
) -> None:
    """Raises ServerError unless the report proves `version`, and its noise where it is `noisy`, and each of its
    `adapters` where it has several. The mean is within the tolerance for every type."""
    same = "run the same release of grpo in all three programs"
    if report.version != version:
        raise ServerError(f"{server} loaded version {report.version}, expected {version}")
    if noisy != (report.noise is not None):
        received, expected = ("none", "one") if noisy else ("one", "none")
        raise ServerError(
            f"{server} gives {received} proof of noise for version {version}, expected {expected}; {same}"
        )
    if (proved := set(report.adapters)) != (others := set(adapters[1:])):
        raise ServerError(
            f"{server} proves the adapters {sorted(proved)} of version {version} besides its first, expected "
            f"{sorted(others)}; give trainer and orchestrator the same adapters, and {same}"
        )
    for canary in figures(report):
        if not (math.isfinite(canary.max_abs) and canary.mean_abs <= canary.tolerance):
            raise ServerError(
                f"{server} serves another policy than version {version}: its log-probabilities of the canary are "
                f"{canary.mean_abs:g} nats from the trainer's on average ({canary.max_abs:g} at most), expected at "
                f"most {canary.tolerance:g} (those of the base differ by {canary.base_mean_abs:g})"
            )

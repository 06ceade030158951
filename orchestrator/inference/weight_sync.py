"""Carries policy versions from the trainer to every server, and believes them only with proof."""

import asyncio
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

from orchestrator.inference.client import (
    MAX_PAUSE_S,
    MIN_PAUSE_S,
    Refused,
    ServerError,
    ServerPool,
    Unreachable,
)
from transport.errors import CorruptError
from transport.http import CanaryFigures, LoadReport, LoadRequest, ServerInfo, Unloaded, UnloadRequest
from transport.records import parse_json
from transport.weights.store import METRICS_FILE, PublishedPolicy

log = logging.getLogger(__name__)

A = TypeVar("A")


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """How a version became live on all servers."""

    version: int
    load_s: float
    """Seconds until the last server had it."""
    canary_max_abs: float
    """Largest difference between the trainer's and any server's log-probabilities of the canary, in nats; with the
    version's noise too, where it has any."""


class Relay:
    """Loads and unloads versions on all servers alike, and brings those back that were away."""

    def __init__(
        self,
        servers: ServerPool,
        *,
        run_id: str,
        alias: str,
        adapters: Sequence[str] = (),
        check: Callable[[str, ServerInfo], None] = lambda server, info: None,
        broadcast: bool = False,
        loading: Callable[[str, int], AbstractContextManager[None]] = lambda server, version: nullcontext(),
    ) -> None:
        """`alias` is the name by which chat users get the newest version. `adapters` are the names of a version's,
        where it has several, each of which a server must prove. `check` raises ValueError for a server that does not
        fit the run. `broadcast`: all servers receive a version together or not at all. `loading` is entered while a
        server loads and proves a version."""
        self._servers, self._run_id, self._alias, self._check = servers, run_id, alias, check
        self._adapters = tuple(adapters)
        self._members = servers.membership
        self._draining: set[int] = set()
        self._noisy: set[int] = set()
        self._broadcast, self._timed = broadcast, loading
        self._rank_offsets: dict[str, int] = {}
        self.loading: tuple[int, frozenset[str]] | None = None
        """The version that servers are loading, and those that have not proved it yet."""

    @property
    def live(self) -> frozenset[int]:
        """Versions that every server in the routing serves."""
        return self._members.versions

    # --- new versions ---

    async def load(self, version: int, *, noisy: bool = False) -> Proof:
        """Makes `version` live on every server in the routing. Waits for one where there is none. `noisy`: the version
        has noise, which each server must prove as well.

        Raises ServerError where a server refuses the version or cannot prove it, or none is in service in time.
        """
        since_s, reports = time.monotonic(), dict[tuple[str, int], LoadReport]()
        if noisy:
            self._noisy.add(version)
        if self._broadcast:
            await self._require_all()
        while True:
            present = {(server, self._members.admission(server)) for server in self._members.routed}
            if present and present <= reports.keys():
                break
            if present:
                await self._load_on_all([member for member in present if member not in reports], version, reports)
            else:
                await self._until_one_is_back(since_s)
        self._members.versions |= {version}
        return Proof(
            version=version,
            load_s=time.monotonic() - since_s,
            canary_max_abs=max(one.max_abs for member in present for one in figures(reports[member])),
        )

    async def _load_on_all(
        self, members: Sequence[tuple[str, int]], version: int, reports: dict[tuple[str, int], LoadReport]
    ) -> None:
        """Adds the reports of the servers that have loaded it; takes out those that are gone."""

        async def one(member: tuple[str, int]) -> None:
            server, _ = member
            try:
                reports[member] = await self._load_on(server, version)
            except ServerError as error:
                away = isinstance(error, Unreachable) and self._members.watched
                if not (away or self._servers.can_do_without(server, error)):
                    raise
                self._members.take_out(server, str(error))

        pending = {server for server, _ in members}
        self.loading = (version, frozenset(pending))

        def no_longer_loads(server: str) -> None:
            pending.discard(server)
            self.loading = (version, frozenset(pending)) if pending else None

        async with asyncio.TaskGroup() as group:
            for member in members:
                task = group.create_task(one(member))
                task.add_done_callback(lambda _, server=member[0]: no_longer_loads(server))  # type: ignore[misc]

    async def _require_all(self) -> None:
        """Gives each server its ranks, the trainer's being 0. Raises ServerError where one is missing."""
        if self._members.out:
            gone = "; ".join(f"{server}: {why}" for server, why in self._members.out.items())
            raise ServerError(f"with weight_broadcast.type: nccl no server can be missing; restart the run: {gone}")
        if not self._rank_offsets:
            infos, offset = [await self._servers.info(server) for server in self._servers.servers], 1
            for server, info in zip(self._servers.servers, infos, strict=True):
                self._rank_offsets[server] = offset
                offset += info.num_workers

    async def _until_one_is_back(self, since_s: float) -> None:
        try:
            async with asyncio.timeout(max(0.0, since_s + self._servers.timeout_s - time.monotonic())):
                await self._members.changed.wait()
        except TimeoutError:
            raise self._servers.none_left() from None

    async def _load_on(self, server: str, version: int) -> LoadReport:
        newest = version >= max(self._members.versions, default=version)
        request = LoadRequest(
            run_id=self._run_id,
            version=version,
            alias=self._alias if newest else None,
            rank_offset=self._rank_offsets[server] if self._broadcast else 1,
        )
        with self._timed(server, version):
            report = await self._servers.once(server, "POST", "/policy/load", LoadReport, request)
        check_proof(server, version, report, noisy=version in self._noisy, adapters=self._adapters)
        return report

    # --- old versions ---

    async def keep_only(self, needed: set[int]) -> frozenset[int]:
        """Unloads the versions that nothing needs any more. Returns those that servers hold: the needed ones, and
        those whose last requests have not ended, which a server may have to read from disk again."""
        unneeded = sorted(self._members.versions - needed)
        self._members.versions &= frozenset(needed)
        self._noisy &= self._members.versions
        self._draining |= set(unneeded)
        for version in unneeded:
            await self._on_each(lambda server, version=version: self._unload_on(server, version))  # type: ignore[misc]
        if self._draining:
            states = await self._on_each(self._servers.info)
            self._draining &= {v for state in states for v, num in state.in_flight.items() if num > 0}
        return self._members.versions | self._draining

    async def adopt(self, version: int) -> None:
        """Has the servers unload what an earlier orchestrator of this run had them load, but for `version`."""

        async def one(server: str) -> None:
            info = await self._servers.info(server)
            if info.run_id == self._run_id:
                for left in set(info.live) - {version}:
                    await self._unload_on(server, left)

        await self._on_each(one)

    async def _on_each(self, ask: Callable[[str], Awaitable[A]]) -> list[A]:
        """The answers of all servers in the routing but those that turn out to be gone, or at fault where there are
        others."""

        async def one(server: str) -> A | None:
            try:
                return await ask(server)
            except ServerError as error:
                if not (isinstance(error, Unreachable) or self._servers.can_do_without(server, error)):
                    raise
                self._members.take_out(server, str(error))
                return None

        answers = await asyncio.gather(*(one(server) for server in self._members.routed))
        return [answer for answer in answers if answer is not None]

    async def _unload_on(self, server: str, version: int) -> None:
        try:
            await self._servers.once(server, "POST", "/policy/unload", Unloaded, UnloadRequest(version=version))
        except Refused as error:
            if error.kind != "not_live":
                raise

    # --- servers that come late, or come back ---

    async def watch(self) -> None:
        """Consumes: servers that were taken out of the routing, or have been found. Waits for: one of those, and each
        of them to answer and to prove every version in use. Unblocked by: relay, sample, health, discovery, servers.
        Ends when: it is cancelled, or at once where versions are broadcast, which nobody can catch up with."""
        if self._broadcast:
            return
        self._members.watched = True
        returning: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                returning = {server: task for server, task in returning.items() if not task.done()}
                for server in self._members.returning:
                    if server not in returning:
                        returning[server] = group.create_task(self._bring_back(server))
                await self._members.changed.wait()

    async def _bring_back(self, server: str) -> None:
        """Tries until the server is in the routing, or is not to return any more."""
        pause_s = MIN_PAUSE_S
        while server in self._members.returning:
            try:
                await self._catch_up(server)
            except (ServerError, ValueError) as error:
                if not isinstance(error, Unreachable) and self._members.out.get(server) != str(error):
                    log.error("%s stays out of the routing: %s", server, error)
                self._members.take_out(server, str(error))
                await asyncio.sleep(random.uniform(0.5, 1.0) * pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _catch_up(self, server: str) -> None:
        """Has the server prove every version in use, in order, and give up the others of this run; puts it into the
        routing. One that has been restarted knows nothing of what it was asked before, which is asked elsewhere."""
        info = await self._servers.info(server)
        self._check(server, info)
        if self._members.versions.isdisjoint(info.live):
            self._servers.abandon(server, "it serves none of the versions in use")
        proved, unproved = set[int](), set(info.live) if info.run_id == self._run_id else set[int]()
        while True:  # versions come into use and go out of it meanwhile
            if missing := self._members.versions - proved:
                version = min(missing)
                report = await self._load_on(server, version)
                log.info("%s has proved version %d: %.2g nats at most", server, version, report.canary.max_abs)
                proved.add(version)
            elif left := (proved | unproved) - self._members.versions:
                version = min(left)
                await self._unload_on(server, version)
                proved.discard(version)
                unproved.discard(version)
            else:
                break
        self._members.admit(server)


def figures(report: LoadReport) -> list[CanaryFigures]:
    """Of the canary without the version's noise, and with it where it has any, and of the other adapters."""
    with_noise = [] if report.noise is None else [report.noise]
    return [report.canary, *with_noise, *report.adapters.values()]


def check_proof(
    server: str, version: int, report: LoadReport, *, noisy: bool = False, adapters: Sequence[str] = ()
) -> None:
    """Raises ServerError unless the report proves `version`, and its noise where it is `noisy`, and each of its
    `adapters` where it has several. The mean is within the tolerance for every type."""
    if report.version != version:
        raise ServerError(f"{server} loaded version {report.version}, expected {version}")
    if noisy != (report.noise is not None):
        received, expected = ("none", "one") if noisy else ("one", "none")
        raise ServerError(
            f"{server} gives {received} proof of noise for version {version}, expected {expected}; run the same "
            "release of grpo in all three programs"
        )
    if (proved := set(report.adapters)) != (others := set(adapters[1:])):
        raise ServerError(
            f"{server} proves the adapters {sorted(proved)} of version {version} besides its first, expected "
            f"{sorted(others)}; give trainer and orchestrator the same adapters, and run the same release of grpo in "
            "all three programs"
        )
    for canary in figures(report):
        if not (math.isfinite(canary.max_abs) and canary.mean_abs <= canary.tolerance):
            raise ServerError(
                f"{server} serves another policy than version {version}: its log-probabilities of the canary are "
                f"{canary.mean_abs:g} nats from the trainer's on average ({canary.max_abs:g} at most), expected at "
                f"most {canary.tolerance:g}"
            )


def trainer_metrics(policy: PublishedPolicy) -> Mapping[str, float]:
    """The trainer's metrics of the step that gave this version. Raises CorruptError."""
    version = policy.manifest.version
    if METRICS_FILE not in policy.small_files:
        raise CorruptError(f"version {version} has no {METRICS_FILE}; have it published again")
    metrics = parse_json(policy.small_files[METRICS_FILE], METRICS_FILE)
    return {key: float(value) for key, value in metrics.items()}

"""Carries policy versions from the trainer to every server, and believes them only with proof."""

import asyncio
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.client import LoadReport, Refused, ServerError, ServerPool
from transport.errors import CorruptError
from transport.types import parse_json
from transport.weights.base import METRICS_FILE, PublishedPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """How a version became live on all servers."""

    version: int
    load_s: float
    """Seconds until the last server had it."""
    canary_max_abs: float
    """Largest difference between the trainer's and any server's log-probabilities of the canary, in nats."""


class Relay:
    """Loads and unloads versions on all servers alike."""

    def __init__(self, servers: ServerPool, *, run_id: str, alias: str) -> None:
        """`alias` is the name by which chat users get the newest version."""
        self._servers, self._run_id, self._alias = servers, run_id, alias
        self._loaded: set[int] = set()

    async def load(self, version: int) -> Proof:
        """Makes `version` live everywhere. Raises ServerError where a server refuses it, or cannot prove it."""
        since_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._load_on(server, version)) for server in self._servers.servers]
        self._loaded.add(version)
        return Proof(
            version=version,
            load_s=time.monotonic() - since_s,
            canary_max_abs=max(task.result().canary.max_abs for task in tasks),
        )

    async def _load_on(self, server: str, version: int) -> LoadReport:
        report = await self._servers.on(
            server, "POST", "/policy/load", LoadReport, run_id=self._run_id, version=version, alias=self._alias
        )
        check_proof(server, version, report)
        return report

    async def keep_only(self, needed: set[int]) -> None:
        """Unloads the versions that nothing needs any more."""
        for version in sorted(self._loaded - needed):
            self._loaded.discard(version)
            async with asyncio.TaskGroup() as group:
                for server in self._servers.servers:
                    group.create_task(self._unload_on(server, version))

    async def _unload_on(self, server: str, version: int) -> None:
        try:
            await self._servers.on(server, "POST", "/policy/unload", dict, version=version)
        except Refused as error:
            if error.status != 404:
                raise


def check_proof(server: str, version: int, report: LoadReport) -> None:
    """Raises ServerError unless the report proves `version`. The mean is within the tolerance for every type."""
    canary = report.canary
    if report.version != version:
        raise ServerError(f"{server} loaded version {report.version}, expected {version}")
    if not (math.isfinite(canary.max_abs) and canary.mean_abs <= canary.tolerance):
        raise ServerError(
            f"{server} serves another policy than version {version}: its log-probabilities of the canary are "
            f"{canary.mean_abs:g} nats from the trainer's on average ({canary.max_abs:g} at most), expected at most "
            f"{canary.tolerance:g}"
        )


def trainer_metrics(policy: PublishedPolicy) -> Mapping[str, float]:
    """The trainer's metrics of the step that gave this version. Raises CorruptError."""
    version = policy.manifest.version
    if METRICS_FILE not in policy.small_files:
        raise CorruptError(f"version {version} has no {METRICS_FILE}; have it published again")
    metrics = parse_json(policy.small_files[METRICS_FILE], METRICS_FILE)
    return {key: float(value) for key, value in metrics.items()}

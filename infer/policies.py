"""Which adapters this server serves: loading with proof, routing, and dropping them when they have drained.

Knows nothing of HTTP.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol

from infer.adapters import BaseModel, CanaryReport, check_adapter, check_effect, tolerance_of
from infer.following import Serving
from infer.noise import check_noise, check_noise_effect, has_noise
from infer.versions import CANARY_PRIORITY, Loaded, NotLive, canary_in, verified, version_folder
from infer.vllm_api import Adapter, AdapterRejected
from transport.errors import DeadlineError, PolicyRefused
from transport.types import Canary, FileEntry, PolicyKind
from transport.weights.base import ADAPTER_FILE, NOISE_FILE, policy_name

log = logging.getLogger(__name__)


class Scorer(Protocol):
    """What of the engine is needed here."""

    dtype: str

    async def score(self, token_ids: Sequence[int], adapter: Adapter | None, *, priority: int = 0) -> list[float]:
        """Log-probabilities [L - 1] of the sequence."""

    async def add_adapter(self, adapter: Adapter) -> None:
        """Load it; AdapterRejected if that fails."""

    async def remove_adapter(self, adapter: Adapter) -> None:
        """Drop it."""

    async def forget_prefixes(self) -> None:
        """Empty the prefix cache."""


class Names(Protocol):
    """The names of vLLM's own routes."""

    def offer(self, name: str, adapter: Adapter) -> None:
        """Let a name mean this adapter."""

    def withdraw(self, adapter: Adapter) -> None:
        """Take back all its names."""


@dataclass(slots=True, kw_only=True)
class _Policy:
    """A version in the engine."""

    adapter: Adapter
    noisy: Adapter | None
    """The same adapter with the version's noise, if it has any."""
    weights: tuple[FileEntry | None, ...]
    """Of adapter and noise: a version published again with other weights is another policy."""
    loaded: Loaded
    superseded: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once a newer version of the run is live, or this one with other weights."""
    retired: bool = False
    num_in_flight: int = 0


@dataclass(slots=True, kw_only=True)
class PolicyTable:
    """The versions of one run that are live, at most one policy a version. A change of run retires all of them."""

    engine: Scorer
    names: Names
    output_dir: Path
    base: BaseModel
    tolerance: float | None
    """Allowed difference at the canary in nats; None for the defaults by type."""
    timeout_s: float
    """For one load, canary included."""
    kinds: ClassVar[tuple[PolicyKind, ...]] = ("adapter",)
    run_id: str | None = None
    _policies: dict[int, _Policy] = field(default_factory=dict)
    _retired: list[_Policy] = field(default_factory=list)
    _base_scores: dict[tuple[int, ...], list[float]] = field(default_factory=dict)
    _last_key: int = 0
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def live(self) -> list[int]:
        """Versions that new requests may name, ascending."""
        return sorted(self._policies)

    @property
    def in_flight(self) -> dict[int, int]:
        """Requests that run now, by version; retired versions included until they have drained."""
        counts: dict[int, int] = {}
        for policy in [*self._policies.values(), *self._retired]:
            version = policy.loaded.version
            counts[version] = counts.get(version, 0) + policy.num_in_flight
        return counts

    def tolerance_for(self, dtype: str) -> float:
        """Allowed difference at the canary in nats, if the trainer computes in the server's type."""
        return tolerance_of(dtype, dtype, self.tolerance)

    @contextlib.asynccontextmanager
    async def using(self, version: int | None, *, noisy: bool = False) -> AsyncIterator[Adapter | None]:
        """The adapter of a live version for one request, which is counted in flight. None is the base model. `noisy`:
        with the version's noise, where it has any.

        Raises NotLive.
        """
        if version is None:
            yield None
            return
        policy = self._policies.get(version)
        if policy is None:
            raise NotLive(f"version {version} is not live; live are {self.live or 'none'}")
        policy.num_in_flight += 1
        try:
            yield (policy.noisy if noisy else None) or policy.adapter
        finally:
            policy.num_in_flight -= 1
            await self._drop_if_drained(policy)

    @contextlib.asynccontextmanager
    async def following(self, version: int, *, noisy: bool = False) -> AsyncIterator[Serving]:
        """The newest live version, which must be at least `version`, for a request that moves on to a newer one as
        soon as that is proved. Raises NotLive."""
        newest = max(version, *self._policies) if self._policies else version
        async with self.using(newest, noisy=noisy) as adapter:
            yield Serving(version=newest, adapter=adapter, superseded=self._policies[newest].superseded)

    async def load(self, *, run_id: str, version: int, alias: str | None = None) -> Loaded:
        """Make a published version live, after its files and its effect have been checked; at once if it is already.

        `alias` is one more model name for vLLM's own routes that means this version from now on. Raises PolicyRefused
        with the reason, the server being left as it was; DeadlineError after `timeout_s`.
        """
        try:
            async with asyncio.timeout(self.timeout_s), self._lock:
                policy = await self._load(run_id, version)
        except TimeoutError:
            raise DeadlineError(
                f"loading version {version} took longer than {self.timeout_s:g} s (canary_timeout); "
                "the engine did not get to it"
            ) from None
        for name in filter(None, (policy.loaded.name, alias)):
            self.names.offer(name, policy.adapter)
        return policy.loaded

    async def _load(self, run_id: str, version: int) -> _Policy:
        started_s = time.monotonic()
        folder = version_folder(self.output_dir, run_id=run_id, version=version)
        if run_id != self.run_id:
            await self._begin_run(run_id)
        manifest, files = await asyncio.to_thread(verified, folder, run_id, version)
        known, weights = self._policies.get(version), tuple(map(manifest.files.get, (ADAPTER_FILE, NOISE_FILE)))
        if known is not None and known.weights == weights:
            return known
        canary = canary_in(manifest, files)
        await asyncio.to_thread(check_adapter, manifest, files, self.base)
        if noisy := has_noise(manifest, canary):
            check_noise(files[NOISE_FILE], self.base)
        adapters = await self._next_adapters(version, folder, known, noisy=noisy)
        try:
            for adapter in adapters:
                await self.engine.add_adapter(adapter)
            loaded_s = time.monotonic()
            report, noise = await self._check_canary(canary, adapters)
        except BaseException as error:
            await asyncio.shield(self._remove(adapters))
            if isinstance(error, AdapterRejected):
                raise PolicyRefused("corrupt", f"vLLM refused version {version}: {error}") from error
            raise
        loaded = Loaded(
            version=version,
            name=policy_name(version),
            canary=report,
            noise=noise,
            load_s=loaded_s - started_s,
            canary_s=time.monotonic() - loaded_s,
        )
        policy = _Policy(adapter=adapters[0], noisy=adapters[1] if noisy else None, weights=weights, loaded=loaded)
        earlier = [one for one in self._policies.values() if one.loaded.version <= version]
        if known is not None:
            await self._retire(known)
        self._policies[version] = policy
        for one in earlier:
            one.superseded.set()
        log.info("version %d is live: canary %.2g nats, %.0f ms", version, report.max_abs, 1e3 * loaded.load_s)
        if noise is not None:
            log.info("version %d with its noise: canary %.2g nats", version, noise.max_abs)
        return policy

    async def _begin_run(self, run_id: str) -> None:
        """Another run has taken the folder's place: its versions carry the same names, so nothing old may stay."""
        for policy in list(self._policies.values()):
            await self._retire(policy)
        await self.engine.forget_prefixes()
        self.run_id = run_id

    async def _next_adapters(self, version: int, folder: Path, known: _Policy | None, *, noisy: bool) -> list[Adapter]:
        """The version's adapter, and where it has noise the same with it."""
        if known is not None:
            await self.engine.forget_prefixes()
        adapters = []
        for with_noise in (False, True) if noisy else (False,):
            self._last_key += 1
            name = policy_name(version, noisy=with_noise)
            adapters.append(Adapter(name=name, key=self._last_key, path=str(folder), noisy=with_noise))
        return adapters

    async def _check_canary(
        self, canary: Canary, adapters: Sequence[Adapter]
    ) -> tuple[CanaryReport, CanaryReport | None]:
        """The reports without and with the version's noise."""
        tokens = canary.token_ids
        scores = [await self.engine.score(tokens, adapter, priority=CANARY_PRIORITY) for adapter in adapters]
        if tokens not in self._base_scores:
            self._base_scores = {tokens: await self.engine.score(tokens, None, priority=CANARY_PRIORITY)}
        dtype, limit, base = self.engine.dtype, self.tolerance, self._base_scores[tokens]
        report = check_effect(canary, policy=scores[0], base=base, server_dtype=dtype, tolerance=limit)
        if len(scores) == 1:
            return report, None
        return report, check_noise_effect(canary, noisy=scores[1], clean=scores[0], server_dtype=dtype, tolerance=limit)

    async def unload(self, version: int) -> None:
        """Route no more requests to a version; it leaves the engine when its last request has ended. Raises NotLive."""
        policy = self._policies.get(version)
        if policy is None:
            raise NotLive(f"version {version} is not live; live are {self.live or 'none'}")
        await self._retire(policy)

    async def _retire(self, policy: _Policy) -> None:
        del self._policies[policy.loaded.version]
        policy.retired = True
        self._retired.append(policy)
        self.names.withdraw(policy.adapter)
        await self._drop_if_drained(policy)

    async def _drop_if_drained(self, policy: _Policy) -> None:
        if policy in self._retired and policy.num_in_flight == 0:
            self._retired.remove(policy)
            await asyncio.shield(self._remove(filter(None, (policy.adapter, policy.noisy))))

    async def _remove(self, adapters: Iterable[Adapter]) -> None:
        for adapter in adapters:
            await self.engine.remove_adapter(adapter)

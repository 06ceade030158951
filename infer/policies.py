"""Which adapters this server serves: loading with proof, routing, and dropping them when they have drained.

Knows nothing of HTTP.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol, TypedDict

from infer.adapters import BaseModel, check_adapter, check_effect, tolerance_of
from infer.following import Serving
from infer.noise import check_noise, check_noise_effect, has_noise
from infer.versions import CANARY_PRIORITY, NotLive, UnknownAdapter, canary_in, verified, version_folder
from infer.vllm_api import Adapter, AdapterRejected
from transport.errors import DeadlineError, PolicyRefused
from transport.http import CanaryFigures, LoadReport
from transport.records import Canary, FileEntry, PolicyKind, PolicyManifest, adapter_folders
from transport.weights.store import ADAPTER_FILE, NOISE_FILE, policy_name

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


class _Common(TypedDict):
    """What all proofs of a server have in common."""

    server_dtype: str
    tolerance: float | None


@dataclass(slots=True, kw_only=True)
class _Policy:
    """A version in the engine."""

    adapters: Mapping[str, Adapter]
    """By name, an only one under an empty one; the first is that of whoever names none."""
    noisy: Adapter | None
    """An only adapter with the version's noise, if it has any."""
    weights: tuple[FileEntry | None, ...]
    """Of adapters and noise: a version published again with other weights is another policy."""
    loaded: LoadReport
    superseded: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once a newer version of the run is live, or this one with other weights."""
    retired: bool = False
    num_in_flight: int = 0

    @property
    def all_adapters(self) -> list[Adapter]:
        """With noise and without."""
        return [*self.adapters.values(), *filter(None, (self.noisy,))]

    def adapter(self, name: str | None, *, noisy: bool) -> Adapter:
        """The one of this name. Raises UnknownAdapter."""
        if name is None:
            return (self.noisy if noisy else None) or next(iter(self.adapters.values()))
        if name not in self.adapters:
            known = ", ".join(filter(None, self.adapters)) or "one without a name"
            raise UnknownAdapter(f"adapter is {name!r}, and version {self.loaded.version} has {known}")
        return self.adapters[name]


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
    async def using(
        self, version: int | None, *, noisy: bool = False, adapter: str | None = None
    ) -> AsyncIterator[Adapter | None]:
        """The adapter of a live version for one request, which is counted in flight. None is the base model. `noisy`:
        with the version's noise, where it has any. `adapter`: its name, where the version has several; None is the
        first.

        Raises NotLive, and UnknownAdapter.
        """
        if version is None:
            yield None
            return
        policy = self._policies.get(version)
        if policy is None:
            raise NotLive(f"version {version} is not live; live are {self.live or 'none'}")
        chosen = policy.adapter(adapter, noisy=noisy)
        policy.num_in_flight += 1
        try:
            yield chosen
        finally:
            policy.num_in_flight -= 1
            await self._drop_if_drained(policy)

    @contextlib.asynccontextmanager
    async def following(
        self, version: int, *, noisy: bool = False, adapter: str | None = None
    ) -> AsyncIterator[Serving]:
        """The newest live version, which must be at least `version`, for a request that moves on to a newer one as
        soon as that is proved. Raises NotLive, and UnknownAdapter."""
        newest = max(version, *self._policies) if self._policies else version
        async with self.using(newest, noisy=noisy, adapter=adapter) as chosen:
            yield Serving(version=newest, adapter=chosen, superseded=self._policies[newest].superseded)

    async def load(self, *, run_id: str, version: int, alias: str | None = None) -> LoadReport:
        """Make a published version live, after its files and its effect have been checked; at once if it is already.

        `alias` is one more model name for vLLM's own routes that means this version from now on, and `alias-NAME` that
        of another adapter than the first. Raises PolicyRefused with the reason, the server being left as it was;
        DeadlineError after `timeout_s`.
        """
        try:
            async with asyncio.timeout(self.timeout_s), self._lock:
                policy = await self._load(run_id, version)
        except TimeoutError:
            raise DeadlineError(
                f"loading version {version} took longer than {self.timeout_s:g} s (canary_timeout_s); "
                "the engine did not get to it"
            ) from None
        for place, (own, adapter) in enumerate(policy.adapters.items()):
            self.names.offer(adapter.name, adapter)
            if alias:
                self.names.offer(f"{alias}-{own}" if place else alias, adapter)
        return policy.loaded

    async def _load(self, run_id: str, version: int) -> _Policy:
        started_s = time.monotonic()
        folder = version_folder(self.output_dir, run_id=run_id, version=version)
        if run_id != self.run_id:
            await self._begin_run(run_id)
        manifest, files = await asyncio.to_thread(verified, folder, run_id, version)
        known, weights = self._policies.get(version), _weights_of(manifest)
        if known is not None and known.weights == weights:
            return known
        canaries = await asyncio.to_thread(_checked, manifest, files, self.base)
        if known is not None:
            await self.engine.forget_prefixes()
        adapters = self._next_adapters(manifest, folder)
        noisy = self._next(version, folder, noisy=True) if NOISE_FILE in files else None
        every = [*adapters.values(), *filter(None, (noisy,))]
        try:
            for adapter in every:
                await self.engine.add_adapter(adapter)
            loaded_s = time.monotonic()
            report, noise, others = await self._prove(canaries, list(adapters.values()), noisy)
        except BaseException as error:
            await asyncio.shield(self._remove(every))
            if isinstance(error, AdapterRejected):
                raise PolicyRefused("corrupt", f"vLLM refused version {version}: {error}") from error
            raise
        loaded = LoadReport(
            version=version,
            name=policy_name(version),
            canary=report,
            noise=noise,
            adapters=dict(zip(manifest.spec.adapters[1:], others, strict=True)),
            load_s=loaded_s - started_s,
            canary_s=time.monotonic() - loaded_s,
        )
        policy = _Policy(adapters=adapters, noisy=noisy, weights=weights, loaded=loaded)
        earlier = [one for one in self._policies.values() if one.loaded.version <= version]
        self._policies[version] = policy
        for one in earlier:
            one.superseded.set()
        if known is not None:
            await self._let_go(known)
        worst = max(one.max_abs for one in (report, *others))
        log.info("version %d is live: canary %.2g nats, %.0f ms", version, worst, 1e3 * loaded.load_s)
        if noise is not None:
            log.info("version %d with its noise: canary %.2g nats", version, noise.max_abs)
        return policy

    async def _begin_run(self, run_id: str) -> None:
        """Another run has taken the folder's place: its versions carry the same names, so nothing old may stay."""
        for policy in list(self._policies.values()):
            await self._retire(policy)
        await self.engine.forget_prefixes()
        self.run_id = run_id

    def _next_adapters(self, manifest: PolicyManifest, folder: Path) -> dict[str, Adapter]:
        """The version's adapters by name."""
        names = manifest.spec.adapters or ("",)
        served = ("", *names[1:])
        below = [folder / own for own in adapter_folders(manifest.spec.adapters)]
        return {n: self._next(manifest.version, b, s) for n, b, s in zip(names, below, served, strict=True)}

    def _next(self, version: int, folder: Path, name: str = "", *, noisy: bool = False) -> Adapter:
        self._last_key += 1
        served = policy_name(version, noisy=noisy, adapter=name)
        return Adapter(name=served, key=self._last_key, path=str(folder), noisy=noisy)

    async def _prove(
        self, canaries: Sequence[Canary], adapters: Sequence[Adapter], noisy: Adapter | None
    ) -> tuple[CanaryFigures, CanaryFigures | None, list[CanaryFigures]]:
        """The reports of the first adapter without and with the version's noise, and of the other adapters."""
        scores = [await self._score(canary, one) for canary, one in zip(canaries, adapters, strict=True)]
        with_noise = None if noisy is None else await self._score(canaries[0], noisy)
        tokens = canaries[0].token_ids
        if tokens not in self._base_scores:
            self._base_scores = {tokens: await self._score(canaries[0], None)}
        base, common = self._base_scores[tokens], _Common(server_dtype=self.engine.dtype, tolerance=self.tolerance)
        first, *others = [
            check_effect(canary, policy=score, base=base, **common)
            for canary, score in zip(canaries, scores, strict=True)
        ]
        if with_noise is None:
            return first, None, others
        return first, check_noise_effect(canaries[0], noisy=with_noise, clean=scores[0], **common), others

    async def _score(self, canary: Canary, adapter: Adapter | None) -> list[float]:
        return await self.engine.score(canary.token_ids, adapter, priority=CANARY_PRIORITY)

    async def unload(self, version: int) -> None:
        """Route no more requests to a version; it leaves the engine when its last request has ended. Raises NotLive."""
        policy = self._policies.get(version)
        if policy is None:
            raise NotLive(f"version {version} is not live; live are {self.live or 'none'}")
        await self._retire(policy)

    async def _retire(self, policy: _Policy) -> None:
        del self._policies[policy.loaded.version]
        await self._let_go(policy)

    async def _let_go(self, policy: _Policy) -> None:
        """Of one that new requests cannot name any more."""
        policy.retired = True
        self._retired.append(policy)
        for adapter in policy.adapters.values():
            self.names.withdraw(adapter)
        await self._drop_if_drained(policy)

    async def _drop_if_drained(self, policy: _Policy) -> None:
        if policy in self._retired and policy.num_in_flight == 0:
            self._retired.remove(policy)
            await asyncio.shield(self._remove(policy.all_adapters))

    async def _remove(self, adapters: Iterable[Adapter]) -> None:
        for adapter in adapters:
            await self.engine.remove_adapter(adapter)


def _weights_of(manifest: PolicyManifest) -> tuple[FileEntry | None, ...]:
    adapters = [f"{folder}{ADAPTER_FILE}" for folder in adapter_folders(manifest.spec.adapters)]
    return tuple(map(manifest.files.get, [*adapters, NOISE_FILE]))


def _checked(manifest: PolicyManifest, files: dict[str, bytes], base: BaseModel) -> list[Canary]:
    """The canaries of the version's adapters, of which each has been checked, and so has its noise. Raises
    PolicyRefused."""
    folders = adapter_folders(manifest.spec.adapters)
    canaries = [canary_in(manifest, files, folder) for folder in folders]
    for folder in folders:
        check_adapter(manifest, files, base, folder=folder)
    if len({canary.token_ids for canary in canaries}) > 1:
        raise PolicyRefused("corrupt", f"version {manifest.version} has canaries of different tokens")
    if has_noise(manifest, canaries[0]):
        if len(folders) > 1:
            raise PolicyRefused("norm_noise", f"version {manifest.version} has noise and {len(folders)} adapters")
        check_noise(files[NOISE_FILE], base)
    return canaries

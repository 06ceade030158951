"""The policy versions that this server serves: loading with proof, routing, and dropping them when they have drained.

Adapters are served several at once, never more than vLLM has slots for (`max_loras`): it would evict one that requests
use, and let requests of the newest wait until no batch has one of the others. Merged and full weights replace the
model's own, one version at a time, while no request runs. Where loading or proof fails, the earlier weights are loaded
again and must score as before; where they cannot be, as with NCCL, the server ends, to be started again. vLLM's own
chat routes get whatever is live.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo.infer.canary import check_effect, gaps_of, tolerance_of
from grpo.infer.checks import BaseModel, check_version, read_version, version_folder
from grpo.infer.engine import Adapter, Engine
from grpo.transport.errors import DeadlineError, PolicyRefused
from grpo.transport.http import NO_SLOTS, OTHER_SNAPSHOT, CanaryFigures, LoadReport
from grpo.transport.records import Canary, PolicyManifest, adapter_folders
from grpo.transport.weights.http import FetchedVersions
from grpo.transport.weights.nccl import ANNOUNCEMENT_FILE, Announcement
from grpo.transport.weights.store import NOISE_FILE, policy_name, snapshot_of

log = logging.getLogger(__name__)

CANARY_PRIORITY = -1
"""Before all waiting rollouts, so that a new version is not proved after a long queue."""


Scores = Sequence[Sequence[float]]
"""Log-probabilities of a canary by each of the engine's replicas (`dp`)."""


class NotLive(LookupError):
    """A request named a version that is not served."""


class UnknownAdapter(ValueError):
    """A request named an adapter that the version does not have."""


@dataclass(slots=True, kw_only=True, eq=False)
class Served:
    """The base model, or a version that is live or whose last requests run."""

    version: int | None = None
    """None: the base model."""
    adapters: Mapping[str, Adapter | None] = field(default_factory=lambda: {"": None})
    """Adapters by name, the default first; an only one has an empty name. None stands for the model itself."""
    noisy: Adapter | None = None
    """The version's only adapter together with its noise, if it has any."""
    snapshot: str = ""
    """Digest of the policy files; with another one it is another policy of the same version."""
    report: LoadReport | None = None
    folder: Path | None = None
    """Folder from which the weights can be loaded again; None for the base's, and for a broadcast."""
    scores: Scores = ()
    """Scores of the canary, where the version has taken the place of the model's weights."""
    superseded: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once requests that follow must move on: a newer version is live, or this one is about to be replaced."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while no request runs; not before the first."""
    num_in_flight: int = 0

    def all_adapters(self) -> list[Adapter]:
        """Returns the adapters with noise and without."""
        return [adapter for adapter in (*self.adapters.values(), self.noisy) if adapter is not None]

    def adapter(self, name: str | None, *, noisy: bool) -> Adapter | None:
        """Returns the adapter of this name; for None the first one, or the model itself. Raises `UnknownAdapter`."""
        if name is None:
            return (self.noisy if noisy else None) or next(iter(self.adapters.values()))
        if name not in self.adapters:
            known = ", ".join(filter(None, self.adapters)) or "one without a name, or none"
            raise UnknownAdapter(f"adapter is {name!r}, and version {self.version} has {known}")
        return self.adapters[name]


class VersionTable:
    """The versions of one run. A change of run retires all of them."""

    def __init__(
        self,
        engine: Engine,
        base: BaseModel,
        *,
        output_dir: Path,
        tolerance: float | None,
        timeout_s: float,
        num_slots: int,
        fetched: FetchedVersions | None = None,
    ) -> None:
        """`tolerance`: the allowed difference at the canary in nats, None: by type and device. `timeout_s`: for one
        load, canary included. `num_slots`: how many adapters the engine holds at once. `fetched`: copies of
        the versions, where the run's folder is not here."""
        self.engine, self.base, self.output_dir, self._fetched = engine, base, output_dir, fetched
        self.tolerance, self.timeout_s, self.num_slots = tolerance, timeout_s, num_slots
        self.run_id: str | None = None
        self._base = Served()
        self._live: dict[int, Served] = {}
        self._retired: list[Served] = []
        self._slots: dict[int, Served] = {}
        """What holds each of the engine's slots, by the adapter's key."""
        self._freed = asyncio.Event()
        """Wakes whoever waits for a slot when one is freed."""
        self._waits_for = ""
        self._canary_ids: tuple[int, ...] = ()
        self._base_scores: Scores = ()
        self._last_key = 0
        self._session: str | None = None
        """The trainer's whose group has been joined, where weights are broadcast; None before the first."""
        self._lock = asyncio.Lock()
        self._open = asyncio.Event()
        """Cleared while the model's weights are replaced."""
        self._open.set()

    @property
    def in_place(self) -> bool:
        """Whether versions replace the model's own weights."""
        return self.base.max_rank is None

    @property
    def live(self) -> dict[int, str]:
        """Versions that new requests may name, ascending, with their snapshots' digests."""
        return {version: served.snapshot for version, served in sorted(self._live.items())}

    @property
    def in_flight(self) -> dict[int, int]:
        """Requests that run now, by version; retired versions included until they have drained."""
        counts = dict.fromkeys(self._live, 0)
        for served in (*self._live.values(), *self._retired):
            assert served.version is not None
            counts[served.version] = counts.get(served.version, 0) + served.num_in_flight
        return counts

    @contextlib.asynccontextmanager
    async def using(
        self, version: int | None, *, noisy: bool = False, adapter: str | None = None, follow: bool = False
    ) -> AsyncIterator[tuple[Served, Adapter | None]]:
        """Yields what serves one request, which is counted in flight: a live version (None: the base model) and its
        adapter, `noisy` with the version's noise, where it has any. With `follow` it is the newest live version, which
        must be at least `version`. Raises `NotLive` and `UnknownAdapter`."""
        while not self._open.is_set():
            await self._open.wait()
        served = self._find(max([version, *self._live]) if follow and version is not None else version)
        chosen = served.adapter(adapter, noisy=noisy)
        async with self._counted(served):
            yield served, chosen

    def using_key(self, key: int) -> contextlib.AbstractAsyncContextManager[None]:
        """Counts a request of vLLM's own routes in flight, which names an adapter by its key. Raises ValueError, which
        they answer with 400, where it is not there any more."""
        if key not in self._slots:
            raise ValueError(f"this version is not served any more; live are {sorted(self._live) or 'no versions'}")
        return self._counted(self._slots[key])

    @contextlib.asynccontextmanager
    async def _counted(self, served: Served) -> AsyncIterator[None]:
        served.num_in_flight += 1
        served.idle.clear()
        try:
            yield
        finally:
            served.num_in_flight -= 1
            if served.num_in_flight == 0:
                served.idle.set()
                await self._drop_if_drained(served)

    def _find(self, version: int | None) -> Served:
        if version in self._live:
            return self._live[version]
        if version is None and not (self.in_place and self._live):
            return self._base
        name = "the base model" if version is None else f"version {version}"
        raise NotLive(f"{name} is not live; live are {sorted(self._live) or 'no versions'}")

    async def load(
        self,
        *,
        run_id: str,
        version: int,
        alias: str | None = None,
        rank_offset: int = 1,
        snapshot: str | None = None,
    ) -> LoadReport:
        """Makes a published version live, after its files and its effect have been checked; at once if it is already.
        `snapshot` is the digest that it must have, None: any. `alias` means this version from now on for vLLM's own
        routes (`alias-NAME`: another adapter than the first); `rank_offset` is this server's first rank where weights
        are broadcast. Raises `PolicyRefused`, the server being left as it was, and `DeadlineError` after
        `timeout_s`."""
        try:
            async with asyncio.timeout(self.timeout_s), self._lock:
                served = await self._load(run_id, version, rank_offset, snapshot)
        except TimeoutError:
            running = f"; it waited for {self.in_flight} requests in flight, by version" if self.in_place else ""
            raise DeadlineError(
                f"loading version {version} took longer than {self.timeout_s:g} s (canary_timeout_s)"
                f"{self._waits_for or running}"
            ) from None
        finally:
            self._waits_for = ""
        assert served.report is not None
        for place, (own, adapter) in enumerate(served.adapters.items()):
            self.engine.offer(policy_name(version, adapter=own if place else ""), adapter)
            if alias:
                self.engine.offer(f"{alias}-{own}" if place else alias, adapter)
        return served.report

    async def _load(self, run_id: str, version: int, rank_offset: int, snapshot: str | None) -> Served:
        if self._fetched is None:
            folder = version_folder(self.output_dir, run_id=run_id, version=version)
        else:
            folder = await asyncio.to_thread(self._fetched.fetch, run_id, version)
            await asyncio.to_thread(self._fetched.keep_only, {version, *self.in_flight})
        if run_id != self.run_id:
            await self._begin_run(run_id)
        manifest, files = await asyncio.to_thread(read_version, folder, run_id=run_id, version=version)
        _check_snapshot(manifest, snapshot)
        known = self._live.get(version)
        if known is not None and known.snapshot == snapshot_of(manifest):
            return known
        canaries = await asyncio.to_thread(check_version, manifest, folder, files, self.base)
        await self._score_base(canaries[0])
        announced = _announcement(files)
        if announced is not None and announced.session != self._session:
            await self._join(announced, rank_offset)
            # That may have been the announcement of a trainer that has ended: who has come has replaced it before.
            manifest, files = await asyncio.to_thread(read_version, folder, run_id=run_id, version=version)
            canaries = await asyncio.to_thread(check_version, manifest, folder, files, self.base)
            announced = _announcement(files)
            self._session = None if announced is None else announced.session
            _check_snapshot(manifest, snapshot)
        served = Served(version=version, snapshot=snapshot_of(manifest))
        if self.in_place:
            report = await self._replace(served, folder, canaries[0], announced)
        else:
            report = await self._add(served, canaries, manifest, folder)
        found = report.canary
        log.info(
            "version %d (%s) is live: the canary differs from the trainer's by %.2g nats (%s), the base's by %.2g, "
            "allowed are %.2g",
            *(version, served.snapshot, found.gap, found.measure, found.base_gap, found.tolerance),
        )
        served.report = report
        return served

    async def _join(self, announced: Announcement, rank_offset: int) -> None:
        """Joins the trainer's group. Where it does not come the server ends, whose workers would go on waiting."""
        try:
            await self.engine.join_trainer(announced.rendezvous, rank_offset=rank_offset)
        except BaseException as error:
            where = f"{announced.rendezvous.host}:{announced.rendezvous.port}"
            self.engine.end(f"the trainer that broadcasts weights was not met at {where}: {error!r}")
            raise

    async def _begin_run(self, run_id: str) -> None:
        """Drops the versions of another run, which carry the same names."""
        for served in list(self._live.values()):
            if self.in_place:
                async with self._drained(served):
                    await self.engine.load_weights(None)
                    self._live.clear()
            else:
                await self._retire(served)
        await self.engine.forget_prefixes()
        self.run_id, self._canary_ids = run_id, ()

    async def _score_base(self, canary: Canary) -> None:
        """Scores the base model; where versions take its place, before the first does."""
        if canary.token_ids == self._canary_ids:
            return
        if self.in_place and self._live:
            raise PolicyRefused("corrupt", f"version {canary.version} has another canary than the versions before it")
        self._base_scores = await self._score(canary.token_ids, None)
        self._canary_ids = canary.token_ids

    async def _score(self, token_ids: Sequence[int], adapter: Adapter | None) -> Scores:
        ranks = range(self.engine.num_replicas)
        return await asyncio.gather(
            *(self.engine.score(token_ids, adapter, priority=CANARY_PRIORITY, replica=rank) for rank in ranks)
        )

    def _effect(self, canary: Canary, scores: Scores, *, noiseless: Scores | None = None) -> CanaryFigures:
        """Returns the figures of the replica that is farthest from the trainer. `noiseless`: the scores without noise,
        where `scores` are those with it."""
        settings: Any = {"dtype": self.engine.dtype, "device": self.engine.device, "tolerance": self.tolerance}
        without: Sequence[Sequence[float] | None] = noiseless or [None] * len(scores)
        of_all = zip(scores, self._base_scores, without, strict=True)
        return max(
            (check_effect(canary, served, base, noiseless=one, **settings) for served, base, one in of_all),
            key=lambda figures: figures.gap / figures.tolerance,
        )

    async def _add(
        self, served: Served, canaries: Sequence[Canary], manifest: PolicyManifest, folder: Path
    ) -> LoadReport:
        version, known, started_s = manifest.version, self._live.get(manifest.version), time.monotonic()
        names, folders = manifest.spec.adapters or ("",), adapter_folders(manifest.spec.adapters)
        served.adapters = {
            name: self._adapter(policy_name(version, adapter=name if below else ""), folder / below)
            for name, below in zip(names, folders, strict=True)
        }
        if NOISE_FILE in manifest.files:
            served.noisy = self._adapter(policy_name(version, noisy=True), folder, noisy=True)
        await self._wait_for_slots(served)
        if known is not None:
            await self.engine.forget_prefixes()  # name and path come again
        try:
            for adapter in served.all_adapters():
                await self.engine.add_adapter(adapter)
            loaded_s = time.monotonic()
            figures, noise, adapters = list[CanaryFigures](), None, served.adapters.values()
            for canary, proved in zip(canaries, adapters, strict=True):
                scores = await self._score(canary.token_ids, proved)
                figures.append(self._effect(canary, scores))
            if served.noisy is not None:  # which an only adapter has
                noisy_scores = await self._score(canaries[0].token_ids, served.noisy)
                noise = self._effect(canaries[0], noisy_scores, noiseless=scores)
        except BaseException:
            await asyncio.shield(self._remove(served))
            raise
        known = self._live.get(version)
        earlier = [one for number, one in self._live.items() if number <= version]
        self._live[version] = served
        for one in earlier:
            one.superseded.set()
        if known is not None:
            await self._retire(known)
        others = dict(zip(manifest.spec.adapters[1:], figures[1:], strict=True))
        return _report(served, figures[0], started_s, loaded_s, noise=noise, adapters=others)

    async def _wait_for_slots(self, served: Served) -> None:
        """Takes slots for the adapters of one more version. Waits for versions whose last requests run. One that was
        published again gives way to its successor where both do not fit. Raises `PolicyRefused` where the versions that
        are live leave too few."""
        adapters = served.all_adapters()
        while len(self._slots) + len(adapters) > self.num_slots:
            live = [one for one in self._slots.values() if one in self._live.values()]
            if len(live) + len(adapters) <= self.num_slots:
                self._waits_for = (
                    f"; it waited for one of max_loras = {self.num_slots} slots, held by {self._holders()}"
                )
                await self._freed.wait()
            elif served.version in self._live:
                await self._retire(self._live[served.version])
            else:
                raise PolicyRefused(
                    NO_SLOTS,
                    f"version {served.version} has {len(adapters)} adapters, and of max_loras = {self.num_slots} slots "
                    f"are held: {self._holders()}; unload a version (POST /policy/unload), or set max_loras to at "
                    f"least {len(live) + len(adapters)}",
                )
        self._slots |= {adapter.key: served for adapter in adapters}

    def _holders(self) -> str:
        """Says who has slots. Example: ``version 3 (1 slot, 5 requests in flight, live), version 2 (…)``"""
        texts = [
            f"version {one.version} ({num} slot{'s' * (num > 1)}, {one.num_in_flight} requests in flight"
            f"{', live' * (one in self._live.values())})"
            for one, num in Counter(self._slots.values()).items()
        ]
        return ", ".join(texts) or "nobody"

    def _adapter(self, name: str, folder: Path, *, noisy: bool = False) -> Adapter:
        self._last_key += 1
        return Adapter(name=name, key=self._last_key, path=str(folder), noisy=noisy)

    async def unload(self, version: int) -> None:
        """Routes no more requests to a version; it leaves the engine when its last request has ended. One that has
        replaced the model's own weights stays until another does. Raises `NotLive`."""
        served = self._find(version)
        if not self.in_place:
            await self._retire(served)

    async def _retire(self, served: Served) -> None:
        """Drops a version, now or after its last request; new ones cannot name it any more."""
        assert served.version is not None
        if self._live.get(served.version) is served:
            del self._live[served.version]
        self._retired.append(served)
        for adapter in served.all_adapters():
            self.engine.withdraw(adapter)
        await self._drop_if_drained(served)

    async def _drop_if_drained(self, served: Served) -> None:
        if served in self._retired and served.num_in_flight == 0:
            self._retired.remove(served)
            await asyncio.shield(self._remove(served))

    async def _remove(self, served: Served) -> None:
        for adapter in served.all_adapters():
            await self.engine.remove_adapter(adapter)
            self._slots.pop(adapter.key, None)
        self._freed.set()
        self._freed.clear()

    @contextlib.asynccontextmanager
    async def _drained(self, served: Served) -> AsyncIterator[None]:
        """Within it no request runs, and new ones wait."""
        self._open.clear()
        served.superseded.set()
        try:
            if served.num_in_flight:
                await served.idle.wait()
            yield
        finally:
            served.superseded.clear()
            self._open.set()

    async def _replace(
        self, served: Served, folder: Path, canary: Canary, announced: Announcement | None
    ) -> LoadReport:
        before = next(iter(self._live.values()), self._base)
        async with self._drained(before):
            started_s = time.monotonic()
            try:
                if announced is None:
                    await self.engine.load_weights(folder)
                else:
                    await self.engine.receive_weights(announced)
                loaded_s = time.monotonic()
                scores = await self._score(canary.token_ids, None)
                figures = self._effect(canary, scores)
            except BaseException as error:
                if not await self._put_back(before):
                    self.engine.end(
                        f"version {served.version} has taken the place of the weights before and failed: {error}"
                    )
                raise
            self.engine.forget_names()
            self._live = {canary.version: served}
            served.folder, served.scores = None if announced else folder, scores
            return _report(served, figures, started_s, loaded_s)

    async def _put_back(self, before: Served) -> bool:
        """Returns whether the model has the weights from before again, by their scores."""
        if before.version is not None and before.folder is None:
            return False
        try:
            async with asyncio.timeout(self.timeout_s):
                await self.engine.load_weights(before.folder)
                scores = await self._score(self._canary_ids, None)
        except Exception:
            log.exception("the weights from before cannot be loaded again")
            return False
        dtype = self.engine.dtype
        allowed = self.tolerance or tolerance_of(dtype, dtype, device=self.engine.device)
        both = zip(scores, before.scores or self._base_scores, strict=True)
        return all(max(gaps_of(*one)) <= allowed for one in both)


def _check_snapshot(manifest: PolicyManifest, wanted: str | None) -> None:
    """Raises `PolicyRefused` where the version is published as another snapshot."""
    if wanted not in (None, found := snapshot_of(manifest)):
        what = f"version {manifest.version} is published as snapshot {found}, and the request names {wanted}"
        raise PolicyRefused(OTHER_SNAPSHOT, f"{what}; ask again")


def _announcement(files: Mapping[str, bytes]) -> Announcement | None:
    return Announcement.from_json(files[ANNOUNCEMENT_FILE]) if ANNOUNCEMENT_FILE in files else None


def _report(served: Served, canary: CanaryFigures, started_s: float, loaded_s: float, **others: Any) -> LoadReport:
    assert served.version is not None
    others |= {"load_s": loaded_s - started_s, "canary_s": time.monotonic() - loaded_s, "snapshot": served.snapshot}
    return LoadReport(version=served.version, name=policy_name(served.version), canary=canary, **others)

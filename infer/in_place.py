"""Serving versions that replace the model's own weights: one at a time, with proof, and the way back.

A switch goes: new requests wait; those that run come to their end, and those that follow the newest version are ended
where they stand; the weights are replaced and the prefix cache is emptied; the canary is scored; the waiting requests
go on, those that follow under the new version, and those that named the earlier one are refused.
Where loading or proof fails, the earlier weights are put back and proved in their turn. Only where that fails too does
the server serve nothing more, and says that it must be restarted.

Requests of vLLM's own chat routes wait and end likewise, but know no version: they get whatever is live.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol

from infer.adapters import BaseModel, check_effect, tolerance_of
from infer.following import Serving
from infer.versions import CANARY_PRIORITY, NotLive, UnknownAdapter, canary_in, verified, version_folder
from infer.vllm_api import Adapter, EngineError
from infer.weights import KINDS, Shapes, announcement_in, check_weights
from transport.errors import DeadlineError, PolicyRefused
from transport.http import CanaryFigures, LoadReport
from transport.records import Canary, FileEntry, PolicyKind
from transport.weights.nccl import ANNOUNCEMENT_FILE, Announcement
from transport.weights.store import policy_name

log = logging.getLogger(__name__)


class WeightsEngine(Protocol):
    """What of the engine is needed here."""

    dtype: str

    async def score(self, token_ids: Sequence[int], adapter: Adapter | None, *, priority: int = 0) -> list[float]:
        """Log-probabilities [L - 1] of the sequence."""

    async def load_weights(self, folder: Path | None) -> None:
        """Replace the model's weights by those in a version's folder, None: by the base's, once all requests of the
        engine have ended, and empty its caches."""

    async def receive_weights(self, announcement: Announcement, *, rank_offset: int) -> None:
        """The same with what the trainer broadcasts; the server's workers are the ranks from `rank_offset` on."""


class ModelNames(Protocol):
    """The names of vLLM's own routes."""

    def rename(self, names: Sequence[str]) -> None:
        """Let these names, besides the base model's, mean the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Live:
    """The version whose weights the model has."""

    folder: Path
    files: dict[str, FileEntry]
    loaded: LoadReport
    canary: Canary
    scores: list[float]
    """The server's own log-probabilities of the canary."""


@dataclass(slots=True, kw_only=True)
class InPlaceTable:
    """The one version of one run that is live, if any. A change of run puts the base model's weights back."""

    engine: WeightsEngine
    names: ModelNames
    output_dir: Path
    base: BaseModel
    shapes: Shapes
    """Of all tensors of the base's checkpoint."""
    tolerance: float | None
    """Allowed difference at the canary in nats; None for the defaults by type."""
    timeout_s: float
    """For one load: the wait for running requests, and the canary, included."""
    kinds: ClassVar[tuple[PolicyKind, ...]] = KINDS
    run_id: str | None = None
    _live: _Live | None = None
    _num_in_flight: int = 0
    _base_scores: dict[tuple[int, ...], list[float]] = field(default_factory=dict)
    _broken: str | None = None
    _open: asyncio.Event = field(default_factory=asyncio.Event)
    """Set but during a switch."""
    _closing: asyncio.Event = field(default_factory=asyncio.Event)
    """Set during a switch: the opposite of `_open`."""
    _idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while nothing is in flight."""
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self._open.set()
        self._idle.set()

    @property
    def live(self) -> list[int]:
        """The version that new requests may name, if any."""
        return [] if self._live is None else [self._live.loaded.version]

    @property
    def in_flight(self) -> dict[int, int]:
        """Requests that run now, by version."""
        return dict.fromkeys(self.live, self._num_in_flight)

    def tolerance_for(self, dtype: str) -> float:
        """Allowed difference at the canary in nats, if the trainer computes in the server's type."""
        return tolerance_of(dtype, dtype, self.tolerance)

    @contextlib.asynccontextmanager
    async def using(
        self, version: int | None, *, noisy: bool = False, adapter: str | None = None
    ) -> AsyncIterator[Adapter | None]:
        """The model for one request, which is counted in flight. None is the base model, as long as no version has
        taken its place. `noisy` changes nothing: versions that are served in place have no noise. Nor have they
        adapters with names.

        Raises NotLive, UnknownAdapter, and EngineError where a switch has left the server unfit.
        """
        if adapter is not None:
            raise UnknownAdapter(f"adapter is {adapter!r}, and versions that replace the model's weights have none")
        await self._until_open()
        if self._broken is not None:
            raise EngineError(self._broken)
        if self.live != ([] if version is None else [version]):
            asked = "the base model" if version is None else f"version {version}"
            raise NotLive(f"{asked} is not live; live is {self.live or 'the base model'}, in its place")
        self._num_in_flight += 1
        self._idle.clear()
        try:
            yield None
        finally:
            self._num_in_flight -= 1
            if self._num_in_flight == 0:
                self._idle.set()

    @contextlib.asynccontextmanager
    async def following(
        self, version: int, *, noisy: bool = False, adapter: str | None = None
    ) -> AsyncIterator[Serving]:
        """The live version, which must be at least `version`, for a request that ends where it stands when a switch
        begins, and goes on when it is over. Raises as `using` does."""
        await self._until_open()
        newest = max(version, *self.live) if self.live else version
        async with self.using(newest, noisy=noisy, adapter=adapter):
            yield Serving(version=newest, adapter=None, superseded=self._closing)

    async def _until_open(self) -> None:
        while not self._open.is_set():
            await self._open.wait()

    async def load(self, *, run_id: str, version: int, alias: str | None = None, rank_offset: int = 1) -> LoadReport:
        """Put a published version in the place of the live one; at once if it is live already.

        `alias` is one more model name for vLLM's own routes; `rank_offset` is the first rank of this server where
        the weights are broadcast. Raises PolicyRefused with the reason, the earlier weights
        being back; DeadlineError after `timeout_s`; EngineError if the server must be restarted.
        """
        try:
            async with asyncio.timeout(self.timeout_s), self._lock:
                if self._broken is not None:
                    raise EngineError(self._broken)
                live = await self._load(run_id, version, rank_offset)
        except TimeoutError:
            raise DeadlineError(
                f"loading version {version} took longer than {self.timeout_s:g} s (canary_timeout_s); "
                f"{self._num_in_flight} requests are in flight, which it waits for"
            ) from None
        self.names.rename([live.loaded.name, *filter(None, (alias,))])
        return live.loaded

    async def _load(self, run_id: str, version: int, rank_offset: int) -> _Live:
        folder = version_folder(self.output_dir, run_id=run_id, version=version)
        if run_id != self.run_id:
            await self._begin_run(run_id)
        manifest, files = await asyncio.to_thread(verified, folder, run_id, version)
        if self._live is not None and self._live.folder == folder and self._live.files == manifest.files:
            return self._live
        canary = canary_in(manifest, files)
        await asyncio.to_thread(check_weights, manifest, folder, files, self.base, self.shapes)
        await self._score_base(canary)
        announcement = announcement_in(files) if ANNOUNCEMENT_FILE in files else None

        async def take() -> None:
            if announcement is None:
                await self.engine.load_weights(folder)
            else:
                await self.engine.receive_weights(announcement, rank_offset=rank_offset)

        async with self._drained():
            self._live = await self._replace(take, folder, manifest.files, canary)
        report = self._live.loaded.canary
        log.info("version %d is live, in place: canary %.2g nats", version, report.max_abs)
        return self._live

    async def _begin_run(self, run_id: str) -> None:
        """The base model's weights, which the next run's first version is compared with."""
        if self._live is not None:
            async with self._drained():
                await self.engine.load_weights(None)
                self._live = None
        self._base_scores.clear()
        self.run_id = run_id

    async def _score_base(self, canary: Canary) -> None:
        """Before the first version replaces it; all versions of a run have the same canary's tokens."""
        if canary.token_ids in self._base_scores:
            return
        if self._live is not None:
            raise PolicyRefused("corrupt", f"version {canary.version} has another canary than the versions before it")
        self._base_scores[canary.token_ids] = await self._score(canary)

    async def _score(self, canary: Canary) -> list[float]:
        return await self.engine.score(canary.token_ids, None, priority=CANARY_PRIORITY)

    @contextlib.asynccontextmanager
    async def _drained(self) -> AsyncIterator[None]:
        """Within it no request runs, and new ones wait."""
        self._open.clear()
        self._closing.set()
        try:
            await self._idle.wait()
            yield
        finally:
            self._closing.clear()
            self._open.set()

    async def _replace(
        self, take: Callable[[], Awaitable[None]], folder: Path, files: dict[str, FileEntry], canary: Canary
    ) -> _Live:
        since_s = time.monotonic()
        try:
            await take()
            loaded_s = time.monotonic()
            scores = await self._score(canary)
            report = self._compared(canary, scores)
        except BaseException:
            await asyncio.shield(self._put_back(canary))
            raise
        loaded = LoadReport(
            version=canary.version,
            name=policy_name(canary.version),
            canary=report,
            load_s=loaded_s - since_s,
            canary_s=time.monotonic() - loaded_s,
        )
        return _Live(folder=folder, files=files, loaded=loaded, canary=canary, scores=scores)

    def _compared(self, canary: Canary, scores: list[float]) -> CanaryFigures:
        return check_effect(
            canary,
            policy=scores,
            base=self._base_scores[canary.token_ids],
            server_dtype=self.engine.dtype,
            tolerance=self.tolerance,
        )

    async def _put_back(self, failed: Canary) -> None:
        """The weights of before, proved by their own scores. Where it fails, the server is unfit from now on."""
        earlier = self._live
        expected = self._base_scores[failed.token_ids] if earlier is None else earlier.scores
        what = "the base model" if earlier is None else f"version {earlier.loaded.version}"
        try:
            if earlier is not None and ANNOUNCEMENT_FILE in earlier.files:
                raise EngineError("its weights were broadcast and are nowhere on disk")
            await self.engine.load_weights(None if earlier is None else earlier.folder)
            scores = await self._score(failed if earlier is None else earlier.canary)
            gap = max(abs(x - y) for x, y in zip(scores, expected, strict=True))
            if not gap <= self.tolerance_for(self.engine.dtype):
                raise EngineError(f"its log-probabilities differ by {gap:.3g} nats from those before")
        except Exception as error:
            self._broken = (
                f"version {failed.version} could not be loaded, and {what} could not be put back: {error}; "
                "restart this server"
            )
            log.error("%s", self._broken)
        else:
            log.warning("version %d was refused; %s is back", failed.version, what)

    async def unload(self, version: int) -> None:
        """Nothing to do for a version that another has replaced; the live one stays until then. Raises NotLive."""
        if version not in self.live:
            raise NotLive(f"version {version} is not live; live is {self.live or 'the base model'}")

"""Takes policy versions from the trainer to the servers, one after the other."""

import asyncio
import logging
import math
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass

from grpo.configs.orch import OrchSettings
from grpo.orchestrator.background import in_thread
from grpo.orchestrator.checks import check_spec
from grpo.orchestrator.inference.client import RequestRefused
from grpo.orchestrator.inference.sleep import SleepScheduler
from grpo.orchestrator.inference.weight_sync import CanaryReport, WeightSync
from grpo.orchestrator.loops.evaluate import Evaluating
from grpo.orchestrator.monitoring.fates import Fates
from grpo.orchestrator.opponents import Opponents, make_room
from grpo.orchestrator.scheduler import Scheduler
from grpo.orchestrator.startup import Ready
from grpo.transport.errors import CorruptError, DeadlineError, ProofFailed
from grpo.transport.http import OTHER_SNAPSHOT
from grpo.transport.receipts import RECEIPT_FILE, Receipt
from grpo.transport.records import parse_json
from grpo.transport.status import PeerWatch
from grpo.transport.weights.store import (
    METRICS_FILE,
    NOISE_FILE,
    HeldVersion,
    InUse,
    PolicyReader,
    PublishedPolicy,
    write_in_use,
)

log = logging.getLogger(__name__)

POLL_S, LOOK_S = 0.02, 0.5
"""Seconds between looks for the next version, and for one before that is published again."""
LOADING = "loading"
"""Why no group starts."""


@dataclass(kw_only=True)
class Versions:
    """Policy versions, from the trainer's folder to all servers."""

    settings: OrchSettings
    ready: Ready
    first_version: int
    """The version to begin with."""
    scheduler: Scheduler
    sync: WeightSync
    sleep: SleepScheduler | None
    """In sleep mode."""
    fates: Fates
    evaluating: Evaluating
    opponents: Opponents

    def __post_init__(self) -> None:
        run = self.ready.run
        self._reader = PolicyReader(run.broadcasts, run_id=run.run_id)
        self._trainer = PeerWatch(run.status / "train.json", name="grpo-train")
        self._one_version = self.settings.weight_broadcast.format != "adapter"

    async def run(self) -> None:
        """Consumes: versions that the trainer publishes. Waits for: the next one, and for every server to wake, where
        they sleep meanwhile, and to prove it. Unblocked by: trainer, servers. Ends when: the last step's version is
        live."""
        recorder = self.fates.recorder
        for step in recorder.unwritten(before=self.first_version):  # published while no orchestrator was there
            policy = self._reader.poll(step)
            recorder.written_late(step, {} if policy is None else trainer_metrics(policy))
            if policy is not None:
                await self._prove(policy)
        version, noticed_s, last = self.first_version, time.monotonic(), self.settings.max_steps
        while last is None or version <= last:
            policy, waited_s = await self._published(version, earlier_s=noticed_s)
            noticed_s = time.monotonic()
            # No request may need the version that servers are about to replace, and nobody is to put them to sleep.
            needs_block = self._one_version or self.sleep is not None
            with self.scheduler.block(LOADING) if needs_block else nullcontext():
                await self._make_live(policy, version, waited_s)
                held = await self.sync.keep_only(self.scheduler.pinned())
            await in_thread(self._say_what_is_in_use, held, version)
            version += 1
        self.evaluating.no_more_versions()

    async def _make_live(self, policy: PublishedPolicy, version: int, waited_s: float) -> None:
        await self._prove(policy)
        woken = {} if self.sleep is None else await self.sleep.wake()
        if version > self.first_version:
            await self._load_again(version - 1)
        if version == self.first_version:
            check_spec(self.settings, policy.manifest.spec, self.ready.model_identity)
            await self.sync.adopt(version)
        await self._drained()
        if version > self.first_version:
            await self.opponents.prepare(version)
        noisy, limit_s = NOISE_FILE in policy.manifest.files, self.settings.wait_timeout_s
        await make_room(self.sync, self.scheduler, [version], noisy=noisy, limit_s=limit_s)
        proof = await self._proved(version, noisy=noisy)
        self.scheduler.version_live(version)
        metrics = {} if version == 0 else {**trainer_metrics(policy), **woken}
        self.fates.live(proof, metrics, wait_trainer_s=waited_s)
        self.evaluating.version_live(version)

    async def _prove(self, policy: PublishedPolicy) -> None:
        """Compares the gradients of the step that gave this version with its samples. Raises ProofFailed where they
        differ and the run is to stop then."""
        if (receipt := receipt_of(policy)) is None:
            return
        if (finding := self.fates.received(receipt)) is None:
            return
        step, stops = receipt.step, self.settings.proofs.on_failure == "stop"
        message = f"the gradients of step {step} are not those of batch {step}'s samples: {finding}"
        if not stops:
            log.warning("%s; see `grpo docs proofs`", message)
            return
        await in_thread(self.fates.ledger.changes())
        raise ProofFailed(
            f"{message}; version {step} is not served. Go on from a checkpoint before it (ckpt.resume_step) once the "
            "trainer is mended, or set proofs.on_failure: warn to go on as it is"
        )

    async def _proved(self, version: int, *, noisy: bool) -> CanaryReport:
        """Has servers load and prove a version, and once more where the trainer publishes it again meanwhile. Raises
        ServerError."""
        while True:
            snapshot = self._reader.snapshot(version)
            try:
                return await self.sync.load(version, snapshot=snapshot, noisy=noisy)
            except RequestRefused as error:
                if error.kind != OTHER_SNAPSHOT or snapshot == self._reader.snapshot(version):
                    raise

    async def _drained(self) -> None:
        """Returns when no request needs an older version, where servers hold one alone."""
        while self._one_version and not self.scheduler.drained:
            await self.scheduler.changed.wait()

    def _say_what_is_in_use(self, versions: dict[int, HeldVersion], newest: int) -> None:
        """Writes down which versions servers hold and for whom, for whoever removes old ones. Where that fails, all
        stay."""
        run = self.ready.run
        versions = self.opponents.kept(newest, versions)
        try:
            write_in_use(run.broadcasts, InUse(run_id=run.run_id, versions=versions, newest=newest))
        except OSError as error:
            log.warning("old policy versions stay: %s", error)

    # --- the trainer ---

    async def _published(self, version: int, *, earlier_s: float) -> tuple[PublishedPolicy, float]:
        """Waits until the trainer has published `version`. Returns it and the seconds waited, counted from when the
        trainer had the batch and had published the version before, at `earlier_s`. Raises DeadlineError."""
        ckpt, name, limit_s = self.settings.ckpt, "wait_timeout_s", self.settings.wait_timeout_s
        if version == self.first_version and ckpt.wait_for_weights_timeout is not None:
            name, limit_s = "ckpt.wait_for_weights_timeout", ckpt.wait_for_weights_timeout
        looked_s = -math.inf
        while (policy := self._reader.poll(version)) is None:
            if self._waited_s(version, earlier_s) > limit_s:
                raise DeadlineError(
                    f"waited {name} = {limit_s:g} s for the trainer to publish version {version}; see its log"
                )
            self._trainer.check()
            if self.sleep is None and time.monotonic() - looked_s > LOOK_S:
                await self._load_again(version - 1)
                looked_s = time.monotonic()
            await asyncio.sleep(POLL_S)
        return policy, self._waited_s(version, earlier_s)

    def _waited_s(self, version: int, earlier_s: float) -> float:
        """Returns the seconds since the batch of `version` left, or since `earlier_s` where that is later. The batch of
        an earlier process is there already."""
        now_s = time.monotonic()
        shipped_s = self.fates.shipped_at_s.get(version, earlier_s if version <= self.scheduler.shipped else now_s)
        return now_s - max(earlier_s, shipped_s)

    async def _load_again(self, newest: int) -> None:
        """Has servers load and prove the newest version again where a trainer that went back has published it with
        other bytes: at once or, where they sleep, when they are awake again."""
        known, published = self.sync.snapshots.get(newest), self._reader.snapshot(newest)
        if None in (known, published) or known == published:
            return
        log.warning("version %d was published again with other bytes; servers load it again", newest)
        with self.scheduler.block(LOADING):
            await self._drained()
            await self._proved(newest, noisy=newest in self.sync.noisy)


def trainer_metrics(policy: PublishedPolicy) -> Mapping[str, float]:
    """Returns the trainer's metrics of the step that gave this version. Raises CorruptError."""
    version = policy.manifest.version
    if METRICS_FILE not in policy.small_files:
        raise CorruptError(f"version {version} has no {METRICS_FILE}; have it published again")
    metrics = parse_json(policy.small_files[METRICS_FILE], METRICS_FILE)
    return {key: float(value) for key, value in metrics.items()}


def receipt_of(policy: PublishedPolicy) -> Receipt | None:
    """Returns the trainer's receipt of the step that gave this version, where it has one. Raises CorruptError."""
    data = policy.small_files.get(RECEIPT_FILE)
    return None if data is None else Receipt.from_json(data)

"""Takes policy versions from the trainer to the servers, one after the other."""

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from grpo.configs.orch import OrchSettings
from grpo.orchestrator.background import in_thread
from grpo.orchestrator.checks import check_spec
from grpo.orchestrator.inference.sleep import SleepScheduler
from grpo.orchestrator.inference.weight_sync import WeightSync
from grpo.orchestrator.ledger import Ledger
from grpo.orchestrator.loops.evaluate import Evaluating
from grpo.orchestrator.monitoring.recorder import Recorder
from grpo.orchestrator.monitoring.timeline import Timeline
from grpo.orchestrator.monitoring.traces import Traces
from grpo.orchestrator.scheduler import Scheduler
from grpo.transport.errors import CorruptError, DeadlineError
from grpo.transport.records import parse_json
from grpo.transport.run import RunFolder
from grpo.transport.status import PeerWatch
from grpo.transport.weights.store import METRICS_FILE, NOISE_FILE, InUse, PolicyReader, PublishedPolicy, write_in_use

log = logging.getLogger(__name__)

POLL_S = 0.02


@dataclass(kw_only=True)
class Versions:
    """Policy versions, from the trainer's folder to all servers."""

    settings: OrchSettings
    run_folder: RunFolder
    model_identity: str
    first_version: int
    """The version to begin with."""
    scheduler: Scheduler
    sync: WeightSync
    sleep: SleepScheduler | None
    """In sleep mode."""
    ledger: Ledger
    recorder: Recorder
    timeline: Timeline
    traces: Traces
    evaluating: Evaluating
    shipped_at_s: dict[int, float]
    """When batches left whose version is not there yet, on the monotonic clock."""
    _digest: bytes | None = field(default=None, init=False)
    """Of the newest version, as it was when servers were told to load it."""

    def __post_init__(self) -> None:
        run = self.run_folder
        self._reader = PolicyReader(run.broadcasts, run_id=run.run_id)
        self._trainer = PeerWatch(run.status / "train.json", name="grpo-train")
        self._one_version = self.settings.weight_broadcast.format != "adapter"

    async def run(self) -> None:
        """Consumes: versions that the trainer publishes. Waits for: the next one, and for every server to wake, where
        they sleep meanwhile, and to prove it. Unblocked by: trainer, servers. Ends when: the last step's version is
        live."""
        for step in self.recorder.unwritten(before=self.first_version):  # published while no orchestrator was there
            policy = self._reader.poll(step)
            self.recorder.written_late(step, {} if policy is None else trainer_metrics(policy))
        version, noticed_s, last = self.first_version, time.monotonic(), self.settings.max_steps
        while last is None or version <= last:
            policy, waited_s = await self._published(version, earlier_s=noticed_s)
            noticed_s = time.monotonic()
            self.scheduler.claim()
            await self._make_live(policy, version, waited_s)
            held = await self.sync.keep_only(self.scheduler.needed_versions())
            self.scheduler.unclaim()
            await in_thread(self._say_what_is_in_use, held, version)
            version += 1
        self.evaluating.no_more_versions()

    async def _make_live(self, policy: PublishedPolicy, version: int, waited_s: float) -> None:
        woken = {} if self.sleep is None else await self.sleep.wake()
        if version > self.first_version:
            await self._load_again(version - 1)
        if version == self.first_version:
            check_spec(self.settings, policy.manifest.spec, self.model_identity)
            await self.sync.adopt(version)
        if self._one_version:  # no request may need the version that servers are about to replace
            self.scheduler.hold()
            while not self.scheduler.drained:
                await self.scheduler.changed.wait()
        self._digest = self._reader.digest(version)
        proof = await self.sync.load(version, noisy=NOISE_FILE in policy.manifest.files)
        self.scheduler.version_live(version)
        if version > 0:
            self.ledger.trained(version)
            self.shipped_at_s.pop(version, None)
            metrics = trainer_metrics(policy)
            self.recorder.trained(version, {**metrics, **woken}, wait_trainer_s=waited_s)
            self.timeline.trained(version, metrics)
            self.traces.trained(version)
        self.recorder.live(proof)
        self.timeline.flush()
        self.evaluating.version_live(version)

    def _say_what_is_in_use(self, versions: frozenset[int], newest: int) -> None:
        """For whoever removes old versions. Where it cannot be written, they stay."""
        run = self.run_folder
        try:
            write_in_use(run.broadcasts, InUse(run_id=run.run_id, versions=versions, newest=newest))
        except OSError as error:
            log.warning("old policy versions stay: %s", error)

    # --- the trainer ---

    async def _published(self, version: int, *, earlier_s: float) -> tuple[PublishedPolicy, float]:
        """The version, once it is there, and for how many seconds the trainer was waited for. Its time runs from when
        it had the batch and had published the version before, at `earlier_s`: batches may be there in advance."""
        ckpt, name, limit_s = self.settings.ckpt, "wait_timeout_s", self.settings.wait_timeout_s
        if version == self.first_version and ckpt.wait_for_weights_timeout is not None:
            name, limit_s = "ckpt.wait_for_weights_timeout", ckpt.wait_for_weights_timeout
        while (policy := self._reader.poll(version)) is None:
            if self._waited_s(version, earlier_s) > limit_s:
                raise DeadlineError(
                    f"waited {name} = {limit_s:g} s for the trainer to publish version {version}; see its log"
                )
            self._trainer.check()
            if self.sleep is None:
                await self._load_again(version - 1)
            await asyncio.sleep(POLL_S)
        return policy, self._waited_s(version, earlier_s)

    def _waited_s(self, version: int, earlier_s: float) -> float:
        """Seconds since the batch of `version` left, or since `earlier_s` where that is later. A batch of an earlier
        process is there already."""
        now_s = time.monotonic()
        shipped_s = self.shipped_at_s.get(version, earlier_s if version <= self.scheduler.shipped else now_s)
        return now_s - max(earlier_s, shipped_s)

    async def _load_again(self, newest: int) -> None:
        """Has servers prove the newest version once more where a trainer that went back has published it with other
        bytes: at once or, where they sleep, when they are awake again."""
        digest = self._reader.digest(newest)
        if None in (digest, self._digest) or digest == self._digest:
            return
        log.warning("version %d was published again with other bytes; servers load it again", newest)
        self.scheduler.pause()
        try:
            while self._one_version and not self.scheduler.drained:
                await self.scheduler.changed.wait()
            self._digest = digest
            await self.sync.load(newest)
        finally:
            self.scheduler.unpause()


def trainer_metrics(policy: PublishedPolicy) -> Mapping[str, float]:
    """The trainer's metrics of the step that gave this version. Raises CorruptError."""
    version = policy.manifest.version
    if METRICS_FILE not in policy.small_files:
        raise CorruptError(f"version {version} has no {METRICS_FILE}; have it published again")
    metrics = parse_json(policy.small_files[METRICS_FILE], METRICS_FILE)
    return {key: float(value) for key, value in metrics.items()}

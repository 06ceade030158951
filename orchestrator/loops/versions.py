"""Takes policy versions from the trainer to the servers, one after the other."""

import asyncio
import logging
import time

from orchestrator.background import in_thread
from orchestrator.inference.weight_sync import trainer_metrics
from orchestrator.loops.evaluate import Evaluating
from orchestrator.loops.shared import Shared
from orchestrator.startup import check_spec
from transport.errors import DeadlineError, RunFolderError
from transport.status import PeerWatch
from transport.weights.store import NOISE_FILE, InUse, PolicyReader, PublishedPolicy, write_in_use

log = logging.getLogger(__name__)

POLL_S = 0.02


class Versions:
    """Policy versions, from the trainer's folder to all servers."""

    def __init__(self, shared: Shared, evaluating: Evaluating) -> None:
        self._shared, self._evaluating = shared, evaluating
        run = shared.ready.run
        self._reader = PolicyReader(run.broadcasts, run_id=run.run_id)
        self._trainer = PeerWatch(run.status / "train.json", name="grpo-train")
        self._one_version = shared.settings.weight_broadcast.format != "adapter"
        self._digest: bytes | None = None
        """Of the newest version, as it was when servers were told to load it."""

    async def run(self) -> None:
        """Consumes: versions that the trainer publishes. Waits for: the next one, and for every server to wake, where
        they sleep meanwhile, and to prove it. Unblocked by: trainer, servers. Ends when: the last step's version is
        live."""
        shared, max_steps = self._shared, self._shared.settings.max_steps
        first = version = shared.progress.first_version
        noticed_s = time.monotonic()
        self._catch_up(before=first)
        while max_steps is None or version <= max_steps:
            policy, waited_s = await self._published(version, earlier_s=noticed_s)
            noticed_s = time.monotonic()
            shared.num_wanting += 1
            woken = {} if shared.sleep is None else await shared.sleep.wake()
            if version == first:
                check_spec(shared.settings, policy.manifest.spec, shared.ready.model_identity)
                await shared.relay.adopt(version)
            if self._one_version:
                await self._drained()
            self._digest = self._reader.digest(version)
            proof = await shared.relay.load(version, noisy=NOISE_FILE in policy.manifest.files)
            if version == first:
                await self._load_teacher(version)
            shared.scheduler.version_live(version)
            if shared.auxiliary.frozen is not None:
                shared.auxiliary.frozen.version_live(version)
            if version > 0:
                shared.ledger.trained(version)
                shared.shipped_at_s.pop(version, None)
                metrics = {**trainer_metrics(policy), **woken}
                shared.recorder.trained(version, metrics, wait_trainer_s=waited_s)
                shared.timeline.trained(version, trainer_metrics(policy))
            shared.recorder.live(proof)
            shared.timeline.flush()
            self._evaluating.version_live(version)
            shared.changed.ring()
            held = await shared.relay.keep_only(shared.scheduler.needed_versions())
            shared.num_wanting -= 1
            shared.changed.ring()
            await in_thread(self._say_what_is_in_use, held, version)
            version += 1
        self._evaluating.no_more_versions()

    async def _load_teacher(self, first: int) -> None:
        """The earlier version that teaches when a run goes on. Raises RunFolderError where it is gone."""
        frozen = self._shared.auxiliary.frozen
        due = None if frozen is None else frozen.due(first)
        if due is None or due == first:
            return
        if (policy := self._reader.poll(due)) is None:
            raise RunFolderError(
                f"version {due} of the policy is to teach it by teacher_model.policy_every, and is no longer in "
                f"{self._shared.ready.run.broadcasts}; set weight_broadcast.keep_interval of the trainer to that, or "
                "resume from a step that it divides"
            )
        await self._shared.relay.load(due, noisy=NOISE_FILE in policy.manifest.files)

    def _catch_up(self, *, before: int) -> None:
        """Writes down the steps whose versions the trainer published while no orchestrator was there."""
        for step in self._shared.recorder.unwritten(before=before):
            policy = self._reader.poll(step)
            self._shared.recorder.written_late(step, {} if policy is None else trainer_metrics(policy))

    async def _drained(self) -> None:
        """Returns when no request needs the version that servers are about to replace; nothing starts meanwhile."""
        self._shared.scheduler.hold()
        while not self._shared.scheduler.drained:
            await self._shared.changed.wait()

    def _say_what_is_in_use(self, versions: frozenset[int], newest: int) -> None:
        """For whoever removes old versions. Where it cannot be written, they stay."""
        run = self._shared.ready.run
        try:
            write_in_use(run.broadcasts, InUse(run_id=run.run_id, versions=versions, newest=newest))
        except OSError as error:
            log.warning("old policy versions stay: %s", error)

    async def _published(self, version: int, *, earlier_s: float) -> tuple[PublishedPolicy, float]:
        """The version, once it is there, and for how many seconds the trainer was waited for. Its time runs from when
        it had the batch and had published the version before, at `earlier_s`: batches may be there in advance."""
        ckpt, name, limit_s = self._shared.settings.ckpt, "wait_timeout_s", self._shared.settings.wait_timeout_s
        if version == self._shared.progress.first_version and ckpt.wait_for_weights_timeout is not None:
            name, limit_s = "ckpt.wait_for_weights_timeout", ckpt.wait_for_weights_timeout
        while (policy := self._reader.poll(version)) is None:
            if self._shared.since_shipped_s(version, least_s=earlier_s) > limit_s:
                raise DeadlineError(
                    f"waited {name} = {limit_s:g} s for the trainer to publish version {version}; see its log"
                )
            self._trainer.check()
            await self._load_again(version - 1)
            await asyncio.sleep(POLL_S)
        return policy, self._shared.since_shipped_s(version, least_s=earlier_s)

    async def _load_again(self, newest: int) -> None:
        """Has servers prove the newest version once more where a trainer that went back has published it with other
        bytes. Where they sleep or hold one version, nobody can until the next one."""
        digest = self._reader.digest(newest)
        if None in (digest, self._digest) or digest == self._digest or self._one_version or self._shared.sleep:
            return
        self._digest = digest
        log.warning("version %d was published again with other bytes; servers load it again", newest)
        await self._shared.relay.load(newest)

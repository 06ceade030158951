"""Hands on what becomes of rollouts, batches and versions to all who keep it."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from grpo.orchestrator.background import in_thread
from grpo.orchestrator.doubles import Doubles
from grpo.orchestrator.evaluate import Evaluation
from grpo.orchestrator.inference.weight_sync import CanaryReport
from grpo.orchestrator.ledger import Game, Ledger
from grpo.orchestrator.monitoring.metrics import Figures
from grpo.orchestrator.monitoring.recorder import Recorder
from grpo.orchestrator.monitoring.timeline import Timeline
from grpo.orchestrator.monitoring.traces import Traces
from grpo.orchestrator.rollouts.records import EpisodeResult, Group
from grpo.orchestrator.samples import ScoredGroup
from grpo.orchestrator.witness import Expectation, differs, kept_gap, kept_of, sentence
from grpo.transport.receipts import KeptWitness, Receipt
from grpo.transport.witness import TOLERANCE

WRITE_INTERVAL_S = 0.02
"""Least time between two transactions of rollouts that begin: each costs as much as a rollout."""
_KEPT_BATCHES = 2
"""Batches whose samples are known after their version is there: strange samples may be theirs."""


class Fates:
    """Is told once of each event, and tells the ledger, the metrics, the timeline and the traces."""

    def __init__(
        self,
        ledger: Ledger,
        recorder: Recorder,
        timeline: Timeline,
        traces: Traces,
        doubles: Doubles | None = None,
    ) -> None:
        self.doubles = Doubles() if doubles is None else doubles
        self.ledger, self.recorder, self.timeline, self.traces = ledger, recorder, timeline, traces
        self.shipped_at_s: dict[int, float] = {}
        """When batches left whose version is not live yet, on the monotonic clock."""
        self._expected: dict[int, Expectation] = {}
        """What the gradients of the newest batches must show."""
        self._writing, self._written_s = asyncio.Lock(), 0.0
        self._num_issued = self._num_written = 0
        """Groups that were issued, and those of them that the ledger's database has."""

    # --- rollouts ---

    def issued(self, group: Group) -> None:
        """A group is about to be sampled."""
        self._num_issued += 1
        if (epoch := group.task.epoch) is not None:
            self.doubles.asked((group.task.env, group.task.index, epoch))
        self.ledger.issued(
            int(group.id),
            num=group.num,
            env=group.task.env,
            example=group.task.index,
            epoch=epoch,
            version=group.version,
            first=group.first,
        )

    async def written(self) -> None:
        """Returns when the ledger's database has every rollout that was issued until now. Groups that begin together,
        or within `WRITE_INTERVAL_S` of the transaction before, share one."""
        num_needed = self._num_issued
        async with self._writing:
            if self._num_written < num_needed:  # else another's transaction has had them meanwhile
                await asyncio.sleep(self._written_s + WRITE_INTERVAL_S - time.monotonic())
                num_covered = self._num_issued
                await in_thread(self.ledger.changes())
                self._num_written, self._written_s = num_covered, time.monotonic()

    def scored(self, result: EpisodeResult) -> None:
        """A rollout has its reward."""
        num_tokens = result.num_tokens
        self.doubles.scored(result)
        self.recorder.sampled(num_tokens)
        self.ledger.scored(result.id, reward=result.reward, num_tokens=num_tokens)
        self.ledger.played(games_of(result))

    def dropped(self, results: Iterable[EpisodeResult], reason: str) -> None:
        """Rollouts are not trained, and will be in no batch's trace of their own."""
        results = list(results)
        self.ledger.dropped([result.id for result in results], reason)
        self.traces.dropped(results, reason)

    def withheld(self, group: ScoredGroup) -> None:
        """Some rollouts of a group are not trained; the trace of the group's batch has them."""
        for rollout_id, reason in group.withheld.items():
            self.ledger.dropped([rollout_id], reason)

    # --- batches ---

    def shipping(
        self,
        step: int,
        groups: Sequence[ScoredGroup],
        *,
        metrics: Mapping[str, float],
        parts: Iterable[Figures],
        state: Mapping[str, Any],
        pools: Mapping[str, str],
        expected: Expectation,
    ) -> Callable[[], None]:
        """A batch is about to leave. `metrics`: its own. `parts`: what parts of the program have counted until now.
        `state` and `pools`: what a later process needs to go on after it, and which examples have become easy or hard.
        `expected`: what its gradients must show.
        The batch may leave once what is returned, a blocking call, has made this durable."""
        ledger, rollout_ids = (
            self.ledger,
            list(dict.fromkeys(sample.rollout_id for group in groups for sample in group.samples)),
        )
        generate_s = self.timeline.generated(step, ledger.span_s(rollout_ids), ledger.sampled_s())
        dropped = ledger.num_dropped
        metrics = self.recorder.shipped(step, metrics, parts=parts, dropped=dropped, generate_s=generate_s)
        self.recorder.batch(step, groups)
        self.traces.shipped(step, groups)
        ledger.examples_moved(pools, step)
        ledger.expects(step, expected.witness)
        self._expected[step] = expected
        return ledger.shipping(rollout_ids, step, state=state, metrics=metrics)

    # --- versions ---

    def received(self, receipt: Receipt) -> str | None:
        """Keeps the trainer's receipt of a step. Returns how the witness of its gradients differs from what the batch's
        samples give; None where it does not, or where there is nothing to compare. Raises CorruptError."""
        step, finding, fewer = receipt.step, None, None
        kept: KeptWitness | None = None
        batch = self._expected.get(step)
        if batch is not None and receipt.dropped:
            batch = batch.without(receipt.dropped)
            fewer = batch.witness
        expected = batch.witness if batch is not None else self.ledger.expected(step)
        if batch is None and receipt.dropped:
            expected = None
        found = receipt.witness
        if found is not None and expected is None and not receipt.dropped:
            before = self.ledger.kept(step)
            if before is not None and not kept_gap(before, found) <= TOLERANCE:
                finding = "it was trained before, and its witness was another one"
        elif found is not None and expected is not None and not differs(expected, found):
            kept = kept_of(expected, found)
        elif found is not None and expected is not None:
            finding = "its samples are not known any more, by which it could be told how"
            if batch is not None:
                others = [one for other in self._expected.values() for one in other.ids if other.ids != batch.ids]
                finding = sentence(batch.explain(found, others=others))
        self.ledger.received(receipt, finding=finding, expected=fewer, kept=kept)
        return finding

    def live(self, proof: CanaryReport, metrics: Mapping[str, float], *, wait_trainer_s: float) -> None:
        """All servers serve a version. `metrics`: the trainer's, of the step that gave it."""
        if (version := proof.version) > 0:
            for old in [old for old in self._expected if old <= version - _KEPT_BATCHES]:  # receipts or none
                del self._expected[old]
            self.shipped_at_s.pop(version, None)
            self.ledger.trained(version)
            self.recorder.trained(version, metrics, wait_trainer_s=wait_trainer_s)
            self.timeline.trained(version, metrics)
            self.traces.trained(version)
        self.recorder.live(proof)
        self.timeline.flush()

    def evaluated(self, evaluation: Evaluation) -> None:
        """A version has been evaluated."""
        self.recorder.evaluated(evaluation)
        self.traces.evaluated(evaluation.version, evaluation.results)


def games_of(result: EpisodeResult) -> Iterator[Game]:
    """Yields each game of a rollout and of those that it spawned: each of the policy's roles against each opponent. The
    one with the higher reward has won; an opponent without a reward has the opposite of the policy's."""
    root, group, number = result.id, *map(int, result.id.split("/"))
    for one in result.walk():
        for role in one.roles if one.players else ():
            for other in one.players.keys() - set(one.roles):
                gap = one.rewards[role] - one.rewards.get(other, -one.rewards[role])
                player, opponent = one.players[role], one.players[other]
                yield Game(
                    group_id=group,
                    number=number,
                    place=one.id.removeprefix(root),
                    env=one.task.env,
                    role=role,
                    player=player.name,
                    digest=player.digest,
                    other_role=other,
                    other=opponent.name,
                    other_digest=opponent.digest,
                    score=1.0 if gap > 0 else 0.0 if gap < 0 else 0.5,
                )

"""What the policy learns from besides rewards, as the loops see it: hints, a teacher's log-probabilities, preferences.

A channel whose weight in the trainer's loss is 0 is not there: it asks nobody and adds nothing to a batch.
"""

import logging
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from orchestrator.disagreement.asked import AskedForHints
from orchestrator.disagreement.channel import DisagreementChannel
from orchestrator.disagreement.records import KeptPairs
from orchestrator.episodes.records import EpisodeResult
from orchestrator.frozen import FrozenVersion
from orchestrator.hints.hinting import NO_HINTS, WITHHELD, HintedGroup, Hinter
from orchestrator.samples import FinishedGroup
from orchestrator.teachers.scoring import TeacherClient, teach
from transport.records import PreferencePair

log = logging.getLogger(__name__)

COMPLAIN_EVERY_S = 60.0


class Complaints:
    """Warnings in the log, each kind at most once in a while."""

    def __init__(self) -> None:
        self._next_s: dict[str, float] = {}
        self._num: Counter[str] = Counter()

    def add(self, kind: str, message: str) -> None:
        """Says it, with how often it happened since it was last said."""
        self._num[kind] += 1
        now_s = time.monotonic()
        if now_s >= self._next_s.get(kind, 0.0):
            self._next_s[kind] = now_s + COMPLAIN_EVERY_S
            log.warning("%s (%d times since this was last said)", message, self._num.pop(kind))


@dataclass(slots=True, kw_only=True)
class Channels:
    """Those that are on."""

    teacher: TeacherClient | None = None
    frozen: FrozenVersion | None = None
    """Of a teacher that is the policy itself."""
    hinter: Hinter | None = None
    hint_model: AskedForHints | None = None
    """Who writes hints for it."""
    disagreement: DisagreementChannel | None = None
    kept_pairs: KeptPairs | None = None
    """Of another run, instead of asking."""
    max_pairs: int = 64
    """In one batch."""
    num_being_taught: int = 0
    """Groups for which the teacher is asked."""
    _hints: Counter[str] = field(default_factory=Counter)
    """What became of errors since the metrics were last asked for; what ever occurred stays in the set."""
    _complaints: Complaints = field(default_factory=Complaints)

    # --- a group, before it waits for its batch ---

    async def hinted(self, results: Sequence[EpisodeResult]) -> HintedGroup:
        """Hints for what went wrong in a group. Waits for whoever writes them, who has a deadline."""
        if self.hinter is None:
            return NO_HINTS
        hinted = await self.hinter.of_group(results)
        for kind, message in hinted.problems.items():
            self._complaints.add(f"hints {kind}", message)
        return hinted

    async def taught(self, group: FinishedGroup) -> FinishedGroup:
        """The group with the teacher's log-probabilities; rollouts of which a sample has none are withheld. Waits for
        the teacher, who has a deadline."""
        if self.teacher is None or not group.samples:
            return group
        self.num_being_taught += 1
        try:
            with self.frozen.using() if self.frozen is not None else nullcontext():
                taught = await teach(group.samples, self.teacher)
        finally:
            self.num_being_taught -= 1
        for failure in taught.withheld.values():
            self._complaints.add(f"teacher {failure.reason}", failure.message)
        reasons = {rollout_id: f"teacher_{failure.reason}" for rollout_id, failure in taught.withheld.items()}
        return replace(group, samples=taught.samples, withheld={**group.withheld, **reasons})

    def offer(self, results: Sequence[EpisodeResult]) -> None:
        """Scored rollouts about which teachers may be asked, beside everything else."""
        if self.disagreement is not None:
            self.disagreement.offer(results)

    # --- a batch ---

    def count_hints(self, groups: Sequence[FinishedGroup]) -> None:
        """Of groups that leave with a batch, or of which nothing is left to be trained."""
        for group in groups:
            self._hints.update(_counts(group))

    def pairs(self, step: int) -> list[PreferencePair]:
        """Those that go with batch `step`."""
        if self.kept_pairs is not None:
            return list(self.kept_pairs.of_step(step))
        return [] if self.disagreement is None else self.disagreement.take(self.max_pairs, step)

    def metrics(self) -> dict[str, float]:
        """Of the channels that are on, since the last call."""
        metrics = {} if self.teacher is None else self.teacher.metrics()
        if self.hinter is not None:
            metrics |= {f"hints/{name}": float(num) for name, num in self._hints.items()}
            self._hints = Counter(dict.fromkeys(self._hints, 0))
        if self.hint_model is not None:
            metrics |= self.hint_model.metrics()
        if self.disagreement is not None:
            metrics |= self.disagreement.metrics()
            for kind, message in self.disagreement.problems().items():
                self._complaints.add(f"disagreement {kind}", f"teachers' preferences: {message}")
        return metrics

    def state(self) -> dict[str, Any]:
        """JSON, to be kept with a batch."""
        return {} if self.disagreement is None else self.disagreement.state()

    async def close(self) -> None:
        """Gives up what is not done."""
        for one in (self.disagreement, self.hint_model):
            if one is not None:
                await one.close()
        if self.teacher is not None:
            await self.teacher.close()


def _counts(group: FinishedGroup) -> Counter[str]:
    hinted, given = group.hinted, group.hints
    counts = Counter({"errors": hinted.num_errors, "given": len(given)})
    counts.update(f"given_{one.source}" for one in given)
    counts.update({f"declined_{reason}": num for reason, num in hinted.declined.items()})
    counts.update({f"left_out_{reason}": num for reason, num in hinted.left_out.items()})
    if withheld := len(hinted.given) - len(given):
        counts[f"left_out_{WITHHELD}"] = withheld
    return counts

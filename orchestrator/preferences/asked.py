"""From scored rollouts to preference pairs, beside the training.

turns worth asking about -> queue -> teachers -> agreement -> tokens and the reference's log-probabilities -> the
ledger and, for the next batch, `take`.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from configs.auxiliary import ApiSettings, PreferenceSettings
from orchestrator.ledger import Ledger
from orchestrator.preferences.agreement import Agreement, Skipped, Tools, preferred
from orchestrator.preferences.pairs import PairRecord, Reference, make_pair, pair_record
from orchestrator.preferences.teachers import Api, Costs, TeacherPool, judged
from orchestrator.preferences.turns import Turn, chosen_turns, turns_of
from orchestrator.rollouts.records import EpisodeResult, levels
from orchestrator.rollouts.templates import ChatTemplate
from transport.errors import CorruptError
from transport.records import PreferencePair

log = logging.getLogger(__name__)

MAX_READY = 4096
"""Pairs that wait for a batch."""
COSTS = "preference_costs"
"""The key of the state that is kept with a batch."""
_ALWAYS = ("made", "turns_seen", "turns_asked")
"""Counts that are told also where they are 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A pair that waits for a batch."""

    id: int
    """In the ledger."""
    version: int
    """The oldest that sampled any of what was rejected."""
    pair: PreferencePair


class ReadyPairs:
    """A batch takes the newest pairs; the others wait until they are too old. Without clock or I/O."""

    def __init__(self, waiting: Iterable[Ready] = (), *, max_lag: int | None, step: int = 0) -> None:
        """With batch `step` go pairs whose lag, step − 1 − version, is at most `max_lag`; None: any. `step`: the newest
        batch that has left."""
        self._waiting, self._max_lag, self._step = list(waiting), max_lag, step
        self.num: Counter[str] = Counter()
        """Pairs that no batch takes: `not_taken` for lack of room, `too_old`."""

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, one: Ready) -> None:
        """One more; where there is no room, the oldest goes."""
        self._waiting.append(one)
        if len(self._waiting) > MAX_READY:
            self._waiting.remove(min(self._waiting, key=lambda other: other.version))
            self.num["not_taken"] += 1

    def take(self, most: int, step: int) -> list[Ready]:
        """Up to `most` pairs for batch `step`, those of the newest versions; each is given once."""
        self._step = step
        fresh = [one for one in self._waiting if not self._is_old(one.version, step)]
        self.num["too_old"] += len(self._waiting) - len(fresh)
        fresh.sort(key=lambda one: one.version)
        num_left = max(0, len(fresh) - most)
        self._waiting = fresh[:num_left]
        return fresh[num_left:]

    def comes_too_late(self, version: int) -> bool:
        """Whether what `version` sampled would be too old for the next batch already."""
        return self._is_old(version, self._step + 1)

    def _is_old(self, version: int, step: int) -> bool:
        return self._max_lag is not None and step - 1 - version > self._max_lag


class AskedPairs:
    """Takes scored groups, gives pairs. `offer`, `take` and `metrics` never wait and raise nothing that teachers or
    servers do."""

    def __init__(
        self,
        settings: PreferenceSettings,
        ledger: Ledger,
        reference: Reference,
        template_of: Callable[[Tools], ChatTemplate],
        open_api: Callable[[ApiSettings, Costs], Api],
        *,
        base_model: str,
        sequence_len: int,
        seed: int,
        step: int = 0,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """`base_model`: its identity, for the records. `step`: the batch after which the run goes on, and `state` what
        was kept with the newest one. Raises ValueError where a teacher's key is missing."""
        kept = (state or {}).get(COSTS) or {}
        self._settings, self._ledger, self._reference, self._seed = settings, ledger, reference, seed
        self._template_of, self._base_model, self._sequence_len = template_of, base_model, sequence_len
        self._costs = Costs(ceiling=settings.max_cost, spent=kept.get("spent"))
        self._pool = TeacherPool([open_api(one, self._costs) for one in settings.teachers])
        self._judge = None if settings.judge is None else open_api(settings.judge, self._costs)
        self._agreement = Agreement(
            name=settings.agreement, judge=None if self._judge is None else partial(judged, self._judge)
        )
        self._ready = ReadyPairs(_waiting(ledger), max_lag=settings.max_off_policy_steps, step=step)
        self._queue: deque[Turn] = deque()
        """Turns that wait, the newest last, which are the next: answers about what an old policy did are worth less."""
        self._asking: set[asyncio.Task[None]] = set()
        self._num_rollouts: int = kept.get("num_rollouts", 0)
        """Rollouts about which anything was to be asked."""
        self._num: Counter[str] = Counter()
        self._told: Counter[str] = Counter()
        self._problems: dict[str, str] = {}

    def offer(self, group: Sequence[EpisodeResult]) -> None:
        """The scored rollouts of one example, of which some turns may be worth asking about."""
        try:
            for level in levels(group):
                self._offer(level)
        except (TypeError, ValueError, RecursionError) as error:  # messages that are no JSON
            self._problem("broken", f"{type(error).__name__}: {error}")
        self._start()
        while len(self._queue) > self._settings.max_waiting:
            self._queue.popleft()
            self._num["turns_queue_full"] += 1

    def _offer(self, level: Sequence[EpisodeResult]) -> None:
        turns = [turns_of(result) for result in level]
        chosen = chosen_turns(level, turns, self._settings, seed=self._seed)
        self._num["turns_seen"] += sum(map(len, turns))
        self._num_rollouts += len({turn.rollout.id for turn in chosen})
        self._queue.extend(chosen)

    def take(self, step: int) -> list[PreferencePair]:
        """The pairs for batch `step`, of the newest versions; each is given once."""
        taken = self._ready.take(self._settings.max_pairs, step)
        self._ledger.pairs_taken([one.id for one in taken], step)
        return [one.pair for one in taken]

    @property
    def num_turns_waiting(self) -> int:
        """Turns that wait, or are asked about."""
        return len(self._queue) + len(self._asking)

    def state(self) -> dict[str, Any]:
        """JSON, to be kept with a batch."""
        return {COSTS: {"spent": dict(self._costs.spent), "num_rollouts": self._num_rollouts}}

    def metrics(self) -> dict[str, float]:
        """Counts since the last call as `pairs/NAME`, told in docs/auxiliary_losses.md; what ever occurred stays in the
        set."""
        now = Counter(dict.fromkeys(_ALWAYS, 0))
        for counts in (self._num, self._ready.num, self._pool.metrics()):
            now.update(counts)
        if self._judge is not None:
            now.update({f"judge_{what}": num for what, num in self._judge.num.items()})
            now["judge_requests"] = self._judge.num_requests
        told, self._told = self._told, now
        return {f"pairs/{name}": float(num - told[name]) for name, num in now.items()} | {
            "pairs/ready": float(len(self._ready)),
            "pairs/turns_waiting": float(self.num_turns_waiting),
            "pairs/cost": self._costs.total,
            "pairs/cost_per_rollout": self._costs.total / max(1, self._num_rollouts),
        }

    def problems(self) -> dict[str, str]:
        """For people: the newest message of each kind since the last call."""
        problems, self._problems = self._problems, {}
        return problems

    async def close(self) -> None:
        """What is not done is given up, whoever is asked."""
        self._queue.clear()
        for task in self._asking:
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)
        await self._pool.close()
        if self._judge is not None:
            await self._judge.close()

    # --- one turn ---

    def _start(self) -> None:
        while self._queue and len(self._asking) < self._settings.max_concurrent:
            task = asyncio.create_task(self._look(self._queue.pop()))
            self._asking.add(task)
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._asking.discard(task)
        if task.cancelled():
            return
        if (error := task.exception()) is not None:  # nothing that is done beside the training may end it
            self._problem("broken", f"{type(error).__name__}: {error}")
        self._start()

    async def _look(self, turn: Turn) -> None:
        if self._ready.comes_too_late(turn.version):
            self._num["turns_too_old"] += 1
            return
        self._num["turns_asked"] += 1
        answers, failed = await self._pool.ask(turn.messages, turn.tools)
        for error in failed.values():
            self._problems[f"questions_{error.reason}"] = f"a teacher did not answer: {error}"
        verdict = await preferred(
            answers, turn.action, self._agreement, turn.tools, at_least=self._settings.num_agreeing
        )
        made = (
            verdict
            if isinstance(verdict, Skipped)
            else await make_pair(
                verdict,
                turn,
                self._template_of(turn.tools),
                self._reference,
                sequence_len=self._sequence_len,
                base_model=self._base_model,
            )
        )
        if isinstance(made, Skipped):
            self._problem(f"skipped_{made.reason}", made.message)
        else:
            self._keep(made)

    def _keep(self, record: PairRecord) -> None:
        self._num["made"] += 1
        number = self._ledger.pair_made(record.version, msgspec.json.encode(record).decode())
        self._ready.add(Ready(id=number, version=record.version, pair=record.pair))

    def _problem(self, what: str, message: str) -> None:
        self._num[what] += 1
        if message:
            self._problems[what] = message


def _waiting(ledger: Ledger) -> list[Ready]:
    """The pairs that no batch has taken, of an earlier process."""
    waiting = []
    for number, data in ledger.pairs_waiting(MAX_READY):
        try:
            record = pair_record(data)
            waiting.append(Ready(id=number, version=record.version, pair=record.pair))
        except CorruptError as error:
            log.warning("a pair that no batch has taken is left out: %s", error)
    return waiting

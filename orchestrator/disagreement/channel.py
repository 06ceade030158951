"""From scored rollouts to preference pairs, beside the training.

turns worth asking about -> queue -> teachers -> verdict -> tokens -> the reference's log-probabilities -> `pairs.jsonl`
and, for the next batch, `take`.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.background import in_thread
from orchestrator.disagreement.actions import AgreementOf, Writer, write_tagged
from orchestrator.disagreement.asking import Answers, Asker, BoundedQueue
from orchestrator.disagreement.budget import Budget
from orchestrator.disagreement.cache import state_key
from orchestrator.disagreement.choosing import Chooser, TraceFacts, TurnFacts
from orchestrator.disagreement.pairs import ReferenceScorer, pair_tokens, referenced
from orchestrator.disagreement.ready import Ready, ReadyPairs
from orchestrator.disagreement.records import PairRecord, PairsFile, tokens_of
from orchestrator.disagreement.teachers import NotAnswered
from orchestrator.disagreement.turns import Tools, TraceTurn, turns_of
from orchestrator.disagreement.verdicts import Preference, Skipped, score
from orchestrator.episodes.records import EpisodeResult, levels
from orchestrator.episodes.templates import ChatTemplate
from transport.records import PreferencePair

_ALWAYS = ("made", "turns_seen", "turns_asked", "questions_asked", "questions_answered", "questions_cached", "requests")
"""Counts that are told also where they are 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trace:
    result: EpisodeResult
    turns: list[TraceTurn]


class DisagreementChannel:
    """Takes scored groups, gives pairs. `offer`, `take` and `metrics` never wait and raise nothing that teachers,
    servers or disks do."""

    def __init__(
        self,
        asker: Asker,
        chooser: Chooser,
        agreement: AgreementOf,
        reference: ReferenceScorer,
        template_of: Callable[[Tools], ChatTemplate],
        *,
        budget: Budget,
        ready: ReadyPairs,
        base_model: str,
        sequence_len: int,
        path: Path | None,
        at_least: int = 2,
        max_waiting: int = 1024,
        num_parallel: int = 16,
        write: Writer = write_tagged,
        judge: Asker | None = None,
    ) -> None:
        """`ready` takes the pairs; `base_model`: its identity, for their records; `path` of `pairs.jsonl`, None for no
        file; `at_least` so many teachers must agree; `max_waiting` turns wait to be asked about, `num_parallel` are
        asked about at a time; `judge` is whom the agreement asks, if anybody. Raises ValueError where fewer teachers
        are there than must agree."""
        if not 1 <= at_least <= len(asker.names):
            raise ValueError(
                f"at_least is {at_least} with {len(asker.names)} teachers, of whom no more can agree; lower "
                "it, or name more teachers"
            )
        self._asker, self._chooser, self._agreement, self._reference = asker, chooser, agreement, reference
        self._template_of, self._sequence_len, self._base_model = template_of, sequence_len, base_model
        self._judge = judge
        self.budget = budget
        """Its state is to be kept with the run."""
        self._at_least, self._write = at_least, write
        self._queue = BoundedQueue(max_waiting=max_waiting, num_parallel=num_parallel)
        self._file = None if path is None else PairsFile(path)
        self._writing = asyncio.Lock()
        self._ready = ready
        self._open: Counter[str] = Counter()
        """Turns by rollout that wait or are asked about."""
        self._num: Counter[str] = Counter()
        self._told: Counter[str] = Counter()
        self._problems: dict[str, str] = {}

    def offer(self, group: Sequence[EpisodeResult]) -> int:
        """The scored rollouts of one example. Returns how many turns are worth asking about."""
        try:
            return sum(
                self._offer([_Trace(result=result, turns=turns_of(result)) for result in level])
                for level in levels(group)
            )
        except (TypeError, ValueError, RecursionError) as error:  # messages that are no JSON
            self._problem("not_read", f"{type(error).__name__}: {error}")
            return 0

    def take(self, most: int, step: int) -> list[PreferencePair]:
        """Up to `most` pairs for batch `step`, of the newest versions; each is given once."""
        return self._ready.take(most, step)

    @property
    def num_turns_waiting(self) -> int:
        """Turns that wait, or are asked about."""
        return len(self._queue)

    def state(self) -> dict[str, Any]:
        """JSON, to be kept with a batch: what was spent, and the pairs that are left."""
        return {"teachers_budget": self.budget.state(), "pairs": self._ready.state()}

    def metrics(self) -> dict[str, float]:
        """Counts since the last call, all as `pairs/NAME`; what ever occurred stays in the set.

        - `made`: pairs; `too_old`, `not_taken`: those that nobody took in time, or for which there was no room;
          `not_written`: those that the file lacks.
        - `turns_seen`, `turns_asked` about; `skipped_REASON`: asked about, and no pair; `broken`: the same by a fault
          of this program; `turns_queue_full`, `turns_too_old`, `turns_given_up`: not asked about for lack of room,
          because their pairs would be too old, at the end; `not_read`: groups that are no JSON.
        - `questions_asked`, `questions_answered`, `questions_cached`: known before, or asked for already;
          `questions_REASON`: not answered, by `teachers.Reason`; `requests`: with those that were tried again. All but
          the last also by teacher, as `questions_REASON/TEACHER`. With a judge the same as `judge_asked` and so on.
        - As things stand: `ready`, pairs that wait to be taken; `turns_waiting`; `teachers_resting`; and of the whole
          run `cost`, and `cost_per_rollout` that was asked about.
        """
        now = Counter(dict.fromkeys(_ALWAYS, 0))
        now.update(self._num)
        now.update(self._ready.num)
        now.update({f"turns_{key}": num for key, num in self._queue.num.items()})
        now.update({f"questions_{key}": num for key, num in self._asker.num.items()})
        now["requests"] = self._asker.num_requests
        if self._judge is not None:
            now.update({f"judge_{key}": num for key, num in self._judge.num.items() if "/" not in key})
            now["judge_requests"] = self._judge.num_requests
        counts = {f"pairs/{key}": float(num - self._told[key]) for key, num in now.items()}
        self._told = now
        return counts | {
            "pairs/ready": float(len(self._ready)),
            "pairs/turns_waiting": float(self.num_turns_waiting),
            "pairs/teachers_resting": float(self._asker.num_resting),
            "pairs/cost": self.budget.total,
            "pairs/cost_per_rollout": self.budget.cost_per_trace,
        }

    def problems(self) -> dict[str, str]:
        """For people: the newest message of each kind since the last call."""
        problems, self._problems = self._problems, {}
        return problems

    async def close(self) -> None:
        """What is not done is given up, whoever is asked."""
        await self._queue.close()
        await self._asker.close()
        if self._judge is not None:
            await self._judge.close()

    # --- one turn ---

    def _offer(self, traces: Sequence[_Trace]) -> int:
        facts = [
            TraceFacts(
                id=trace.result.id,
                reward=trace.result.reward,
                turns=[
                    TurnFacts(state=self._state(turn), did=turn.action.text, failed=turn.error is not None)
                    for turn in trace.turns
                ],
            )
            for trace in traces
        ]
        self._num["turns_seen"] += sum(len(trace.turns) for trace in traces)
        chosen = self._chooser.choose(facts)
        self._open.update(traces[i].result.id for i, _ in chosen)
        for i, j in chosen:
            self._enqueue(traces[i].result, traces[i].turns[j])
        return len(chosen)

    def _state(self, turn: TraceTurn) -> str:
        """A conversation's keys take time that grows with the square of its length."""
        return state_key(turn.messages, turn.tools) if self._chooser.reads_states else ""

    def _enqueue(self, result: EpisodeResult, turn: TraceTurn) -> None:
        trace = result.id

        def done() -> None:
            self._open[trace] -= 1
            if self._open[trace] <= 0:
                del self._open[trace]
                self.budget.close_trace(trace)

        async def work() -> None:
            try:
                await self._look(result, turn)
            except Exception as error:  # a template that takes no such messages, for example
                self._problem("broken", f"{type(error).__name__}: {error}")
            finally:
                done()

        self._queue.offer(work, left_out=done)

    async def _look(self, result: EpisodeResult, turn: TraceTurn) -> None:
        trace, tools, version = result.id, turn.tools, min(version for version, _ in turn.versions)
        if self._ready.comes_too_late(version):
            self._num["turns_too_old"] += 1
            return
        self._num["turns_asked"] += 1
        answers = await self._asker.ask(turn.messages, tools, trace=trace)
        self._complain(answers)
        verdict = await score(answers.actions, turn.action, self._agreement(tools, trace), at_least=self._at_least)
        pair = await self._pair(verdict, turn) if isinstance(verdict, Preference) else verdict
        if isinstance(pair, Skipped):
            told = f"a preference is not trained: {pair.reason}: {pair.message}" if pair.message else ""
            self._problem(f"skipped_{pair.reason}", told)
            return
        assert isinstance(verdict, Preference)
        line = await self._keep(
            PairRecord(
                messages=[dict(message) for message in turn.messages],
                chosen=self._write(verdict.chosen),
                rejected=turn.action.text,
                source=verdict.source,
                cost=answers.cost,
                versions=[list(run) for run in turn.versions],
                rollout_id=trace,
                step=turn.step,
                env=result.task.env,
                tools=None if tools is None else [dict(tool) for tool in tools],
                base_model=self._base_model,
                tokens=tokens_of(pair),
            )
        )
        self._num["made"] += 1
        self._ready.add(Ready(pair=pair, version=version, line=line))

    async def _pair(self, verdict: Preference, turn: TraceTurn) -> PreferencePair | Skipped:
        template = self._template_of(turn.tools)
        tokens = pair_tokens(verdict, turn, template, sequence_len=self._sequence_len, write=self._write)
        if isinstance(tokens, Skipped):
            return tokens
        return await referenced(tokens, self._reference, source=verdict.source, adapter=turn.adapter)

    async def _keep(self, record: PairRecord) -> int | None:
        """Its place in the file."""
        if self._file is None:
            return None
        try:
            async with self._writing:
                return await in_thread(self._file.append, record)
        except (OSError, ValueError) as error:
            self._problem("not_written", f"{type(error).__name__}: {error}")
            return None

    def _complain(self, answers: Answers) -> None:
        for name, answer in answers.by_teacher.items():
            if isinstance(answer, NotAnswered):
                self._problems[f"questions_{answer.reason}"] = f"teacher {name} did not answer: {answer.message}"

    def _problem(self, what: str, message: str) -> None:
        self._num[what] += 1
        if message:
            self._problems[what] = message

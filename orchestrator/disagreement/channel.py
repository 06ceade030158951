"""From scored rollouts to preference pairs, beside the training.

turns worth asking about -> queue -> teachers -> verdict -> tokens -> the reference's log-probabilities -> `pairs.jsonl`
and, for the next batch, `take`.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.background import in_thread
from orchestrator.disagreement.actions import AgreementOf, Writer, write_tagged
from orchestrator.disagreement.asking import Asker, BoundedQueue
from orchestrator.disagreement.budget import Budget
from orchestrator.disagreement.cache import state_key
from orchestrator.disagreement.choosing import Chooser, TraceFacts, TurnFacts
from orchestrator.disagreement.pairs import ReferenceScorer, pair_tokens, referenced
from orchestrator.disagreement.records import PairRecord, PairsFile, tokens_of
from orchestrator.disagreement.turns import TraceTurn, turns_of
from orchestrator.disagreement.verdicts import Preference, Skipped, score
from orchestrator.episodes.templates import ChatTemplate
from orchestrator.episodes.tree import GenerateResult, levels
from transport.types import PreferencePair

Tools = Sequence[Mapping[str, Any]] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trace:
    result: GenerateResult
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
        sequence_len: int,
        path: Path | None,
        at_least: int = 2,
        max_waiting: int = 1024,
        num_parallel: int = 16,
        max_ready: int = 4096,
        write: Writer = write_tagged,
    ) -> None:
        """`path` of `pairs.jsonl`, None for no file; `at_least` so many teachers must agree; `max_waiting` turns wait
        to be asked about, `num_parallel` are asked about at a time; of pairs that nobody takes, the newest `max_ready`
        are kept. Raises ValueError where fewer teachers are there than must agree."""
        if not 1 <= at_least <= len(asker.names):
            raise ValueError(
                f"at_least is {at_least} with {len(asker.names)} teachers, of whom no more can agree; lower "
                "it, or name more teachers"
            )
        self._asker, self._chooser, self._agreement, self._reference = asker, chooser, agreement, reference
        self._template_of, self._sequence_len = template_of, sequence_len
        self.budget = budget
        """Its state is to be kept with the run."""
        self._at_least, self._write = at_least, write
        self._queue = BoundedQueue(max_waiting=max_waiting, num_parallel=num_parallel)
        self._file = None if path is None else PairsFile(path)
        self._writing = asyncio.Lock()
        self._ready: deque[PreferencePair] = deque()
        self._max_ready = max_ready
        self._open: Counter[str] = Counter()
        """Turns by rollout that wait or are asked about."""
        self.num: Counter[str] = Counter()
        """`pairs`; turns that were seen (`pairs_turns_seen`), are asked about (`pairs_turns_asked`), came to no pair
        (`pairs_skipped_` with the reason, `pairs_broken` for a fault of this program); rollouts that could not be read
        (`pairs_not_read`); pairs that nobody took in time (`pairs_not_taken`) or the file lacks
        (`pairs_not_written`)."""
        self._told: Counter[str] = Counter()
        self.newest_problem = ""
        """For people: the newest of what went wrong."""

    def offer(self, group: Sequence[GenerateResult], *, tools: Tools = None) -> int:
        """The scored rollouts of one example; `tools` are what could be called in them. Returns how many turns will be
        asked about."""
        try:
            return sum(
                self._offer([_Trace(result=result, turns=turns_of(result.rollout)) for result in level], tools)
                for level in levels(group)
            )
        except (TypeError, ValueError, RecursionError) as error:  # messages that are no JSON
            self._problem("pairs_not_read", f"{type(error).__name__}: {error}")
            return 0

    def take(self, most: int) -> list[PreferencePair]:
        """Up to `most` pairs, the oldest first; each is given once."""
        return [self._ready.popleft() for _ in range(min(most, len(self._ready)))]

    def metrics(self) -> dict[str, float]:
        """Counts since the last call, by reason, and how things stand; reasons that ever occurred stay in the set."""
        asked = {f"teacher_{key}": num for key, num in self._asker.num.items()}
        queue = {f"teacher_turns_{key}": num for key, num in self._queue.num.items()}
        now = Counter(dict(self.num) | asked | queue)
        now["teacher_requests"] = self._asker.num_requests
        counts = {f"rollout/{key}": float(num - self._told[key]) for key, num in now.items()}
        self._told = now
        return counts | {
            "rollout/pairs_ready": float(len(self._ready)),
            "rollout/teacher_turns_waiting": float(len(self._queue)),
            "rollout/teacher_resting": float(self._asker.num_resting),
            "rollout/teacher_cost": self.budget.total,
            "rollout/teacher_cost_per_trace": self.budget.cost_per_trace,
        }

    async def drain(self, timeout_s: float) -> bool:
        """Returns when nothing is left to be asked, or after `timeout_s`: whether nothing is left."""
        return await self._queue.drain(timeout_s)

    async def close(self) -> None:
        """What is not done is given up; the asker stays open."""
        await self._queue.close()

    # --- one turn ---

    def _offer(self, traces: Sequence[_Trace], tools: Tools) -> int:
        facts = [
            TraceFacts(
                id=trace.result.rollout.id,
                reward=trace.result.reward,
                turns=[
                    TurnFacts(
                        state=state_key(turn.messages, tools), did=turn.action.text, failed=turn.error is not None
                    )
                    for turn in trace.turns
                ],
            )
            for trace in traces
        ]
        self.num["pairs_turns_seen"] += sum(len(trace.turns) for trace in traces)
        num = 0
        for i, j in self._chooser.choose(facts):
            num += self._enqueue(traces[i].result, traces[i].turns[j], tools)
        self.num["pairs_turns_asked"] += num
        return num

    def _enqueue(self, result: GenerateResult, turn: TraceTurn, tools: Tools) -> bool:
        trace = result.rollout.id

        async def work() -> None:
            try:
                await self._look(result, turn, tools)
            except Exception as error:  # a template that takes no such messages, for example
                self._problem("pairs_broken", f"{type(error).__name__}: {error}")
            finally:
                self._open[trace] -= 1
                if self._open[trace] <= 0:
                    del self._open[trace]
                    self.budget.close_trace(trace)

        taken = self._queue.offer(work)
        if taken:
            self._open[trace] += 1
        return taken

    async def _look(self, result: GenerateResult, turn: TraceTurn, tools: Tools) -> None:
        trace = result.rollout.id
        answers = await self._asker.ask(turn.messages, tools, trace=trace)
        verdict = await score(answers.actions, turn.action, self._agreement(tools), at_least=self._at_least)
        pair = await self._pair(verdict, turn, tools) if isinstance(verdict, Preference) else verdict
        if isinstance(pair, Skipped):
            self._problem(f"pairs_skipped_{pair.reason}", pair.message)
            return
        assert isinstance(verdict, Preference)
        await self._keep(
            PairRecord(
                messages=[dict(message) for message in turn.messages],
                chosen=self._write(verdict.chosen),
                rejected=turn.action.text,
                source=verdict.source,
                cost=answers.cost,
                versions=[list(run) for run in turn.versions],
                rollout_id=trace,
                step=turn.step,
                env=result.rollout.task.env,
                tools=None if tools is None else [dict(tool) for tool in tools],
                tokens=tokens_of(pair),
            )
        )
        self.num["pairs"] += 1
        self._ready.append(pair)
        while len(self._ready) > self._max_ready:
            self._ready.popleft()
            self.num["pairs_not_taken"] += 1

    async def _pair(self, verdict: Preference, turn: TraceTurn, tools: Tools) -> PreferencePair | Skipped:
        template = self._template_of(tools)
        tokens = pair_tokens(verdict, turn, template, sequence_len=self._sequence_len, write=self._write)
        if isinstance(tokens, Skipped):
            return tokens
        return await referenced(tokens, self._reference, source=verdict.source)

    async def _keep(self, record: PairRecord) -> None:
        if self._file is None:
            return
        try:
            async with self._writing:
                await in_thread(self._file.append, record)
        except (OSError, ValueError) as error:
            self._problem("pairs_not_written", f"{type(error).__name__}: {error}")

    def _problem(self, what: str, message: str) -> None:
        self.num[what] += 1
        if message:
            self.newest_problem = message

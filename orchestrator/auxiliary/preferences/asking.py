"""Asks teachers about scored rollouts, beside the training, and makes preference pairs of what they agree on.

turns worth asking about -> queue -> teachers -> agreement -> tokens and the reference's log-probabilities -> the
ledger and the next batch
"""

import asyncio
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from grpo.configs.auxiliary import ApiSettings, PreferenceSettings
from grpo.orchestrator.auxiliary import is_trained
from grpo.orchestrator.auxiliary.preferences.agreement import Action, Skipped, Tools, consensus, preferred, words
from grpo.orchestrator.auxiliary.preferences.pairs import (
    PairRecord,
    PairsOfRun,
    Reference,
    make_pair,
    pair_record,
    pairs_of_run,
)
from grpo.orchestrator.auxiliary.preferences.turns import PolicyTurn, chosen_turns, state_key
from grpo.orchestrator.endpoints import ApiModel, Costs, EndpointError
from grpo.orchestrator.hooks import Hook, Opening
from grpo.orchestrator.ledger import Ledger
from grpo.orchestrator.monitoring.metrics import Figures
from grpo.orchestrator.rollouts.records import EpisodeResult, levels
from grpo.orchestrator.rollouts.templates import ChatTemplate, Templates
from grpo.orchestrator.samples import ScoredGroup
from grpo.transport.records import PreferencePair

MAX_READY = 4096
"""Pairs that wait for a batch."""
MAX_ASKING = 16
"""Turns that are asked about at a time."""
MAX_KNOWN = 4096
"""Answers that are kept, those that were used last: rollouts of a group are often in the same state."""
QUESTION = """\
Two answers to the same request follow. Would both have the same effect: do they say the same, or call the same tools \
with the same arguments, whatever their wording?

<answer number="1">
{one}
</answer>

<answer number="2">
{other}
</answer>

Reply with one word: yes or no."""
_ALWAYS = ("made", "turns_seen", "turns_asked", "questions_asked", "questions_answered", "questions_cached", "requests")
"""Counts that are reported even where they are 0."""


class Preferences(Hook):
    """Takes scored groups, gives pairs. Nothing that teachers or servers do holds up training, or ends it."""

    def __init__(
        self,
        settings: PreferenceSettings,
        ledger: Ledger,
        reference: Reference,
        template_of: Callable[[Tools], ChatTemplate],
        open_api: Callable[[ApiSettings, Costs], ApiModel],
        *,
        base_model: str,
        sequence_len: int,
        is_trained: Callable[[], bool] = lambda: True,
        step: int = 0,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """`base_model`: its identity, for the records. `is_trained`: whether pairs go with the next batch. `step`: the
        batch after which the run goes on, and `state` what was kept with the newest one. Raises ValueError where a
        teacher's key is missing."""
        kept = state or {}
        self._settings, self._ledger, self._reference, self._step = settings, ledger, reference, step
        self._template_of, self._base_model, self._sequence_len = template_of, base_model, sequence_len
        self._is_trained = is_trained
        ceiling = math.inf if settings.max_cost is None else settings.max_cost
        self._costs = Costs(ceiling=ceiling, spent=kept.get("spent", 0.0))
        self._teachers = [open_api(one, self._costs) for one in settings.teachers]
        self._judge = None if settings.judge is None else open_api(settings.judge, self._costs)
        self._answers = OrderedDict[tuple[str, str], asyncio.Task[Action]]()
        """Answers, there already or under way, by teacher and state."""
        self._ready = [(number, pair_record(data)) for number, data in ledger.pairs_waiting(MAX_READY)]
        """Pairs that wait for a batch, with their numbers in the ledger."""
        self._queue: deque[PolicyTurn] = deque()
        """Turns that wait, the newest last, which are the next: answers about what an old policy did are worth less."""
        self._asking: set[asyncio.Task[None]] = set()
        self._num_rollouts: int = kept.get("num_rollouts", 0)
        """Rollouts about which anything was to be asked."""
        self._num = Counter(dict.fromkeys(_ALWAYS, 0))
        self._num_advantages = 0

    async def before_credit(self, group: ScoredGroup) -> None:
        """Queues the turns that are worth asking about; where teachers' answers are an advantage, it waits for them."""
        if self._settings.advantage_weight:
            await self._add_advantages(group)
        if self._is_trained() and group.trained:
            self.offer(group.results)

    async def _add_advantages(self, group: ScoredGroup) -> None:
        """advantage of a token  +=  advantage_weight · consensus of the teachers about its turn"""
        turns = [turn for level in levels(group.trained) for turn in chosen_turns(level, self._settings.select)]
        answers = await asyncio.gather(*(self.answers(turn.messages, turn.tools) for turn in turns))
        for turn, by_teacher in zip(turns, answers, strict=True):
            actions = {name: action for name, action in by_teacher.items() if action is not None}
            if not actions:
                continue
            value = consensus(actions, turn.action)
            added = np.full(len(turn.sampled_ids), self._settings.advantage_weight * value, np.float32)
            written = {name: action.written() for name, action in actions.items()}
            group.add_evidence((turn.rollout.id, turn.step), added, consensus=value, teachers=written)
            self._num_advantages += 1

    def offer(self, group: Sequence[EpisodeResult]) -> None:
        """Queues turns of one example's scored rollouts. The oldest of those that wait make room."""
        for level in levels(group):
            chosen = chosen_turns(level, self._settings.select)
            self._num["turns_seen"] += sum(len(result.steps) for result in level)
            self._num_rollouts += len({turn.rollout.id for turn in chosen})
            self._queue.extend(chosen)
        self._start()
        while len(self._queue) > self._settings.max_waiting:
            self._queue.popleft()
            self._num["turns_queue_full"] += 1

    def before_batch(self, step: int) -> list[PreferencePair]:
        """Returns the pairs for batch `step`, of the newest versions; each is given once."""
        self._step = step
        fresh = [one for one in self._ready if not self._is_old(one[1].version, step)]
        self._num["too_old"] += len(self._ready) - len(fresh)
        fresh.sort(key=lambda one: one[1].version)
        num_left = max(0, len(fresh) - self._settings.max_pairs)
        self._ready, taken = fresh[:num_left], fresh[num_left:]
        self._ledger.pairs_taken([number for number, _ in taken], step)
        return [record.pair for _, record in taken]

    def _is_old(self, version: int, step: int) -> bool:
        """Returns whether the lag of `version` in batch `step`, step − 1 − version, is too large."""
        max_lag = self._settings.max_off_policy_steps
        return max_lag is not None and step - 1 - version > max_lag

    @property
    def num_turns_waiting(self) -> int:
        """Returns how many turns wait, or are asked about."""
        return len(self._queue) + len(self._asking)

    def state(self) -> dict[str, Any]:
        """Returns what teachers have cost, which going back to a checkpoint does not refund."""
        return {"spent": self._costs.spent, "num_rollouts": self._num_rollouts}

    def figures(self) -> Figures:
        """Returns counts as `pairs/NAME`; docs/auxiliary_losses.md has them all."""
        counts = Counter(self._num)
        for one in self._teachers:
            counts["requests"] += one.num_requests
            for what, num in one.num.items():
                counts[f"questions_{what}"] += num
                counts[f"questions_{what}/{one.name}"] += num
        if self._judge is not None:
            counts.update({f"judge_{what}": num for what, num in self._judge.num.items()})
        values = {
            "ready": float(len(self._ready)),
            "turns_waiting": float(self.num_turns_waiting),
            "cost": self._costs.spent,
            "cost_per_rollout": self._costs.spent / max(1, self._num_rollouts),
        }
        own = {"evidence/asked": self._num_advantages} if self._settings.advantage_weight else {}
        return Figures(
            counts=own | {f"pairs/{name}": num for name, num in counts.items()},
            values={f"pairs/{name}": value for name, value in values.items()},
        )

    async def close(self) -> None:
        """Gives up all questions."""
        self._queue.clear()
        tasks = [*self._asking, *self._answers.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for one in [*self._teachers, *filter(None, [self._judge])]:
            await one.close()

    # --- one turn ---

    def _start(self) -> None:
        while self._queue and len(self._asking) < MAX_ASKING:
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

    async def _look(self, turn: PolicyTurn) -> None:
        if self._is_old(turn.version, self._step + 1):
            self._num["turns_too_old"] += 1
            return
        self._num["turns_asked"] += 1
        answers = await self.answers(turn.messages, turn.tools)
        judge = None if self._judge is None else self._judged
        made: PairRecord | Skipped
        verdict = await preferred(answers, turn.action, num_agreeing=self._settings.num_agreeing, judge=judge)
        if isinstance(verdict, Skipped):
            made = verdict
        else:
            made = await make_pair(
                verdict,
                turn,
                self._template_of(turn.tools),
                self._reference,
                sequence_len=self._sequence_len,
                base_model=self._base_model,
            )
        if isinstance(made, Skipped):
            self._problem(f"skipped_{made.reason}", made.message)
        else:
            self._keep(made)

    def _keep(self, record: PairRecord) -> None:
        self._num["made"] += 1
        number = self._ledger.pair_made(record.version, msgspec.json.encode(record).decode())
        self._ready.append((number, record))
        if len(self._ready) > MAX_READY:
            self._ready.remove(min(self._ready, key=lambda one: one[1].version))
            self._num["not_taken"] += 1

    def _problem(self, what: str, message: str) -> None:
        self._num[what] += 1
        if message:
            self.warn(f"preferences {what}", message)

    # --- teachers and the judge ---

    async def answers(self, messages: Sequence[Mapping[str, Any]], tools: Tools) -> dict[str, Action | None]:
        """Returns what each teacher would do after `messages`; None where it did not answer. All are asked at once. A
        state that is known, or is being asked about, is not asked about again."""
        state = state_key(messages, tools)
        tasks = {one.name: self._answer(one, state, messages, tools) for one in self._teachers}
        answers = await asyncio.gather(*tasks.values(), return_exceptions=True)
        for error in answers:
            if isinstance(error, EndpointError):
                self.warn(f"preferences questions_{error.reason}", f"a teacher did not answer: {error}")
            elif isinstance(error, BaseException):
                raise error
        return {name: one if isinstance(one, Action) else None for name, one in zip(tasks, answers, strict=True)}

    def _answer(
        self, teacher: ApiModel, state: str, messages: Sequence[Mapping[str, Any]], tools: Tools
    ) -> asyncio.Task[Action]:
        key = (teacher.name, state)
        answer = self._answers.pop(key, None)
        if answer is not None and not (answer.done() and answer.exception()):
            teacher.num["cached"] += 1
        else:
            answer = asyncio.create_task(_action(teacher, messages, tools))
        self._answers[key] = answer  # the last, as it was used last
        while len(self._answers) > MAX_KNOWN and next(iter(self._answers.values())).done():
            self._answers.popitem(last=False)
        return answer

    async def _judged(self, one: str, other: str) -> bool:
        """Returns which of the words yes and no is the only one in the judge's answer. Raises EndpointError."""
        assert self._judge is not None
        answer = await self._judge.ask([{"role": "user", "content": QUESTION.format(one=one, other=other)}])
        found = {"yes", "no"}.intersection(words(answer.text))
        if len(found) != 1:
            raise EndpointError("nonsense", f"{self._judge.name} was asked for yes or no: {answer.text[:200]!r}")
        return found == {"yes"}


async def _action(teacher: ApiModel, messages: Sequence[Mapping[str, Any]], tools: Tools) -> Action:
    """Returns what a teacher would do. Hosted APIs take a tool's messages only after calls of their own format: they
    are sent as the user's. Raises EndpointError."""
    sent = [{**one, "role": "user"} if one["role"] == "tool" and "tool_call_id" not in one else one for one in messages]
    answer = await teacher.ask(sent, tools)
    try:
        calls = [(name, msgspec.json.decode(text, type=dict[str, Any])) for name, text in answer.tool_calls]
    except (msgspec.MsgspecError, RecursionError) as error:
        teacher.num.update(answered=-1, nonsense=1)
        raise EndpointError("nonsense", f"{teacher.name}: arguments of a call are no JSON object: {error}") from None
    return Action(text=answer.text, tool_calls=tuple(calls))


async def open(opening: Opening) -> Hook:
    """Returns the hook of `preferences`. Raises ValueError for what cannot be honoured."""
    settings, ready, loss = opening.settings, opening.ready, opening.trainer.loss
    chosen = settings.preferences
    if chosen.pairs is not None:
        pairs = pairs_of_run(
            Path(chosen.pairs),
            base_model=ready.model_identity,
            seq_len=settings.seq_len,
            num_adapters=max(1, len(settings.model.lora_adapters)),
        )
        return PairsOfRun(pairs, max_pairs=chosen.max_pairs, seed=settings.seed)
    return Preferences(
        chosen,
        opening.ledger,
        partial(opening.client.score, version=None),
        Templates(ready.renderer).of,
        opening.endpoint,
        base_model=ready.model_identity,
        sequence_len=settings.seq_len,
        is_trained=lambda: is_trained(loss.beta_replay, loss.dpo, num_shipped=opening.scheduler.shipped),
        step=opening.progress.step,
        state=opening.state,
    )

"""Episodes that run in an environment's process, on the orchestrator's side: their calls are answered here, and the
tokens stay here."""

import asyncio
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.client import Refused as RefusedByServer
from orchestrator.episodes.artifacts import ArtifactStores
from orchestrator.episodes.conversation import Conversation
from orchestrator.episodes.policy import Backends, PromptTooLong
from orchestrator.episodes.roles import SHARED_ADAPTER, RoleAdapters
from orchestrator.episodes.rolling import Roller, SingleTurn
from orchestrator.episodes.templates import TemplateRefused, Templates
from orchestrator.episodes.tree import FailedRollout, GenerateResult
from orchestrator.episodes.types import Failure, Rollout, RolloutRow, SamplingParams, Step, StepError, Task
from orchestrator.renderer import ChatRenderer
from orchestrator.seeds import mixed_seed
from orchestrator.workers.hosting import Call, EpisodeHost, GivenUp, Reply
from orchestrator.workers.wire import Asked, Called, Played, Refused, RoleInfo, Sampled, StoreAnswer, Stored

CONTEXT_FULL, CALL_FAILED = "context_full", "failed"
MAX_CALLS = 2000
"""Of one rollout. Each is answered in its time, so that an episode without end would never be late."""
BASE, POLICY_MODEL = "base", "policy"


class HostedEpisodes(Roller):
    """Rolls out an environment's episodes."""

    def __init__(
        self,
        host: EpisodeHost,
        params: SamplingParams,
        templates: Templates,
        *,
        stores: ArtifactStores | None = None,
        verify: bool = True,
        seed: int = 0,
        adapters: RoleAdapters = SHARED_ADAPTER,
    ) -> None:
        """`stores` are those of all environments. Without `verify`, no rubric is asked. `seed`: of what environments
        draw at random."""
        self._host, self._params, self._templates, self._adapters = host, params, templates, adapters
        self._stores, self._verify, self._seed = stores, verify, seed

    async def generate(
        self, backends: Backends, task: Task, *, group: str, num: int, version: int, seed: int | None = None
    ) -> list[GenerateResult | FailedRollout]:
        async with asyncio.TaskGroup() as tasks:
            asked = [
                tasks.create_task(self._one(backends, task, f"{group}/{number}", number, version, seed))
                for number in range(num)
            ]
        results = [one.result() for one in asked]
        failures = [one.failure for one in results if isinstance(one, FailedRollout)]
        sampled = any(one.rollout.steps for one in results)
        if len(failures) == num and not sampled and all(failure.reason == CONTEXT_FULL for failure in failures):
            raise PromptTooLong(failures[-1].message)
        return results

    async def _one(
        self, backends: Backends, task: Task, rollout_id: str, number: int, version: int, seed: int | None
    ) -> GenerateResult | FailedRollout:
        own_seed = None if seed is None else mixed_seed(seed, number)
        playing = self._anew(backends, task, version, own_seed)

        def begin() -> _Playing:
            nonlocal playing
            playing = self._anew(backends, task, version, own_seed)
            return playing

        outcome = await self._host.play(
            task, seed=self._environment_seed(task, number), begin=begin, score=self._verify
        )
        result = playing.result(outcome, rollout_id, task)
        self._host.record(result.failure if isinstance(result, FailedRollout) else None)
        return result

    def _environment_seed(self, task: Task, number: int) -> int:
        """A rollout's own; in an evaluation that of its example, the same at every version."""
        return mixed_seed(self._seed, task.env, task.split, task.epoch, task.index, number)

    def _anew(self, backends: Backends, task: Task, version: int, seed: int | None) -> "_Playing":
        return _Playing(
            backends=backends,
            params=self._params,
            roles={role.id: role for role in self._host.loaded.roles},
            adapters=self._adapters,
            templates=self._templates,
            stores=self._stores,
            store_name=partial(store_name, task.env, task.split),
            split=task.split,
            version=version,
            seed=seed,
        )


@dataclass(frozen=True, slots=True)
class _Made:
    """A step, and where its tokens are."""

    step: Step
    conversation: int
    turn: int


class _Playing:
    """One attempt at one rollout: answers its calls and keeps what was sampled."""

    def __init__(
        self,
        *,
        backends: Backends,
        params: SamplingParams,
        roles: Mapping[str, RoleInfo],
        adapters: RoleAdapters,
        templates: Templates,
        stores: ArtifactStores | None,
        store_name: Callable[[str], str],
        split: str,
        version: int,
        seed: int | None,
    ) -> None:
        self._backends, self._params, self._roles, self._adapters = backends, params, roles, adapters
        self._templates, self._stores, self._store_name = templates, stores, store_name
        self._split, self._version, self._seed = split, version, seed
        self._conversations: dict[int, Conversation] = {}
        self._made: dict[int, _Made] = {}
        """By call."""
        self._num_calls = 0
        self._asked: Counter[bytes] = Counter()
        """How often each prompt was sampled from."""

    async def __call__(self, call: Call) -> Reply:
        """The reply to a call. Raises GivenUp, and what servers raise."""
        if self._num_calls >= MAX_CALLS:
            message = f"a rollout may call models {MAX_CALLS} times, and this one goes on; let its episode end"
            raise GivenUp(Failure(reason="env_error", message=message))
        self._num_calls += 1
        if isinstance(call, Called):
            return await self._sample(call)
        return await self._ask(call) if isinstance(call, Asked) else self._store(call)

    async def _sample(self, call: Called) -> Reply:
        role = self._roles[call.role]
        params = self._params
        own = role.temperature if self._split == "train" else None
        temperature = params.temperature if own is None else own
        limit = call.max_tokens or role.max_tokens or params.max_tokens
        try:
            conversation = self._conversation(call)
            prompt = conversation.prompt_ids()
        except (TemplateRefused, ValueError) as error:
            return Refused(call=call.call, reason=CALL_FAILED, message=str(error))
        room = self._backends.policy.context_len - len(prompt)
        if room < 1:
            return self._full(call, len(prompt))
        [completion] = await self._backends.policy.generate(
            prompt,
            params=replace(
                params,
                temperature=temperature,
                max_tokens=min(room, limit or room),
                adapter=self._adapters.name(call.role),
            ),
            num=1,
            version=self._version,
            seed=self._seed_for(prompt),
        )
        text = conversation.answer(completion, version=self._version, temperature=temperature)
        step = Step(
            role=call.role,
            temperature=temperature,
            prompt_token_ids=(),
            completion=completion,
            text=text,
            version=self._version,
            messages=tuple(call.messages),
            tools=conversation.tools,
            adapter=self._adapters.place(call.role),
        )
        self._made[call.call] = _Made(step, call.conversation, conversation.num_turns - 1)
        return Sampled(
            call=call.call, text=text, finish_reason=completion.finish_reason, num_tokens=len(completion.token_ids)
        )

    def _conversation(self, call: Called) -> Conversation:
        found, messages = self._conversations.get(call.conversation), self._harmless(call.messages)
        if found is None:
            found = Conversation(self._templates.of(call.tools), messages)
            self._conversations[call.conversation] = found
        elif messages:
            found.add(*messages)
        return found

    def _harmless(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [self._templates.renderer.without_control(message) for message in messages]

    def _full(self, call: Called | Asked, num: int) -> Refused:
        return Refused(
            call=call.call,
            reason=CONTEXT_FULL,
            message=f"a conversation of {num} tokens leaves no room for an answer in "
            f"{self._backends.policy.context_len} tokens; raise seq_len, the server's max_model_len and that of a "
            "teacher, or let the environment say less",
        )

    async def _ask(self, call: Asked) -> Reply:
        """An answer beside the rollout, of the base model or of the version that plays it, by its first adapter."""
        if call.model not in (BASE, POLICY_MODEL):
            expected = f"model is {call.model!r}, expected {BASE} or {POLICY_MODEL}"
            return Refused(call=call.call, reason=CALL_FAILED, message=expected)
        try:
            template = self._templates.of(None)
            prompt = template.renderer.ids_of(template.render(self._harmless(call.messages)))
        except TemplateRefused as error:
            return Refused(call=call.call, reason=CALL_FAILED, message=str(error))
        room = self._backends.policy.context_len - len(prompt)
        if room < 1:
            return self._full(call, len(prompt))
        follows = self._params.follow and call.model == POLICY_MODEL
        params = SamplingParams(
            temperature=call.temperature, max_tokens=min(room, call.max_tokens or room), follow=follows
        )
        try:
            [completion] = await self._backends.policy.generate(
                prompt,
                params=params,
                num=1,
                version=None if call.model == BASE else self._version,
                seed=self._seed_for(prompt),
            )
        except RefusedByServer as error:  # what is asked here is user code's: a temperature that nobody samples at
            return Refused(call=call.call, reason=CALL_FAILED, message=str(error))
        [text] = self._backends.renderer.texts([completion])
        return Sampled(
            call=call.call, text=text, finish_reason=completion.finish_reason, num_tokens=len(completion.token_ids)
        )

    def _seed_for(self, prompt: Sequence[int]) -> int | None:
        """By what is asked, and how often it was, because calls that are made at once come in no certain order."""
        if self._seed is None:
            return None
        digest = hashlib.blake2b(np.asarray(prompt, np.int32).tobytes(), digest_size=16).digest()
        self._asked[digest] += 1
        return mixed_seed(self._seed, digest.hex(), self._asked[digest])

    def _store(self, call: Stored) -> Reply:
        try:
            assert self._stores is not None
            store, given = self._stores[self._store_name(call.store)], call.arguments
            result: Any = None
            if call.operation == "add":
                result = store.add(given["data"], weight=given.get("weight", 1.0)).id
            elif call.operation == "sample":
                drawn = store.sample(
                    given.get("num", 1), weighted=given.get("weighted", False), replace=given.get("replace", True)
                )
                result = [[one.id, one.data] for one in drawn]
            elif call.operation == "set_weight":
                if result := given["id"] in store:  # otherwise another rollout's artifact has taken its place
                    store.set_weight(given["id"], given["weight"])
            else:
                result = len(store)
        except (KeyError, ValueError, TypeError) as error:
            return Refused(call=call.call, reason=CALL_FAILED, message=f"store {call.store}: {error}")
        return StoreAnswer(call=call.call, result=result)

    # --- what it came to ---

    def result(self, outcome: Played | Failure, rollout_id: str, task: Task) -> GenerateResult | FailedRollout:
        """The tree of a rollout's results, or why there is none."""
        failure = outcome if isinstance(outcome, Failure) else self._fault(outcome)
        if failure is None:
            assert isinstance(outcome, Played)
            try:
                return self._tree(outcome, rollout_id, task)
            except ValueError as error:
                failure = Failure(reason="env_error", message=str(error))
        rollout = Rollout(id=rollout_id, task=task, steps=tuple(made.step for made in self._made.values()))
        return FailedRollout(rollout=rollout, failure=failure)

    def _fault(self, played: Played) -> Failure | None:
        """Why nothing can be trained on it: steps that are not what was sampled, tokens that belong to no step, for
        which nobody could give credit, or no tokens at all."""
        claimed = Counter(_calls(played))
        if strange := [call for call, num in claimed.items() if num > 1 or call not in self._made]:
            message = (
                f"{len(strange)} steps of the rollout's trajectory are none of the policy's answers, or one of them "
                "again; leave the replies in state.trajectory as arena.call put them there"
            )
            return Failure(reason="env_error", message=message)
        if unclaimed := len(self._made) - len(claimed):
            message = (
                f"{unclaimed} answers that the policy gave belong to no step of the rollout, expected all: let no call "
                "be cancelled, and await each"
            )
            return Failure(reason="env_error", message=message)
        if not self._made:
            return Failure(reason="env_error", message="the episode ended without an answer of the policy")
        return None

    def _tree(self, played: Played, rollout_id: str, task: Task) -> GenerateResult:
        made = [self._made[one.call] for one in played.steps]
        steps = [
            replace(one.step, error=_error(told.error), observed=told.observed)
            for one, told in zip(made, played.steps, strict=True)
        ]
        at = {(one.conversation, one.turn): index for index, one in enumerate(made)}
        rows = [
            (row, [(number, turn.index) for turn in row.turns])
            for number in dict.fromkeys(one.conversation for one in made)
            for row in self._conversations[number].rows()
        ]
        if any(place not in at for _, places in rows for place in places):
            raise ValueError(
                "answers of one conversation are in the trajectories of several rollouts; leave the replies in "
                "state.trajectory as arena.call put them there"
            )
        children = [self._tree(child, f"{rollout_id}.{n}", task) for n, child in enumerate(played.children)]
        return GenerateResult(
            rollout=Rollout(
                id=rollout_id,
                task=task,
                steps=tuple(steps),
                rows=tuple(RolloutRow(row=row, steps=tuple(at[place] for place in places)) for row, places in rows),
                cut=played.truncated,
            ),
            rewards=played.rewards,
            accuracy=played.accuracy,
            metrics=played.metrics,
            extras=played.extras,
            children=tuple(children),
        )


def _calls(played: Played) -> list[int]:
    """The calls of all steps, those of children included."""
    return [step.call for step in played.steps] + [call for child in played.children for call in _calls(child)]


def _error(marked: Any) -> StepError | None:
    if marked is None:
        return None
    return StepError(error_kind=marked.error_kind, hint_template_key=marked.hint_template_key, message=marked.message)


class Rollers:
    """How each environment's tasks are rolled out."""

    def __init__(
        self,
        hosts: Mapping[str, EpisodeHost],
        renderer: ChatRenderer,
        *,
        seed: int,
        stores: ArtifactStores | None = None,
    ) -> None:
        """`hosts`: of those whose rollouts are episodes, by key. `seed`: of what environments draw at random."""
        self._hosts, self._templates = hosts, Templates(renderer)
        self._stores, self._seed = stores, seed
        self._num_restarted = 0

    def hosts(self, env: str) -> bool:
        """Whether rollouts of the environment with this key are episodes."""
        return env in self._hosts

    @property
    def templates(self) -> Templates:
        """The model's chat template."""
        return self._templates

    def newly_restarted(self) -> int:
        """Rollouts that were begun again because their process ended by no fault of theirs, since this was last
        asked."""
        before, self._num_restarted = self._num_restarted, sum(host.num_restarted for host in self._hosts.values())
        return self._num_restarted - before

    def of(
        self, env: str, params: SamplingParams, *, verify: bool = True, adapters: RoleAdapters = SHARED_ADAPTER
    ) -> Roller:
        """Of the environment with this key, sampled with `params`, its roles by these adapters; without `verify`, no
        rubric is asked."""
        if (host := self._hosts.get(env)) is None:
            return SingleTurn(params, adapters)
        return HostedEpisodes(
            host,
            params,
            self._templates,
            stores=self._stores,
            verify=verify,
            seed=self._seed,
            adapters=adapters,
        )

    def settle(self, state: Mapping[str, Mapping[str, int]]) -> None:
        """The run goes back to nothing before `state` of the artifact stores."""
        if self._stores is not None:
            self._stores.settle(state)

    def state(self) -> dict[str, dict[str, int]]:
        """Of the artifact stores."""
        return {} if self._stores is None else self._stores.state()

    def close(self) -> None:
        """Closes the artifact stores."""
        if self._stores is not None:
            self._stores.close()


SPLIT_PREFIXES = {"train": "", "eval": "eval-"}
_STORE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


def store_name(env: str, split: str, name: str) -> str:
    """What an environment's artifact store is called among all of a run. What evaluation keeps is apart: it leaves what
    is trained as it was."""
    clean, digest = re.sub("[^A-Za-z0-9_-]", "-", env)[:20], hashlib.blake2b(env.encode(), digest_size=3).hexdigest()
    return f"{SPLIT_PREFIXES[split]}{clean}-{digest}_{name}"


def open_stores(
    hosts: Mapping[str, EpisodeHost],
    folder: Path,
    *,
    seed: int,
    state: Mapping[str, Mapping[str, int]] | None,
) -> ArtifactStores | None:
    """The artifact stores of all environments, as they were in `state`; None where no environment has any. Raises
    ValueError for a name that cannot be one."""
    if not any(host.loaded.stores for host in hosts.values()):
        return None
    stores = ArtifactStores(folder, seed=seed, state=state)
    for env, host in hosts.items():
        for name, max_size in host.loaded.stores.items():
            if not _STORE_NAME.fullmatch(name):
                raise ValueError(
                    f"environment {env} calls a store {name!r}, expected up to 64 letters, digits, - and _ that begin "
                    "with a letter or a digit; give it another name in its stores"
                )
            for split in SPLIT_PREFIXES:
                stores.add(store_name(env, split, name), max_size=max_size)
    return stores

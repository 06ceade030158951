"""`verifiers`: runs environments of the `verifiers` library (0.4 and later) unchanged.

The library runs the rollout, with its own agents, tools, limits and rewards. Its agents talk to the rollout's
OpenAI-compatible endpoint, so that training has the exact tokens that our servers sampled. An agent without a harness
of its own runs in this process (`_verifiers_chat`).
"""

import asyncio
import itertools
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

try:
    import verifiers.v1 as vf
    from verifiers.v1.configs.agent import agent_config_fields
except ImportError as error:
    raise ImportError(f"verifiers 0.4 or later is needed ({error}); pip install 'grpo-pipeline[verifiers]'") from None

from grpo.environments import _verifiers_chat

from grpo import (
    ContextFull,
    Environment,
    Episode,
    EpisodeState,
    Role,
    RolloutContext,
    Rubric,
    endpoint_of,
    shared_endpoint,
    text_of,
)

CHAT_HARNESS = "grpo_chat"
"""The id of our chat loop in `verifiers`."""
THEIR_HARNESS = "bash"
"""The library's default harness. It runs commands, and installs itself from the network."""
DEADLINE_S = 3600.0
"""Limit in seconds for one rollout, unless `environment` sets `timeout`."""
POLICY = "policy"


class RolloutFailed(RuntimeError):
    """The library's rollout failed. The message has its errors."""


class Verifiers(Episode, Environment):
    """An installed package of the `verifiers` registry.

    Example: ``env: [{id: verifiers, args: {env_id: my-env, env_args: {difficulty: easy}}}]``
    """

    def __init__(
        self,
        *,
        env_id: str,
        env_args: Mapping[str, Any] | None = None,
        environment: Mapping[str, Any] | None = None,
        num_train: int | None = None,
        num_eval: int = 50,
    ) -> None:
        """`env_id`: the package's name as `prime env install` takes it, also `owner/name`. `env_args`: settings of its
        taskset. `environment`: its other settings, such as `{"agent": {"max_turns": 4}}`, or the `id` of an environment
        class for the taskset. The first `num_eval` tasks are for evaluation, the next `num_train` for training (null:
        all; an endless taskset needs a number). Tool servers must start within the run's `reward_timeout_s`. Raises
        ValueError."""
        if num_eval < 1 or (num_train is not None and num_train < 1):
            raise ValueError(f"num_train = {num_train} and num_eval = {num_eval}, expected at least 1 of each")
        self._env = _load({**(environment or {}), "taskset": {"id": env_id, **(env_args or {})}})
        self._places = {"train": (num_eval, None if num_train is None else num_eval + num_train), "eval": (0, num_eval)}
        self._env_id, self._tasks = env_id, dict[str, Sequence[vf.Task]]()
        agents = [name for name, spec in agent_config_fields(self._env.config).items() if spec.client is None]
        if not agents:
            raise ValueError(f"every agent of {env_id} has a client of its own, so that none can be trained")
        self._role_of = {name: name if len(agents) > 1 else POLICY for name in agents}
        self.roles = [Role(id=role) for role in self._role_of.values()]
        self.rubric = Rubric([total_reward], metrics=[verifiers])
        self._stack = AsyncExitStack()
        self._starting: asyncio.Task[vf.ModelContext] | None = None

    def dataset(self, split: str) -> Sequence[Mapping[str, Any]]:
        """Returns one example a task, in the taskset's order."""
        return [
            {"prompt": _prompt(task), "task": f"{self._env_id}/{split}/{place}", "place": place}
            for place, task in enumerate(self._split(split))
        ]

    async def rollout(self, ctx: RolloutContext, state: EpisodeState) -> None:
        """Runs the library's rollout. Raises RolloutFailed if it fails."""
        task = self._split(ctx.split)[int(state.example["place"])]
        context = await self._served()
        async with endpoint_of(ctx) as endpoint:

            def speak(trace: vf.Trace) -> None:
                if (role := self._role_of.get(trace.agent.name)) is not None:
                    endpoint.speakers[trace.id] = role if trace.agent.trainable else None

            episode = await self._env.run_episode(task, context, on_trace=speak)
        state.truncated = endpoint.full
        if not self._env.complete(episode) or (endpoint.full and not state.trajectory):
            raise _failure(episode, endpoint.full, endpoint.failure, state)
        for trace in episode.traces:
            for call_id, kind, message in trace.info.get(_verifiers_chat.FAILED_CALLS, []):
                if (index := int(call_id.split("_")[1])) >= 0:
                    state.mark_error(kind, kind, message, index=index)
        _keep_scores(episode, endpoint.speakers, state)

    def extras(self, state: EpisodeState) -> Mapping[str, Any]:
        """Returns the rewards and metrics of the library's rubric, for the rollout's record."""
        return {"rewards": state.data.get("rewards", {}), "metrics": state.data.get("metrics", {})}

    async def close(self) -> None:
        """Stops the library's tool servers."""
        if self._starting is not None:
            await asyncio.wait([self._starting])
            await self._stack.aclose()

    def _split(self, split: str) -> Sequence[vf.Task]:
        if split not in self._tasks:
            taskset, (first, last) = self._env.taskset, self._places[split]
            if last is None and not taskset.bounded:
                raise ValueError(f"the taskset {self._env_id} has no end; set num_train in env.args")
            self._tasks[split] = list(itertools.islice(taskset, first, last))
            if not self._tasks[split]:
                raise ValueError(f"{self._env_id} has no task for {split}: give it a smaller num_eval")
        return self._tasks[split]

    async def _served(self) -> vf.ModelContext:
        """Returns how the library's agents reach the policy. The first call starts the library's shared servers, which
        run until `close`; others wait for it. After a failed start the next rollout tries again."""
        if self._starting is None or (self._starting.done() and self._starting.exception()):
            self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> vf.ModelContext:
        async with AsyncExitStack() as stack:
            base_url, headers = await stack.enter_async_context(shared_endpoint())
            await stack.enter_async_context(self._env.serving())
            self._stack = stack.pop_all()
        client = vf.EvalClientConfig(base_url=base_url, api_key_var="GRPO_NO_KEY", headers=headers)
        return vf.ModelContext(model=POLICY, client=client)


def total_reward(state: EpisodeState) -> float | Mapping[str, float]:
    """Returns the sum of the weighted rewards, by role if several agents are trained."""
    rewards: Mapping[str, float] = state.data["rewards"]
    return rewards[POLICY] if rewards.keys() == {POLICY} else rewards


def verifiers(state: EpisodeState) -> Mapping[str, float]:
    """Returns the mean of each unweighted reward and each metric of the library's rubric, by name."""
    metrics: Mapping[str, float] = state.data["metrics"]
    return metrics


def _load(given: Mapping[str, Any]) -> vf.Env:
    """Loads the library's environment; an agent without a harness gets our chat loop. Raises ValueError for settings
    that cannot be used."""
    sys.modules.setdefault(CHAT_HARNESS, _verifiers_chat)
    env_id = given["taskset"]["id"]
    try:
        config = vf.resolve_env_config(given)
    except AttributeError as error:
        raise ValueError(
            f"env_id = {env_id!r} is no environment of verifiers 0.4 or later, whose modules name a taskset in "
            f"`__all__`: {error}; docs/environments.md tells what to do with older ones"
        ) from error
    own_harness = vf.default_harness_id(config.taskset.id) != THEIR_HARNESS
    changes: dict[str, Any] = {}
    for name, spec in agent_config_fields(config).items():
        if spec.retries.model_dump(exclude_defaults=True):
            raise ValueError(
                f"{name}.retries is set, expected none: what a failed try sampled would be trained with the reward of "
                "the next one; a rollout that fails is dropped and counted"
            )
        if spec.harness is None and not own_harness:  # a harness and a place that need nothing but this process
            here = vf.SubprocessConfig() if spec.runtime == vf.PrimeConfig() else spec.runtime
            harness = _verifiers_chat.ChatHarnessConfig(id=CHAT_HARNESS)
            changes[name] = spec.model_copy(update={"harness": harness, "runtime": here})
    if config.timeout.episode is None:
        changes["timeout"] = config.timeout.model_copy(update={"episode": DEADLINE_S})
    return vf.load_environment(config.model_copy(update=changes))


def _prompt(task: vf.Task) -> list[dict[str, str]]:
    """Returns the first messages, as far as the task has them."""
    data = task.data
    shown = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str) or data.prompt is None:
        return [*shown, {"role": "user", "content": data.prompt or data.description or ""}]
    contents = [
        (one.role, one.content if isinstance(one.content, str | None) else one.model_dump()["content"])
        for one in data.prompt
    ]
    return [*shown, *({"role": role, "content": text_of(content)} for role, content in contents)]


def _failure(episode: vf.Episode, full: bool, failure: BaseException | None, state: EpisodeState) -> BaseException:
    """Returns the error of a rollout without a result. `full`: its context was; `failure`: its endpoint's error."""
    if full and not state.trajectory:
        return ContextFull(f"the first prompt of {state.example['task']} leaves no room for an answer")
    if failure is not None:
        return failure
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    told = [f"{error.type}: {error.message}\n{error.traceback or ''}".strip() for error in errors]
    return RolloutFailed("\n\n".join(told) or f"{state.example['task']} did not complete, and gave no error")


def _keep_scores(episode: vf.Episode, speakers: Mapping[str, str | None], state: EpisodeState) -> None:
    """Stores rewards by role and metrics by name in `state`; those of several traces are averaged."""
    rewards, metrics = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for trace in episode.traces:
        if (role := speakers.get(trace.id)) is None:
            continue
        rewards[role].append(trace.reward)
        scores = {name: given.score for name, given in trace.rewards.items() if given is not None}
        for name, value in {**scores, **trace.metrics}.items():
            if value is not None:
                metrics[name].append(value)
    state.data["rewards"] = {role: statistics.fmean(values) for role, values in rewards.items()}
    state.data["metrics"] = {name: statistics.fmean(values) for name, values in metrics.items()}

"""`verifiers`: environments of the `verifiers` library (0.4 and later), as their packages have them.

Their rollout is run as it is: their agents, tools, limits, stops and rewards. Only what answers the agents is ours: the
rollout's OpenAI-compatible endpoint, so that the tokens that our own servers sampled are trained. An agent whose
environment does not name a harness talks in this process (`_verifiers_chat`).
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
"""The id under which `verifiers` finds our chat loop."""
THEIR_HARNESS = "bash"
"""The harness of an agent that names none: it runs commands, and installs itself from the network."""
DEADLINE_S = 3600.0
"""Seconds for one rollout, unless `environment` has a `timeout` of its own."""
POLICY = "policy"


class RolloutFailed(RuntimeError):
    """The library's rollout did not complete. The message has its errors."""


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
        """`env_id`: the package's name, as `prime env install` has it, `owner/name` too. `env_args`: settings of its
        taskset. `environment`: its other settings, such as `{"agent": {"max_turns": 4}}` or the `id` of an environment
        class to pair the taskset with. The first `num_eval` tasks are held out from training, which has the next
        `num_train` (null: all; a taskset without end needs a number). Their tool servers have to come up within the
        run's `reward_timeout_s`."""
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
        """Returns the taskset's tasks, in its order."""
        return [
            {"prompt": _prompt(task), "task": f"{self._env_id}/{split}/{place}", "place": place}
            for place, task in enumerate(self._split(split))
        ]

    async def rollout(self, ctx: RolloutContext, state: EpisodeState) -> None:
        """Raises RolloutFailed with their error."""
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
        """Returns the rewards and metrics of their rubric, for the rollout's record."""
        return {"rewards": state.data.get("rewards", {}), "metrics": state.data.get("metrics", {})}

    async def close(self) -> None:
        """Ends their tool servers; the end of the process does, too."""
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
        """Starts their shared servers, which stay for as long as the process does, and returns where their agents find
        the policy. All wait for one start; after one that failed the next rollout tries again."""
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
    """The sum of their weighted rewards; where several agents are trained, by role."""
    rewards: Mapping[str, float] = state.data["rewards"]
    return rewards[POLICY] if rewards.keys() == {POLICY} else rewards


def verifiers(state: EpisodeState) -> Mapping[str, float]:
    """Each of their rewards, without its weight, and each of their metrics."""
    metrics: Mapping[str, float] = state.data["metrics"]
    return metrics


def _load(given: Mapping[str, Any]) -> vf.Env:
    """Loads their environment, each agent with a harness that can run here. Raises ValueError for settings that cannot
    be."""
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
    """Returns what the policy is shown first, as far as the task itself says."""
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
    """Returns why a rollout of theirs has no result. `full` and `failure`: of its endpoint."""
    if full and not state.trajectory:
        return ContextFull(f"the first prompt of {state.example['task']} leaves no room for an answer")
    if failure is not None:
        return failure
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    told = [f"{error.type}: {error.message}\n{error.traceback or ''}".strip() for error in errors]
    return RolloutFailed("\n\n".join(told) or f"{state.example['task']} did not complete, and gave no error")


def _keep_scores(episode: vf.Episode, speakers: Mapping[str, str | None], state: EpisodeState) -> None:
    """Keeps the rewards of their rubric by role, and its metrics; an agent that ran more than once has the mean."""
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

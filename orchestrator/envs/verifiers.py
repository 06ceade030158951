"""`verifiers`: environments of the `verifiers` library (0.4 and later), as their packages have them.

Their rollout is run as it is: their agents, tools, limits, stops and rewards. Only what answers the agents is ours: a
local endpoint hands each of their requests to the rollout's ctx, so that what is trained are the tokens that our own
servers sampled. An agent whose environment does not name a harness talks in this process (`_verifiers_chat`).
"""

import asyncio
import itertools
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

try:
    import verifiers.v1 as vf
    from verifiers.v1.configs.agent import agent_config_fields
except ImportError as error:
    raise ImportError(
        f"env.id = verifiers needs verifiers 0.4 or later ({error}); pip install 'grpo[verifiers]'"
    ) from None

from orchestrator.envs import _verifiers_chat
from orchestrator.envs._chat_endpoint import KEY_HEADER, NEUTRAL, ChatEndpoint, Seat, text_of
from orchestrator.envs.base import Environment
from orchestrator.rollouts.context import ContextFull, RolloutContext
from orchestrator.rollouts.episode import Episode
from orchestrator.rollouts.roles import POLICY, Role
from orchestrator.rollouts.rubric import Rubric
from orchestrator.rollouts.state import EpisodeState

CHAT_HARNESS = "grpo_chat"
"""The id under which `verifiers` finds our chat loop."""
_THEIR_HARNESS = "bash"
"""What they give an agent that names none: it runs commands, and installs itself from the network."""
_REWARDS, _METRICS = "verifiers_rewards", "verifiers_metrics"
"""Where a rollout's state keeps what their rubric said."""


class RolloutFailed(RuntimeError):
    """Their rollout came to nothing."""


class Verifiers(Environment):
    """An installed package of the `verifiers` registry.

    Example: ``env: [{id: verifiers, args: {env_id: my-env, env_args: {difficulty: easy}}}]``
    """

    def __init__(
        self,
        *,
        env_id: str,
        env_args: Mapping[str, Any] | None = None,
        eval_args: Mapping[str, Any] | None = None,
        environment: Mapping[str, Any] | None = None,
        num_train: int | None = None,
        num_eval: int = 50,
        accuracy: str | None = None,
        deadline_s: float = 3600.0,
        start_limit_s: float = 25.0,
    ) -> None:
        """`env_id`: the package's name, as `prime env install` has it, `owner/name` too. `env_args`: settings of its
        taskset. `eval_args`: what differs in them for evaluation; without them the first `num_eval` tasks are held out
        from training. `environment`: its other settings, such as `{"agent": {"max_turns": 4}}` or the `id` of an
        environment class to pair the taskset with. `num_train`: tasks to train on (null: all; a taskset without end
        needs a number). `accuracy`: which of their rewards or metrics evaluation reports (null: the sum of the weighted
        rewards). `deadline_s` ends a rollout of theirs, unless `environment` has a `timeout` of its own.
        `start_limit_s`: for their tool servers to come up, which counts as time of the environment; to stay below the
        run's `reward_timeout_s` (30 s).
        """
        if not start_limit_s > 0:
            raise ValueError(f"start_limit_s = {start_limit_s}, expected more than 0")
        if num_eval < 1 or (num_train is not None and num_train < 1):
            raise ValueError(f"num_train = {num_train} and num_eval = {num_eval}, expected at least 1 of each")
        given = {**(environment or {}), "taskset": {"id": env_id, **(env_args or {})}}
        self._env_id = env_id
        train = _load(given, deadline_s)
        self._num = {"train": num_train, "eval": num_eval}
        self._skipped = {"train": num_eval if eval_args is None else 0, "eval": 0}
        self._theirs = {"train": train, "eval": train}
        if eval_args is not None:
            given["taskset"] = {**given["taskset"], **eval_args}
            self._theirs["eval"] = _load(given, deadline_s)
        self._tasks: dict[str, Sequence[vf.Task]] = {}
        measure = None if accuracy is None else partial(_score_called, accuracy)
        self.rubric = Rubric([total_reward], accuracy=measure, metrics=[verifiers])
        self._episode = VerifiersEpisode(self._theirs, self._task, self.rubric, start_limit_s)
        self.episode = self._episode

    def dataset(self, split: str) -> Sequence[Mapping[str, Any]]:
        """Their tasks, in their order."""
        return [
            {"prompt": _prompt(task), "task": f"{self._env_id}/{split}/{place}", "place": place}
            for place, task in enumerate(self._split(split))
        ]

    async def close(self) -> None:
        """Ends their tool servers; the end of the process does, too."""
        await self._episode.close()

    def _task(self, split: str, place: int) -> vf.Task:
        return self._split(split)[place]

    def _split(self, split: str) -> Sequence[vf.Task]:
        if split not in self._tasks:
            self._tasks[split] = self._loaded(split)
        return self._tasks[split]

    def _loaded(self, split: str) -> Sequence[vf.Task]:
        taskset, num, skipped = self._theirs[split].taskset, self._num[split], self._skipped[split]
        if num is None and not taskset.bounded:
            raise ValueError(f"the taskset {self._env_id} has no end; set num_train in env.args")
        tasks = list(itertools.islice(taskset, skipped, None if num is None else skipped + num))
        if not tasks:
            raise ValueError(
                f"the taskset {self._env_id} has no task left for {split} after {skipped} that are held out for "
                "evaluation; give it eval_args, or a smaller num_eval"
            )
        return tasks


class VerifiersEpisode(Episode):
    """One rollout of theirs."""

    def __init__(
        self,
        theirs: Mapping[str, vf.Env],
        task: Callable[[str, int], vf.Task],
        rubric: Rubric,
        start_limit_s: float,
    ) -> None:
        """`theirs` by split; `task(split, place)` is what an example stands for."""
        agents = _answered(theirs["train"])
        if len(agents) == 1:  # of several, which ones are trained is known only when they act
            _check_temperature(*next(iter(agents.items())))
        self._agents, self._start_limit_s = agents, start_limit_s
        self._role_of = {name: name if len(agents) > 1 else POLICY for name in agents}
        self.rubric = rubric
        self.roles = tuple(_role(self._role_of[name], spec) for name, spec in agents.items())
        self._theirs, self._task = theirs, task
        self._starting: asyncio.Task[_Serving] | None = None

    async def rollout(self, ctx: RolloutContext, state: EpisodeState) -> None:
        """Raises RolloutFailed with their error."""
        env = self._theirs[ctx.split]
        serving = await self._served()
        seats: dict[str, Seat] = {}

        def take_seat(trace: vf.Trace) -> None:
            if (role := self._role_of.get(trace.agent.name)) is not None:
                if trace.agent.trainable:
                    _check_temperature(trace.agent.name, self._agents[trace.agent.name])
                seats[trace.id] = Seat(role=role, trained=trace.agent.trainable, ctx=ctx, state=state)
                serving.endpoint.take(trace.id, seats[trace.id])

        try:
            task = self._task(ctx.split, int(state.example["place"]))
            episode = await env.run_episode(task, serving.context, on_trace=take_seat)
        finally:
            for trace_id in seats:
                serving.endpoint.leave(trace_id)
        _check(env, episode, list(seats.values()), state)
        state.truncated = any(seat.full for seat in seats.values())
        _mark_failed_calls(episode, state)
        _keep_scores(episode, seats, state)

    def extras(self, state: EpisodeState) -> Mapping[str, Any]:
        """What their rubric said, for the rollout's record."""
        return {"rewards": state.data.get(_REWARDS, {}), "metrics": state.data.get(_METRICS, {})}

    async def close(self) -> None:
        if self._starting is None:
            return
        self._starting.cancel()
        [serving] = await asyncio.gather(self._starting, return_exceptions=True)
        self._starting = None
        if isinstance(serving, _Serving):
            await serving.stack.aclose()

    async def _served(self) -> "_Serving":
        """Their shared servers and our endpoint, which stay for as long as the process does. Rollouts that wait for one
        start fail with it, all at its limit; the next one begins another."""
        if self._starting is None or _has_failed(self._starting):
            self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> "_Serving":
        try:
            async with asyncio.timeout(self._start_limit_s) as deadline:
                return await self._serve()
        except TimeoutError:
            if not deadline.expired():
                raise
            raise RolloutFailed(
                f"the environment's tool servers have not come up within {self._start_limit_s:g} s; raise "
                "start_limit_s in env.args, and reward_timeout_s above it"
            ) from None

    async def _serve(self) -> "_Serving":
        async with AsyncExitStack() as stack:
            endpoint = ChatEndpoint()
            stack.push_async_callback(endpoint.close)
            await endpoint.start()
            for env in {id(env): env for env in self._theirs.values()}.values():
                await stack.enter_async_context(env.serving())
            client = vf.EvalClientConfig(
                base_url=endpoint.base_url, api_key_var="GRPO_NO_KEY", headers={KEY_HEADER: endpoint.key}
            )
            context = vf.ModelContext(model=POLICY, client=client)
            return _Serving(endpoint=endpoint, context=context, stack=stack.pop_all())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Serving:
    endpoint: ChatEndpoint
    context: vf.ModelContext
    stack: AsyncExitStack
    """Closes both, and what the environments serve."""


def _has_failed(task: asyncio.Task[_Serving]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def total_reward(state: EpisodeState) -> float | Mapping[str, float]:
    """The sum of their weighted rewards; where several agents are trained, by role."""
    rewards: Mapping[str, float] = state.data[_REWARDS]
    return rewards[POLICY] if rewards.keys() == {POLICY} else rewards


def verifiers(state: EpisodeState) -> Mapping[str, float]:
    """Each of their rewards, without its weight, and each of their metrics."""
    metrics: Mapping[str, float] = state.data[_METRICS]
    return metrics


def _score_called(name: str, state: EpisodeState) -> float:
    """Raises ValueError where they have no such reward or metric."""
    metrics: Mapping[str, float] = state.data[_METRICS]
    if name not in metrics:
        raise ValueError(f"accuracy = {name!r} is none of their rewards and metrics, {', '.join(sorted(metrics))}")
    return metrics[name]


def _load(given: Mapping[str, Any], deadline_s: float) -> vf.Env:
    """Their environment, each agent with a harness that can run here. Raises ValueError for one that cannot be."""
    sys.modules.setdefault(CHAT_HARNESS, _verifiers_chat)
    try:
        config = vf.resolve_env_config(given)
    except AttributeError as error:
        raise ValueError(
            f"env_id = {given['taskset']['id']!r} is no environment of verifiers 0.4 or later ({error}); those before "
            "export load_environment, and need a newer release of their package"
        ) from error
    own_harness = vf.default_harness_id(config.taskset.id) != _THEIR_HARNESS
    agents = agent_config_fields(config)
    changes: dict[str, Any] = {name: _agent(name, spec, own_harness) for name, spec in agents.items()}
    if config.timeout.episode is None:
        changes["timeout"] = config.timeout.model_copy(update={"episode": deadline_s})
    return vf.load_environment(config.model_copy(update=changes))


def _agent(name: str, spec: vf.AgentConfig, own_harness: bool) -> vf.AgentConfig:
    """With a harness and a place that need nothing but this process, unless it names its own."""
    for limit in ("max_input_tokens", "max_total_tokens"):
        if getattr(spec, limit) is not None:
            raise ValueError(f"{name}.{limit} = {getattr(spec, limit)} cannot be counted here; set {name}.max_turns")
    if retries := spec.retries.model_dump(exclude_defaults=True):
        raise ValueError(
            f"{name}.retries = {retries}, expected none: what a failed try sampled would be trained with the reward of "
            "the next one; a rollout that fails is dropped and counted"
        )
    if spec.client is None and (others := _sampled_otherwise(spec)):
        raise ValueError(
            f"{name}.sampling has {', '.join(others)}, which the policy is not sampled with: what is trained has to be "
            "as it was drawn; leave it out"
        )
    if spec.model is not None and spec.client is None:
        raise ValueError(f"{name}.model = {spec.model!r} without {name}.client, where the policy answers; set both")
    if spec.harness is not None or own_harness:
        return spec
    here = vf.SubprocessConfig() if spec.runtime == vf.PrimeConfig() else spec.runtime
    return spec.model_copy(update={"harness": _verifiers_chat.ChatHarnessConfig(id=CHAT_HARNESS), "runtime": here})


def _sampled_otherwise(spec: vf.AgentConfig) -> list[str]:
    """Settings of an agent's answers that nothing here heeds."""
    given = {} if spec.sampling is None else spec.sampling.model_dump(exclude_none=True)
    heeded = ("temperature", "max_tokens")
    return [
        f"{name} = {value}"
        for name, value in given.items()
        if name not in heeded and value not in NEUTRAL.get(name, ())
    ]


def _answered(env: vf.Env) -> dict[str, vf.AgentConfig]:
    """Agents that the policy answers for, by name. Raises ValueError where there are none."""
    agents = {name: spec for name, spec in agent_config_fields(env.config).items() if spec.client is None}
    if not agents:
        raise ValueError(f"every agent of {env.config.taskset.id} has a client of its own, so that none can be trained")
    return agents


def _check_temperature(name: str, spec: vf.AgentConfig) -> None:
    """Raises ValueError for a trained agent with one at which nothing can be trained."""
    temperature = None if spec.sampling is None else spec.sampling.temperature
    if temperature is not None and not temperature > 0:
        raise ValueError(
            f"{name}.sampling.temperature = {temperature:g}, at which {name} cannot be trained; set it above 0 under "
            "environment in env.args, or to null for the run's sampling.temperature"
        )


def _role(role: str, spec: vf.AgentConfig) -> Role:
    sampling = spec.sampling or vf.SamplingConfig()
    return Role(id=role, temperature=sampling.temperature or None, max_tokens=sampling.max_tokens)


def _prompt(task: vf.Task) -> list[dict[str, str]]:
    """What the policy is shown first, as far as the task itself says."""
    data = task.data
    shown = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str) or data.prompt is None:
        return [*shown, {"role": "user", "content": data.prompt or data.description or ""}]
    return [*shown, *({"role": message.role, "content": text_of(_plain(message.content))} for message in data.prompt)]


def _plain(content: Any) -> Any:
    """Content parts as plain data."""
    return content if isinstance(content, str | None) else [part.model_dump() for part in content]


def _check(env: vf.Env, episode: vf.Episode, seats: Sequence[Seat], state: EpisodeState) -> None:
    """Raises what ended their rollout, where that is no result."""
    if any(seat.full for seat in seats) and not state.trajectory:
        raise ContextFull(f"the first prompt of {state.example['task']} leaves no room for an answer")
    if env.complete(episode):
        return
    if (failure := next((seat.failure for seat in seats if seat.failure is not None), None)) is not None:
        raise failure
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    told = [f"{error.type}: {error.message}\n{error.traceback or ''}".strip() for error in errors]
    raise RolloutFailed("\n\n".join(told) or f"{state.example['task']} did not complete, and gave no error")


def _mark_failed_calls(episode: vf.Episode, state: EpisodeState) -> None:
    """Those that our chat loop made."""
    for trace in episode.traces:
        for call_id, kind, message in trace.info.get(_verifiers_chat.FAILED_CALLS, []):
            index = int(call_id.split("_")[1])
            if index >= 0:
                state.mark_error(kind, kind, message, index=index)


def _keep_scores(episode: vf.Episode, seats: Mapping[str, Seat], state: EpisodeState) -> None:
    """What their rubric said, by role; an agent that ran more than once has the mean."""
    rewards: dict[str, list[float]] = {}
    metrics: dict[str, list[float]] = {}
    for trace in episode.traces:
        if (seat := seats.get(trace.id)) is None or not seat.trained:
            continue
        rewards.setdefault(seat.role, []).append(trace.reward)
        scores = {name: given.score for name, given in trace.rewards.items() if given is not None}
        scores |= {name: value for name, value in trace.metrics.items() if value is not None}
        for name, value in scores.items():
            metrics.setdefault(name, []).append(value)
    state.data[_REWARDS] = {role: statistics.fmean(values) for role, values in rewards.items()}
    state.data[_METRICS] = {name: statistics.fmean(values) for name, values in metrics.items()}

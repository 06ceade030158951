"""A schedule of one's own: which episodes are rolled out about what, and which of them are trained together.

An arena stands in the orchestrator where otherwise examples of environments are sampled. Everything else is as always:
the engine, the ledger, packing, versions, traces, going on after a restart. Without a run it rolls out with any model.
"""

import asyncio
import inspect
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from grpo.orchestrator.advantage import Credit, StepKey, checked_credit, group_credit, make_credit
from grpo.orchestrator.arena.local import LocalPool
from grpo.orchestrator.loops.sample import training_params
from grpo.orchestrator.rollouts.clients import InferenceClient
from grpo.orchestrator.rollouts.clock import together
from grpo.orchestrator.rollouts.engine import PromptTooLong, result_of
from grpo.orchestrator.rollouts.episode import Episode
from grpo.orchestrator.rollouts.messages import shown
from grpo.orchestrator.rollouts.play import ScriptedBackend
from grpo.orchestrator.rollouts.records import EpisodeResult, Group, Step, Task
from grpo.orchestrator.rollouts.roles import Role, RoleAdapters
from grpo.orchestrator.rollouts.stores import ArtifactStore
from grpo.orchestrator.samples import ScoredGroup, add_samples
from grpo.orchestrator.sink import RolloutSink
from grpo.orchestrator.startup import failure_rate
from grpo.orchestrator.workers.protocol import Ask, Sample, Sampled
from grpo.transport.errors import UserError
from grpo.transport.http import Choice
from grpo.transport.records import TrainingSample

ARENA = "arena"
"""The environment of its rollouts, in the ledger and in metrics."""


@dataclass(frozen=True, slots=True)
class EpisodeRequest:
    """A request for one rollout. Example: ``EpisodeRequest("debate", {"topic": "tea"}, meta={"round": 3})``"""

    episode_type: str
    """The name under which `add_episode` knows the episode."""
    artifact: Any
    """What it is about: the episode's example; what is no mapping is its `artifact`."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Plain data that goes with the rollout: `state.data["meta"]`, and `extras["meta"]` of its result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBatch:
    """The rollouts that one step trains on."""

    group: ScoredGroup
    meta: Mapping[str, Any]
    """`step`, `policy_version`, `num_rollouts`, `num_failed`, `reward`, and what `build_training_batch` was given."""

    @property
    def results(self) -> Sequence[EpisodeResult]:
        """The rollouts that have a reward."""
        return self.group.results

    @property
    def records(self) -> Sequence[TrainingSample]:
        """The samples that the trainer gets; none without a run, where no tokens are known."""
        return self.group.samples


class Arena:
    """Override `setup` and `get_batch`; for another order of things, `main`.

    Example::

        class Reverse(Arena):
            def setup(self):
                self.add_episode("reverse", SingleTurnEpisode(rubric=Rubric([right])))

            def get_batch(self):
                words = random.sample(WORDS, 16)
                return [EpisodeRequest("reverse", {"prompt": f"Reverse: {word}", "word": word}) for word in words]
    """

    concurrency = 64
    """How many rollouts run at a time by default."""
    adapters: Mapping[str, str] = {}
    """The run's adapters by role; other roles have the first."""

    def __init__(
        self,
        client: InferenceClient | None = None,
        *,
        credit: Credit | None = None,
        timeout_s: float = 60.0,
        seed: int = 0,
    ) -> None:
        """`client` answers all roles, for looking at rollouts without a run. `credit`: None for what the run's
        `advantage` says; without a run, each reward against the mean of all. `timeout_s` and `seed` are those of
        rollouts without a run."""
        self._client, self._seed, self._credit = client, seed, credit
        self.roles: dict[str, Role] = {}
        self.episodes: dict[str, Episode] = {}
        self.stores: dict[str, ArtifactStore] = {}
        """Stores by name, to be filled and drawn from in `get_batch`; episodes have them as `ctx.stores`."""
        self._seeds: dict[str, list[Any]] = {}
        self._run: RolloutSink | None = None
        """The sink of the run that it works in."""
        self._number: int | None = None
        """The number, as a group, of the step that goes on."""
        self._version = 0
        """The version that samples it."""
        self._num_requested = 0
        self._open: dict[str, EpisodeResult] = {}
        """Rollouts of the step that no batch has taken."""
        self._requests: dict[str, EpisodeRequest] = {}
        """Requests by the id of their rollout."""
        self.setup()
        sizes = {name: store.max_size for name, store in self.stores.items()}
        self._pool = LocalPool(self.episodes, sizes, timeout_s=timeout_s)
        self._fill_stores()

    # --- what it is made of ---

    def setup(self) -> None:
        """Adds roles, episodes and stores."""

    def add_role(self, role: Role) -> None:
        """A role that episodes may name by its id alone; `role` says how it is sampled. Raises ValueError for a second
        one of that id."""
        if role.id in self.roles:
            raise ValueError(f"there are two roles {role.id}; rename one")
        self.roles[role.id] = role

    def add_episode(self, episode_type: str, episode: Episode) -> None:
        """An episode by name, for requests and for `ctx.spawn`. Its roles are those that were added, where their ids
        are the same. Raises ValueError for one without a rubric, and for a second one of that name."""
        if episode_type in self.episodes or not isinstance(episode, Episode) or not hasattr(episode, "rubric"):
            raise ValueError(
                f"episode {episode_type!r} is {episode!r}, expected a new name and an Episode object with a rubric"
            )
        episode.roles = [self.roles.get(role.id, role) for role in episode.roles]
        self.episodes[episode_type] = episode

    def add_store(self, name: str, artifacts: Iterable[Any] = (), *, max_size: int = 10_000) -> ArtifactStore:
        """A store of JSON values, which a run keeps. `artifacts` are put into it where it is empty."""
        self._seeds[name] = list(artifacts)
        self.stores[name] = ArtifactStore(name, max_size=max_size, seed=self._seed)
        return self.stores[name]

    def _fill_stores(self) -> None:
        for name, store in self.stores.items():
            for artifact in () if store.all() else self._seeds[name]:
                store.add(artifact)

    def get_batch(self) -> Sequence[EpisodeRequest] | Awaitable[Sequence[EpisodeRequest]]:
        """The next step's rollouts, plain or async. It may look at `policy_version`, draw from `stores`, and roll out
        others first by `generate_rollouts`."""
        raise ValueError(f"{type(self).__name__} has no get_batch; override it, or main")

    def group_of(self, request: EpisodeRequest) -> Any:
        """Rollouts of one group, by what this returns, are compared with each other; all of a step, where not
        overridden. For example: ``return request.artifact["prompt"]``"""
        return None

    # --- what it does ---

    @property
    def policy_version(self) -> int:
        """The version that samples this step, before it begins the newest one; 0 without a run."""
        newest = 0 if self._run is None else self._run.scheduler.live or 0
        return newest if self._number is None else self._version

    async def generate_rollouts(
        self, requests: Sequence[EpisodeRequest], concurrency: int | None = None
    ) -> list[EpisodeResult]:
        """Rolls out all requests, `concurrency` at a time. Returns their results in order, scored or with a `failure`.
        In a run it waits first until a step may begin. Raises what servers raise."""
        slots, roll_out = asyncio.Semaphore(concurrency or self.concurrency), self._look
        if self._run is not None:
            roll_out, _ = self._roll_out, await self._begin_step(self._run)
        first, self._num_requested = self._num_requested, self._num_requested + len(requests)
        if self._run is not None:
            self._run.fates.issued(self._group(self._run, 0, first=first, num=len(requests)))
            await self._run.fates.written()

        async def one(number: int, request: EpisodeRequest) -> EpisodeResult:
            async with slots:
                return await roll_out(number, request)

        self._requests |= {self._name(number): request for number, request in enumerate(requests, first)}
        results = await together([one(number, request) for number, request in enumerate(requests, first)])
        if self._run is None:
            return results
        self._open |= {one.id: one for one in self._run.take(results)}
        return results

    async def build_training_batch(
        self, results: Sequence[EpisodeResult], meta: Mapping[str, Any] | None = None
    ) -> TrainingBatch:
        """Credit and samples of those of these rollouts that have a reward; a role's rewards in them are compared with
        each other. In a run, with what filters, hints and teachers make of them."""
        run = self._run
        usable = [result for result in results if result.failure is None and (not run or result.id in self._open)]
        credit = group_credit if run is None else make_credit(run.settings)
        if self._credit is not None:
            credit = partial(checked_credit, self._credit, "the arena's credit")
        credit = partial(self._credit_by_group, credit)
        if run is None:
            made = ScoredGroup(usable)
            add_samples(made, credit, number="0")
        else:
            made = await run.finish(usable, credit, group=str(await self._begin_step(run)))
        rewards = [result.reward for result in usable]
        known = {
            "policy_version": self.policy_version,
            "num_rollouts": len(usable),
            "num_failed": len(results) - len(usable),
            "reward": sum(rewards) / len(rewards) if rewards else None,
        }
        if run is not None:
            known["step"] = run.scheduler.shipped + 1
        return TrainingBatch(group=made, meta=known | dict(meta or {}))

    def _credit_by_group(self, credit: Credit, results: Sequence[EpisodeResult]) -> Mapping[StepKey, float]:
        groups: defaultdict[str, list[EpisodeResult]] = defaultdict(list)
        for result in results:
            groups[repr(self.group_of(self._requests[result.id]))].append(result)
        return {step: value for members in groups.values() for step, value in credit(members).items()}

    async def train(self, batch: TrainingBatch) -> None:
        """Hands a batch over, and ends the step: it is packed and sent beside what comes next. A batch without a sample
        is not sent; the next one takes its place. Raises ValueError without a run."""
        if (run := self._run) is None or self._number is None:
            raise ValueError("there is no run to train in; start one with orch.arena (`grpo docs arena`)")
        number, self._number, self._num_requested = self._number, None, 0
        taken = {*(result.id for result in batch.results), *batch.group.dropped}
        left = [one for name, one in self._open.items() if name not in taken]
        self._open, self._requests = {}, {}
        run.fates.dropped(left, "not_in_batch")
        run.complete(number, batch.group)

    async def step(self, concurrency: int | None = None) -> TrainingBatch:
        """One training step: `get_batch`, its rollouts, their batch, which is handed over in a run."""
        if self._run is not None:
            await self._begin_step(self._run)
        requests = self.get_batch()
        if inspect.isawaitable(requests):
            requests = await requests
        if not isinstance(requests, Sequence) or not all(isinstance(one, EpisodeRequest) for one in requests):
            raise UserError(f"get_batch of {type(self).__name__} returned {shown(requests)}, expected EpisodeRequests")
        if not requests:
            raise UserError(f"get_batch of {type(self).__name__} returned no requests, expected at least one")
        batch = await self.build_training_batch(await self.generate_rollouts(requests, concurrency))
        if self._run is not None:
            await self.train(batch)
        return batch

    async def run(self, num_steps: int | None = None, concurrency: int | None = None) -> AsyncIterator[TrainingBatch]:
        """The batches of `num_steps` steps (None: all that the run has left), each once it is handed over."""
        num_done = 0
        while not self.finished and (num_steps is None or num_done < num_steps):
            batch = await self.step(concurrency)
            num_done += bool(batch.records) or self._run is None
            yield batch

    async def main(self) -> None:
        """Runs the whole schedule, until the `max_steps` of a run are trained. Override it for one of your own."""
        async for _ in self.run():
            pass

    @property
    def finished(self) -> bool:
        """Whether all steps of the run have their batch; never without a run."""
        run = self._run
        if run is None:
            return False
        limit = run.settings.max_steps
        return limit is not None and run.scheduler.shipped + len(run.finished) >= limit

    # --- in a run ---

    async def work(self, run: RolloutSink) -> None:
        """Runs `main` in a run. Raises ValueError where it ends before all steps are trained."""
        self._run, settings = run, run.settings
        self._pool = LocalPool(
            self.episodes,
            self._pool.loaded.stores,
            timeout_s=settings.reward_timeout_s,
            record=partial(failure_rate(settings).record, ARENA),
        )
        run.engine.add_pool(ARENA, self._pool)
        if (stores := run.engine.stores) is not None:
            self.stores = {name: stores.of(ARENA, "train", name) for name in self.stores}
        self._fill_stores()
        await self.main()
        if not self.finished:
            raise ValueError(
                f"main of {type(self).__name__} ended after {run.scheduler.shipped + len(run.finished)} steps, and "
                f"max_steps is {settings.max_steps}; train as many, or lower max_steps"
            )

    def _name(self, number: int) -> str:
        return f"{self._number or 0}/{number}"

    async def _begin_step(self, run: RolloutSink) -> int:
        """Returns the step's number as a group. Waits until it may begin."""
        while self._number is None:
            self._number = run.scheduler.start()
            if self._number is None:
                await run.scheduler.changed.wait()
            else:
                self._version = run.scheduler.live or 0
        return self._number

    def _group(self, run: RolloutSink, index: int, *, first: int, num: int = 1) -> Group:
        return Group(
            task=Task(env=ARENA, split="train", index=index, messages=()),
            id=str(self._number),
            num=num,
            first=first,
            version=self._version,
            params=training_params(run.settings, self._version),
            adapters=RoleAdapters(names=run.settings.model.lora_adapters, of_roles=self.adapters),
        )

    async def _roll_out(self, number: int, request: EpisodeRequest) -> EpisodeResult:
        assert self._run is not None
        index = self._pool.ask(request.episode_type, request.artifact, request.meta)
        group = self._group(self._run, index, first=number)
        try:
            [result] = await self._run.engine.run_group(group)
        except PromptTooLong as error:
            [result] = group.failed("prompt_too_long", str(error))
        return result

    # --- without a run ---

    async def _look(self, number: int, request: EpisodeRequest) -> EpisodeResult:
        """Rolls out by the client."""
        if self._client is None:
            raise ValueError(
                "the arena has neither a run nor a client; give it one, as Arena(OpenAIClient.for_local())"
            )
        index = self._pool.ask(request.episode_type, request.artifact, request.meta)
        task = Task(env=ARENA, split="train", index=index, messages=())
        backend = ClientBackend(self._client, self.roles, self.stores)
        outcome = await self._pool.run(task, seed=self._seed + number, begin=lambda: backend)
        return result_of(outcome, backend.steps, name=self._name(number), task=task)


class ClientBackend(ScriptedBackend):
    """Answers all calls of a rollout by one client."""

    def __init__(self, client: InferenceClient, roles: Mapping[str, Role], stores: Mapping[str, ArtifactStore]) -> None:
        super().__init__({}, ())
        self._client, self._roles, self._stores = client, roles, dict(stores)
        self.steps: dict[int, dict[int, Step]] = {}
        """Steps by rollout of the tree and by call."""

    async def answer(self, call: Sample | Ask, messages: list[dict[str, Any]]) -> Sampled:
        role = self._roles.get(call.role) if isinstance(call, Sample) else None
        temperature = call.temperature if call.temperature is not None else role.temperature if role else None
        answer = await self._client.respond(
            messages,
            temperature=1.0 if temperature is None else temperature,
            max_tokens=call.max_tokens or (role.max_tokens if role else None),
        )
        if isinstance(call, Sample):
            logprobs = np.array([logprob for _, logprob in answer.tokens], np.float32)
            self.steps.setdefault(call.rollout, {})[call.call] = Step(
                role=call.role,
                text=answer.text,
                messages=tuple(messages),
                completion=Choice(
                    token_ids=np.array(answer.token_ids, np.int32), logprobs=logprobs, finish_reason="stop"
                ),
                version=answer.version or 0,
            )
        return Sampled(
            text=answer.text,
            finish_reason="stop",
            num_tokens=len(answer.tokens),
            tokens=list(answer.tokens),
        )

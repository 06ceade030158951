"""Episodes in their own process, as the orchestrator plays them: tokens, credit, blame, and what a whole run keeps."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import pytest_asyncio
from orchestrator.episodes.credit import GroupCredit
from orchestrator.episodes.hosted import HostedEpisodes, Rollers, open_stores
from orchestrator.episodes.tree import FailedRollout, GenerateResult
from orchestrator.episodes.types import Completion, Failure, SamplingParams, Task
from orchestrator.workers.hosting import Answerer, EpisodeHost, EpisodeProcess
from orchestrator.workers.links import OwnProcess
from orchestrator.workers.wire import Called, Loaded, Played, PlayedStep, RoleInfo

from orchestrator.client import Refused
from orchestrator.episodes.policy import Backends, PromptTooLong
from orchestrator.episodes.roles import SHARED_ADAPTER, RoleAdapters
from orchestrator.episodes.templates import Templates
from orchestrator.ledger import Ledger
from orchestrator.loop import orchestrate
from orchestrator.renderer import ChatRenderer
from orchestrator.samples import training_samples
from orchestrator.workers.process import EnvironmentProcess
from tests.orchestrator.fakes import END_OF_TURN, MODEL, FakeServer, FakeTrainer, settings_for

SOURCE = '''
import asyncio, os, time
from grpo import Environment, Episode, MultiTurnEpisode, Role, Rubric, SingleTurnEpisode

def count(completion, state):
    return float(sum(len(reply.text) for reply in state.trajectory))

class Chat(MultiTurnEpisode, Environment):
    """Three turns; the reward is the number of letters of all answers."""
    rubric = Rubric([count])
    def __init__(self, max_turns=3):
        super().__init__(max_turns=max_turns)
    def dataset(self, split):
        return [{"prompt": f"{split} {number}"} for number in range(8)]
    stores = {"turns": 10}
    async def respond(self, state, arena):
        await arena.stores["turns"].add({"turn": state.turn})
        return f"go on {state.turn}"
    def extras(self, state):
        return {"pid": os.getpid()}

class Misbehaves(Chat):
    """Does what the first answer says."""
    async def respond(self, state, arena):
        word = state.trajectory[0].text
        if word == "raise":
            raise RuntimeError("boo")
        if word == "block":
            while True:
                time.sleep(0.01)
        if word == "wait":
            await asyncio.sleep(1000)
        if word == "exit":
            os._exit(3)
        if word == "thread":
            await asyncio.to_thread(lambda: (time.sleep(0.1), os._exit(3)))
        if word == "mark":
            state.mark_error("kind", "key", 17)
        if word == "cold":
            await arena.ask([{"role": "user", "content": "advice"}], temperature=-1)
        if word == "pause":
            time.sleep(0.6)
        if word == "poll":
            while True:
                try:
                    await arena.stores["turns"].sample(1)
                except Exception:
                    pass
        if word == "nan":
            state.data["nan"] = True
            return None
        if word == "hog":
            bytearray(1 << 34)
        if word == "keep":
            ids = [await arena.stores["kept"].add({"n": state.turn})]
            assert await arena.stores["kept"].size() >= 1
            assert (await arena.stores["kept"].sample(1))[0][1].keys() == {"n"}
        return await super().respond(state, arena)
    stores = {"kept": 10, "turns": 10}
    rubric = Rubric([lambda completion, state: float("nan") if state.data.get("nan") else 1.0])

class Silent(Misbehaves):
    """Ends where the first answer would be, every other time."""
    async def rollout(self, arena, state):
        if arena.rng.random() < 0.5:
            return
        await super().rollout(arena, state)

class Solve(SingleTurnEpisode):
    roles = (Role(id="solver", temperature=0.5),)
    rubric = Rubric([lambda completion, example: float(completion == "1")])

class Propose(Episode, Environment):
    roles = (Role(id="proposer"),)
    episodes = {"solve": Solve()}
    rubric = Rubric([lambda extras: extras["pass_rate"]])
    def dataset(self, split):
        return [{"prompt": "propose"}]
    async def rollout(self, arena, state):
        reply = await arena.call("proposer", [{"role": "user", "content": state.example["prompt"]}])
        advice = await arena.ask([{"role": "user", "content": "advice"}])
        state.data["advice"] = advice
        await arena.spawn("solve", [{"prompt": reply.text}] * 2)
    def extras(self, state):
        solved = [child.reward for child in state.children]
        return {"pass_rate": sum(solved) / len(solved), "advice": state.data["advice"]}
'''


class Parrot:
    """Answers what a function of the prompt's text says, a token a letter; to a seed that it knows, the same again."""

    def __init__(self, answer: Callable[[str], str]) -> None:
        self.answer = answer
        self.context_len = 512
        self._given: dict[int | None, str] = {}
        self.asked: list[tuple[list[int], SamplingParams, int | None, int | None]] = []

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        params: SamplingParams,
        num: int,
        version: int | None,
        seed: int | None,
    ) -> list[Completion]:
        if params.temperature < 0:
            raise Refused(400, "bad_request", f"temperature is {params.temperature}, expected 0 or more")
        self.asked.append((list(prompt_token_ids), params, version, seed))
        if seed not in self._given:
            self._given[seed] = self.answer(bytes(i for i in prompt_token_ids if i < 256).decode())
        text = self._given[seed]
        ids = [*text.encode(), END_OF_TURN][: params.max_tokens]
        logprobs = [-(position + 1) / 16 for position in range(len(ids))]
        return [Completion(token_ids=ids, logprobs=logprobs, finish_reason="stop")] * num


class World:
    """An environment's host, and what plays with it."""

    def __init__(self, folder: Path) -> None:
        (folder / "envs.py").write_text(SOURCE)
        self.folder = folder
        self.renderer = ChatRenderer.of_model(MODEL)
        self.outcomes: list[Failure | None] = []
        self.host: EpisodeHost | None = None

    async def start(self, name: str, *, timeout_s: float = 20.0, **args: Any) -> None:
        told: dict[str, Any] = {"label": "e", "env_id": f"{self.folder / 'envs.py'}:{name}", "args": args}
        first = EnvironmentProcess(**told, timeout_s=20.0)
        self.prompts = await first.prompts("train")
        loaded = first.loaded
        await first.close()
        assert loaded is not None
        assert loaded.episodic
        make = partial(EpisodeProcess, **told, timeout_s=timeout_s, memory_bytes=4 << 30)
        self.host = EpisodeHost(make, loaded, record=lambda label, failure: self.outcomes.append(failure))

    async def group(
        self,
        answer: Callable[[str], str],
        num: int,
        *,
        index: int = 0,
        adapters: RoleAdapters = SHARED_ADAPTER,
    ) -> list[GenerateResult | FailedRollout]:
        assert self.host is not None
        self.policy = Parrot(answer) if not isinstance(answer, Parrot) else answer
        hosts = {"e": self.host}
        stores = open_stores(hosts, self.folder / "artifacts", seed=1, state=None)
        rollers = Rollers(hosts, self.renderer, seed=3, stores=stores)
        backends = Backends(policy=self.policy, renderer=self.renderer, scorer=None)  # type: ignore[arg-type]
        task = Task(env="e", split="train", index=index, messages=self.prompts[index])
        roller = rollers.of("e", SamplingParams(temperature=0.7, max_tokens=16), adapters=adapters)
        try:
            return await roller.generate(backends, task, group="5", num=num, version=4, seed=11)
        finally:
            rollers.close()


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> Any:
    world = World(tmp_path)
    yield world
    if world.host is not None:
        await world.host.close()


def failures(results: Sequence[GenerateResult | FailedRollout]) -> list[str]:
    return [result.failure.reason if isinstance(result, FailedRollout) else "" for result in results]


async def test_a_conversations_rows_hold_exactly_what_was_given_and_sampled(world: World) -> None:
    await world.start("Chat")
    lengths = iter(["a", "bb", "ccc", "dddd", "ee", "f"])
    results = await world.group(lambda prompt: next(lengths), 2)
    assert failures(results) == ["", ""]
    whole = [result for result in results if isinstance(result, GenerateResult)]
    samples = training_samples(whole, GroupCredit(), group="5")
    assert len(samples) == 2  # a row each: ChatML never rewrites
    by_prompt = {tuple(ids) for ids, *_ in world.policy.asked}
    for result, sample in zip(whole, samples, strict=True):
        [row] = result.rollout.rows
        assert [step.text for step in result.rollout.steps] == [
            bytes(row.row.token_ids[turn.begins : turn.ends - 1].tolist()).decode() for turn in row.row.turns
        ]
        for turn, step in zip(row.row.turns, result.rollout.steps, strict=True):
            assert tuple(row.row.token_ids[: turn.begins]) in by_prompt
            assert row.row.token_ids[turn.begins : turn.ends].tolist() == step.completion.token_ids
            logprobs = sample.inference_logprobs[turn.begins : turn.ends]
            assert logprobs == pytest.approx(step.completion.logprobs)
        sampled = sum(len(step.completion.token_ids) for step in result.rollout.steps)
        assert sample.loss_mask.sum() == sampled
        assert np.all(np.asarray(sample.advantages)[~sample.loss_mask] == 0)
        assert sample.policy_versions == ((4, len(sample.token_ids)),)
    rewards = [result.reward for result in whole]
    first = np.asarray(samples[0].advantages)[samples[0].loss_mask]
    assert first == pytest.approx(rewards[0] - sum(rewards) / 2)


async def test_each_call_has_a_seed_of_its_own_that_is_the_same_in_every_run(world: World) -> None:
    await world.start("Chat")
    await world.group(lambda prompt: "x", 3)
    first = sorted((ids, seed) for ids, _, _, seed in world.policy.asked)
    await world.group(lambda prompt: "x", 3)
    assert sorted((ids, seed) for ids, _, _, seed in world.policy.asked) == first
    assert len({seed for _, seed in first}) == 9


async def test_each_role_is_asked_of_its_adapter_and_trains_it_and_advice_is_the_first_ones(world: World) -> None:
    await world.start("Propose")
    adapters = RoleAdapters(names=("one", "two"), of_roles={"proposer": "two"})
    results = await world.group(lambda prompt: "q", 2, adapters=adapters)
    whole = [result for result in results if isinstance(result, GenerateResult)]
    asked = {(bytes(i for i in ids if i < 256).decode().split("\n")[1], p.adapter) for ids, p, *_ in world.policy.asked}
    assert asked == {("propose", "two"), ("advice", None), ("q", "one")}
    steps = {(step.role, step.adapter) for one in whole for rollout in one.all_rollouts() for step in rollout.steps}
    assert steps == {("proposer", 1), ("solver", 0)}
    samples = training_samples(whole, GroupCredit(), group="5")
    assert [sample.adapter for sample in samples] == [1, 0, 0] * 2


async def test_what_a_rollout_spawns_is_a_tree_with_credit_by_level_and_nobody_trains_on_advice(world: World) -> None:
    await world.start("Propose")
    answers = {"propose": "q", "q": iter("1101"), "advice": "be bold"}

    def answer(prompt: str) -> str:
        word = prompt.split("\n")[1]
        found = answers[word]
        return found if isinstance(found, str) else next(found)

    results = await world.group(answer, 2)
    whole = [result for result in results if isinstance(result, GenerateResult)]
    assert sorted(result.rewards["proposer"] for result in whole) == [0.5, 1.0]
    assert [[child.rollout.id for child in result.children] for result in whole] == [
        ["5/0.0", "5/0.1"],
        ["5/1.0", "5/1.1"],
    ]
    assert {result.extras["advice"] for result in whole} == {"be bold"}
    # Proposers: 1 and 0.5, mean 0.75. Solvers of the one: 1, 1; of the other: 0, 1, mean 0.5.
    samples = training_samples(whole, GroupCredit(), group="5")
    credits = sorted(round(float(np.max(np.abs(sample.advantages))), 4) for sample in samples)
    assert credits == [0, 0, 0.25, 0.25, 0.5, 0.5]
    assert {sample.rollout_id for sample in samples} == {"5/0", "5/1"}
    assert {version for _, params, version, _ in world.policy.asked if params.temperature == 0} == {None}
    temperatures = sorted(float(sample.temperatures[0]) for sample in samples)  # type: ignore[index]
    assert temperatures == pytest.approx([0.5] * 4 + [0.7] * 2)


@pytest.mark.parametrize(
    ("word", "reason", "innocents_again"),
    [
        ("raise", "env_error", 0),
        ("nan", "reward_not_finite", 0),
        ("wait", "env_timeout", 0),
        ("block", "env_timeout", 3),
        ("exit", "env_crashed", 3),
        ("thread", "env_crashed", 9),
        ("mark", "env_error", 0),
        ("cold", "env_error", 0),
        ("poll", "env_error", 0),
        ("hog", "env_memory", 3),
    ],
)
async def test_code_that_misbehaves_costs_its_own_rollout_alone(
    world: World, monkeypatch: pytest.MonkeyPatch, word: str, reason: str, innocents_again: int
) -> None:
    await world.start("Misbehaves", timeout_s=3.0)
    guilty: list[str] = []

    def answer(prompt: str) -> str:
        if "go on" not in prompt and not guilty:
            guilty.append(word)
            return word
        return "fine"

    monkeypatch.setattr("orchestrator.episodes.hosted.MAX_CALLS", 50)
    results = await world.group(answer, 4)
    assert sorted(failures(results)) == ["", "", "", reason]
    assert world.host is not None
    assert world.host.num_restarted <= innocents_again
    assert len(world.outcomes) == 4


async def test_a_stuck_process_that_could_not_be_killed_is_killed_at_the_next_look(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.start("Misbehaves", timeout_s=3.0)
    kills: list[bool] = []

    async def kill(link: OwnProcess, real: Any = OwnProcess.kill) -> None:
        kills.append(True)
        if len(kills) == 1:
            raise OSError("not now")
        await real(link)

    monkeypatch.setattr(OwnProcess, "kill", kill)
    async with asyncio.timeout(60):
        assert failures(await world.group(lambda prompt: "block", 1)) == ["env_timeout"]
    assert len(kills) == 2


@pytest.mark.parametrize(
    ("steps", "children"),
    [([-1], []), ([0, 0], []), ([1], [[0]])],
    ids=["one of its own", "one twice", "one of a conversation that is another's"],
)
async def test_a_trajectory_that_user_code_has_changed_costs_the_rollout(
    steps: list[int], children: list[list[int]]
) -> None:
    def told(calls: list[int]) -> Played:
        return Played(steps=[PlayedStep(call=call) for call in calls], rewards={}, accuracy=0.0, metrics={})

    class Host:
        loaded = Loaded(episodic=True, roles=[RoleInfo(id="policy")])

        async def play(self, task: Task, *, begin: Callable[[], Answerer], **_: Any) -> Played:
            answer = begin()
            for call in range(len(children) + 1):
                message = {"role": "user", "content": "hi"}
                await answer(Called(rollout=0, call=call, role="policy", conversation=0, messages=[message]))
            whole = told(steps)
            whole.children = [told(calls) for calls in children]
            return whole

        def record(self, failure: Failure | None) -> None: ...

    renderer = ChatRenderer.of_model(MODEL)
    roller = HostedEpisodes(cast(Any, Host()), SamplingParams(temperature=1.0, max_tokens=8), Templates(renderer))
    backends = Backends(policy=Parrot(lambda prompt: "x"), renderer=renderer, scorer=None)  # type: ignore[arg-type]
    task = Task(env="e", split="train", index=0, messages=({"role": "user", "content": "hi"},))
    [failed] = await roller.generate(backends, task, group="5", num=1, version=0)
    assert isinstance(failed, FailedRollout)
    assert failed.failure.reason == "env_error"
    assert "leave the replies in state.trajectory as arena.call put them there" in failed.failure.message


def test_a_store_has_a_name_of_its_owners_choice_or_is_refused_under_it(tmp_path: Path) -> None:
    def opened(name: str) -> list[str]:
        host = SimpleNamespace(loaded=Loaded(episodic=True, stores={name: 10}))
        stores = open_stores(cast(Any, {"my-long-environment-with-a-name": host}), tmp_path, seed=0, state=None)
        assert stores is not None
        stores.close()
        return [store.rpartition("_")[2] for store in stores]

    assert opened("q" * 64) == ["q" * 64] * 2
    for name in ("q" * 65, "to/day", ""):
        with pytest.raises(
            ValueError, match=f"environment my-long-.* calls a store '{name}', expected up to 64 letters"
        ):
            opened(name)


def test_rollouts_that_are_begun_again_are_counted_once() -> None:
    host = SimpleNamespace(num_restarted=3)
    rollers = Rollers(cast(Any, {"e": host}), ChatRenderer.of_model(MODEL), seed=0)
    assert (rollers.newly_restarted(), rollers.newly_restarted()) == (3, 0)
    host.num_restarted = 5
    assert rollers.newly_restarted() == 2


async def test_those_who_crash_cost_nobody_else_however_many_they_are(world: World) -> None:
    await world.start("Misbehaves")
    words = iter(["exit"] * 5)
    results = await world.group(lambda prompt: "fine" if "go on" in prompt else next(words, "fine"), 20)
    assert Counter(failures(results)) == {"": 15, "env_crashed": 5}


async def test_the_time_of_one_rollouts_code_is_not_put_down_to_the_others(world: World) -> None:
    """Code that takes 0.6 s without letting go, six times in a row, within a limit of 3 s each."""
    await world.start("Misbehaves", timeout_s=3.0, max_turns=2)
    words = iter(["pause"] * 3)
    results = await world.group(lambda prompt: "fine" if "go on" in prompt else next(words, "fine"), 12)
    assert failures(results) == [""] * 12


async def test_an_episode_that_ends_without_an_answer_is_a_failure_and_is_counted(world: World) -> None:
    await world.start("Silent")
    reasons = Counter(failures(await world.group(lambda prompt: "fine", 16)))
    assert set(reasons) == {"", "env_error"}
    assert sum(outcome is not None for outcome in world.outcomes) == reasons["env_error"]


async def test_artifacts_are_kept_in_the_runs_folder(world: World) -> None:
    await world.start("Misbehaves")
    results = await world.group(lambda prompt: "keep", 2)
    assert failures(results) == ["", ""]
    [file] = (world.folder / "artifacts").glob("e-*_kept.jsonl")
    assert sum('"n"' in line for line in file.read_text().splitlines()) >= 1


async def test_a_first_prompt_without_room_is_too_long_and_a_later_one_ends_the_rollout(world: World) -> None:
    await world.start("Chat", max_turns=50)
    policy = Parrot(lambda prompt: "word")
    policy.context_len = 120
    results = await world.group(policy, 2)  # type: ignore[arg-type]
    assert [result.rollout.truncated for result in results] == [True, True]
    policy.context_len = 10
    with pytest.raises(PromptTooLong, match="leaves no room for an answer in 10 tokens"):
        await world.group(policy, 2)  # type: ignore[arg-type]


async def test_a_cancelled_group_leaves_nothing_behind(world: World) -> None:
    await world.start("Misbehaves")
    rolling = asyncio.create_task(world.group(lambda prompt: "wait", 4))
    assert world.host is not None
    async with asyncio.timeout(60):
        while world.host.num_running < 4 or len(world.policy.asked) < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    rolling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rolling
    assert world.host.num_running == 0
    assert failures(await world.group(lambda prompt: "fine", 4)) == [""] * 4


async def test_a_whole_run_of_episodes_in_two_processes(tmp_path: Path) -> None:
    (tmp_path / "envs.py").write_text(SOURCE)
    server = await FakeServer(lambda prompt, version: "ab"[: 1 + prompt.count("go on 1")]).start()
    output_dir = tmp_path / "run"
    trainer = FakeTrainer(output_dir)
    trainer.start()
    settings = settings_for(
        output_dir,
        server,
        env=[{"id": f"{tmp_path / 'envs.py'}:Chat", "name": "chat", "num_workers": 2}],
        batch_size=8,
        rollouts_per_example=4,
        max_steps=3,
        conversations={"interval": 1},
        eval={"num_examples": 2},
    )
    try:
        summary = await orchestrate(settings)
    finally:
        await server.stop()
    assert (summary.rollouts_trained, summary.rollouts_dropped) == (24, {})
    lines = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["eval/measure/count/chat"] == 5
    trained = [line for line in lines if "reward/mean" in line]
    assert [line["rollout/num_turns"] for line in trained] == [3, 3, 3]
    assert [line["rollout/num_rows"] for line in trained] == [1, 1, 1]
    [first, *_] = (output_dir / "conversations" / "step_000001.jsonl").read_text().splitlines()
    told = json.loads(first)
    ledger = Ledger(output_dir / "ledger.sqlite")
    shipped = ledger.state_after(3)
    ledger.close()
    assert shipped is not None
    kept = {name: state["num_operations"] for name, state in shipped.state["artifacts"].items()}
    assert sorted(name.rpartition("_")[2] for name in kept) == ["turns", "turns"]
    [file] = (output_dir / "artifacts").glob("chat-*_turns.jsonl")
    assert kept[file.stem] >= 2
    lines = (output_dir / "conversations" / "step_000001.jsonl").read_text().splitlines()
    assert len({json.loads(line)["extras"]["pid"] for line in lines}) == 2
    assert [step["answer"] for step in told["steps"]] == ["a", "ab", "ab"]
    assert [step["messages"][-1]["content"] for step in told["steps"][1:]] == ["go on 1", "go on 2"]

"""The rollout engine: tokens, credit, failures, and what a whole run keeps."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest
import pytest_asyncio
from grpo.orchestrator.advantage import group_credit
from grpo.orchestrator.inference.client import JOINED_TOKENS, RequestRefused, TimedOut
from grpo.orchestrator.ledger import Ledger
from grpo.orchestrator.renderer import ChatRenderer
from grpo.orchestrator.rollouts import engine
from grpo.orchestrator.rollouts.conversation import Conversation
from grpo.orchestrator.rollouts.engine import PromptTooLong, RolloutEngine
from grpo.orchestrator.rollouts.records import EpisodeResult, Failure, Group, SamplingParams, Task
from grpo.orchestrator.rollouts.roles import Role
from grpo.orchestrator.rollouts.stores import ArtifactStores
from grpo.orchestrator.samples import training_samples
from grpo.orchestrator.workers.pool import WorkerPool
from grpo.orchestrator.workers.protocol import EnvironmentInfo, Mark, Outcome, Sample, Withdraw, decode_from_worker
from grpo.orchestrator.workers.session import Answerer
from grpo.transport.http import Choice
from grpo.transport.traces import trace_path
from msgspec.structs import replace

from tests.orchestrator.chat_templates import CHATML, renderer
from tests.orchestrator.fakes import END_OF_TURN, MODEL, FakeServer, until
from tests.orchestrator.running import run

SOURCE = '''
import asyncio, os, time
from grpo import Environment, Episode, MultiTurnEpisode, Parser, Role, Rubric, SingleTurnEpisode

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
    async def respond(self, state, ctx):
        artifact_id = await ctx.stores["turns"].add({"turn": state.turn})
        assert await ctx.stores["turns"].set_weight(artifact_id, 2.0)
        return f"go on {state.turn}"
    def extras(self, state):
        return {"pid": os.getpid()}

def much(state):
    return state.data.get("more", 0.0)

class Misbehaves(Chat):
    """Does what the first answer says."""
    rubric = Rubric([count, much])
    async def respond(self, state, ctx):
        word = state.trajectory[0].text
        if word == "mark":
            state.mark_error("kind", "key", 17)
        if word == "cold":
            await ctx.ask([{"role": "user", "content": "advice"}], temperature=-1)
        if word == "late" and state.turn == 1:
            async with ctx.delayed(timeout_s=60):
                await asyncio.sleep(0)
        if word == "hot":
            await ctx.sample("policy", [{"role": "user", "content": "x"}], temperature=1000)
        if word == "long":
            return "word " * 1_000_000
        if word == "draws":
            await ctx.stores["turns"].sample(10**7)
        if word == "reward":
            state.data["more"] = 1e40
        if word == "poll":
            while True:
                try:
                    await ctx.stores["turns"].sample(1)
                except Exception:
                    pass
        return await super().respond(state, ctx)

class ExitsOnce(Chat):
    """Ends its worker after the second answer, once."""
    async def respond(self, state, ctx):
        if state.turn == 2 and not os.path.exists(__file__ + ".once"):
            open(__file__ + ".once", "w").close()
            os._exit(3)
        return f"go on {state.turn}"

class Once(Environment):
    rubric = Rubric([lambda completion, example: float(completion == "a")])
    def dataset(self, split):
        return [{"prompt": "hi"}]

async def does_what_it_says(completion, state, ctx):
    if completion == "ask":
        return float(await ctx.ask([{"role": "user", "content": "a judge"}], model="policy") == "yes")
    if completion == "sample":
        await ctx.sample("policy", [{"role": "user", "content": "more"}])
    if completion == "mark":
        state.mark_error("kind", "key")
    if completion == "raise":
        raise ValueError("no")
    if completion == "inf":
        return float("inf")
    if completion == "clear":
        state.trajectory.clear()
    if completion == "exit":
        os._exit(3)
    if completion == "wait":
        async with ctx.delayed(timeout_s=60):
            while not os.path.exists(__file__ + ".delayed"):
                await asyncio.sleep(0.01)
    return 1.0

class Thinks(Environment):
    rubric = Rubric([lambda completion, parsed: float((completion, parsed.thinking) == ("", "a"))], parser=Parser())
    def dataset(self, split):
        return [{"prompt": "hi"}]

class ThinksOften(Chat):
    rubric = Thinks.rubric

class Judged(Environment):
    """Its reward does what the answer says."""
    rubric = Rubric([does_what_it_says])
    def dataset(self, split):
        return [{"prompt": "hi"}]

class Agent(Episode, Environment):
    """An agent with OpenAI's client: a chat of two turns, two answers to one question, and raw text that goes on."""
    rubric = Rubric([lambda extras: float(extras["logprobs"] == [-1 / 16, -2 / 16])])
    def dataset(self, split):
        return [{"prompt": "hi"}]
    async def rollout(self, ctx, state):
        from openai import AsyncOpenAI
        from grpo import endpoint_of
        async with endpoint_of(ctx) as at, AsyncOpenAI(base_url=at.base_url, api_key=at.api_key) as client:
            chat, messages = client.chat.completions, [{"role": "user", "content": "one"}]
            made = await chat.create(model="policy", messages=messages, logprobs=True, temperature=0.5)
            state.data["logprobs"] = [token.logprob for token in made.choices[0].logprobs.content]
            messages += [made.choices[0].message.model_dump(), {"role": "user", "content": "two"}]
            await chat.create(model="policy", messages=messages)
            await chat.create(model="policy", messages=[{"role": "user", "content": "three"}], n=2)
            text = "<|im_start|>raw "
            text += (await client.completions.create(model="policy", prompt=text)).choices[0].text
            await client.completions.create(model="policy", prompt=text + "<|im_end|>more")
    def extras(self, state):
        return {"logprobs": state.data["logprobs"]}

class Impatient(Episode, Once):
    """Gives up its first request once the policy was asked, and asks again."""
    async def rollout(self, ctx, state):
        from openai import AsyncOpenAI
        from grpo import endpoint_of
        async with endpoint_of(ctx) as at, AsyncOpenAI(base_url=at.base_url, api_key=at.api_key) as client:
            asked = {"model": "policy", "messages": [{"role": "user", "content": "one"}]}
            first = asyncio.create_task(client.chat.completions.create(**asked))
            while not os.path.exists(__file__ + ".asked"):
                await asyncio.sleep(0.01)
            first.cancel()
            while at.answering:
                await asyncio.sleep(0.01)
            open(__file__ + ".gone", "w").close()
            await client.chat.completions.create(**asked)

class Solve(SingleTurnEpisode):
    roles = (Role(id="solver", temperature=0.5),)
    rubric = Rubric([lambda completion, example: float(completion == "1")])

class Propose(Episode, Environment):
    roles = (Role(id="proposer"),)
    episodes = {"solve": Solve()}
    rubric = Rubric([lambda extras: extras["pass_rate"]])
    def dataset(self, split):
        return [{"prompt": "propose"}]
    async def rollout(self, ctx, state):
        reply = await ctx.sample("proposer", [{"role": "user", "content": state.example["prompt"]}])
        advice = await ctx.ask([{"role": "user", "content": "advice"}])
        state.data["advice"] = advice
        await ctx.spawn("solve", [{"prompt": reply.text}] * 2)
    def extras(self, state):
        solved = [child.reward for child in state.children]
        return {"pass_rate": sum(solved) / len(solved), "advice": state.data["advice"]}
'''


class Parrot:
    """Answers what a function of the prompt's text says, a token a letter; to a seed that it knows, the same again."""

    def __init__(self, answer: Callable[[str], str], words: Sequence[str] = ()) -> None:
        """`words`: the answers to a request for several."""
        self.answer, self.words = answer, words
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
    ) -> list[Choice]:
        prompt = bytes(i for i in prompt_token_ids if i < 256).decode()
        if "refused" in prompt:
            raise RequestRefused(400, "bad_request", "cannot be sampled")
        self.asked.append((list(prompt_token_ids), params, version, seed))
        if num > 1 and self.words:
            return [self._choice(word, params) for word in self.words]
        if seed not in self._given:
            self._given[seed] = self.answer(prompt)
        return [self._choice(self._given[seed], params)] * num

    def _choice(self, text: str, params: SamplingParams) -> Choice:
        ids = [*text.encode(), END_OF_TURN][: params.max_tokens]
        logprobs = [-(position + 1) / 16 for position in range(len(ids))]
        return Choice(token_ids=ids, logprobs=logprobs, finish_reason="stop")


class World:
    """An environment's workers, and the engine over them."""

    def __init__(self, folder: Path) -> None:
        (folder / "envs.py").write_text(SOURCE)
        self.folder = folder
        self.renderer = ChatRenderer.of_model(MODEL)
        self.outcomes: list[Failure | None] = []
        self.pool: WorkerPool | None = None

    async def start(self, name: str, **args: Any) -> None:
        told: dict[str, Any] = {"label": "e", "args": args, "timeout_s": 60.0, "record": self.outcomes.append}
        self.pool = WorkerPool(env_id=f"{self.folder / 'envs.py'}:{name}", **told)
        self.prompts = await self.pool.prompts("train")

    async def group(
        self, answer: Callable[[str], str] | Parrot, num: int, *, score: bool = True, **callbacks: Callable[[], None]
    ) -> list[EpisodeResult]:
        assert self.pool is not None
        self.policy = Parrot(answer) if not isinstance(answer, Parrot) else answer
        task = Task(env="e", split="train", index=0, messages=self.prompts[0])
        params = SamplingParams(temperature=0.7, max_tokens=16)
        group = Group(task=task, id="5", num=num, version=4, params=params, seed=11, score=score)
        with closing(Ledger(self.folder / "ledger.sqlite")) as ledger:
            stores = ArtifactStores(ledger, seed=1)
            given: dict[str, Any] = {"context_len": self.policy.context_len, "seed": 3, "stores": stores}
            self.engine = RolloutEngine({"e": self.pool}, cast(Any, self.policy), self.renderer, **given)
            return await self.engine.run_group(group, **callbacks)


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> Any:
    world = World(tmp_path)
    yield world
    if world.pool is not None:
        await world.pool.close()


def failures(results: Sequence[EpisodeResult]) -> list[str]:
    return ["" if result.failure is None else result.failure.reason for result in results]


def bytes_held(result: EpisodeResult) -> int:
    """Bytes of all arrays of tokens that a rollout holds."""
    completions = [step.completion for step in result.steps]
    arrays = [array for one in completions for array in (one.token_ids, one.logprobs)]
    arrays += [array for row in result.rows for array in (row.token_ids, row.sampled, row.logprobs, row.temperatures)]
    memory = {}
    for array in arrays:
        while isinstance(array.base, np.ndarray):
            array = array.base
        memory[id(array)] = array.nbytes
    return sum(memory.values())


async def test_single_answers_are_one_request_and_episodes_with_a_row_each(world: World) -> None:
    await world.start("Once")
    results = await world.group(lambda prompt: "a", 3)
    [(prompt, params, version, seed)] = world.policy.asked
    assert (params.max_tokens, version, seed) == (16, 4, 11)
    assert [(one.id, one.reward, one.metrics) for one in results] == [
        (f"5/{n}", 1.0, {"<lambda>": 1.0}) for n in range(3)
    ]
    [row] = results[0].rows
    assert row.token_ids.tolist() == [*prompt, ord("a"), END_OF_TURN]
    assert row.sampled.sum() == 2
    assert row.logprobs[-2:].tolist() == [-1 / 16, -2 / 16]
    assert row.versions == ((4, len(row.token_ids)),)
    [turn] = row.turns
    assert 0 < turn.opens < turn.begins == len(prompt)
    assert bytes_held(results[0]) <= 14 * len(row.token_ids)
    unscored = await world.group(lambda prompt: "a", 2, score=False)
    assert [one.reward for one in unscored] == [0.0, 0.0]
    assert [len(one.rows) for one in unscored] == [1, 1]


async def test_long_answers_are_requests_of_their_own_and_scored_as_they_come(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "LEAST_APART", 16)
    monkeypatch.setattr(engine, "MANY_TIMES", 0)
    sampled: list[int] = []

    class OneIsLate(Parrot):
        is_crowded = False

        async def generate(self, *args: Any, seed: int | None, **more: Any) -> list[Choice]:
            if seed == 12:
                raise TimedOut("its server is slow")
            if seed == 13:
                await until(lambda: world.outcomes)
                assert not sampled
            return await super().generate(*args, seed=seed, **more)

    await world.start("Once")
    results = await world.group(OneIsLate(lambda prompt: "a"), 3, sampled=lambda: sampled.append(1))
    assert [(one.id, one.reward) for one in results] == [("5/0", 1.0), ("5/1", 0.0), ("5/2", 1.0)]
    assert failures(results) == ["", "server_timeout", ""]
    assert ([seed for *_, seed in world.policy.asked], sampled) == ([11, 13], [1])


SINGLE = {"fine": "", "ask": "", "sample": "", "mark": "", "raise": "env_error", "inf": "reward_not_finite"}
SINGLE |= {"clear": "env_error", "exit": "env_crashed"}


async def test_each_answer_of_a_group_is_scored_for_itself_and_its_reward_may_call_models(world: World) -> None:
    await world.start("Judged")
    results = await world.group(Parrot(lambda prompt: "yes", words=[*SINGLE]), len(SINGLE))
    assert dict(zip(SINGLE, failures(results), strict=True)) == SINGLE
    assert world.outcomes == [result.failure for result in results]
    by_word = dict(zip(SINGLE, results, strict=True))
    assert [by_word[word].reward for word in ("fine", "ask", "sample", "mark")] == [1.0] * 4
    assert [(len(result.steps), len(result.rows)) for result in results[:4]] == [(1, 1), (1, 1), (2, 2), (1, 1)]
    assert [step.error is not None for result in results[:4] for step in result.steps] == [False] * 4 + [True]
    assert [step.text for step in by_word["sample"].steps] == ["sample", "yes"]


async def test_a_group_is_delayed_once_all_of_it_is_over_but_those_that_wait_for_rewards(world: World) -> None:
    await world.start("Judged")
    delayed: list[int] = []

    def go_on() -> None:
        delayed.append(1)
        (world.folder / "envs.py.delayed").touch()

    words = ["wait", "ask", "exit", "fine"]  # one ends the worker, and is over only when it has done so again
    results = await world.group(Parrot(lambda prompt: "", words=words), 4, delayed=go_on)
    assert failures(results) == ["", "", "env_crashed", ""]
    assert delayed


async def test_what_an_agent_of_any_kind_samples_is_recorded_token_by_token(world: World) -> None:
    await world.start("Agent")
    [result] = await world.group(lambda prompt: "a", 1)
    assert (failures([result]), result.reward) == ([""], 1.0)
    prompts = [ids for ids, *_ in world.policy.asked]
    assert [len(row.turns) for row in result.rows] == [2, 1, 1, 2]  # the chat, two answers, the raw text
    for row in result.rows:
        assert row.sampled.sum() == 2 * len(row.turns)
        assert row.versions == ((4, len(row.token_ids)),)
        for turn, step in zip(row.turns, row.steps, strict=True):
            assert row.token_ids[: turn.begins].tolist() in prompts
            assert row.token_ids[turn.begins : turn.ends].tolist() == result.steps[step].completion.token_ids.tolist()
    assert bytes_held(result) <= 14 * sum(len(row.token_ids) for row in result.rows)
    assert [step.temperature for step in result.steps] == [0.5, 0.7, 0.7, 0.7, 0.7, 0.7]
    raw = result.rows[3].token_ids.tolist()
    assert raw == [257, *b"raw a", END_OF_TURN, *b"more", *b"a", END_OF_TURN]


async def test_who_asks_again_after_giving_up_gets_the_answer_and_it_is_trained_once(world: World) -> None:
    await world.start("Impatient")

    class Slow(Parrot):
        async def generate(self, *given: Any, **more: Any) -> list[Choice]:
            (world.folder / "envs.py.asked").touch()
            await until(lambda: (world.folder / "envs.py.gone").exists())
            return await super().generate(*given, **more)

    [result] = await world.group(cast(Any, Slow(lambda prompt: "a")), 1)
    assert (failures([result]), result.reward, len(result.steps), len(result.rows)) == ([""], 1.0, 1, 1)
    assert len(world.policy.asked) == 1
    assert world.engine.num_withdrawn == 1


async def test_each_call_has_a_seed_of_its_own_that_is_the_same_in_every_run(world: World) -> None:
    await world.start("Chat")
    await world.group(lambda prompt: "x", 3)
    first = sorted((ids, seed) for ids, _, _, seed in world.policy.asked)
    await world.group(lambda prompt: "x", 3)
    assert sorted((ids, seed) for ids, _, _, seed in world.policy.asked) == first
    assert len({seed for _, seed in first}) == 9


async def test_what_a_rollout_spawns_is_a_tree_with_credit_by_level_and_nobody_trains_on_advice(world: World) -> None:
    await world.start("Propose")
    answers = {"propose": "q", "q": iter("1101"), "advice": "be bold"}

    def answer(prompt: str) -> str:
        word = prompt.split("\n")[1]
        found = answers[word]
        return found if isinstance(found, str) else next(found)

    results = await world.group(answer, 2)
    whole = [result for result in results if result.failure is None]
    assert sorted(result.rewards["proposer"] for result in whole) == [0.5, 1.0]
    assert [[child.id for child in result.children] for result in whole] == [["5/0.0", "5/0.1"], ["5/1.0", "5/1.1"]]
    assert {result.extras["advice"] for result in whole} == {"be bold"}
    # Proposers: 1 and 0.5, mean 0.75. Solvers of the one: 1, 1; of the other: 0, 1, mean 0.5.
    samples = training_samples(whole, group_credit(whole), group="5")
    credits = sorted(round(float(np.max(np.abs(sample.advantages))), 4) for sample in samples)
    assert credits == [0, 0, 0.25, 0.25, 0.5, 0.5]
    assert {sample.rollout_id for sample in samples} == {"5/0", "5/1"}
    assert {version for _, params, version, _ in world.policy.asked if params.temperature == 0} == {None}
    temperatures = sorted(float(np.ravel(sample.temperatures)[0]) for sample in samples)
    assert temperatures == pytest.approx([0.5] * 4 + [0.7] * 2)


@pytest.mark.parametrize("word", ["mark", "cold", "hot", "refused", "poll", "draws", "reward"])
async def test_code_that_misbehaves_costs_its_own_rollout_alone(
    world: World, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    await world.start("Misbehaves")
    guilty: list[str] = []

    def answer(prompt: str) -> str:
        if "go on" not in prompt and not guilty:
            guilty.append(word)
            return word
        return "fine"

    monkeypatch.setattr("grpo.orchestrator.rollouts.rollout.MAX_CALLS", 50)
    results = await world.group(answer, 4)
    assert sorted(failures(results)) == ["", "", "", "reward_too_large" if word == "reward" else "env_error"]
    assert len(world.outcomes) == 4


async def test_after_a_delay_a_rollout_is_sampled_on_by_the_newest_version(world: World) -> None:
    await world.start("Misbehaves")

    class Moving(Parrot):
        """Serves version 9 only, once the first answer is there."""

        async def generate(self, prompt_token_ids: Sequence[int], **given: Any) -> list[Choice]:
            if self.asked and not given["params"].follow:
                raise RequestRefused(404, "not_live", "4 not live")
            choices = await super().generate(prompt_token_ids, **given)
            follows = given["params"].follow
            return [replace(one, versions=((9, len(one.token_ids)),)) if follows else one for one in choices]

    [result] = await world.group(cast(Any, Moving(lambda prompt: "late")), 1)
    assert (failures([result]), result.versions) == ([""], [4, 9])
    [row] = result.rows
    assert row.versions == ((4, row.turns[0].ends), (9, len(row.token_ids) - row.turns[0].ends))


async def test_a_text_that_no_context_holds_is_not_tokenized(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.start("Misbehaves")
    tokenized, ids_of = list[int](), ChatRenderer.ids_of

    def seen(renderer: ChatRenderer, text: str) -> list[int]:
        tokenized.append(len(text))
        return ids_of(renderer, text)

    monkeypatch.setattr(ChatRenderer, "ids_of", seen)
    [result] = await world.group(lambda prompt: "long", 1)
    assert (failures([result]), result.truncated, len(result.steps)) == ([""], True, 1)
    assert max(tokenized) < 10_000
    with pytest.raises(PromptTooLong, match="characters"):
        await engine_on(max_prompt_length=20).run_group(asking("word " * 1_000_000))
    assert max(tokenized) < 10_000


async def test_a_long_text_is_tokenized_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks, ids_of = list[int](), ChatRenderer.ids_of

    def slow(renderer: ChatRenderer, text: str) -> list[int]:
        """Waits until the event loop has gone on."""
        num, deadline_s = len(ticks), time.monotonic() + 60
        while len(text) > 20_000 and len(ticks) < num + 3:
            assert time.monotonic() < deadline_s, "the event loop stands still"
            time.sleep(0.001)
        return ids_of(renderer, text)

    async def tick() -> None:
        while True:
            ticks.append(0)
            await asyncio.sleep(0.001)

    engine = engine_on(Forging(telling(2)), context_len=100_000)
    monkeypatch.setattr(ChatRenderer, "ids_of", slow)
    ticking = asyncio.create_task(tick())
    [result] = await engine.run_group(asking("word " * 6000))
    ticking.cancel()
    assert failures([result]) == [""]


async def test_the_event_loop_turns_while_a_megabyte_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tokenizer may hold Python's lock: a thread alone does not help then."""
    num_laps, meanwhile, ids_of = 0, list[int](), ChatRenderer.ids_of

    def counted(renderer: ChatRenderer, text: str) -> list[int]:
        before = num_laps
        ids = ids_of(renderer, text)
        meanwhile.append(num_laps - before)
        return ids

    async def tick() -> None:
        nonlocal num_laps
        while True:
            num_laps += 1
            await asyncio.sleep(0.001)

    monkeypatch.setattr(ChatRenderer, "ids_of", counted)
    ticking = asyncio.create_task(tick())
    engine = engine_on(Forging(telling(1), calls=[0]), context_len=1 << 21)
    [result] = await engine.run_group(asking("<|im_start|>words, <|im_end|>" * 40_000))
    ticking.cancel()
    assert failures([result]) == [""]
    assert max(meanwhile) > 20


@pytest.mark.parametrize(("max_tokens", "take_turns"), [(64, True), (JOINED_TOKENS, False)])
async def test_calls_that_come_at_once_are_answered_a_few_a_turn_of_the_event_loop_unless_they_may_be_one_request(
    monkeypatch: pytest.MonkeyPatch, max_tokens: int, take_turns: bool
) -> None:
    num_laps, laps, prompt_ids, texts_of = 0, Counter[int](), Conversation.prompt_ids, Conversation.texts_of

    async def lap() -> None:
        nonlocal num_laps
        while True:
            num_laps += 1
            await asyncio.sleep(0)

    def asked(conversation: Conversation) -> Any:
        laps[num_laps] += 1
        return prompt_ids(conversation)

    def answered(conversation: Conversation, completion: Choice) -> Any:
        laps[num_laps] += 1
        return texts_of(conversation, completion)

    monkeypatch.setattr(Conversation, "prompt_ids", asked)
    monkeypatch.setattr(Conversation, "texts_of", answered)
    lapping = asyncio.create_task(lap())
    results = await engine_on(Forging(telling(2))).run_group(asking("hi", num=64, max_tokens=max_tokens))
    lapping.cancel()
    assert failures(results) == [""] * 64
    assert laps.total() == 64 * 2 * 2
    assert (max(laps.values()) <= 2 * engine.NUM_TOGETHER) is take_turns


class Forging:
    """Stands for workers whose code cannot be trusted: it makes calls in these conversations, withdraws some, and tells
    what it wants of them."""

    loaded = EnvironmentInfo(single_turn=False, roles=[Role(id="policy")], stores={})

    def __init__(self, outcome: Outcome, *, calls: Sequence[int] = (0, 0), withdrawn: Sequence[int] = ()) -> None:
        self.outcome, self.calls, self.withdrawn = outcome, calls, withdrawn

    async def run(self, task: Task, *, begin: Callable[[], Answerer], **_: Any) -> Outcome:
        answer, message = begin(), dict(task.messages[0])
        for call, conversation in enumerate(self.calls):
            await answer(Sample(call=call, role="policy", conversation=conversation, messages=[message]))
            if call in self.withdrawn:
                await answer(Withdraw(call=call))
        return self.outcome

    def record(self, failure: Failure | None) -> None: ...


def engine_on(pool: Forging | None = None, *, context_len: int = 512, **settings: Any) -> RolloutEngine:
    """One whose policy answers `x`."""
    pools, policy = {} if pool is None else {"e": pool}, Parrot(lambda prompt: "x")
    renderer = ChatRenderer.of_model(MODEL)
    return RolloutEngine(cast(Any, pools), cast(Any, policy), renderer, context_len=context_len, seed=0, **settings)


async def test_an_answer_that_nobody_received_is_in_no_row() -> None:
    engine = engine_on(Forging(telling(2), calls=[0, 0, 1], withdrawn=[1]))
    [result] = await engine.run_group(asking("hi"))
    assert (failures([result]), engine.num_withdrawn, len(result.rows)) == ([""], 1, 2)
    for row in result.rows:
        assert (len(row.turns), int(row.sampled.sum()), row.versions) == (1, 2, ((0, len(row.token_ids)),))


def telling(num_answers: int, **more: Any) -> Outcome:
    return Outcome(rewards={"policy": 1.0}, num_answers=num_answers, **more)


def asking(content: str, num: int = 1, max_tokens: int = 8) -> Group:
    task = Task(env="e", split="train", index=0, messages=({"role": "user", "content": content},))
    return Group(task=task, id="5", num=num, version=0, params=SamplingParams(temperature=1.0, max_tokens=max_tokens))


FORGED = {
    "no answer": Forging(telling(0), calls=[]),
    "one too few": Forging(telling(1)),
    "nobody's mark": Forging(telling(2, marks={7: Mark()})),
    "another's number": Forging(telling(0, rollout=3)),
    "a child twice": Forging(telling(2, children=[telling(0, rollout=1), telling(0, rollout=1)])),
    "itself as its child": Forging(telling(2, children=[telling(2)])),
}


@pytest.mark.parametrize("pool", FORGED.values(), ids=FORGED)
async def test_a_rollout_whose_trajectory_is_not_what_the_policy_answered_is_lost(pool: Forging) -> None:
    assert failures(await engine_on(pool).run_group(asking("hi"))) == ["env_error"]


async def test_a_prompt_beyond_max_prompt_length_is_not_asked() -> None:
    with pytest.raises(PromptTooLong, match="max_prompt_length = 20"):
        await engine_on(max_prompt_length=20).run_group(asking("hi " * 20))


@pytest.mark.parametrize(
    "told", [{"rewards": {"policy": float("nan")}}, {"rewards": {"policy": -2e6}}, {"metrics": {"m": float("-inf")}}]
)
def test_numbers_that_a_worker_forges_are_no_message_of_a_worker(told: dict[str, Any]) -> None:
    forged = msgspec.msgpack.encode([{"type": "Outcome", "job": 0, "rewards": {}} | told])
    with pytest.raises(msgspec.ValidationError):
        decode_from_worker(forged)


async def test_a_rollout_that_begins_once_more_keeps_what_servers_have_answered(world: World) -> None:
    await world.start("ExitsOnce")
    [result] = await world.group(lambda prompt: "word", 1)
    assert result.failure is None
    assert world.pool is not None
    assert world.pool.num_restarted == 1
    assert len(result.steps) == len(world.policy.asked) == 3


async def test_a_first_prompt_without_room_is_too_long_and_a_later_one_ends_the_rollout(world: World) -> None:
    await world.start("Chat", max_turns=50)
    policy = Parrot(lambda prompt: "word")
    policy.context_len = 120
    results = await world.group(policy, 2)
    assert [(result.truncated, result.reward > 0) for result in results] == [(True, True)] * 2
    policy.context_len = 10
    with pytest.raises(PromptTooLong):
        await world.group(policy, 2)
    assert world.outcomes == [None, None]  # a prompt that is too long is no fault of the environment's


async def test_a_whole_run_of_episodes_in_two_workers(tmp_path: Path, server: FakeServer) -> None:
    (tmp_path / "envs.py").write_text(SOURCE)
    server.answer = lambda prompt, version: "ab"[: 1 + prompt.count("go on 1")]
    output_dir = tmp_path / "run"
    env = [{"id": f"{tmp_path / 'envs.py'}:Chat", "name": "chat", "num_workers": 2}]
    made = await run(output_dir, server, env=env, batch_size=8, eval={"num_examples": 2})
    assert (made.summary.rollouts_trained, made.summary.rollouts_dropped) == (24, {})
    assert made.lines[-1]["eval/measure/count/chat"] == 5
    assert [(line["rollout/num_turns"], line["rollout/num_rows"]) for line in made.steps] == [(3, 1)] * 3
    told = pq.read_table(trace_path(output_dir, 1)).to_pylist()
    ledger = Ledger(output_dir / "ledger.sqlite")
    assert len(ledger.artifacts("chat/train/turns")) >= 2
    assert ledger.artifacts("chat/eval/turns")
    ledger.close()
    assert len({json.loads(row["extras"])["pid"] for row in told}) == 2
    messages = json.loads(told[0]["messages"])
    assert [message["content"] for message in messages[1:]] == ["a", "go on 1", "ab", "go on 2", "ab"]


@pytest.mark.parametrize("name", ["Thinks", "ThinksOften"])
async def test_thinking_that_the_template_has_begun_and_nobody_has_ended_is_no_answer(world: World, name: str) -> None:
    await world.start(name)
    for begun, reward in (("<think>\n", 1.0), ("<think>\n\n</think>\n\n", 0.0)):
        world.renderer = renderer(CHATML + "{%- if add_generation_prompt -%}{{ '" + begun + "' }}{%- endif -%}")
        results = await world.group(lambda prompt: "a", 2)
        assert [result.rewards for result in results] == [{"policy": reward}] * 2

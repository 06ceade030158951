"""What an evaluation says, hand-worked; and when and how versions are evaluated in a run."""

import asyncio
import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import web
from grpo.orchestrator.evaluate import evaluate, figures_of, held_out, is_due, pass_at_k
from grpo.orchestrator.rollouts.engine import RolloutEngine
from grpo.orchestrator.rollouts.records import EpisodeResult, Failure, Group, Step

from tests.orchestrator import made
from tests.orchestrator.fakes import WORDS, FakeServer, settings_for, until
from tests.orchestrator.running import check_drops, rows_of, run

# --- figures ---


@pytest.mark.parametrize("num", [2, 5])
def test_pass_at_k_is_the_share_of_all_draws_of_k_answers_that_have_a_right_one(num: int) -> None:
    for num_right, k in itertools.product(range(num + 1), range(1, num + 1)):
        draws = list(itertools.combinations([True] * num_right + [False] * (num - num_right), k))
        assert pass_at_k(num, num_right, k) == pytest.approx(sum(any(draw) for draw in draws) / len(draws))


def answer(reward: float, *, accuracy: float, num_tokens: int = 2, cut: bool = False) -> EpisodeResult:
    step = made.step(completion=made.completion([1] * num_tokens, stop=not cut))
    return made.result("0/0", step, rewards=reward, accuracy=accuracy)


def failed(reason: str, *steps: Step) -> EpisodeResult:
    return made.result("0/0", *steps, failure=Failure(reason=reason, message="broken"))


def test_figures_are_means_over_examples() -> None:
    answers: list[list[EpisodeResult]] = [
        [answer(1.0, accuracy=1.0, num_tokens=4), answer(0.5, accuracy=0.0, num_tokens=8, cut=True)],
        [answer(0.25, accuracy=0.5), failed("env_error", made.step(ids=[1, 1]))],
        [failed("prompt_too_long")] * 2,
    ]
    # Accuracies by example: 1/2, 1/4 and 0. Rewards of what was scored: 3/4 and 1/4.
    # Only an accuracy of 1 is a pass: one answer of the first example's two, and none of the others'.
    assert figures_of(answers) == {
        "eval/accuracy": pytest.approx(0.25),
        "eval/accuracy_stderr": pytest.approx(0.25 / math.sqrt(3)),
        "eval/reward": pytest.approx(0.5),
        "eval/reward_stderr": pytest.approx(math.sqrt(0.125 / 2)),
        "eval/pass@1": pytest.approx(1 / 6),
        "eval/pass@2": pytest.approx(1 / 3),
        "eval/num_tokens_mean": 4,
        "eval/truncated": 0.25,
        "eval/failed": 3,
    }
    names = {"accuracy", "reward", "num_tokens_mean", "truncated", "failed"}
    assert figures_of([[answer(1.0, accuracy=1.0)]]).keys() == {f"eval/{name}" for name in names}


class Counting:
    """An engine that counts which environment's groups it has at a time."""

    def __init__(self) -> None:
        self.running: Counter[str] = Counter()
        self.most: Counter[str] = Counter()

    async def run_group(self, group: Group) -> list[EpisodeResult]:
        env = group.task.env
        self.running[env] += 1
        self.most[env] = max(self.most[env], self.running[env])
        await asyncio.sleep(0.001)
        self.running[env] -= 1
        return [answer(1.0, accuracy=1.0)] * group.num


@pytest.mark.parametrize("num", [1, 8])
async def test_each_environment_is_asked_for_so_many_answers_at_once_and_leaves_the_others_theirs(num: int) -> None:
    evaluation = {"env": [{"id": "a"}, {"id": "b"}], "rollouts_per_example": num, "sampling": {"temperature": 1}}
    engine, settings = Counting(), settings_for(Path("x"), FakeServer(), eval=evaluation)
    prompts = dict.fromkeys(("eval:a", "eval:b"), [()] * 200)
    await evaluate(cast(RolloutEngine, engine), settings, prompts, version=1)
    assert engine.most == dict.fromkeys(prompts, 128 // num)


# --- what and when ---


TRAINING = [{"id": "a"}, {"id": "b", "args": {"n": 1}, "adapters": {"x": "one"}}]
LORA = {"name": "m", "lora_adapters": ["one", "two"]}


def chosen(**evaluation: Any) -> list[Any]:
    return held_out(settings_for(Path("x"), FakeServer(), env=TRAINING, model=LORA, eval=evaluation))


def test_evaluation_is_on_the_environments_of_the_training_or_its_own_of_which_equal_ones_share_processes() -> None:
    assert [(one.key, one.env.label) for one in chosen()] == [("a", "a"), ("b", "b")]
    assert chosen(num_examples=0) == []
    own = chosen(env=[{"id": "b", "args": {"n": 1}}, {"id": "a", "args": {"n": 2}}])
    assert [(one.key, one.env.label) for one in own] == [("b", "b"), ("eval:a", "a")]


def test_an_environments_roles_have_the_adapters_of_training_unless_it_gives_its_own() -> None:
    given = [{"id": "b", "args": {"n": 1}}, {"id": "b", "name": "other"}, {"id": "a", "adapters": {"y": "two"}}]
    assert [one.env.adapters for one in chosen(env=given)] == [{"x": "one"}, {}, {"y": "two"}]


@pytest.mark.parametrize(
    ("version", "changes", "expected"),
    [
        (0, {}, True),
        (0, {"eval_base_model": False}, False),
        (2, {}, True),
        (7, {}, False),
        (7, {"max_steps": 7}, True),
        (6, {"passed_over": 6}, False),
        (7, {"max_steps": 7, "passed_over": 7}, True),
    ],
)
def test_a_version_is_evaluated_by_the_interval(version: int, changes: dict[str, Any], *, expected: bool) -> None:
    evaluation = {"interval": 2, "eval_base_model": changes.get("eval_base_model", True)}
    settings = settings_for(Path("x"), FakeServer(), max_steps=changes.get("max_steps"), eval=evaluation)
    assert is_due(settings, version, passed_over=changes.get("passed_over")) == expected


# --- in a run ---


def of_evaluation(request: dict[str, Any]) -> bool:
    return request["n"] != 4


async def test_each_environment_is_evaluated_and_all_figures_are_told(tmp_path: Path, server: FakeServer) -> None:
    # Every other answer to a prompt is right.
    given: Counter[str] = Counter()

    def half_right(prompt: str, version: int) -> str:
        given[prompt] += 1
        word = prompt.partition("Reverse: ")[2].partition("\n")[0]
        return word[::-1] if given[prompt] % 2 else "x"

    server.answer = half_right
    other = WORDS | {"name": "other", "args": {"num_eval": 9, "min_len": 5, "max_len": 6}}
    common = {"num_examples": 4, "rollouts_per_example": 2, "sampling": {"temperature": 0.25, "max_tokens": 12}}
    evaluation = {"env": [WORDS, other], "interval": 2} | common

    made = await run(tmp_path, server, eval=evaluation, sampling={"max_tokens": 16, "seed": 1})

    seeds = {
        version: sorted(one["seed"] for one in server.requests if of_evaluation(one) and one["version"] == version)
        for version in (0, 2, 3)
    }
    assert seeds[0] == seeds[2] == seeds[3]  # sampled alike
    assert len(set(seeds[0]) - {None}) == 8
    asked = Counter(
        (request["version"], request["n"], request["temperature"], request["max_tokens"])
        for request in server.requests
        if of_evaluation(request)
    )
    assert asked == {(version, 2, 0.25, 12): 8 for version in (0, 2, 3)}
    lines = {line["progress/step"]: line for line in made.lines if "eval/failed" in line}
    assert sorted(lines) == [0, 2, 3]
    last = lines[3]
    assert (last["eval/accuracy/other"], last["eval/accuracy_stderr/other"]) == (0.5, 0.0)
    assert (last["eval/pass@1/other"], last["eval/pass@2/other"]) == (0.5, 1.0)
    assert last["eval/accuracy"] == pytest.approx((last["eval/accuracy/words"] + 0.5) / 2)
    assert made.summary.evaluations["3"] == {key: value for key, value in last.items() if key != "progress/step"}
    assert made.summary.accuracy_after == last["eval/accuracy"]


LONG = """
from grpo import Environment, Rubric

class Long(Environment):
    rubric = Rubric([lambda completion, example: float(completion == "a")])
    def dataset(self, split):
        return [{"prompt": "?" * (90 if split == "eval" and n == 0 else 1), "task": str(n)} for n in range(4)]
"""


async def test_held_out_prompts_may_be_longer_than_those_of_training(tmp_path: Path, server: FakeServer) -> None:
    (tmp_path / "long.py").write_text(LONG)
    server.answer = lambda prompt, version: "a"
    long = {"env": [{"id": f"{tmp_path}/long.py:Long"}], "buffer": {"max_prompt_length": 60}}
    made = await run(tmp_path / "run", server, max_steps=1, **long)
    assert made.summary.accuracy_after == 1.0


class SlowToEvaluate(FakeServer):
    """Has answered the first evaluation once a later version is there."""

    def __init__(self, *, last: int) -> None:
        super().__init__()
        self.last = last
        self.answered: Counter[int] = Counter()
        """Of evaluations, by version."""
        self.answered_at_unload: dict[int, int] = {}

    async def sampling(self, body: dict[str, Any]) -> None:
        if of_evaluation(body) and body["version"] == 0:
            await until(lambda: self.last in self.live)
        self.answered[body["version"]] += of_evaluation(body)

    async def _unload(self, request: web.Request) -> web.Response:
        version = (await request.json())["version"]
        self.answered_at_unload[version] = self.answered[version]
        return await super()._unload(request)


@pytest.mark.parametrize("last", [3, 4])
async def test_training_goes_on_while_a_version_is_evaluated_which_stays_and_of_the_next_ones_one_waits(
    tmp_path: Path, last: int
) -> None:
    async with SlowToEvaluate(last=last) as server:
        made = await run(tmp_path, server, max_steps=4, eval={"interval": 1})
    evaluated = [request["version"] for request in server.requests if of_evaluation(request)]
    assert evaluated == sorted(evaluated)
    assert Counter(evaluated) == dict.fromkeys((0, 1, 4), 5), "the last one also where another one waits"
    lines = {line["progress/step"]: line["eval/skipped"] for line in made.lines if "eval/skipped" in line}
    assert lines == {0: 2, 1: 0, 4: 0}
    assert {server.answered_at_unload[version] for version in (0, 1) if last == 3} <= {5}
    assert {request["seed"] for request in server.requests if of_evaluation(request)} == {None}  # these are greedy


HELD = """
import asyncio
from pathlib import Path
from grpo import Environment, Rubric

FOLDER, seen = Path(__file__).parent, {}

async def worth(completion, example):
    if example["split"] == "train" and (place := seen.setdefault(example["number"], len(seen))) in (3, 4):
        # The fourth ends the batch, once the fifth waits for its reward.
        if place == 4:
            (FOLDER / "held").touch()
        while not (FOLDER / ("go" if place == 4 else "held")).exists():
            await asyncio.sleep(0.01)
    return 1.0

class Held(Environment):
    rubric = Rubric([worth])
    def dataset(self, split):
        return [{"prompt": f"{split} {number}", "split": split, "number": number} for number in range(20)]
"""


class Straggling(FakeServer):
    """The first answers for training come at once. All others under version 0 never come."""

    def __init__(self, folder: Path, *, num_at_once: int) -> None:
        super().__init__()
        self.num_left, self.never, self.folder = num_at_once, asyncio.Event(), folder
        self.events: list[str] = []

    async def sampling(self, body: dict[str, Any]) -> None:
        kind = "eval" if of_evaluation(body) else "train"
        self.events.append(kind)
        if of_evaluation(body):
            await asyncio.sleep(0.3)  # in which training rollouts would begin if they could
            self.events.append(kind)
            if body["version"] == 1:
                (self.folder / "go").touch()
        elif body["version"] == 0:
            self.num_left -= 1
            if self.num_left < 0:
                await self.never.wait()


async def test_what_is_being_sampled_is_cancelled_and_asked_again_if_evaluations_run_alone(tmp_path: Path) -> None:
    (tmp_path / "held.py").write_text(HELD)
    evaluation = {"interval": 1, "cancel_inflight_rollouts_on_eval": True, "num_examples": 5}
    given = {"env": [{"id": f"{tmp_path / 'held.py'}:Held"}], "max_steps": 2, "max_async_level": 1}
    async with Straggling(tmp_path, num_at_once=5) as server:
        made = await run(tmp_path / "run", server, **given, eval=evaluation)
        server.never.set()

    # Of eight groups under version 0, four are batch 1 and one waits for its rewards when version 1 is to be evaluated.
    assert made.summary.rollouts_dropped == {"cancelled_for_eval": 12}
    assert len(made.trained) == made.summary.rollouts_trained == 2 * 16
    assert check_drops(tmp_path / "run") == {"cancelled_for_eval"}
    rows = set(rows_of(tmp_path / "run", "SELECT group_id, example, reason FROM rollouts"))
    cancelled = {example for _, example, reason in rows if reason is not None}
    assert cancelled == {example for group, example, _ in rows if group >= 8}
    assert len(cancelled) == 3
    # No training rollout begins between the first and the last answer of an evaluation: five begin, and five end.
    places = [place for place, kind in enumerate(server.events) if kind == "eval"]
    assert [places[first + 9] - places[first] for first in range(0, len(places), 10)] == [9] * 3

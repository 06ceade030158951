"""Rubrics of episodes."""

import asyncio
import math
import re
import threading
from collections.abc import Mapping
from typing import Any

import pytest
from grpo.orchestrator.rollouts.context import RolloutContext
from grpo.orchestrator.rollouts.roles import Role
from grpo.orchestrator.rollouts.rubric import RewardNotFinite, RewardTooLarge, Rubric, Scores
from grpo.orchestrator.rollouts.state import EpisodeState

from tests.orchestrator.rollouts.contexts import OpenBackend, context_on, score_of, user


async def debated() -> RolloutContext:
    """Aff said a0, Neg a1."""
    ctx = context_on(OpenBackend(), Role(id="Aff"), Role(id="Neg"), Role(id="Third"), example={"answer": "a1"})
    await ctx.sample("Aff", [user("q")])
    await ctx.sample("Neg", [user("q")])
    return ctx


def winner(state: EpisodeState) -> Mapping[str, float]:
    return {"Aff": 1, "Neg": -1}


def long(completion: str) -> float:
    return float(len(completion))


async def judged(state: EpisodeState, ctx: RolloutContext, extras: Mapping[str, Any]) -> Mapping[str, float]:
    return {"Neg": float(await ctx.ask([user("who?")]) == "asked") * extras["worth"]}


def odd(*, extras: Mapping[str, Any]) -> Mapping[str, float]:
    return {"kind": 0.5}


async def test_rewards_are_weighted_sums_by_role_and_metrics_name_them() -> None:
    ctx = await debated()
    rubric = Rubric([winner, long, judged], weights=[2, 0.5, 1], metrics=[odd])
    # Aff: 2 · 1 + 0.5 · 2 = 3; Neg: 2 · −1 + 0.5 · 2 + 1 · 7 = 6
    assert await rubric.score(ctx.state, ctx, extras={"worth": 7}) == Scores(
        rewards={"Aff": 3.0, "Neg": 6.0},
        accuracy=1.0,
        metrics={"winner/Aff": 1.0, "winner/Neg": -1.0, "long": 2.0, "judged/Neg": 7.0, "odd/kind": 0.5},
    )


@pytest.mark.parametrize("value", [{"Aff": math.nan}, "much", None, 1 << 5000])
async def test_what_is_no_finite_number_is_no_reward(value: Any) -> None:
    def reward(state: EpisodeState) -> Any:
        return value

    ctx = await debated()
    with pytest.raises(RewardNotFinite):
        await Rubric([reward]).score(ctx.state, ctx)
    with pytest.raises(RewardNotFinite):
        await Rubric([long], metrics=[reward]).score(ctx.state, ctx)


async def test_accuracy_may_be_another_function_and_a_reward_is_of_a_role_that_there_is() -> None:
    ctx = await debated()
    assert (await Rubric([long], accuracy=winner).score(ctx.state, ctx)).accuracy == 1
    with pytest.raises(ValueError, match="aff"):
        await Rubric([lambda state: {"aff": 1}]).score(ctx.state, ctx)


async def test_a_weighted_sum_beyond_a_million_is_no_reward() -> None:
    def most(state: EpisodeState) -> float:
        return 1e6

    ctx = await debated()
    huge, twice = [lambda state: 1e40], [most, lambda state: 1e6]
    for wrong in (Rubric(twice), Rubric([lambda state: -2e6]), Rubric([long], metrics=huge), Rubric(huge)):
        with pytest.raises(RewardTooLarge):
            await wrong.score(ctx.state, ctx)
    assert (await score_of(Rubric(twice, weights=[1, -1]), "a", {})).reward == 0
    assert (await score_of(Rubric([most]), "a", {})).reward == 1e6


async def test_functions_get_what_their_parameters_name() -> None:
    class Callable:
        def __call__(self, example: Mapping[str, Any], completion: str) -> float:
            return float(completion == example["answer"])

    def by_place(text: str, /, wanted: Mapping[str, Any]) -> float:
        return float(text == wanted["answer"])

    def optional(completion: str, other: float = 0.25) -> float:
        return other

    def everything(*both: Any) -> float:
        return len(both)

    def nothing() -> float:
        return 3.0

    functions = [Callable(), by_place, optional, everything, nothing]
    ctx = await debated()
    metrics = {"Callable": 1.0, "by_place": 1.0, "optional": 0.25, "everything": 2.0, "nothing": 3.0}
    assert (await Rubric(functions).score(ctx.state, ctx)).metrics == metrics
    assert (await score_of(Rubric(functions), "a1", {"answer": "a1"})).metrics == metrics


def test_what_other_libraries_pass_is_refused_at_once_with_the_line_to_write() -> None:
    def correct(completions: Any, answer: Any, **kwargs: Any) -> Any: ...
    def of_rollout(rollout: Any, arena: Any) -> Any: ...
    def lenient(completion: str, **more: Any) -> Any: ...
    def graded(prompt: Any, completion: Any, info: Any) -> Any: ...

    for function, unknown, line in (
        (correct, "**kwargs, completions", "def correct(completion, example)"),
        (of_rollout, "rollout, arena", "def of_rollout(state, ctx)"),
        (lenient, "**more", "def lenient(completion)"),
        (graded, "prompt, info", "def graded(completion, example)"),
    ):
        with pytest.raises(ValueError, match=re.escape(line)) as caught:
            Rubric([function])
        assert unknown in str(caught.value)


async def test_functions_run_at_the_same_time_async_ones_and_blocking_ones() -> None:
    blocking, loop, met = threading.Barrier(2, timeout=60), asyncio.get_running_loop(), asyncio.Event()

    def blocks(completion: str) -> float:
        blocking.wait()
        loop.call_soon_threadsafe(met.set)
        return 1.0

    def blocks_too(completion: str) -> float:
        return blocks(completion)

    async def waits(completion: str) -> float:
        return float(await asyncio.wait_for(met.wait(), 60))

    assert (await score_of(Rubric([waits, blocks, blocks_too]), "x", {})).reward == 3


@pytest.mark.parametrize("num_functions", [1, 2])
async def test_plain_metrics_come_after_the_functions_and_share_a_thread(num_functions: int) -> None:
    asked: list[tuple[str, int]] = []

    def noting(name: str) -> Any:
        def note(completion: str) -> float:
            asked.append((name, threading.get_ident()))
            return 1.0

        note.__name__ = name
        return note

    functions = [noting(f"function_{number}") for number in range(num_functions)]
    rubric = Rubric(functions, metrics=[noting("first"), noting("second")], accuracy=noting("accuracy"))
    assert (await score_of(rubric, "x", {})).accuracy == 1
    metrics = asked[num_functions:]
    assert [name for name, _ in metrics] == ["first", "second", "accuracy"]
    [thread] = {thread for _, thread in metrics}
    assert thread != threading.get_ident()


async def test_a_function_that_fails_ends_the_others() -> None:
    ended = asyncio.Event()

    async def waits(completion: str) -> float:
        try:
            return await asyncio.sleep(60, 1.0)
        finally:
            ended.set()

    def fails(completion: str) -> float:
        raise SystemExit(3)

    with pytest.raises(RuntimeError, match="SystemExit"):
        await score_of(Rubric([waits, fails]), "x", {})
    assert ended.is_set()

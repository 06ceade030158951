"""What is asked or sampled more often than the order of examples and chance give."""

import logging
import math
import random
from collections.abc import Sequence

import pytest
from grpo.orchestrator.doubles import Doubles, equal_answers
from grpo.orchestrator.rollouts.records import EpisodeResult, Step
from grpo.transport.http import Choice
from msgspec.structs import replace


def result(
    name: str, ids: Sequence[int], *, logprob: float = -1.0, reward: float = 0.0, seed: int | None = None, mark=None
):
    answer = Choice(token_ids=[*ids], logprobs=[logprob] * len(ids), finish_reason="stop", seed=seed, mark=mark)
    made = EpisodeResult(id=name, steps=(Step(role="r", completion=answer),), rewards={"r": reward})
    return replace(made, seal=made.sealed())


def test_equal_answers_are_counted_beside_what_chance_gives() -> None:
    # Two tokens have probability exp(-2): that of the second to equal the first, and of the third as well.
    assert equal_answers([result(f"0/{n}", [3, 4]) for n in range(3)]) == (2, pytest.approx(2 * math.exp(-2)))
    # with two different ones before it, twice that
    group = [result("0/0", [3, 4]), result("0/1", [3, 5]), result("0/2", [6, 6])]
    assert equal_answers(group) == (0, pytest.approx(3 * math.exp(-2)))


@pytest.mark.parametrize("num_answers", [1, 2, 4, 1000])
def test_what_chance_gives_is_no_double_and_more_of_it_is(num_answers: int, caplog: pytest.LogCaptureFixture) -> None:
    draw, logprob = random.Random(0), -math.log(num_answers)

    def group(number: int, *, again: bool) -> list[EpisodeResult]:
        ids = [draw.randrange(num_answers) for _ in range(8)]
        ids[1] = ids[0] if again else ids[1]
        return [result(f"{number}/{place}", [one], logprob=logprob) for place, one in enumerate(ids)]

    doubles = Doubles()
    for step in range(1, 101):
        doubles.batch(step, [group(number, again=False) for number in range(8)])
    assert not caplog.records
    for step in range(101, 103):
        doubles.batch(step, [group(number, again=True) for number in range(32)])
    # of answers that are mostly equal anyhow nobody can tell
    assert bool(caplog.records) == (num_answers == 1000)


def test_a_seed_serves_one_group(caplog: pytest.LogCaptureFixture) -> None:
    doubles = Doubles(step=4)
    for name, seed in (("0/0", 1), ("0/1", 1), ("1/0", 2), ("2/0", None), ("3/0", None)):
        doubles.scored(result(name, [3], seed=seed))
    assert not caplog.records
    doubles.scored(result("4/0", [5], seed=2))
    assert "step 5: groups 1 and 4" in caplog.text


def test_an_answer_is_of_one_rollout(caplog: pytest.LogCaptureFixture) -> None:
    doubles = Doubles()
    for name, mark in (("0/0", 7), ("0/1", 8), ("0/2", None), ("0/3", None)):
        doubles.scored(result(name, [3], mark=mark))
    assert not caplog.records
    doubles.scored(result("0/4", [3], mark=8))
    assert "rollouts 0/1 and 0/4" in caplog.text


def test_rewards_belong_to_their_rollout(caplog: pytest.LogCaptureFixture) -> None:
    one, other = result("0/0", [3], reward=1.0), result("0/1", [4], reward=0.0)
    Doubles().scored(one)
    assert not caplog.records
    Doubles().scored(replace(one, rewards=other.rewards))
    assert "rollout 0/0" in caplog.text


def test_an_example_is_asked_once_an_epoch(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    doubles = Doubles({("words", 3, 0)}, step=4)
    doubles.asked(("words", 4, 0))
    doubles.asked(("words", 3, 1))
    assert not caplog.records
    doubles.asked(("words", 3, 0))
    doubles.asked(("words", 3, 0))
    assert len(caplog.records) == 1

"""Rows of tokens to requests, and log-probabilities back to their tokens."""

import numpy as np
import pytest
from msgspec.structs import replace

from orchestrator.packing import pack
from orchestrator.teachers.alignment import Asked, combined, plan, problem_in, temperatures_of, with_teacher
from orchestrator.teachers.scoring import Scored, Taught, TeacherFailure, teach
from transport.records import Float32, Int32, TrainingSample


def ids(*tokens: int) -> Int32:
    return np.array(tokens, np.int32)


def floats(*values: float) -> Float32:
    return np.array(values, np.float32)


def sample(
    tokens: Int32, *, num_prompt: int, temperatures: Float32 | float = 1.0, rollout_id: str = "1/0"
) -> TrainingSample:
    length = len(tokens)
    loss_mask = np.arange(length) >= num_prompt
    return TrainingSample(
        token_ids=tokens,
        loss_mask=loss_mask,
        inference_logprobs=np.where(loss_mask, np.float32(-1), np.float32(0)),
        advantages=0.5,
        temperatures=temperatures,
        policy_versions=((0, length),),
        env="reverse-text",
        group_id="1",
        rollout_id=rollout_id,
        reward=1.0,
        stop_reason="stop",
    )


def test_equal_rows_and_beginnings_of_rows_are_asked_about_once() -> None:
    rows = [ids(5, 6), ids(5, 6, 7), ids(5, 8), ids(5, 6, 7)]
    assert plan(rows, [1.0] * 4) == [Asked(row=3, covers=(0, 1, 3)), Asked(row=2, covers=(2,))]


def test_rows_at_different_temperatures_are_asked_about_apart() -> None:
    assert plan([ids(5, 6), ids(5, 6)], [1.0, 0.5]) == [Asked(row=1, covers=(1,)), Asked(row=0, covers=(0,))]


def test_rows_with_a_common_beginning_follow_each_other() -> None:
    rows = [ids(300, 1), ids(2, 300), ids(300, 2), ids(2, 44)]
    assert [one for one in plan(rows, [1.0] * 4)] == [3, 1, 0, 2]


def test_a_plan_answers_every_row_once() -> None:
    draw = np.random.default_rng(0)
    rows = [draw.integers(0, 3, draw.integers(2, 6)).astype(np.int32) for _ in range(200)]
    asked = plan(rows, [1.0] * 200)
    assert sorted(index for one in asked for index in one.covers) == list(range(200))
    for one in asked:
        assert all(rows[one][: len(rows[index])].tolist() == rows[index].tolist() for index in one.covers)
    assert len(asked) < 200


def test_a_samples_temperatures_are_those_of_its_loss_tokens() -> None:
    tokens = ids(5, 6, 7, 8)
    assert temperatures_of(sample(tokens, num_prompt=2, temperatures=0.7)) == (0.7,)
    assert temperatures_of(sample(tokens, num_prompt=2, temperatures=floats(2, 2, 0.5, 1))) == (0.5, 1.0)
    assert temperatures_of(sample(tokens, num_prompt=4)) == ()


def test_each_loss_token_gets_the_score_at_its_own_temperature() -> None:
    one = sample(ids(5, 6, 7, 8), num_prompt=1, temperatures=floats(1, 0.5, 0.5, 1))
    scores = {0.5: floats(0, -1, -2, -3), 1.0: floats(0, -4, -5, -6)}
    assert combined(one, scores).tolist() == [0, -1, -2, -6]


def test_a_sample_carries_the_teachers_scores_on_its_loss_tokens_only() -> None:
    taught = with_teacher(sample(ids(5, 6, 7, 8), num_prompt=2), floats(0, -9, -0.5, -2))
    assert taught.teacher_logprobs is not None
    assert taught.teacher_logprobs.tolist() == [0, 0, -0.5, -2]
    [[batch]] = pack([taught], seq_len=8, num_ranks=1, run_id="run", step=1)
    assert batch.teacher_logprobs is not None
    assert batch.teacher_logprobs.tolist() == [0, 0, -0.5, -2]


def test_scores_of_another_length_are_no_scores_of_the_sample() -> None:
    with pytest.raises(ValueError, match=r"rollout 1/0: .* are \[3\], expected \[4\]"):
        with_teacher(sample(ids(5, 6, 7, 8), num_prompt=2), floats(0, -1, -2))


def test_a_loss_token_without_a_number_is_refused_and_another_one_is_not_looked_at() -> None:
    one = sample(ids(5, 6, 7, 8), num_prompt=2)
    with pytest.raises(ValueError, match="not finite"):
        with_teacher(one, floats(0, -1, np.nan, -2))
    assert with_teacher(one, floats(0, np.nan, -1, -2)).teacher_logprobs is not None


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ((-1.0, 0.0005), None),
        ((), None),
        ((np.inf,), "not finite"),
        ((-1.0, 12.5), "is 12.5, expected at most 0"),
        ((-9999.0,), "stands for minus infinity"),
    ],
)
def test_what_cannot_be_a_log_probability_is_told(values: tuple[float, ...], problem: str | None) -> None:
    found = problem_in(floats(*values))
    assert found is None if problem is None else found is not None and problem in found


class Parrot:
    """Says minus the token's number over the temperature; fails for rows with token 13."""

    name = "the parrot"

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], float]] = []
        self.adapters: list[int] = []

    async def score(self, rows: list[Int32], temperatures: list[float], *, adapter: int = 0) -> list[Scored]:
        self.adapters += [adapter] * len(rows)
        self.asked += [(row.tolist(), one) for row, one in zip(rows, temperatures, strict=True)]
        failure = TeacherFailure(reason="slow", message="the parrot sleeps")
        return [
            failure if 13 in row else (-row / np.float32(one)).astype(np.float32)
            for row, one in zip(rows, temperatures, strict=True)
        ]

    async def close(self) -> None:
        pass


async def taught_by(parrot: Parrot, *samples: TrainingSample) -> Taught:
    return await teach(samples, parrot)  # type: ignore[arg-type]


async def test_samples_are_taught_at_their_own_temperatures() -> None:
    parrot = Parrot()
    two = sample(ids(5, 6, 7), num_prompt=1, temperatures=floats(1, 0.5, 1))
    found = await taught_by(parrot, sample(ids(5, 6), num_prompt=1, temperatures=2.0), two)
    scores = [one.teacher_logprobs for one in found.samples]
    assert [one.tolist() for one in scores if one is not None] == [[0, -3], [0, -12, -7]]
    assert parrot.asked == [([5, 6], 2.0), ([5, 6, 7], 0.5), ([5, 6, 7], 1.0)]
    assert found.withheld == {}


async def test_each_sample_is_taught_by_the_adapter_that_sampled_it() -> None:
    parrot = Parrot()
    samples = [replace(sample(ids(5, 6 + n), num_prompt=1), adapter=adapter) for n, adapter in enumerate((1, 0, 1))]
    found = await taught_by(parrot, *samples)
    assert [one.teacher_logprobs[1] for one in found.samples if one.teacher_logprobs is not None] == [-6, -7, -8]
    asked = sorted(zip([row for row, _ in parrot.asked], parrot.adapters, strict=True))
    assert asked == [([5, 6], 1), ([5, 7], 0), ([5, 8], 1)]


async def test_a_rollout_with_a_row_that_has_no_scores_is_withheld_as_a_whole() -> None:
    samples = [
        sample(ids(5, 6), num_prompt=1, rollout_id="1/0"),
        sample(ids(5, 13), num_prompt=1, rollout_id="1/0"),
        sample(ids(5, 7), num_prompt=1, rollout_id="1/1"),
    ]
    found = await taught_by(Parrot(), *samples)
    assert [one.rollout_id for one in found.samples] == ["1/1"]
    assert {name: failure.reason for name, failure in found.withheld.items()} == {"1/0": "slow"}


async def test_a_sample_without_loss_tokens_costs_no_question() -> None:
    parrot = Parrot()
    found = await taught_by(parrot, sample(ids(5, 6), num_prompt=2))
    assert parrot.asked == []
    assert found.samples[0].teacher_logprobs is not None
    assert found.samples[0].teacher_logprobs.tolist() == [0, 0]

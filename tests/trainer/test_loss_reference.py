"""The three losses against the independent float64 reference on random cases, and what must not change them."""

import numpy as np
import pytest
import torch

import trainer.loss
from tests.trainer.loss_reference import (
    NUM_CASES,
    Case,
    check_dpo,
    check_policy,
    check_sdpo,
    expected_policy,
    random_cases,
    taken,
)


def test_the_policy_loss_its_gradient_and_metrics_equal_the_reference_on_random_packed_cases() -> None:
    for case in random_cases():
        check_policy(trainer.loss, case)


def test_float32_is_as_good_as_its_rounding() -> None:
    for case in random_cases()[:200]:
        check_policy(trainer.loss, case, torch.float32)


def test_the_self_distillation_loss_equals_the_reference_on_random_cases() -> None:
    for seed in range(NUM_CASES):
        check_sdpo(trainer.loss, seed)


def test_the_preference_loss_equals_the_reference_on_random_cases() -> None:
    for seed in range(NUM_CASES):
        check_dpo(trainer.loss, seed)


def test_the_random_cases_hold_what_the_comparison_is_to_cover() -> None:
    """Else it would prove less than it says."""
    cases = random_cases()
    assert len(cases) > 0.95 * NUM_CASES
    combinations = {
        (case.options["ratio_type"], case.options["importance"], case.teacher is None, case.options["teacher_tau"] > 0)
        for case in cases
    }
    assert len(combinations) == 2 * 2 * 3, "no teacher, a teacher without and with weight"
    rows = [[len(rows) for rows in case.rows_by_sample] for case in cases]
    assert sum(1 in counts for counts in rows) > 100, "samples with one loss token"
    assert sum(0 in counts and any(counts) for counts in rows) > 100, "samples without, beside some with"
    assert sum(not any(counts) for counts in rows) > 5, "micro-batches without"
    metrics = [expected_policy(case).metrics for case in cases]
    shares = {name for m in metrics for name in m if "masked" in name or "clipped" in name or "clamped" in name}
    assert len(shares) == 10
    for name in shares:
        assert sum(0 < m.get(name, 0) < 1 for m in metrics) >= 20, f"{name} bites in too few cases"


@pytest.mark.parametrize("seed", range(40))
def test_the_order_of_samples_does_not_matter(seed: int) -> None:
    case = random_cases()[seed]
    pieces = np.split(np.arange(len(case.trainer)), np.cumsum(case.lengths)[:-1])
    order = np.random.default_rng(seed).permutation(len(pieces))
    shuffled = taken(case, [case.lengths[i] for i in order], np.concatenate([pieces[i] for i in order]))
    assert expected_policy(shuffled).loss == pytest.approx(expected_policy(case).loss)
    check_policy(trainer.loss, shuffled)


@pytest.mark.parametrize("seed", range(40))
def test_padding_without_loss_does_not_matter(seed: int) -> None:
    case = random_cases()[seed]
    padded = taken(case, [*case.lengths, 4], np.append(np.arange(len(case.trainer)), [0, 0, 0, 0]))
    assert not padded.loss_mask[-4:].any()
    assert expected_policy(padded).loss == expected_policy(case).loss
    check_policy(trainer.loss, padded)


@pytest.mark.parametrize("seed", range(40))
def test_the_losses_of_micro_batches_add_up_to_the_loss_of_the_whole(seed: int) -> None:
    case = random_cases()[seed]
    pieces = np.split(np.arange(len(case.trainer)), np.cumsum(case.lengths)[:-1])
    parts: list[Case] = [taken(case, [len(piece)], piece) for piece in pieces]
    for part in parts:
        check_policy(trainer.loss, part)
    assert sum(expected_policy(part).loss for part in parts) == pytest.approx(expected_policy(case).loss)

"""The policy loss on numbers worked by hand. The random comparison is in test_loss_reference.py."""

import math
from typing import Any

import pytest
import torch
from grpo.configs.loss import PRESETS, LossName, LossSettings
from grpo.trainer.batch import StepCounts
from grpo.trainer.loss import MAX_LOG_RATIO, PolicyTokens, policy_loss
from grpo.transport.records import NO_TEACHER_LOGPROB

from tests.trainer.models import as_floats

LN2 = math.log(2.0)
OPEN: dict[str, Any] = {
    "token_mask_low": 0.0,
    "token_mask_high": 1e9,
    "geo_mask_low": 0.0,
    "geo_mask_high": None,
    "sequence_mask_high": None,
}


def counts(loss_tokens: int, samples: int = 1) -> StepCounts:
    return StepCounts(loss_tokens=loss_tokens, samples=samples, hint_tokens=0, pairs=0)


def tokens_of(logprobs: torch.Tensor, sample_ids: list[int], **fields: Any) -> PolicyTokens:
    """Tokens that a policy of the same log-probabilities sampled, unless `fields` says otherwise."""
    plain, zeros = logprobs.detach(), torch.zeros_like(logprobs.detach())
    lags = fields.pop("lags", [0] * len(plain))
    given = {name: torch.tensor(value) if isinstance(value, list) else value for name, value in fields.items()}
    same = {"entropies": zeros, "inference_logprobs": plain, "advantages": zeros}
    return PolicyTokens(
        logprobs=logprobs,
        sample_ids=torch.tensor(sample_ids, dtype=torch.long),
        num_samples=max(sample_ids, default=-1) + 1,
        lags=torch.tensor(lags),
        present_lags=sorted(set(lags)),
        **same | given,
    )


def loss_of(
    trainer: list[float],
    inference: list[float],
    advantages: list[float],
    sample_ids: list[int],
    *,
    tokens: int | None = None,
    lags: list[int] | None = None,
    teacher: list[float] | None = None,
    **options: Any,
) -> tuple[float, list[float], dict[str, float]]:
    """Loss, its gradient and the metrics."""
    logprobs = torch.tensor(trainer, requires_grad=True)
    fields = {"inference_logprobs": inference, "advantages": advantages, "teacher_logprobs": teacher}
    made = tokens_of(logprobs, sample_ids, **fields, lags=lags or [0] * len(trainer))
    settings = LossSettings.model_validate(options if "name" in options else OPEN | options)
    loss, metrics = policy_loss(made, settings, counts(tokens or len(trainer), len(set(sample_ids))))
    loss.backward()
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad.tolist(), as_floats(metrics)


def test_the_entropy_bonus_raises_the_entropy_of_the_tokens_that_are_kept() -> None:
    # entropies 1 and 3; the second token's ratio is e⁸ > 8, so that it is dropped: -(0 + 0.1·1) / 2, gradient -0.1 / 2
    entropies = torch.tensor([1.0, 3.0], requires_grad=True)
    made = tokens_of(torch.tensor([-1.0, -1.0]), [0, 1], entropies=entropies, inference_logprobs=[-1.0, -9.0])
    settings = LossSettings.model_validate(OPEN | {"entropy_tau": 0.1, "token_mask_high": 8.0})
    loss, metrics = policy_loss(made, settings, counts(2))
    loss.backward()
    assert loss.item() == pytest.approx(-0.05)
    assert entropies.grad is not None
    assert entropies.grad.tolist() == pytest.approx([-0.05, 0.0])
    assert as_floats(metrics)["policy/entropy"] == pytest.approx(2.0)


def test_a_token_that_the_teacher_does_not_know_has_no_teachers_term() -> None:
    for estimate, pull in (("k1", -0.5), ("k3", math.exp(-0.5) - 1)):
        options = {"adv_tau": 0.0, "teacher_tau": 1.0, "teacher_kl": estimate, "teacher": [NO_TEACHER_LOGPROB, -1.5]}
        _, grad, metrics = loss_of([-1.0] * 2, [-1.0] * 2, [1.0] * 2, [0, 0], **options)
        assert grad == pytest.approx([0.0, -pull / 2])
        assert metrics["policy/teacher_kl"] == pytest.approx(0.5)


def test_without_a_teacher_there_is_no_teacher_kl_and_a_weight_for_it_is_refused() -> None:
    _, _, metrics = loss_of([-1.0], [-1.0], [1.0], [0])
    assert not [name for name in metrics if "teacher" in name]
    with pytest.raises(ValueError, match="teacher_tau"):
        loss_of([-1.0], [-1.0], [1.0], [0], teacher_tau=0.5)


def test_an_extreme_log_ratio_is_clamped_counted_and_finite() -> None:
    # exp(500) is infinite; clamped to exp(20)
    loss, _, metrics = loss_of([-1.0], [-501.0], [1.0], [0], importance="none")
    assert loss == pytest.approx(math.exp(MAX_LOG_RATIO), rel=1e-5)
    assert metrics["policy/log_ratio_clamped"] == 1.0
    assert metrics["policy/mismatch_max_lag0"] == 500.0


@pytest.mark.parametrize("stream", ["trainer", "inference", "advantages", "teacher"])
def test_nothing_that_is_not_a_number_is_hidden(stream: str) -> None:
    streams = {name: [-1.0, -1.0] for name in ("trainer", "inference", "advantages", "teacher")}
    streams[stream] = [math.nan, -1.0]
    masks = {"token_mask_low": 0.1, "token_mask_high": 8.0, "teacher_tau": 0.5}
    teacher = streams.pop("teacher")
    loss, _, _ = loss_of(*streams.values(), [0, 1], teacher=teacher, **masks)
    assert math.isnan(loss)


@pytest.mark.parametrize(("trainer", "inference"), [(-1.0, -math.inf), (-math.inf, -1.0)])
def test_a_dropped_token_of_infinite_log_ratio_leaves_loss_and_gradients_of_the_others_alone(
    trainer: float, inference: float
) -> None:
    masks = {"token_mask_low": 0.1, "token_mask_high": 8.0, "kl_tau": 0.5}
    loss, grad, _ = loss_of([trainer, -1.0], [inference, -1.0], [1.0, 1.0], [0, 1], **masks)
    assert loss == 0.5  # -(1 · -1) / 2
    assert grad == [0.0, -0.5]


@pytest.mark.parametrize(("ratio_type", "importance"), [("token", "mask"), ("sequence", "clip")])
def test_absurd_numbers_make_nothing_infinite(importance: str, ratio_type: str) -> None:
    values = [-1e6, -1e3, -0.0, -1e-30, -1e6]
    loss, grad, metrics = loss_of(
        values,
        values[::-1],
        [1e20, -1e20, 0.0, 1e-30, 1.0],
        [0, 0, 0, 1, 2],
        teacher=[-1e6, 0.0, -1e6, 1e6, -1.0],
        **{"importance": importance, "ratio_type": ratio_type, "teacher_tau": 1e3, "kl_tau": 1e3},
    )
    assert all(math.isfinite(number) for number in [loss, *grad, *metrics.values()])


def test_mismatch_is_split_by_version_lag() -> None:
    # k3 = r - 1 - ln r: for r = 2: 1 - LN2; for r = 1: 0; for r = 1/2: LN2 - 1/2
    trainer, inference = [-1.0, -1.0, -1.0 - LN2], [-1.0 - LN2, -1.0, -1.0]
    _, _, metrics = loss_of(trainer, inference, [0.0] * 3, [0, 0, 1], lags=[0, 0, 3])
    assert metrics["policy/mismatch_kl_lag0"] == pytest.approx((1 - LN2) / 2)
    assert metrics["policy/mismatch_kl_lag3"] == pytest.approx(LN2 - 0.5)
    assert metrics["policy/kl"] == pytest.approx((1 - LN2 + LN2 - 0.5) / 3)
    assert metrics["policy/mismatch_max_lag0"] == pytest.approx(LN2)
    assert (metrics["policy/ratio_min"], metrics["policy/ratio_max"]) == pytest.approx((0.5, 2.0))
    assert metrics["policy/ratio_mean"] == pytest.approx(3.5 / 3)


@pytest.mark.parametrize("key", ["geo_mask", "sequence_mask"])
def test_bounds_of_the_masks_of_samples_are_inclusive_where_they_are_hit_exactly(key: str) -> None:
    # the ratio is exp(0) = 1 exactly
    for side in ("low", "high"):
        _, grad, metrics = loss_of([-1.0], [-1.0], [1.0], [0], **{f"{key}_{side}": 1.0})
        assert (grad, metrics["policy/masked"]) == ([-1.0], 0.0)
        outside = 1.0 + (1e-6 if side == "low" else -1e-6)
        assert loss_of([-1.0], [-1.0], [1.0], [0], **{f"{key}_{side}": outside})[2]["policy/masked"] == 1.0


@pytest.mark.parametrize("difference", [1e-4, 1e-2])
def test_k3_near_zero_is_exact_to_a_percent(difference: float) -> None:
    # exp(x) - 1 - x = x² / 2 + x³ / 6 + …
    _, _, metrics = loss_of([0.0], [-difference], [0.0], [0])
    assert metrics["policy/kl"] == pytest.approx(difference**2 / 2 + difference**3 / 6, rel=0.01)


def test_entropy_is_told_by_environment() -> None:
    fields = {"envs": ("code", "math"), "env_ids": [1, 1, 0], "entropies": [1.0, 2.0, 6.0]}
    _, metrics = policy_loss(tokens_of(torch.zeros(3), [0, 0, 1], **fields), LossSettings(), counts(3))
    found = as_floats(metrics)
    assert (found["policy/entropy/math"], found["policy/entropy/code"], found["policy/entropy"]) == (1.5, 6.0, 3.0)


# The losses by name: ratio, bound and normaliser of each.


@pytest.mark.parametrize(
    ("name", "coefficients", "normalisers"),
    [
        # Sample 0 has the ratios 4 and 1, sample 1 the ratio 1/2; advantages 1, 1 and -1.
        ("aipo", [4.0, 1.0, -0.5], [3, 3, 3]),
        # 4 is above 1.2 with a positive advantage, 1/2 below 0.8 with a negative one; (1/2) / 2 for each of sample 0
        ("grpo", [0.0, 1.0, 0.0], [4, 4, 2]),
        ("dapo", [0.0, 1.0, 0.0], [3, 3, 3]),
        ("dr_grpo", [0.0, 1.0, 0.0], [20, 20, 20]),
        # geometric means: 2, above 1.0004; 1/2, below 0.9997
        ("gspo", [0.0, 0.0, 0.0], [4, 4, 2]),
        ("cispo", [4.0, 1.0, -0.5], [3, 3, 3]),
        ("tis", [2.0, 1.0, -0.5], [3, 3, 3]),
        ("icepop", [4.0, 1.0, -0.5], [3, 3, 3]),
        ("reinforce", [1.0, 1.0, -1.0], [3, 3, 3]),
    ],
)
def test_each_named_loss_on_three_tokens(name: LossName, coefficients: list[float], normalisers: list[int]) -> None:
    trainer, inference = [-1.0, -1.0, -1.0 - LN2], [-1.0 - 2 * LN2, -1.0, -1.0]
    options = {"name": name, "constant_tokens": 10} if name == "dr_grpo" else {"name": name}
    _, grad, _ = loss_of(trainer, inference, [1.0, 1.0, -1.0], [0, 0, 1], **options)
    assert grad == pytest.approx([-c / n for c, n in zip(coefficients, normalisers, strict=True)])


def test_every_name_has_its_own_line_and_what_is_given_beside_a_name_holds() -> None:
    made = {name: LossSettings(name=name) for name in PRESETS}
    assert all(not list(settings.conflicts()) for settings in made.values())
    choices = {settings.model_dump_json(exclude={"name"}) for settings in made.values()}
    assert len(choices) == len(made)
    wider = LossSettings.model_validate({"name": "dapo", "token_mask_high": 1.5})
    assert (wider.token_mask_low, wider.token_mask_high, wider.importance) == (0.8, 1.5, "ppo")
    assert not list(LossSettings.model_validate(made["gspo"].model_dump()).conflicts())


@pytest.mark.parametrize(
    "given",
    [
        {"ratio_type": "sequence", "importance": "ppo"},
        {"ratio_type": "none", "importance": "clip"},
        {"import_path": "my_loss.py:loss", "name": "grpo"},
        {"import_path": "my_loss.py:loss", "adv_tau": 0.5},
        {"name": "grpo", "geo_mask_low": 2.0, "geo_mask_high": 1.0},
    ],
)
def test_choices_that_contradict_each_other_are_refused(given: dict[str, Any]) -> None:
    assert list(LossSettings.model_validate(given).conflicts())

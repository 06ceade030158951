"""The policy loss against an independent float64 reference, sample by sample, on random cases. The rules one by one,
with the metrics, are in test_loss.py."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from grpo.configs.loss import LossSettings
from grpo.trainer.batch import StepCounts
from grpo.trainer.loss import PolicyTokens, policy_loss

from tests.trainer.models import as_floats

SAMPLES = 9
"""With loss tokens in the whole step."""
BOUND = 20.0
"""Of log-ratios, as stated in trainer/loss.py."""
BOUNDS = {
    **{key: ["mask", "clip", "ppo", "none"] for key in ("token", "geometric")},
    **{key: ["mask", "none"] for key in ("sequence", "none")},
}
REASONS = (
    *("masked", "masked_geo_low", "masked_geo_high", "masked_sequence_low", "masked_sequence_high"),
    *("masked_token_low", "masked_token_high", "clipped"),
)
"""Metrics that are shares of the tokens."""
STREAMS = ("trainer", "inference", "advantages", "teacher", "entropies", "sample_ids")


@dataclass(frozen=True)
class Case:
    """Streams [K] of the tokens with loss, and the options of the policy loss."""

    trainer: np.ndarray
    inference: np.ndarray
    advantages: np.ndarray
    teacher: np.ndarray
    entropies: np.ndarray
    sample_ids: np.ndarray
    num_samples: int
    taught: bool
    tokens: int
    options: dict[str, Any]


def random_case(seed: int) -> Case:
    """Some samples have one loss token, some none; some ratios are extreme; every option bites in some cases."""
    rng = np.random.default_rng(seed)
    num_samples = int(rng.integers(1, 7))
    count = int(rng.integers(0, 5 * num_samples))
    trainer = -rng.exponential(1.0, count)
    inference = trainer - rng.normal(rng.choice([-0.5, 0.0, 0.5]), rng.choice([0.1, 1.0, 3.0]), count)
    teacher = np.minimum(0.0, trainer + rng.normal(rng.choice([-1.0, 0.5]), rng.choice([0.3, 2.0]), count))
    for stream in (inference, teacher):
        if count and rng.random() < 0.2:
            stream[rng.integers(count)] = -90.0
    taught = bool(rng.random() < 0.5)
    return Case(
        trainer=trainer,
        inference=inference,
        advantages=rng.normal(0, 1, count),
        teacher=teacher,
        entropies=rng.exponential(1.0, count),
        sample_ids=np.sort(rng.integers(0, num_samples, count)),
        num_samples=num_samples,
        taught=taught,
        tokens=count + int(rng.integers(1, 20)),
        options={
            "ratio_type": (ratio_type := str(rng.choice(["token", "sequence", "geometric", "none"]))),
            "importance": str(rng.choice(BOUNDS[ratio_type])),
            "normaliser": str(rng.choice(["token", "sequence", "constant"])),
            "teacher_kl": str(rng.choice(["k1", "k3"])),
            "adv_tau": float(rng.choice([0.0, 0.5, 1.0])),
            "teacher_tau": float(rng.choice([0.0, 0.3, 1.0])) if taught else 0.0,
            "kl_tau": float(rng.choice([0.0, 0.1, 1.0])),
            "entropy_tau": float(rng.choice([0.0, 0.2])),
            "token_mask_low": float(rng.choice([0.0, 0.25])),
            "token_mask_high": float(rng.choice([4.0, 1e9])),
            "geo_mask_low": float(rng.choice([0.0, 0.6])),
            "geo_mask_high": float(rng.choice([1.6, 1e9])),
            "sequence_mask_low": float(rng.choice([0.0, 0.1])),
            "sequence_mask_high": float(rng.choice([10.0, 1e9])),
            "sequence_clip_high": float(rng.choice([2.0, 10.0])),
        },
    )


CASES = [random_case(seed) for seed in range(200)]


def e(log_ratio: float) -> float:
    return math.exp(min(BOUND, max(-BOUND, log_ratio)))


def expected(case: Case) -> tuple[float, np.ndarray, Counter[str]]:
    """The loss, its gradient [K] and how many tokens are dropped, in all and by each mask, or reach a bound."""
    o, loss, grad, numbers = case.options, 0.0, np.zeros(len(case.trainer)), Counter[str]()
    logs = case.trainer - case.inference
    for sample in range(case.num_samples):
        rows = np.flatnonzero(case.sample_ids == sample)
        ratios = [math.exp(logs[t]) for t in rows]
        for t, own in zip(rows, ratios, strict=True):
            mean, masks = math.exp(logs[rows].mean()), o["importance"] == "mask"
            dropped = {
                "masked_geo_low": mean < o["geo_mask_low"],
                "masked_geo_high": mean > o["geo_mask_high"],
                "masked_sequence_low": min(ratios) < o["sequence_mask_low"],
                "masked_sequence_high": max(ratios) > o["sequence_mask_high"],
                "masked_token_low": masks and own < o["token_mask_low"],
                "masked_token_high": masks and own > o["token_mask_high"],
            }
            ratio = {
                "token": e(logs[t]),
                "geometric": e(logs[rows].mean()),
                "none": 1.0,
                "sequence": min(e(logs[rows].sum()), o["sequence_clip_high"]),
            }[o["ratio_type"]]
            advantage, clipped = case.advantages[t], False
            if o["ratio_type"] == "sequence":
                clipped = e(logs[rows].sum()) > o["sequence_clip_high"]
            elif o["importance"] == "clip":
                ratio, clipped = min(ratio, o["token_mask_high"]), ratio > o["token_mask_high"]
            elif o["importance"] == "ppo":
                up, down = advantage > 0 and ratio > o["token_mask_high"], advantage < 0 and ratio < o["token_mask_low"]
                clipped = up or down
                advantage = 0.0 if clipped else advantage
            gap = case.teacher[t] - case.trainer[t]
            drive = o["adv_tau"] * advantage - o["kl_tau"] * logs[t]
            drive += o["teacher_tau"] * (gap if o["teacher_kl"] == "k1" else e(gap) - 1)
            weight = {
                "token": 1 / case.tokens,
                "sequence": 1 / (SAMPLES * len(rows)),
                "constant": 1 / (SAMPLES * 1024),
            }[o["normaliser"]]
            if not any(dropped.values()):
                loss -= weight * (ratio * drive * case.trainer[t] + o["entropy_tau"] * case.entropies[t])
                grad[t] = -ratio * drive * weight
            numbers += Counter(name for name, is_so in dropped.items() if is_so)
            numbers += Counter(masked=any(dropped.values()), clipped=clipped)
    return loss, grad, numbers


def measured(case: Case, dtype: torch.dtype = torch.float64) -> tuple[float, np.ndarray, dict[str, float]]:
    """The loss, its gradient [K] and the metrics of the product."""
    streams = {name: torch.tensor(getattr(case, name), dtype=dtype) for name in STREAMS[:-1]}
    logprobs = streams["trainer"].requires_grad_()
    tokens = PolicyTokens(
        logprobs=logprobs,
        entropies=streams["entropies"],
        inference_logprobs=streams["inference"],
        advantages=streams["advantages"],
        teacher_logprobs=streams["teacher"] if case.taught else None,
        sample_ids=torch.tensor(case.sample_ids),
        num_samples=case.num_samples,
        lags=torch.zeros(len(logprobs), dtype=torch.long),
        present_lags=[0] if len(logprobs) else [],
    )
    counts = StepCounts(loss_tokens=case.tokens, samples=SAMPLES, hint_tokens=0, pairs=0)
    loss, metrics = policy_loss(tokens, LossSettings.model_validate(case.options), counts)
    (grad,) = torch.autograd.grad(loss, logprobs)
    return loss.item(), grad.numpy(), as_floats(metrics)


@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-9), (torch.float32, 2e-4)])
def test_the_policy_loss_and_its_gradient_equal_the_reference(dtype: torch.dtype, close: float) -> None:
    bites = Counter[str]()
    for case in CASES:
        (loss, grad, metrics), (true_loss, true_grad, numbers) = measured(case, dtype), expected(case)
        np.testing.assert_allclose(grad, true_grad, rtol=close, atol=close / 100)
        size = float(np.abs(true_grad * case.trainer).sum()) + abs(true_loss)
        np.testing.assert_allclose(loss, true_loss, atol=close * (0.01 + size))
        count = len(case.trainer)
        told = {key.removeprefix("policy/"): round(value * count, 3) for key, value in metrics.items()}
        assert {key: told.get(key, 0.0) for key in REASONS} == {key: numbers[key] for key in REASONS}
        bites += Counter(key for key in REASONS if 0 < numbers[key] < count)
        if case.taught and count:
            assert metrics["policy/teacher_kl"] == pytest.approx((case.trainer - case.teacher).mean(), rel=1e-4)
        assert ("policy/teacher_kl" in metrics) == case.taught
    assert min(bites[key] for key in REASONS) > 3, f"a rule bites in too few cases: {bites}"

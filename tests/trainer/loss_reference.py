"""An independent float64 reference of the three losses, sample by sample, and random cases to compare it on.

The checks take the module that holds the losses, so that test_loss_faults.py can hand them a faulty one.
"""

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from trainer.metrics import as_floats

NUM_CASES = 1000
BOUND = 20.0
"""Of log-ratios, as stated in trainer/loss.py."""


@dataclass(frozen=True)
class Case:
    """Packed streams [T] of samples, and the options of the policy loss."""

    lengths: list[int]
    loss_mask: np.ndarray
    trainer: np.ndarray
    inference: np.ndarray
    advantages: np.ndarray
    lags: np.ndarray
    teacher: np.ndarray | None
    options: dict[str, Any]
    tokens: int

    @property
    def rows(self) -> np.ndarray:
        """[K] where the loss is."""
        return np.flatnonzero(self.loss_mask)

    @property
    def rows_by_sample(self) -> list[list[int]]:
        starts = np.cumsum([0, *self.lengths[:-1]])
        spans = [range(start, start + length) for start, length in zip(starts, self.lengths, strict=True)]
        return [[t for t in span if self.loss_mask[t]] for span in spans]

    def log_ratio(self, t: int) -> float:
        return min(BOUND, max(-BOUND, self.trainer[t] - self.inference[t]))

    def gap(self, t: int) -> float:
        assert self.teacher is not None
        return min(BOUND, max(-BOUND, self.teacher[t] - self.trainer[t]))


STREAMS = ("loss_mask", "trainer", "inference", "advantages", "lags", "teacher")


def taken(case: Case, lengths: list[int], rows: np.ndarray) -> Case:
    """The case with other samples: its streams at these rows."""
    streams = {name: None if (s := getattr(case, name)) is None else s[rows] for name in STREAMS}
    return replace(case, lengths=lengths, **streams)


def random_case(seed: int) -> Case:
    """Some samples have one loss token, some none; some ratios are extreme; every option bites in some cases."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, rng.integers(1, 7)).tolist()
    total = sum(lengths)
    loss_mask = rng.random(total) < 0.7
    loss_mask[np.cumsum([0, *lengths[:-1]])] = False
    trainer = -rng.exponential(1.0, total)
    spread = rng.choice([0.1, 1.0, 3.0])
    inference = trainer - rng.normal(rng.choice([-0.5, 0.0, 0.5]), spread, total)
    teacher = trainer + rng.normal(rng.choice([-1.0, 0.5]), rng.choice([0.3, 2.0]), total)
    for stream in (inference, teacher):
        if rng.random() < 0.1:
            stream[rng.integers(total)] = -90.0
    taught = rng.random() < 0.5
    options = {
        "ratio_type": str(rng.choice(["token", "sequence"])),
        "importance": str(rng.choice(["mask", "clip"])),
        "adv_tau": float(rng.choice([0.0, 0.5, 1.0])),
        "teacher_tau": float(rng.choice([0.0, 0.3, 1.0])) if taught else 0.0,
        "kl_tau": float(rng.choice([0.0, 0.1, 1.0])),
        "token_mask_low": float(rng.choice([0.0, 0.25])),
        "token_mask_high": float(rng.choice([4.0, 1e9])),
        "geo_mask_low": float(rng.choice([0.0, 0.6])),
        "geo_mask_high": float(rng.choice([1.6, 1e9])),
        "sequence_mask_low": float(rng.choice([0.0, 0.1])),
        "sequence_mask_high": float(rng.choice([10.0, 1e9])),
        "sequence_clip_high": float(rng.choice([2.0, 10.0])),
        "entropy_tau": 0.0,
    }
    return Case(
        lengths=lengths,
        loss_mask=loss_mask,
        trainer=trainer,
        inference=inference,
        advantages=rng.normal(0, 1, total),
        lags=rng.integers(0, 3, total),
        teacher=teacher if taught else None,
        options=options,
        tokens=int(loss_mask.sum()) + int(rng.integers(1, 20)),
    )


def near_a_bound(case: Case) -> bool:
    """A ratio that rounding may put on either side of a bound; no such case should be judged."""
    bounds = [value for key, value in case.options.items() if "_mask_" in key or "_clip_" in key]
    logs = [math.log(bound) for bound in bounds if 0 < bound < 1e9]
    for rows in case.rows_by_sample:
        log_ratios = [case.log_ratio(t) for t in rows]
        values = [*log_ratios, float(np.mean(log_ratios)), sum(log_ratios)] if rows else []
        if any(abs(value - log) < 1e-5 for value in values for log in logs):
            return True
    return False


@cache
def random_cases() -> list[Case]:
    """Those of `NUM_CASES` that are far enough from every bound."""
    return [case for seed in range(NUM_CASES) if not near_a_bound(case := random_case(seed))]


@dataclass(frozen=True)
class Expected:
    loss: float
    size: float
    """Σ |term|, which rounding errors are relative to."""
    grad: np.ndarray
    """[T]"""
    metrics: dict[str, float]


def expected_policy(case: Case) -> Expected:
    """The policy loss, its gradient and its metrics."""
    loss, size, grad = 0.0, 0.0, np.zeros(len(case.trainer))
    dropped, clipped = {}, set()
    for rows in case.rows_by_sample:
        if not rows:
            continue
        reasons = _reasons(case, rows)
        for t in rows:
            ratio, was_clipped = _ratio(case, rows, t)
            clipped |= {t} if was_clipped else set()
            dropped[t] = reasons[t]
            if reasons[t]:
                continue
            coefficient = ratio * _drive(case, t)
            loss -= coefficient * case.trainer[t] / case.tokens
            size += abs(coefficient * case.trainer[t]) / case.tokens
            grad[t] = -coefficient / case.tokens
    return Expected(loss, size, grad, {"loss/policy": loss} | _metrics(case, dropped, clipped))


def _drive(case: Case, t: int) -> float:
    o = case.options
    drive = o["adv_tau"] * case.advantages[t] - o["kl_tau"] * case.log_ratio(t)
    return drive if case.teacher is None else drive + o["teacher_tau"] * case.gap(t)


def _ratio(case: Case, rows: list[int], t: int) -> tuple[float, bool]:
    o, own = case.options, math.exp(case.log_ratio(t))
    if o["ratio_type"] == "sequence":
        product = math.prod(math.exp(case.log_ratio(u)) for u in rows)
        return min(product, o["sequence_clip_high"]), product > o["sequence_clip_high"]
    if o["importance"] == "clip":
        return min(own, o["token_mask_high"]), own > o["token_mask_high"]
    return own, False


def _reasons(case: Case, rows: list[int]) -> dict[int, set[str]]:
    o = case.options
    ratios = {t: math.exp(case.log_ratio(t)) for t in rows}
    geometric = math.prod(ratios.values()) ** (1 / len(rows))
    whole = {
        "geo_low": geometric < o["geo_mask_low"],
        "geo_high": geometric > o["geo_mask_high"],
        "sequence_low": min(ratios.values()) < o["sequence_mask_low"],
        "sequence_high": max(ratios.values()) > o["sequence_mask_high"],
    }
    reasons = {t: {name for name, true in whole.items() if true} for t in rows}
    if o["importance"] == "mask":
        for t in rows:
            reasons[t] |= {"token_low"} if ratios[t] < o["token_mask_low"] else set()
            reasons[t] |= {"token_high"} if ratios[t] > o["token_mask_high"] else set()
    return reasons


def _metrics(case: Case, dropped: dict[int, set[str]], clipped: set[int]) -> dict[str, float]:
    rows, o = list(dropped), case.options
    logs = {t: case.log_ratio(t) for t in rows}
    ratios = {t: math.exp(value) for t, value in logs.items()}
    k3 = {t: ratios[t] - 1 - logs[t] for t in rows}

    def mean(values: Any) -> float:
        return float(np.mean([float(v) for v in values])) if rows else 0.0

    own = ["token_low", "token_high"] if o["importance"] == "mask" else []
    metrics = {
        "policy/tokens": float(len(rows)),
        "policy/entropy": mean(-case.trainer[t] for t in rows),
        "policy/kl": mean(k3.values()),
        "policy/ratio_mean": mean(ratios.values()),
        "policy/masked": mean(bool(dropped[t]) for t in rows),
        "policy/log_ratio_clamped": mean(abs(case.trainer[t] - case.inference[t]) > BOUND for t in rows),
    }
    for name in ["geo_low", "geo_high", "sequence_low", "sequence_high", *own]:
        metrics[f"policy/masked_{name}"] = mean(name in dropped[t] for t in rows)
    if o["ratio_type"] == "sequence" or o["importance"] == "clip":
        metrics["policy/clipped"] = mean(t in clipped for t in rows)
    if case.teacher is not None:
        metrics["policy/teacher_kl"] = mean(-case.gap(t) for t in rows)
        metrics["policy/teacher_clamped"] = mean(abs(case.teacher[t] - case.trainer[t]) > BOUND for t in rows)
    if rows:
        metrics |= {"policy/ratio_min": min(ratios.values()), "policy/ratio_max": max(ratios.values())}
    for lag in {int(case.lags[t]) for t in rows}:
        of_lag = [t for t in rows if case.lags[t] == lag]
        metrics[f"policy/tokens_lag{lag}"] = float(len(of_lag))
        metrics[f"policy/mismatch_kl_lag{lag}"] = float(np.mean([k3[t] for t in of_lag]))
        metrics[f"policy/mismatch_max_lag{lag}"] = max(abs(case.trainer[t] - case.inference[t]) for t in of_lag)
    return metrics


def check_policy(losses: Any, case: Case, dtype: torch.dtype = torch.float64) -> None:
    """Loss, gradient and every metric equal the reference."""

    def stream(values: np.ndarray) -> torch.Tensor:
        return torch.tensor(values[case.rows], dtype=dtype)

    logprobs = stream(case.trainer).requires_grad_()
    loss, metrics = losses.policy_loss(
        logprobs,
        entropies=stream(-case.trainer),
        inference_logprobs=stream(case.inference),
        advantages=stream(case.advantages),
        teacher_logprobs=None if case.teacher is None else stream(case.teacher),
        sample_ids=torch.tensor(np.repeat(np.arange(len(case.lengths)), case.lengths)[case.rows]),
        num_samples=len(case.lengths),
        lags=torch.tensor(case.lags[case.rows]),
        present_lags=sorted(set(case.lags[case.rows].tolist())),
        num_loss_tokens=case.tokens,
        **case.options,
    )
    (grad,) = torch.autograd.grad(loss, logprobs)
    expected, measured = expected_policy(case), as_floats(metrics)
    close = 1e-9 if dtype == torch.float64 else 2e-4
    np.testing.assert_allclose(grad, expected.grad[case.rows], rtol=close, atol=close / 100)
    np.testing.assert_allclose(loss.item(), expected.loss, rtol=close, atol=close * (0.01 + expected.size))
    assert set(measured) == set(expected.metrics)
    for name, value in expected.metrics.items():
        # Counts and shares are float32 whatever the log-probabilities are.
        np.testing.assert_allclose(measured[name], value, rtol=2e-4, atol=1e-6 + close * expected.size, err_msg=name)


def check_sdpo(losses: Any, seed: int) -> None:
    """Loss, gradient and metrics of random divergences equal the reference, with and without a clip."""
    rng = np.random.default_rng(seed)
    number = int(rng.integers(0, 12))
    divergences, weights = rng.exponential(1.0, number), rng.exponential(1.0, number)
    clip = float(rng.choice([0.3, 1.0])) if rng.random() < 0.6 else None
    step_tokens = number + int(rng.integers(1, 9))
    bounded = [value if clip is None else min(value, clip) for value in divergences]
    kept = [weight * (clip is None or value <= clip) for value, weight in zip(divergences, weights, strict=True)]

    variable = torch.tensor(divergences, requires_grad=True)
    loss, metrics = losses.sdpo_loss(
        variable, weights=torch.tensor(weights), token_clip=clip, num_hint_tokens=step_tokens
    )
    (grad,) = torch.autograd.grad(loss, variable)
    expected = {
        "loss/sdpo": sum(w * d for w, d in zip(weights, bounded, strict=True)) / step_tokens,
        "policy/sdpo_tokens": number,
        "policy/sdpo_divergence": divergences.mean() if number else 0.0,
    }
    if clip is not None:
        expected["policy/sdpo_clipped"] = float((divergences > clip).mean()) if number else 0.0
    np.testing.assert_allclose(loss.item(), expected["loss/sdpo"], rtol=1e-9)
    np.testing.assert_allclose(grad, np.array(kept) / step_tokens, rtol=1e-9)
    _check_metrics(as_floats(metrics), expected)


def check_dpo(losses: Any, seed: int) -> None:
    """Loss, gradient and metrics of random pairs equal the reference."""
    rng = np.random.default_rng(seed)
    number = int(rng.integers(0, 7))
    chosen, rejected, chosen_ref, rejected_ref = -rng.exponential(20.0, (4, number))
    beta, step_pairs = float(rng.choice([0.05, 0.1, 0.5])), number + int(rng.integers(1, 5))
    margins = [beta * ((c - cr) - (r - rr)) for c, r, cr, rr in zip(chosen, rejected, chosen_ref, rejected_ref)]  # noqa: B905
    variables = torch.tensor(chosen, requires_grad=True), torch.tensor(rejected, requires_grad=True)
    loss, metrics = losses.dpo_loss(
        *variables,
        chosen_ref_logprobs=torch.tensor(chosen_ref),
        rejected_ref_logprobs=torch.tensor(rejected_ref),
        beta=beta,
        num_pairs=step_pairs,
    )
    of_chosen, of_rejected = torch.autograd.grad(loss, variables)
    # d -log σ(m) / dm = -σ(-m)
    slopes = np.array([-beta / (1 + math.exp(m)) / step_pairs for m in margins])
    expected = {
        "loss/dpo": sum(math.log1p(math.exp(-m)) for m in margins) / step_pairs,
        "policy/dpo_pairs": number,
        "policy/dpo_accuracy": float(np.mean([m > 0 for m in margins])) if number else 0.0,
        "policy/dpo_margin": float(np.mean(margins)) if number else 0.0,
    }
    np.testing.assert_allclose(loss.item(), expected["loss/dpo"], rtol=1e-9)
    np.testing.assert_allclose(of_chosen, slopes, rtol=1e-9)
    np.testing.assert_allclose(of_rejected, -slopes, rtol=1e-9)
    _check_metrics(as_floats(metrics), expected)


def _check_metrics(measured: dict[str, float], expected: dict[str, float]) -> None:
    assert set(measured) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(measured[name], value, rtol=1e-6, atol=1e-9, err_msg=name)

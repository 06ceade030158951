"""The policy loss against an independent float64 reference, and faults planted in it that the comparison must catch."""

import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import trainer.loss
from trainer.loss import policy_loss

NUM_CASES = 300


@dataclass(frozen=True)
class Case:
    """Packed streams [T] of samples, and the options of the loss."""

    lengths: list[int]
    loss_mask: np.ndarray
    trainer: np.ndarray
    inference: np.ndarray
    advantages: np.ndarray
    options: dict[str, Any]
    tokens: int


def random_case(seed: int) -> Case:
    """Some samples have one token, some no loss token; some ratios are extreme; every mask bites in some cases."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, rng.integers(1, 7)).tolist()
    total = sum(lengths)
    loss_mask = rng.random(total) < 0.7
    loss_mask[np.cumsum([0, *lengths[:-1]])] = False
    trainer = -rng.exponential(1.0, total)
    spread = rng.choice([0.1, 1.0, 3.0])
    inference = trainer - rng.normal(rng.choice([-0.5, 0.0, 0.5]), spread, total)
    if rng.random() < 0.1:
        inference[rng.integers(total)] = -90.0
    options = {
        "ratio_type": str(rng.choice(["token", "sequence"])),
        "adv_tau": float(rng.choice([0.0, 0.5, 1.0])),
        "kl_tau": float(rng.choice([0.0, 0.1, 1.0])),
        "token_mask_low": float(rng.choice([0.0, 0.25])),
        "token_mask_high": float(rng.choice([4.0, 1e9])),
        "geo_mask_low": float(rng.choice([0.0, 0.6])),
        "geo_mask_high": float(rng.choice([1.6, 1e9])),
        "sequence_mask_low": float(rng.choice([0.0, 0.1])),
        "sequence_mask_high": float(rng.choice([10.0, 1e9])),
        "sequence_clip_high": float(rng.choice([2.0, 10.0])),
    }
    tokens = int(loss_mask.sum()) + int(rng.integers(1, 20))
    return Case(lengths, loss_mask, trainer, inference, rng.normal(0, 1, total), options, tokens)


def reference(case: Case) -> tuple[float, np.ndarray, float]:
    """Loss, its gradient [T] and the masked share, sample by sample in float64."""
    o, loss, grad, masked = case.options, 0.0, np.zeros(len(case.trainer)), 0
    start = 0
    for length in case.lengths:
        rows = [t for t in range(start, start + length) if case.loss_mask[t]]
        start += length
        if not rows:
            continue
        log_ratios = {t: min(20.0, max(-20.0, case.trainer[t] - case.inference[t])) for t in rows}
        ratios = {t: np.exp(value) for t, value in log_ratios.items()}
        geometric = np.prod(list(ratios.values())) ** (1 / len(rows))
        sample_out = not o["geo_mask_low"] <= geometric <= o["geo_mask_high"]
        sample_out |= min(ratios.values()) < o["sequence_mask_low"]
        sample_out |= max(ratios.values()) > o["sequence_mask_high"]
        product = min(np.prod(list(ratios.values())), o["sequence_clip_high"])
        for t in rows:
            if sample_out or not o["token_mask_low"] <= ratios[t] <= o["token_mask_high"]:
                masked += 1
                continue
            ratio = ratios[t] if o["ratio_type"] == "token" else product
            coefficient = ratio * (o["adv_tau"] * case.advantages[t] - o["kl_tau"] * log_ratios[t])
            loss -= coefficient * case.trainer[t] / case.tokens
            grad[t] = -coefficient / case.tokens
    return loss, grad, masked / max(1, int(case.loss_mask.sum()))


def near_a_bound(case: Case) -> bool:
    """A ratio that float32 and float64 may put on different sides of a mask; no such case should be judged."""
    start = 0
    bounds = [value for key, value in case.options.items() if "mask" in key and 0 < value < 1e9]
    for length in case.lengths:
        rows = [t for t in range(start, start + length) if case.loss_mask[t]]
        start += length
        log_ratios = [min(20.0, max(-20.0, case.trainer[t] - case.inference[t])) for t in rows]
        values = [*log_ratios, float(np.mean(log_ratios))] if rows else []
        if any(abs(value - np.log(bound)) < 1e-5 for value in values for bound in bounds):
            return True
    return False


def check_against_reference(loss_function: Callable[..., Any], case: Case) -> None:
    rows = np.flatnonzero(case.loss_mask)
    sample_ids = np.repeat(np.arange(len(case.lengths)), case.lengths)[rows]
    logprobs = torch.tensor(case.trainer[rows], dtype=torch.float32, requires_grad=True)
    loss, metrics = loss_function(
        logprobs,
        inference_logprobs=torch.tensor(case.inference[rows], dtype=torch.float32),
        advantages=torch.tensor(case.advantages[rows], dtype=torch.float32),
        sample_ids=torch.tensor(sample_ids),
        num_samples=len(case.lengths),
        lags=torch.zeros(len(rows), dtype=torch.long),
        num_loss_tokens=case.tokens,
        **case.options,
    )
    (grad,) = torch.autograd.grad(loss, logprobs)
    expected_loss, expected_grad, masked = reference(case)
    np.testing.assert_allclose(grad, expected_grad[rows], rtol=2e-4, atol=1e-6)
    np.testing.assert_allclose(loss.item(), expected_loss, rtol=2e-4, atol=1e-5)
    np.testing.assert_allclose(metrics["policy/masked"].number(), masked, atol=1e-6)


CASES = [case for seed in range(NUM_CASES) if not near_a_bound(case := random_case(seed))]


def check_all(loss_function: Callable[..., Any]) -> None:
    for case in CASES:
        check_against_reference(loss_function, case)


def test_loss_gradient_and_masks_equal_the_reference_on_random_packed_cases() -> None:
    assert len(CASES) > 0.95 * NUM_CASES
    check_all(policy_loss)


@pytest.mark.parametrize("seed", range(20))
def test_the_order_of_samples_does_not_matter(seed: int) -> None:
    case = CASES[seed]
    pieces = np.split(np.arange(len(case.trainer)), np.cumsum(case.lengths)[:-1])
    order = np.random.default_rng(seed).permutation(len(pieces))
    rows = np.concatenate([pieces[i] for i in order])
    streams = (getattr(case, name)[rows] for name in ("loss_mask", "trainer", "inference", "advantages"))
    shuffled = Case([case.lengths[i] for i in order], *streams, case.options, case.tokens)
    assert reference(shuffled)[0] == pytest.approx(reference(case)[0])
    check_against_reference(policy_loss, shuffled)


@pytest.mark.parametrize("seed", range(20))
def test_padding_without_loss_does_not_matter(seed: int) -> None:
    case = CASES[seed]
    zeros = np.zeros(4)
    padded = Case(
        [*case.lengths, 4],
        np.append(case.loss_mask, zeros.astype(bool)),
        *(np.append(stream, zeros) for stream in (case.trainer, case.inference, case.advantages)),
        case.options,
        case.tokens,
    )
    assert reference(padded)[0] == reference(case)[0]
    check_against_reference(policy_loss, padded)


@pytest.mark.parametrize("seed", range(20))
def test_the_losses_of_micro_batches_add_up_to_the_loss_of_the_whole(seed: int) -> None:
    case = CASES[seed]
    losses, start = [], 0
    for length in case.lengths:
        part = slice(start, start + length)
        start += length
        streams = (getattr(case, name)[part] for name in ("loss_mask", "trainer", "inference", "advantages"))
        alone = Case([length], *streams, case.options, case.tokens)
        check_against_reference(policy_loss, alone)
        losses.append(reference(alone)[0])
    assert sum(losses) == pytest.approx(reference(case)[0])


ARITHMETIC_MEAN = "_sample_sum_and_mean(token_ratio, sample_ids, num_samples)[1]"
FAULTS = {
    "the sign of the loss": ("loss = -torch", "loss = torch"),
    "the sign of the log ratio": ("difference = (", "difference = -("),
    "the sign of the KL term": ("adv_tau * advantages - kl_tau", "adv_tau * advantages + kl_tau"),
    "no ratio": ("coeff = ratio * (", "coeff = ("),
    "no ratio on the KL term": ("ratio * (adv_tau * advantages -", "(ratio * adv_tau * advantages -"),
    "a gradient through the ratio": ("trainer_logprobs.detach()", "trainer_logprobs"),
    "the micro-batch's normaliser": (".sum() / num_loss_tokens", ".sum() / max(1, len(ratio))"),
    "the kept tokens' normaliser": (".sum() / num_loss_tokens", ".sum() / keep.sum().clamp(min=1)"),
    "no normaliser": (".sum() / num_loss_tokens", ".sum() / 1"),
    "the mask inverted": ("torch.where(keep,", "torch.where(~keep,"),
    "no mask": ("torch.where(keep,", "torch.where(keep | True,"),
    "masks that must all agree": (".any(dim=0)", ".all(dim=0)"),
    "the low token mask's side": ("token_ratio < token_mask_low", "token_ratio > token_mask_low"),
    "the high token mask's side": ("token_ratio > token_mask_high", "token_ratio < token_mask_high"),
    "the low geo mask's side": ("geo_ratio < geo_mask_low", "geo_ratio > geo_mask_low"),
    "the high geo mask's side": ("geo_ratio > geo_mask_high", "geo_ratio < geo_mask_high"),
    "the low sequence mask's side": ("smallest < sequence_mask_low", "smallest > sequence_mask_low"),
    "the high sequence mask's side": ("largest > sequence_mask_high", "largest < sequence_mask_high"),
    "the low sequence mask on the largest ratio": ("smallest < sequence_mask_low", "largest < sequence_mask_low"),
    "the high sequence mask on the smallest ratio": ("largest > sequence_mask_high", "smallest > sequence_mask_high"),
    "an arithmetic mean instead of the geometric one": ("mean_log_ratio.exp()", ARITHMETIC_MEAN),
    "a sum instead of the geometric mean": ("mean_log_ratio.exp()", "log_ratio_sum.exp()"),
    "a mean off by one": ("counts.clamp(min=1)", "(counts + 1)"),
    "a sequence ratio that is a mean": ("ratio = log_ratio_sum", "ratio = mean_log_ratio"),
    "no clip of the sequence ratio": (".clamp(max=sequence_clip_high)", ""),
    "a clip from below": (".clamp(max=sequence_clip_high)", ".clamp(min=sequence_clip_high)"),
    "the other ratio type": ('ratio_type == "sequence"', 'ratio_type == "token"'),
    "samples off by one": ("index_add_(0, sample_ids,", "index_add_(0, (sample_ids + 1) % num_samples,"),
    "log ratios clamped too early": ("MAX_LOG_RATIO = 20.0", "MAX_LOG_RATIO = 2.0"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_each_planted_fault_is_caught(fault: str) -> None:
    right, wrong = FAULTS[fault]
    source = inspect.getsource(trainer.loss)
    code = source[source.index("MAX_LOG_RATIO =") :]
    assert code.count(right) == 1, f"the fault no longer fits the source: {right}"
    faulty = types.ModuleType("faulty_loss")
    faulty.__dict__.update(vars(trainer.loss))
    exec(code.replace(right, wrong), faulty.__dict__)
    with pytest.raises(AssertionError):
        check_all(faulty.policy_loss)

"""Samples as a tree of runs have the losses, metrics and gradients that they have as rows of their own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from grpo.configs.loss import LossSettings
from grpo.trainer import packing
from grpo.trainer.batch import check_step
from grpo.trainer.distributed import ONE
from grpo.trainer.errors import BatchError
from grpo.trainer.model import Policy
from grpo.trainer.objective import Objective
from grpo.trainer.packing import Layout, packed_tokens
from grpo.trainer.supported import PACKED
from grpo.transport.records import MicroBatch
from msgspec.structs import replace

from tests.trainer.bench import UNMASKED
from tests.trainer.models import CPU, VOCAB, tiny_batch, tiny_policy
from tools.random_models import make_small

DEPTH, LONGEST = 6, 120


def random_tree(seed: int) -> list[list[int]]:
    """Samples of several groups that fork anywhere; some end where others go on, some are the same."""
    random = np.random.default_rng(seed)
    found = list[list[int]]()

    def grow(so_far: list[int], depth: int) -> None:
        length = int(random.choice([1, 2, 6, 30], p=[0.3, 0.2, 0.3, 0.2]))
        so_far = (so_far + random.integers(2, VOCAB, length).tolist())[:LONGEST]
        children = 0 if depth == DEPTH else int(random.integers(0, 4))
        if not children or random.random() < 0.2:
            found.extend([so_far] * int(random.choice([1, 2], p=[0.85, 0.15])))
        for _ in range(children):
            grow(so_far, depth + 1)

    for _ in range(3):
        grow([], 1)
    found = [sample for sample in found if len(sample) > 1]
    return [found[place] for place in random.permutation(len(found))[:40]]


def tree_batch(seed: int, **changes: Any) -> MicroBatch:
    """A random tree, whose tokens have old log-probabilities, advantages and masks of their own in each sample."""
    random, samples = np.random.default_rng(seed), random_tree(seed)
    batch = tiny_batch(tuple(map(len, samples)), seed=seed)
    temperatures = random.choice([0.7, 1.0], len(batch.token_ids)).astype(np.float32)
    return replace(
        batch,
        token_ids=np.concatenate(samples).astype(np.int32),
        loss_mask=batch.loss_mask & (random.random(len(batch.token_ids)) < 0.6),
        temperatures=temperatures,
        envs=tuple(random.choice(["a", "b"], len(samples)).tolist()),
        **changes,
    )


def computed(policy: Policy, batch: MicroBatch) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Log-probabilities and entropies of each loss token, the gradients of all parameters, and the step's metrics."""
    settings = LossSettings.model_validate({**UNMASKED, "entropy_tau": 0.1, "kl_tau": 0.1})
    objective = Objective(policy, settings, ONE, pack_tokens=4096)
    for parameter in (*policy.parameters, policy.witness.zeros):
        parameter.grad = None
    metrics = objective.accumulate([batch], step=1)
    with torch.no_grad():
        found = list(policy.logprobs_and_entropy(packed_tokens(batch, CPU)))
    return found + [p.grad for p in policy.parameters if p.grad is not None] + [policy.witness.zeros.grad], metrics


def assert_as_unshared(
    monkeypatch: pytest.MonkeyPatch, policy: Policy, batch: MicroBatch, *, atol: float = 5e-6
) -> None:
    """Within `atol` of the largest of each tensor."""
    ours, metrics = computed(policy, batch)
    with monkeypatch.context() as patched:
        everything = np.arange(len(batch.token_ids))
        patched.setattr(packing, "shared_prefixes", lambda *_: (everything, everything))
        alone, expected = computed(policy, batch)
    assert len(ours) == len(alone) > 4
    for one, other in zip(ours, alone, strict=True):
        scale = max(1.0, other.abs().max().item())
        torch.testing.assert_close(one / scale, other / scale, atol=atol, rtol=0)
    values, others = ({name: value for name, (_, value, _) in found.items()} for found in (metrics, expected))
    assert values == pytest.approx(others, rel=10 * atol, abs=10 * atol)


@pytest.mark.parametrize("seed", range(12))
def test_a_random_tree_has_the_results_of_unshared_rows(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    assert_as_unshared(monkeypatch, tiny_policy(tiny_model), tree_batch(seed))


def test_all_weights_are_trained_on_a_tree_as_on_unshared_rows(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"lora": False, "weight_broadcast": {"format": "full"}, "moved": False}
    assert_as_unshared(monkeypatch, tiny_policy(tiny_model, **options), tree_batch(3))


@pytest.mark.parametrize("kind", sorted(PACKED))
def test_every_packed_model_type_computes_a_tree_as_unshared_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    assert_as_unshared(monkeypatch, tiny_policy(make_small(tmp_path, kind)), tree_batch(5), atol=1e-5)


@pytest.mark.parametrize("kind", ["gemma", "gemma4_text"])
def test_in_float64_the_same_is_seen_of_those_that_round_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """In float32 two orders of the same unshared rows differ by 1e-6 too."""
    policy = tiny_policy(make_small(tmp_path, kind))
    policy.causal_lm.double()
    assert_as_unshared(monkeypatch, policy, tree_batch(5), atol=1e-8)


def test_samples_of_different_adapters_share_nothing(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy(tiny_model, lora_adapters=("left", "right"))
    batch = tree_batch(4)
    of_samples = np.random.default_rng(0).integers(0, 2, len(batch.sequence_lengths), np.int32)
    assert_as_unshared(monkeypatch, policy, replace(batch, adapters=of_samples))


def test_random_trees_have_what_is_hard() -> None:
    batches = [tree_batch(seed) for seed in range(12)]
    packs = [packed_tokens(batch, CPU) for batch in batches]
    layouts: list[Layout] = [pack.layout for pack in packs]
    assert any(count > 1 and num < num_keys for layout in layouts for count, num, num_keys in layout.runs.shapes)
    assert any(mask is not None for layout in layouts for mask in layout.runs.masks)
    assert any(
        len(layout.boundaries) - 1 < len(batch.rollout_ids) for layout, batch in zip(layouts, batches, strict=True)
    )
    assert all(pack.distinct is not None and len(pack.distinct[0]) < len(pack.targets) for pack in packs)
    assert min(len(pack.token_ids) / len(batch.token_ids) for pack, batch in zip(packs, batches, strict=True)) < 0.5


def test_a_micro_batch_is_as_large_as_what_is_computed_of_it(tiny_model: Path) -> None:
    batch = tree_batch(0)
    num_tokens = len(packed_tokens(batch, CPU).token_ids)
    assert num_tokens < len(batch.token_ids)
    known: dict[str, Any] = {"sequence_len": LONGEST, "vocab_size": VOCAB, "settings": LossSettings()}
    check_step([batch], pack_tokens=num_tokens, **known)
    with pytest.raises(BatchError, match=f"{num_tokens} tokens"):
        check_step([batch], pack_tokens=num_tokens - 1, **known)


def test_a_model_that_shares_nothing_computes_what_is_too_much_for_it_in_several_passes(tmp_path: Path) -> None:
    policy, batch = tiny_policy(make_small(tmp_path, "lfm2")), tree_batch(0)
    settings = LossSettings.model_validate(UNMASKED)
    found = []
    for capacity in (len(batch.token_ids), LONGEST):
        objective = Objective(policy, settings, ONE, pack_tokens=capacity)
        passes = list[int]()
        objective.trained = lambda part, _, passes=passes: passes.append(len(part.token_ids))
        for parameter in (*policy.parameters, policy.witness.zeros):
            parameter.grad = None
        metrics = objective.accumulate([batch], step=1)
        found.append(([p.grad for p in (*policy.parameters, policy.witness.zeros)], metrics["loss/policy"][1], passes))
    (whole, loss, one), (parts, same, several) = found
    assert (len(one), max(several) <= LONGEST, sum(several)) == (1, True, len(batch.token_ids))
    assert same == pytest.approx(loss, rel=1e-5)
    for this, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(this, other, atol=1e-5, rtol=1e-4)

"""Packed attention equals Hugging Face's own, one sample at a time, and no sample sees another."""

from pathlib import Path

import numpy as np
import pytest
import torch
from grpo.trainer.attention import _repeated, padded, varlen
from grpo.trainer.model import Policy
from grpo.trainer.packing import Layout, packed_tokens
from grpo.transport.records import MicroBatch
from msgspec import structs

from tests.trainer.models import CPU, tiny_batch, tiny_policy

LENGTHS = (7, 2, 1, 40, 9, 33, 2)


def layout_without_sharing(lengths: list[int]) -> Layout:
    everything = np.arange(sum(lengths))
    return Layout(np.array(lengths), everything, everything, CPU)


def one_by_one(model: torch.nn.Module, batch: MicroBatch) -> torch.Tensor:
    """[K] the same log-probabilities, from Hugging Face's eager attention on each sample alone."""
    parts, start = [], 0
    for length in batch.sequence_lengths.tolist():
        ids = torch.from_numpy(batch.token_ids[start : start + length].astype(np.int64))
        mask = torch.from_numpy(batch.loss_mask[start : start + length])[1:]
        temperatures = torch.from_numpy(batch.temperatures[start : start + length])[1:, None]
        start += length
        logits = model(ids[None], use_cache=False).logits[0, :-1] / temperatures
        parts.append(logits.log_softmax(-1).gather(1, ids[1:, None])[mask, 0])
    return torch.cat(parts)


def eager_model(policy: Policy) -> torch.nn.Module:
    """The policy's own network with Hugging Face's attention and head."""
    policy.causal_lm.set_attn_implementation("eager")
    return policy.causal_lm


def gradients(policy: Policy, logprobs: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad((logprobs * weights).sum(), policy.parameters))


def test_packed_logprobs_and_gradients_equal_one_by_one(tiny_model: Path) -> None:
    policy = tiny_policy(tiny_model)
    temperatures = np.random.default_rng(1).uniform(0.5, 2.0, sum(LENGTHS)).astype(np.float32)
    batch = tiny_batch(LENGTHS, temperatures=temperatures)
    packed = policy.logprobs(packed_tokens(batch, CPU))
    weights = torch.randn(len(packed), generator=torch.Generator().manual_seed(0))
    packed_gradients = gradients(policy, packed, weights)
    alone = one_by_one(eager_model(policy), batch)
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=0)
    for ours, theirs in zip(packed_gradients, gradients(policy, alone, weights), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_a_shared_prompt_gives_the_logprobs_and_gradients_of_separate_ones(tiny_model: Path) -> None:
    policy = tiny_policy(tiny_model)
    batch = tiny_batch((9, 12, 9, 4))
    starts = batch.starts
    ids, mask = batch.token_ids.copy(), batch.loss_mask.copy()
    for start in starts[:3]:
        ids[start : start + 6] = [3, 1, 4, 1, 5, 9]
        mask[start : start + 6] = False
    batch = structs.replace(batch, token_ids=ids, loss_mask=mask)
    tokens = packed_tokens(batch, CPU)
    assert len(tokens.token_ids) == 9 + 6 + 3 + 4
    shared = policy.logprobs(tokens)
    shared_gradients = gradients(policy, shared, torch.ones(len(shared)))
    alone = one_by_one(eager_model(policy), batch)
    torch.testing.assert_close(shared, alone, atol=1e-5, rtol=0)
    for ours, theirs in zip(shared_gradients, gradients(policy, alone, torch.ones(len(alone))), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_buckets_cover_every_sample_once_and_waste_little() -> None:
    rng = np.random.default_rng(0)
    lengths = np.minimum(np.exp(rng.normal(np.log(64), 1.0, 200)).astype(int) + 1, 4096).tolist()
    layout = layout_without_sharing(lengths)
    assert sum(count for count, _ in layout.buckets.shapes) == len(lengths)
    assert layout.buckets.slots[layout.buckets.slot_of].tolist() == list(range(sum(lengths)))
    assert len(layout.buckets.slots) < 1.4 * sum(lengths)
    assert len(layout.buckets.shapes) < 30


def streams(num_tokens: int, *, heads: int = 4, shared_heads: int = 2, seed: int = 0) -> list[torch.Tensor]:
    """[N, H, 8] random queries, keys and values."""
    random = torch.Generator().manual_seed(seed)
    return [
        torch.randn(num_tokens, h, 8, generator=random).requires_grad_() for h in (heads, shared_heads, shared_heads)
    ]


def test_the_gradient_of_a_shared_token_is_accumulated_in_float32() -> None:
    # 1 + 300·2⁻⁹: bfloat16 has steps of 2⁻⁷ above 1, so that a sum in it would stay at 1
    layout = Layout(np.ones(301, int), np.array([0]), np.zeros(301, int), CPU)
    shared = torch.zeros(1, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.cat([torch.ones(1), torch.full((300,), 2.0**-9)]).bfloat16()[:, None, None]
    (grad,) = torch.autograd.grad(_repeated(shared, layout), shared, weights)
    assert grad.item() == torch.tensor(1 + 300 * 2.0**-9).bfloat16().item()


@pytest.mark.parametrize("shared_heads", [2, 4])
def test_the_varlen_kernel_of_this_torch_takes_what_it_is_given(shared_heads: int) -> None:
    # On the meta device only shapes and arguments are checked.
    layout, kernel = layout_without_sharing([5, 7, 1]), varlen
    q, k, v = (stream.to("meta") for stream in streams(13, shared_heads=shared_heads))
    assert kernel(q, k, v, 0.3, layout).shape == (13, 4, 8)


def test_on_a_cpu_16_bit_attention_is_computed_in_float32() -> None:
    layout = layout_without_sharing([5, 30])
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(35, heads, 16, generator=random).bfloat16().requires_grad_() for heads in (4, 2, 2))
    weights = torch.randn(35, 4, 16, generator=random)
    output = padded(q, k, v, 0.25, layout)
    exact = padded(q.float(), k.float(), v.float(), 0.25, layout)
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, exact.bfloat16())
    ours = torch.autograd.grad((output.float() * weights).sum(), (q, k, v))
    for one, other in zip(
        ours, torch.autograd.grad((exact * weights.bfloat16().float()).sum(), (q, k, v)), strict=True
    ):
        assert torch.equal(one, other)

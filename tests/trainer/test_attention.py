"""Packed attention equals Hugging Face's own, one sample at a time, and no sample sees another."""

from pathlib import Path

import numpy as np
import pytest
import torch
from grpo.trainer.attention import _repeated, padded, varlen
from grpo.trainer.model import Policy
from grpo.trainer.packing import Layout, packed_tokens, shared_prefixes
from grpo.transport.records import MicroBatch

from tests.trainer.models import CPU, tiny_batch, tiny_policy, with_shared_prompt

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


def test_packed_logprobs_and_gradients_equal_one_by_one(tiny_model: Path) -> None:
    """Also of tokens of a prompt that several samples share."""
    policy = tiny_policy(tiny_model)
    temperatures = np.random.default_rng(1).uniform(0.5, 2.0, sum(LENGTHS)).astype(np.float32)
    batch = with_shared_prompt(tiny_batch(LENGTHS, temperatures=temperatures), 0, 4, 5)
    tokens = packed_tokens(batch, CPU)
    assert len(tokens.token_ids) <= sum(LENGTHS) - 2 * 6
    packed = policy.logprobs(tokens)
    weights = torch.randn(len(packed), generator=torch.Generator().manual_seed(0))
    gradients = torch.autograd.grad((packed * weights).sum(), policy.parameters)
    alone = one_by_one(eager_model(policy), batch)
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=0)
    expected = torch.autograd.grad((alone * weights).sum(), policy.parameters)
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_blocks_of_long_samples_that_fork_are_attention_in_float64_of_each_alone() -> None:
    """Two forks after 200 tokens, and samples of their own in other buckets; values are narrower than keys."""
    draw = np.random.default_rng(0)
    shared = draw.integers(0, 9, 200)
    samples = [np.concatenate([shared, draw.integers(0, 9, length)]) for length in (90, 97, 400)]
    samples += [draw.integers(0, 9, length) for length in (70, 3, 1)]
    lengths = np.array([len(sample) for sample in samples])
    unique, inverse = shared_prefixes(np.concatenate(samples), lengths)
    layout = Layout(lengths, unique, inverse, CPU)
    random = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(len(unique), *size, generator=random).requires_grad_() for size in ((4, 16), (2, 16), (2, 8))
    )
    weights = torch.randn(len(unique), 4, 8, generator=random)
    output = padded(q, k, v, 0.3, layout)
    alone = torch.empty_like(output, dtype=torch.float64)
    for part in np.split(inverse, np.cumsum(lengths)[:-1]):
        places = torch.from_numpy(part)
        heads = (one.double()[places].transpose(0, 1) for one in (q, k, v))
        attended = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, scale=0.3, enable_gqa=True)
        alone = alone.index_copy(0, places, attended.transpose(0, 1))
    torch.testing.assert_close(output.double(), alone, atol=2e-6, rtol=0)
    ours, exact = (torch.autograd.grad((one * weights).sum(), (q, k, v)) for one in (output, alone))
    for one, other in zip(ours, exact, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=0)


def test_buckets_cover_every_sample_once_and_waste_little() -> None:
    rng = np.random.default_rng(0)
    lengths = np.minimum(np.exp(rng.normal(np.log(64), 1.0, 200)).astype(int) + 1, 4096).tolist()
    layout = layout_without_sharing(lengths)
    assert sum(count for count, *_ in layout.rows.shapes) == len(lengths)
    assert layout.rows.queries[layout.rows.slot_of].tolist() == list(range(sum(lengths)))
    assert len(layout.rows.queries) < 1.4 * sum(lengths)
    assert len(layout.rows.shapes) < 30


def test_the_gradient_of_a_shared_token_is_accumulated_in_float32() -> None:
    # 1 + 300·2⁻⁹: bfloat16 has steps of 2⁻⁷ above 1, so that a sum in it would stay at 1
    ids = np.stack([np.zeros(301, np.int32), np.arange(301, dtype=np.int32)], axis=1).ravel()
    layout = Layout(lengths := np.full(301, 2), *shared_prefixes(ids, lengths), CPU)
    shared = torch.zeros(302, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.full((301, 2), 2.0**-9)
    weights[0] = 1
    (grad,) = torch.autograd.grad(_repeated(shared, layout), shared, weights.bfloat16().view(602, 1, 1))
    assert grad[layout.keys[0]].item() == torch.tensor(1 + 300 * 2.0**-9).bfloat16().item()


@pytest.mark.parametrize("shared_heads", [2, 4])
def test_the_varlen_kernel_of_this_torch_takes_what_it_is_given(shared_heads: int) -> None:
    # On the meta device only shapes and arguments are checked.
    q, k, v = (torch.empty(13, heads, 8, device="meta") for heads in (4, shared_heads, shared_heads))
    assert varlen(q, k, v, 0.3, layout_without_sharing([5, 7, 1])).shape == (13, 4, 8)


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
    theirs = torch.autograd.grad((exact * weights.bfloat16().float()).sum(), (q, k, v))
    assert all(map(torch.equal, ours, theirs))

"""What runs in vLLM's engine process: the LoRA product on CPUs against a loop over rows, seeds, ranks, noise, and which
tensors are loaded."""

import importlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from grpo.infer.cpu import (
    GroupedLora,
    RestoredGenerators,
    draw,
    install_flat_rotary,
    install_grouped_lora,
    install_norms,
    num_at_least,
)

NUM_SLOTS, RANK, NUM_INPUTS = 3, 4, 6
SIZES = (8, 4, 4)  # as in qkv_proj: the slices of a merged layer need not be equal

Weights = tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]


def merged_layer() -> Weights:
    """Random A and B of a merged layer as vLLM stacks them: [slots, 1, r, I] and [slots, 1, O_i, r]."""
    generator = torch.Generator().manual_seed(0)
    a = tuple(torch.randn(NUM_SLOTS, 1, RANK, NUM_INPUTS, generator=generator) for _ in SIZES)
    b = tuple(torch.randn(NUM_SLOTS, 1, size, RANK, generator=generator) for size in SIZES)
    return a, b


def row_by_row(x: torch.Tensor, slots: Sequence[int], weights: Weights) -> torch.Tensor:
    """What every row's own adapter adds, one row at a time; nothing for slot -1."""
    y = torch.zeros(len(slots), sum(SIZES))
    for row, slot in enumerate(slots):
        if slot >= 0:
            y[row] = torch.cat([b[slot, 0] @ (a[slot, 0] @ x[row]) for a, b in zip(*weights, strict=True)])
    return y


def grouped(slots: Sequence[int], together: int) -> GroupedLora:
    """With the metadata of a step whose rows have these slots; adapter ids are slot + 10, 0 is none."""
    lora = GroupedLora(together)
    mapping = SimpleNamespace(index_mapping=tuple(slot + 10 if slot >= 0 else 0 for slot in slots))
    lora.update_metadata(mapping, [10, 11, 12], NUM_SLOTS + 1, 100)
    return lora


@pytest.mark.parametrize("together", [1, 2, 4])
@pytest.mark.parametrize(
    "slots",
    [
        pytest.param([-1] * 5, id="base only"),
        pytest.param([0, 0, -1, -1, 1, 1, 1], id="contiguous"),
        pytest.param([-1, 0, 1, -1, 2, 0, 1, -1], id="interleaved"),
        pytest.param([2, -1], id="base after the last slot"),
    ],
)
def test_every_row_gets_its_own_adapter_and_base_rows_get_nothing(slots: list[int], together: int) -> None:
    weights = merged_layer()
    x = torch.randn(len(slots), NUM_INPUTS, generator=torch.Generator().manual_seed(1))
    base = torch.randn(len(slots), sum(SIZES), generator=torch.Generator().manual_seed(2))
    y = base.clone()
    grouped(slots, together).add_lora_linear(y, x, *weights, 0.5, SIZES)
    torch.testing.assert_close(y, base + 0.5 * row_by_row(x, slots, weights))
    for row, slot in enumerate(slots):
        assert slot >= 0 or torch.equal(y[row], base[row])


def test_a_slot_that_has_got_another_adapter_is_computed_with_it() -> None:
    weights, slots = merged_layer(), [0, 1, 1]

    def write(_: int) -> bool:
        for one in (*weights[0], *weights[1]):
            one[1].mul_(3.0)
        return True

    manager = SimpleNamespace(modules={}, punica_wrapper_mapping={"model": None}, activate_adapter=write)
    manager.lora_config = SimpleNamespace(lora_dtype=torch.bfloat16)
    install_grouped_lora(SimpleNamespace(lora_manager=manager))
    lora, x = manager.punica_wrapper_mapping["model"], torch.ones(len(slots), NUM_INPUTS)
    assert isinstance(lora, GroupedLora)
    lora.update_metadata(SimpleNamespace(index_mapping=(10, 11, 11)), [10, 11, None])
    for activated in (False, True):
        assert not activated or manager.activate_adapter(11)
        y = torch.zeros(len(slots), sum(SIZES))
        lora.add_lora_linear(y, x, *weights, 1.0, SIZES)
        torch.testing.assert_close(y, row_by_row(x, slots, weights))


def test_a_generator_whose_token_is_thrown_away_is_put_back_and_not_taken_back_by_an_offset() -> None:
    rows = [1]
    generators = RestoredGenerators({row: torch.Generator().manual_seed(row) for row in (0, 1)}, lambda: rows)
    sampler = torch.nn.Module()
    sampler.forward = lambda: [float(torch.rand((), generator=generators[row])) for row in (0, 1)]  # type: ignore[assignment]
    sampler.register_forward_pre_hook(generators.remember)
    sampler.register_forward_hook(generators.restore)
    first, before = sampler(), generators[1]
    assert generators.get(1) is None  # as vLLM asks right after the sampler
    assert generators.get(1) is before  # and as it asks in order to move rows
    assert generators.get(0) is not None
    rows.clear()
    second = sampler()
    assert second[1] == first[1]
    assert second[0] != first[0]
    assert sampler()[1] != second[1]


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    torch.manual_seed(0)
    num_rows, probs = 200_000, torch.tensor([0.0, 0.5, 0.0, 0.3, 0.19, 0.01, 0.0])
    counts = draw(probs.log().expand(num_rows, -1), {}).bincount(minlength=len(probs)) / num_rows
    assert torch.all((counts - probs).abs() <= 5 * (probs * (1 - probs) / num_rows).sqrt())


def test_a_seeded_token_is_the_same_whatever_is_drawn_beside_it() -> None:
    logprobs = torch.randn(300, 2000, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    alone = [int(draw(logprobs[[row]], {0: torch.Generator().manual_seed(row)})) for row in (0, 177, 299)]
    together = draw(logprobs, {row: torch.Generator().manual_seed(row) for row in (0, 177, 299)})
    assert together[[0, 177, 299]].tolist() == alone


@pytest.mark.parametrize(("num_rows", "size"), [(1, 7), (700, 512)])
def test_ranks_are_those_of_vllms_formula(num_rows: int, size: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randint(-9, 9, (num_rows, size), generator=generator).float()  # many are equal
    x[:, 1] = -torch.inf
    values = x.gather(-1, torch.randint(0, size, (num_rows, 1), generator=generator))
    found = num_at_least(x, values)
    assert found.dtype == torch.int64
    assert torch.equal(found, (x >= values).sum(-1))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_code_reads_noise_anew_and_noise_follows_its_adapter_from_slot_to_slot() -> None:
    """Mixed batches of the whole model are compared with Hugging Face's in tests/e2e/test_infer_noise.py."""
    from grpo.infer.noise import NoiseTable, with_noise

    hidden, first, second = 32, 12, 22
    name, compilations, table = "model.norm.weight", list[Any](), NoiseTable(torch.zeros(64, dtype=torch.int64), {})
    bank = torch.zeros(5, hidden)
    table.banks = {name: bank}
    weights = {adapter: torch.linspace(0.5, 1.5, hidden) * adapter / 10 for adapter in (first, second)}
    for adapter, weight in weights.items():
        table.hold(adapter, {name: weight})
    x = torch.randn(3, hidden, generator=torch.Generator().manual_seed(0))

    def backend(graph: Any, inputs: Any) -> Any:
        compilations.append(graph)
        return graph.forward

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("rows", table.rows, persistent=False)
            self.register_buffer("bank", bank, persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return with_noise(x, x, rows=self.rows, bank=self.bank, epsilon=1e-6)  # type: ignore[arg-type]

    compiled = torch.compile(Module(), backend=backend, fullgraph=True, dynamic=True)

    def check(adapters: list[int], slots: list[int | None]) -> None:
        table.update(adapters, slots)
        for out, row, adapter in zip(compiled(x), x, adapters, strict=True):
            noisy = row * torch.rsqrt(row.pow(2).mean() + 1e-6) * weights.get(adapter, row)
            torch.testing.assert_close(out, noisy if adapter in weights else row, atol=1e-6, rtol=0)

    check([0, 0, 0], [first, second, 11, None])
    check([first, 0, second], [first, second, 11, None])
    check([second, 11, first], [None, 11, first, second])
    weights[first] = weights[first] + 1
    table.hold(first, {name: weights[first]})
    check([first, first, second], [None, 11, first, second])
    table.drop(first)
    del weights[first]
    check([first, second, second], [None, 11, first, second])
    assert len(compilations) == 1


def test_heads_in_a_dimension_of_their_own_are_rotated_as_those_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """By vLLM's own kernel; the second query is a part of a larger tensor."""
    ops = pytest.importorskip("vllm._custom_ops")
    monkeypatch.setattr(ops, "rotary_embedding", ops.rotary_embedding)
    install_flat_rotary()
    generator, size = torch.Generator().manual_seed(0), 32
    angles = torch.arange(5)[:, None] / 100 ** (torch.arange(0, size, 2) / size)
    cosines = torch.cat([angles.cos(), angles.sin()], -1)
    both = torch.randn(5, 6, size, generator=generator)
    contiguous, part = both[:, :4].clone(), both[:, :4]
    keys = [torch.ones(5, 2, size) for _ in range(2)]
    first, second = both[:, :4].chunk(2, -1)
    c, s = angles.cos()[:, None], angles.sin()[:, None]
    expected = torch.cat([first * c - second * s, second * c + first * s], -1)
    for query, key in zip((contiguous, part), keys, strict=True):
        ops.rotary_embedding(torch.arange(5), query, key, size, cosines, True)
        torch.testing.assert_close(query, expected)
    side_by_side = torch.ones(5, 2 * size)
    ops.rotary_embedding(torch.arange(5), torch.zeros(5, size), side_by_side, size, cosines, True)
    torch.testing.assert_close(keys[0], side_by_side.view(5, 2, size))


def vllms_norm(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> Any:
    """vLLM's RMSNorm [64], also where our noisy one has been registered in its place."""
    config = pytest.importorskip("vllm.config")
    ops, layernorm = (importlib.import_module(f"vllm.model_executor.{n}") for n in ("custom_op", "layers.layernorm"))
    monkeypatch.setattr(ops, "op_registry_oot", {})
    with config.set_current_vllm_config(config.VllmConfig()):
        return layernorm.RMSNorm(64, eps=1e-6, dtype=dtype).requires_grad_(False)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_norms_in_half_precision_are_those_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """By vLLM's own kernel. A last bit apart at most, where a sum of squares in another order is on the edge; queries
    are a part of a larger tensor. In float32 the layer is as it was."""
    served = vllms_norm(monkeypatch, torch.bfloat16)
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    theirs = Qwen3RMSNorm(64, eps=1e-6).to(torch.bfloat16).requires_grad_(False)
    for one in (served, theirs):
        one.weight.copy_(torch.linspace(0.5, 1.5, 64))
    x, residual = torch.randn(2, 500, 2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    in_float32 = served(x.float())
    install_norms(torch.nn.ModuleList([served]))
    assert torch.equal(served(x.float()), in_float32)
    output, total = served(x, residual)
    assert torch.equal(total, x + residual)
    turned = served(x.transpose(0, 1), residual.transpose(0, 1))[0].transpose(0, 1)
    for ours, expected in ((output, theirs(total)), (turned, output), (served(x[:, 1:]), theirs(x[:, 1:]))):
        assert (ours != expected).float().mean() < 0.01
        torch.testing.assert_close(ours, expected, atol=0, rtol=2.0**-7)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_norms_in_float32_and_of_other_classes_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cohere's model in vLLM has a class of the same name with other fields."""
    norms = [vllms_norm(monkeypatch, dtype) for dtype in (torch.bfloat16, torch.float32)]
    norms.append(importlib.import_module("vllm.model_executor.models.commandr").RMSNorm(64).to(torch.bfloat16))
    install_norms(torch.nn.ModuleList(norms))
    assert ["forward" in vars(one) for one in norms] == [True, False, False]

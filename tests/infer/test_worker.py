"""The LoRA product on CPUs, against a loop over rows, and the other parts of our extension of vLLM's worker."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from infer.worker import (
    GroupedLora,
    PolicyWorker,
    RestoredGenerators,
    joined_a,
    joined_b,
    with_siblings,
)

NUM_SLOTS, RANK, NUM_INPUTS = 3, 4, 6
SIZES = (8, 4, 4)  # as in qkv_proj: the slices of a merged layer need not be equal

Weights = tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]


def merged_layer(sizes: Sequence[int] = SIZES) -> Weights:
    """Random A and B of a merged layer as vLLM stacks them: [slots, 1, r, I] and [slots, 1, O_i, r]."""
    generator = torch.Generator().manual_seed(0)
    a = tuple(torch.randn(NUM_SLOTS, 1, RANK, NUM_INPUTS, generator=generator) for _ in sizes)
    b = tuple(torch.randn(NUM_SLOTS, 1, size, RANK, generator=generator) for size in sizes)
    return a, b


def row_by_row(x: torch.Tensor, slots: Sequence[int], weights: Weights, sizes: Sequence[int] = SIZES) -> torch.Tensor:
    """What every row's own adapter adds, one row at a time; nothing for slot -1."""
    y = torch.zeros(len(slots), sum(sizes))
    for row, slot in enumerate(slots):
        if slot >= 0:
            parts = [b[slot, 0] @ (a[slot, 0] @ x[row]) for a, b in zip(*weights, strict=True)]
            y[row] = torch.cat(parts)
    return y


def grouped(slots: Sequence[int]) -> GroupedLora:
    """With the metadata of a step whose rows have these slots; adapter ids are slot + 10, 0 is none."""
    lora = GroupedLora()
    mapping = SimpleNamespace(index_mapping=tuple(slot + 10 if slot >= 0 else 0 for slot in slots))
    lora.update_metadata(mapping, [10, 11, 12], NUM_SLOTS + 1, 100)
    return lora


@pytest.mark.parametrize(
    "slots",
    [
        pytest.param([0] * 5, id="one adapter"),
        pytest.param([-1] * 5, id="base only"),
        pytest.param([0, 0, -1, -1, 1, 1, 1], id="contiguous"),
        pytest.param([-1, 0, 1, -1, 2, 0, 1, -1], id="interleaved"),
        pytest.param([2, -1], id="base after the last slot"),
    ],
)
def test_every_row_gets_its_own_adapter_and_base_rows_get_nothing(slots: list[int]) -> None:
    weights = merged_layer()
    x = torch.randn(len(slots), NUM_INPUTS, generator=torch.Generator().manual_seed(1))
    base = torch.randn(len(slots), sum(SIZES), generator=torch.Generator().manual_seed(2))
    y = base.clone()
    grouped(slots).add_lora_linear(y, x, joined_a(weights[0]), joined_b(weights[1]), 1.0, SIZES)
    torch.testing.assert_close(y, base + row_by_row(x, slots, weights))
    for row, slot in enumerate(slots):
        assert slot >= 0 or torch.equal(y[row], base[row])


def test_shrink_and_expand_apart_give_the_same_as_the_whole_product() -> None:
    slots, weights = [-1, 0, 2, 0, -1, 1], merged_layer()
    x, y = torch.randn(len(slots), NUM_INPUTS), torch.zeros(len(slots), sum(SIZES))
    shrunk = torch.zeros(len(SIZES), len(slots), RANK)
    lora = grouped(slots)
    lora.add_shrink(shrunk, x, weights[0], 1.0)
    lora.add_expand(y, shrunk, weights[1], SIZES, offset_start=0, add_input=True)
    torch.testing.assert_close(y, row_by_row(x, slots, weights))


def test_what_is_written_through_the_views_is_what_the_product_reads() -> None:
    zeros = tuple(torch.zeros(NUM_SLOTS, 1, RANK, NUM_INPUTS) for _ in SIZES)
    a, b = joined_a(zeros), joined_b(tuple(torch.zeros(NUM_SLOTS, 1, size, RANK) for size in SIZES))
    weights = merged_layer()
    for index in range(len(SIZES)):  # as vLLM's set_lora does, with an adapter of a lower rank than the largest
        a[index][1, 0, : RANK - 1].copy_(weights[0][index][1, 0, : RANK - 1])
        b[index][1, 0, :, : RANK - 1].copy_(weights[1][index][1, 0, :, : RANK - 1])
        weights[1][index][1, 0, :, RANK - 1] = 0
    x, y = torch.randn(3, NUM_INPUTS), torch.zeros(3, sum(SIZES))
    grouped([1, 1, 1]).add_lora_linear(y, x, a, b, 1.0, SIZES)
    torch.testing.assert_close(y, row_by_row(x, [1, 1, 1], weights))
    for index in range(len(SIZES)):  # as reset_lora does
        a[index][1], b[index][1] = 0, 0
    assert not a.joint.any()
    assert not b.joint.any()


class FakeLayer:
    """A linear layer of vLLM with LoRA."""

    def __init__(self) -> None:
        self.lora_a_stacked, self.lora_b_stacked = merged_layer()
        self.output_slices = SIZES
        self.punica_wrapper: object = None

    def set_mapping(self, punica_wrapper: object) -> None:
        self.punica_wrapper = punica_wrapper


def worker_serving(layers: dict[str, object]) -> PolicyWorker:
    """Our extension on a worker that serves these layers."""
    manager = SimpleNamespace(modules=layers, punica_wrapper_mapping={"language_model": object()})
    worker = PolicyWorker()
    worker.get_model = lambda: SimpleNamespace(lora_manager=manager)  # type: ignore[attr-defined]
    return worker


def test_installing_reaches_every_layer_and_the_manager() -> None:
    first, second = FakeLayer(), FakeLayer()
    worker = worker_serving({"q": first, "k": second})
    assert worker.install_grouped_lora() == 2
    manager = worker.get_model().lora_manager  # type: ignore[attr-defined]
    assert first.punica_wrapper is second.punica_wrapper is manager.punica_wrapper_mapping["language_model"]


def test_a_layer_that_is_not_linear_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="lm_head"):
        worker_serving({"lm_head": SimpleNamespace()}).install_grouped_lora()


def test_of_layers_that_vllm_merges_all_parts_are_loaded() -> None:
    packed = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    base = {f"a.{part}.weight": Path("base") for part in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj")}
    base |= {"a.q_proj.bias": Path("base"), "norm": Path("base")}
    # v_proj brings q and k; gate_proj has no up_proj in this base; o_proj and the norm stand alone
    assert with_siblings(["a.v_proj.weight"], base, packed) == [f"a.{part}_proj.weight" for part in "qkv"]
    assert with_siblings(["a.gate_proj.weight", "norm"], base, packed) == ["a.gate_proj.weight", "norm"]
    assert with_siblings(["a.o_proj.weight"], base, packed) == ["a.o_proj.weight"]
    assert with_siblings(["a.q_proj.bias"], base, packed) == ["a.q_proj.bias"]


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

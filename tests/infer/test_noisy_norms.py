"""Norm weights row by row, against plain Hugging Face models with noisy norm weights; slots; compiled code."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from infer.noisy_norms import NoiseTable, with_noise

HIDDEN, LENGTH, NUM_SLOTS = 32, 7, 4
CLEAN_1, NOISY_1, CLEAN_2, NOISY_2 = 11, 12, 21, 22
SLOTS = (NOISY_2, CLEAN_1, NOISY_1, CLEAN_2)

Noise = dict[str, torch.Tensor]


@dataclass
class Norm:
    """What a table needs of a norm."""

    bank: torch.Tensor


def model() -> Any:
    """A random Qwen3 whose norm weights are not all ones."""
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        built = Qwen3ForCausalLM(config).eval()
        with torch.no_grad():
            for norm in norms_of(built).values():
                norm.weight.add_(0.2 * torch.randn(HIDDEN))
    return built


def norms_of(built: Any) -> dict[str, Any]:
    named = built.named_modules()
    return {f"{name}.weight": m for name, m in named if name.rpartition(".")[2] in ("norm", *LAYER_NORMS)}


LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")


def noise(seed: int) -> Noise:
    generator = torch.Generator().manual_seed(seed)
    return {n: m.weight.detach() + 0.1 * torch.randn(HIDDEN, generator=generator) for n, m in norms_of(model()).items()}


def table_for(names: Sequence[str], num_tokens: int = 64) -> NoiseTable:
    norms = {name: Norm(torch.zeros(1 + NUM_SLOTS, HIDDEN)) for name in names}
    return NoiseTable(torch.zeros(num_tokens, dtype=torch.int64), norms)


def ids_of(batch: Sequence[int]) -> torch.Tensor:
    return torch.randint(0, 64, (len(batch), LENGTH), generator=torch.Generator().manual_seed(len(batch)))


def served(batch: Sequence[int], table: NoiseTable, slots: Sequence[int | None] = SLOTS) -> torch.Tensor:
    """Logits [B, L, V] where the norms of a plain model read the table, as the worker's do; one adapter a sequence."""
    built = model()
    for name, norm in norms_of(built).items():

        def replaced(module: Any, inputs: Any, clean: torch.Tensor, bank: Norm = table.norms[name]) -> torch.Tensor:  # type: ignore[assignment]
            flat, x = clean.view(-1, HIDDEN), inputs[0].reshape(-1, HIDDEN)
            out = with_noise(flat, x, rows=table.rows, bank=bank.bank, epsilon=module.variance_epsilon)
            return out.view(clean.shape)

        norm.register_forward_hook(replaced)
    table.update([adapter for adapter in batch for _ in range(LENGTH)], slots)
    with torch.no_grad():
        logits: torch.Tensor = built(ids_of(batch)).logits
    return logits


def plain(batch: Sequence[int], weights: Noise) -> torch.Tensor:
    """Logits of a plain model with these norm weights."""
    built = model()
    assert not built.load_state_dict(weights, strict=False).unexpected_keys
    with torch.no_grad():
        logits: torch.Tensor = built(ids_of(batch)).logits
    return logits


def loaded_table() -> NoiseTable:
    table = table_for(list(norms_of(model())))
    table.hold(NOISY_1, noise(1))
    table.hold(NOISY_2, noise(2))
    return table


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param([NOISY_1] * 3, id="one version with noise"),
        pytest.param([0, NOISY_1, CLEAN_1], id="base, noisy and clean"),
        pytest.param([NOISY_2, CLEAN_2, 0, NOISY_1, CLEAN_1, NOISY_2, 0, NOISY_1], id="two versions, mixed"),
    ],
)
def test_each_sequence_of_a_mixed_batch_is_that_of_a_model_with_its_own_norm_weights(batch: list[int]) -> None:
    expected = {0: plain(batch, {}), NOISY_1: plain(batch, noise(1)), NOISY_2: plain(batch, noise(2))}
    logits = served(batch, loaded_table())
    for index, adapter in enumerate(batch):
        right = expected.get(adapter, expected[0])[index]
        torch.testing.assert_close(logits[index], right, atol=1e-5, rtol=0)
    assert (expected[0] - expected[NOISY_1]).abs().max() > 0.1
    assert (expected[NOISY_2] - expected[NOISY_1]).abs().max() > 0.1


def test_rows_without_noise_are_bit_for_bit_those_of_the_plain_model_whatever_is_beside_them() -> None:
    batch = [CLEAN_1, NOISY_1, 0, NOISY_2, CLEAN_2]
    logits, right = served(batch, loaded_table()), plain(batch, {})
    for index in (0, 2, 4):
        assert torch.equal(logits[index], right[index])
    assert not torch.equal(logits[1], right[1])


def test_noise_follows_its_adapter_into_another_slot() -> None:
    table, batch = loaded_table(), [NOISY_1, NOISY_2]
    expected = plain(batch, noise(1))[0], plain(batch, noise(2))[1]
    for slots in ((NOISY_1, NOISY_2, None, None), (NOISY_2, None, None, NOISY_1), (None, NOISY_1, NOISY_2, None)):
        logits = served(batch, table, slots)
        for index in (0, 1):
            torch.testing.assert_close(logits[index], expected[index], atol=1e-5, rtol=0)


def test_an_adapter_that_gets_its_noise_while_it_has_a_slot_has_it_from_the_next_step_on() -> None:
    table, batch = loaded_table(), [CLEAN_1]
    assert torch.equal(served(batch, table), plain(batch, {}))
    table.hold(CLEAN_1, noise(3))
    torch.testing.assert_close(served(batch, table), plain(batch, noise(3)), atol=1e-5, rtol=0)
    table.hold(CLEAN_1, noise(4))
    torch.testing.assert_close(served(batch, table), plain(batch, noise(4)), atol=1e-5, rtol=0)


def test_dropped_noise_is_gone_and_its_slot_can_be_anothers() -> None:
    table = loaded_table()
    served([NOISY_1, NOISY_2], table)
    table.drop(NOISY_1)
    table.drop(999)  # never had any
    assert torch.equal(served([NOISY_1], table), plain([NOISY_1], {}))
    table.hold(31, noise(3))
    logits = served([31, NOISY_2], table, (NOISY_2, None, 31, None))
    torch.testing.assert_close(logits[0], plain([31, NOISY_2], noise(3))[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("change", ["missing", "surplus"])
def test_noise_for_other_norms_than_the_models_is_an_error(change: str) -> None:
    weights = noise(1)
    if change == "missing":
        weights.pop("model.norm.weight")
    else:
        weights["model.other.weight"] = torch.ones(HIDDEN)
    with pytest.raises(ValueError, match=r"model\.(norm|other)\.weight"):
        loaded_table().hold(5, weights)


def test_compiled_code_reads_rows_and_weights_anew_without_compiling_again() -> None:
    table, name, compilations = loaded_table(), "model.norm.weight", []
    bank = table.norms[name].bank
    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(0))

    def backend(graph: Any, inputs: Any) -> Any:
        compilations.append(graph)
        return graph.forward

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("rows", table.rows, persistent=False)
            self.register_buffer("bank", bank, persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return with_noise(x, x, rows=self.rows, bank=self.bank, epsilon=1e-6)

    compiled = torch.compile(Module(), backend=backend, fullgraph=True, dynamic=True)
    for adapters, slots in (([0, 0, 0], SLOTS), ([NOISY_1, 0, NOISY_2], SLOTS), ([NOISY_2] * 3, SLOTS[::-1])):
        table.update(adapters, slots)
        compiled_out = compiled(x)
        assert torch.equal(compiled_out, with_noise(x, x, rows=table.rows, bank=bank, epsilon=1e-6))
        for index, adapter in enumerate(adapters):
            assert torch.equal(compiled_out[index], x[index]) == (adapter == 0)
    assert len(compilations) == 1

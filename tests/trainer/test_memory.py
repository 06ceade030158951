"""Checkpointed and compiled layers compute the same; freed memory is kept."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo.trainer.errors import ModelError, OutOfMemory
from grpo.trainer.memory import (
    ActivationCheckpointing,
    falling_back,
    missing_for_compile,
    prepare_layers,
    recorded_checkpointing,
)
from grpo.trainer.model import Policy
from grpo.trainer.packing import packed_tokens
from grpo.transport.records import MicroBatch
from torch.autograd.graph import saved_tensors_hooks

from tests.trainer.models import CPU, save_tiny_model, tiny_batch, tiny_policy, tiny_settings

BATCHES = tuple(tiny_batch(lengths) for lengths in ((7, 2, 1, 40, 9), (5, 30, 31), (50,)))

needs_compiler = pytest.mark.skipif(missing_for_compile(CPU) is not None, reason=str(missing_for_compile(CPU)))
WITHOUT_CODE = "aot_eager_decomp_partition"
"""The compiler up to the graphs and what they keep for the backward pass, without the C++ that takes long."""
# While torch compiles, it warns of its own code.
ignores_its_own_warnings = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is compiled is compiled for each layer."""
    return save_tiny_model(tmp_path_factory.mktemp("model"), num_hidden_layers=1)


def results(policy: Policy, batch: MicroBatch) -> list[torch.Tensor]:
    """Log-probabilities, and the gradients of their weighted sum."""
    logprobs = policy.logprobs(packed_tokens(batch, CPU))
    weights = torch.randn(len(logprobs), generator=torch.Generator().manual_seed(1))
    return [logprobs.detach(), *torch.autograd.grad((logprobs * weights).sum(), policy.parameters)]


def kept_for_backward(policy: Policy, batch: MicroBatch) -> list[torch.Tensor]:
    """The distinct tensors that are kept between a forward pass and its backward pass, without the model's own."""
    own = {p.untyped_storage().data_ptr() for p in policy._model.parameters()}
    own |= {b.untyped_storage().data_ptr() for b in policy._model.buffers()}
    kept: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in own:
            kept[place] = tensor
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        policy.logprobs(packed_tokens(batch, CPU)).sum().backward()
    return list(kept.values())


@pytest.mark.parametrize(
    ("checkpointing", "options"),
    [
        ("full", {}),
        ("selective", {}),  # whose attention here is no operator that could be kept
        ("full", {"quantization": "nf4"}),
        ("full", {"quantization": "fp8", "lora_target_modules": ("q_proj", "down_proj")}),
    ],
)
def test_checkpointed_layers_give_the_same_bit_for_bit(
    tiny_model: Path, checkpointing: ActivationCheckpointing, options: dict[str, Any]
) -> None:
    plain = tiny_policy(tiny_model, **options)
    checkpointed = tiny_policy(tiny_model, checkpointing=checkpointing, **options)
    for batch in BATCHES:
        for expected, ours in zip(results(plain, batch), results(checkpointed, batch), strict=True):
            assert torch.equal(expected, ours)


def test_checkpointed_layers_keep_little_more_than_their_inputs(tiny_model: Path) -> None:
    batch = tiny_batch((60, 60))
    policies = (tiny_policy(tiny_model, checkpointing=kind) for kind in ("none", "full"))
    plain, checkpointed = (kept_for_backward(policy, batch) for policy in policies)
    sizes = [sum(tensor.untyped_storage().nbytes() for tensor in kept) for kept in (plain, checkpointed)]
    assert sizes[1] < sizes[0] / 4
    # the hidden states of 120 tokens, 32 wide: one into each of the 2 layers, and what the last norm and the head keep
    assert sum(t.shape[-1] == 32 and t.numel() == 120 * 32 for t in checkpointed) <= 2 + 3


def test_checkpointed_layers_run_once_where_nothing_is_differentiated(tiny_model: Path) -> None:
    calls, layer = [], torch.nn.Linear(2, 2)
    layer.register_forward_pre_hook(lambda *_: calls.append(1))
    outer = torch.nn.Sequential(layer)
    prepare_layers([outer], "full", compile_layers=False, in_graph=False, device=CPU)
    with torch.no_grad():
        outer(torch.zeros(1, 2))
    assert len(calls) == 1
    outer(torch.zeros(1, 2)).sum().backward()
    assert len(calls) == 3


@needs_compiler
@ignores_its_own_warnings
def test_compiled_and_checkpointed_layers_give_the_same_for_every_length(
    one_layer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    plain = tiny_policy(one_layer)
    compiled = tiny_policy(one_layer, compile=True, checkpointing="full")
    graphs = []
    for batch in BATCHES:
        for expected, ours in zip(results(plain, batch), results(compiled, batch), strict=True):
            torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[2:] == graphs[1:-1], "a new length compiles the layers again"


@needs_compiler
@ignores_its_own_warnings
def test_a_compiled_quantized_base_is_not_kept_dequantized(one_layer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=WITHOUT_CODE))
    plain = tiny_policy(one_layer, quantization="nvfp4")
    compiled = tiny_policy(one_layer, quantization="nvfp4", compile=True)
    kept = kept_for_backward(compiled, BATCHES[0])
    weights = {(32, 32), (16, 32), (48, 32), (32, 48)}
    assert not [tuple(t.shape) for t in kept if tuple(t.shape) in weights or tuple(t.T.shape) in weights]
    for expected, ours in zip(results(plain, BATCHES[0]), results(compiled, BATCHES[0]), strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


def test_compiling_without_a_compiler_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ModelError, match="compile"):
        prepare_layers([], "none", compile_layers=True, in_graph=False, device=CPU)


GPU = torch.device("cuda")


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({"recipe": "bf16"}, ("none", "selective", "full")),
        ({"recipe": "fp32"}, ("none", "full")),
        ({"recipe": "bf16", "colocate": True}, ("selective", "full")),
        ({"gradient_checkpointing": True}, ("full",)),
        ({"gradient_checkpointing": False}, ("none",)),
        ({"gradient_checkpointing": "selective"}, ("selective",)),
    ],
)
def test_a_step_that_does_not_fit_makes_each_further_start_keep_less(
    changes: dict[str, Any], kinds: tuple[str, ...], tmp_path: Path
) -> None:
    settings = tiny_settings(tmp_path, **changes)
    for index, kind in enumerate(kinds):
        used = recorded_checkpointing(settings, GPU, tmp_path)
        assert used == kind
        error = ModelError if index == len(kinds) - 1 else OutOfMemory
        for _rank in range(2):  # each records the same
            with pytest.raises(error, match="CUDA"), falling_back(settings, GPU, tmp_path, used=used):
                raise torch.OutOfMemoryError("CUDA out of memory")
    assert recorded_checkpointing(settings, CPU, tmp_path) == (kinds[0] if len(kinds) == 1 else "none")


@torch.library.custom_op("grpo_tests::attend", mutates_args=())
def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """What torch's variable-length attention computes on a GPU, for whole sequences on a CPU."""
    return torch.zeros_like(q)


@attend.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(q)


@ignores_its_own_warnings
def test_a_layer_with_variable_length_attention_is_one_graph_with_numbers_as_constants(
    one_layer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr("grpo.trainer.attention.varlen_attn", lambda q, k, v, ends, *_, **__: attend(q, k, v, ends))
    inputs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, own: list[Any]) -> torch.fx.GraphModule:
        inputs.extend(own)
        return graph

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend, fullgraph=True))
    policy = tiny_policy(one_layer, attention_kernel="grpo_varlen", compile=True)
    with torch.no_grad():
        for batch in BATCHES:  # an attention that breaks the graph would raise
            assert torch.isfinite(policy.logprobs(packed_tokens(batch, CPU))).all()
    assert inputs
    # A float as a symbol is an input of its own.
    assert not [one for one in inputs if isinstance(one, float | torch.SymFloat) or getattr(one, "shape", None) == ()]

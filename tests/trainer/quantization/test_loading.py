"""Quantizing a 16- or 32-bit checkpoint while it is read."""

from pathlib import Path
from typing import Any

import pytest
import torch
from grpo.trainer.errors import ModelError
from grpo.trainer.loading import CheckpointTensors, filled_model, publish_dequantized
from grpo.trainer.quantization import QuantizedLinear, check_setting, stored_in
from grpo.transport.records import Quantization
from grpo.transport.run import RunFolder
from grpo.transport.weights.dequantized import FOLDER
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from tests.trainer.models import CPU, TARGETS, save_tiny_model


def loaded(folder: Path, format: Quantization = "nf4", *, dtype: torch.dtype = torch.float32) -> Any:
    stored = stored_in(folder)
    check_setting(folder, stored, format)
    tensors = CheckpointTensors(folder, device=CPU, dtype=dtype)
    return filled_model(tensors, attention="eager", stored=stored, format=format)


def weight_of(layer: QuantizedLinear, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return layer.dequantizer(dtype)(*layer.quantized)


def dequantized(folder: Path, model: Any, dtype: torch.dtype = torch.float32) -> Any:
    """What transformers loads, with the weights that `model` holds quantized in place of its own."""
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            with torch.no_grad():
                plain.get_submodule(name).weight.copy_(weight_of(module, dtype))
    return plain


def written(folder: Path, target: Path, format: Quantization, dtype: torch.dtype = torch.float32) -> Path:
    """The checkpoint with the values of a quantized base, as servers get it."""
    options: dict[str, Any] = {"quantization": format, "dtype": dtype, "device": CPU, "colocate": False}
    publish_dequantized(folder, RunFolder(path=target, run_id="9f"), base_model="9f", **options)
    return target / FOLDER


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = model(input_ids=torch.arange(2, 40)[None]).logits
    return output


def save_with_biases(folder: Path) -> Path:
    """A Qwen2, whose query, key and value layers have biases."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=64, num_key_value_heads=2, **sizes))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(folder)
    return folder


def rewritten(folder: Path, target: Path, **changes: torch.Tensor | None) -> Path:
    """A copy of a checkpoint with other tensors; None takes one away."""
    target.mkdir()
    for path in folder.glob("*.json"):
        (target / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "model.safetensors") | changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_all_linear_layers_of_the_decoder_are_quantized_and_nothing_else(tiny_model: Path) -> None:
    model = loaded(tiny_model, "fp8")
    found = {name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    assert {name.rpartition(".")[2] for name in found} == set(TARGETS)
    assert len(found) == 7 * 2
    assert all(model.get_submodule(name).format == "fp8" for name in found)
    assert type(model.lm_head) is torch.nn.Linear
    kinds = {parameter.dtype for parameter in model.parameters()}
    assert (kinds, any(p.requires_grad for p in model.parameters())) == ({torch.float32}, False)


def test_biases_stay_in_the_type_of_computation(tmp_path: Path) -> None:
    folder = save_with_biases(tmp_path / "biased")
    model = loaded(folder, dtype=torch.bfloat16)
    assert model.model.layers[0].self_attn.q_proj.bias.dtype == torch.bfloat16
    assert torch.equal(logits(model), logits(dequantized(folder, model, torch.bfloat16)))


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_is_the_embedding_and_an_untied_one_is_not(tmp_path: Path, tied: bool) -> None:
    folder = save_tiny_model(tmp_path / "model", tie_word_embeddings=tied)
    model = loaded(folder)
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert (head is embedding) == tied
    assert torch.equal(logits(model), logits(dequantized(folder, model)))


Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({Q_PROJ: None}, Q_PROJ),
        ({"model.norm.weight": None}, "model.norm.weight"),
        ({Q_PROJ: torch.zeros(32, 31)}, r"q_proj.*\[32, 31\]"),
        ({Q_PROJ: torch.zeros(32, 32, dtype=torch.int8)}, "q_proj.*int8"),
        ({Q_PROJ: torch.full((32, 32), torch.nan)}, "q_proj"),
        ({"model.layers.0.self_attn.q_proj.g_idx": torch.zeros(3)}, "g_idx"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_the_name_of_its_tensor(
    tiny_model: Path, tmp_path: Path, changes: dict[str, torch.Tensor | None], named: str
) -> None:
    with pytest.raises(ModelError, match=named):
        loaded(rewritten(tiny_model, tmp_path / "changed", **changes))


def test_shards_are_read_through_their_index(tiny_model: Path, tmp_path: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    plain.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 3
    assert torch.equal(logits(loaded(tmp_path / "sharded")), logits(loaded(tiny_model)))

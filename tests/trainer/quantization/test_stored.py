"""Checkpoints that are stored quantized, written by the libraries that define them where those run on a CPU."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from grpo.trainer.errors import ModelError
from grpo.trainer.quantization import QuantizedLinear
from grpo.transport.records import Quantization
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen3Config, Qwen3ForCausalLM

from tests.trainer.models import save_tiny_model
from tests.trainer.quantization import reference
from tests.trainer.quantization.reference import bytes_of
from tests.trainer.quantization.test_loading import loaded, logits, rewritten, weight_of, written

Tensors = dict[str, torch.Tensor]
PLAIN_LAYER = "model.layers.1.mlp.up_proj"
"""Left in 32 bits by every checkpoint here."""


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With matrices of more than one block of 128, some of them incomplete."""
    folder = tmp_path_factory.mktemp("wide")
    config = Qwen3Config.from_pretrained(save_tiny_model(folder))
    config.update({"hidden_size": 160, "intermediate_size": 272})
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def linears(folder: Path) -> list[str]:
    """The layers that a checkpoint quantizes."""
    names = {name.removesuffix(".weight") for name in load_file(folder / "model.safetensors") if "_proj" in name}
    return sorted(names - {PLAIN_LAYER})


def stored(folder: Path, target: Path, tensors: Mapping[str, Tensors], config: dict[str, Any]) -> Path:
    """A copy of a checkpoint in which each layer's weight gives way to the tensors by the ends of their names."""
    target.mkdir()
    plain = load_file(folder / "model.safetensors")
    for layer, own in tensors.items():
        del plain[f"{layer}.weight"]
        plain |= {layer + end: tensor.contiguous() for end, tensor in own.items()}
    save_file(plain, target / "model.safetensors", metadata={"format": "pt"})
    whole = json.loads((folder / "config.json").read_bytes()) | {"quantization_config": config}
    (target / "config.json").write_text(json.dumps(whole))
    return target


def check(folder: Path, plain: Path, model: Any, expected: Mapping[str, reference.Float32]) -> None:
    """Each layer's weight is the expected, in float32 bit for bit, and the model computes with all of them."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    assert found.keys() == expected.keys() == set(linears(plain))
    for name, weight in expected.items():
        assert torch.equal(weight_of(found[name]), torch.from_numpy(weight))
    assert type(model.get_submodule(PLAIN_LAYER)) is torch.nn.Linear
    served = written(folder, folder.parent, next(iter(found.values())).format)
    theirs = AutoModelForCausalLM.from_pretrained(served, dtype=torch.float32, attn_implementation="eager")
    assert torch.equal(logits(model), logits(theirs))
    close = {name: load_file(plain / "model.safetensors")[f"{name}.weight"].numpy() for name in expected}
    for name, weight in expected.items():
        assert np.abs(weight - close[name]).max() < 0.2 * np.abs(close[name]).max()


@pytest.mark.parametrize("storage", ["uint8", "float32"])
def test_bitsandbytes_nf4_as_transformers_writes_it(tmp_path: Path, wide_model: Path, storage: str) -> None:
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_quant_storage=storage,
        llm_int8_skip_modules=["lm_head", PLAIN_LAYER],
    )
    quantized = AutoModelForCausalLM.from_pretrained(wide_model, quantization_config=config, device_map="cpu")
    quantized.save_pretrained(tmp_path / "nf4")
    tensors = load_file(tmp_path / "nf4/model.safetensors")
    expected = {}
    for name in linears(wide_model):
        own = {end.removeprefix(f"{name}.weight"): t for end, t in tensors.items() if end.startswith(f"{name}.weight")}
        state = json.loads(bytes(own[".quant_state.bitsandbytes__nf4"].numpy()))
        inner, levels = own[".nested_absmax"].numpy(), own[".nested_quant_map"].numpy()
        absmax = reference.nested_absmax(own[".absmax"].numpy(), inner, np.float32(state["nested_offset"]), levels)
        codes = bytes_of(own[""]).reshape(-1)
        expected[name] = reference.dequantized_nf4(codes, absmax, tuple(state["shape"]), own[".quant_map"].numpy())
    check(tmp_path / "nf4", wide_model, loaded(tmp_path / "nf4", "nf4"), expected)


def rounded_to_e4m3(numbers: reference.Float64) -> torch.Tensor:
    """Bytes of the nearest, by trying all."""
    grid = np.where(np.isnan(reference.E4M3), np.inf, reference.E4M3)
    codes = np.abs(numbers.reshape(-1, 1) - grid).argmin(axis=1).astype(np.uint8).reshape(numbers.shape)
    return torch.from_numpy(codes).view(torch.float8_e4m3fn)


def fp8_layer(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, reference.Float32]:
    """Codes, scale and what they mean."""
    numbers = weight.double().numpy()
    shape = tuple(-(-size // length) for size, length in zip(numbers.shape, block, strict=True))
    scale = np.zeros(shape, dtype=np.float32)
    rows, columns = np.indices(numbers.shape)
    np.maximum.at(scale, (rows // block[0], columns // block[1]), np.abs(numbers) / 448)
    codes = rounded_to_e4m3(numbers / scale[rows // block[0], columns // block[1]])
    return codes, torch.from_numpy(scale), reference.dequantized_fp8(bytes_of(codes), scale, block)


def fp8_checkpoint(folder: Path, target: Path) -> tuple[Path, dict[str, reference.Float32]]:
    plain, tensors, expected = load_file(folder / "model.safetensors"), {}, {}
    for name in linears(folder):
        codes, scale, expected[name] = fp8_layer(plain[f"{name}.weight"], (128, 128))
        tensors[name] = {".weight": codes, ".weight_scale_inv": scale, ".input_scale": torch.ones(1)}
    return stored(folder, target, tensors, FP8_CONFIG), expected


FP8_CONFIG = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def test_fp8_with_inverse_scales_as_deepseek_and_qwen_store_it(tmp_path: Path, wide_model: Path) -> None:
    folder, expected = fp8_checkpoint(wide_model, tmp_path / "fp8")
    check(folder, wide_model, loaded(folder, "fp8"), expected)


def modelopt_tensors(folder: Path) -> tuple[dict[str, Tensors], dict[str, reference.Float32]]:
    """Each layer in modelopt's NVFP4, by the formulas of its paper in float64."""
    plain, tensors, expected = load_file(folder / "model.safetensors"), {}, {}
    for name in linears(folder):
        numbers = plain[f"{name}.weight"].double().numpy()
        whole = np.float32(np.abs(numbers).max() / (6 * 448))
        blocks = numbers.reshape(len(numbers), -1, 16)
        scale = rounded_to_e4m3(np.abs(blocks).max(axis=2) / (6 * float(whole)))
        steps = reference.E4M3[bytes_of(scale)][..., None] * float(whole)
        codes = np.abs((blocks / steps)[..., None] - reference.E2M1).argmin(axis=3).astype(np.uint8)
        codes = codes.reshape(len(numbers), -1)
        packed = codes[:, ::2] | codes[:, 1::2] << 4
        tensors[name] = {".weight": torch.from_numpy(packed), ".weight_scale": scale}
        tensors[name] |= {".weight_scale_2": torch.tensor(whole), ".input_scale": torch.tensor(0.5)}
        expected[name] = reference.dequantized_nvfp4(packed, bytes_of(scale), whole)
    tensors[linears(folder)[0]][".k_scale"] = torch.tensor(1.0)
    return tensors, expected


def test_nvfp4_as_modelopt_stores_it(tmp_path: Path, wide_model: Path) -> None:
    tensors, expected = modelopt_tensors(wide_model)
    settings = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head", PLAIN_LAYER]}
    folder = stored(wide_model, tmp_path / "nvfp4", tensors, {"quant_method": "modelopt"} | settings)
    check(folder, wide_model, loaded(folder, "nvfp4"), expected)


@pytest.mark.parametrize(
    ("config", "format", "named"),
    [
        (FP8_CONFIG, "nf4", "qlora_fp8"),  # the key to set
        ({"quant_method": "gptq", "bits": 4}, "fp8", "gptq"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, "fp8", "bitsandbytes"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "fp8", "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "fp8", "modelopt"),
    ],
)
def test_other_ways_of_storing_and_a_setting_that_contradicts_the_checkpoint_are_refused(
    tiny_model: Path, tmp_path: Path, config: dict[str, Any], format: Quantization, named: str
) -> None:
    with pytest.raises(ModelError, match=named):
        loaded(stored(tiny_model, tmp_path / "model", {}, config), format)


Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("tensor", "value"),
    [
        (f"{Q_PROJ}.weight_scale_inv", torch.ones(3, 3)),
        (f"{Q_PROJ}.weight", torch.zeros(32, 160)),
        (f"{Q_PROJ}.weight_scale_inv", None),
        ("lm_head.weight", torch.zeros(64, 160, dtype=torch.float8_e4m3fn)),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_the_name_of_their_layer(
    tmp_path: Path, wide_model: Path, tensor: str, value: torch.Tensor | None
) -> None:
    folder, _ = fp8_checkpoint(wide_model, tmp_path / "fp8")
    with pytest.raises(ModelError, match=re.escape(tensor.rpartition(".")[0])):
        loaded(rewritten(folder, tmp_path / "changed", **{tensor: value}), "fp8")

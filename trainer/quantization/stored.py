"""Checkpoints whose linear layers are stored quantized already: which format they are in, and their tensors as ours.

Four ways of storing, told apart by `quant_method` in config.json's `quantization_config` (modelopt's older exports have
it in hf_quant_config.json instead):

- ``bitsandbytes``: NF4 with or without double quantization, as transformers writes it
- ``fp8``: DeepSeek's and Qwen's `weight_scale_inv`, blocks of 128 by 128 or one scale for the matrix
- ``compressed-tensors``: `float-quantized` FP8 with a scale for the matrix, each row or blocks of 128 by 128, and
  `nvfp4-pack-quantized`
- ``modelopt``: NVFP4, and FP8 with a scale for the matrix

Layers that the checkpoint leaves in 16 bits stay so, which is seen by their tensors. What a checkpoint says of
activations and of the KV cache is for servers.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.errors import ModelError
from trainer.quantization import fp8, nf4, nvfp4
from trainer.quantization.files import TensorSource
from trainer.quantization.linear import Quantization

SETTINGS: Mapping[Quantization, str] = {"nf4": "qlora_bnb", "fp8": "qlora_fp8", "nvfp4": "qlora_fp4"}
"""The setting of grpo-train that holds a base in each format."""
OF_SERVERS = (
    ".input_scale",
    ".input_global_scale",
    ".activation_scale",
    ".output_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
)
"""Ends of the names of tensors that quantize activations and the KV cache."""

Tensors = dict[str, torch.Tensor]
Shape = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """How a checkpoint is stored."""

    method: str
    """`quant_method`, as the checkpoint calls it."""
    format: Quantization
    companion: str
    """What the name of each quantized layer's tensors ends in, and no other layer's."""
    parse: Callable[[Callable[[str], torch.Tensor], Shape], Tensors]
    """Turns a layer's tensors, read by the ends of their names, into those of our format."""
    ends: tuple[str, ...]
    """All ends of names that `parse` reads."""

    def tensors_of(self, layer: str, shape: Shape, checkpoint: TensorSource) -> Tensors | None:
        """The tensors of one linear layer; None where it is stored in 16 or 32 bits."""
        if layer + self.companion not in checkpoint.names:
            return None
        try:
            return self.parse(lambda end: checkpoint.read(layer + end), shape)
        except KeyError as error:
            raise ModelError(f"{checkpoint.folder}: {layer} is stored by {self.method} without {error}") from error
        except _Unlike as error:
            raise ModelError(f"{checkpoint.folder}: {layer} is stored by {self.method} with {error}") from error


class _Unlike(Exception):
    """What is found in a layer, and what was expected."""


def stored_in(folder: Path) -> Stored | None:
    """How the checkpoint is stored; None in plain 16 or 32 bits. Raises `ModelError` for what is not read here."""
    config = _quantization_config(folder)
    if config is None:
        return None
    method = str(config.get("quant_method", "bitsandbytes" if "load_in_4bit" in config else "")).lower()
    find = {"bitsandbytes": _bitsandbytes, "fp8": _fp8, "compressed-tensors": _compressed_tensors}.get(method)
    find = _modelopt if method.startswith("modelopt") else find
    stored = None if find is None else find(config)
    if stored is None:
        raise ModelError(
            f"the checkpoint in {folder} is stored quantized, as {_summary(config)}; expected bitsandbytes NF4, FP8 "
            "with a scale for the matrix, each row or each block of 128 by 128, or NVFP4; use a 16-bit checkpoint"
        )
    return stored


def check_setting(folder: Path, stored: Stored | None, quantization: Quantization | None) -> None:
    """Raises `ModelError`, which names the setting to change, where the checkpoint is stored in another format."""
    if stored is None or stored.format == quantization:
        return
    now = "no qlora_* setting is true" if quantization is None else f"{SETTINGS[quantization]} is true"
    raise ModelError(
        f"the checkpoint in {folder} is stored as {stored.format} (by {stored.method}), and {now}; set "
        f"{SETTINGS[stored.format]}: true instead, or use a 16-bit checkpoint of the model"
    )


def _quantization_config(folder: Path) -> dict[str, Any] | None:
    config = json.loads((folder / "config.json").read_bytes())
    found: dict[str, Any] | None = config.get("quantization_config")
    if found is None and (separate := folder / "hf_quant_config.json").is_file():
        found = {"quant_method": "modelopt"} | json.loads(separate.read_bytes())
    return found


def _summary(config: Mapping[str, Any]) -> str:
    keys = ("quant_method", "quant_algo", "format", "bits", "load_in_8bit", "bnb_4bit_quant_type", "weight_block_size")
    return ", ".join(f"{key} {config[key]!r}" for key in keys if config.get(key) is not None) or "an unknown method"


def _bitsandbytes(config: Mapping[str, Any]) -> Stored | None:
    if not config.get("load_in_4bit") or config.get("bnb_4bit_quant_type") != "nf4":
        return None
    absmax, state = ".weight.absmax", ".weight.quant_state.bitsandbytes__nf4"
    ends = (".weight", absmax, state, ".weight.quant_map", ".weight.nested_absmax", ".weight.nested_quant_map")
    return Stored(method="bitsandbytes", format="nf4", companion=absmax, parse=_parse_nf4, ends=ends)


def _parse_nf4(read: Callable[[str], torch.Tensor], shape: Shape) -> Tensors:
    state = json.loads(bytes(read(".weight.quant_state.bitsandbytes__nf4").numpy()))
    _expect("shape", tuple(state["shape"]), shape)
    _expect("blocksize", state["blocksize"], nf4.BLOCK)
    _expect_levels(read(".weight.quant_map"), nf4.levels())
    codes, absmax = read(".weight").flatten().view(torch.uint8), read(".weight.absmax")
    if "nested_offset" not in state:
        return nf4.plain(codes, absmax.float())
    _expect("nested_blocksize", state["nested_blocksize"], nf4.NESTED_BLOCK)
    _expect_levels(read(".weight.nested_quant_map"), nf4.nested_levels())
    offset = torch.tensor(state["nested_offset"], dtype=torch.float32)
    return nf4.nested(codes, absmax, nested_absmax=read(".weight.nested_absmax").float(), offset=offset)


def _fp8(config: Mapping[str, Any]) -> Stored | None:
    if config.get("weight_block_size") not in (None, [fp8.BLOCK, fp8.BLOCK]):
        return None
    return _stored_fp8("fp8", ".weight_scale_inv")


def _stored_fp8(method: str, scale: str) -> Stored:
    def parse(read: Callable[[str], torch.Tensor], shape: Shape) -> Tensors:
        weight, scales = read(".weight"), read(scale).float()
        scales = scales.reshape(-1, 1) if scales.ndim < 2 else scales
        _expect("type of weight", weight.dtype, torch.float8_e4m3fn)
        _expect("shape of weight", tuple(weight.shape), shape)
        if not fp8.is_scale(tuple(scales.shape), shape):
            raise _Unlike(
                f"a scale of shape {list(scales.shape)} for a weight of {list(shape)}, expected one for the matrix, "
                "each row or each block of 128 by 128"
            )
        return {"codes": weight, "scale": scales}

    return Stored(method=method, format="fp8", companion=scale, parse=parse, ends=(".weight", scale))


def _compressed_tensors(config: Mapping[str, Any]) -> Stored | None:
    groups = [group.get("weights") or {} for group in config.get("config_groups", {}).values()]
    others = [config.get("transform_config"), (config.get("sparsity_config") or {}).get("format", "dense") != "dense"]
    if any(others) or any(group.get("type") != "float" or not group.get("symmetric", True) for group in groups):
        return None
    match config.get("format"), {group.get("num_bits") for group in groups}:
        case "float-quantized" | "naive-quantized", numbers if numbers == {8}:
            return _stored_fp8("compressed-tensors", ".weight_scale")
        case "nvfp4-pack-quantized", numbers if numbers == {4}:
            return _stored_nvfp4("compressed-tensors", ".weight_packed", ".weight_global_scale", reciprocal=True)
    return None


def _modelopt(config: Mapping[str, Any]) -> Stored | None:
    algorithm = str((config.get("quantization") or config).get("quant_algo", "")).upper()
    if algorithm in ("NVFP4", "W4A16_NVFP4"):
        return _stored_nvfp4("modelopt", ".weight", ".weight_scale_2", reciprocal=False)
    return _stored_fp8("modelopt", ".weight_scale") if algorithm == "FP8" else None


def _stored_nvfp4(method: str, weight: str, global_scale: str, *, reciprocal: bool) -> Stored:
    """A reciprocal is rounded to float32, as vLLM rounds it."""

    def parse(read: Callable[[str], torch.Tensor], shape: Shape) -> Tensors:
        codes, scale = read(weight), read(".weight_scale")
        rows, columns = shape
        _expect("type of weight", codes.dtype, torch.uint8)
        _expect("shape of weight", tuple(codes.shape), (rows, columns // 2))
        _expect("type of scale", scale.dtype, torch.float8_e4m3fn)
        _expect("shape of scale", tuple(scale.shape), (rows, columns // nvfp4.BLOCK))
        whole = read(global_scale).float().reshape(())
        return {"codes": codes, "scale": scale, "global_scale": whole.reciprocal() if reciprocal else whole}

    ends = (weight, ".weight_scale", global_scale)
    return Stored(method=method, format="nvfp4", companion=global_scale, parse=parse, ends=ends)


def _expect(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise _Unlike(f"{what} {found}, expected {expected}")


def _expect_levels(found: torch.Tensor, expected: torch.Tensor) -> None:
    if found.shape != expected.shape or not torch.allclose(found.float(), expected, rtol=0, atol=1e-6):
        raise _Unlike("levels of its own, expected those of bitsandbytes")

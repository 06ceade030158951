"""Builds a model without memory, then fills it tensor by tensor from a checkpoint, or from what a server shares.

A model that is quantized never exists in 16 bits, and once in its format: each linear layer's weight is read, quantized
on the device and released before the next is read.
"""

import functools
import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from grpo.trainer.distributed import own_rows, with_rows
from grpo.trainer.errors import ModelError
from grpo.trainer.quantization import (
    DEQUANTIZE,
    QUANTIZE,
    QuantizedLinear,
    Stored,
    Tensors,
    check_setting,
    stored_in,
)
from grpo.transport.records import Quantization
from grpo.transport.run import RunFolder
from grpo.transport.weights.dequantized import write_dequantized
from grpo.transport.weights.shards import Weight, checkpoint_files
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

log = logging.getLogger(__name__)

_OF_SERVERS = re.compile(r"\.(input_scale|input_global_scale|activation_scale|output_scale|[kvq]_scale)$")
"""Tensors that quantize activations and the KV cache."""
_INDEX = "model.safetensors.index.json"
ForShards = tuple[Any, Callable[[], None]]
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class CheckpointTensors:
    """A safetensors checkpoint's tensors by name, in one file or in shards."""

    def __init__(self, folder: Path, *, device: torch.device, dtype: torch.dtype) -> None:
        """Plain tensors come in `dtype`, all on `device`."""
        self.folder, self.device, self.dtype = folder, device, dtype
        self._files = _files_by_name(folder)
        self.used: set[str] = set()
        """Names of the tensors that were read."""

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._files)

    def read(self, name: str) -> torch.Tensor:
        """Returns one tensor as it is stored, on the device."""
        self.used.add(name)
        with safe_open(self._files[name], framework="pt") as tensors:
            tensor: torch.Tensor = tensors.get_tensor(name)
        return tensor.to(self.device, copy=True)

    def plain(self, name: str, expected: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of 16- or 32-bit floats in the type of the computation. Raises `ModelError`."""
        if name not in self.names:
            raise ModelError(
                f"{self.folder} has no tensor {name}, expected each linear layer's weight by the model's own names"
            )
        tensor = self.read(name)
        if tensor.shape != expected.shape or tensor.dtype not in _FLOATS:
            raise ModelError(
                f"{self.folder}: {name} is {tensor.dtype} of shape {list(tensor.shape)}, expected 16- or 32-bit floats "
                f"of shape {list(expected.shape)}"
            )
        return tensor.to(self.dtype)

    def rows(self, name: str, shape: Sequence[int], rows: slice) -> torch.Tensor:
        """Returns these rows of a plain tensor of this shape. No others are read from the file. Raises `ModelError`."""
        with safe_open(self._files[name], framework="pt") as tensors:
            stored = tensors.get_slice(name)
            if list(stored.get_shape()) != list(shape):
                raise ModelError(f"{self.folder}: {name} has shape {stored.get_shape()}, expected {list(shape)}")
            if rows.start >= rows.stop:
                return torch.empty(0, *shape[1:], dtype=self.dtype, device=self.device)
            own: torch.Tensor = stored[rows]
        if own.dtype not in _FLOATS:
            raise ModelError(f"{self.folder}: {name} is {own.dtype}, expected 16- or 32-bit floats")
        return own.to(self.device, self.dtype, copy=True)

    def check_all_used(self, model: Any, tied: str | None) -> None:
        """Raises `ModelError` if there are tensors that the model has no place for."""
        ignored = ["rotary_emb.inv_freq$", *(model._keys_to_ignore_on_load_unexpected or ())]
        left = {name for name in self.names - self.used - {tied} if not _OF_SERVERS.search(name)}
        if left := {name for name in left if not any(re.search(key, name) for key in ignored)}:
            raise ModelError(f"{self.folder} has tensors that {type(model).__name__} has no place for: {shorten(left)}")


def filled_model(
    tensors: CheckpointTensors, *, attention: str, stored: Stored | None = None, format: Quantization | None = None
) -> Any:
    """Returns the causal language model of these tensors on their device, frozen and in evaluation mode. Its decoder's
    linear layers are as `stored`, or quantized in `format` if they are plain; all else is in the tensors' type. Raises
    `ModelError` if tensors and model do not fit."""
    model, tied = _empty_model(tensors.folder, dtype=tensors.dtype, attention=attention)
    if (tensors.folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(tensors.folder, local_files_only=True)
    if stored is not None or format is not None:
        for name in decoder_linears(model):
            _quantize(model, name, tensors, stored, format)
    for name, parameter in list(model.named_parameters()):
        if name != tied and name not in tensors.used:
            module, _, own_name = name.rpartition(".")
            filled = torch.nn.Parameter(tensors.plain(name, parameter), requires_grad=False)
            setattr(model.get_submodule(module), own_name, filled)
    model.tie_weights()
    _fill_buffers(model, tensors)
    tensors.check_all_used(model, tied)
    return model.eval()


def model_for_shards(folder: Path, *, dtype: torch.dtype, attention: str, device: torch.device) -> ForShards | None:
    """Returns the causal language model in `folder` without memory, and the function that gives its parameters their
    values once they are sharded: each rank reads its own rows and nothing else, and has them on `device` in `dtype`.

    None if the checkpoint's tensors are not the model's parameters, name by name, so that transformers must convert
    them.
    """
    if not any((folder / name).is_file() for name in (_INDEX, "model.safetensors")):
        return None
    tensors = CheckpointTensors(folder, device=device, dtype=dtype)
    model, tied = _empty_model(folder, dtype=dtype, attention=attention)
    model.tie_weights()
    names: dict[torch.nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in tensors.names:
            names.setdefault(parameter, name)
    known = {name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}
    kept = getattr(model, "_keep_in_fp32_modules", None) or getattr(model, "_keep_in_fp32_modules_strict", None)
    if tensors.names - known - {tied} or kept or len(names) < len(list(model.parameters())):
        return None
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    try:
        _fill_buffers(model, tensors)
    except ModelError:
        return None
    places: dict[str, list[tuple[torch.nn.Module, str]]] = {}
    for module in model.modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            places.setdefault(names[parameter], []).append((module, attribute))

    def fill() -> None:
        for name, found in places.items():
            module, attribute = found[0]
            empty: DTensor = getattr(module, attribute)
            filled = torch.nn.Parameter(
                with_rows(empty, tensors.rows(name, empty.shape, own_rows(empty))), requires_grad=empty.requires_grad
            )
            for module, attribute in found:
                setattr(module, attribute, filled)

    return model, fill


@contextmanager
def seemingly_in_memory(model: torch.nn.Module) -> Iterator[None]:
    """Within the block, parameters without memory look as if they were in main memory: one number stands for all of
    each. PEFT moves adapters to where their base is. Whether they are frozen stays as the block leaves it."""
    places = [
        (module, attribute, parameter)
        for module in model.modules()
        for attribute, parameter in module.named_parameters(recurse=False)
        if parameter.is_meta
    ]
    for module, attribute, empty in places:
        stand_in = torch.zeros((), dtype=empty.dtype).expand(empty.shape)
        setattr(module, attribute, torch.nn.Parameter(stand_in, requires_grad=empty.requires_grad))
    yield
    for module, attribute, empty in places:
        empty.requires_grad_(getattr(module, attribute).requires_grad)
        setattr(module, attribute, empty)


def publish_dequantized(
    folder: Path,
    run: RunFolder,
    *,
    base_model: str,
    quantization: Quantization,
    dtype: torch.dtype,
    device: torch.device,
    colocate: bool,
) -> None:
    """Writes the values that a quantized model computes with on `device`, as a checkpoint in `dtype` in the run's
    folder: for servers, and for the trainer itself if it computes on theirs (`colocate`). Writes nothing if it is there
    already, or if servers on GPUs read the same format (not yet run on a GPU). `base_model` is the identity of the
    checkpoint in `folder`. Raises `ModelError` and `StorageError`."""
    stored, type_name = stored_in(folder), str(dtype).removeprefix("torch.")
    check_setting(folder, stored, quantization)
    if stored is not None and device.type == "cuda" and not colocate:
        return
    tensors = CheckpointTensors(folder, device=device, dtype=dtype)
    model, tied = _empty_model(folder, dtype=dtype, attention="sdpa")
    linears = {f"{name}.weight": name for name in decoder_linears(model)}

    def values(name: str, empty: torch.Tensor) -> torch.Tensor:
        found = _quantized_parts(linears[name], empty, tensors, stored, quantization) if name in linears else None
        if found is None:
            return tensors.plain(name, empty)
        return DEQUANTIZE[found[1]](found[0], (empty.shape[0], empty.shape[1]), dtype)

    weights = [
        Weight(name=name, dtype=type_name, shape=tuple(empty.shape), tensor=functools.partial(values, name, empty))
        for name, empty in model.named_parameters()
        if name != tied
    ]
    written = write_dequantized(
        run,
        base_model=base_model,
        quantization=quantization,
        dtype=type_name,
        files=checkpoint_files(folder, dtype=type_name),
        weights=weights,
    )
    log.info("the base's values in %s are in %s, for servers to have the same", quantization, written)


def _empty_model(folder: Path, *, dtype: torch.dtype, attention: str) -> tuple[Any, str | None]:
    """Returns a checkpoint's model without memory, and the name of its head's weight if that is the embedding's."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
        )
    head = model.get_output_embeddings() if config.tie_word_embeddings else None
    return model, next((f"{name}.weight" for name, module in model.named_modules() if module is head), None)


def decoder_linears(model: Any) -> list[str]:
    """Returns the names of the linear layers of the decoder: all but the LM head."""
    kinds = (torch.nn.Linear, QuantizedLinear)
    inside = {id(module) for module in model.base_model.modules() if isinstance(module, kinds)}
    return [name for name, module in model.named_modules() if id(module) in inside]


def shorten(names: set[str]) -> str:
    """Returns at most five of the names, and how many more there are, as text."""
    shown = ", ".join(sorted(names)[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


def _quantize(
    model: Any, name: str, tensors: CheckpointTensors, stored: Stored | None, format: Quantization | None
) -> None:
    """Replaces a plain layer by a quantized one, unless a checkpoint that is stored quantized leaves this one in 16
    bits."""
    empty = model.get_submodule(name)
    if (found := _quantized_parts(name, empty.weight, tensors, stored, format)) is None:
        return
    bias, shape = None if empty.bias is None else tensors.plain(f"{name}.bias", empty.bias), empty.weight.shape
    model.set_submodule(name, QuantizedLinear(found[0], format=found[1], shape=(shape[0], shape[1]), bias=bias))


def _quantized_parts(
    name: str, empty: torch.Tensor, tensors: CheckpointTensors, stored: Stored | None, format: Quantization | None
) -> tuple[Tensors, Quantization] | None:
    """Returns the tensors of a layer's quantized weight and their format; None if the checkpoint leaves it in 16
    bits."""
    if stored is not None:
        parts = stored.tensors_of(name, (empty.shape[0], empty.shape[1]), tensors.names, tensors.read)
        return None if parts is None else (parts, stored.format)
    assert format is not None
    weight = tensors.plain(f"{name}.weight", empty)
    if not all(torch.isfinite(extreme) for extreme in weight.aminmax()):
        raise ModelError(f"{name} has weights that are not finite, which no quantized format holds")
    return QUANTIZE[format](weight), format


def _fill_buffers(model: Any, tensors: CheckpointTensors) -> None:
    """Reads the buffers that the checkpoint holds, and has transformers compute the others, such as the rotary
    embedding's frequencies."""
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # so that transformers leaves it as it is
    computed = []
    for name, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is None or not buffer.is_meta:
                continue
            if (stored := f"{name}.{key}") in tensors.names:
                module._buffers[key] = tensors.plain(stored, buffer)
            else:
                module._buffers[key] = torch.full_like(buffer, torch.nan, device=tensors.device)
                computed.append((name, module, key))
    with torch.no_grad():
        for module in (model.base_model, *(module for _, module, _ in computed)):
            model._init_weights(module)
    if unknown := [f"{name}.{key}" for name, module, key in computed if module._buffers[key].isnan().any()]:
        raise ModelError(
            f"{type(model).__name__} has unknown buffers, such as {unknown[0]}; turn qlora_* and colocate off"
        )


def _files_by_name(folder: Path) -> dict[str, Path]:
    if (index := folder / _INDEX).is_file():
        return {name: folder / file for name, file in json.loads(index.read_bytes())["weight_map"].items()}
    with safe_open(folder / "model.safetensors", framework="pt") as tensors:
        return dict.fromkeys(tensors.keys(), folder / "model.safetensors")

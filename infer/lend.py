"""Exports the served model's base weights to a trainer on the same device (`colocate`). Runs in the engine process.

On a CPU the weights move into memory that another process can map, and the server computes with them as they are
instead of with vLLM's packed copies; on a GPU they stay where they are. Rows of layers that vLLM fuses are exported as
tensors of their own, by the checkpoint's names, without copying. The module imports no vLLM at its start.
"""

import ctypes
import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from grpo.infer.checks import tensor_shapes
from grpo.transport.errors import SharedBaseError
from grpo.transport.shared_base import CudaMemory, HostMemory, Manifest, aligned, device_key, export_base


def keep_plain_weights() -> None:
    """Lets vLLM compute with plain weights on a CPU. Called before it builds a model."""
    utils: Any = importlib.import_module("vllm.model_executor.layers.utils")
    if not hasattr(utils, "dispatch_cpu_unquantized_gemm"):
        raise SharedBaseError("this vLLM computes with packed weights; use one of 0.26 to 0.33, or turn colocate off")

    def plain(layer: Any, remove_weight: bool) -> None:
        """Takes the place of vLLM's choice of a product for a layer; `remove_weight` is for those that pack it."""
        layer.cpu_linear = plain_linear

    utils.dispatch_cpu_unquantized_gemm = plain


def plain_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Returns `x @ weight.T + bias` [..., out] for x [..., in], weight [out, in], bias [out]. In float32 it calls
    oneDNN, as vLLM's packed product does: torch takes that by itself for 16-bit types only, and MKL makes about half as
    many products a second from 8 rows on."""
    if x.dtype == weight.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return output
    return torch.nn.functional.linear(x, weight, bias)


def export_model(
    model: Any, *, output_dir: str, base_folder: Path, base_model: str, dtype: torch.dtype, device: torch.device
) -> Manifest:
    """Offers the model's base weights to the trainers of the run in `output_dir`, from now on. Returns their manifest.
    `base_model` is the identity of the checkpoint in `base_folder`, `dtype` the type of the computation. Raises
    `SharedBaseError` where the model does not hold the checkpoint's tensors as they are."""
    shapes, key = tensor_shapes(base_folder), device_key(device)
    moved = _moved(model) if device.type == "cpu" else None

    def make() -> tuple[Manifest, HostMemory | CudaMemory]:
        memory = moved or CudaMemory()  # each importer has CUDA handles of its own
        views, left = by_checkpoint(model, dict(rows_of_parameters(model)), shapes)
        entries = {name: memory.entry(name, view) for name, view in views.items()}
        manifest = Manifest(
            base_model=base_model,
            device=key,
            dtype=str(dtype).removeprefix("torch."),
            memories=memory.memories,
            tensors=entries,
            left=left,
        )
        return manifest, memory

    manifest, _ = make()  # what cannot be shared ends the server now
    export_base(output_dir, key, make=make)
    return manifest


def _moved(model: Any) -> HostMemory:
    """Moves all parameters, one after the other, into memory that can be shared."""
    parameters = list(model.parameters())
    memory = HostMemory(sum(aligned(parameter.nbytes) for parameter in parameters))
    for parameter in parameters:
        parameter.data = memory.place(parameter.data)
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
    return memory


def rows_of_parameters(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's parameters by the names of plain layers; fused ones as views of the rows of each part, embeddings and
    heads without the rows beyond the vocabulary."""
    packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    for name, parameter in model.named_parameters():
        owner, _, own = name.rpartition(".")
        layer, module = model.get_submodule(owner), owner.removesuffix(".base_layer")
        path, _, kind = module.rpartition(".")
        data = parameter.data
        if len(parts := packed.get(kind, ())) > 1:
            sizes = list(getattr(layer, "output_partition_sizes", ()))
            if len(sizes) != len(parts) or sum(sizes) != len(data):
                raise SharedBaseError(
                    f"{name} has {len(data)} rows, expected those of {len(parts)} parts of {sizes}; turn colocate off"
                )
            for part, rows in zip(parts, data.split(sizes), strict=True):
                yield ".".join(filter(None, (path, part, own))), rows
        else:
            vocabulary = getattr(layer, "org_vocab_size", None)
            yield f"{module}.{own}" if module else own, data if vocabulary is None else data[:vocabulary]


def by_checkpoint(
    model: Any, held: Mapping[str, torch.Tensor], shapes: Mapping[str, Sequence[int]]
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Returns what the model holds, by the checkpoint's names, and the names that it lacks, with the reasons. Raises
    `SharedBaseError` for tensors that are missing, surplus or of another shape."""
    views: dict[str, torch.Tensor] = {}
    left: dict[str, str] = {}
    used = set[str]()
    tied = getattr(model.config, "tie_word_embeddings", False)
    for name, shape in shapes.items():
        own = _unfused_name(model, name)
        if name.endswith(".rotary_emb.inv_freq"):
            left[name] = "it is computed"
        elif own not in held and name == "lm_head.weight" and tied:
            left[name] = "the head is tied to the embedding"
        else:
            found = list(held[own].shape) if own in held else "nothing"
            if found != list(shape):
                what = f"the server holds {found} for {name}, {list(shape)} in the checkpoint"
                raise SharedBaseError(f"{what}; turn colocate off")
            views[name] = held[own]
            used.add(own)
    if surplus := sorted(set(held) - used):
        raise SharedBaseError(f"the server holds {surplus[0]}, which the checkpoint does not have; turn colocate off")
    return views, left


def _unfused_name(model: Any, name: str) -> str:
    """Returns what `rows_of_parameters` calls a tensor of the checkpoint. vLLM renames tensors, and newer versions name
    parts by what they are fused into."""
    mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
    own: list[str] = [name] if mapper is None else mapper.apply_list([name])
    packed, pieces, part = getattr(model, "packed_modules_mapping", {}), (own or [name])[0].split("."), name.split(".")
    if len(pieces) > 1 and part[-2] in packed.get(pieces[-2], ()):
        pieces[-2] = part[-2]
    return ".".join(pieces)

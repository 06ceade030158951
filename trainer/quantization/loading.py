"""A quantized model from a checkpoint of any kind: built without memory, then filled tensor by tensor.

The model in 16 bits never exists, and of the quantized one there is one copy: each linear layer's weight is read,
quantized on the device and released before the next is read.
"""

import logging
import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from trainer.errors import ModelError
from trainer.quantization.files import TensorFiles
from trainer.quantization.linear import Quantization, QuantizedLinear
from trainer.quantization.stored import OF_SERVERS, Stored

log = logging.getLogger(__name__)

_META = torch.device("meta")
_NAMES_IN_ERROR = 5


def quantized_model(
    folder: Path,
    *,
    dtype: torch.dtype,
    attention: str,
    quantization: Quantization,
    stored: Stored | None,
    device: torch.device,
) -> Any:
    """The model in `folder` on `device`, its decoder's linear layers in the format `quantization`, all else in `dtype`.

    `stored` is how the checkpoint holds them already, None where it holds them in 16 or 32 bits. Raises `ModelError`
    where checkpoint and model do not fit.
    """
    model = empty_model(folder, dtype=dtype, attention=attention)
    filler = _Filler(TensorFiles(folder), quantization=quantization, stored=stored, dtype=dtype, device=device)
    linear = decoder_linears(model)
    for name in linear:
        model.set_submodule(name, filler.linear(name, model.get_submodule(name)))
    tied = tied_head(model)
    for name, parameter in list(model.named_parameters()):
        if parameter.device == _META and name != tied:
            set_parameter(model, name, filler.plain(name, parameter.shape))
    model.tie_weights()
    rebuild_buffers(model, device)
    filler.check_all_used(tied, model)
    quantized = [m for m in model.modules() if isinstance(m, QuantizedLinear)]
    num_weights = sum(m.in_features * m.out_features for m in quantized)
    per_weight = sum(m.num_bytes for m in quantized) / max(1, num_weights)
    log.info("%d of %d linear layers in %s, %.4f bytes a weight", len(quantized), len(linear), quantization, per_weight)
    return model.eval()


def decoder_linears(model: Any) -> list[str]:
    """Names of the linear layers of the decoder: all but the LM head."""
    inside = {id(module) for module in model.base_model.modules() if type(module) is torch.nn.Linear}
    return [name for name, module in model.named_modules() if id(module) in inside]


class _Filler:
    """Reads a model's tensors and remembers which."""

    def __init__(
        self,
        checkpoint: TensorFiles,
        *,
        quantization: Quantization,
        stored: Stored | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._checkpoint, self._quantization, self._stored = checkpoint, quantization, stored
        self._dtype, self._device = dtype, device
        self._used: set[str] = set()

    def linear(self, name: str, empty: torch.nn.Linear) -> torch.nn.Module:
        """The layer that takes the place of `empty`: quantized, or plain where the checkpoint is stored quantized but
        for this layer."""
        shape = (empty.out_features, empty.in_features)
        bias = None if empty.bias is None else self.plain(f"{name}.bias", empty.bias.shape)
        if self._stored is None:
            weight = _finite(name, self._read(f"{name}.weight", shape)).to(self._device)
            return QuantizedLinear.quantized(weight, format=self._quantization, bias=bias)
        tensors = self._stored.tensors_of(name, shape, self._checkpoint)
        if tensors is None:
            empty.weight = torch.nn.Parameter(self.plain(f"{name}.weight", shape), requires_grad=False)
            empty.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)
            return empty
        self._used |= {name + end for end in self._stored.ends}
        on_device = {key: tensor.to(self._device, copy=True) for key, tensor in tensors.items()}
        return QuantizedLinear(on_device, format=self._quantization, shape=shape, bias=bias)

    def plain(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor in the type of the computation."""
        return self._read(name, shape).to(self._device, self._dtype, copy=True)

    def check_all_used(self, tied: str | None, model: Any) -> None:
        """Raises `ModelError` where the checkpoint holds what the model has no place for."""
        left = set(self._checkpoint.names) - self._used - {tied}
        of_servers = {name for name in left if name.endswith(OF_SERVERS)}
        if of_servers:
            log.info(
                "%d scales of activations and of the KV cache are not used: the trainer computes both in %s",
                len(of_servers),
                self._dtype,
            )
        ignored = [r"rotary_emb\.inv_freq$", *(model._keys_to_ignore_on_load_unexpected or ())]
        left = {name for name in left - of_servers if not any(re.search(key, name) for key in ignored)}
        if left:
            raise ModelError(
                f"{self._checkpoint.folder} has tensors that {type(model).__name__} has no place for: {some(left)}"
            )

    def _read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """16- or 32-bit floats of this shape."""
        where = self._checkpoint.folder
        if name not in self._checkpoint.names:
            raise ModelError(
                f"{where} has no tensor {name}, expected each linear layer's weight by the model's own names; experts "
                "that the model holds in one tensor cannot be quantized"
            )
        tensor = self._checkpoint.read(name)
        if tuple(tensor.shape) != tuple(shape) or tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise ModelError(
                f"{where}: {name} is {tensor.dtype} of shape {list(tensor.shape)}, expected 16- or 32-bit floats of "
                f"shape {list(shape)}"
            )
        self._used.add(name)
        return tensor


def empty_model(folder: Path, *, dtype: torch.dtype, attention: str) -> Any:
    """The model without memory for its tensors."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with _META:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model


def tied_head(model: Any) -> str | None:
    """The name of the LM head's weight where it is that of the embedding."""
    if not model.config.tie_word_embeddings:
        return None
    head = model.get_output_embeddings()
    return next(f"{name}.weight" for name, module in model.named_modules() if module is head)


def set_parameter(model: Any, name: str, tensor: torch.Tensor) -> None:
    module, _, own_name = name.rpartition(".")
    setattr(model.get_submodule(module), own_name, torch.nn.Parameter(tensor, requires_grad=False))


def rebuild_buffers(model: Any, device: torch.device) -> None:
    """Computes the buffers that no checkpoint holds, such as the rotary embedding's frequencies."""
    for name, module in list(model.named_modules()):
        if any(buffer.device == _META for buffer in module.buffers(recurse=False)):
            if not hasattr(module, "config"):
                raise ModelError(f"{type(model).__name__} cannot be quantized: the buffers of {name} are not known")
            model.set_submodule(name, type(module)(config=module.config).to(device))


def _finite(name: str, weight: torch.Tensor) -> torch.Tensor:
    if not all(torch.isfinite(extreme) for extreme in weight.aminmax()):
        raise ModelError(f"{name} has weights that are not finite, which no quantized format holds")
    return weight


def some(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:_NAMES_IN_ERROR])
    return shown if len(names) <= _NAMES_IN_ERROR else f"{shown} and {len(names) - _NAMES_IN_ERROR} more"

"""Loading the base model: whole as it is stored, or quantized tensor by tensor.

Knows nothing of adapters.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.colocate import model_on
from trainer.errors import ModelError
from trainer.quantization.linear import Quantization, QuantizedLinear
from trainer.quantization.loading import quantized_model
from trainer.quantization.stored import SETTINGS, Stored, check_setting, stored_in
from trainer.supported import is_packed
from transport.shared_base.sharing import ImportedBase


def load_base(
    folder: Path,
    *,
    dtype: torch.dtype,
    attention: str,
    quantization: Quantization | None,
    target_modules: tuple[str, ...],
    device: torch.device,
    imported: ImportedBase | None = None,
) -> Any:
    """Returns the causal language model in `folder`, computing in `dtype` with the attention of that name.

    Plain, all its weights are of type `dtype` in main memory, or `imported` from a server. Quantized, it is on
    `device`, its parameters are frozen and the linear layers of its decoder are `QuantizedLinear`. Raises `ModelError`
    where it cannot be trained with adapters on `target_modules` (none for full fine-tuning).
    """
    with _loading(folder):
        stored = stored_in(folder)
        check_setting(folder, stored, quantization)
        if imported is not None:
            _check_import(folder, stored, quantization)
            base = model_on(folder, imported, dtype=dtype, attention=attention, stored=stored)
        elif quantization is None:
            base = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, attn_implementation=attention, local_files_only=True
            )
        else:
            base = quantized_model(
                folder, dtype=dtype, attention=attention, quantization=quantization, stored=stored, device=device
            )
    _check_base(base, target_modules)
    return base


def packs_samples(folder: Path, sequence_len: int) -> bool:
    """Returns whether samples of the model in `folder` are packed. Raises `ModelError` where it cannot be trained with
    sequences of `sequence_len` tokens."""
    with _loading(folder):
        return is_packed(AutoConfig.from_pretrained(folder, local_files_only=True), sequence_len)


@contextmanager
def _loading(folder: Path) -> Iterator[None]:
    try:
        yield
    except ModelError:
        raise
    except (OSError, ValueError, SafetensorError, StrictDataclassError) as error:
        raise ModelError(f"the base model in {folder} cannot be loaded: {error}") from error


def _check_import(folder: Path, stored: Stored | None, quantization: Quantization | None) -> None:
    """Refuses a base that would have to be copied to be quantized."""
    if stored is None and quantization is not None:
        raise ModelError(
            f"colocate: the server shares the plain weights of {folder}, and {SETTINGS[quantization]} would hold a "
            "copy of them; use a checkpoint that is stored so, or remove one of the two"
        )


def _check_base(base: Any, target_modules: tuple[str, ...]) -> None:
    """Refuses what the packed forward pass would silently compute otherwise than the server."""
    config = base.config
    kinds = (torch.nn.Linear, QuantizedLinear)
    linear = {name.rsplit(".", 1)[-1] for name, m in base.named_modules() if isinstance(m, kinds)}
    if missing := sorted(set(target_modules) - linear):
        raise ModelError(
            f"lora_target_modules {missing} are no linear layers of this {config.model_type}; it has {sorted(linear)}"
        )
    if getattr(base.get_output_embeddings(), "bias", None) is not None:
        raise ModelError(f"the LM head of this {config.model_type} has a bias, which the trainer does not compute")

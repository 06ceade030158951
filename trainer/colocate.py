"""A base model on the weights that the server on the same device exports (`colocate`): nothing of them is copied.

The imported weights are checked against the checkpoint: complete, by name, shape and type, and each tensor's first and
last row by value, so that a server that has laid one out otherwise is found. A checkpoint that is stored quantized is
imported by the names of its own tensors, codes and scales alike.

When the server has ended, so does the trainer (`ExporterGone`, exit code 75): started again, it imports what the next
server exports, as at its first start.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from configs.train import TrainSettings
from trainer.errors import ExporterGone, ModelError
from trainer.quantization.files import TensorFiles
from trainer.quantization.linear import QuantizedLinear
from trainer.quantization.loading import decoder_linears, empty_model, rebuild_buffers, set_parameter, some, tied_head
from trainer.quantization.stored import Stored
from transport.shared_base.sharing import ImportedBase, import_base
from transport.weights.identity import base_identity

log = logging.getLogger(__name__)

_RECIPES = {"float32": "fp32", "bfloat16": "bf16"}


def imported_for(settings: TrainSettings, device: torch.device) -> ImportedBase | None:
    """The base weights of the run's server, once it has loaded them; None without `colocate`. Raises `DeadlineError`,
    which names whom it waited for, and other errors of `transport.errors`."""
    if not settings.colocate:
        return None
    return import_base(settings.output_dir, device, timeout_s=settings.wait_timeout_s)


def check_exporter(imported: ImportedBase | None) -> None:
    """Raises `ExporterGone` where the server that exports the base has ended. Takes a microsecond."""
    if imported is not None and not imported.exporter_lives:
        raise ExporterGone("grpo-infer, whose base weights the trainer computes on, has ended")


@contextmanager
def while_exported(imported: ImportedBase | None) -> Iterator[None]:
    """Around what reads the weights: raises `ExporterGone` where the server has ended by its end, whether or not that
    led to an error."""
    try:
        yield
    except Exception as error:
        if imported is None or imported.exporter_lives:
            raise
        raise ExporterGone(f"grpo-infer ended while the trainer used its base weights: {error}") from error
    check_exporter(imported)


def model_on(
    folder: Path, imported: ImportedBase, *, dtype: torch.dtype, attention: str, stored: Stored | None = None
) -> Any:
    """The causal language model in `folder`, computing in `dtype`, frozen, on imported weights.

    `stored` is how the checkpoint holds the decoder's linear layers, None where in 16 or 32 bits. Raises `ModelError`
    where the weights are another model's, of another type, incomplete or laid out otherwise.
    """
    _check_manifest(folder, imported, dtype)
    model, source = empty_model(folder, dtype=dtype, attention=attention), _Source(imported, TensorFiles(folder))
    if stored is not None:
        for name in decoder_linears(model):
            _quantize(model, name, source, stored)
    tied = tied_head(model)
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta and name != tied:
            set_parameter(model, name, source.plain(name, parameter))
    source.check_all_used(model)
    model.tie_weights()
    rebuild_buffers(model, source.device)
    source.log()
    return model.eval()


class _Source:
    """The imported tensors; those that the server leaves out are read from the checkpoint. See `TensorFiles`."""

    def __init__(self, imported: ImportedBase, checkpoint: TensorFiles) -> None:
        self.folder = checkpoint.folder
        self.device = next(iter(imported.tensors.values())).device
        self._tensors, self._checkpoint = imported.tensors, checkpoint
        self._left = frozenset(imported.manifest.left) & checkpoint.names
        self._used, self._loaded = dict[str, int](), dict[str, int]()

    @property
    def names(self) -> frozenset[str]:
        """Of all tensors."""
        return frozenset(self._tensors) | self._left

    def read(self, name: str) -> torch.Tensor:
        """One tensor, imported if it can be. Raises KeyError for one that the server should share and does not, and
        `ModelError` where its values are not the checkpoint's."""
        if name not in self.names:
            raise KeyError(name)
        if (tensor := self._tensors.get(name)) is None:
            tensor = self._checkpoint.read(name).to(self.device)
            self._loaded[name] = tensor.nbytes
            return tensor
        _check_values(name, tensor, self._checkpoint)
        self._used[name] = tensor.nbytes
        return tensor

    def plain(self, name: str, expected: torch.Tensor) -> torch.Tensor:
        """One tensor of the expected type and shape. Raises `ModelError`."""
        if name not in self.names:
            raise ModelError(f"the server does not share {name}; turn colocate off")
        if (tensor := self._tensors.get(name)) is None:
            return self.read(name).to(expected.dtype)
        if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
            raise ModelError(
                f"the server shares {name} as {tensor.dtype} of shape {list(tensor.shape)}, expected {expected.dtype} "
                f"of shape {list(expected.shape)}; turn colocate off"
            )
        return self.read(name)

    def check_all_used(self, model: Any) -> None:
        """Raises `ModelError` where the server shares what the model has no place for."""
        if surplus := set(self._tensors) - set(self._used):
            raise ModelError(f"the server shares what {type(model).__name__} has no place for: {some(surplus)}")

    def log(self) -> None:
        """Says what is the server's, and what is this process's own."""
        log.info(
            "base weights: %d tensors (%d bytes) are the server's, %d (%d bytes) were read from disk%s",
            len(self._used),
            sum(self._used.values()),
            len(self._loaded),
            sum(self._loaded.values()),
            f": {', '.join(sorted(self._loaded))}" if self._loaded else "",
        )


def _quantize(model: Any, name: str, source: _Source, stored: Stored) -> None:
    """Puts a quantized layer in the place of a plain one, where the checkpoint stores it so."""
    empty = model.get_submodule(name)
    shape = (empty.out_features, empty.in_features)
    if (tensors := stored.tensors_of(name, shape, source)) is not None:
        bias = None if empty.bias is None else source.plain(f"{name}.bias", empty.bias)
        model.set_submodule(name, QuantizedLinear(tensors, format=stored.format, shape=shape, bias=bias))


def _check_manifest(folder: Path, imported: ImportedBase, dtype: torch.dtype) -> None:
    manifest = imported.manifest
    if (own := base_identity(folder)) != manifest.base_model:
        raise ModelError(
            f"the server shares the base {manifest.base_model}, and the model in {folder} is {own}; give both programs "
            "the same model"
        )
    if (name := str(dtype).removeprefix("torch.")) != manifest.dtype:
        recipe = f"the trainer's recipe: {_RECIPES[manifest.dtype]}, or " if manifest.dtype in _RECIPES else ""
        raise ModelError(
            f"the server shares weights of type {manifest.dtype}, and the trainer computes in {name}; set {recipe}the "
            f"server's dtype: {name}"
        )


def _check_values(name: str, tensor: torch.Tensor, checkpoint: TensorFiles) -> None:
    if name not in checkpoint.names:
        raise ModelError(f"{checkpoint.folder} has no tensor {name}, which the server shares; give both the same model")
    ends = checkpoint.ends(name).to(tensor.device, tensor.dtype)
    own = torch.stack([tensor[0], tensor[-1]]) if tensor.ndim else tensor
    if own.shape != ends.shape or not torch.equal(_bytes(own), _bytes(ends)):
        raise ModelError(
            f"the server shares {name} with other values than {checkpoint.folder} has: it was changed or laid out "
            "otherwise since it was loaded; turn colocate off"
        )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Of any type, so that equal is equal bit for bit."""
    return tensor.flatten().view(torch.uint8)

"""A base model on the weights that the server on the same device lends (`colocate`): nothing of them is copied.

What is borrowed is checked against the checkpoint: complete, by name, shape and type, and each tensor's first and last
row by value, so that a server that has laid one out anew is found. A checkpoint that is stored quantized is borrowed
by the names of its own tensors, codes and scales alike.

Where the server was started again, the model takes the new server's weights in the place of the old one's, with the
same checks (`Renewal`).
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from trainer.errors import ModelError
from trainer.quantization.files import TensorFiles
from trainer.quantization.linear import QuantizedLinear
from trainer.quantization.loading import decoder_linears, empty_model, rebuild_buffers, set_parameter, some, tied_head
from trainer.quantization.stored import Stored, stored_in
from transport.shared_base.lending import Borrowed
from transport.weights.identity import base_identity

log = logging.getLogger(__name__)

_RECIPES = {"float32": "fp32", "bfloat16": "bf16"}


def borrowed_model(
    folder: Path, borrowed: Borrowed, *, dtype: torch.dtype, attention: str, stored: Stored | None = None
) -> Any:
    """The causal language model in `folder`, computing in `dtype`, frozen, on borrowed weights.

    `stored` is how the checkpoint holds the decoder's linear layers, None where in 16 or 32 bits. Raises `ModelError`
    where the weights are another model's, of another type, incomplete or laid out anew.
    """
    _check_offer(folder, borrowed, dtype)
    model, source = empty_model(folder, dtype=dtype, attention=attention), _Source(borrowed, TensorFiles(folder))
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
    source.tell()
    return model.eval()


class Renewal:
    """Puts other borrowed weights in the place of those that a model was made with.

    The modules are remembered as they were before adapters were put around them, and keep their parameters; what else
    holds one of those (a tied head, a shared-out model) has the new weights with it.
    """

    def __init__(self, model: Any, folder: Path, *, dtype: torch.dtype, attention: str) -> None:
        """`model` as `borrowed_model` has made it of the checkpoint in `folder`."""
        self._modules: dict[str, torch.nn.Module] = dict(model.named_modules())
        self._folder, self._dtype, self._attention = folder, dtype, attention

    def __call__(self, borrowed: Borrowed, *, compare: bool) -> None:
        """With `compare` every byte must be as it was; without, the earlier memory is not read any more.

        Raises `ModelError` where the weights do not fit; then nothing has changed.
        """
        stored = stored_in(self._folder)
        other = borrowed_model(self._folder, borrowed, dtype=self._dtype, attention=self._attention, stored=stored)
        found = [
            (path, name, old, new)
            for path, module in other.named_modules()
            for (name, new), (_, old) in zip(_own(module), _own(self._modules[path]), strict=True)
        ]
        for path, name, old, new in found:
            same = old.shape == new.shape and old.dtype == new.dtype
            if compare and not (same and torch.equal(_bytes(old), _bytes(new))):
                raise ModelError(
                    f"the server that was started again lends {path}.{name} otherwise than the one before; start the "
                    "run again, and leave the model's files as they are while it lasts"
                )
        for path, name, _, new in found:
            _put(self._modules[path], name, new)

    def let_go(self) -> None:
        """Leaves the model without weights until others are borrowed, so that what was borrowed is released."""
        for module in self._modules.values():
            for name, tensor in list(_own(module)):
                _put(module, name, torch.empty(0, dtype=tensor.dtype, device=tensor.device))


def _put(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    old = getattr(module, name)
    if isinstance(old, torch.nn.Parameter):
        old.data = tensor.data
    else:  # may be a view, and hold on to what it views
        setattr(module, name, tensor)


def _own(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """A module's own parameters and buffers."""
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


class _Source:
    """The borrowed tensors; those that the server leaves are read from the checkpoint. See `TensorFiles`."""

    def __init__(self, borrowed: Borrowed, checkpoint: TensorFiles) -> None:
        self.folder = checkpoint.folder
        self.device = next(iter(borrowed.tensors.values())).device
        self._tensors, self._checkpoint = borrowed.tensors, checkpoint
        self._left = frozenset(borrowed.manifest.left) & checkpoint.names
        self._used, self._loaded = dict[str, int](), dict[str, int]()

    @property
    def names(self) -> frozenset[str]:
        """Of all tensors."""
        return frozenset(self._tensors) | self._left

    def read(self, name: str) -> torch.Tensor:
        """One tensor, borrowed if it can be. Raises KeyError for one that the server should lend and does not, and
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
            raise ModelError(f"the server lends all but {name}; run without colocate")
        if (tensor := self._tensors.get(name)) is None:
            return self.read(name).to(expected.dtype)
        if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
            raise ModelError(
                f"the server lends {name} as {tensor.dtype} of shape {list(tensor.shape)}, expected {expected.dtype} "
                f"of shape {list(expected.shape)}; run without colocate"
            )
        return self.read(name)

    def check_all_used(self, model: Any) -> None:
        """Raises `ModelError` where the server lends what the model has no place for."""
        if surplus := set(self._tensors) - set(self._used):
            raise ModelError(f"the server lends what {type(model).__name__} has no place for: {some(surplus)}")

    def tell(self) -> None:
        """What is the server's, and what is this process's own."""
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


def _check_offer(folder: Path, borrowed: Borrowed, dtype: torch.dtype) -> None:
    manifest = borrowed.manifest
    if (own := base_identity(folder)) != manifest.base_model:
        raise ModelError(
            f"the server lends the base {manifest.base_model}, and the model in {folder} is {own}; give both programs "
            "the same model"
        )
    if (name := str(dtype).removeprefix("torch.")) != manifest.dtype:
        recipe = f"the trainer's recipe: {_RECIPES[manifest.dtype]}, or " if manifest.dtype in _RECIPES else ""
        raise ModelError(
            f"the server lends weights of type {manifest.dtype}, and the trainer computes in {name}; set {recipe}the "
            f"server's dtype: {name}"
        )


def _check_values(name: str, tensor: torch.Tensor, checkpoint: TensorFiles) -> None:
    if name not in checkpoint.names:
        raise ModelError(f"{checkpoint.folder} has no tensor {name}, which the server lends; give both the same model")
    ends = checkpoint.ends(name).to(tensor.device, tensor.dtype)
    own = torch.stack([tensor[0], tensor[-1]]) if tensor.ndim else tensor
    if own.shape != ends.shape or not torch.equal(_bytes(own), _bytes(ends)):
        raise ModelError(
            f"the server lends {name} with other values than {checkpoint.folder} has: it was changed or laid out anew "
            "since it was loaded; run without colocate"
        )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Of any type, so that equal is equal bit for bit."""
    return tensor.flatten().view(torch.uint8)

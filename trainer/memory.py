"""Saves memory for activations (checkpointed and compiled layers), and keeps freed memory so that it is quicker to get.

Nothing here depends on what the layers compute. docs/memory.md explains the choice of activation checkpointing.
"""

import ctypes
import functools
import importlib.util
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import torch._dynamo
from grpo.configs.train import TrainSettings
from grpo.trainer.errors import ModelError, OutOfMemory
from grpo.trainer.quantization import QuantizedLinear
from grpo.transport.folders import write_atomic
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

ActivationCheckpointing = Literal["none", "selective", "full"]
"""The tensors that a layer keeps for its backward pass: all; its input and its attention's output; its input."""
RECORD = "activation_checkpointing"
"""File in the run's folder that names the kind to go on with after a step that did not fit."""
Wrap = Callable[[torch.nn.Module, Callable[..., Any]], Callable[..., Any]]
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Parameters of glibc's mallopt(3)."""


def keep_freed_memory() -> None:
    """Makes this process keep freed memory for its next tensors.

    glibc gets blocks of more than 32 MiB from the system each time and gives them back at once; then the system clears
    every page of a large activation again, at a tenth of memory's speed. A step needs as much memory as the one before,
    so that kept memory is used. Does nothing with another C library.
    """
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_MAX, 0)  # no block has a mapping of its own
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)  # the heap never shrinks


def release_memory(device: torch.device) -> None:
    """Gives what this process has freed back to the device: torch keeps it on a GPU, glibc on a CPU."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def prepare_layers(
    layers: Sequence[torch.nn.Module],
    checkpointing: ActivationCheckpointing,
    *,
    compile_layers: bool,
    in_graph: bool,
    device: torch.device,
    wrap: Wrap | None = None,
) -> None:
    """Checkpoints and compiles each decoder layer for sequences of any length; compilation happens in the first passes.

    Activation checkpointing is inside the compiled graph if attention is an operator that a graph can contain
    (`in_graph`), else around the compiled parts. `wrap` goes around what is compiled. Raises `ModelError` if layers are
    to be compiled and nothing can be compiled for the device.
    """
    if compile_layers and (missing := missing_for_compile(device)):
        raise ModelError(f"compile: true, but {missing}; install it or set compile: false")
    # Numbers of the model's settings are constants: as symbols, each would be C++ code on the CPU in every graph.
    torch._dynamo.config.specialize_float = True
    # With and without gradients, shared prompts, adapters, in the first layer and in others: graphs of the same code.
    torch._dynamo.config.recompile_limit = 64
    for layer in layers:
        if compile_layers:
            for module in filter(_is_quantized, layer.modules()):
                module.forward = torch.compiler.disable(module.forward)
        forward: Callable[..., Any] = layer.forward
        if in_graph:
            forward = _checkpointed(forward, checkpointing)
        if compile_layers:
            forward = torch.compile(forward, dynamic=True)
        if wrap is not None:
            forward = wrap(layer, forward)
        layer.forward = forward if in_graph else _checkpointed(forward, checkpointing)


def compiles(settings: TrainSettings, device: torch.device) -> bool:
    """Returns whether layers are compiled: as the settings say, or by default on a GPU for which torch can compile."""
    if settings.compile is not None:
        return settings.compile
    return device.type == "cuda" and missing_for_compile(device) is None


def missing_for_compile(device: torch.device) -> str | None:
    """Returns why torch can compile nothing for this device on this machine; None if it can."""
    if device.type == "cpu":
        compiler = os.environ.get("CXX", "g++")
        return None if shutil.which(compiler) else f"the C++ compiler {compiler} is not installed"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    compilers = (os.environ["CC"],) if "CC" in os.environ else ("clang", "gcc")
    if not any(shutil.which(compiler) for compiler in compilers):
        return f"Triton needs a C compiler, and {' and '.join(compilers)} cannot be found"
    return None


def _is_quantized(module: torch.nn.Module) -> bool:
    """Returns whether it is a quantized linear layer, or an adapter on one. Compiled, it would keep the dequantized
    weight for the backward pass. torch cannot compile rounding to NVFP4 either."""
    return getattr(module, "low_precision", None) == "nvfp4" or any(
        isinstance(part, QuantizedLinear) for part in (module, *module.children())
    )


def _checkpointed(forward: Callable[..., Any], checkpointing: ActivationCheckpointing) -> Callable[..., Any]:
    if checkpointing == "none":
        return forward
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}  # nothing in a layer is random
    if checkpointing == "selective":
        attend = torch.ops.torch_attn._varlen_attn.default
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, [attend])

    @functools.wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, **options, **kwargs)

    return checkpointed


def checkpointing_kinds(
    settings: TrainSettings, device: torch.device, *, shared: bool = False
) -> tuple[ActivationCheckpointing, ...]:
    """Returns what layers may keep for the backward pass, the most first: the one kind that the settings name, or on a
    GPU all kinds, of which the first whose step fits is used. On a GPU that is `shared` with a server "none" is left
    out, because the server's cache needs that memory more."""
    if settings.gradient_checkpointing == "selective":
        return ("selective",)
    if settings.gradient_checkpointing is not None or device.type != "cuda":
        return ("full" if settings.gradient_checkpointing else "none",)
    most: tuple[ActivationCheckpointing, ...] = () if shared or settings.colocate else ("none",)
    # Attention in float32 is no operator whose output could be kept.
    some: tuple[ActivationCheckpointing, ...] = () if settings.recipe == "fp32" else ("selective",)
    return (*most, *some, "full")


def recorded_checkpointing(settings: TrainSettings, device: torch.device, run: Path) -> ActivationCheckpointing:
    """Returns the kind that an earlier start of this run has recorded, or the first of `checkpointing_kinds`."""
    kinds = checkpointing_kinds(settings, device)
    recorded = (run / RECORD).read_text(encoding="utf-8") if (run / RECORD).exists() else None
    return next((kind for kind in kinds if kind == recorded), kinds[0])


@contextmanager
def falling_back(
    settings: TrainSettings, device: torch.device, run: Path, *, used: ActivationCheckpointing
) -> Iterator[None]:
    """Records, if a step within the block does not fit into the device's memory while layers keep what `used` says,
    that the run's next start shall keep less. Raises `OutOfMemory` then, and `ModelError` if no kind keeps less.

    The step is not repeated in this process: other ranks may be in the middle of an exchange, and so may FSDP.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        kinds = checkpointing_kinds(settings, device)
        if used == kinds[-1]:
            raise ModelError(
                f"a step does not fit into the memory of {device} (activation checkpointing: {used}): {error}; set "
                "gradient_checkpointing: true, qlora_bnb: true or a smaller micro_batch_tokens"
            ) from error
        less = kinds[kinds.index(used) + 1]
        write_atomic(run / RECORD, less.encode())
        raise OutOfMemory(
            f"a step does not fit into the memory of {device} (activation checkpointing: {used}): {error}; started "
            f"again, the trainer goes on with {less}, which is recorded in {run / RECORD}"
        ) from error

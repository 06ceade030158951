"""Less memory for activations, and memory that is quicker to get: checkpointed and compiled layers, freed memory kept.

Knows nothing of what the layers compute.
"""

import ctypes
import functools
import importlib.util
import os
import platform
import shutil
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from trainer.errors import ModelError
from trainer.quantization.linear import QuantizedLinear

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Parameters of glibc's mallopt(3)."""
_LARGEST_INT = 2**31 - 1


def keep_freed_memory() -> bool:
    """Lets this process keep the memory that it frees, for its next tensors. Returns whether it does.

    glibc gets blocks of more than 32 MiB from the system each time and gives them back at once; then the system clears
    every page of a large activation again, at a tenth of memory's speed. A step needs as much memory as the one
    before, so that what is kept is used. Does nothing where the C library is another one.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    # No block has a mapping of its own, and the heap never shrinks.
    return all(mallopt(*setting) == 1 for setting in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _LARGEST_INT)))


def release_memory(device: torch.device) -> None:
    """Gives what this process has freed back to the device: torch keeps it on a GPU, glibc on a CPU."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def released(device: torch.device) -> dict[str, float]:
    """`release_memory` of a GPU between two steps, for a server that wakes now. Returns metrics: the most that torch's
    allocator held since the last call, what it holds now, and how long this took. Not yet run on a GPU."""
    peak, started_s = torch.cuda.max_memory_reserved(device), time.perf_counter()
    release_memory(device)
    torch.cuda.reset_peak_memory_stats(device)
    return {
        "perf/train_peak_bytes": float(peak),
        "perf/train_stays_bytes": float(torch.cuda.memory_reserved(device)),
        "time/release_memory_s": time.perf_counter() - started_s,
    }


def checkpoint_layers(layers: Sequence[torch.nn.Module]) -> None:
    """Makes each layer keep only its input for the backward pass, which computes the rest again. The results are the
    same."""
    for layer in layers:
        layer.forward = _checkpointed(layer.forward)


def compile_layers(layers: Sequence[torch.nn.Module], *, device: torch.device) -> None:
    """Compiles each layer for sequences of any length; it happens in their first passes. To be called before
    `checkpoint_layers`. Raises `ModelError` where nothing can be compiled for the device."""
    if missing := missing_for_compile(device):
        raise ModelError(f"compile: true, but {missing}; install it or set compile: false")
    for layer in layers:
        for module in layer.modules():
            if _is_quantized(module):
                module.forward = torch.compiler.disable(module.forward)
        layer.forward = torch.compile(layer.forward, dynamic=True)


def missing_for_compile(device: torch.device) -> str | None:
    """Returns why torch can compile nothing for this device on this machine; None where it can."""
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
    """Whether it is a quantized linear layer, or an adapter on one. Compiled, it would keep the dequantized weight for
    the backward pass."""
    return any(isinstance(part, QuantizedLinear) for part in (module, *module.children()))


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # Nothing in a layer is random.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return checkpointed

"""Less memory for activations, and memory that is quicker to get: checkpointed and compiled layers, freed memory kept.

Knows nothing of what the layers compute.
"""

import ctypes
import functools
import importlib.util
import os
import platform
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch._dynamo
from grpo.configs.train import TrainSettings
from grpo.trainer.errors import ModelError
from grpo.trainer.quantization import QuantizedLinear
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

Checkpointing = Literal["none", "selective", "full"]
"""What a layer keeps for its backward pass: everything, its input and its attention's output, its input."""
Wrap = Callable[[torch.nn.Module, Callable[..., Any]], Callable[..., Any]]
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Parameters of glibc's mallopt(3)."""
FIXED_BYTES = 2560 * 2**20
"""CUDA context, cuDNN workspace and fragments of the trainer's process, for the estimate."""
LOGITS_AT_ONCE = 2**25
OPTIMIZER_BYTES = {"adamw": 8, "adamw_8bit": 2, "adamw_8bit_paged": 2, "muon": 4}
"""Of state per trained parameter, for the estimate."""


def keep_freed_memory() -> None:
    """Lets this process keep the memory that it frees, for its next tensors.

    glibc gets blocks of more than 32 MiB from the system each time and gives them back at once; then the system clears
    every page of a large activation again, at a tenth of memory's speed. A step needs as much memory as the one
    before, so that what is kept is used. Does nothing where the C library is another one.
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
    checkpointing: Checkpointing,
    *,
    compile_layers: bool,
    in_graph: bool,
    device: torch.device,
    wrap: Wrap | None = None,
) -> None:
    """Checkpoints and compiles each layer, for sequences of any length; the compiler works in their first passes.

    Where attention is an operator that a graph contains (`in_graph`), a compiled layer is one graph, what it computes
    again included. Elsewhere the compiled parts around attention are checkpointed together. `wrap` goes around what is
    compiled. Raises `ModelError` where nothing can be compiled for the device.
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
    """Returns whether layers are compiled: as the settings say, or on a GPU where torch can."""
    if settings.compile is not None:
        return settings.compile
    return device.type == "cuda" and missing_for_compile(device) is None


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
    the backward pass. Rounding to NVFP4 is nothing that torch compiles."""
    return getattr(module, "low_precision", None) == "nvfp4" or any(
        isinstance(part, QuantizedLinear) for part in (module, *module.children())
    )


def _checkpointed(forward: Callable[..., Any], checkpointing: Checkpointing) -> Callable[..., Any]:
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


def estimate(settings: TrainSettings, config: Any, *, num_trained: int, checkpointing: Checkpointing) -> int:
    """The trainer's need in bytes without the base, from its settings, transformers' `config` of the decoder and the
    number of trained parameters; docs/memory.md has the formula."""
    num_tokens, element = settings.sequence_len, 4 if settings.recipe == "fp32" else 2
    hidden, layers = config.hidden_size, config.num_hidden_layers
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    layer = 6 * num_tokens * (hidden + inner) * element
    inputs = layers * num_tokens * hidden * element
    kept = {"none": layers * layer, "selective": 2 * inputs + layer, "full": inputs + layer}[checkpointing]
    logits = min(LOGITS_AT_ONCE, num_tokens * config.vocab_size) * (4 + element) + 3 * num_tokens * hidden * element
    dequantized = 3 * hidden * inner * element if settings.quantization else 0
    lora = num_trained * (8 + OPTIMIZER_BYTES[settings.optimizer])
    return int(lora + kept + logits + dequantized + FIXED_BYTES)


def checkpointing_for(settings: TrainSettings, folder: Path, device: torch.device, *, imports: bool) -> Checkpointing:
    """What layers keep for the backward pass: as the settings say, or on a GPU as much as its free memory holds beside
    the base, of which nothing is this process's own where it `imports` it. Not yet run on a GPU."""
    if settings.gradient_checkpointing is not None or device.type != "cuda":
        return "full" if settings.gradient_checkpointing else "none"
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False).get_text_config()
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    base = 0 if imports else stored // (3 if settings.quantization else 1)
    widest = max(config.hidden_size, getattr(config, "intermediate_size", None) or 0)
    adapter = 2 * settings.lora_rank * widest * len(settings.lora_target_modules) * config.num_hidden_layers
    num_trained = adapter if settings.lora else stored // 2
    left = 0.9 * torch.cuda.mem_get_info(device)[0] - base
    # Attention of float32 is no operator whose output could be kept.
    kinds: tuple[Checkpointing, ...] = ("none",) if settings.recipe == "fp32" else ("none", "selective")
    fitting = (k for k in kinds if estimate(settings, config, num_trained=num_trained, checkpointing=k) < left)
    return next(fitting, "full")

"""Causal attention over packed samples that never crosses a boundary.

Legend: `T` packed tokens, `U` of them that are computed (shared prompts once), `H` heads, `D` head size.

Two kernels are registered with transformers by name, and `implementation_for` chooses one. Both get the boundaries as
the keyword `layout`, which the model hands through to its attention layers:

- ``grpo_varlen``: torch's variable-length flash attention, for half precision on GPUs. It is one operator, which a
  compiled layer contains. Not yet run on a GPU.
- ``grpo_padded``: samples of similar length are padded into one [S_b, H, L_b, D] call, anywhere. Layers are compiled
  around these calls, whose loops depend on the batch.

The names must not contain "flash": transformers takes every such name for a kernel of its own to load.
"""

import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from grpo.trainer.errors import ModelError
from grpo.trainer.packing import Layout
from grpo.trainer.supported import check_window
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

log = logging.getLogger(__name__)

VARLEN, PADDED = "grpo_varlen", "grpo_padded"
_ASKS_FOR_SHARED_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""torch 2.11 hands fewer heads of keys and values to the same kernels without being told."""
_HOPPER, _BLACKWELL = 9, 10
"""Major compute capabilities of the GPUs that have flash attention 3 and 4."""


def implementation_for(device: torch.device, dtype: torch.dtype, *, forced: str | None = None) -> str:
    """Returns the name of the kernel for `attn_implementation`, and logs it: `grpo_varlen` for 16-bit types on GPUs of
    compute capability 8.0 or later, `grpo_padded` for all else.

    On a GPU it also activates the newest flash attention that torch finds there. Not yet run on a GPU.
    """
    name, detail = forced or PADDED, ""
    half = dtype in (torch.bfloat16, torch.float16)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    if forced is None and half and capability >= (8, 0):
        name, detail = VARLEN, f" with {_activate_newest(capability[0])}"
    log.info("attention kernel %s%s", name, detail)
    return name


def _activate_newest(major: int) -> str:
    """Makes torch use flash attention 3 on Hopper and 4 on Blackwell where their packages are installed; returns what
    is used."""
    wanted = {_HOPPER: "FA3", _BLACKWELL: "FA4"}.get(major)
    activate = getattr(torch.nn.attention, "activate_flash_attention_impl", None)
    if wanted is not None and activate is not None:
        try:
            activate(wanted)
        except (ImportError, RuntimeError, ValueError) as error:
            return f"torch's own flash attention 2 ({wanted} cannot be activated: {error})"
        return wanted
    return "torch's own flash attention 2"


Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, Layout], torch.Tensor]
"""Takes [U, H, D] queries, keys and values (fewer heads in the last two), the scale and the layout; returns [U, H,
D]."""


def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, layout: Layout) -> torch.Tensor:
    """Repeats shared prompts for every sample that has them, attends, and takes one result of each."""
    if layout.shares:
        q, k, v = (_repeated(tensor, layout) for tensor in (q, k, v))
    options: dict[str, Any] = {"scale": scaling, "window_size": (-1, 0)}
    if _ASKS_FOR_SHARED_HEADS:
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    ends, longest = layout.boundaries, layout.longest
    output: Any = varlen_attn(q, k, v, ends, ends, longest, longest, **options)
    attended: torch.Tensor = output.index_select(0, layout.unique) if layout.shares else output
    return attended


def _repeated(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Returns [T, H, D] of [U, H, D]. The gradients of a shared token are summed in float32 before they are rounded
    once: 64 samples of a group, summed in bfloat16, would lose a percent of the prompt's gradient."""
    repeated: torch.Tensor = _Repeat.apply(tensor, layout.inverse)  # type: ignore[no-untyped-call]
    return repeated


class _Repeat(torch.autograd.Function):
    """An index_select whose backward pass accumulates in float32."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.num_rows = len(tensor)
        return tensor.index_select(0, inverse)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (inverse,) = ctx.saved_tensors
        accumulated = torch.promote_types(grad.dtype, torch.float32)
        total = torch.zeros(ctx.num_rows, *grad.shape[1:], dtype=accumulated, device=grad.device)
        return total.index_add_(0, inverse, grad.to(accumulated)).to(grad.dtype), None


def padded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, layout: Layout) -> torch.Tensor:
    """Attends in one call of torch's attention for each bucket of similar lengths. On a CPU the backward pass takes
    twice as long in 16-bit types as in float32, which is then both faster and more exact."""
    dtype = q.dtype
    if q.device.type == "cpu":
        q, k, v = (tensor.to(torch.promote_types(dtype, torch.float32)) for tensor in (q, k, v))
    elif (group := q.shape[1] // k.shape[1]) > 1:
        # The GPU's kernel for float32 shares no heads, and what torch takes in its place needs memory for all scores.
        k, v = (tensor.repeat_interleave(group, dim=1) for tensor in (k, v))
    slots, shapes = layout.buckets.slots, layout.buckets.shapes
    rows = [tensor.flatten(1).index_select(0, slots).unflatten(1, tensor.shape[1:]) for tensor in (q, k, v)]
    sizes = [count * length for count, length in shapes]
    outputs = []
    for bucket, parts in zip(shapes, zip(*(p.split(sizes) for p in rows), strict=True), strict=True):
        queries, keys, values = (part.unflatten(0, bucket).transpose(1, 2) for part in parts)
        output = torch.nn.functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, scale=scaling, enable_gqa=queries.shape[1] != keys.shape[1]
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, layout.buckets.slot_of).to(dtype)


KERNELS: dict[str, Kernel] = {VARLEN: varlen, PADDED: torch.compiler.disable(padded)}


def register() -> None:
    """Makes the kernels known to transformers; doing it twice changes nothing."""
    for name, kernel in KERNELS.items():
        AttentionInterface.register(name, _for_transformers(kernel))


def _for_transformers(kernel: Kernel) -> Callable[..., tuple[torch.Tensor, None]]:
    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float,
        layout: Layout,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """Takes [1, H, U, D] each (fewer heads in key and value) and returns [1, U, H, D]. Raises `ModelError` for what
        the kernels do not compute: a window below the longest sample, capped scores, sinks, a mask of the model's
        own."""
        who = type(module).__name__
        if sliding_window is not None:
            check_window(sliding_window, layout.longest, who)
        if softcap is not None:
            raise _not_computed(f"{who} caps its attention scores at {softcap:g}")
        if s_aux is not None:
            raise _not_computed(f"{who} has attention sinks")
        if attention_mask is not None:
            raise _not_computed(f"{who} has a mask of its own")
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        return kernel(q, k, v, scaling, layout)[None], None

    return attend


def _not_computed(what: str) -> ModelError:
    return ModelError(f"{what}, which the trainer does not compute; use another model")

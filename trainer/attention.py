"""Causal attention over packed samples that never crosses a boundary.

Legend: `U` computed tokens of the tree that the samples are (`grpo.trainer.packing`), `H` heads, `D` head size, `N`
tokens that have queries, `S_b`, `L_q` and `L_k` rows, queries and keys of one bucket.

Two kernels are registered with transformers by name, and `implementation_for` chooses one. Both get the boundaries as
the keyword `layout`, which the model hands through to its attention layers:

- ``grpo_varlen``: torch's variable-length flash attention, for half precision on GPUs. It is one operator, which a
  compiled layer contains. Not yet run on a GPU.
- ``grpo_padded``: rows of similar length are padded into one [S_b, H, L_q, D] call, anywhere. Layers are compiled
  around these calls, whose loops depend on the batch.

Both give a run the keys of all that is before it in its sample. The first gathers them. The second, on a CPU, attends
to them in a call without a mask, and adds the results up by their softmax's sums, as flash attention does with blocks
of keys (arXiv:2205.14135).

The names must not contain "flash": transformers takes every such name for a kernel of its own to load.
"""

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from grpo.trainer.errors import ModelError
from grpo.trainer.packing import Buckets, Layout
from grpo.trainer.supported import check_window
from torch.autograd.function import once_differentiable
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

log = logging.getLogger(__name__)

VARLEN, PADDED = "grpo_varlen", "grpo_padded"
_ASKS_FOR_SHARED_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""torch 2.11 hands fewer heads of keys and values to the same kernels without being told."""
_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
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
    """Attends from each run to the sample that it is the end of: queries are aligned with the last of more keys."""
    if layout.shares:
        k, v = (_repeated(tensor, layout) for tensor in (k, v))
    options: dict[str, Any] = {"scale": scaling, "window_size": (-1, 0)}
    if _ASKS_FOR_SHARED_HEADS:
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    ends = layout.boundaries, layout.key_boundaries
    attended: Any = varlen_attn(q, k, v, *ends, layout.longest_run, layout.longest, **options)
    found: torch.Tensor = attended
    return found


def _repeated(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Returns the keys [T, H, D] of [U, H, D]. The gradients of a shared token are summed in float32 before they are
    rounded once: 64 samples of a group, summed in bfloat16, would lose a percent of the prompt's gradient."""
    repeated: torch.Tensor = _Repeat.apply(tensor, layout.keys)  # type: ignore[no-untyped-call]
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
        if q.shape[-1] == v.shape[-1]:
            attended: torch.Tensor = _OfTree.apply(q, k, v, scaling, layout)  # type: ignore[no-untyped-call]
            return attended.to(dtype)
    elif (group := q.shape[1] // k.shape[1]) > 1:
        # The GPU's kernel for float32 shares no heads, and what torch takes in its place needs memory for all scores.
        k, v = (tensor.repeat_interleave(group, dim=1) for tensor in (k, v))
    rows, outputs = layout.rows, []
    for _, queries, keys, values in _calls(rows, q, k, v):
        output = torch.nn.functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, scale=scaling, enable_gqa=queries.shape[1] != keys.shape[1]
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, rows.slot_of).to(dtype)


def _calls(
    rows: Buckets, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Iterator[tuple[torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yields each bucket's mask with its [S_b, H, L_q, D] queries and [S_b, H, L_k, D] keys and values."""
    num_queries, num_keys = [n * length for n, length, _ in rows.shapes], [n * length for n, _, length in rows.shapes]
    taken = _taken(q, rows.queries).split(num_queries), *(_taken(one, rows.keys).split(num_keys) for one in (k, v))
    for (count, *_), mask, *parts in zip(rows.shapes, rows.masks, *taken, strict=True):
        queries, keys, values = (_in_rows(part, count) for part in parts)
        yield mask, queries, keys, values


def _taken(tensor: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Returns [P, H, D] of [U, H, D]."""
    return tensor.flatten(1).index_select(0, slots).view(-1, *tensor.shape[1:])


def _in_rows(part: torch.Tensor, count: int) -> torch.Tensor:
    """Returns [S_b, H, L, D] of [S_b · L, H, D]."""
    return part.view(count, -1, *part.shape[1:]).transpose(1, 2)


class _OfTree(torch.autograd.Function):
    """Attention of `padded` on a CPU, by torch's flash attention, whose backward pass is of one block of keys whatever
    the others are, given the output and the softmax's sums of all of them."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, layout: Layout
    ) -> torch.Tensor:
        output, sums = _attended(layout.runs, q, k, v, scaling)
        if (before := layout.before) is not None:
            tokens, (more, more_sums) = before.tokens, _attended(before, q, k, v, scaling)
            own_sums = sums[tokens]
            total = torch.logaddexp(own_sums, more_sums)
            parts = (output[tokens], own_sums), (more, more_sums)
            output[tokens] = sum(part * (of_part - total).exp_()[..., None] for part, of_part in parts)
            sums[tokens] = total
        ctx.save_for_backward(q, k, v, output, sums)
        ctx.scaling, ctx.layout = scaling, layout
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, output, sums = ctx.saved_tensors
        gradients = tuple(torch.zeros_like(one, memory_format=torch.contiguous_format) for one in (q, k, v))
        for rows in filter(None, (ctx.layout.runs, ctx.layout.before)):
            _add_gradients(rows, gradients, grad, q, k, v, output, sums, ctx.scaling)
        return *gradients, None, None


def _attended(
    rows: Buckets, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns [N, H, D] the results of the tokens that have queries in these rows, and [N, H] the logarithms of their
    softmax's sums."""
    outputs, sums = [], []
    for mask, *inputs in _calls(rows, q, k, v):
        options = {"is_causal": rows.tokens is None, "scale": scaling}
        output, sum_ = _FLASH(*inputs, attn_mask=None if mask is None else mask.to(q.dtype), **options)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
        sums.append(sum_.transpose(1, 2).flatten(0, 1))
    return _taken(torch.cat(outputs), rows.slot_of), torch.cat(sums).index_select(0, rows.slot_of)


def _add_gradients(rows: Buckets, gradients: Sequence[torch.Tensor], grad: torch.Tensor, *inputs: Any) -> None:
    """Adds to the gradients [U, H, D] of queries, keys and values what they have from these rows."""
    q, k, v, output, sums, scaling = inputs
    # Slots that are padding, or of a token that has another slot, have a gradient of 0.
    own = grad if rows.tokens is None else _taken(grad, rows.tokens)
    of_slots = grad.new_zeros(len(rows.queries), *grad.shape[1:]).index_copy_(0, rows.slot_of, own)
    num_queries = [n * length for n, length, _ in rows.shapes]
    more = (of_slots, _taken(output, rows.queries), sums.index_select(0, rows.queries))
    parts = zip(rows.shapes, _calls(rows, q, k, v), *(one.split(num_queries) for one in more), strict=True)
    found: list[list[torch.Tensor]] = [[], [], []]
    for (count, *_), (mask, *qkv), *slots in parts:
        of_output, own_output, own_sums = (_in_rows(one, count) for one in slots)
        computed = _FLASH_BACKWARD(
            *(of_output, *qkv, own_output, own_sums, 0.0, rows.tokens is None),
            attn_mask=None if mask is None else mask.to(q.dtype),
            scale=scaling,
        )
        for whole, part in zip(found, computed, strict=True):
            whole.append(part.transpose(1, 2).flatten(0, 1))
    for total, one, is_queries in zip(gradients, map(torch.cat, found), (True, False, False), strict=True):
        if rows.repeats and not is_queries:
            total.index_add_(0, rows.keys, one)
        elif rows.tokens is None:
            total.add_(_taken(one, rows.slot_of))
        else:
            total.index_add_(0, rows.tokens, _taken(one, rows.slot_of))


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

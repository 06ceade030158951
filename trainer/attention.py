"""Causal attention over packed samples that never crosses a boundary.

Legend: `U` computed tokens of the tree that the samples are (`grpo.trainer.packing`), `H` heads, `D` head size, `N`
tokens that have queries, `S_b`, `L_q` and `L_k` rows, queries and keys of one bucket.

Two kernels are registered with transformers by name, and `implementation_for` chooses one. Both get the boundaries as
the keyword `layout`, which the model hands through to its attention layers:

- ``grpo_varlen``: torch's variable-length flash attention, for half precision on GPUs. It is one operator, which a
  compiled layer contains. Not yet run on a GPU.
- ``grpo_padded``: rows of similar length are padded and computed together, anywhere; on a CPU by matrix products here,
  twice as fast as torch's own attention. Layers are compiled around it, whose loops depend on the batch.

Both give a run the keys of all that is before it in its sample.

The names must not contain "flash": transformers takes every such name for a kernel of its own to load.
"""

import inspect
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from grpo.trainer.errors import ModelError
from grpo.trainer.lm_head import blocks
from grpo.trainer.matmul import onednn_for_float32
from grpo.trainer.packing import Buckets, Layout
from grpo.trainer.supported import check_window
from torch.autograd.function import once_differentiable
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

log = logging.getLogger(__name__)

VARLEN, PADDED = "grpo_varlen", "grpo_padded"
_ASKS_FOR_SHARED_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""torch 2.11 hands fewer heads of keys and values to the same kernels without being told."""
_LEAST_QUERIES, _MOST_QUERIES, _SCORES = 64, 256, 1 << 20
"""Queries of a block on a CPU, an eighth of its row's keys within these bounds, and scores of all rows together."""
_LOG2_E = math.log2(math.e)
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
    """Attends row by row: on a CPU in blocks, 16-bit types in float32, which is faster there and more exact; elsewhere
    in one call of torch's attention for each bucket of similar lengths."""
    dtype = q.dtype
    if q.device.type == "cpu":
        q, k, v = (tensor.to(torch.promote_types(dtype, torch.float32)) for tensor in (q, k, v))
        attended: torch.Tensor = _InBlocks.apply(q, k, v, scaling, layout)  # type: ignore[no-untyped-call]
        return attended.to(dtype)
    if (group := q.shape[1] // k.shape[1]) > 1:
        # The GPU's kernel for float32 shares no heads, and what torch takes in its place needs memory for all scores.
        k, v = (tensor.repeat_interleave(group, dim=1) for tensor in (k, v))
    rows, outputs = layout.rows, []
    sizes = [(count, length) for count, length, _ in rows.shapes]
    for parts in zip(*(_in_rows(one, rows.queries, sizes, 1) for one in (q, k, v)), strict=True):
        output = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True, scale=scaling)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, rows.slot_of)


def _in_rows(
    tensor: torch.Tensor, slots: torch.Tensor, sizes: Sequence[tuple[int, int]], groups: int
) -> Iterator[torch.Tensor]:
    """Yields [S_b · K, G, L, D] of a tensor [U, H, D] whose heads are K `groups` of G, bucket by bucket; `sizes` are
    S_b and L."""
    taken = tensor.flatten(1).index_select(0, slots)
    for (count, length), part in zip(sizes, taken.split([count * length for count, length in sizes]), strict=True):
        heads = part.view(count, length, groups, -1, tensor.shape[2])
        yield heads.permute(0, 2, 3, 1, 4).flatten(0, 1)


def _in_slots(parts: Sequence[torch.Tensor], sizes: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Returns [P, H · D] of what has the shapes that `_in_rows` yields."""
    of_heads = [
        part.unflatten(0, (count, -1)).permute(0, 3, 1, 2, 4) for (count, _), part in zip(sizes, parts, strict=True)
    ]
    return torch.cat([part.reshape(part.shape[0] * part.shape[1], -1) for part in of_heads])


class _InBlocks(torch.autograd.Function):
    """Causal attention on a CPU in blocks of queries, whose scores fit into a cache. As in flash attention
    (arXiv:2205.14135), the backward pass computes the scores again, and has the softmax by the logarithm of its sum.

    Exponentials and logarithms have the base 2, which torch computes four times as fast as those of the base e."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, layout: Layout
    ) -> torch.Tensor:
        rows = layout.runs
        outputs, sums = list[torch.Tensor](), list[torch.Tensor]()
        with onednn_for_float32():
            for inputs in _inputs(rows, q * (scaling * _LOG2_E), k, v):
                output, log_sum = _attended(*inputs)
                outputs.append(output)
                sums.append(log_sum)
        found = (_in_slots(parts, rows.query_sizes).index_select(0, rows.slot_of) for parts in (outputs, sums))
        output, log_sum = (one.unflatten(1, (q.shape[1], -1)) for one in found)
        ctx.save_for_backward(q, k, v, output, log_sum)
        ctx.scaling, ctx.layout = scaling, layout
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, output, log_sum = ctx.saved_tensors
        rows: Buckets = ctx.layout.runs
        sizes, groups = rows.query_sizes, k.shape[1]
        # Slots that are padding have a gradient of 0.
        both = torch.cat([grad, torch.linalg.vecdot(grad, output)[..., None]], dim=2)
        of_slots = both.new_zeros(len(rows.queries), *both.shape[1:]).index_copy_(0, rows.slot_of, both)
        every_slot = torch.arange(len(of_slots))
        more = _in_rows(of_slots, every_slot, sizes, groups), _in_rows(log_sum, rows.queries, sizes, groups)
        found: list[list[torch.Tensor]] = [[], [], []]
        with onednn_for_float32():
            inputs = _inputs(rows, q * (ctx.scaling * _LOG2_E), k, v)
            for own, of_output, sums in zip(inputs, *more, strict=True):
                for whole, part in zip(
                    found, _gradients(*own, of_output[..., :-1], of_output[..., -1:], sums), strict=True
                ):
                    whole.append(part)
        grad_q = _in_slots(found[0], sizes).index_select(0, rows.slot_of).mul_(ctx.scaling).view_as(q)
        grads = [grad_q]
        for one, parts in zip((k, v), found[1:], strict=True):
            of_keys = _in_slots([part[:, None] for part in parts], rows.key_sizes)
            if rows.repeats:
                total = torch.zeros_like(one, memory_format=torch.contiguous_format).flatten(1)
                grads.append(total.index_add_(0, rows.keys, of_keys).view_as(one))
            else:
                grads.append(of_keys.index_select(0, rows.slot_of).view_as(one))
        return *grads, None, None


_Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]
"""One bucket's [B, G, L_q, D] queries, scaled for the base 2, [B, L_k, D] keys, [B, L_k, D'] values and [B, 1, L_k]
mask; B are its rows' groups of heads."""


def _inputs(rows: Buckets, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Iterator[_Inputs]:
    groups = k.shape[1]
    taken = (_in_rows(one, rows.keys, rows.key_sizes, groups) for one in (k, v))
    for mask, queries, keys, values in zip(
        rows.masks, _in_rows(q, rows.queries, rows.query_sizes, groups), *taken, strict=True
    ):
        yield queries, keys[:, 0], values[:, 0], None if mask is None else mask.repeat_interleave(groups, 0)


def _blocks(q: torch.Tensor, num_keys: int) -> Iterator[tuple[slice, slice, int]]:
    """Yields the rows and queries of each block, and how many keys they attend to."""
    num_rows, group, num_queries, _ = q.shape
    size = min(_MOST_QUERIES, max(_LEAST_QUERIES, num_keys // 8))
    together = max(1, _SCORES // (group * min(size, num_queries) * num_keys))
    for rows in blocks(num_rows, together):
        for queries in blocks(num_queries, size):
            yield rows, queries, num_keys - num_queries + queries.stop


def _scores(own: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, num_queries: int) -> torch.Tensor:
    """Returns [b, G · n, keys] of queries [b, G · n, D], the last n of these keys."""
    scores = torch.bmm(own, k.transpose(1, 2))
    if mask is not None:
        scores.add_(mask)
    future = torch.full((num_queries, num_queries), -torch.inf, dtype=own.dtype).triu_(1)
    scores.unflatten(1, (-1, num_queries))[..., -num_queries:].add_(future)
    return scores


def _attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns [B, G, L_q, D'] and [B, G, L_q, 1] the logarithms of the softmax's sums."""
    output, log_sum = q.new_empty(*q.shape[:3], v.shape[2]), q.new_empty(*q.shape[:3], 1)
    for rows, queries, num_keys in _blocks(q, k.shape[1]):
        own = q[rows, :, queries]
        seen = None if mask is None else mask[rows, :, :num_keys]
        scores = _scores(own.flatten(1, 2), k[rows, :num_keys], seen, own.shape[2])
        largest = scores.amax(-1, keepdim=True)
        total = scores.sub_(largest).exp2_().sum(-1, keepdim=True)
        attended = torch.bmm(scores, v[rows, :num_keys]).div_(total)
        output[rows, :, queries] = attended.unflatten(1, own.shape[1:3])
        log_sum[rows, :, queries] = largest.add_(total.log2_()).unflatten(1, own.shape[1:3])
    return output, log_sum


def _gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    grad: torch.Tensor,
    grad_dot: torch.Tensor,
    log_sum: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients of queries [B, G, L_q, D], but for the scaling, keys and values, from `grad` [B, G, L_q,
    D'] of the output and its product with the output, `grad_dot` [B, G, L_q, 1]."""
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, queries, num_keys in _blocks(q, k.shape[1]):
        own, of_output, dot, sums = (one[rows, :, queries].flatten(1, 2) for one in (q, grad, grad_dot, log_sum))
        seen = None if mask is None else mask[rows, :, :num_keys]
        keys, values = k[rows, :num_keys], v[rows, :num_keys]
        num = queries.stop - queries.start
        probs = _scores(own, keys, seen, num).sub_(sums).exp2_()
        grad_v[rows, :num_keys].baddbmm_(probs.transpose(1, 2), of_output)
        of_scores = torch.bmm(of_output, values.transpose(1, 2)).sub_(dot).mul_(probs)
        grad_q[rows, :, queries] = torch.bmm(of_scores, keys).unflatten(1, (-1, num))
        grad_k[rows, :num_keys].baddbmm_(of_scores.transpose(1, 2), own, alpha=1 / _LOG2_E)
    return grad_q, grad_k, grad_v


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

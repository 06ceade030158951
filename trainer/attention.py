"""Causal attention over packed samples that never crosses a boundary.

Legend: `U` computed tokens of the tree that the samples are (`grpo.trainer.packing`), `H` heads, `D` head size, `S_b`,
`L_q` and `L_k` rows, queries and keys of one bucket.

Two kernels are registered with transformers by name, and `implementation_for` chooses one. Both get the boundaries as
the keyword `layout`, which the model hands through to its attention layers:

- ``grpo_varlen``: torch's variable-length flash attention, for half precision on GPUs. It is one operator, which a
  compiled layer contains. Not yet run on a GPU.
- ``grpo_padded``: rows of similar length are padded and computed together, anywhere; on a CPU by matrix products here,
  on an AMD EPYC in half the time of torch's own attention. Layers are compiled around it, because its loops depend on
  the batch.

Both give a run the keys of all that is before it in its sample.

The names must not contain "flash": transformers takes every such name for a kernel of its own to load.
"""

import inspect
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

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
VECTORS = 32
"""Elements that torch computes at a time on a CPU: two vectors of 512 bits."""
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
    if q.device.type == "cpu":
        attended: torch.Tensor = _InBlocks.apply(q, k, v, scaling, layout)  # type: ignore[no-untyped-call]
        return attended
    if (group := q.shape[1] // k.shape[1]) > 1:
        # The GPU's kernel for float32 shares no heads, and what torch takes in its place needs memory for all scores.
        k, v = (tensor.repeat_interleave(group, dim=1) for tensor in (k, v))
    rows, outputs = layout.rows, []
    sizes = [count * length for count, length in rows.query_sizes]
    taken = (one.index_select(0, rows.queries).split(sizes) for one in (q, k, v))
    for shape, *parts in zip(rows.query_sizes, *taken, strict=True):
        queries, keys, values = (part.unflatten(0, shape).transpose(1, 2) for part in parts)
        output = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scaling)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, rows.slot_of)


class _InBlocks(torch.autograd.Function):
    """Causal attention on a CPU in blocks of queries, whose scores fit into a cache. As in flash attention
    (arXiv:2205.14135), the backward pass computes the scores again, and has the softmax by the logarithm of its sum.

    Of a bucket's rows each group of G heads that share keys is a batch of its own, B in all, with the heads' queries
    side by side. Exponentials and logarithms have the base 2, which torch computes four times as fast as of base e."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, layout: Layout
    ) -> torch.Tensor:
        rows, heads, groups = layout.runs, q.shape[1], k.shape[1]
        found = [_attended(*inputs, heads // groups) for inputs in _inputs(rows, q, k, v, scaling)]
        output, log_sum = (_of_tokens(parts, rows, heads) for parts in zip(*found, strict=True))
        ctx.save_for_backward(q, k, v, output, log_sum)
        ctx.scaling, ctx.layout = scaling, layout
        return output.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, output, log_sum = ctx.saved_tensors
        rows, heads, groups = ctx.layout.runs, q.shape[1], k.shape[1]
        of_queries = rows.queries, rows.query_sizes, groups, output.dtype
        dots = torch.linalg.vecdot(grad.to(output.dtype), output)[..., None]
        of_output, of_dots = (_in_rows(one, *of_queries, rows.padding) for one in (grad, dots))
        inputs = zip(
            _inputs(rows, q, k, v, ctx.scaling), of_output, of_dots, _in_rows(log_sum, *of_queries), strict=True
        )
        found = [_gradients(*own, part, dot, sums, group=heads // groups) for own, part, dot, sums in inputs]
        of_q, *of_keys = zip(*found, strict=True)
        grads = [_of_tokens(of_q, rows, heads).mul_(ctx.scaling)]
        for parts in of_keys:
            if ctx.layout.shares:
                of_slots = _in_slots(parts, rows.key_sizes)
                total = of_slots.new_zeros(len(k), of_slots.shape[1]).index_add_(0, rows.keys, of_slots)
                grads.append(total.unflatten(1, (groups, -1)))
            else:
                grads.append(_of_tokens(parts, rows, groups))
        return *(one.to(q.dtype) for one in grads), None, None


def _in_rows(
    tensor: torch.Tensor,
    slots: torch.Tensor,
    sizes: Sequence[tuple[int, int]],
    groups: int,
    dtype: torch.dtype,
    padding: torch.Tensor | None = None,
) -> Iterator[torch.Tensor]:
    """Yields [B, L · G, D] of a tensor [U, H, D], bucket by bucket; `sizes` are S_b and L, and slots that are `padding`
    get zeros."""
    taken = tensor.flatten(1).index_select(0, slots)
    if padding is not None and len(padding):
        taken.index_fill_(0, padding, 0)
    for (count, length), part in zip(sizes, taken.split([count * length for count, length in sizes]), strict=True):
        by_group = part.view(count, length, groups, -1).transpose(1, 2)
        copied = torch.empty(by_group.shape, dtype=dtype).copy_(by_group)
        yield copied.view(count * groups, -1, tensor.shape[2])


def _in_slots(parts: Sequence[torch.Tensor], sizes: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Returns [P, H · D] of what has the shapes that `_in_rows` yields."""
    by_token = [
        part.view(count, -1, length, part.shape[1] // length * part.shape[2]).transpose(1, 2).flatten(2).flatten(0, 1)
        for (count, length), part in zip(sizes, parts, strict=True)
    ]
    return by_token[0] if len(by_token) == 1 else torch.cat(by_token)


def _of_tokens(parts: Sequence[torch.Tensor], rows: Buckets, num_heads: int) -> torch.Tensor:
    """Returns [U, H, D] of what has the shapes of queries."""
    by_slot = _in_slots(parts, rows.query_sizes)
    return by_slot.index_select(0, rows.slot_of).view(len(rows.slot_of), num_heads, -1)


_Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]
"""One bucket's [B, L_q · G, D] queries, scaled for the base 2, [B, L_k, D] keys, [B, L_k, D'] values and [B, 1, L_k]
mask."""


def _inputs(rows: Buckets, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> Iterator[_Inputs]:
    groups, dtype = k.shape[1], torch.promote_types(q.dtype, torch.float32)
    of_queries = _in_rows(q, rows.queries, rows.query_sizes, groups, dtype)
    of_keys = (_in_rows(one, rows.keys, rows.key_sizes, groups, dtype) for one in (k, v))
    for mask, queries, keys, values in zip(rows.masks, of_queries, *of_keys, strict=True):
        of_groups = None if mask is None else mask.repeat_interleave(groups, 0)
        yield queries.mul_(scaling * _LOG2_E), keys, values, of_groups


class _Block(NamedTuple):
    """Some rows' next queries, with all keys that they attend to."""

    rows: slice
    """Of B."""
    queries: slice
    """Of L_q · G."""
    keys: slice


def _blocks(q: torch.Tensor, k: torch.Tensor, group: int) -> Iterator[_Block]:
    """Yields blocks of queries [B, L_q · G, D], the last of as many keys [B, L_k, D], and lets their products be
    computed by what is fastest until the next one is asked for."""
    num_queries, num_keys = q.shape[1] // group, k.shape[1]
    size = min(_MOST_QUERIES, max(_LEAST_QUERIES, num_keys // 8))
    together = max(1, _SCORES // (group * min(size, num_queries) * num_keys))
    for rows in blocks(len(q), together):
        for part in blocks(num_queries, size):
            seen = num_keys - num_queries + part.stop
            with onednn_for_float32((part.stop - part.start) * group * seen * q.shape[2]):
                yield _Block(rows, slice(part.start * group, part.stop * group), slice(0, seen))


def whole_vectors() -> int:
    """Returns the elements of which each thread gets whole vectors, however many of the threads share them."""
    return VECTORS * math.lcm(*range(1, torch.get_num_threads() + 1))


def _in_vectors(*shape: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a tensor of this shape, and the flat one of whole vectors for each thread that it is the beginning of.
    Functions are computed of the latter: torch has other instructions for the last elements of a tensor that fill no
    vector, so that the bits of a score would depend on what is computed beside it."""
    size = whole_vectors()
    flat = like.new_empty(-(-math.prod(shape) // size) * size)
    return flat[: math.prod(shape)].view(shape), flat


def _scores(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, block: _Block, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns [b, n · G, keys] of a block of n queries, in vectors."""
    rows, queries, keys = block
    own, seen = q[rows, queries], k[rows, keys]
    scores, flat = _in_vectors(len(own), own.shape[1], seen.shape[1], like=q)
    torch.bmm(own, seen.transpose(1, 2), out=scores)
    if mask is not None:
        scores.add_(mask[rows, :, keys])
    num = own.shape[1] // group
    future = torch.full((num, 1, num), -torch.inf, dtype=q.dtype)
    future[:, 0].triu_(1)
    scores.unflatten(1, (num, group))[..., -num:].add_(future)
    return scores, flat


def _attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns [B, L_q · G, D'] and [B, L_q · G, 1] the logarithms of the softmax's sums."""
    output, log_sum = q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(*q.shape[:2], 1)
    for block in _blocks(q, k, group):
        rows, queries, keys = block
        scores, flat = _scores(q, k, mask, block, group)
        largest = scores.amax(-1, keepdim=True)
        scores.sub_(largest)
        flat.exp2_()
        total, flat = _in_vectors(*largest.shape, like=q)
        torch.sum(scores, -1, keepdim=True, out=total)
        torch.div(torch.bmm(scores, v[rows, keys]), total, out=output[rows, queries])
        flat.log2_()
        torch.add(largest, total, out=log_sum[rows, queries])
    return output, log_sum


def _gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    grad: torch.Tensor,
    grad_dot: torch.Tensor,
    log_sum: torch.Tensor,
    *,
    group: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients of queries [B, L_q · G, D], but for the scaling, keys and values, from `grad` [B, L_q · G,
    D'] of the output and its product with the output, `grad_dot` [B, L_q · G, 1]."""
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for block in _blocks(q, k, group):
        rows, queries, keys = block
        own, of_output = q[rows, queries], grad[rows, queries]
        probs, flat = _scores(q, k, mask, block, group)
        probs.sub_(log_sum[rows, queries])
        flat.exp2_()
        grad_v[rows, keys].baddbmm_(probs.transpose(1, 2), of_output)
        of_scores = torch.bmm(of_output, v[rows, keys].transpose(1, 2)).sub_(grad_dot[rows, queries]).mul_(probs)
        grad_q[rows, queries] = torch.bmm(of_scores, k[rows, keys])
        grad_k[rows, keys].baddbmm_(of_scores.transpose(1, 2), own, alpha=1 / _LOG2_E)
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

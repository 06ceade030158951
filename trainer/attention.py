"""Causal attention over packed samples that never crosses a boundary.

Legend: `U` computed tokens of the tree that the samples are (`grpo.trainer.packing`), `P` slots of the rows' queries,
`H` heads, `D` head size (`D'` of values), `L_q` and `L_k` queries and keys of a row.

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
from grpo.trainer.lm_head import accum_dtype, blocks
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
_FEW_KEYS = 256
"""Up to so many it is faster to add 0 to the scores of all keys that come before a block's queries than to leave them
out."""
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
    """Causal attention on a CPU in blocks of queries, whose scores fit into a cache; so do the copies of what they are
    computed from, rows side by side and in float32. As in flash attention (arXiv:2205.14135), the backward pass
    computes the scores again, and has the softmax by the logarithm of its sum.

    Of S rows each group of G heads that share keys is a batch of its own, B in all, with the heads' queries side by
    side. Exponentials and logarithms have the base 2, which torch computes four times as fast as of base e."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, layout: Layout
    ) -> torch.Tensor:
        runs, groups, attended = layout.runs, k.shape[1], list[torch.Tensor]()
        by_slot = q.new_empty(len(runs.queries), q.shape[1] * v.shape[2])
        for rows in _rows(runs, q.shape[1], groups):
            keys, values = (_taken(one, rows.keys, groups) for one in (k, v))
            for block in rows.blocks:
                own = _taken(q, rows.queries[:, block.queries], groups).mul_(scaling * _LOG2_E)
                output, log_sum = _attended(own, keys, values, rows, block)
                _put(output, by_slot, rows, block)
                attended += output, log_sum
        ctx.save_for_backward(q, k, v, *attended)
        ctx.scaling, ctx.layout = scaling, layout
        return by_slot.index_select(0, runs.slot_of).view(*q.shape[:2], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, *attended = ctx.saved_tensors
        runs, groups, kept = ctx.layout.runs, k.shape[1], iter(attended)
        grad_q = q.new_empty(len(runs.queries), q.shape[1] * q.shape[2])
        grad_k, grad_v = (torch.zeros(len(k), one[0].numel(), dtype=attended[0].dtype) for one in (k, v))
        for rows in _rows(runs, q.shape[1], groups):
            keys, values = (_taken(one, rows.keys, groups) for one in (k, v))
            of_all: list[torch.Tensor] = []
            for block in rows.blocks:
                own, of_output = (_taken(one, rows.queries[:, block.queries], groups) for one in (q, grad))
                own.mul_(ctx.scaling * _LOG2_E)
                results = of_output, next(kept), next(kept)
                of_own, *of_seen = _gradients(own, keys, values, *results, rows, block)
                _put(of_own.mul_(ctx.scaling), grad_q, rows, block)
                if block is rows.blocks[0]:
                    of_all = of_seen
                    continue
                for total, part in zip(of_all, of_seen, strict=True):
                    total[:, : block.num_keys].add_(part)
            # The gradients of a token that several samples share are summed in float32 before they are rounded once.
            for total, part in zip((grad_k, grad_v), of_all, strict=True):
                by_key = part.view(len(rows.keys), groups, *part.shape[1:]).transpose(1, 2).flatten(2).flatten(0, 1)
                total.index_add_(0, rows.keys.flatten(), by_key)
        of_q = grad_q.index_select(0, runs.slot_of).view_as(q)
        return of_q, *(total.to(one.dtype).view_as(one) for total, one in ((grad_k, k), (grad_v, v))), None, None


class _Block(NamedTuple):
    """Some of a row's queries, n of its L_q, with all keys that they attend to."""

    queries: slice
    num_keys: int
    future: torch.Tensor
    """[n · G, m] -inf where one of the last m keys comes after the query, otherwise 0."""


class _Rows(NamedTuple):
    """S rows of a bucket, which are computed together."""

    slots: slice
    """Of P, in which the queries have their results."""
    queries: torch.Tensor
    """[S, L_q] i64 the computed token of each query."""
    keys: torch.Tensor
    """[S, L_k] i64 the computed token of each key."""
    padding: torch.Tensor
    """[S, L_q] bool True for queries that are padding."""
    mask: torch.Tensor | None
    """[S, 1, L_k] f32 or None, as in `Buckets`."""
    blocks: Sequence[_Block]
    """From the last one on, which has all keys."""


def _rows(runs: Buckets, heads: int, groups: int) -> Iterator[_Rows]:
    """Divides buckets into rows whose scores by all heads fit into a cache."""
    padding = runs.padding
    query = key = 0
    for (count, num_queries, num_keys), mask in zip(runs.shapes, runs.masks, strict=True):
        size = min(_MOST_QUERIES, max(_LEAST_QUERIES, num_keys // 8))
        parts = [
            _block(part, num_keys - num_queries + part.stop, heads // groups) for part in blocks(num_queries, size)
        ]
        together = max(1, _SCORES // (heads * min(size, num_queries) * num_keys))
        for rows in blocks(count, together):
            slots = slice(query + rows.start * num_queries, query + rows.stop * num_queries)
            of_keys = slice(key + rows.start * num_keys, key + rows.stop * num_keys)
            yield _Rows(
                slots,
                runs.queries[slots].view(-1, num_queries),
                runs.keys[of_keys].view(-1, num_keys),
                padding[slots].view(-1, num_queries),
                None if mask is None else mask[rows],
                parts[::-1],
            )
        query, key = query + count * num_queries, key + count * num_keys


def _block(queries: slice, num_keys: int, group: int) -> _Block:
    num = queries.stop - queries.start
    future = torch.zeros(num, 1, num_keys if num_keys <= _FEW_KEYS else num)
    future[:, 0, -num:] = torch.full((num, num), -torch.inf).triu_(1)
    return _Block(queries, num_keys, future.expand(-1, group, -1).flatten(0, 1))


def _taken(tensor: torch.Tensor, tokens: torch.Tensor, groups: int) -> torch.Tensor:
    """Returns [B, n · G, D] of the tokens [S, n] of a tensor [U, H, D], in the type to accumulate in."""
    taken = tensor.flatten(1).index_select(0, tokens.flatten())
    by_group = taken.view(*tokens.shape, groups, -1).transpose(1, 2)
    copied = torch.empty(by_group.shape, dtype=accum_dtype(tensor.dtype)).copy_(by_group)
    return copied.view(len(tokens) * groups, -1, tensor.shape[2])


def _put(part: torch.Tensor, by_slot: torch.Tensor, rows: _Rows, block: _Block) -> None:
    """Writes what has the shape of a block's queries, [B, n · G, D], to its slots of [P, H · D]."""
    own = by_slot[rows.slots].view(*rows.queries.shape, -1)[:, block.queries]
    count, num = own.shape[:2]
    by_group = part.view(count, -1, num, part.shape[1] // num * part.shape[2])
    own.view(count, num, by_group.shape[1], -1).copy_(by_group.transpose(1, 2))


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


def _scores(q: torch.Tensor, k: torch.Tensor, rows: _Rows, block: _Block) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns [B, n · G, keys] of a block's queries and the keys that they attend to, in vectors."""
    scores, flat = _in_vectors(*q.shape[:2], k.shape[1], like=q)
    torch.bmm(q, k.transpose(1, 2), out=scores)
    if rows.mask is not None:
        scores.unflatten(0, (len(rows.mask), -1)).add_(rows.mask[:, None, :, : block.num_keys])
    scores[..., -block.future.shape[1] :].add_(block.future)
    return scores, flat


def _attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: _Rows, block: _Block
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns [B, n · G, D'] and [B, n · G, 1] the logarithms of the softmax's sums, which are infinite for padding, so
    that it has no gradient."""
    k, v = k[:, : block.num_keys], v[:, : block.num_keys]
    with onednn_for_float32(q.shape[1] * k.shape[1] * k.shape[2]):
        scores, flat = _scores(q, k, rows, block)
        largest = scores.amax(-1, keepdim=True)
        scores.sub_(largest)
        flat.exp2_()
        total, flat = _in_vectors(*largest.shape, like=q)
        torch.sum(scores, -1, keepdim=True, out=total)
        output = torch.bmm(scores, v).div_(total)
    flat.log2_()
    log_sum = largest.add_(total)
    padding = rows.padding[:, None, block.queries, None]
    log_sum.view(len(padding), -1, padding.shape[2], q.shape[1] // padding.shape[2]).masked_fill_(padding, torch.inf)
    return output, log_sum


def _gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad: torch.Tensor,
    output: torch.Tensor,
    log_sum: torch.Tensor,
    rows: _Rows,
    block: _Block,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients of a block's queries [B, n · G, D], but for the scaling, and of the keys and values that
    they attend to, from `grad` of the output."""
    k, v = k[:, : block.num_keys].contiguous(), v[:, : block.num_keys]
    with onednn_for_float32(q.shape[1] * k.shape[1] * k.shape[2]):
        probs, flat = _scores(q, k, rows, block)
        probs.sub_(log_sum)
        flat.exp2_()
        grad_v = torch.bmm(probs.transpose(1, 2), grad)
        dots = torch.linalg.vecdot(grad, output)[..., None]
        of_scores = torch.bmm(grad, v.transpose(1, 2)).sub_(dots).mul_(probs)
        grad_k = torch.bmm(of_scores.transpose(1, 2), q).mul_(1 / _LOG2_E)
        return torch.bmm(of_scores, k), grad_k, grad_v


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

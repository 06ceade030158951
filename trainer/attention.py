"""Causal attention over packed samples that never crosses a boundary.

Legend: `T` packed tokens, `U` of them that are computed (prompts in common once), `S` samples, `P` slots of the padded
buckets, `H` heads, `D` head size.

Two implementations, registered with transformers under their names and chosen by `implementation_for`. Both get the
boundaries as the keyword `layout`, which the model hands through to its attention layers:

- ``grpo_buckets``: samples of similar length are padded on the right into one [S_b, H, L_b, D] call. Right padding is
  exact under a causal mask: no real token attends to what comes after it. The cost grows with Σ L² of the samples and
  not with T². For CPUs, and for float32 on GPUs.
- ``grpo_varlen``: a flash-attention kernel with cumulative lengths, for bfloat16 on GPUs.
"""

import importlib.util
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AttentionInterface

BUCKETS, VARLEN = "grpo_buckets", "grpo_varlen"
_BUCKET_SPAN = 0.8
_BUCKET_SLACK = 16
"""A bucket takes lengths down to 0.8 of its longest, or to 16 tokens less where that is lower: few calls, few gaps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where the samples of a packed sequence lie.

    Example: lengths [2, 3] with nothing in common are one bucket of shape (2, 3), longest first: slots
    [2, 3, 4, 0, 1, 1], where the second 1 is padding, and slot_of [3, 4, 0, 1, 2].
    """

    boundaries: torch.Tensor
    """[S + 1] i32 cumulative lengths, from 0."""
    longest: int
    """Tokens of the longest sample."""
    kept: torch.Tensor
    """[U] i64 the packed tokens that are computed."""
    source: torch.Tensor
    """[T] i64 the computed token that each packed token is equal to."""
    slots: torch.Tensor
    """[P] i64 the computed token in each slot; padding repeats the sample's last token."""
    slot_of: torch.Tensor
    """[U] i64 the slot of each computed token (one of them where samples share it)."""
    buckets: tuple[tuple[int, int], ...]
    """(samples, length) of each bucket, in the order of the slots."""


def layout_of(
    lengths: NDArray[np.integer[Any]],
    device: torch.device,
    *,
    kept: NDArray[np.int64],
    source: NDArray[np.int64],
) -> Layout:
    """The layout of samples with these `lengths` [S], each at least 1.

    `kept` [U] and `source` [T] are those of `shared_prefixes`.
    """
    boundaries = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    buckets, packed_of_slot, slot_of_packed = _slots(lengths.astype(np.int64), boundaries)

    def to_device(array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return Layout(
        boundaries=to_device(boundaries.astype(np.int32)),
        longest=int(lengths.max()),
        kept=to_device(kept),
        source=to_device(source),
        slots=to_device(source[packed_of_slot]),
        slot_of=to_device(slot_of_packed[kept]),
        buckets=buckets,
    )


def _slots(
    lengths: NDArray[np.int64], boundaries: NDArray[np.int64]
) -> tuple[tuple[tuple[int, int], ...], NDArray[np.int64], NDArray[np.int64]]:
    """Buckets, [P] the packed token of each slot, [T] the slot of each packed token."""
    order = np.argsort(-lengths, kind="stable")
    buckets = _buckets(lengths[order])
    widths = np.repeat([length for _, length in buckets], [count for count, _ in buckets])
    offsets = np.arange(widths.sum()) - np.repeat(np.cumsum(widths) - widths, widths)
    sample = np.repeat(order, widths)
    packed_of_slot = boundaries[sample] + np.minimum(offsets, lengths[sample] - 1)
    real = np.flatnonzero(offsets < lengths[sample])
    slot_of_packed = np.empty(boundaries[-1], dtype=np.int64)
    slot_of_packed[packed_of_slot[real]] = real
    return buckets, packed_of_slot, slot_of_packed


def _buckets(descending: NDArray[np.int64]) -> tuple[tuple[int, int], ...]:
    """(samples, length) of each bucket, for lengths sorted from the longest."""
    buckets = []
    start = 0
    while start < len(descending):
        longest = int(descending[start])
        shortest = min(int(_BUCKET_SPAN * longest), longest - _BUCKET_SLACK)
        end = int(np.searchsorted(-descending, -shortest, side="right"))
        buckets.append((end - start, longest))
        start = end
    return tuple(buckets)


def implementation_for(device: torch.device, dtype: torch.dtype) -> str:
    """The name of the best implementation here, for `attn_implementation`."""
    half = dtype in (torch.bfloat16, torch.float16)
    return VARLEN if device.type == "cuda" and half else BUCKETS


def _bucket_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    layout: Layout,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """[1, H, U, D] each (fewer heads in key and value) → [1, U, H, D]."""
    padded = [_gathered(stream, layout.slots) for stream in (query, key, value)]
    sizes = [count * length for count, length in layout.buckets]
    outputs = []
    for bucket, parts in zip(layout.buckets, zip(*(p.split(sizes) for p in padded), strict=True), strict=True):
        q, k, v = (part.unflatten(0, bucket).transpose(1, 2) for part in parts)
        output = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, layout.slot_of)[None], None


def _gathered(stream: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """[1, H, U, D] and [N] → [N, H, D]. Backward sums the gradients of a token that occurs more than once."""
    rows = stream[0].transpose(0, 1)
    gathered: torch.Tensor = rows.flatten(1).index_select(0, indices).unflatten(1, rows.shape[1:])
    return gathered


def _varlen_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    layout: Layout,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """[1, H, U, D] each (fewer heads in key and value) → [1, U, H, D]. Not yet run: needs a GPU."""
    q, k, v = (_gathered(stream, layout.source) for stream in (query, key, value))
    ends, longest = layout.boundaries, layout.longest
    if importlib.util.find_spec("flash_attn") is not None:
        from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found, unused-ignore]

        output = flash_attn_varlen_func(q, k, v, ends, ends, longest, longest, softmax_scale=scaling, causal=True)
    else:
        from torch.nn.attention.varlen import varlen_attn

        gqa = q.shape[1] != k.shape[1]
        output = varlen_attn(q, k, v, ends, ends, longest, longest, scale=scaling, window_size=(-1, 0), enable_gqa=gqa)
    return output.index_select(0, layout.kept)[None], None


def register() -> None:
    """Makes both implementations known to transformers; doing it twice changes nothing."""
    AttentionInterface.register(BUCKETS, _bucket_attention)
    AttentionInterface.register(VARLEN, _varlen_attention)

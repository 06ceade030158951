"""Mends vLLM's build for CPUs inside its engine process: the LoRA product, sampling, seeded requests, ranks, rotary
embeddings, norms, AMX.

vLLM's own LoRA path (`punica_cpu`) gives base rows in a mixed batch the last adapter (slot -1 is used as an index), and
gathers A and B once per token, which makes decoding three times slower.

Shapes: `R` rows (tokens of the engine's step), `I` input and `O` output features, of which a merged layer has several
slices `O_i`, `r` the largest rank, `L` adapter slots, `V` vocabulary.
"""

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch


class _Pass(NamedTuple):
    """Rows of a step that are computed together, with all their adapters side by side."""

    slots: tuple[int, ...]
    rows: slice
    not_own: torch.Tensor | None
    """[R, 1, slots, 1] bool: adapters that are not the row's; None with one adapter for all rows."""


class GroupedLora:
    """Takes the place of vLLM's punica wrapper: adds each row's own adapter to the layer's output."""

    def __init__(self, together: int) -> None:
        """`together`: how many adapters are computed in one pass, whose products with the others' rows are thrown away.
        Products in half precision are so quick on a CPU that their calls are what takes time."""
        self._together = together
        self._passes: list[_Pass] = []
        self._order: tuple[torch.Tensor, torch.Tensor] | None = None
        """[R] i64 the rows in the passes' order, and [R] i64 where each row then is; None if they come so."""
        self._side_by_side: dict[tuple[int, tuple[int, ...]], tuple[torch.Tensor, list[torch.Tensor]]] = {}
        """By the layer and the slots of a pass: [I, slices * slots * r] all A, and of each slice [slots * r, O_i]."""

    def forget(self) -> None:
        """Called when a slot has got another adapter."""
        self._side_by_side.clear()

    def update_metadata(self, mapping: Any, lora_index_to_id: Sequence[int | None], *_: Any, **__: Any) -> None:
        """Groups the rows of the coming step. `mapping.index_mapping` [R] are the adapter ids of rows, 0 for none;
        `lora_index_to_id[slot]` is the adapter id in that slot."""
        slot_of_id = {lora_id: slot for slot, lora_id in enumerate(lora_index_to_id) if lora_id is not None}
        slot_of_id[0] = -1
        slots = torch.tensor([slot_of_id[lora_id] for lora_id in mapping.index_mapping], dtype=torch.int64)
        own = [slot for slot in slots.unique().tolist() if slot >= 0]
        groups = [tuple(own[start : start + self._together]) for start in range(0, len(own), self._together)]
        if groups != [one.slots for one in self._passes]:
            self._side_by_side.clear()
        self._passes, self._order = [], None
        if len(groups) > 1 and bool((slots.diff() < 0).any()):
            slots, order = slots.sort(stable=True)
            self._order = order, order.argsort()
        for group in groups:
            found = torch.isin(slots, torch.tensor(group)).nonzero()[:, 0]
            rows = slice(int(found[0]), int(found[-1]) + 1)
            not_own = slots[rows, None] != torch.tensor(group)
            self._passes.append(_Pass(group, rows, not_own[:, None, :, None] if bool(not_own.any()) else None))

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: Sequence[torch.Tensor],
        lora_b_stacked: Sequence[torch.Tensor],
        scale: float,
        output_slices: Sequence[int],
        **kwargs: Any,
    ) -> None:
        """Computes `y[row, slice i] += scale * x[row] @ A_i.T @ B_i.T` with the row's own A [L, 1, r, I] and B
        [L, 1, O_i, r], for y [R, O], x [R, I]."""
        y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        output = y
        if self._order is not None:
            order, place = self._order
            output, x = y.index_select(0, order), x.index_select(0, order)
        for slots, rows, not_own in self._passes:
            key = lora_a_stacked[0].data_ptr(), slots
            if key not in self._side_by_side:
                self._side_by_side[key] = _side_by_side(slots, lora_a_stacked, lora_b_stacked)
            all_a, all_b = self._side_by_side[key]
            down = x[rows] @ all_a
            if not_own is not None:
                down.view(len(down), len(all_b), len(slots), -1).masked_fill_(not_own, 0.0)
            parts = output[rows].split(list(output_slices), dim=1)
            for own, b, part in zip(down.chunk(len(all_b), dim=1), all_b, parts, strict=True):
                part.addmm_(own, b, alpha=scale)
        if self._order is not None:
            torch.index_select(output, 0, place, out=y)


def _side_by_side(
    slots: Sequence[int], lora_a_stacked: Sequence[torch.Tensor], lora_b_stacked: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    all_a = [a[slot, 0] for a in lora_a_stacked for slot in slots]
    all_b = [[b[slot, 0] for slot in slots] for b in lora_b_stacked]
    return _joined(all_a, 0).T, [_joined(own, 1).T for own in all_b]


def _joined(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def install_grouped_lora(model: Any) -> None:
    """Gives every adapted layer of the served model `GroupedLora`; by `arguments.lora_modules` they are linear ones."""
    manager = model.lora_manager
    grouped = GroupedLora(4 if manager.lora_config.lora_dtype.itemsize < 4 else 1)
    for layer in manager.modules.values():
        layer.set_mapping(grouped)
    for prefix in manager.punica_wrapper_mapping:
        manager.punica_wrapper_mapping[prefix] = grouped
    activate = manager.activate_adapter

    def activate_adapter(adapter_id: int) -> bool:
        """Returns whether the adapter was written to a slot."""
        written: bool = activate(adapter_id)
        if written:
            grouped.forget()
        return written

    manager.activate_adapter = activate_adapter


def allow_amx() -> None:
    """Asks the kernel for AMX's tiles, with which vLLM computes attention in bfloat16 where the processor has them.
    Unasked, the first such instruction ends the engine (SIGILL)."""
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


class RestoredGenerators(dict[int, torch.Generator]):
    """The random generators of requests with a seed, by row.

    vLLM samples from a prompt of which only a part has been read, throws the token away, and takes the generator back
    by an offset, which a CPU's does not have. The sampler's hooks put it back, and vLLM, asking for it, finds none."""

    def __init__(self, generators: Mapping[int, torch.Generator], discarded: Callable[[], Iterable[int]]) -> None:
        """`discarded` gives the rows of the coming step whose tokens will be thrown away."""
        super().__init__(generators)
        self._discarded = discarded
        self._before: dict[int, torch.Tensor] = {}
        """Generator states of rows whose tokens are thrown away; an entry stays until vLLM asks for that row."""

    def get(self, row: int, default: Any = None) -> Any:
        """Returns the generator of a row; nothing the first time after it has been put back."""
        return default if self._before.pop(row, None) is not None else super().get(row, default)

    def remember(self, *_: object) -> None:
        """Keeps the states; called before the sampler."""
        self._before = {row: self[row].get_state() for row in self._discarded() if row in self}

    def restore(self, *_: object) -> None:
        """Puts the states back; called after the sampler."""
        for row, state in self._before.items():
            self[row].set_state(state)


def install_restored_generators(runner: Any) -> None:
    """Lets requests with a seed be sampled whose prompts are read in parts."""

    def discarded() -> Iterable[int]:
        return map(int, runner.discard_request_mask.np[: runner.input_batch.num_reqs].nonzero()[0])

    generators = RestoredGenerators(runner.input_batch.generators, discarded)
    runner.input_batch.generators = generators
    runner.sampler.register_forward_pre_hook(generators.remember)
    runner.sampler.register_forward_hook(generators.restore)


def install_sampling(runner: Any) -> None:
    """Lets tokens be drawn by `draw`: vLLM's kernel makes a random number for every token of the vocabulary, which
    takes four times as long. The log-probabilities are those that our servers ask for, `processed_logprobs`. Does
    nothing where vLLM's own way was asked for (`use_fp64_gumbel`)."""
    sampler = runner.sampler.topk_topp_sampler
    if getattr(sampler, "use_fp64_gumbel", False):
        return
    ops: Any = importlib.import_module("vllm.v1.sample.ops.topk_topp_sampler")

    def sample(
        logits: torch.Tensor, generators: Mapping[int, torch.Generator], k: torch.Tensor | None, p: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = ops.apply_top_k_top_p(logits, k, p).log_softmax(-1, dtype=torch.float32)
        return draw(logprobs, generators), logprobs

    sampler.forward = sample


def draw(logprobs: torch.Tensor, generators: Mapping[int, torch.Generator]) -> torch.Tensor:
    """Returns [R] i64 tokens of the distributions `logprobs` [R, V]: the first one at which the sum of the
    probabilities exceeds a random number, which comes from the row's generator if it has one. The sums are float64, in
    which the small probabilities of a large vocabulary are not lost, and of as many rows at a time as fit into a cache.
    """
    random = torch.rand(len(logprobs), 1, dtype=torch.float64)
    for row, generator in generators.items():
        random[row] = torch.rand(1, dtype=torch.float64, generator=generator)
    size = logprobs.shape[1]
    rows = max(1, 2**18 // size)
    found = []
    for part, own in zip(logprobs.split(rows), random.split(rows), strict=True):
        sums = part.softmax(-1).cumsum(-1, dtype=torch.float64)
        found.append(torch.searchsorted(sums, own * sums[:, -1:], right=True))
    return torch.cat(found)[:, 0].clamp_(max=size - 1)  # no sum exceeds what is not a number


def install_ranks() -> None:
    """Lets vLLM count ranks without torch's compiler, which takes two seconds and a C++ compiler."""
    sampler: Any = importlib.import_module("vllm.v1.sample.sampler")
    if hasattr(sampler, "batched_count_greater_than"):
        sampler.batched_count_greater_than = num_at_least


def install_flat_rotary() -> None:
    """Lets models rotate queries and keys [R, heads, size], as LFM2 does: vLLM's kernel for CPUs takes no others than
    [R, heads * size], and computes something else of these."""
    ops: Any = importlib.import_module("vllm._custom_ops")
    kernel = ops.rotary_embedding

    def rotary_embedding(positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None, *more: Any) -> None:
        """Rotates both in place."""
        given = [one for one in (query, key) if one is not None]
        flat = [one.flatten(1) if one.dim() == 3 and positions.dim() == 1 else one for one in given]
        kernel(positions, flat[0], flat[1] if len(flat) > 1 else None, *more)
        for one, rotated in zip(given, flat, strict=True):
            if rotated.data_ptr() != one.data_ptr():
                one.copy_(rotated.view(one.shape))

    ops.rotary_embedding = rotary_embedding


def install_norms(model: Any) -> None:
    """Lets the RMS norms of the served model whose weight is of half precision be computed by `rms_norm`. Those of
    other classes have other formulas, and in float32 vLLM's own is that of transformers."""
    layernorm: Any = importlib.import_module("vllm.model_executor.layers.layernorm")
    for module in model.modules():
        if type(module) is not layernorm.RMSNorm or not module.has_weight or module.variance_size_override is not None:
            continue
        # The kernel takes whole vectors.
        if module.weight.dtype in (torch.bfloat16, torch.float16) and module.weight.numel() % 32 == 0:
            module.forward = functools.partial(rms_norm, module, torch.ones_like(module.weight))


def rms_norm(
    norm: Any, ones: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Returns vLLM's RMS norm of [..., H], or that of its sum with the residual and this sum, as transformers and the
    trainer compute it: of the rounded sum, and rounded before it is multiplied by the weight. vLLM's own formula takes
    the sum before it is rounded, so that a fifth of the results round to another number, and twice as long. `ones` [H]
    stand for the weight in vLLM's kernel, which does not round before it. What is not of the weight's type is left to
    vLLM: the kernel would read it as if it were."""
    total = (x if residual is None else x + residual).contiguous()
    if total.dtype != ones.dtype:
        own: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = norm.forward_native(x, residual)
        return own
    output = torch.empty_like(total)
    torch.ops._C.rms_norm(output, total, ones, norm.variance_epsilon)
    output.mul_(norm.weight)
    return output if residual is None else (output, total)


def num_at_least(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Returns [R] i64: how many numbers of each row of x [R, V] are at least the row's value in `values` [R, 1]. Counts
    in float32, which is exact up to 2^24, and as many rows at a time as fit into a cache."""
    rows = max(1, 2**18 // x.shape[1])
    parts = zip(x.split(rows), values.split(rows), strict=True)
    return torch.cat([torch.ge(x, value, out=torch.empty(x.shape)).sum(-1) for x, value in parts]).long()

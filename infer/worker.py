"""What runs inside vLLM's engine process: our extension of its worker, and the LoRA product for CPUs.

vLLM's own CPU path (`punica_cpu`) has two faults that decide here. A row without an adapter has slot -1, which it
uses as an index, so base rows in a mixed batch receive the last adapter. And it gathers A and B once per token, which
makes decoding three times slower. `GroupedLora` replaces it: rows are grouped by slot, each group is two plain matrix
products, and rows of slot -1 are left alone. On GPUs vLLM's kernels stay as they are.

Shapes: `R` rows (tokens of the engine's step), `I` input features, `O` output features, `r` the largest rank,
`n` slices of a merged layer (3 in qkv_proj, 2 in gate_up_proj, else 1), `L` adapter slots.

The module imports no vLLM: vLLM finds the extension by its qualified name, and `GroupedLora` needs only the methods
that vLLM's layers call.
"""

import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from safetensors import safe_open

from infer import lend, ranks, score_temperature


class RowMapping(Protocol):
    """vLLM's LoRAMapping, as far as it is read: the adapter id of each row, 0 for rows without one."""

    index_mapping: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroup:
    """The rows of one adapter slot: a slice where they are neighbours, else their indices [k] i64."""

    slot: int
    rows: slice | torch.Tensor


class JointStack(tuple[torch.Tensor, ...]):
    """The n stacked tensors of a merged layer, as vLLM holds them, being views of one tensor `joint`.

    For A, `joint` is [L, n*r, I]; for B, it is [L, O, n*r], block-diagonal over the slices. vLLM writes adapters
    through the views; the products read `joint`, so that a merged layer costs two matrix products and not 2n.
    """

    joint: torch.Tensor

    def __new__(cls, views: Sequence[torch.Tensor], joint: torch.Tensor) -> Self:
        """Views of [L, 1, rows, columns] each, in the order of the slices."""
        stack = super().__new__(cls, views)
        stack.joint = joint
        return stack


def joined_a(stacked: Sequence[torch.Tensor]) -> JointStack:
    """Move n tensors [L, 1, r, I] into one [L, n*r, I]; contents are kept."""
    joint = torch.cat([a[:, 0] for a in stacked], dim=1)
    views = joint.split([a.shape[2] for a in stacked], dim=1)
    return JointStack([view.unsqueeze(1) for view in views], joint)


def joined_b(stacked: Sequence[torch.Tensor]) -> JointStack:
    """Move n tensors [L, 1, O_i, r] onto the diagonal of one [L, sum O_i, n*r]; contents are kept."""
    rank = stacked[0].shape[3]
    num_rows = sum(b.shape[2] for b in stacked)
    joint = stacked[0].new_zeros(stacked[0].shape[0], num_rows, rank * len(stacked))
    views, row = [], 0
    for index, b in enumerate(stacked):
        view = joint[:, row : row + b.shape[2], index * rank : (index + 1) * rank]
        view.copy_(b[:, 0])
        views.append(view.unsqueeze(1))
        row += b.shape[2]
    return JointStack(views, joint)


def group_rows(slots: Sequence[int]) -> tuple[RowGroup, ...]:
    """Group row numbers by adapter slot; rows of slot -1 (the base model) are in no group.

    `group_rows([0, 0, -1, 1])` gives slot 0 with slice(0, 2) and slot 1 with slice(3, 4).
    """
    row_slots = torch.tensor(slots, dtype=torch.int64)
    groups = []
    for slot in sorted(set(slots) - {-1}):
        rows = torch.nonzero(row_slots == slot).flatten()
        first, last = int(rows[0]), int(rows[-1])
        neighbours = last - first + 1 == rows.numel()
        groups.append(RowGroup(slot=slot, rows=slice(first, last + 1) if neighbours else rows))
    return tuple(groups)


def add_product(y: torch.Tensor, rows: slice | torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """`y[rows] += x @ weight.T` in place, for y [R, O], x [k, I] being those rows' inputs, weight [O, I]."""
    if isinstance(rows, slice):
        y[rows].addmm_(x, weight.T)
    else:
        y.index_add_(0, rows, x @ weight.T)


class GroupedLora:
    """Stands where vLLM's layers expect their punica wrapper: adds each row's own adapter to its output.

    The same groups serve all layers of a step; vLLM calls `update_metadata` when the batch's mapping changes.
    """

    def __init__(self) -> None:
        self.groups: tuple[RowGroup, ...] = ()

    def update_metadata(
        self, mapping: RowMapping, lora_index_to_id: Sequence[int | None], *args: Any, **kwargs: Any
    ) -> None:
        """Recompute the groups of the coming step. `lora_index_to_id[slot]` is the adapter id in that slot."""
        slot_of_id = {lora_id: slot for slot, lora_id in enumerate(lora_index_to_id) if lora_id is not None}
        slot_of_id[0] = -1
        self.groups = group_rows([slot_of_id[lora_id] for lora_id in mapping.index_mapping])

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
        """`y[row, slice i] += scale * x[row] @ A_i.T @ B_i.T` with the row's own A and B, for y [R, O], x [R, I]."""
        if not isinstance(lora_a_stacked, JointStack) or not isinstance(lora_b_stacked, JointStack):
            raise TypeError("GroupedLora serves only layers prepared by install_grouped_lora")
        y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        for group in self.groups:
            shrunk = x[group.rows] @ lora_a_stacked.joint[group.slot].T
            if scale != 1.0:
                shrunk *= scale
            add_product(y, group.rows, shrunk, lora_b_stacked.joint[group.slot])

    def add_shrink(
        self,
        y: torch.Tensor | Sequence[torch.Tensor],
        x: torch.Tensor,
        lora_a_stacked: Sequence[torch.Tensor],
        scale: float,
        **kwargs: Any,
    ) -> None:
        """`y[i][row] += scale * x[row] @ A_i.T`, for y[i] [R, r] float32: the first half, which vLLM 0.24 calls
        by itself for merged layers."""
        x = x.view(-1, x.shape[-1])
        for group in self.groups:
            group_x = x[group.rows]
            for index, stacked in enumerate(lora_a_stacked):
                shrunk = (group_x @ stacked[group.slot, 0].T).to(y[index].dtype) * scale
                y[index][group.rows] += shrunk

    def add_expand(
        self,
        y: torch.Tensor,
        x: torch.Tensor | Sequence[torch.Tensor],
        lora_b_stacked: Sequence[torch.Tensor],
        output_slices: Sequence[int],
        offset_start: int = 0,
        **kwargs: Any,
    ) -> None:
        """`y[row, slice i] += x[i][row] @ B_i.T`, for x[i] [R, r]: the second half."""
        y = y.view(-1, y.shape[-1])
        for group in self.groups:
            start = offset_start
            for index, (stacked, size) in enumerate(zip(lora_b_stacked, output_slices, strict=True)):
                weight = stacked[group.slot, 0]
                add_product(y[:, start : start + size], group.rows, x[index][group.rows].to(weight.dtype), weight)
                start += size


class RestoredGenerators(dict[int, torch.Generator]):
    """The random numbers of requests with a seed, on a CPU.

    vLLM samples from a prompt of which only a part has been read, throws the token away, and takes the generator back
    by an offset. A generator of a CPU has none: the engine would end with an error. So the generators are put back
    here, around the sampler, and when vLLM then asks for them in order to take them back, it finds none.
    """

    def __init__(self, generators: Mapping[int, torch.Generator], discarded: Callable[[], Iterable[int]]) -> None:
        """`discarded` gives the rows of the coming step whose tokens will be thrown away."""
        super().__init__(generators)
        self._discarded = discarded
        self._before: dict[int, torch.Tensor] = {}
        self._put_back: set[int] = set()
        """Rows that vLLM has yet to ask for."""

    def get(self, row: int, default: Any = None) -> Any:
        """The generator of a row; nothing the first time after it has been put back."""
        if row in self._put_back:
            self._put_back.discard(row)
            return default
        return super().get(row, default)

    def remember(self, *_: object) -> None:
        """Before the sampler."""
        self._before = {row: self[row].get_state() for row in self._discarded() if row in self}

    def restore(self, *_: object) -> None:
        """After it."""
        for row, state in self._before.items():
            self[row].set_state(state)
        self._put_back = set(self._before)


class PolicyWorker:
    """Our extension of vLLM's worker class, named to vLLM by `worker_extension_cls`; runs in the engine process."""

    def install_grouped_lora(self) -> int:
        """Give every adapted layer of the served model GroupedLora; the number of layers it now serves.

        Raises TypeError for a layer that is not a linear one: embeddings and the language model's head have paths
        of their own in vLLM, wrong for mixed batches as well.
        """
        manager = self.get_model().lora_manager  # type: ignore[attr-defined]
        grouped = GroupedLora()
        for name, layer in manager.modules.items():
            if not isinstance(getattr(layer, "lora_a_stacked", None), tuple) or not hasattr(layer, "output_slices"):
                raise TypeError(f"{name} ({type(layer).__name__}) is no linear layer; take it out of target_modules")
            layer.lora_a_stacked = joined_a(layer.lora_a_stacked)
            layer.lora_b_stacked = joined_b(layer.lora_b_stacked)
            layer.set_mapping(grouped)
        for prefix in manager.punica_wrapper_mapping:
            manager.punica_wrapper_mapping[prefix] = grouped
        return sum(layer.punica_wrapper is grouped for layer in manager.modules.values())

    def install_score_temperature(self) -> bool:
        """Let sequences be scored at any temperature; whether this vLLM's model runner is a known one. The last of what
        is installed: all is loaded then."""
        gc.freeze()  # what is there stays: the collector never looks at it
        gc.enable()
        return score_temperature.install(self.model_runner)  # type: ignore[attr-defined]

    def export_base_weights(self, output_dir: str, base_folder: str, base_model: str) -> int:
        """Offers the base weights to the trainers of the run in `output_dir`; their bytes. See `lend.export_model`."""
        manifest = lend.export_model(
            self.get_model(),  # type: ignore[attr-defined]
            output_dir=output_dir,
            base_folder=Path(base_folder),
            base_model=base_model,
            dtype=self.model_config.dtype,  # type: ignore[attr-defined]
            device=self.device,  # type: ignore[attr-defined]
        )
        return manifest.num_bytes

    def install_ranks(self) -> bool:
        """Let ranks of tokens be counted on a CPU without a compiler; whether this vLLM is known to count them so."""
        return ranks.install()

    def install_restored_generators(self) -> None:
        """Let requests with a seed be sampled on a CPU whose prompts are read in parts."""
        runner = self.model_runner  # type: ignore[attr-defined]

        def discarded() -> Iterable[int]:
            return map(int, runner.discard_request_mask.np[: runner.input_batch.num_reqs].nonzero()[0])

        generators = RestoredGenerators(runner.input_batch.generators, discarded)
        runner.input_batch.generators = generators
        runner.sampler.register_forward_pre_hook(generators.remember)
        runner.sampler.register_forward_hook(generators.restore)

    def load_policy_weights(self, folder: str | None, base_folder: str) -> None:
        """Replace the model's weights in place by the tensors in `folder`, or by the base's where it is None.

        Layers of which `folder` has no tensor keep their weights. vLLM merges some layers (q, k and v into one); of
        these it needs all parts, so those that `folder` lacks are taken from the base.
        """
        base = tensor_files(Path(base_folder))
        overlay = base if folder is None else tensor_files(Path(folder))
        packed = getattr(self.get_model(), "packed_modules_mapping", {})  # type: ignore[attr-defined]
        wanted = {name: (overlay if name in overlay else base)[name] for name in with_siblings(overlay, base, packed)}
        # For each layer that keeps its weights vLLM would warn.
        noisy = [logging.getLogger(f"vllm.model_executor.model_loader.reload.{n}") for n in ("layerwise", "inplace")]
        levels = [logger.level for logger in noisy]
        try:
            for logger in noisy:
                logger.setLevel(logging.ERROR)
            self.model_runner.reload_weights(weights_iterator=tensors_in(wanted))  # type: ignore[attr-defined]
        finally:
            for logger, level in zip(noisy, levels, strict=True):
                logger.setLevel(level)
        self._refresh_tied_head()

    def _refresh_tied_head(self) -> None:
        """On a CPU the head computes with a packed copy of its weight. Tied to the embedding, it has no tensor of its
        own in a checkpoint, and vLLM leaves the copy as it was."""
        for module in self.get_model().modules():  # type: ignore[attr-defined]
            if type(module).__name__ == "ParallelLMHead" and hasattr(module, "cpu_linear"):
                module.quant_method.process_weights_after_loading(module)


def tensor_files(folder: Path) -> dict[str, Path]:
    """Name of each tensor in the folder's safetensors files to its file."""
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    return found


def with_siblings(changed: Iterable[str], base: Mapping[str, Path], packed: Mapping[str, Sequence[str]]) -> list[str]:
    """The names, and those of the layers that vLLM merges with theirs, as far as the base has them; layer by layer.

    `packed` is vLLM's mapping, as `{"qkv_proj": ["q_proj", "k_proj", "v_proj"]}`.
    """
    groups = {part: parts for parts in packed.values() for part in parts}
    names: dict[str, None] = {}
    for name in sorted(changed):
        pieces = name.split(".")
        for part in groups.get(pieces[-2], ()) if len(pieces) > 1 else ():
            sibling = ".".join([*pieces[:-2], part, pieces[-1]])
            if sibling in base:
                names[sibling] = None
        names[name] = None
    return list(names)


def tensors_in(files: Mapping[str, Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """The named tensors, one in memory at a time."""
    for name, path in files.items():
        with safe_open(path, framework="pt") as file:
            yield name, file.get_tensor(name)

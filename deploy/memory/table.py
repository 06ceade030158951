"""The estimate, what was measured of it, what is shared, and who gets what, as lines of text."""

from collections.abc import Iterator

from deploy.memory.dry_step import DryStep
from deploy.memory.estimate import GIB, MIB, Estimate
from deploy.memory.split import Split

_NAMES = {
    "base": "base weights of its own",
    "adapter": "adapter, float32",
    "optimizer": "optimizer's state",
    "average": "moving average of the adapter",
    "gradients": "gradients",
    "kept": "activations that are kept",
    "working": "logits and gradients of activations",
    "dequantized": "dequantized weight",
    "fixed": "fixed overhead",
}
_OF_A_STEP = ("gradients", "kept", "working", "dequantized")


def lines(estimate: Estimate, *, measured: DryStep | None = None, split: Split | None = None) -> Iterator[str]:
    """One part of the trainer's need a line, their total, the saving, and the server's share."""
    yield _row("trainer's memory", "estimate", *(["measured", "held"] if measured else []))
    for part in [part for part in _NAMES if part not in _OF_A_STEP and part != "fixed"]:
        yield _row(_NAMES[part], size(getattr(estimate, part)))
    yield _row("a step", size(estimate.step), *([size(measured.allocated), size(measured.held)] if measured else []))
    for part in _OF_A_STEP:
        yield _row(f"  {_NAMES[part]}", size(getattr(estimate, part)))
    yield _row(_NAMES["fixed"], size(estimate.fixed))
    corrected = ["", size(measured.corrected(estimate).total)] if measured else []
    yield _row("total", size(estimate.total), *corrected)
    yield _row("stays when a step is over", size(estimate.stays))
    yield _row("base weights saved by sharing", size(estimate.shared))
    if split is not None:
        yield from _of_split(split)


def size(num_bytes: int) -> str:
    """In GiB from a tenth of one on, else in MiB."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB // 10 else f"{num_bytes / MIB:.1f} MiB"


def _of_split(split: Split) -> Iterator[str]:
    why = "as infer.yaml says" if split.chosen else "by itself"
    yield _row("device memory, free", size(split.memory.total), size(split.memory.free))
    yield _row(f"server: gpu_memory_utilization {split.utilization:g}, {why}", size(split.server))
    if split.at_rest is not None:
        yield _row("  of it kept at rest, while the trainer steps", size(split.at_rest))
        yield _row("  of it gained by taking turns", size(split.gained))
    if split.overcommitted:
        yield (
            f"warning: trainer and server together exceed what is free by {size(split.overcommitted)}; lower "
            "gpu_memory_utilization (infer.yaml) or remove it"
        )


def _row(name: str, *values: str) -> str:
    return (f"{name:<48}" + "".join(f"{value:>12}" for value in values)).rstrip()

"""Divides GPUs among the programs of a run, by CUDA_VISIBLE_DEVICES. Not yet run: needs two GPUs."""

from collections.abc import Mapping, Sequence
from itertools import islice, takewhile
from pathlib import Path

VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(environment: Mapping[str, str], folder: Path = Path("/dev")) -> tuple[str, ...]:
    """The GPUs that a program would see, as indices or UUIDs; looks without loading torch. As CUDA does, it reads the
    environment's list up to the first entry that is none; indices are compared with the devices in `folder`, where
    these show."""
    if not (folder / "nvidiactl").exists():
        return ()
    num_shown, listed = len([*folder.glob("nvidia[0-9]*")]), environment.get(VARIABLE)
    if listed is None:
        return tuple(map(str, range(max(1, num_shown))))

    def is_one(name: str) -> bool:
        return (not num_shown or int(name) < num_shown) if name.isdecimal() else name not in ("", "-1")

    return tuple(takewhile(is_one, (name.strip() for name in listed.split(","))))


def divided(visible: Sequence[str], needs: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """The GPUs that each program sees, the next ones in turn; empty where there are too few, and every program sees
    all. Example: ``divided(("0", "1"), {"infer": 1, "train": 1})`` is ``{"infer": ("0",), "train": ("1",)}``."""
    if len(visible) < 2 or sum(needs.values()) > len(visible):
        return {}
    left = iter(visible)
    return {role: tuple(islice(left, number)) for role, number in needs.items()}

"""A file system that remembers what has been synced: what of it a power cut leaves."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

Content = bytes | frozenset[tuple[str, int]]
"""Of a file its bytes; of a folder its names with their inodes."""


class Disk:
    """Files and folders with what was in them when they were last synced, by inode."""

    def __init__(self) -> None:
        self._synced: dict[int, Content] = {}
        self.too_early: list[str] = []
        """What was given its final name before all that it holds was synced."""

    @property
    def num_synced(self) -> int:
        return len(self._synced)

    def sync(self, path: Path) -> None:
        self._synced[path.stat().st_ino] = _content(path)

    def unsynced(self, path: Path) -> list[str]:
        """What of this file, or of this folder and all below it, a power cut takes away."""
        lost = [str(path)] * (self._synced.get(path.stat().st_ino) != _content(path))
        return (
            lost + [one for inner in sorted(path.iterdir()) for one in self.unsynced(inner)] if path.is_dir() else lost
        )

    def keeps(self, path: Path) -> bool:
        """Whether this name is still in its folder after a power cut."""
        listed = self._synced.get(path.parent.stat().st_ino, frozenset())
        return isinstance(listed, frozenset) and (path.name, path.stat().st_ino) in listed


def _content(path: Path) -> Content:
    return frozenset((one.name, one.inode()) for one in os.scandir(path)) if path.is_dir() else path.read_bytes()


@contextmanager
def recorded() -> Iterator[Disk]:
    """The disk as what runs within it leaves it. A name that begins with a point is a temporary one."""
    disk, fsync = Disk(), os.fsync
    moves = {"rename": os.rename, "replace": os.replace}

    def sync(descriptor: int) -> None:
        fsync(descriptor)
        disk.sync(Path(f"/proc/self/fd/{descriptor}").readlink())

    def moving(name: str) -> Any:
        def move(source: Any, target: Any, **options: Any) -> None:
            if not Path(target).name.startswith("."):
                disk.too_early.extend(disk.unsynced(Path(source)))
            moves[name](source, target, **options)

        return move

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", sync)
        for name in moves:
            patch.setattr(os, name, moving(name))
        yield disk

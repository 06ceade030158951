"""Disks that are full and folders that forbid writing."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def small_disk() -> Iterator[Callable[[Path], None]]:
    """Mounts a disk of 256 KiB at a folder."""
    mounted: list[Path] = []

    def mount(folder: Path) -> None:
        folder.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"mounting a small disk needs privileges that this user lacks: {done.stderr.strip()}")
        mounted.append(folder)

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)

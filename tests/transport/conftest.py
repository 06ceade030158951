"""Disks that are full and folders that forbid writing."""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
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


@pytest.fixture
def unprivileged() -> Callable[[], AbstractContextManager[None]]:
    """Gives up root's right to write anywhere, in this thread's file accesses too."""

    @contextmanager
    def give_up() -> Iterator[None]:
        if os.geteuid() != 0:
            pytest.skip("already unprivileged: the folders of this test belong to this user")
        os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(0)

    return give_up

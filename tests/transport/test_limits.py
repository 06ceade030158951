"""Tests the limits that a process sets for itself."""

import platform
import subprocess
import sys

import pytest

HEAPS_OF_EIGHT_THREADS = """
import ctypes, threading
from grpo.transport.limits import share_heaps

if {shared}:
    share_heaps()
all_have_allocated = threading.Barrier(8)

def allocate():
    kept = bytes(10_000)
    all_have_allocated.wait(60)

threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
stdout = ctypes.c_void_p(libc.fdopen(1, b"w"))
libc.malloc_info(0, stdout)
libc.fflush(stdout)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has no heaps of threads")
def test_threads_share_two_heaps() -> None:
    num_heaps = {}
    for shared in (True, False):
        command = [sys.executable, "-c", HEAPS_OF_EIGHT_THREADS.format(shared=shared)]
        found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=120).stdout
        num_heaps[shared] = found.count("<heap nr=")
    assert num_heaps[True] <= 2 < num_heaps[False]

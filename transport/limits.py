"""How many files and connections a process may have open, and how many heaps."""

import ctypes
import platform
import resource

MOST = 1 << 20
"""Highest limit to set: some programs look at every number that a file could have."""
_M_ARENA_MAX = -8
"""Parameter of glibc's mallopt(3)."""


def raise_file_limit() -> int:
    """Raises the soft limit of open files to the hard one, which any process may. Returns the soft limit. The usual
    one, 1,024, is too low for a thousand requests at once."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return most
    return MOST if soft == resource.RLIM_INFINITY else soft


def share_heaps() -> None:
    """Lets the threads of this process share two heaps; to be called before they are started. glibc makes up to eight a
    core, its arenas, and what one thread allocates and another one frees leaves holes in each: a process whose threads
    decode answers grows. Does nothing with another C library."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)

"""How many files and connections a process may have open."""

import resource

MOST = 1 << 20
"""Highest limit to set: some programs look at every number that a file could have."""


def raise_file_limit() -> int:
    """Raises the soft limit of open files to the hard one, which any process may. Returns the soft limit. The usual
    one, 1,024, is too low for a thousand requests at once."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return most
    return MOST if soft == resource.RLIM_INFINITY else soft

"""Seeds of requests, by what they are for."""

import hashlib


def mixed_seed(*parts: int | str) -> int:
    """A seed of 56 bits that depends on all of `parts` and on nothing else."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:7])


def group_seed(seed: int | None, group: int | str) -> int | None:
    """A request's seed; the server adds the number of the rollout."""
    return None if seed is None else mixed_seed(seed, group)

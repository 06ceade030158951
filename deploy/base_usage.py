"""What the base weights of a co-located run take, as `base_watch` has seen it last and the run's folder keeps it."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

FILE = "colocation.json"
"""In the run's folder."""
_MIB = 2**20
_MORE = 1.05
"""What is larger by this factor is told beside the last look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Borrowed:
    """What a trainer says of the base that it computes on. Example: 55 tensors of 3,277,312 bytes, none from disk."""

    num_tensors: int
    num_bytes: int
    from_disk_bytes: int
    """Of those that the server cannot lend, and the trainer has read for itself."""
    from_disk: tuple[str, ...]
    """Their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseUsage:
    """What one look has found, in bytes."""

    borrowed: Borrowed
    proportional: Mapping[str, int]
    """Of the lent memory, by program (infer, train): each page divided by the number of processes that have it. Empty
    on a GPU, whose driver does not tell it."""
    num_processes: int
    """How many processes compute on the one copy; each would have one of its own."""
    trainer_peak: int | None = None
    """The most that the trainer's processes held beside it, of looks a second apart. Where `alternate` makes their peak
    begin again with each step, that of a shorter step may be missed; `perf/train_peak_bytes` has it."""
    most: int | None = None
    """The largest `total` that any look has found: a server that was started again lends another copy, and a trainer
    that runs has the one before until it borrows anew."""

    @property
    def one_copy(self) -> int:
        """Of the whole base."""
        return self.borrowed.num_bytes + self.borrowed.from_disk_bytes

    @property
    def total(self) -> int | None:
        """What the base weights take of the machine's memory; None where it is not told."""
        if not self.proportional:
            return None
        return sum(self.proportional.values()) + (self.num_processes - 1) * self.borrowed.from_disk_bytes

    @property
    def apart(self) -> int:
        """What they would take with a copy in each process."""
        return self.num_processes * self.one_copy

    def rows(self) -> Iterator[tuple[str, str]]:
        """For a table."""
        borrowed = self.borrowed
        yield "base weights lent", f"{borrowed.num_tensors} tensors, {borrowed.num_bytes:,} bytes"
        names = f": {', '.join(borrowed.from_disk)}" if borrowed.from_disk else ""
        yield "read from disk besides", f"{len(borrowed.from_disk)} tensors, {borrowed.from_disk_bytes:,} bytes{names}"
        for program, num_bytes in self.proportional.items():
            yield f"proportional set size, grpo-{program}", f"{num_bytes:,} bytes"
        yield "base weights of all processes", str(self)
        if self.total is not None and self.most is not None and self.most > _MORE * self.total:
            yield (
                "at most, while one was started again",
                f"{_mib(self.most)}, {self.most / self.one_copy:.2f} of one copy",
            )
        if self.trainer_peak is not None:
            yield "trainer's own memory at its peak", _mib(self.trainer_peak)

    def __str__(self) -> str:
        apart = f"{self.num_processes} copies would take {_mib(self.apart)}"
        if self.total is None:
            return f"{_mib(self.one_copy)} are shared; {apart}"
        return f"{_mib(self.total)}, {self.total / self.one_copy:.2f} of one copy; {apart}"


def read_usage(folder: Path) -> BaseUsage | None:
    """What was seen last in a run's folder; None where nothing was, or the file is of another release."""
    try:
        fields = json.loads((folder / FILE).read_bytes())
        borrowed = Borrowed(**fields["borrowed"])
        return BaseUsage(**fields | {"borrowed": replace(borrowed, from_disk=tuple(borrowed.from_disk))})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:,.1f} MiB"

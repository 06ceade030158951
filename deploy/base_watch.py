"""Looks at what the base weights of a co-located run take: what the trainer borrows, by its own account, and what the
memory takes in each process, by the kernel's."""

import contextlib
import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from deploy.base_usage import FILE, BaseUsage, Borrowed
from deploy.guard import descendants
from transport.files import write_atomic
from transport.run import RunFolder
from transport.shared_base.usage import Usage, usage_of

LOOK_S = 1.0
"""Between looks, until there is something to see; then between looks at the trainer's peak, which cost next to
nothing."""
AGAIN_S = 30.0
"""Between looks at all mappings of server and trainer, which take a tenth of a second of a core."""
_SAID = re.compile(
    r"base weights: (\d+) tensors \((\d+) bytes\) are the server's, "
    r"(\d+) \((\d+) bytes\) were read from disk(?:: (.+))?$",
    re.MULTILINE,
)


class BaseWatch:
    """Looks at a run's processes from time to time, and keeps what it saw last in the run's folder."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder, self._log = folder, folder.logs / "train.log"
        self._begin = self._log.stat().st_size if self._log.exists() else 0  # before it: what an earlier trainer said
        self._borrowed: Borrowed | None = None
        self._next_s = self._again_s = 0.0
        self._beside: dict[int, int] = {}
        """By process of the trainer: the resident bytes that are not its own."""
        self.usage: BaseUsage | None = None

    def tick(self, pids: Mapping[str, int]) -> None:
        """To be called often, with the process of each program, below which all that it has started is looked for."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + LOOK_S
        if now_s >= self._again_s and (found := self._look(pids)) is not None:
            self.usage, self._again_s = found, now_s + AGAIN_S
            self.keep()
        if self.usage is not None and self._beside:
            peak = sum(max(0, _peak(pid) - beside) for pid, beside in self._beside.items())
            self.usage = replace(self.usage, trainer_peak=max(peak, self.usage.trainer_peak or 0))

    def keep(self) -> None:
        """Writes what was seen last. It is for people: where it cannot be written, the run goes on."""
        if self.usage is None:
            return
        with contextlib.suppress(OSError):
            write_atomic(self._folder.path / FILE, json.dumps(asdict(self.usage), indent=1).encode() + b"\n")

    def _look(self, pids: Mapping[str, int]) -> BaseUsage | None:
        """None before the trainer has read all of what it borrows, as it does for its first version, and where one of
        the two is gone that was seen before."""
        self._borrowed = self._borrowed or said_in(self._log, self._begin)
        if self._borrowed is None or not any(self._folder.broadcasts.glob("step_*")):
            return None
        mapped = {program: dict(_mapped_below(pids[program])) for program in ("infer", "train")}
        if not all(mapped.values()):
            seen = self.usage is not None and bool(self.usage.proportional)
            return None if seen else BaseUsage(borrowed=self._borrowed, proportional={}, num_processes=2)
        self._beside = {pid: sum(use.resident for use in uses) for pid, uses in mapped["train"].items()}
        return BaseUsage(
            borrowed=self._borrowed,
            proportional={
                program: sum(use.proportional for uses in of.values() for use in uses) for program, of in mapped.items()
            },
            num_processes=sum(len(of) for of in mapped.values()),
            trainer_peak=self.usage.trainer_peak if self.usage is not None else None,
        )


def said_in(log: Path, begin: int) -> Borrowed | None:
    """What a trainer has said in its log, from a byte on, of the base weights that it borrows."""
    try:
        with log.open("rb") as file:
            file.seek(begin)
            found = _SAID.search(file.read().decode(errors="replace"))
    except FileNotFoundError:
        return None
    if found is None:
        return None
    num_tensors, num_bytes, _, from_disk_bytes, names = found.groups()
    return Borrowed(
        num_tensors=int(num_tensors),
        num_bytes=int(num_bytes),
        from_disk_bytes=int(from_disk_bytes),
        from_disk=tuple(names.split(", ")) if names else (),
    )


def _mapped_below(root: int) -> Iterator[tuple[int, list[Usage]]]:
    """The processes below `root` that map lent memory."""
    for pid in descendants(root):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if uses := usage_of(pid):
                yield pid, uses


def _peak(pid: int) -> int:
    """The most that was resident of a process, in bytes; 0 where it has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    return 0

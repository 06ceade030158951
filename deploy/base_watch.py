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
from transport.folders import write_atomic
from transport.run import RunFolder
from transport.shared_base.usage import Usage, usage_of

LOOK_S = 1.0
"""Between looks, until there is something to see; then between looks at the trainer's peak, which cost next to
nothing."""
AGAIN_S = 30.0
"""Between looks at all mappings of server and trainer, which take a tenth of a second of a core."""
SOON_S = 5.0
"""The same, while they are not in order: where one of the two is started again, or has another's copy."""
_SAID = re.compile(
    r"base weights: (\d+) tensors \((\d+) bytes\) are the server's, "
    r"(\d+) \((\d+) bytes\) were read from disk(?:: (.+))?$",
    re.MULTILINE,
)


class BaseWatch:
    """Looks at a run's processes from time to time, and keeps what it saw last in the run's folder."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder, self._log = folder, folder.logs / "train.log"
        self._begin = self._log.stat().st_size if self._log.exists() else 0
        """Of what is not read yet; before it lies what trainers of earlier starts have said."""
        self._borrowed: Borrowed | None = None
        self._pids: Mapping[str, int] = {}
        self._next_s = self._again_s = 0.0
        self._beside: dict[int, int] = {}
        """By process of the trainer: the resident bytes that are not its own. Empty while a server that was started
        again lends another copy: then both may be resident for a moment."""
        self._lent: dict[int, frozenset[int]] = {}
        """By process of the trainer: the memories that it borrows."""
        self._covered: dict[int, int] = {}
        """By process of the trainer that has borrowed anew: the peak, in bytes, that may have held both copies. It says
        nothing of what was the process's own; another one does: a higher one, or any after `alternate` has made it
        begin again."""
        self.usage: BaseUsage | None = None

    def tick(self, pids: Mapping[str, int]) -> None:
        """To be called often, with the process of each program that runs, below which all that it has started is looked
        for."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + LOOK_S
        if pids != self._pids:
            self._pids, self._again_s = dict(pids), now_s
        if now_s >= self._again_s:
            self._look(now_s)
        if self.usage is not None and self._beside:
            peak = sum(self._own_peak(pid) for pid in self._beside)
            self.usage = replace(self.usage, trainer_peak=max(peak, self.usage.trainer_peak or 0))

    def keep(self) -> None:
        """Writes what was seen last. It is for people: where it cannot be written, the run goes on."""
        if self.usage is None:
            return
        with contextlib.suppress(OSError):
            write_atomic(self._folder.path / FILE, json.dumps(asdict(self.usage), indent=1).encode() + b"\n")

    def _look(self, now_s: float) -> None:
        """Finds nothing before the trainer has read all of what it borrows, as it does for its first version. Where one
        of the two is gone that was seen before, what was seen last stays."""
        self._listen()
        if self._borrowed is None or not any(self._folder.broadcasts.glob("step_*")):
            return
        mapped = {program: dict(_mapped_below(self._pids.get(program))) for program in ("infer", "train")}
        inodes = {use.inode for of in mapped.values() for uses in of.values() for use in uses}
        if all(mapped.values()):
            self._see(self._borrowed, mapped)
        elif self.usage is None or not self.usage.proportional:
            self.usage = BaseUsage(borrowed=self._borrowed, proportional={}, num_processes=2)
        in_order = len(inodes) == 0 or (len(inodes) == 1 and all(mapped.values()))
        self._beside = self._beside_of(mapped["train"]) if in_order else {}
        self._again_s = now_s + (AGAIN_S if in_order else SOON_S)
        self.keep()

    def _listen(self) -> None:
        """To what a trainer that borrows, or borrows anew, has said in whole lines since the last time."""
        with contextlib.suppress(FileNotFoundError), self._log.open("rb") as file:
            file.seek(self._begin)
            said = file.read()
            whole = said[: said.rfind(b"\n") + 1]
            self._begin += len(whole)
            self._borrowed = said_in(whole.decode(errors="replace")) or self._borrowed

    def _see(self, borrowed: Borrowed, mapped: Mapping[str, Mapping[int, list[Usage]]]) -> None:
        proportional = {
            program: sum(use.proportional for uses in of.values() for use in uses) for program, of in mapped.items()
        }
        before, num_processes = self.usage, sum(len(of) for of in mapped.values())
        now = BaseUsage(borrowed=borrowed, proportional=proportional, num_processes=num_processes)
        most = max(now.total or 0, (before.most if before is not None else None) or 0)
        self.usage = replace(now, most=most, trainer_peak=before.trainer_peak if before is not None else None)

    def _beside_of(self, borrowers: Mapping[int, list[Usage]]) -> dict[int, int]:
        """See `_beside`."""
        lent = {pid: frozenset(use.inode for use in uses) for pid, uses in borrowers.items()}
        anew = [pid for pid in lent if self._lent.get(pid, lent[pid]) != lent[pid]]
        self._covered = {pid: self._covered[pid] for pid in lent if pid in self._covered}
        self._covered |= {pid: _peak(pid) for pid in anew}
        self._lent = lent
        return {pid: sum(use.resident for use in uses) for pid, uses in borrowers.items()}

    def _own_peak(self, pid: int) -> int:
        """The most that a process of the trainer held beside what it borrows; 0 where that cannot be told."""
        peak = _peak(pid)
        return max(0, peak - self._beside[pid]) if peak != self._covered.get(pid) else 0


def said_in(text: str) -> Borrowed | None:
    """What a trainer has said last, in lines of its log, of the base weights that it borrows."""
    if not (found := _SAID.findall(text)):
        return None
    num_tensors, num_bytes, _, from_disk_bytes, names = found[-1]
    return Borrowed(
        num_tensors=int(num_tensors),
        num_bytes=int(num_bytes),
        from_disk_bytes=int(from_disk_bytes),
        from_disk=tuple(names.split(", ")) if names else (),
    )


def _mapped_below(root: int | None) -> Iterator[tuple[int, list[Usage]]]:
    """The processes below `root`, None where that does not run, that map lent memory."""
    for pid in descendants(root) if root is not None else ():
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

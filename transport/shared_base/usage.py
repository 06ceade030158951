"""How much of the lent main memory is in a process, by the kernel's own account."""

import re
from dataclasses import dataclass
from pathlib import Path

from transport.shared_base.memory import NAME

_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ (\S{4}) ([0-9a-f]+) (\S+) (\d+) +(.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """A process's mapping of one lent memory, in bytes."""

    inode: int
    """Equal in all processes that map the same memory."""
    writable: bool
    resident: int
    """Of its pages those that are in the process."""
    proportional: int
    """The same, each page divided by the number of processes that have it: the sum over all processes is what the
    memory takes."""


def usage_of(pid: int) -> list[Usage]:
    """The lent memories that a process maps. Raises OSError where it has ended or is another user's."""
    found, mapping = [], None
    sizes: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8", errors="replace").splitlines():
        if match := _MAPPING.match(line):
            mapping, sizes = match, {}
            continue
        key, _, value = line.partition(":")
        sizes[key] = int(value.split()[0]) * 1024 if value.strip().endswith("kB") else 0
        if key == "VmFlags" and mapping is not None and mapping[5].startswith(f"/memfd:{NAME}"):
            found.append(
                Usage(
                    inode=int(mapping[4]),
                    writable="w" in mapping[1],
                    resident=sizes["Rss"],
                    proportional=sizes["Pss"],
                )
            )
    return found

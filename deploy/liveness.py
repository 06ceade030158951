"""Whether a process that has written its number somewhere is there still."""

import os
import socket
import time
from pathlib import Path

_CLOCK_TOLERANCE_S = 2.0


def is_alive(pid: int | None, host: str | None, *, since: float | None) -> bool | None:
    """Whether the process is there still; None where that cannot be told from here. A process that has started after
    `since`, on the wall clock, has only got the number of one that is gone."""
    if pid is None or host != socket.gethostname():
        return None
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        booted_s = time.time() - float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError):
        return Path(f"/proc/{pid}").exists()
    state, started_s = fields[0], booted_s + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    if state in "ZX":
        return False
    return since is None or started_s <= since + _CLOCK_TOLERANCE_S

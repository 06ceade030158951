"""What only a step needs, given back when the step is over, for the server that takes turns with the trainer."""

import contextlib
import ctypes
import logging
import platform
import time
from pathlib import Path

import torch

from trainer.errors import ModelError

log = logging.getLogger(__name__)

_PROCESS = Path("/proc/self")
_RESET_PEAK = "5"
"""To /proc/PID/clear_refs: the peak of the resident set begins again (proc(5))."""


class GivingBack:
    """Gives a device's memory that is free within this process back to the device, step by step.

    On a GPU torch's allocator keeps what tensors have left, on a CPU the C library does (`keep_freed_memory`); the next
    step gets it anew, and on a CPU the system clears each page of it again.
    """

    def __init__(self, device: torch.device) -> None:
        """Raises `ModelError` where nothing could be given back."""
        if device.type == "cpu" and platform.libc_ver()[0] != "glibc":
            raise ModelError(
                "sleep_mode: true gives memory back by glibc's malloc_trim, and this C library is another one; set "
                "sleep_mode: false in all three files"
            )
        self._on_gpu = device.type == "cuda"
        try:
            self._reset_peak()
        except OSError as error:
            log.warning("perf/train_peak_bytes will be the most since the process began, not of a step: %s", error)

    def now(self) -> dict[str, float]:
        """To be called when a step's gradients are cleared and before its version can be seen, at which the server
        takes its turn. Metrics: the most that was held since the last call, what is held now, and how long this
        took. On a GPU they are of torch's allocator, on a CPU the process's resident set, the base that it borrows
        included."""
        peak, started_s = self._held(peak=True), time.perf_counter()
        if self._on_gpu:
            torch.cuda.empty_cache()
        else:
            ctypes.CDLL(None).malloc_trim(0)
        gave_back_s = time.perf_counter() - started_s
        with contextlib.suppress(OSError):  # which was said at the start
            self._reset_peak()
        return {
            "perf/train_peak_bytes": float(peak),
            "perf/train_stays_bytes": float(self._held(peak=False)),
            "time/give_back_s": gave_back_s,
        }

    def _held(self, *, peak: bool) -> int:
        """Bytes. Not yet run on a GPU."""
        if self._on_gpu:
            return torch.cuda.max_memory_reserved() if peak else torch.cuda.memory_reserved()
        name = "VmHWM:" if peak else "VmRSS:"
        [line] = [line for line in (_PROCESS / "status").read_text().splitlines() if line.startswith(name)]
        return 1024 * int(line.split()[1])

    def _reset_peak(self) -> None:
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
        else:
            (_PROCESS / "clear_refs").write_text(_RESET_PEAK)

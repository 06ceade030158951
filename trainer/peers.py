"""What the ranks of one trainer know of each other besides their communication: who has failed, by status files.

A communication that breaks off says little. The file of the rank at fault says why, or shows by its process id that the
process is gone.
"""

import time
from pathlib import Path

from trainer.errors import RankFailed, RanksApart, TrainerError
from trainer.parallel import Ranks
from transport.errors import PeerFailed, TransportError
from transport.run import RunFolder
from transport.status import FINISHED, PeerWatch, StatusFile, read_status

LOOK_S = 5.0
"""How long to look for another rank's failure; longer than what it takes to be sure that a process is gone."""
_POLL_S = 0.1


class RankStatus(StatusFile):
    """The status of a rank that is not the main one, beside that of the trainer."""

    def failed(self, error: BaseException) -> None:
        """A rank that is told to end has not failed."""
        if isinstance(error, SystemExit):
            self.set(FINISHED, message="told to end")
        else:
            super().failed(error)


def status_of(run: RunFolder, ranks: Ranks) -> StatusFile:
    """Where this rank says what it does; the main one's is the trainer's."""
    if ranks.is_main:
        return StatusFile(run.status / _file(0))
    return RankStatus(run.status / _file(ranks.rank))


def cause_of(error: BaseException, run: RunFolder, ranks: Ranks, *, look_s: float = LOOK_S) -> BaseException:
    """`error`, or that another rank has failed, where this is why a communication broke off or why the launcher told
    the main rank to end. A communication that took too long says what the other ranks do."""
    try:
        return _cause_of(error, run, ranks, look_s)
    except SystemExit as told_to_end:  # while it looked
        return _cause_of(told_to_end, run, ranks, look_s)


def _cause_of(error: BaseException, run: RunFolder, ranks: Ranks, look_s: float) -> BaseException:
    told_to_end = isinstance(error, SystemExit)
    if ranks.size == 1 or isinstance(error, TrainerError | TransportError) or (told_to_end and not ranks.is_main):
        return error
    paths = {rank: run.status / _file(rank) for rank in range(ranks.size) if rank != ranks.rank}
    others = [PeerWatch(path, name=f"rank {rank} of grpo-train", resuming=False) for rank, path in paths.items()]
    deadline = time.monotonic() + (0 if told_to_end else look_s)
    while True:
        for other in others:
            try:
                other.check()
            except PeerFailed as failure:
                return RankFailed(str(failure))
        if time.monotonic() >= deadline:
            break
        time.sleep(_POLL_S)
    if is_timeout(error):
        doing = "; ".join(f"rank {rank} is {_doing(path)}" for rank, path in paths.items())
        return RanksApart(f"waited wait_timeout_s for the other ranks: {doing}; raise it, or see their log ({error})")
    return error


def is_timeout(error: BaseException) -> bool:
    """Whether a communication took too long, rather than broke off. torch has no class of errors for that."""
    said = str(error).lower()
    return isinstance(error, RuntimeError) and ("timed out" in said or "wait timeout" in said)


def _doing(path: Path) -> str:
    fields = read_status(path) or {"state": "starting"}
    step = f" in step {fields['step']}" if fields.get("step") is not None else ""
    return f"{fields['state']}{step}"


def _file(rank: int) -> str:
    return "train.json" if rank == 0 else f"train.rank_{rank}.json"

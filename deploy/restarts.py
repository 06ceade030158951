"""Which programs of a run are started again after which ends, and how often that was, as the run's folder keeps it."""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy.processes import Again
from transport.checkpoints import Checkpoints
from transport.errors import START_AGAIN
from transport.folders import write_atomic
from transport.run import RunFolder

AWAY = "ended, to be started again"
"""The state of a program that is to come back, in its status file."""
_FILE = "restarts.json"
"""In the run's `status` folder."""
_GOES_ON = "--ckpt.resume_step=-1"
# What whoever resumes a run by hand may ask for, once.
_TAKES_OVER_ALL = ("--ckpt.skip_progress=false", "--ckpt.skip_buffer=false")
_PROMOTES_NONE = ("--buffer.easy_fraction=0", "--buffer.hard_fraction=0")


def again_of(role: str, *, limit: int) -> Again | None:
    """After which ends a program of this role is started again; `limit` is not for the server of a teacher, which the
    run can do without."""
    if role == "teacher":
        return Again(limit=None, exit_codes=None)
    if limit == 0:
        return None
    exit_codes = frozenset[int]() if role == "orch" else frozenset({START_AGAIN})
    arguments = () if role == "infer" else (_GOES_ON,)
    return Again(limit=limit, exit_codes=exit_codes, arguments=arguments)


def overrule(role: str, run: RunFolder, *, began_after: int) -> tuple[str, ...]:
    """Arguments against the settings that say how to take over what there was after batch `began_after`, the newest one
    when the run was begun or resumed. They hold for an orchestrator that goes on after that batch once more, and not
    for one that goes on after a batch of its own."""
    if role != "orch" or Checkpoints(run).newest_batch() <= began_after:
        return ()
    return (*_TAKES_OVER_ALL, *_PROMOTES_NONE)


def whence(role: str, run: RunFolder) -> str:
    """From where a program of this role goes on, to be appended."""
    if role == "orch":
        return ", after the newest batch"
    if role == "train":
        step = max(Checkpoints(run).steps(), default=None)
        return (
            ", from version 0: there is no checkpoint yet" if step is None else f", from the checkpoint of step {step}"
        )
    return ""


def keep_restarts(status: Path, number: Mapping[str, int]) -> None:
    """Writes how often each program was started again, by role. It is for people: where it cannot be written, the run
    goes on."""
    with contextlib.suppress(OSError):
        write_atomic(status / _FILE, json.dumps(dict(number)).encode(), durable=False)


def with_restarts(path: Path, restarts: Mapping[str, int]) -> None:
    """Adds to a run's summary, which the orchestrator has written, what that does not know."""
    if restarts:
        fields = json.loads(path.read_bytes()) | {"restarts": dict(restarts)}
        write_atomic(path, json.dumps(fields, indent=2).encode() + b"\n")


def read_restarts(status: Path) -> dict[str, int]:
    """How often each program was started again, by role; empty where none was."""
    try:
        found: Any = json.loads((status / _FILE).read_bytes())
        return {str(role): int(number) for role, number in found.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def times(number: int) -> str:
    """`once`, `2 times`."""
    return "once" if number == 1 else f"{number} times"

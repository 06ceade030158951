"""Starts the ranks of one trainer, by torchrun's agent in this process, and watches over them.

The workers are this program again, with torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR and so on, in the place of
those that a job scheduler has set). By TORCHELASTIC_RUN_ID they know that they are workers. Where one ends with an
error, the agent ends the others.

torch's store, where the workers meet, listens on all of the machine's addresses and asks for no password; gloo is held
to the loopback address. A firewall must keep strangers away from the ports of a machine that trains.
"""

import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.errors import RankFailed
from transport.errors import START_AGAIN
from transport.parent import PARENT_VAR
from transport.status import StatusFile

END_S = 8
"""How long workers may take to end once they are told to."""
_MODULE = "trainer.cli"


def launch(num_ranks: int, arguments: Sequence[str], *, status: Path) -> int:
    """Runs `grpo-train` with `arguments` as `num_ranks` workers, which end with this process.

    Returns the exit status: 0 where all of them ended well, 128 and the number of the signal that ended this process,
    1 where a worker ended with an error of its own, and `START_AGAIN` where workers were killed or only missed others.
    Who failed first is written to `status`, the trainer's status file, and on standard error where the worker cannot.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ[PARENT_VAR] = str(os.getpid())
    with tempfile.TemporaryDirectory(prefix="grpo-train-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            signals_to_handle="SIGTERM,SIGINT",
            shutdown_timeout=END_S,
        )
        try:
            elastic_launch(config, sys.executable)(*_python_flags(), "-m", _MODULE, *arguments)
        except SignalException as ended:
            return 128 + int(ended.sigval)
        except ChildFailedError as failed:
            return _failed(failed.failures, status)
    return 0


def _failed(failures: Mapping[int, Any], status: Path) -> int:
    """Names the rank at fault: one that ended by itself before one that was killed, and before those that only missed
    another one."""
    told_to_end = (START_AGAIN, -signal.SIGTERM, 128 + signal.SIGTERM)
    own = {rank: one for rank, one in failures.items() if one.exitcode not in told_to_end}
    rank, failure = min((own or failures).items(), key=lambda item: (item[1].exitcode < 0, item[1].timestamp))
    if failure.exitcode < 0:
        error = RankFailed(f"rank {rank} (pid {failure.pid}) was killed by {signal.Signals(-failure.exitcode).name}")
        print(f"error: {error}", file=sys.stderr)
    else:
        error = RankFailed(f"rank {rank} ended with exit status {failure.exitcode}; its log has the reason")
    if rank and status.exists():
        StatusFile(status).failed(error)
    return START_AGAIN if failure.exitcode < 0 or failure.exitcode == START_AGAIN else 1


def _python_flags() -> tuple[str, ...]:
    """-P: a folder here that happens to be called `trainer` must not shadow the package, where this process says so."""
    return ("-u", "-P") if sys.flags.safe_path else ("-u",)

"""Starts the ranks of one trainer on this machine, by torchrun's agent in this process, and supervises them.

The workers are this program again, with torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR and so on, which replace
those that a job scheduler has set). TORCHELASTIC_RUN_ID tells them that they are workers. If one ends with an error,
the agent ends the others. With `nodes` above 1, this program runs on each machine, and the agents meet at `rendezvous`,
which the agent on that machine serves.

torch's store, through which they meet, listens on all of the machine's addresses and asks for no password; on one
machine gloo is held to the loopback address. A firewall must keep strangers away from the ports of machines that train.
"""

import os
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from grpo.configs.train import TrainSettings
from grpo.trainer.errors import RankFailed
from grpo.transport.errors import PROOF_FAILED, START_AGAIN
from grpo.transport.parent import PARENT_VAR
from grpo.transport.status import StatusFile

END_S = 8
"""Seconds that workers may take to end once they are told to; torch 2.11 gives them 30 s whatever is asked."""
LATECOMERS_S = 15
"""Seconds to wait for further machines once `min_nodes` have come."""
_MODULE = "grpo.trainer.cli"
_ELSEWHERE = ("192.0.2.1", 9)
"""An address that is never this machine's (RFC 5737). Nothing is sent there."""


def launch(settings: TrainSettings, arguments: Sequence[str], *, status: Path) -> int:
    """Runs `grpo-train` with `arguments` as this machine's workers, which end with this process.

    Returns the exit status: 0 if all of them ended well, 128 + the number of the signal that ended this process, 1 if a
    worker ended with an error of its own, `PROOF_FAILED` where that is a proof that does not hold, and `START_AGAIN` if
    workers were killed, asked for it or only missed others, or if another machine is gone or does not come. The first
    failure is written to `status`, the trainer's status file, and to standard error if the worker could not.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    alone = settings.rendezvous is None
    address = "localhost"
    if settings.rendezvous is not None:
        address = own_address(settings.rendezvous, timeout_s=settings.wait_timeout_s)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if alone else _interface(address))
    os.environ[PARENT_VAR] = str(os.getpid())
    signal.signal(signal.SIGUSR1, lambda *_: _tell_workers())
    with tempfile.TemporaryDirectory(prefix="grpo-train-") as folder:
        config = LaunchConfig(
            min_nodes=settings.min_nodes or settings.nodes,
            max_nodes=settings.nodes,
            nproc_per_node=settings.gpus,
            run_id=uuid.uuid4().hex if alone else "grpo-train",
            rdzv_backend="c10d",
            rdzv_endpoint=settings.rendezvous or "localhost:0",
            rdzv_configs={
                "join_timeout": int(settings.wait_timeout_s),
                "read_timeout": int(settings.wait_timeout_s),
                "last_call_timeout": LATECOMERS_S,
            },
            local_addr=address,
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            signals_to_handle="SIGTERM,SIGINT",
        )
        config.shutdown_timeout = END_S
        try:
            elastic_launch(config, sys.executable)(*_python_flags(), "-m", _MODULE, *arguments)
        except SignalException as ended:
            return 128 + int(ended.sigval)
        except ChildFailedError as failed:
            return _failed(failed.failures, status)
        except (RendezvousError, DistError) as error:
            print(f"error: the machines at {settings.rendezvous} are gone, or did not come: {error}", file=sys.stderr)
            return START_AGAIN
    return 0


def own_address(rendezvous: str, *, timeout_s: float) -> str:
    """Returns the address by which this machine reaches the rendezvous, or, if that is a loopback address because this
    machine serves it, the address by which it reaches any other machine. Raises `RankFailed` if the rendezvous has no
    address in time. torchrun would take the machine's own name, which Debian's /etc/hosts maps to 127.0.1.1: other
    machines cannot connect to that, and neither can gloo."""
    (host, _, port), deadline_s = rendezvous.rpartition(":"), time.monotonic() + timeout_s
    while True:
        try:
            family, *_, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
            break
        except OSError as error:
            if time.monotonic() > deadline_s:
                message = f"rendezvous: no address is known for {host} after {timeout_s:g} s (wait_timeout_s): {error}"
                raise RankFailed(message) from error
            time.sleep(1.0)
    address = _address_towards(where[:2], family)
    if address.startswith("127.") or address == "::1":
        with suppress(OSError):
            return _address_towards(_ELSEWHERE, socket.AF_INET)
    return address


def _address_towards(where: tuple[Any, ...], family: int) -> str:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])


def _interface(address: str) -> str:
    """Returns the name of the network interface that has this address."""
    found = (name for name, all_of in psutil.net_if_addrs().items() if address in [one.address for one in all_of])
    return next(found, "lo")


def _tell_workers() -> None:
    """Passes SIGUSR1 on to the workers, which then end with a checkpoint."""
    for worker in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            worker.send_signal(signal.SIGUSR1)


def _failed(failures: Mapping[int, Any], status: Path) -> int:
    """Reports the rank at fault and returns the exit status: a rank that failed by itself comes before one that was
    killed, and both before those that only missed another one."""
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
    if failure.exitcode == PROOF_FAILED:
        return PROOF_FAILED
    return START_AGAIN if failure.exitcode < 0 or failure.exitcode == START_AGAIN else 1


def _python_flags() -> tuple[str, ...]:
    """Returns Python's flags for a worker: -P if this process has it, so that a folder here named `grpo` does not
    shadow the package."""
    return ("-u", "-P") if sys.flags.safe_path else ("-u",)

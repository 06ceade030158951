"""Starts the ranks of one trainer on this machine, by torchrun's agent in this process, and watches over them.

The workers are this program again, with torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR and so on, in the place of
those that a job scheduler has set). By TORCHELASTIC_RUN_ID they know that they are workers. Where one ends with an
error, the agent ends the others. With `nodes` above 1, this program runs on each machine, and the agents meet at
`rendezvous`, which the one on that machine serves.

torch's store, where they meet, listens on all of the machine's addresses and asks for no password; on one machine gloo
is held to the loopback address. A firewall must keep strangers away from the ports of machines that train.
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
from grpo.transport.errors import START_AGAIN
from grpo.transport.parent import PARENT_VAR
from grpo.transport.status import StatusFile

END_S = 8
"""How long workers may take to end once they are told to; torch 2.11 gives them 30 s whatever is asked."""
LATECOMERS_S = 15
"""How long further machines are waited for once `min_nodes` have come."""
_MODULE = "grpo.trainer.cli"
_ELSEWHERE = ("192.0.2.1", 9)
"""An address that is never this machine's (RFC 5737). Nothing is sent there."""


def launch(settings: TrainSettings, arguments: Sequence[str], *, status: Path) -> int:
    """Runs `grpo-train` with `arguments` as the workers of this machine, which end with this process.

    Returns the exit status: 0 where all of them ended well, 128 and the number of the signal that ended this process,
    1 where a worker ended with an error of its own, and `START_AGAIN` where workers were killed or only missed others,
    or another machine is gone or does not come. Who failed first is written to `status`, the trainer's status file, and
    on standard error where the worker cannot.
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
    """Returns the address of this machine on the way to the others. At the place where they meet it may be a loopback
    address, which says nothing to them; then it is that on the way to anywhere else, where there is one. Raises
    `RankFailed` where the DNS does not know that place in time."""
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
    """The name of the network interface that has this address."""
    found = (name for name, all_of in psutil.net_if_addrs().items() if address in [one.address for one in all_of])
    return next(found, "lo")


def _tell_workers() -> None:
    """Passes SIGUSR1 on, by which they end with a checkpoint."""
    for worker in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            worker.send_signal(signal.SIGUSR1)


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

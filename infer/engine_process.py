"""The process of vLLM's engine: how it is started, and that it ends with its server.

On a CPU it is forked from the server, which has all imports in memory, instead of started anew as vLLM would: a third
of a start's processor time is saved, and a fifth of the memory. The module imports no vLLM.
"""

import gc
import logging
import multiprocessing.util
import os
import socket
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo.transport.parent import end_with, watch

log = logging.getLogger(__name__)

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


@dataclass(frozen=True, slots=True, weakref_slot=True)
class FollowServer:
    """Travels to every engine process in vLLM's configuration (`additional_config`), and lets it end with the process
    that has started it, from the moment at which it is unpickled or forked."""

    server_pid: int
    norm_noise: bool = False
    """Whether norms can carry noise."""
    plain_weights: bool = False
    """Whether the engine computes with plain weights on a CPU, so that it can share them."""

    def __reduce__(self) -> tuple[Any, tuple[int, int, bool, bool, bool]]:
        starter_stays = threading.current_thread() is threading.main_thread()
        return follow, (os.getpid(), self.server_pid, self.norm_noise, self.plain_weights, starter_stays)

    def compute_hash(self) -> str:
        """Returns what vLLM's cache of compiled models depends on, besides its own settings."""
        return "norm_noise" if self.norm_noise else ""

    def at_forks(self, sockets: Sequence[socket.socket]) -> None:
        """Acts in what multiprocessing forks from this process, and closes there what is the server's alone."""
        parent = os.getpid()

        def forked(self: FollowServer) -> None:
            try:
                for sock in sockets:
                    sock.close()
                self.act(parent)
            except BaseException:  # multiprocessing would go on without it
                traceback.print_exc()
                os._exit(1)

        multiprocessing.util.register_after_fork(self, forked)

    def act(self, parent: int, *, starter_stays: bool = True) -> None:
        """Prepares this process, which `parent` has started, by a thread that stays or one that may end before it,
        unless it is the server's."""
        if self.server_pid != os.getpid():
            (end_with if starter_stays else watch)(parent)
            gc.freeze()
            if self.plain_weights:
                from grpo.infer import lend  # imports torch

                lend.keep_plain_weights()


def follow(parent: int, server_pid: int, norm_noise: bool, plain_weights: bool, starter_stays: bool) -> FollowServer:
    """Returns the FollowServer that arrives in another process, which `parent` has started."""
    arrived = FollowServer(server_pid, norm_noise, plain_weights)
    arrived.act(parent, starter_stays=starter_stays)

    from tqdm import tqdm  # type: ignore[import-untyped]

    # In a spawned process tqdm makes a semaphore with a name, which would stay in /dev/shm where all are killed.
    tqdm.set_lock(threading.RLock())
    return arrived


def choose_fork() -> None:
    """Lets vLLM fork the engine's process from this one, if it has no threads, whose locks would be missing in a copy,
    and all libraries of LD_PRELOAD. To be called when vLLM's configuration, which sets both, is made."""
    num_threads = len(list(Path("/proc/self/task").iterdir()))
    libraries, mapped = os.environ.get("LD_PRELOAD", ""), Path("/proc/self/maps").read_text(encoding="utf-8")
    missing = [one for one in libraries.replace(":", " ").split() if os.path.realpath(one) not in mapped]
    if num_threads > 1 or missing:
        why = f"the server has {num_threads} threads" if num_threads > 1 else f"{', '.join(missing)} must be loaded"
        log.info("the engine's process is not forked but started anew: %s", why)
    else:
        os.environ[METHOD] = "fork"

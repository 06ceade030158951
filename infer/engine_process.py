"""The process of vLLM's engine: how it is started, and that it ends with its server.

vLLM starts it anew (`spawn`), and it imports again all that its server has imported. On a CPU it can be forked from the
server instead, which has everything in memory: a third of a start's processor time is saved, and a fifth of the memory.
A process that has used a GPU cannot be forked, and neither can one with threads, whose locks and pools would be missing
in the copy.

The module imports no vLLM: the engine's process comes by here before it.
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

from infer import lend
from transport.parent import end_with

log = logging.getLogger(__name__)

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


@dataclass(frozen=True, slots=True, weakref_slot=True)
class FollowServer:
    """Travels to every engine process in vLLM's configuration (`additional_config`), and binds it to the process that
    starts it, the server's or another engine's. It acts as soon as it is unpickled or forked: an engine that waits for
    its server's handshake would outlive a server that is killed meanwhile."""

    server_pid: int
    norm_noise: bool = False
    """Whether the model's norms are those that can carry noise."""
    plain_weights: bool = False
    """Whether the engine computes with plain weights on a CPU, so that it can share them."""

    def __reduce__(self) -> tuple[Any, tuple[int, int, bool, bool]]:
        return follow, (os.getpid(), self.server_pid, self.norm_noise, self.plain_weights)

    def compute_hash(self) -> str:
        """What vLLM's cache of compiled models depends on, besides its own settings."""
        return "norm_noise" if self.norm_noise else ""

    def at_forks(self, sockets: Sequence[socket.socket]) -> None:
        """Act in whatever process multiprocessing forks from this one, as long as this object lives, and close there
        what is the server's alone."""
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

    def act(self, parent: int) -> None:
        """Prepare this process, which `parent` has started, unless it is the server's."""
        if self.server_pid != os.getpid():
            end_with(parent)
            gc.freeze()
            if self.plain_weights:
                lend.keep_plain_weights()


def follow(parent: int, server_pid: int, norm_noise: bool, plain_weights: bool) -> FollowServer:
    """A FollowServer on its arrival in another process, which `parent` has started."""
    arrived = FollowServer(server_pid, norm_noise, plain_weights)
    arrived.act(parent)

    from tqdm import tqdm  # type: ignore[import-untyped]

    # In a spawned process tqdm makes a semaphore with a name, which stays in /dev/shm when all processes of the server
    # are killed together. No bar of an engine is shared with another process.
    tqdm.set_lock(threading.RLock())
    return arrived


def choose_fork() -> None:
    """Lets vLLM fork the engine's process from this one, if that is safe and loses nothing: no thread, and no library
    that is to be loaded before everything else (LD_PRELOAD) and is not in memory.

    To be called when vLLM has made its configuration, which asks for `spawn` on a CPU, and sets those libraries.
    """
    num_threads = len(list(Path("/proc/self/task").iterdir()))
    libraries, mapped = os.environ.get("LD_PRELOAD", ""), Path("/proc/self/maps").read_text(encoding="utf-8")
    missing = [one for one in libraries.replace(":", " ").split() if os.path.realpath(one) not in mapped]
    if num_threads > 1 or missing:
        why = f"the server has {num_threads} threads" if num_threads > 1 else f"{', '.join(missing)} must be loaded"
        log.info("the engine's process is not forked but started anew: %s", why)
    else:
        os.environ[METHOD] = "fork"

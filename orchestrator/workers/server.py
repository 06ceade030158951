"""`python -m orchestrator.workers.server ENV_ID [--listen HOST:PORT]`: an environment for orchestrators elsewhere.

Each connection gets a process of its own with the environment, made with the arguments that the orchestrator's
`env.args` give; it ends with the connection. Where other machines reach the address, both sides need the same
GRPO_ENV_KEY. The key proves who is there; what is said is not encrypted.
"""

import argparse
import contextlib
import hmac
import logging
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time

from orchestrator.workers.links import (
    KEY_VAR,
    KILL_TIMEOUT_S,
    NONCE_BYTES,
    STDERR,
    child_command,
    prove,
    split_address,
)
from transport.curve import is_loopback

log = logging.getLogger(__name__)

GREETING_S = 10.0
"""For all of a greeting."""
MAX_GREETING = 64
"""So many connections may owe a greeting; further ones are not accepted until one has greeted or is refused."""
ACCEPT_PAUSE_S = 1.0
CLOSE_TIMEOUT_S = 20.0
MIN_KEY_CHARACTERS = 16
HANG_UP = select.POLLRDHUP | select.POLLHUP | select.POLLERR
KEEPALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}
"""Seconds, seconds and probes: an orchestrator whose machine is gone is found out within a minute."""


class EnvironmentServer:
    """Listens, and starts a process for each orchestrator that connects."""

    def __init__(self, env_id: str, address: str) -> None:
        """Raises ValueError for an address that others reach without a key, OSError where it cannot be listened on."""
        host, port = split_address(address)
        key = os.environ.get(KEY_VAR, "")
        if not is_loopback(host) and len(key) < MIN_KEY_CHARACTERS:
            raise ValueError(
                f"{address} can be reached from other machines, and {KEY_VAR} has {len(key)} characters, expected at "
                f"least {MIN_KEY_CHARACTERS}; make one with: openssl rand -hex 32, and set it on both sides"
            )
        self._env_id = env_id
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family)
        self._connections: dict[threading.Thread, socket.socket] = {}
        self._places = threading.Semaphore(MAX_GREETING)
        self._closed = threading.Event()
        host, port = self._socket.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        """Where it listens."""

    def serve(self) -> None:
        """Until it is closed. What it lacks for a moment, such as file descriptors, it waits for."""
        while not self._closed.is_set():
            self._places.acquire()
            try:
                self._accept()
            except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
                self._places.release()
                if not self._closed.is_set():
                    log.warning("cannot take a connection: %s; trying again in %g s", error, ACCEPT_PAUSE_S)
                    self._closed.wait(ACCEPT_PAUSE_S)

    def close(self) -> None:
        """Listens no more, and ends all processes and what they started."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._places.release()
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        threads = dict(self._connections)
        for connection in threads.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # for its thread, as if the orchestrator had hung up
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        if late := sum(thread.is_alive() for thread in threads):
            log.error("%d processes have not ended within %g s", late, CLOSE_TIMEOUT_S)

    def _accept(self) -> None:
        """Hands one connection to a thread of its own, which gives the place back once it has been greeted."""
        connection, (peer, *_) = self._socket.accept()
        thread = threading.Thread(target=self._welcome, args=(connection, peer), daemon=True)
        self._connections[thread] = connection
        try:
            thread.start()
        except RuntimeError:
            del self._connections[thread]
            connection.close()
            raise

    def _welcome(self, connection: socket.socket, peer: str) -> None:
        try:
            with connection:
                if self._is_ours(connection, peer) and not self._closed.is_set():
                    self._run_a_process(connection, peer)
        except OSError as error:
            log.error("%s could not be served: %s", peer, error)
        finally:
            del self._connections[threading.current_thread()]

    def _is_ours(self, connection: socket.socket, peer: str) -> bool:
        try:
            self._greet(connection)
        except (OSError, ValueError) as error:
            log.warning("refused a connection from %s: %s", peer, error)
            return False
        finally:
            self._places.release()
        return True

    def _greet(self, connection: socket.socket) -> None:
        deadline_s = time.monotonic() + GREETING_S
        theirs, ours = _exactly(connection, NONCE_BYTES, deadline_s), secrets.token_bytes(NONCE_BYTES)
        connection.sendall(ours + prove("server", theirs, ours))
        if not hmac.compare_digest(_exactly(connection, NONCE_BYTES, deadline_s), prove("orchestrator", theirs, ours)):
            raise ValueError(f"its key is another one; set {KEY_VAR} to the same text on both sides")

    def _run_a_process(self, connection: socket.socket, peer: str) -> None:
        """Until it ends or the orchestrator hangs up, then ends all that it started. It is not left to the process to
        see that the orchestrator is gone: code of the environment may keep all its threads from running."""
        connection.settimeout(None)  # the process has it, too
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        log.info("%s is served by a new process", peer)
        child = subprocess.Popen(
            [*child_command(connection.fileno()), self._env_id],
            pass_fds=(connection.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=STDERR,
            process_group=0,
        )
        try:
            _wait_for_either(child, connection)
        finally:
            code = _end(child)
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # what the process started may hold it open
        log.info("the process of %s has ended with exit code %s", peer, code)


def _wait_for_either(child: subprocess.Popen[bytes], connection: socket.socket) -> None:
    """Until the process has ended, which is left to be reaped, or the peer has hung up."""
    process = os.pidfd_open(child.pid)
    try:
        poll = select.poll()
        poll.register(process, select.POLLIN)
        poll.register(connection, HANG_UP)
        poll.poll()
    finally:
        os.close(process)


def _end(child: subprocess.Popen[bytes]) -> int | None:
    """Kills a process, which nobody has reaped yet, with its group. Returns its exit code; None where it stays."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    try:
        return child.wait(KILL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        log.error("process %d was killed and has not ended within %g s", child.pid, KILL_TIMEOUT_S)
        return None


def _exactly(connection: socket.socket, size: int, deadline_s: float) -> bytes:
    """So many bytes, by a time on the monotonic clock. Raises OSError and ValueError."""
    data = b""
    while len(data) < size:
        if (left_s := deadline_s - time.monotonic()) <= 0:
            raise TimeoutError("it took too long to greet")
        connection.settimeout(left_s)
        if not (more := connection.recv(size - len(data))):
            raise ValueError("it ended before it had greeted")
        data += more
    return data


def main() -> None:
    """Serves one environment until it is ended by a signal."""
    parser = argparse.ArgumentParser(
        prog="python -m orchestrator.workers.server",
        description="Serves one environment to orchestrators whose env.address leads here.",
    )
    parser.add_argument("env_id", metavar="ENV_ID", help="as env.id: a built-in name, module:Class or file.py:Class")
    parser.add_argument("--listen", metavar="HOST:PORT", default="127.0.0.1:7000", help="default: %(default)s")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        server = EnvironmentServer(options.env_id, options.listen)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    log.info("serving %s at %s", options.env_id, server.address)
    try:
        server.serve()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        server.close()


if __name__ == "__main__":
    main()

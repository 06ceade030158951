"""`python -m orchestrator.workers.server ENV_ID [--listen HOST:PORT]`: an environment for orchestrators elsewhere.

Each connection gets a process of its own with the environment, made with the arguments that the orchestrator's
`env.args` give; it ends with the connection. Where other machines reach the address, both sides need the same
GRPO_ENV_KEY. The key proves who is there; what is said is not encrypted.
"""

import argparse
import hmac
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading

from orchestrator.workers.links import KEY_VAR, NONCE_BYTES, STDERR, child_command, prove, split_address
from transport.curve import is_loopback

log = logging.getLogger(__name__)

GREETING_S = 10.0
MIN_KEY_CHARACTERS = 16


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
        self._children: set[subprocess.Popen[bytes]] = set()
        host, port = self._socket.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        """Where it listens."""

    def serve(self) -> None:
        """Until it is closed."""
        while True:
            try:
                connection, (peer, *_) = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._welcome, args=(connection, peer), daemon=True).start()

    def close(self) -> None:
        """Listens no more, and ends all processes."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for child in list(self._children):
            child.kill()

    def _welcome(self, connection: socket.socket, peer: str) -> None:
        with connection:
            try:
                connection.settimeout(GREETING_S)
                self._greet(connection)
            except (OSError, ValueError) as error:
                log.warning("refused a connection from %s: %s", peer, error)
                return
            connection.settimeout(None)
            log.info("%s is served by a new process", peer)
            child = subprocess.Popen(
                [*child_command(connection.fileno()), self._env_id],
                pass_fds=(connection.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=STDERR,
                process_group=0,
            )
        self._children.add(child)
        code = child.wait()
        self._children.discard(child)
        log.info("the process of %s has ended with exit code %s", peer, code)

    def _greet(self, connection: socket.socket) -> None:
        theirs, ours = _exactly(connection, NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
        connection.sendall(ours + prove("server", theirs, ours))
        if not hmac.compare_digest(_exactly(connection, NONCE_BYTES), prove("orchestrator", theirs, ours)):
            raise ValueError(f"its key is another one; set {KEY_VAR} to the same text on both sides")


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
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

"""grpo-infer as a process of `grpo serve`, `grpo chat` and `grpo evaluate`: a base model, with one policy version or
without, and no trainer beside it."""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from grpo.orchestrator.inference.client import ServerError
from grpo.policy_version import Version, program_settings
from grpo.transport.errors import UserError
from grpo.transport.parent import PARENT_VAR
from grpo.transport.ports import free_port, listening_socket
from grpo.transport.run_warnings import WARNINGS_FOLDER
from grpo.transport.status import server_file

ALIAS = "policy"
"""The version's name as a model."""
START_S = 900.0
LOAD_S = 300.0
END_S = 30.0
_POLL_S = 0.3
WITHOUT_TRAINER = {
    "colocate": False,
    "sleep_mode": False,
    "weight_broadcast_type": "filesystem",
    "num_threads": None,
}
"""Settings of a run's server that differ where no trainer is beside it."""


class ServerFailed(ServerError, UserError):
    """grpo-infer has not started, has ended, or refuses the version; the message has the end of its log."""

    exit_code = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerProcess:
    """A server that is up."""

    url: str
    """`http://127.0.0.1:8000`"""
    base: str
    """The base's name as a model."""
    key: str | None
    process: subprocess.Popen[bytes]
    log: Path

    def check(self) -> None:
        """Raises `ServerFailed` where the server has ended."""
        if self.process.poll() is not None:
            raise ServerFailed(f"grpo-infer has ended with exit code {self.process.returncode}; {self.log_end()}")

    def log_end(self) -> str:
        """Returns the last lines of its log."""
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
        return f"{self.log} ends\n{tail}"


def server_settings(version: Version, *, host: str = "127.0.0.1", port: int | None = None) -> dict[str, Any]:
    """Returns the run's settings of a server that has no trainer beside it. Raises `CannotExport`."""
    return program_settings(version.run, "infer") | WITHOUT_TRAINER | {"host": host, "port": port or free_port()}


@contextlib.contextmanager
def server_process(
    settings: Mapping[str, Any], log: Path, *, version: Version | None = None, output_dir: Path | None = None
) -> Iterator[ServerProcess]:
    """Starts grpo-infer, which serves the base, and a run's `version` where there is one, and writes `log`. Without one
    it can load those of the run in `output_dir`. The server ends with the context, and with this process however that
    ends. Raises `ServerFailed`."""
    key, host = os.environ.get(str(settings["api_key_var"])) or None, str(settings["host"])
    address = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    url = f"http://{f'[{address}]' if ':' in address else address}:{settings['port']}"
    try:
        listening_socket(host, int(settings["port"])).close()  # else another program would answer for the server
    except OSError as error:
        raise ServerFailed(f"grpo-infer cannot start: {error}") from None
    log.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="grpo-serve-") as folder:
        run = output_dir if version is None else version.run
        file = Path(folder) / "infer.yaml"
        file.write_text(yaml.safe_dump({**settings, "output_dir": folder if run is None else str(run.resolve())}))
        command = [sys.executable, "-P", "-m", "grpo.infer.cli", str(file)]
        environment = os.environ | {PARENT_VAR: str(os.getpid())}
        with (
            log.open("wb") as output,
            subprocess.Popen(command, stdout=output, stderr=output, env=environment) as process,
        ):
            try:
                server = ServerProcess(url=url, base=str(settings["model"]), key=key, process=process, log=log)
                _wait_until_up(server)
                if version is not None:
                    _load(server, version)
                yield server
            finally:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(END_S)
                process.kill()
                if version is not None:  # its status and warnings are not the run's
                    for name in ("status", WARNINGS_FOLDER):
                        (version.run / name / server_file(host, int(settings["port"]))).unlink(missing_ok=True)


def _wait_until_up(server: ServerProcess) -> None:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        server.check()
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{server.url}/health", timeout=5).status_code == 200:
                return
        time.sleep(_POLL_S)
    raise ServerFailed(f"grpo-infer did not begin to serve within {START_S:g} s; {server.log_end()}")


def _load(server: ServerProcess, version: Version) -> None:
    manifest = version.manifest
    answer = httpx.post(
        f"{server.url}/policy/load",
        json={"run_id": manifest.run_id, "version": manifest.version, "alias": ALIAS},
        headers={} if server.key is None else {"Authorization": f"Bearer {server.key}"},
        timeout=LOAD_S,
    )
    if answer.status_code != 200:
        raise ServerFailed(f"the server refuses version {manifest.version}: {answer.text}")

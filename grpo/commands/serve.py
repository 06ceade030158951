"""`grpo serve RUN`: the run's server with its base and one policy version, over the OpenAI API, without a trainer."""

import argparse
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

from grpo.deploy.programs import Signals
from grpo.policy_version import CannotExport, Version, open_version, settings_of
from grpo.transport.parent import PARENT_VAR
from grpo.transport.ports import free_port, port_number
from grpo.transport.run_warnings import WARNINGS_FOLDER
from grpo.transport.status import server_file

ALIAS = "policy"
START_S = 900.0
LOAD_S = 300.0
END_S = 30.0
_POLL_S = 0.3
ALONE = {"colocate": False, "sleep_mode": False, "weight_broadcast_type": "filesystem", "num_threads": None}
"""What differs where there is no trainer beside it."""
EPILOG = f"""\
The server is grpo-infer with the run's settings: the version is served once its canary agrees with the trainer's
numbers. `model: {ALIAS}` is the version, the run's model name its base. Without the environment variable VLLM_API_KEY
(infer.api_key_var) no key is asked for.

  grpo serve outputs/quickstart --port 8000
  curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "{ALIAS}", "messages": [{{"role": "user", "content": "reverse"}}]}}'

exit codes: 0 done, 1 the version cannot be served, 2 there is no run, or the command line is wrong, 130 Ctrl-C,
143 SIGTERM"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A server that is up."""

    url: str
    """`http://127.0.0.1:8000`"""
    base: str
    """The base's name as a model."""
    key: str | None
    process: subprocess.Popen[bytes]
    log: Path

    def last_words(self) -> str:
        """The end of its log."""
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
        return f"{self.log} ends\n{tail}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder (its output_dir)")
    parser.add_argument("--step", type=int, metavar="N", help="the version of this step (default: the newest)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=port_number, help="default: a free one")


def main(options: argparse.Namespace) -> int:
    """Returns the exit code, once the server has ended."""
    version = open_version(options.run, options.step)
    settings = settings_alone(version, host=options.host, port=options.port)
    with Signals(), served(settings, version.run / "logs" / "serve.log", version=version) as server:
        print(f"{server.url}/v1  model: {ALIAS} (version {version.manifest.version}) or {server.base}", flush=True)
        return server.process.wait()


def settings_alone(version: Version, *, host: str = "127.0.0.1", port: int | None = None) -> dict[str, Any]:
    """The run's settings of a server that has no trainer beside it. Raises `CannotExport`."""
    return settings_of(version.run, "infer") | ALONE | {"host": host, "port": port or free_port()}


@contextlib.contextmanager
def served(settings: Mapping[str, Any], log: Path, *, version: Version | None = None) -> Iterator[Served]:
    """Within it grpo-infer serves the base, and a run's `version` where there is one, and writes `log`; it ends with
    it, however this process ends. Raises `CannotExport`."""
    key, host = os.environ.get(str(settings["api_key_var"])) or None, str(settings["host"])
    address = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    url = f"http://{f'[{address}]' if ':' in address else address}:{settings['port']}"
    log.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="grpo-serve-") as folder:
        place = folder if version is None else str(version.run.resolve())
        file = Path(folder) / "infer.yaml"
        file.write_text(yaml.safe_dump({**settings, "output_dir": place}))
        command = [sys.executable, "-P", "-m", "grpo.infer.cli", str(file)]
        environment = os.environ | {PARENT_VAR: str(os.getpid())}
        with (
            log.open("wb") as output,
            subprocess.Popen(command, stdout=output, stderr=output, env=environment) as process,
        ):
            try:
                server = Served(url=url, base=str(settings["model"]), key=key, process=process, log=log)
                _wait_until_up(server)
                if version is not None:
                    _load(server, version)
                yield server
            finally:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(END_S)
                process.kill()
                if version is not None:  # what it has said of itself is nothing of the run
                    for name in ("status", WARNINGS_FOLDER):
                        said = version.run / name / server_file(host, int(settings["port"]))
                        said.unlink(missing_ok=True)


def _wait_until_up(server: Served) -> None:
    deadline_s = time.monotonic() + START_S
    while server.process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{server.url}/health", timeout=5).status_code == 200:
                return
        if time.monotonic() >= deadline_s:
            raise CannotExport(f"grpo-infer did not begin to serve within {START_S:g} s; {server.last_words()}")
        time.sleep(_POLL_S)
    raise CannotExport(f"grpo-infer has ended with exit code {server.process.poll()}; {server.last_words()}")


def _load(server: Served, version: Version) -> None:
    manifest = version.manifest
    answer = httpx.post(
        f"{server.url}/policy/load",
        json={"run_id": manifest.run_id, "version": manifest.version, "alias": ALIAS},
        headers={} if server.key is None else {"Authorization": f"Bearer {server.key}"},
        timeout=LOAD_S,
    )
    if answer.status_code != 200:
        raise CannotExport(f"the server refuses version {manifest.version}: {answer.text}")

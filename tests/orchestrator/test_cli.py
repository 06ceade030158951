"""`grpo-orch` as a process: exit codes and messages."""

import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import AsyncMock

import pytest
from grpo.configs.errors import SettingsError
from grpo.orchestrator import cli
from grpo.orchestrator.inference.client import ServerError, ServersAway
from grpo.transport.errors import START_AGAIN, PeerFailed

from tests.orchestrator.fakes import MODEL, WORDS, FakeServer, settings_for
from tests.support import until

COMMAND = [sys.executable, "-m", "grpo.orchestrator.cli"]


def arguments(folder: Path, *more: str) -> list[str]:
    settings = folder / "orch.yaml"
    settings.write_text(
        f"model: {{name: {MODEL}}}\nenv: {json.dumps([WORDS])}\noutput_dir: {folder}/run\n"
        "batch_size: 8\nrollouts_per_example: 4\nclient: {base_url: ['http://127.0.0.1:9/v1'], timeout: 60}\n"
    )
    return [*COMMAND, str(settings), *more]


def test_a_server_that_never_comes_up_ends_with_1_and_an_error_that_names_it(tmp_path: Path) -> None:
    command = arguments(tmp_path, "--client.timeout", "0.5")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "http://127.0.0.1:9" in done.stderr.splitlines()[-1]


def handles_sigterm(process: "subprocess.Popen[str]") -> bool:
    """Whether it has read its settings; only after that it imports what takes long."""
    (caught,) = re.findall(r"^SigCgt:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text(), flags=re.M)
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize(
    ("number", "code", "when"),
    [(signal.SIGTERM, 143, "while it imports"), (signal.SIGINT, 130, "while it waits for its server")],
)
def test_a_signal_ends_it_at_once(tmp_path: Path, number: signal.Signals, code: int, when: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:  # a server that accepts connections and never answers
        mute.settimeout(120)
        url = f"http://127.0.0.1:{mute.getsockname()[1]}/v1"
        command = arguments(tmp_path, "--client.base_url", f'["{url}"]', "--client.timeout", "600")
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            try:
                until(lambda: handles_sigterm(process), process)
                if when == "while it waits for its server":
                    mute.accept()[0].close()
                process.send_signal(number)
                _, stderr = process.communicate(timeout=60)
            finally:
                process.kill()
    assert process.returncode == code, stderr
    assert "error: " not in stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ServersAway("none is in service"), START_AGAIN),
        (PeerFailed("the trainer has ended"), START_AGAIN),
        (ServerError("409"), 1),
        (SettingsError([]), 2),
    ],
)
def test_who_has_lost_its_peers_asks_to_be_started_again_and_others_end_with_their_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    monkeypatch.setattr("grpo.orchestrator.run.orchestrate", AsyncMock(side_effect=error))
    assert cli._run(settings_for(tmp_path, FakeServer())) == code

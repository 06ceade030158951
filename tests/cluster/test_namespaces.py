"""The three programs in network namespaces of their own, as on three machines: batches over ZeroMQ with CURVE, policy
versions over HTTP, and no loopback that two of them share. The server shares no folder with the others."""

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT, Run, told
from tests.support import END_S

pytestmark = [pytest.mark.cluster, pytest.mark.e2e, pytest.mark.timeout(1200)]

ADDRESSES = {"infer": "10.213.7.1", "orch": "10.213.7.2", "train": "10.213.7.3"}
MODULES = {"infer": "grpo.infer.cli", "orch": "grpo.orchestrator.cli", "train": "grpo.trainer.cli"}
NUM_STEPS = 3
KEYS = {"GRPO_TRANSPORT_KEY": "a key that all three have", "VLLM_API_KEY": "the server's own key"}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextmanager
def namespaces() -> Iterator[dict[str, str]]:
    """A namespace for each program, by its role; a bridge in a fourth one joins them."""
    mark = uuid.uuid4().hex[:6]
    names = {role: f"grpo-{mark}-{role}" for role in ("hub", *ADDRESSES)}
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs root and iproute2, to make network namespaces")
    try:
        ip("netns", "add", names["hub"])
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
    try:
        ip("-n", names["hub"], "link", "add", "bridge", "type", "bridge")
        ip("-n", names["hub"], "link", "set", "bridge", "up")
        for role, address in ADDRESSES.items():
            ip("netns", "add", names[role])
            ip("-n", names["hub"], "link", "add", role, "type", "veth", "peer", "name", "eth0", "netns", names[role])
            ip("-n", names["hub"], "link", "set", role, "master", "bridge", "up")
            ip("-n", names[role], "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", names[role], "link", "set", device, "up")
        yield names
    finally:
        for name in names.values():
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


class Machines:
    """Starts programs, each in its namespace."""

    def __init__(self, names: dict[str, str], folder: Path) -> None:
        self._names, self._folder = names, folder
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, role: str, *options: str, **changes: str) -> subprocess.Popen[bytes]:
        command = ["ip", "netns", "exec", self._names[role], sys.executable, "-m", MODULES[role], "configs/quickstart"]
        with self.log(role).open("ab") as log:
            process = subprocess.Popen(
                [*command, *options], cwd=ROOT, env=os.environ | KEYS | changes, stdout=log, stderr=log
            )
        self._started.append(process)
        return process

    def log(self, role: str) -> Path:
        return self._folder / f"{role}.log"

    def close(self) -> None:
        for process in self._started:
            process.terminate()
        for process in self._started:
            process.wait(END_S)


def test_three_machines_without_a_shared_loopback_and_a_server_without_the_runs_folder(tmp_path: Path) -> None:
    infer, orch, _ = ADDRESSES.values()
    together = (
        *("--output_dir", str(tmp_path / "run"), "--max_steps", str(NUM_STEPS)),
        *("--rollout_transport.type", "zmq", "--rollout_transport.host", orch),
        *("--weight_broadcast.type", "http", "--weight_broadcast.host", orch),
    )
    at_server = (
        *("--output_dir", str(tmp_path / "server"), "--host", infer, "--port", "8000"),
        *("--weight_broadcast_type", "http", "--weight_broadcast_url", f"http://{orch}:5556"),
    )
    at_orchestrator = (
        *("--client.base_url", f"http://{infer}:8000/v1", "--batch_size", "32", "--eval.num_examples", "0"),
        *("--sampling.max_tokens", "4"),
    )
    with namespaces() as names:
        machines = Machines(names, tmp_path)
        try:
            server = machines.start("infer", *at_server)
            machines.start("train", *together)
            orchestrator = machines.start("orch", *together, *at_orchestrator)
            code = orchestrator.wait(END_S)
            logs = "\n".join(machines.log(role).read_text()[-3000:] for role in ADDRESSES)
            assert (code, server.poll()) == (0, None), logs
        finally:
            machines.close()
    summary = Run(tmp_path / "run").summary
    assert (summary["steps"], summary["rollouts_trained"]) == (NUM_STEPS, NUM_STEPS * 32)
    assert summary["versions_served"][-1] == NUM_STEPS
    assert summary["canary_max_abs"] < 1e-4
    copies = sorted(path.name for path in (tmp_path / "server" / "fetched").glob("*/step_*"))
    assert copies[-1] == f"step_{NUM_STEPS:06d}"
    assert not (tmp_path / "server" / "run.json").exists()
    told("prove", tmp_path / "run")

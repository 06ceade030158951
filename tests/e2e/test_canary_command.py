"""`grpo canary` against a plain vLLM, which knows nothing of this product."""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from grpo.transport.errors import UserError
from grpo.transport.ports import free_port
from grpo.transport.run import create_run

from grpo.commands import canary
from tests.infer.published import Publisher
from tests.support import until

MODEL = Path(__file__).parents[2] / "configs/quickstart/model"
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the adapters `right` and `other`."""
    folder = tmp_path_factory.mktemp("adapters")
    publisher = Publisher(run=create_run(folder / "run"), model_dir=MODEL)
    for seed, name in enumerate(("right", "other"), start=1):
        (folder / name).mkdir()
        for file, content in publisher.files(version=seed, seed=seed, scale=0.1).items():
            (folder / name / file).write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def url(adapters: Path) -> Iterator[str]:
    """A server of both adapters, and of one under the other's name."""
    port = free_port()
    served = [f"{name}={adapters / folder}" for name, folder in (("right", "right"), ("swapped", "other"))]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL), "--port", str(port)]
    command += ["--enable-lora", "--max-lora-rank", "8", "--max-model-len", "256", "--dtype", "float32"]
    command += ["--enforce-eager", "--host", "127.0.0.1", "--distributed-executor-backend", "uni"]
    command += ["--lora-modules", *served]
    # Threads that are bound, and spin while they wait, would keep other tests' programs from the cores.
    threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    forked = {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}  # the engine imports nothing again
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"} | threads | forked
    log = adapters / "vllm.log"
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output, env=environment) as process:
        address = f"http://127.0.0.1:{port}"

        def is_up() -> bool:
            try:
                return httpx.get(f"{address}/health", timeout=5).status_code == 200
            except httpx.HTTPError:
                return False

        try:
            until(is_up, process, log=lambda: log.read_text()[-3000:], limit_s=300)
            yield address
        finally:
            process.terminate()


def options(url: str, adapter: Path, *more: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    canary.add_arguments(parser)
    return parser.parse_args([url, "--adapter", str(adapter), "--base", str(MODEL), *more])


def test_a_plain_server_is_judged_by_the_adapter_that_it_serves(
    url: str, adapters: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert canary.main(options(f"{url}/v1", adapters / "right", "--name", "right")) == 0
    assert capsys.readouterr().out.count(" ok") == 4
    for name, reason in (("swapped", "off this adapter"), (str(MODEL), "answers as the base")):
        assert canary.main(options(url, adapters / "right", "--name", name)) == 1
        assert reason in capsys.readouterr().out
    with pytest.raises(UserError, match="right, swapped"):
        canary.main(options(url, adapters / "right"))

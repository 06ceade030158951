"""One copy of the base weights for the real server and a trainer on a CPU: the same pages, the same numbers, and
nothing left behind, whichever is killed."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from grpo.configs.train import TrainSettings
from grpo.trainer.distributed import ONE
from grpo.trainer.model import load_policy
from grpo.transport.errors import START_AGAIN
from grpo.transport.run import RunFolder, create_run

from tests.e2e.importer import CPU, anonymous_bytes, logprobs
from tests.e2e.runs import ROOT
from tests.infer.server_process import Server, running
from tests.support import END_S, options, until, until_gone
from tools.random_models import HUNDRED, make_random

pytestmark = pytest.mark.e2e

IDS = [(7 * i * i + 3) % 300 for i in range(60)]


@dataclass(frozen=True, kw_only=True)
class Importer:
    """The child of `importer.py`."""

    process: subprocess.Popen[str]
    grown: int
    """Bytes of its own memory that its model took."""

    def ask(self, what: str, **more: object) -> Any:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps({"ask": what, **more}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def child(module: str, *words: object, **options: Any) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen([sys.executable, "-m", module, *map(str, words)], text=True, env=environment, **options)


@contextlib.contextmanager
def importer(model: Path, output_dir: Path) -> Iterator[Importer]:
    pipe = subprocess.PIPE
    with child("tests.e2e.importer", model, output_dir, stdin=pipe, stdout=pipe) as process:
        try:
            assert process.stdout
            yield Importer(process=process, grown=json.loads(process.stdout.readline()))
        finally:
            process.kill()


def engine_of(server: Server) -> int:
    """The process with the model: the largest."""
    return max(server.engine_pids(), key=anonymous_bytes)


def shared_bytes(pid: int) -> tuple[int, int]:
    """Resident and proportional bytes of the shared base in a process: a page of two processes counts half in each."""
    [mapping] = [m for m in psutil.Process(pid).memory_maps() if m.path.startswith("/memfd:grpo-base")]
    return mapping.rss, mapping.pss


def scored(server: Server) -> list[float]:
    found: list[float] = server.answer("/policy/score", version=None, token_ids=IDS)["logprobs"]
    return found


def largest(left: Sequence[float], right: Sequence[float]) -> float:
    return max(abs(x - y) for x, y in zip(left, right, strict=True))


@dataclass(frozen=True, kw_only=True)
class Exporting:
    """A server that shares its base, and its run."""

    model: Path
    run: RunFolder
    server: Server


@pytest.fixture(scope="module")
def exporting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Exporting]:
    folder = tmp_path_factory.mktemp("exporting")
    model, run = make_random(folder / "hundred", HUNDRED), create_run(folder / "run")
    settings: dict[str, Any] = {"model": model, "output_dir": run.path, "max_lora_rank": 8, "max_model_len": 256}
    # Beside the base the engine has little of its own.
    settings |= {"colocate": True, "max_loras": 2, "vllm": json.dumps({"kv_cache_memory_bytes": 2**24})}
    with running(log=folder / "infer.log", **settings) as server:
        yield Exporting(model=model, run=run, server=server)


def test_there_is_one_copy_on_which_both_compute_and_which_a_step_leaves_alone(exporting: Exporting) -> None:
    model, server = exporting.model, exporting.server
    base_bytes = (model / "model.safetensors").stat().st_size  # float32, and the head is the embedding
    with importer(model, exporting.run.path) as trainer:
        trainers, engine = trainer.ask("logprobs", token_ids=IDS), engine_of(server)
        servers = scored(server)
        (_, servers_share), (resident, trainers_share) = map(shared_bytes, (engine, trainer.process.pid))
        assert resident > 0.8 * base_bytes
        assert trainers_share == pytest.approx(resident / 2, rel=0.01)  # the engine has the same pages
        assert servers_share + trainers_share < 1.05 * base_bytes
        # And neither has another copy in memory of its own; the engine's process was forked from the server's.
        assert anonymous_bytes(engine) - anonymous_bytes(server.process.pid) < 0.35 * base_bytes  # 0.19 of it
        assert trainer.grown < 0.1 * base_bytes
        # A step changes the policy, and not a byte of the base.
        digests = trainer.ask("step", token_ids=IDS)
        assert digests["before"] == digests["after"]
        assert largest(trainer.ask("logprobs", token_ids=IDS), trainers) > 0.1
    assert scored(server) == servers
    own = load_policy(TrainSettings(model=str(model), recipe="fp32", lora_rank=8, lora_alpha=16), model, CPU, ONE)
    with torch.no_grad():
        assert largest(trainers, logprobs(own, IDS).tolist()) < 1e-5
    assert largest(trainers, servers) < 1e-4


def test_grpo_train_on_the_servers_base_proves_its_version_0_and_ends_with_75_when_the_server_is_killed(
    exporting: Exporting,
) -> None:
    """The last test here: it takes the server from the others."""
    run, server = exporting.run, exporting.server
    log = run.path.parent / "train.log"
    settings = {"model": exporting.model, "output_dir": run.path, "colocate": "true", "recipe": "fp32"}
    settings |= {"lora_rank": 8, "device": "cpu", "num_threads": 1, "optimizer": "adamw", "run_id": run.run_id}
    with log.open("w") as file, child("grpo.trainer.cli", *options(settings), stdout=file, stderr=file) as process:
        try:
            published = run.broadcasts / "step_000000/STABLE"
            until(published.exists, process, log=log.read_text)
            loaded = server.answer("/policy/load", run_id=run.run_id, version=0)
            assert loaded["canary"]["max_abs"] < 1e-4
            engines = server.engine_pids()
            server.process.kill()
            server.process.wait()
            until_gone(engines)
            assert process.wait(END_S) == START_AGAIN, log.read_text()
        finally:
            process.kill()
    assert not [file for file in Path("/dev/shm").iterdir() if "grpo" in file.name]

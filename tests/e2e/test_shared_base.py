"""One copy of the base weights for the real server and a trainer on a CPU: the same pages, the same numbers, and each
outlives the other's kill."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.train import TrainSettings
from tests.e2e.borrower import CPU, anonymous_bytes, logprobs
from tests.infer.server_process import Server, running, wait_until_gone
from tests.tiny_models import make_hundred
from trainer.parallel import ONE
from trainer.startup import policy_for
from transport.run import found_run
from transport.shared_base.usage import usage_of

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
WAIT_S = 120.0
IDS = [(7 * i * i + 3) % 300 for i in range(60)]


@dataclass(frozen=True, kw_only=True)
class Alone:
    """What a server says and takes that lends nothing."""

    logprobs: list[float]
    anonymous: int
    """Bytes of its engine's own memory."""


@dataclass(frozen=True, kw_only=True)
class Borrower:
    """The child of `borrower.py`."""

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
def borrower(model: Path, output_dir: Path) -> Iterator[Borrower]:
    pipe = subprocess.PIPE
    with child("tests.e2e.borrower", model, output_dir, stdin=pipe, stdout=pipe) as process:
        try:
            assert process.stdout
            yield Borrower(process=process, grown=json.loads(process.stdout.readline()))
        finally:
            process.kill()


@contextlib.contextmanager
def server_of(model: Path, folder: Path, **more: object) -> Iterator[Server]:
    """With `folder` as its run's folder."""
    settings: dict[str, Any] = {"model": model, "output_dir": folder, "max_lora_rank": 8, "max_model_len": 256, **more}
    with running(log=folder.parent / f"{folder.name}.log", **settings) as server:
        yield server


def engine_of(server: Server) -> int:
    """The process with the model: the largest."""
    return max(server.engine_pids(), key=anonymous_bytes)


def scored(server: Server) -> list[float]:
    found: list[float] = server.answer("/policy/score", version=None, token_ids=IDS)["logprobs"]
    return found


def largest(left: Sequence[float], right: Sequence[float]) -> float:
    return max(abs(x - y) for x, y in zip(left, right, strict=True))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hundred(tmp_path_factory.mktemp("hundred"))


@pytest.fixture(scope="module")
def base_bytes(model: Path) -> int:
    """Of one copy: float32, and the head is the embedding."""
    return (model / "model.safetensors").stat().st_size


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    folder = tmp_path_factory.mktemp("alone") / "run"
    found_run(folder)
    with server_of(model, folder) as server:
        return Alone(logprobs=scored(server), anonymous=anonymous_bytes(engine_of(server)))


@dataclass(frozen=True, kw_only=True)
class Lending:
    """A server that lends, and its run's folder."""

    model: Path
    folder: Path
    server: Server
    run_id: str


@pytest.fixture(scope="module")
def lending(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lending]:
    folder = tmp_path_factory.mktemp("lending") / "run"
    run_id = found_run(folder).run_id
    with server_of(model, folder, colocate=True) as server:
        yield Lending(model=model, folder=folder, server=server, run_id=run_id)


def test_there_is_one_copy_and_both_compute_on_it(lending: Lending, alone: Alone, base_bytes: int) -> None:
    assert base_bytes * 0.99 < lending.server.get("/policy/info").json()["lent_bytes"] < base_bytes
    with borrower(lending.model, lending.folder) as trainer:
        trainers, engine = trainer.ask("logprobs", token_ids=IDS), engine_of(lending.server)
        servers = scored(lending.server)
        (lent,), (borrowed,) = usage_of(engine), usage_of(trainer.process.pid)
        assert lent.inode == borrowed.inode
        assert (lent.writable, borrowed.writable) == (True, False)
        # Each page that the trainer has read counts half in both.
        assert borrowed.resident > 0.8 * base_bytes
        assert borrowed.proportional == pytest.approx(borrowed.resident / 2, rel=0.01)
        assert lent.proportional + borrowed.proportional < 1.05 * base_bytes
        # And neither has another copy in memory of its own.
        assert anonymous_bytes(engine) < alone.anonymous - 0.95 * base_bytes
        assert trainer.grown < 0.1 * base_bytes
    own = policy_for(
        TrainSettings(model=str(lending.model), recipe="fp32", lora_rank=8, lora_alpha=16), lending.model, CPU, ONE
    )
    with torch.no_grad():
        assert largest(trainers, logprobs(own, IDS).tolist()) < 1e-5
    assert largest(servers, alone.logprobs) < 1e-5
    assert largest(trainers, servers) < 1e-4


def test_a_step_changes_the_policy_and_not_a_byte_of_the_base(lending: Lending) -> None:
    before = scored(lending.server)
    with borrower(lending.model, lending.folder) as trainer:
        first = trainer.ask("logprobs", token_ids=IDS)
        digests = trainer.ask("step", token_ids=IDS)
        assert digests["before"] == digests["after"]
        assert largest(trainer.ask("logprobs", token_ids=IDS), first) > 0.1
    assert scored(lending.server) == before


def test_grpo_train_proves_its_version_0_on_borrowed_weights_and_its_kill_leaves_the_server(lending: Lending) -> None:
    log = lending.folder.parent / "train.log"
    settings = {"model": lending.model, "output_dir": lending.folder, "colocate": "true", "recipe": "fp32"}
    settings |= {"lora_rank": 8, "device": "cpu", "num_threads": 1, "optimizer": "adamw", "run_id": lending.run_id}
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    with log.open("w") as file, child("trainer.cli", *words, stdout=file, stderr=file) as process:
        try:
            published = lending.folder / "broadcasts/step_000000/STABLE"
            deadline_s = time.monotonic() + WAIT_S
            while not published.exists():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline_s, log.read_text()
                time.sleep(0.1)
            loaded = lending.server.answer("/policy/load", run_id=lending.run_id, version=0)
            assert loaded["canary"]["max_abs"] < 1e-4
        finally:
            process.kill()
    assert process.returncode == -signal.SIGKILL
    assert " are the server's, 0 (0 bytes) were read from disk" in log.read_text()
    assert scored(lending.server)
    with borrower(lending.model, lending.folder) as again:  # a trainer that is started again borrows again
        assert again.ask("logprobs", token_ids=IDS)


def test_a_killed_server_leaves_the_trainer_its_weights_and_nothing_else(lending: Lending) -> None:
    """The last test here: it takes the server from the others."""
    server = lending.server
    with borrower(lending.model, lending.folder) as trainer:
        before, engines = trainer.ask("logprobs", token_ids=IDS), server.engine_pids()
        server.process.kill()
        server.process.wait()
        wait_until_gone(engines)
        assert trainer.ask("logprobs", token_ids=IDS) == before
        (borrowed,) = usage_of(trainer.process.pid)
        assert borrowed.proportional == borrowed.resident
    assert not [file for file in Path("/dev/shm").iterdir() if "grpo" in file.name]

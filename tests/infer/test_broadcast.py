"""Weights that a trainer broadcasts, between two processes by both sides of vLLM's weight transfer; see broadcasting.py
for what stands in the place of NCCL."""

import asyncio
import multiprocessing
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from grpo.infer.engine import Engine
from grpo.infer.versions import VersionTable
from grpo.transport.folders import STABLE, step_folder
from grpo.transport.ports import free_port
from grpo.transport.run import RunFolder, create_run
from grpo.transport.weights.nccl import Announcement, Rendezvous
from grpo.transport.weights.store import PolicyReader

from tests.infer.broadcasting import broadcast, without_nccl
from tests.infer.versions_fakes import BASE, FakeEngine, table_of
from tests.support import until
from tests.transport.samples import skip_before_nccl


class Worker:
    """vLLM's client of an engine with one worker, whose model is a number of tensors."""

    def __init__(self) -> None:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        self.model: dict[str, torch.Tensor] = {}
        self.model_config = SimpleNamespace(max_model_len=8, get_vocab_size=lambda: 10, dtype=torch.float32)
        model = SimpleNamespace(load_weights=self.model.update)
        self._engine = NCCLWeightTransferEngine.__new__(NCCLWeightTransferEngine)
        vars(self._engine).update(model=model, device="cpu", model_update_group=None)
        self._engine.parallel_config = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)

    async def init_weight_transfer_engine(self, request: Any) -> None:
        await asyncio.to_thread(self._engine.init_transfer_engine, self._engine.parse_init_info(request.init_info))

    async def update_weights(self, request: Any) -> None:
        await asyncio.to_thread(self._engine.receive_weights, self._engine.parse_update_info(request.update_info))

    async def _done(self, **_: Any) -> None:
        """Does nothing."""

    generate = pause_generation = resume_generation = start_weight_update = finish_weight_update = _done


class Receiving(FakeEngine):
    """Receives with the real engine, and scores as the version whose number all weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.worker = Worker()
        self.real = Engine(self.worker, device="cuda", model_dir=Path("base"))

    async def join_trainer(self, where: Rendezvous, *, rank_offset: int) -> None:
        self.joined.append(rank_offset)
        await self.real.join_trainer(where, rank_offset=rank_offset)

    async def receive_weights(self, announcement: Announcement) -> None:
        self.received.append(announcement.session)
        await self.real.receive_weights(announcement)
        [number] = {float(value) for tensor in self.worker.model.values() for value in tensor.flatten()}
        self.serves = number


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return create_run(tmp_path / "run")


@pytest.fixture
def trainers(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, Any]]]:
    """Three starts of a trainer, with what each waits for. All are forked before this process has threads."""
    skip_before_nccl()
    without_nccl(monkeypatch.setattr)
    fork, port = multiprocessing.get_context("fork"), free_port()
    started = []
    for versions in ((0, 1), (0, 1, 2), (2,)):
        may_begin = fork.Event()
        process = fork.Process(target=broadcast, args=(run, port, versions, may_begin), daemon=True)
        process.start()
        started.append((process, may_begin))
    yield started
    for process, _ in started:
        process.kill()
        process.join(60)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
async def test_a_trainer_that_was_killed_is_met_anew_and_sends_what_is_live_already(
    run: RunFolder, trainers: list[tuple[Any, Any]]
) -> None:
    engine, reader = Receiving(), PolicyReader(run.broadcasts, run_id=run.run_id)
    server, fresh = (table_of(engine, run, replace(BASE, max_rank=None)) for _ in range(2))
    (first, first_may), (second, second_may), (_, third_may) = trainers

    async def announced(version: int, before: str | None = None) -> str:
        found: list[str | None] = []

        def reached() -> bool:
            found.append(reader.snapshot(version))
            return found[-1] not in (None, before)

        await asyncio.to_thread(until, reached)
        assert found[-1] is not None
        return found[-1]

    async def load(table: VersionTable, version: int) -> None:
        await table.load(run_id=run.run_id, version=version)
        await asyncio.to_thread(until, (step_folder(run.broadcasts, version) / STABLE).exists)

    first_may.set()
    for version in (0, 1):
        sent = await announced(version)
        await load(server, version)
        assert (reader.snapshot(version), engine.serves) == (sent, version), "announced and sent are one"
    first.kill()
    first.join()
    second_may.set()
    sent = await announced(1, before=sent)
    for version in (1, 2):
        await announced(version)
        await load(server, version)
    second.kill()
    second.join()
    engine.serves, sent = 0.0, await announced(2)
    third_may.set()
    await load(fresh, 2)  # a server that was started again has read what the second trainer has announced
    assert await announced(2, before=sent)
    await load(fresh, 2)
    assert [*server.live] == [*fresh.live] == [2]
    assert (len(engine.joined), len(engine.received), len(set(engine.received))) == (3, 5, 3)

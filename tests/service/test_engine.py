"""Whose turn it is, and what may wait."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from grpo.service import routes
from grpo.service.engine import Engine
from grpo.service.log import Command, CommandLog
from grpo.service.recorder import Recorder
from grpo.service.routes import Futures, Routes
from grpo.transport.run import create_run

from tests.service.data import datum, message_of, tiny_base

DEADLINE_S = 120.0


class Running:
    """An engine on a tiny base, and the models of each pass that it has computed."""

    def __init__(self, folder: Path) -> None:
        self.base = tiny_base(folder / "model", micro_batch_tokens=128)
        self.log = CommandLog(folder / "commands.sqlite")
        self.ended: dict[str, int] = {}
        """How many passes had begun when a request ended, by its id."""
        self.passes: list[list[str]] = []
        self.changed = threading.Condition()
        self.go = threading.Event()
        """Passes begin while it is set."""
        self.go.set()
        self.recorder = Recorder(create_run(folder / "run").path, self.log, share=0.01)
        self.engine = Engine(self.base, self.log, folder, recorder=self.recorder, finished=self._finished, publish=None)
        self._names: dict[Any, str] = {}
        compute = self.base.compute

        def counted(passes: Any) -> Any:
            with self.changed:
                by_model = {queue.model: name for name, queue in self.engine._queues.items()}
                self.passes.append([by_model[one.model] for one in passes])
                self.changed.notify_all()
            assert self.go.wait(DEADLINE_S), f"no pass may begin for {DEADLINE_S:g} s"
            return compute(passes)

        self.base.compute = counted  # type: ignore[method-assign]

    def _finished(self, request_id: str) -> None:
        with self.changed:
            self.ended[request_id] = len(self.passes)
            self.changed.notify_all()

    def until(self, condition: Any, waits_for: str) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, DEADLINE_S), f"waited {DEADLINE_S:g} s for {waits_for}"

    def send(self, target: str, seq: int, kind: str, body: bytes) -> str:
        command = Command(target=target, seq=seq, tenant=target, kind=kind, body=body)
        assert self.log.add(command).result(DEADLINE_S)
        self.engine.submit(command)
        return command.request_id

    def create(self, target: str) -> None:
        self.log.add_model(target, target, target, {})
        self.send(target, 0, "create_model", json.dumps({"lora_config": {"rank": 4}}).encode())

    def gradient(self, target: str, seq: int, number: int) -> str:
        message = message_of([datum(60, index) for index in range(number)], seq=seq)
        return self.send(target, seq, "forward_backward", message.SerializeToString())


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    made = Running(tmp_path)
    made.engine.start()
    yield made
    made.engine.close()
    made.recorder.close()
    made.log.close()


def test_a_long_request_holds_up_anothers_step_by_one_pass(running: Running) -> None:
    """One of the heavy tenant's that has begun, and then the small one's own."""
    for tenant in ("heavy", "small"):
        running.create(tenant)
    running.go.clear()
    long = running.gradient("heavy", 1, 200)
    running.until(lambda: running.passes, "the long request to be at work")
    begun = len(running.passes)
    running.gradient("small", 1, 1)
    step = running.send("small", 2, "optim_step", json.dumps({"adam_params": {}}).encode())
    running.go.set()
    running.until(lambda: step in running.ended, "the small model's step")
    assert long not in running.ended
    own = next(number for number, models in enumerate(running.passes) if "small" in models)
    assert own - begun <= 1
    assert json.loads(running.log.answer(step, "small").content)["metrics"]["grad_norm"] > 0


def test_those_who_wait_together_share_a_pass(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running.base, "_joins", True)  # sizes of a tiny model are no whole vectors
    names = [f"tenant{number}" for number in range(3)]
    for name in names:
        running.create(name)
    running.go.clear()
    running.gradient("tenant0", 1, 8)
    running.until(lambda: running.passes, "a pass to be at work")
    ends = [running.send(name, 2 if name == "tenant0" else 1, "forward_backward", _short()) for name in names]
    running.go.set()
    running.until(lambda: all(end in running.ended for end in ends), "the short requests")
    assert max(len(set(models)) for models in running.passes) >= 2


def _short() -> bytes:
    message: bytes = message_of([datum(9, 1)], seq=1).SerializeToString()
    return message


async def test_what_a_tenant_has_waiting_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal is one that the client sends again. Others, and what a model waits for, are not held up."""
    monkeypatch.setattr(routes, "MAX_WAITING_DATUMS", 3)
    log = CommandLog(tmp_path / "commands.sqlite")
    options: Any = {"recorder": None, "finished": print, "publish": None}
    engine = Engine(None, log, tmp_path, **options)  # type: ignore[arg-type]  # never started: all of it waits
    keys = {"one": "tml-1", "other": "tml-2"}
    parts: Any = {"commands": log, "engine": engine, "sampling": None, "futures": Futures()}
    app = Routes(model="m", tokenizer="m", max_tokens=127, keys=keys, **parts).app()
    transport = httpx.ASGITransport(app)

    async def sent(tenant: str, seq: int, number: int) -> int:
        message = message_of([datum(3, 1)] * number, seq=seq)
        message.model_id = f"{tenant}:train:0"
        headers = {"X-API-Key": keys[tenant], "Content-Type": "application/x-protobuf"}
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
            answer = await client.post("/api/v1/forward_backward", content=message.SerializeToString(), headers=headers)
        return answer.status_code

    started_s = time.monotonic()
    for tenant in keys:
        log.add_model(f"{tenant}:train:0", tenant, tenant, {})
        command = Command(target=f"{tenant}:train:0", seq=0, tenant=tenant, kind="create_model", body=b"{}")
        assert log.add(command).result(DEADLINE_S)
        engine.submit(command)
    assert [await sent("one", 1, 2), await sent("one", 2, 2), await sent("other", 1, 2)] == [200, 429, 200]
    assert await sent("one", 2, 1) == 200
    assert time.monotonic() - started_s < DEADLINE_S
    log.close()

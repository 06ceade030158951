"""Stand-ins for the server and the trainer, as small as their promises."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler
from grpo.configs.orch import OrchSettings
from grpo.configs.train import TrainSettings
from grpo.transport.batches.filesystem import BatchReceiver, FilesystemBatchReceiver
from grpo.transport.batches.store import StepStore
from grpo.transport.errors import DeadlineError
from grpo.transport.http import GenerateRequest
from grpo.transport.ports import free_port
from grpo.transport.records import MicroBatch, PolicySpec
from grpo.transport.run import join_run, only_one, open_run
from grpo.transport.weights.identity import base_identity
from grpo.transport.weights.store import METRICS_FILE, PolicyPublisher

MODEL = Path(__file__).parents[2] / "configs" / "quickstart" / "model"
END_OF_TURN = 258
WORDS = {"id": f"{Path(__file__).with_name('words.py')}:Words", "name": "words"}
"""The environment of most tests."""
OF_BASE = {"base_max_abs": 1e-6, "base_mean_abs": 5e-7}
"""The canary's figures of the base."""


def error(status: int, kind: str, message: str) -> web.Response:
    return web.json_response({"error": {"type": kind, "message": message}}, status=status)


class FakeServer:
    """Answers like grpo-infer. `answer` gives the text for a prompt's text and a version."""

    def __init__(self, answer: Callable[[str, int], str] = lambda prompt, version: "x", **info: Any) -> None:
        self.answer = answer
        self.info = {
            "base_model": base_identity(MODEL),
            "max_model_len": 512,
            "max_lora_rank": 16,
            "load": {"num_running": 0, "num_waiting": 0, "kv_use": 0.0},
            **info,
        }
        self.live: set[int] = set()
        self.snapshots: dict[int, str] = {}
        """Digests that it was asked for, by version."""
        self._of_run: dict[str, str] = {}
        self.loads: list[dict[str, Any]] = []
        self.unloads: list[int] = []
        self.requests: list[dict[str, Any]] = []
        self.scores: list[dict[str, Any]] = []
        """Requests for log-probabilities."""
        self.scored = -0.75
        self.refuse_version: int | None = None
        self.noisy: set[int] = set()
        """Versions for which it gives proof of noise."""
        self.adapters: tuple[str, ...] = ()
        """Further ones of which it gives proof."""
        self.in_flight: dict[int, int] = {}
        """Requests that other clients have, by version."""
        self.asleep = False
        self.refuses_sleep = False
        self.told: list[str] = []
        """Requests to sleep, to wake and to load, in their order."""
        self.num_failures = 0
        """So many of the next generate requests are answered with 503."""
        self.logprob = -0.5
        """Of every token that it answers."""
        self.latency_s = 0.0
        self.load_latency_s = 0.0
        self.api_key: str | None = None
        self.url = ""
        self.host, self.port = "127.0.0.1", free_port()

    async def start(self) -> Self:
        app = web.Application(middlewares=[self._unless_asleep])
        app.add_routes([web.get("/health", self._health), web.get("/policy/info", self._info)])
        for name in ("load", "unload", "sleep", "wake", "generate", "score", "score_answers"):
            app.router.add_post(f"/policy/{name}", getattr(self, f"_{name}"))
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, self.host, self.port).start()
        self.url = f"http://{self.host}:{self.port}/v1"
        return self

    async def stop(self) -> None:
        """As after a kill: what was loaded is lost, and nobody listens until the next `start`."""
        await self._runner.cleanup()
        self.live.clear()
        self.asleep = False

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _info(self, request: web.Request) -> web.Response:
        if self.api_key is not None and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        live = {version: self.snapshots.get(version, "any") for version in sorted(self.live)}
        return web.json_response(self.info | self._of_run | {"in_flight": self.in_flight, "live": live})

    async def _sleep(self, request: web.Request) -> web.Response:
        self.told.append("sleep")
        if self.refuses_sleep:
            return error(503, "engine", "cannot")
        self.asleep = True
        return web.json_response({"seconds": 0.1})

    async def _wake(self, request: web.Request) -> web.Response:
        self.told.append("wake")
        self.asleep = False
        return web.json_response({"seconds": 0.1})

    async def answering(self, request: web.Request) -> None:
        """Returns when a request may be answered."""

    @web.middleware
    async def _unless_asleep(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        await self.answering(request)
        needs_engine = request.path.removeprefix("/policy/") in ("load", "unload", "generate", "score", "score_answers")
        if self.asleep and needs_engine:
            return error(503, "asleep", "sleeps")
        return await handler(request)

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.told.append("load")
        self.loads.append(body)
        await asyncio.sleep(self.load_latency_s)
        version = body["version"]
        if version == self.refuse_version:
            return error(409, "canary_mismatch", f"version {version}: the canary is 3.2 nats off")
        self.live.add(version)
        self.snapshots[version] = body["snapshot"] or "any"
        self._of_run = {"run_id": body["run_id"]}
        canary = {"max_abs": 2e-6, "mean_abs": 1e-6, "tolerance": 1e-4, "measure": "max_abs", **OF_BASE}
        report = {
            "version": version,
            "name": f"policy-v{version}",
            "snapshot": self.snapshots[version],
            "canary": canary,
        }
        report |= {"load_s": 0.1, "canary_s": 0.1}
        if version in self.noisy:
            report["noise"] = canary | {"max_abs": 3e-6}
        if self.adapters:
            report["adapters"] = {name: canary | {"max_abs": 4e-6} for name in self.adapters}
        return web.json_response(report)

    async def _unload(self, request: web.Request) -> web.Response:
        version = (await request.json())["version"]
        self.live.discard(version)
        self.unloads.append(version)
        return web.json_response({"version": version, "in_flight": 0})

    async def _generate(self, request: web.Request) -> web.Response:
        try:  # as grpo-infer
            msgspec.json.decode(data := await request.read(), type=GenerateRequest)
        except (msgspec.MsgspecError, ValueError) as problem:
            return error(400, "bad_request", str(problem))
        body = json.loads(data)
        if self.num_failures > 0:
            self.num_failures -= 1
            return web.Response(status=503)
        version, follows = body["version"], body.get("follow", False)
        began = max(version, *self.live) if follows and self.live else version
        if began is not None and began not in self.live:
            return error(404, "not_live", f"{version} not live")
        self.requests.append(body)
        await self.sampling(body)
        ended = max(began, *self.live) if follows and self.live else began
        prompt = bytes(i for i in body["prompt_token_ids"] if i < 256).decode()
        choices = []
        for _ in range(body["n"]):
            ids = [*self.answer(prompt, version).encode(), END_OF_TURN][: body["max_tokens"]]
            reason = "stop" if ids[-1] == END_OF_TURN else "length"
            choices.append({"token_ids": ids, "logprobs": [self.logprob] * len(ids), "finish_reason": reason})
            if follows:
                num = len(ids) if ended == began else 1
                choices[-1]["versions"] = [(began, num), (ended, len(ids) - num)][: 1 + (num < len(ids))]
        return web.json_response({"version": version, "choices": choices})

    async def _score(self, request: web.Request) -> web.Response:
        """Every token has the log-probability `scored`, at temperature 1; less at a higher one."""
        body = await request.json()
        version = body["version"]
        if version is not None and version not in self.live:
            return error(404, "not_live", f"{version} not live")
        self.scores.append(body)
        logprob = self.scored / body.get("temperature", 1.0)
        return web.json_response({"version": version, "logprobs": [logprob] * (len(body["token_ids"]) - 1)})

    async def _score_answers(self, request: web.Request) -> web.Response:
        """Each token of an answer has the log-probability `scored`."""
        body = await request.json()
        self.scores.append(body)
        logprobs = [[self.scored * len(answer) for answer in own] for own in body["answers"]]
        return web.json_response({"version": body["version"], "logprobs": logprobs})

    async def sampling(self, body: dict[str, Any]) -> None:
        """Returns when a request's answers have been sampled: their first tokens before, the others afterwards."""
        await asyncio.sleep(self.latency_s)


async def until(condition: Callable[[], object]) -> None:
    """Returns when it holds; fails after two minutes."""
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 - it stands for many conditions
            await asyncio.sleep(0.01)


SPEC: dict[str, Any] = {"rank": 16, "alpha": 32, "target_modules": ("q_proj",), "sequence_len": 128, "dtype": "float32"}


class FakeTrainer(threading.Thread):
    """Receives every batch and publishes the next version, until told that the run is over."""

    def __init__(
        self,
        output_dir: Path,
        *,
        vanish_after: int | None = None,
        step_s: float = 0.0,
        idle_s: float = 300.0,
        goes_on_after: int | None = None,
        settings: Mapping[str, Any] | None = None,
        **spec: Any,
    ) -> None:
        """`settings` are recorded in the run's folder, `spec` goes into the versions' manifests. `goes_on_after` a step
        of the run that is there already."""
        super().__init__(daemon=True)
        self.spec = PolicySpec(**({"base_model": base_identity(MODEL)} | SPEC | spec))
        self._vanish_after, self._step_s, self._idle_s = vanish_after, step_s, idle_s
        self._first = goes_on_after
        self.run_folder = open_run(output_dir, resume="auto")
        trainer = TrainSettings.model_validate(
            {"model": str(MODEL), "sequence_len": 128, "ckpt": {"interval": None}} | dict(settings or {})
        )
        if goes_on_after is not None:
            StepStore(self.run_folder.batches, run_id=self.run_folder.run_id).remove_finished()
        join_run(output_dir, role="train", record={"settings": trainer.model_dump(mode="json")}, timeout_s=1)
        self._num_ranks = trainer.num_ranks
        self.batches: dict[int, tuple[MicroBatch, ...]] = {}
        self.ended_after: int | None = None
        self._over = threading.Event()

    def receipt(self, step: int) -> dict[str, bytes]:
        """Files that say what the step's gradients had; this trainer says nothing."""
        return {}

    def end(self) -> None:
        """Ends with the batches that are there; for a run that may have failed."""
        self._over.set()
        self.join(60)

    def run(self) -> None:
        with only_one(self.run_folder.path, "train"):
            self._run()

    def _run(self) -> None:
        run = self.run_folder
        publisher = PolicyPublisher(run.broadcasts, run_id=run.run_id)
        if self._first is None:
            publisher.publish(version=0, spec=self.spec, files={"canary.json": b"{}"})
        place: dict[str, Any] = {"run_id": run.run_id, "num_ranks": self._num_ranks}
        with FilesystemBatchReceiver(run.batches, **place) as receiver, suppress(DeadlineError):
            self._train(publisher, receiver)

    def _receive(self, receiver: BatchReceiver, step: int) -> tuple[MicroBatch, ...] | None:
        until_s = time.monotonic() + self._idle_s
        while True:
            try:
                return receiver.receive(step, timeout_s=0.5)
            except DeadlineError:
                if self._over.is_set() or time.monotonic() > until_s:
                    raise

    def _train(self, publisher: PolicyPublisher, receiver: BatchReceiver) -> None:
        """Ends with the run, or by the receiver's deadline where the run failed."""
        step = self._first or 0
        while step != self._vanish_after:
            batches = self._receive(receiver, step + 1)
            if batches is None:
                self.ended_after = step
                return
            step += 1
            self.batches[step] = batches
            time.sleep(self._step_s)
            metrics = {"loss/policy": 0.5, "time/train_s": 0.25, "perf/train_tokens": 100.0}
            metrics["policy/mismatch_max_lag0"] = 1e-6 * step
            files = {"canary.json": b"{}", METRICS_FILE: json.dumps(metrics).encode()} | self.receipt(step)
            publisher.publish(version=step, spec=self.spec, files=files)


def settings_for(output_dir: Path, *servers: FakeServer, **changes: Any) -> OrchSettings:
    """Small and quick."""
    base: dict[str, Any] = {
        "model": {"name": str(MODEL)},
        "env": [WORDS],
        "output_dir": str(output_dir),
        "batch_size": 16,
        "rollouts_per_example": 4,
        "seq_len": 128,
        "max_steps": 3,
        "max_async_level": 0,
        "sampling": {"max_tokens": 16},
        "client": {"base_url": [server.url for server in servers], "timeout": 60},
        "reward_timeout_s": 60,
        "wait_timeout_s": 60,
    }
    merged: Mapping[str, Any] = base | changes
    return OrchSettings.model_validate(merged)

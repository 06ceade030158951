"""Trains on several GPUs: rank 0 has the models, the log and the routes, the others compute parts of its passes.

Every rank has the whole base. The others keep copies of adapters, which rank 0 sends after each step where it needs
them, and no optimizer. Their gradients are added to those of rank 0. A rank that is gone ends the service, which goes
on where it was when it is started again. Messages are MessagePack in tensors; nothing is pickled.
"""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from grpo.configs.train import TrainSettings
from grpo.service.errors import RankGone
from grpo.service.training import AdapterShape, Base, Pass, Results, TrainedModel
from grpo.service.wire import Datum, ForwardBackward
from grpo.trainer.distributed import Ranks, is_communication
from grpo.trainer.memory import keep_freed_memory
from grpo.trainer.startup import device_for, set_threads
from grpo.transport.cores import set_allocator, set_numeric_defaults
from grpo.transport.errors import UserError
from grpo.transport.logs import start_log
from grpo.transport.parent import PARENT_VAR, end_with_starter

START_S = 900.0
"""How long the other ranks may take to load the base."""
ANSWER_S = 600.0
"""How long a rank waits for another one."""
QUIET_S = 60.0
"""After so long rank 0 sends an empty task, so that the others know that it is there."""
_POLL_S = 0.2
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}


class _Sequence(msgspec.Struct, array_like=True, frozen=True):
    """A datum."""

    id: str
    token_ids: bytes
    targets: bytes
    candidates: int
    inputs: dict[str, bytes]


class _Part(msgspec.Struct, array_like=True, frozen=True):
    """What one rank computes of a model's pass."""

    model: int
    shape: tuple[int, int, bool, bool]
    weights: bytes | None
    """The adapter; None where it is as it was in the last task that had it."""
    data: list[list[_Sequence]]
    """By rank."""
    loss_fn: str
    config: dict[str, float]
    forward_only: bool


class _Task(msgspec.Struct, array_like=True, frozen=True):
    """What rank 0 asks of all: parts of passes that are computed together; none to show that it is there, and with
    `ends` that it ends."""

    parts: list[_Part] = []
    closed: list[int] = []
    """Models that are no more."""
    ends: bool = False


class _Told(msgspec.Struct, array_like=True, frozen=True):
    """What a rank has computed: the arrays of each pass that it has a part of."""

    results: list[tuple[bytes, bytes]] = []
    failure: str | None = None


_encode = msgspec.msgpack.Encoder().encode


class Others:
    """The other ranks, as rank 0 has them; for one thread."""

    def __init__(self, base: Base, ranks: Ranks) -> None:
        self._base, self._ranks = base, ranks
        self._sent: dict[int, int] = {}
        """The revision of each model's adapter that the others have, by the model's number."""
        self._closed: list[int] = []
        self._sent_s = time.monotonic()

    def compute(self, passes: Sequence[Pass]) -> list[Results]:
        """Computes passes as `Base.compute` does, each rank its own part of each. Raises `RankGone`."""
        task = _Task(parts=[self._part(one) for one in passes], closed=self._closed)
        self._closed = []
        started_s = time.perf_counter()
        with _named():
            self._send(task)
            told = _computed(self._base, passes, self._ranks)
        each_s = (time.perf_counter() - started_s) / sum(one.num_tokens for one in passes)
        arrived = [iter(one.results) for one in told]
        results = []
        for one in passes:
            both = [next(arrived[rank]) for rank in range(len(one.parts))]
            logprobs, values = (np.concatenate([_floats(part[place]) for part in both]) for place in (0, 1))
            results.append((logprobs, values, each_s * one.num_tokens))
        return results

    def forget(self, model: int) -> None:
        """Has a model's copies freed."""
        if self._sent.pop(model, None) is not None:
            self._closed.append(model)

    def keep(self) -> None:
        """Must be called now and then while nothing is computed. Raises `RankGone`."""
        if time.monotonic() > self._sent_s + QUIET_S:
            with _named():
                self._send(_Task())

    def end(self) -> None:
        """Ends the others."""
        with contextlib.suppress(RankGone), _named():
            self._send(_Task(ends=True))

    def _send(self, task: _Task) -> None:
        _broadcast(_encode(task))
        self._sent_s = time.monotonic()

    def _part(self, one: Pass) -> _Part:
        model, request = one.model, one.request
        is_known = self._sent.get(model.number) == model.revision
        self._sent[model.number] = model.revision
        return _Part(
            model=model.number,
            shape=(model.shape.rank, model.shape.seed, model.shape.attn, model.shape.mlp),
            weights=None if is_known else model.weights(),
            data=[[_sequence(datum) for datum in part] for part in one.parts],
            loss_fn=request.loss_fn,
            config=dict(request.config),
            forward_only=request.forward_only,
        )


def _work(base: Base, ranks: Ranks) -> None:
    """The loop of another rank. Consumes rank 0's tasks; waits for the next one, which comes within `QUIET_S` and the
    time of a pass. Ends when rank 0 says so."""
    models: dict[int, TrainedModel] = {}
    decode = msgspec.msgpack.Decoder(_Task).decode
    while not (task := decode(_broadcast(None))).ends:
        for number in task.closed:
            models.pop(number).close()
        if task.parts:
            _computed(base, [_pass(part, base, models) for part in task.parts], ranks)


def _computed(base: Base, passes: Sequence[Pass], ranks: Ranks) -> list[_Told]:
    """Computes this rank's part of each pass, and adds the gradients of all of them to those of rank 0. Returns there
    what each rank has told. Collective. Raises `RuntimeError` on rank 0 where any of them could not."""
    own, results, failure = [one for one in passes if ranks.rank < len(one.parts)], [], None
    try:
        for logprobs, values, _ in base.compute_parts(own, ranks.rank) if own else ():
            results.append((logprobs.astype("<f4").tobytes(), values.astype("<f4").tobytes()))
    except Exception as error:
        failure = f"rank {ranks.rank}: {type(error).__name__}: {error}"
    told = [msgspec.msgpack.decode(one, type=_Told) for one in ranks.all_gather(_encode(_Told(results, failure)))]
    failures = [one.failure for one in told if one.failure]
    if not failures and not passes[0].request.forward_only:
        for one in passes:
            _reduce(one.model.differentiated, ranks)
    if not ranks.is_main:
        for one in passes:
            for parameter in one.model.differentiated.values():
                parameter.grad = None
        return told
    if failures:
        raise RuntimeError(failures[0])
    return told


@torch.no_grad()
def _reduce(parameters: Mapping[str, torch.nn.Parameter], ranks: Ranks) -> None:
    """Adds the gradients of all ranks to those of rank 0. What it sums has the size of one model's, so that its numbers
    do not depend on others'. Collective."""
    with_gradient = list(parameters.values())
    whole = torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in with_gradient])
    dist.reduce(whole, 0)
    if ranks.is_main:
        for p, summed in zip(with_gradient, whole.split([p.numel() for p in with_gradient]), strict=True):
            if p.grad is not None:
                p.grad.copy_(summed.view_as(p))


def _pass(part: _Part, base: Base, models: dict[int, TrainedModel]) -> Pass:
    """Returns a pass as rank 0 has it, on this rank's copy of its model."""
    if part.model not in models:
        rank, seed, attn, mlp = part.shape
        models[part.model] = TrainedModel(base, AdapterShape(rank=rank, seed=seed, attn=attn, mlp=mlp))
    if part.weights is not None:
        models[part.model].put(part.weights)
    data = [[_datum(one) for one in of_rank] for of_rank in part.data]
    request = ForwardBackward(
        data=[datum for of_rank in data for datum in of_rank],
        loss_fn=part.loss_fn,
        config=part.config,
        forward_only=part.forward_only,
    )
    return Pass(models[part.model], data, request)


def _sequence(datum: Datum) -> _Sequence:
    inputs = {name: values.astype("<f4").tobytes() for name, values in datum.inputs.items()}
    ids, targets = datum.token_ids.astype("<i4").tobytes(), datum.targets.astype("<i4").tobytes()
    return _Sequence(datum.id, ids, targets, datum.candidates, inputs)


def _datum(one: _Sequence) -> Datum:
    return Datum(
        id=one.id,
        token_ids=np.frombuffer(one.token_ids, "<i4"),
        targets=np.frombuffer(one.targets, "<i4"),
        candidates=one.candidates,
        inputs={name: _floats(values) for name, values in one.inputs.items()},
    )


def _floats(data: bytes) -> Any:
    return np.frombuffer(data, "<f4")


def _broadcast(data: bytes | None) -> bytes:
    """Returns rank 0's bytes. Collective."""
    size = torch.tensor([0 if data is None else len(data)])
    dist.broadcast(size, 0)
    whole = (
        torch.empty(int(size), dtype=torch.uint8)
        if data is None
        else torch.frombuffer(bytearray(data), dtype=torch.uint8)
    )
    dist.broadcast(whole, 0)
    return whole.numpy().tobytes()


@contextlib.contextmanager
def _named() -> Iterator[None]:
    """Raises `RankGone` where another rank is gone or late."""
    try:
        yield
    except Exception as error:
        if is_communication(error):
            raise RankGone(error) from error
        raise


# --- processes ---


@contextlib.contextmanager
def other_ranks(
    settings: TrainSettings, model: Path, logs: Path, *, num: int, max_rank: int
) -> Iterator[tuple[Callable[[Base], Others], Callable[[], None]]]:
    """Starts the ranks 1 to `num` - 1, which write their logs below `logs` and end with the context, and with this
    process however that ends. Yields what joins them, with rank 0's base, and what raises `RankGone` where one has
    ended. Raises `UserError` where there are not so many GPUs."""
    device = device_for(settings.device)
    if device.type == "cuda" and torch.cuda.device_count() < num:
        raise UserError(f"--gpus is {num}, and torch sees {torch.cuda.device_count()} GPUs")
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="grpo-service-") as folder, contextlib.ExitStack() as stack:
        told = {"settings": settings.model_dump(mode="json"), "model": str(model), "max_rank": max_rank, "num": num}
        Path(folder, "task.json").write_text(json.dumps(told))
        command = [sys.executable, "-P", "-u", "-m", "grpo.service.ranks", folder]
        environment = os.environ | _LOOPBACK | {PARENT_VAR: str(os.getpid())}
        processes: dict[Path, subprocess.Popen[bytes]] = {}
        for rank in range(1, num):
            log = logs / f"rank_{rank}.log"
            with log.open("wb") as output:
                words = [*command, str(rank)]
                processes[log] = subprocess.Popen(words, stdout=output, stderr=output, env=environment)
            stack.callback(_end, processes[log])

        def check() -> None:
            for log, process in processes.items():
                if (status := process.poll()) is not None:
                    lines = log.read_text(errors="replace").splitlines()[-5:]
                    raise RankGone(f"a rank has ended with exit code {status}; {log} ends\n" + "\n".join(lines))

        def join(base: Base) -> Others:
            deadline_s = time.monotonic() + START_S
            while len(list(Path(folder).glob("ready_*"))) < num - 1:
                check()
                if time.monotonic() > deadline_s:
                    raise RankGone(f"the other ranks did not load the base within {START_S:g} s; see {logs}")
                time.sleep(_POLL_S)
            os.environ.update(_LOOPBACK)
            return Others(base, _joined(device, Path(folder), rank=0, num=num))

        yield join, check


def _joined(device: torch.device, folder: Path, *, rank: int, num: int) -> Ranks:
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    store = dist.FileStore(str(folder / "store"), num)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=num, timeout=timedelta(seconds=ANSWER_S))
    return Ranks(rank, num)


def _end(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5.0)
    process.kill()
    process.wait()


def main() -> None:
    """Runs another rank: python -m grpo.service.ranks FOLDER RANK"""
    end_with_starter()
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    told = json.loads((folder / "task.json").read_text())
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the service ends this process
    set_numeric_defaults()
    set_allocator(os.environ)
    start_log(level=logging.WARNING, who=f"rank {rank}: ")
    settings = TrainSettings.model_validate(told["settings"])
    device = device_for(settings.device, local_rank=rank)
    set_threads(settings.num_threads)
    if device.type == "cpu":
        keep_freed_memory()
    base = Base(settings, Path(told["model"]), device, max_rank=told["max_rank"], num_ranks=told["num"])
    (folder / f"ready_{rank}").touch()
    try:
        _work(base, _joined(device, folder, rank=rank, num=told["num"]))
    except Exception as error:
        if not is_communication(error):
            raise
        logging.getLogger(__name__).warning("ends, because the service is gone: %s", error)
    os._exit(0)


if __name__ == "__main__":
    main()

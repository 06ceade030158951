"""Measures what tenants of one training service cost each other, and how soon a snapshot can be sampled from.

    python -m benchmarks.service [--rounds 12] [--no_sampling] [--check]

Throughput: 8 models on the embedded base, each with 2 datums of 24 tokens a round and a step on them. Once as the
engine computes them, in this process (`passes`, processor time of one thread), once by stock clients over HTTP
(`clients`); one model after the other and all together, in turn, the median of the rounds. Latency: a small model's
gradient and step beside one that has 1,000 datums in one request, and the time of that one's micro-batch. Snapshots:
the client's `save_weights_and_get_sampling_client` of a 10 MB adapter, with a real grpo-infer.
"""

import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from grpo.configs.train import TrainSettings
from grpo.service.engine import RECENT_S
from grpo.service.training import AdapterShape, Base, Pass, TrainedModel
from grpo.service.wire import Datum, ForwardBackward
from grpo.trainer.memory import keep_freed_memory
from tinker import types

from benchmarks.report import parser, report
from tests.service.running import Running, done, running
from tools.random_models import MID, make_random

MODEL = Path(__file__).parents[1] / "configs/tiny/model"
TENANTS, DATUMS, LENGTH, HEAVY, RANK = 8, 2, 24, 1000, 8
ADAM = {"learning_rate": 1e-4}
TARGETS = {
    "passes_together": (">=", 3.0),
    "clients_together": (">=", 3.0),
    "step_beside_heavy_batches": ("<=", 2.0),
    "snapshot_ms": ("<=", 500.0),
}


def datum(seed: int) -> types.Datum:
    ids = np.random.default_rng(seed).integers(2, 250, LENGTH + 1)
    inputs = {"target_tokens": ids[1:], "weights": np.ones(LENGTH, np.float32)}
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1].tolist()), loss_fn_inputs=inputs)


def in_turn(
    one_by_one: Callable[[], float | None],
    together: Callable[[], float | None],
    rounds: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, float]:
    """Median seconds of both, measured in turn after a round that does not count. Either may return its own seconds."""
    seconds: list[list[float]] = [[], []]
    for _ in range(rounds + 1):
        for found, work in zip(seconds, (one_by_one, together), strict=True):
            started_s = clock()
            own_s = work()
            found.append(clock() - started_s if own_s is None else own_s)
    return statistics.median(seconds[0][1:]), statistics.median(seconds[1][1:])


def of_passes(rounds: int) -> tuple[float, float]:
    """Processor seconds of a round of all models: each with a pass of its own, and with one for all."""
    torch.set_num_threads(1)
    keep_freed_memory()
    settings = TrainSettings(model=str(MODEL), device="cpu", sequence_len=512, lora_rank=1, recipe="fp32")
    base = Base(settings, MODEL, torch.device("cpu"), max_rank=RANK)
    shapes = [AdapterShape(rank=RANK, seed=number, attn=True, mlp=True) for number in range(TENANTS)]
    models = [TrainedModel(base, shape) for shape in shapes]
    ids = np.random.default_rng(0).integers(2, 250, LENGTH + 1).astype(np.int32)
    plain: Any = {"token_ids": ids[:-1], "targets": ids[1:], "inputs": {"weights": np.ones(LENGTH, np.float32)}}
    data = [Datum(id=f"1/{number}", **plain) for number in range(DATUMS)]
    request = ForwardBackward(data=data, loss_fn="cross_entropy", config={}, forward_only=False)

    def computed(chosen: Sequence[TrainedModel]) -> None:
        works = [model.forward_backward(request) for model in chosen]
        passes: list[Pass] = [next(work) for work in works]
        for work, model, result in zip(works, chosen, base.compute(passes), strict=True):
            try:
                work.send(result)
            except StopIteration:
                model.optim_step(ADAM)

    def one_by_one() -> None:
        for model in models:
            computed([model])

    return in_turn(one_by_one, lambda: computed(models), rounds, clock=time.process_time)


def of_clients(service: Running, rounds: int) -> tuple[float, float]:
    """Seconds of a round of all clients: one after the other, and all at the same time."""
    clients = [service.training_client(rank=RANK, seed=number) for number in range(TENANTS)]
    data, repeats = [datum(number) for number in range(DATUMS)], 4

    def train(client: Any) -> None:
        for _ in range(repeats):
            ends = client.forward_backward(data, "cross_entropy"), client.optim_step(types.AdamParams(**ADAM))
            for end in ends:
                end.result()

    def one_by_one() -> float:
        seconds = 0.0
        for client in clients:
            time.sleep(RECENT_S)  # so that no pass waits for the one before
            started_s = time.perf_counter()
            train(client)
            seconds += time.perf_counter() - started_s
        return seconds

    def together() -> None:
        threads = [threading.Thread(target=train, args=(client,)) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    seconds = in_turn(one_by_one, together, max(1, rounds // repeats))
    return seconds[0] / repeats, seconds[1] / repeats


def beside_heavy(service: Running) -> dict[str, float]:
    """Milliseconds of a small model's gradient and step alone and beside a heavy one, and of the heavy one's batch."""
    small, heavy = (service.training_client(rank=RANK, seed=seed) for seed in (1, 2))
    light, load = [datum(1)], [datum(number) for number in range(HEAVY)]

    def step_ms() -> float:
        started_s = time.perf_counter()
        small.forward_backward(light, "cross_entropy")
        small.optim_step(types.AdamParams(**ADAM)).result()
        return 1e3 * (time.perf_counter() - started_s)

    alone = [step_ms() for _ in range(10)]
    started_s = time.perf_counter()
    waiting = threading.Thread(target=heavy.forward_backward(load, "cross_entropy").result)
    waiting.start()
    beside: list[float] = []
    while waiting.is_alive():
        beside.append(step_ms())
    batches = HEAVY * (LENGTH + 1) / 128  # of --micro_batch_tokens
    batch_ms = 1e3 * (time.perf_counter() - started_s) / batches
    found = {"step_alone_ms": statistics.median(alone), "step_beside_heavy_ms": statistics.median(beside)}
    wait_ms = max(0.0, found["step_beside_heavy_ms"] - found["step_alone_ms"])
    return found | {"heavy_batch_ms": batch_ms, "step_beside_heavy_batches": wait_ms / batch_ms}


def of_snapshots(service: Running, rounds: int) -> float:
    """Median milliseconds of `save_weights_and_get_sampling_client`."""
    client, found = service.training_client(rank=32), []
    for number in range(rounds):
        client.forward_backward([datum(number)], "cross_entropy")
        client.optim_step(types.AdamParams(**ADAM)).result()
        started_s = time.perf_counter()
        done(client.save_weights_and_get_sampling_client())
        found.append(1e3 * (time.perf_counter() - started_s))
    return statistics.median(found[2:])


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=12, help="(%(default)s)")
    arguments.add_argument("--no_sampling", action="store_true", help="without a grpo-infer, and without snapshots")
    options = arguments.parse_args()
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        alone, together = of_passes(options.rounds)
        figures |= {"passes_alone_ms": 1e3 * alone, "passes_ms": 1e3 * together, "passes_together": alone / together}
        with running(folder / "run", MODEL, "--no_sampling") as service:
            alone, together = of_clients(service, options.rounds)
            each = {"clients_alone_ms": 1e3 * alone, "clients_ms": 1e3 * together}
            figures |= each | {"clients_together": alone / together} | beside_heavy(service)
        if not options.no_sampling:
            model = make_random(folder / "model", MID)
            with running(folder / "sampled", model) as service:
                figures["snapshot_ms"] = of_snapshots(service, options.rounds)
    return report("service", figures, TARGETS, check=options.check)


if __name__ == "__main__":
    raise SystemExit(main())

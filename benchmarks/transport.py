"""Cost of delivering batches, arrays to arrays, beside what the machine can do at best with the same bytes.

    python -m benchmarks.transport [--check] [--large]

Steps of 256 samples of 2,048 tokens with all streams, in micro-batches of 16,384 tokens and of 2,048, between two
processes: over ZeroMQ against a raw ROUTER and DEALER with one frame a step, and over the filesystem against plain
write, fsync, rename and read. Ours and raw are measured in turn, because the machine's speed drifts. On all sides older
steps are removed as new ones come. Also bytes a token, encoding and decoding, and with `--large` how cost grows up to
100 million tokens a step (needs 8 GB of memory). The last line is one JSON object; `--check` exits 1 on a miss.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import zmq
from msgspec.structs import replace

from transport.batches.filesystem import BatchReceiver, BatchSender, FilesystemBatchReceiver
from transport.batches.zmq import ZmqBatchReceiver, ZmqBatchSender
from transport.codec import decode, encode
from transport.keys import SharedKey
from transport.records import MicroBatch

NUM_SAMPLES, SAMPLE_LEN = 256, 2048
NUM_STEPS, NUM_ROUNDS = 20, 5
KEY = SharedKey("the benchmark's own key")
TARGETS = {
    "bytes_per_token": 16.0,
    "zmq_16384_to_raw": 1.5,
    "zmq_2048_to_raw": 1.5,
    "filesystem_16384_to_raw": 1.5,
    "filesystem_2048_to_raw": 1.5,
    "cost_100m_to_10m": 1.5,
}
"""At most."""


def micro_batches(step: int, *, tokens: int, num_samples: int = NUM_SAMPLES) -> list[MicroBatch]:
    """One rank's step in micro-batches of so many tokens."""
    rng, each = np.random.default_rng(0), tokens // SAMPLE_LEN
    mask = np.ones(tokens, np.bool_)
    mask[::SAMPLE_LEN] = False
    logprobs = -rng.random(tokens, np.float32)
    return [
        MicroBatch(
            run_id="run",
            step=step,
            rank=0,
            index=index,
            num_micro_batches=num_samples // each,
            num_loss_tokens=num_samples * (SAMPLE_LEN - 1),
            token_ids=rng.integers(0, 151_936, tokens, np.int32),
            sequence_lengths=np.full(each, SAMPLE_LEN, np.int32),
            loss_mask=mask,
            inference_logprobs=logprobs,
            advantages=rng.standard_normal(each, np.float32),
            temperatures=np.ones(each, np.float32),
            version_runs=np.array([[step - 1, tokens]], np.int32),
            teacher_logprobs=logprobs - 1,
            rollout_ids=tuple(f"{index}/{i}" for i in range(each)),
        )
        for index in range(num_samples // each)
    ]


def median_s(work: Callable[[], object], rounds: int = NUM_ROUNDS) -> float:
    """Median seconds of `work`, after one round to warm up."""
    work()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def between_processes(receive: Callable[[Connection], None], rounds: Callable[[Connection], list[float]]) -> float:
    """Median of the seconds that `rounds` gives, the first left out, while another process does `receive`."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=receive, args=(theirs,))
    process.start()
    times = rounds(ours)
    process.join(30)
    return statistics.median(times[1:])


def _receive_steps(kind: str, folder: Path, port: int, done: Connection) -> None:
    receiver: BatchReceiver = (
        ZmqBatchReceiver(run_id="run", port=port, key=KEY)
        if kind == "zmq"
        else FilesystemBatchReceiver(folder, run_id="run")
    )
    with receiver:
        done.send(0)
        for step in range(1, (NUM_ROUNDS + 1) * NUM_STEPS + 1):
            assert receiver.receive(step, timeout_s=60) is not None
            done.send(step)


def step_s(kind: str, folder: Path, *, tokens: int) -> float:
    """Seconds a step through sender and receiver; a step that has been received counts as checkpointed."""
    port, newest = _free_port(), [0]
    options = {"run_id": "run", "checkpointed": lambda: newest[0]}
    sender: BatchSender = (
        ZmqBatchSender(folder, port=port, key=KEY, **options)  # type: ignore[arg-type]
        if kind == "zmq"
        else BatchSender(folder, **options)  # type: ignore[arg-type]
    )

    def rounds(receiver: Connection) -> list[float]:
        times = []
        receiver.recv()
        for first in range(1, (NUM_ROUNDS + 1) * NUM_STEPS, NUM_STEPS):
            batches = {step: micro_batches(step, tokens=tokens) for step in range(first, first + NUM_STEPS)}
            began = time.perf_counter()
            for step, one in batches.items():
                sender.send(step, [one])
                while receiver.poll():
                    newest[0] = receiver.recv()
            while newest[0] != step:
                newest[0] = receiver.recv()
            times.append((time.perf_counter() - began) / NUM_STEPS)
        return times

    with sender:
        return between_processes(partial(_receive_steps, kind, folder, port), rounds)


def _receive_raw(port: int, done: Connection) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(f"tcp://127.0.0.1:{port}")
        socket.send(b"ready")
        for _ in range(NUM_ROUNDS + 1):
            for _ in range(NUM_STEPS):
                socket.recv()
            done.send(0)


def raw_zmq_s(size: int) -> float:
    """Seconds to send and receive as many bytes as one frame, without any of our work."""
    port, payloads = _free_port(), [os.urandom(size) for _ in range(NUM_STEPS)]

    def rounds(receiver: Connection) -> list[float]:
        times = []
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.bind(f"tcp://127.0.0.1:{port}")
            identity, _ = socket.recv_multipart()
            for _ in range(NUM_ROUNDS + 1):
                began = time.perf_counter()
                for payload in payloads:
                    socket.send_multipart([identity, payload])
                receiver.recv()
                times.append((time.perf_counter() - began) / NUM_STEPS)
        return times

    return between_processes(partial(_receive_raw, port), rounds)


def raw_filesystem_s(folder: Path, size: int) -> float:
    """Seconds to write, fsync, rename and read again as many bytes."""
    data, num_raw = os.urandom(size), 0
    folder.mkdir(parents=True)

    def raw() -> None:
        nonlocal num_raw
        temporary, final = folder / "raw.tmp", folder / f"raw_{num_raw}"
        with temporary.open("wb", buffering=0) as file:
            file.write(data)
            os.fsync(file.fileno())
        temporary.rename(final)
        final.read_bytes()
        (folder / f"raw_{num_raw - 2}").unlink(missing_ok=True)
        num_raw += 1

    return median_s(raw, rounds=3 * NUM_ROUNDS)


def ns_per_token(folder: Path, num_samples: int) -> float:
    """Nanoseconds a token to send and receive one step of `num_samples` samples over the filesystem."""
    batches, step = micro_batches(1, tokens=16_384, num_samples=num_samples), 0
    sender = BatchSender(folder, run_id="run", checkpointed=lambda: step - 1)
    receiver = FilesystemBatchReceiver(folder, run_id="run")

    def one() -> None:
        nonlocal step
        step += 1
        sender.send(step, [[replace(batch, step=step) for batch in batches]])
        receiver.receive(step, timeout_s=600)

    return median_s(one, rounds=3) / (num_samples * SAMPLE_LEN) * 1e9


def in_turn(ours: Callable[[int], float], raw: Callable[[int], float]) -> tuple[float, float, float]:
    """Medians of ours, of raw, and of their ratio."""
    pairs = [(ours(n), raw(n)) for n in range(NUM_ROUNDS)]
    return (
        statistics.median(one for one, _ in pairs),
        statistics.median(other for _, other in pairs),
        statistics.median(one / other for one, other in pairs),
    )


def measure(folder: Path, *, large: bool) -> dict[str, float]:
    """All figures."""
    figures: dict[str, float] = {}
    for tokens in (16_384, 2_048):
        batches = micro_batches(1, tokens=tokens)
        message = encode(batches)
        size = len(message)
        figures["bytes_per_token"] = size / (NUM_SAMPLES * SAMPLE_LEN)
        figures[f"encode_{tokens}_ms"] = 1e3 * median_s(partial(encode, batches), rounds=15)
        figures[f"decode_{tokens}_ms"] = 1e3 * median_s(partial(decode, message), rounds=15)
        raws: dict[str, Callable[[int], float]] = {
            "zmq": lambda n, size=size: raw_zmq_s(size),  # type: ignore[misc]
            "filesystem": lambda n, size=size, of=f"raw_{tokens}": raw_filesystem_s(folder / f"{of}_{n}", size),  # type: ignore[misc]
        }
        for kind, raw in raws.items():
            ours = partial(
                lambda kind, tokens, n: step_s(kind, folder / f"{kind}_{tokens}_{n}", tokens=tokens), kind, tokens
            )
            one, other, ratio = in_turn(ours, raw)
            figures |= {f"{kind}_{tokens}_ms": 1e3 * one, f"{kind}_{tokens}_raw_ms": 1e3 * other}
            figures[f"{kind}_{tokens}_to_raw"] = ratio
    if large:
        # A step of a million tokens fits the processor's caches; linearity is asked of what does not.
        for name, num_samples in (("1m", 512), ("10m", 4_880), ("100m", 48_832)):
            figures[f"ns_per_token_{name}"] = ns_per_token(folder / name, num_samples)
        figures["cost_100m_to_10m"] = figures["ns_per_token_100m"] / figures["ns_per_token_10m"]
    return figures


def _free_port() -> int:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        return int(socket.bind_to_random_port("tcp://127.0.0.1"))


def main() -> int:
    """Prints a table and, last, one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit 1 where a figure misses its target")
    parser.add_argument("--large", action="store_true", help="also a step of 100 million tokens")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        figures = measure(Path(folder), large=options.large)
    missed = [name for name, value in figures.items() if value > TARGETS.get(name, float("inf"))]
    for name, value in figures.items():
        target = f"<= {TARGETS[name]:g}" if name in TARGETS else ""
        print(f"{name:28} {value:12.3f}  {target:10} {'MISSED' if name in missed else ''}")
    rounded = {name: round(value, 4) for name, value in figures.items()}
    print(json.dumps({"benchmark": "transport", "holds": not missed, **rounded}))
    return int(options.check and bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())

"""Cost of delivering batches, arrays to arrays, beside what the machine can do at best with the same bytes.

    python -m benchmarks.transport [--check]

Steps of 256 samples of 2,048 tokens with all streams, in micro-batches of 16,384 tokens and of 2,048, between two
processes: over ZeroMQ against a raw ROUTER and DEALER with one frame a step, and over the filesystem against plain
write, fsync, rename and read. Ours and raw are measured in turn, because the machine's speed drifts. On all sides older
steps are removed as new ones come. The last line is one JSON object; `--check` exits 1 on a miss.
"""

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

from benchmarks.report import parser, report
from transport.batches.filesystem import BatchReceiver, BatchSender, FilesystemBatchReceiver
from transport.batches.zmq import ZmqBatchReceiver, ZmqBatchSender
from transport.codec import decode, encode
from transport.keys import SharedKey
from transport.ports import free_port
from transport.records import MicroBatch

NUM_SAMPLES, SAMPLE_LEN = 256, 2048
NUM_STEPS, NUM_ROUNDS = 20, 5
KEY = SharedKey("the benchmark's own key")
MOST_TO_RAW, MOST_BYTES_PER_TOKEN = 1.5, 16.0


def micro_batches(step: int, *, tokens: int) -> list[MicroBatch]:
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
            num_micro_batches=NUM_SAMPLES // each,
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
        for index in range(NUM_SAMPLES // each)
    ]


def median_s(work: Callable[[], object], rounds: int) -> float:
    """Median seconds of `work`, after one round to warm up."""
    times = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


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
    port, newest = free_port(), [0]

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

    def checkpointed() -> int:
        return newest[0]

    sender = (
        ZmqBatchSender(folder, port=port, key=KEY, run_id="run", checkpointed=checkpointed)
        if kind == "zmq"
        else BatchSender(folder, run_id="run", checkpointed=checkpointed)
    )
    with sender:
        return between_processes(partial(_receive_steps, kind, folder, port), rounds)


def _receive_raw(port: int, done: Connection) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(f"tcp://127.0.0.1:{port}")
        dealer.send(b"ready")
        for _ in range(NUM_ROUNDS + 1):
            for _ in range(NUM_STEPS):
                dealer.recv()
            done.send(0)


def raw_zmq_s(size: int) -> float:
    """Seconds to send and receive as many bytes as one frame, without any of our work."""
    port, payloads = free_port(), [os.urandom(size) for _ in range(NUM_STEPS)]

    def rounds(receiver: Connection) -> list[float]:
        times = []
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.bind(f"tcp://127.0.0.1:{port}")
            identity, _ = router.recv_multipart()
            for _ in range(NUM_ROUNDS + 1):
                began = time.perf_counter()
                for payload in payloads:
                    router.send_multipart([identity, payload])
                receiver.recv()
                times.append((time.perf_counter() - began) / NUM_STEPS)
        return times

    return between_processes(partial(_receive_raw, port), rounds)


def raw_filesystem_s(folder: Path, size: int) -> float:
    """Seconds to write, fsync, rename and read again as many bytes."""
    data, num_raw = os.urandom(size), 0

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


def measure(folder: Path) -> dict[str, float]:
    """All figures: milliseconds, and medians of what ours takes of raw's time."""
    figures: dict[str, float] = {}
    for tokens in (16_384, 2_048):
        batches = micro_batches(1, tokens=tokens)
        message = encode(batches)
        size = len(message)
        figures["bytes_per_token"] = size / (NUM_SAMPLES * SAMPLE_LEN)
        figures[f"encode_{tokens}_ms"] = 1e3 * median_s(partial(encode, batches), rounds=15)
        figures[f"decode_{tokens}_ms"] = 1e3 * median_s(partial(decode, message), rounds=15)
        for kind in ("zmq", "filesystem"):
            pairs = []
            for _ in range(NUM_ROUNDS):
                with tempfile.TemporaryDirectory(dir=folder) as own:
                    ours = step_s(kind, Path(own) / "batches", tokens=tokens)
                    pairs.append((ours, raw_zmq_s(size) if kind == "zmq" else raw_filesystem_s(Path(own), size)))
            figures[f"{kind}_{tokens}_ms"] = 1e3 * statistics.median(ours for ours, _ in pairs)
            figures[f"{kind}_{tokens}_raw_ms"] = 1e3 * statistics.median(raw for _, raw in pairs)
            figures[f"{kind}_{tokens}_to_raw"] = statistics.median(ours / raw for ours, raw in pairs)
    return figures


def main() -> int:
    """The command."""
    options = parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        figures = measure(Path(folder))
    targets = {name: ("<=", MOST_TO_RAW) for name in figures if name.endswith("to_raw")}
    targets["bytes_per_token"] = ("<=", MOST_BYTES_PER_TOKEN)
    return report("transport", figures, targets, check=options.check)


if __name__ == "__main__":
    raise SystemExit(main())

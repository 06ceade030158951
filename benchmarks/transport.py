"""Cost of delivering batches, arrays to arrays, beside what the machine can do at best with the same bytes.

    python -m benchmarks.transport [--check]

Steps of 256 samples of 2,048 tokens with all streams, in micro-batches of 16,384 tokens and of 2,048, between two
processes: over ZeroMQ against a raw ROUTER and DEALER with CURVE and one frame a step, and over the filesystem against
plain write, fsync, rename and read. Ours and raw are measured in turn, because the machine's speed drifts. On all sides
older steps are removed as new ones come.
"""

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import zmq
from grpo.transport.batches.filesystem import BatchReceiver, BatchSender, FilesystemBatchReceiver
from grpo.transport.batches.zmq import ZmqBatchReceiver, ZmqBatchSender
from grpo.transport.codec import decode, encode
from grpo.transport.keys import SharedKey
from grpo.transport.ports import free_port
from grpo.transport.records import MicroBatch

from benchmarks.report import parser, report
from tests.transport.samples import micro_batch

NUM_SAMPLES, SAMPLE_LEN = 256, 2048
NUM_STEPS, NUM_ROUNDS = 20, 5
KEY = SharedKey("the benchmark's own key")
MOST_TO_RAW, MOST_BYTES_PER_TOKEN = 1.5, 16.0


def micro_batches(step: int, *, tokens: int) -> list[MicroBatch]:
    """One rank's step in micro-batches of so many tokens."""
    each = tokens // SAMPLE_LEN
    lengths, num = (SAMPLE_LEN,) * each, NUM_SAMPLES // each
    return [micro_batch(step=step, index=index, of=num, lengths=lengths, teacher=True) for index in range(num)]


def median_s(work: Callable[[], object], rounds: int = 3 * NUM_ROUNDS) -> float:
    """Median seconds of `work`, after one round to warm up."""
    times = []
    for _ in range(rounds + 1):
        began_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - began_s)
    return statistics.median(times[1:])


@contextmanager
def sending(kind: str, folder: Path, port: int, newest: Callable[[], int]) -> Iterator[Callable[[int, Any], object]]:
    """Yields what sends a step's micro-batches, or a raw frame; what is received counts as checkpointed."""
    if kind == "raw":
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            KEY.encrypt(router, serves=True)
            router.bind(f"tcp://127.0.0.1:{port}")
            identity, _ = router.recv_multipart()
            yield lambda step, frame: router.send_multipart([identity, frame])
        return
    sender = BatchSender(folder, run_id="run", checkpointed=newest)
    if kind == "zmq":
        sender = ZmqBatchSender(folder, port=port, key=KEY, run_id="run", checkpointed=newest)
    with sender:
        yield lambda step, batch: sender.send(step, [batch])


@contextmanager
def receiving(kind: str, folder: Path, port: int) -> Iterator[Callable[[int], object]]:
    """Yields what waits for a step."""
    if kind == "raw":
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            KEY.encrypt(dealer, serves=False)
            dealer.connect(f"tcp://127.0.0.1:{port}")
            dealer.send(b"ready")
            yield lambda step: dealer.recv()
        return
    receiver: BatchReceiver = FilesystemBatchReceiver(folder, run_id="run")
    if kind == "zmq":
        receiver = ZmqBatchReceiver(run_id="run", port=port, key=KEY)
    with receiver:
        yield partial(receiver.receive, timeout_s=60)


def _receive(kind: str, folder: Path, port: int, done: Connection) -> None:
    with receiving(kind, folder, port) as receive:
        done.send(0)
        for step in range(1, (NUM_ROUNDS + 1) * NUM_STEPS + 1):
            assert receive(step) is not None
            done.send(step)


def step_s(kind: str, folder: Path, payload: Callable[[int], Any]) -> float:
    """Median seconds a step of some rounds, the first left out, from this process to another."""
    port, newest, times = free_port(), 0, []
    done, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_receive, args=(kind, folder, port, theirs))
    process.start()
    with sending(kind, folder, port, lambda: newest) as send:
        done.recv()
        for first in range(1, (NUM_ROUNDS + 1) * NUM_STEPS, NUM_STEPS):
            payloads = {step: payload(step) for step in range(first, first + NUM_STEPS)}
            began_s = time.perf_counter()
            for step, one in payloads.items():
                send(step, one)
                while done.poll():
                    newest = done.recv()
            while newest != step:
                newest = done.recv()
            times.append((time.perf_counter() - began_s) / NUM_STEPS)
        process.join(30)
    return statistics.median(times[1:])


def raw_filesystem_s(folder: Path, size: int) -> float:
    """Seconds to write, fsync, rename and read again as many bytes, over and over."""
    data, temporary, final = os.urandom(size), folder / "raw.tmp", folder / "raw"

    def raw() -> None:
        with temporary.open("wb", buffering=0) as file:
            file.write(data)
            os.fsync(file.fileno())
        temporary.rename(final)
        final.read_bytes()

    return median_s(raw)


def measure(folder: Path) -> dict[str, float]:
    """All figures: milliseconds, and medians of what ours takes of raw's time."""
    figures: dict[str, float] = {}
    for tokens in (16_384, 2_048):
        batches = micro_batches(1, tokens=tokens)
        message = encode(batches)
        size = len(message)
        figures["bytes_per_token"] = size / (NUM_SAMPLES * SAMPLE_LEN)
        figures[f"encode_{tokens}_ms"] = 1e3 * median_s(partial(encode, batches))
        figures[f"decode_{tokens}_ms"] = 1e3 * median_s(partial(decode, message))
        for kind in ("zmq", "filesystem"):
            pairs = []
            for _ in range(NUM_ROUNDS):
                with tempfile.TemporaryDirectory(dir=folder) as name:
                    own = Path(name)
                    ours = step_s(kind, own / "batches", partial(micro_batches, tokens=tokens))
                    raw = raw_filesystem_s(own, size)
                    if kind == "zmq":
                        raw = step_s("raw", own, lambda _: os.urandom(size))  # noqa: B023 - called at once
                    pairs.append((ours, raw))
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

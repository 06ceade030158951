"""Cost of delivering batches, beside what the machine can do at best with the same bytes.

    python benchmarks/transport.py [--check] [--large]

Bytes a token; encoding and decoding; ZeroMQ between two processes against raw buffers over the same kind of sockets;
the filesystem between two processes against plain write, fsync, rename and read; linearity up to 100 million tokens
a step (`--large`).
On all sides older steps are removed as new ones come, as they are when the trainer checkpoints at every step.
The last line is one JSON object. `--check` exits 1 where a figure misses its target.
"""

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import zmq
from msgspec.structs import replace

from tests.transport.samples import free_port
from transport.batches.base import BatchReceiver, BatchSender
from transport.batches.filesystem import FilesystemBatchReceiver, FilesystemBatchSender
from transport.batches.zmq import ZmqBatchReceiver, ZmqBatchSender
from transport.codec import decode, encode
from transport.records import MicroBatch

NUM_SAMPLES, SAMPLE_LEN, SAMPLES_IN_MICRO_BATCH = 256, 2048, 8
NUM_STEPS, NUM_ROUNDS = 20, 5
TARGETS = {
    "bytes_per_token": ("<=", 16.0),
    "codec_gb_per_s": (">=", 1.0),
    "zmq_share_of_raw": (">=", 0.5),
    "filesystem_share_of_raw": (">=", 0.5),
    "cost_ratio_100m_to_10m": ("<=", 1.5),
}


def micro_batches(step: int, num_samples: int = NUM_SAMPLES) -> list[MicroBatch]:
    """One rank's step with all streams: 256 samples of 2,048 tokens, unless told otherwise."""
    rng, of = np.random.default_rng(0), num_samples // SAMPLES_IN_MICRO_BATCH
    length = SAMPLES_IN_MICRO_BATCH * SAMPLE_LEN
    mask = np.ones(length, np.bool_)
    mask[::SAMPLE_LEN] = False
    logprobs = -rng.random(length, np.float32)
    return [
        MicroBatch(
            run_id="run",
            step=step,
            rank=0,
            index=index,
            num_micro_batches=of,
            num_loss_tokens=num_samples * (SAMPLE_LEN - 1),
            token_ids=rng.integers(0, 151_936, length, np.int32),
            sequence_lengths=np.full(SAMPLES_IN_MICRO_BATCH, SAMPLE_LEN, np.int32),
            loss_mask=mask,
            inference_logprobs=logprobs,
            advantages=rng.standard_normal(SAMPLES_IN_MICRO_BATCH, np.float32),
            temperatures=np.ones(SAMPLES_IN_MICRO_BATCH, np.float32),
            version_runs=np.array([[step - 1, length]], np.int32),
            teacher_logprobs=logprobs - 1,
            rollout_ids=tuple(f"{index}/{i}" for i in range(SAMPLES_IN_MICRO_BATCH)),
        )
        for index in range(of)
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


def codec() -> dict[str, float]:
    """Size, and speed of encoding and decoding together."""
    batches = micro_batches(1)
    message = encode(batches)
    size = len(message)
    seconds = median_s(lambda: decode(encode(batches)), rounds=15)
    return {"bytes_per_token": size / (NUM_SAMPLES * SAMPLE_LEN), "codec_gb_per_s": size / seconds / 1e9}


def _receiver(kind: str, folder: Path, port: int) -> BatchReceiver:
    if kind == "zmq":
        return ZmqBatchReceiver(folder / "quarantine", run_id="run", port=port)
    return FilesystemBatchReceiver(folder, run_id="run")


def _receive_steps(kind: str, folder: str, port: int, num_rounds: int, done: Connection) -> None:
    with _receiver(kind, Path(folder), port) as receiver:
        done.send(0)
        for step in range(1, num_rounds * NUM_STEPS + 1):
            assert receiver.receive(step, timeout_s=60) is not None
            receiver.checkpointed(step)
            if step % NUM_STEPS == 0:
                done.send(step)


def step_s(kind: str, folder: Path) -> float:
    """Seconds a step through sender and receiver, in two processes; median over rounds of 20 steps."""
    folder.mkdir()
    port, times = free_port(), []
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    arguments = (kind, str(folder), port, NUM_ROUNDS + 1, theirs)
    sender: BatchSender = (
        ZmqBatchSender(folder, run_id="run", port=port)
        if kind == "zmq"
        else FilesystemBatchSender(folder, run_id="run")
    )
    process = context.Process(target=_receive_steps, args=arguments)
    process.start()
    with sender:
        ours.recv()
        for round_ in range(NUM_ROUNDS + 1):
            steps = range(round_ * NUM_STEPS + 1, (round_ + 1) * NUM_STEPS + 1)
            batches = {step: micro_batches(step) for step in steps}
            began = time.perf_counter()
            for step in steps:
                sender.send(step, [batches[step]])
            ours.recv()
            times.append((time.perf_counter() - began) / NUM_STEPS)
    process.join(30)
    return statistics.median(times[1:])


def _receive_raw(port: int, num_rounds: int, copy: bool, done: Connection) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(f"tcp://127.0.0.1:{port}")
        socket.send(b"ready")
        for _ in range(num_rounds):
            for _ in range(NUM_STEPS):
                socket.recv(copy=copy)
            done.send(0)


def raw_zmq_mb_per_s(size: int, *, copy: bool) -> float:
    """As many bytes as one frame a step over the same kinds of sockets, without any of our work: by plain `send` and
    `recv`, or without their copies."""
    port, rates, payloads = free_port(), [], [os.urandom(size) for _ in range(NUM_STEPS)]
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_receive_raw, args=(port, NUM_ROUNDS + 1, copy, theirs))
    process.start()
    with zmq.Context() as zmq_context, zmq_context.socket(zmq.ROUTER) as socket:
        socket.bind(f"tcp://127.0.0.1:{port}")
        identity, _ = socket.recv_multipart()
        for _ in range(NUM_ROUNDS + 1):
            began = time.perf_counter()
            for payload in payloads:
                socket.send_multipart([identity, payload], copy=copy)
            ours.recv()
            rates.append(NUM_STEPS * size / (time.perf_counter() - began) / 1e6)
        process.join(30)
    return statistics.median(rates[1:])


def raw_filesystem_s(folder: Path, size: int) -> float:
    """Median seconds to write, fsync, rename and read again as many bytes."""
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


def ns_per_token(folder: Path, num_samples: int) -> float:
    """Nanoseconds a token to send and receive one step of `num_samples` samples over the filesystem."""
    batches, step = micro_batches(1, num_samples), 0
    with (
        FilesystemBatchSender(folder, run_id="run") as sender,
        FilesystemBatchReceiver(folder, run_id="run") as receiver,
    ):

        def one() -> None:
            nonlocal step
            step += 1
            sender.send(step, [[replace(batch, step=step) for batch in batches]])
            receiver.receive(step, timeout_s=600)
            receiver.checkpointed(step)

        return median_s(one, rounds=3) / (num_samples * SAMPLE_LEN) * 1e9


def paired(ours: Callable[[int], float], raw: Callable[[int], float]) -> tuple[float, float, float]:
    """Medians of ours, of raw, and of their ratio, measured in turn: the machine's speed drifts."""
    pairs = [(ours(n), raw(n)) for n in range(NUM_ROUNDS)]
    return (
        statistics.median(one for one, _ in pairs),
        statistics.median(other for _, other in pairs),
        statistics.median(one / other for one, other in pairs),
    )


def measure(large: bool) -> dict[str, float]:
    """All figures."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder = Path(name)
        figures = codec()
        size = int(figures["bytes_per_token"] * NUM_SAMPLES * SAMPLE_LEN)
        zmq_ = paired(
            lambda n: size / step_s("zmq", folder / f"zmq_{n}") / 1e6, lambda _: raw_zmq_mb_per_s(size, copy=True)
        )
        figures |= {"zmq_mb_per_s": zmq_[0], "raw_zmq_mb_per_s": zmq_[1], "zmq_share_of_raw": zmq_[2]}
        figures["raw_zmq_without_copies_mb_per_s"] = raw_zmq_mb_per_s(size, copy=False)
        files = paired(
            lambda n: size / step_s("filesystem", folder / f"files_{n}") / 1e6,
            lambda _: size / raw_filesystem_s(folder, size) / 1e6,
        )
        figures |= {"filesystem_mb_per_s": files[0], "raw_filesystem_mb_per_s": files[1]}
        figures["filesystem_share_of_raw"] = files[2]
        if large:
            # A step of a million tokens fits the processor's caches; linearity is asked of what does not.
            for name, num_samples in (("1m", 512), ("10m", 4_883), ("100m", 48_832)):
                figures[f"ns_per_token_{name}"] = ns_per_token(folder / name, num_samples)
            figures["cost_ratio_100m_to_10m"] = figures["ns_per_token_100m"] / figures["ns_per_token_10m"]
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit 1 where a figure misses its target")
    parser.add_argument("--large", action="store_true", help="also a step of 100 million tokens (needs 8 GB of memory)")
    options = parser.parse_args()
    figures, missed = measure(options.large), []
    print(f"256 samples of 2,048 tokens, all streams; {os.cpu_count()} cores, {platform.machine()}\n")
    for name, value in figures.items():
        kind, target = TARGETS.get(name, ("", 0.0))
        met = not kind or (value <= target if kind == "<=" else value >= target)
        missed += [] if met else [name]
        print(f"{name:28} {value:12.3f}  {f'{kind} {target:g}' if kind else '':10} {'' if met else 'MISSED'}")
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))
    return int(options.check and bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())

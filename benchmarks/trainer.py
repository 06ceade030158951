"""The trainer's step beside TRL's on the same samples, and its time a token as the packed length grows.

    python -m benchmarks.trainer [--check] [--part trl|lengths|tree] [--dtype bfloat16] [--threads 2] [--trees 16]

A random Qwen3 on the CPU: 4 layers of hidden size 256, a vocabulary of 151,936, LoRA 16 on all linear layers; 16
samples in 2 groups of 8, prompts and completions log-normal with median 64 and at most 512 tokens. What a step is, and
how TRL's is run, is in `benchmarks/grpo_step.py`; that both compute the same is seen by the norm of the gradients. TRL
takes part as it is started by default, and tuned: with our settings of the allocator, each of its two ways to compute
the LM head, and the micro-batch that is fastest for it, by trials on one group. Each contender is a process of its own;
they take turns, and medians are told. Memory is the largest resident set during the steps above that of the loaded
model.

All of it is done twice: with advantages in both groups, and, as `half_…`, with equal rewards in one of them.

The time a token is measured with the same model, on samples of 1,024 tokens of which the last 128 carry loss.

Samples that fork are computed as trees, beside the same as unshared rows and beside TRL's tree packing, in float32
(`benchmarks/tree.py`).

Needs the extra `bench`. The last line is one JSON object. `--check` exits 1 where a figure misses its target.
"""

import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from benchmarks.grpo_step import (
    GROUP,
    NUM_GROUPS,
    VOCAB,
    keeping_freed_memory,
    load_policy_of,
    num_tokens,
    samples,
    save_model,
    serve,
)
from benchmarks.report import parser, report
from benchmarks.tree import PROCESSES, forked, save_tree_model, serve_tree

SIZES = (1, 4, 8)
"""Micro-batches that tuned TRL may choose from, in samples."""
NUM_ROUNDS = 3
PACKED_TOKENS = (4_096, 8_192, 16_384, 32_768, 65_536)
SAMPLE_LEN, NUM_LOSS_TOKENS = 1_024, 128
TOKENS_A_TURN = 32_768
"""Shorter sequences are repeated to so many, so that all lengths are measured equally well."""
DEFAULTS = "defaults"
"""TRL as it is started by default: 8 samples at a time, the LM head in tiles, the system's allocator."""
TARGETS = {
    "speed_ratio": (">=", 5.0),
    "memory_ratio": ("<=", 0.25),
    "tuned_speed_ratio": (">=", 3.0),
    "tuned_memory_ratio": ("<=", 0.25),
    "gradient_difference": ("<=", 1e-3),
    "half_gradient_difference": ("<=", 1e-3),
    "largest_to_smallest_us_per_token": ("<=", 1.10),
    "thinking_to_unshared": (">=", 1.5),
    "agents_to_unshared": (">=", 1.5),
    "apart_to_unshared": (">=", 0.98),
    "thinking_to_trl": (">=", 2.0),
    "agents_to_trl": (">=", 2.0),
    **{f"{case}_gradient_difference": ("<=", 1e-3) for case in ("thinking", "agents", "apart")},
}


class Turn(NamedTuple):
    """One step of a contender."""

    seconds: float
    peak_bytes: int
    gradient_norm: float


class Contender:
    """A process that has loaded the model, and waits for its turns."""

    def __init__(self, kind: str, folder: str, *, dtype: str, num_threads: int, tuned: bool = True) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = multiprocessing.Pipe()
        self._process = context.Process(target=serve, args=(kind, folder, dtype, num_threads, theirs))
        with keeping_freed_memory() if tuned else nullcontext():
            self._process.start()
        theirs.close()
        self._connection.recv()

    def __enter__(self) -> "Contender":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._connection.send(None)
        self._process.join(30)

    def step(self, num_samples: int, options: Mapping[str, Any]) -> Turn:
        """One step on the first so many samples."""
        self._connection.send((num_samples, options))
        return Turn(*self._connection.recv())


def trials(folder: str, **options: Any) -> dict[str, dict[int, Turn]]:
    """TRL's ways to compute the LM head, each with every size, on one group."""
    ways = {"tiles": False, "full logits": True}
    with Contender("trl", folder, **options) as trl:
        trl.step(GROUP, {"size": 1, "full_logits": False})  # to warm up
        return {
            name: {size: trl.step(GROUP, {"size": size, "full_logits": full_logits}) for size in SIZES}
            for name, full_logits in ways.items()
        }


def compared(folder: str, sizes: Mapping[str, int], *, silent_groups: int = 0, **options: Any) -> dict[str, list[Turn]]:
    """Rounds of this trainer, of TRL's defaults and of its ways with their `sizes`, in turn, after one to warm up."""
    requests: dict[str, Mapping[str, Any]] = {"ours": {}, DEFAULTS: {"size": 8, "full_logits": False}}
    requests |= {name: {"size": size, "full_logits": name == "full logits"} for name, size in sizes.items()}
    requests = {name: {**request, "silent_groups": silent_groups} for name, request in requests.items()}
    with ExitStack() as stack:
        contenders = {
            name: stack.enter_context(
                Contender("ours" if name == "ours" else "trl", folder, tuned=name != DEFAULTS, **options)
            )
            for name in requests
        }
        for name, contender in contenders.items():
            contender.step(len(samples()), requests[name])
        rounds = [
            {name: contender.step(len(samples()), requests[name]) for name, contender in contenders.items()}
            for _ in range(NUM_ROUNDS)
        ]
    return {name: [turns[name] for turns in rounds] for name in requests}


def comparison(turns: Mapping[str, Sequence[Turn]]) -> dict[str, float]:
    """Figures: each contender's, and ours against TRL's defaults and against the better of its two tuned ways."""
    tokens_per_s = {n: num_tokens(samples()) / statistics.median(t.seconds for t in each) for n, each in turns.items()}
    peaks = {name: max(turn.peak_bytes for turn in each) / 2**20 for name, each in turns.items()}
    norms = {name: each[0].gradient_norm for name, each in turns.items()}
    peers = [name for name in turns if name != "ours"]
    tuned = [name for name in peers if name != DEFAULTS]
    return {
        **{f"{name} tokens_per_s".replace(" ", "_"): value for name, value in tokens_per_s.items()},
        **{f"{name} peak_mib".replace(" ", "_"): value for name, value in peaks.items()},
        "speed_ratio": tokens_per_s["ours"] / tokens_per_s[DEFAULTS],
        "memory_ratio": peaks["ours"] / peaks[DEFAULTS],
        "tuned_speed_ratio": min(tokens_per_s["ours"] / tokens_per_s[name] for name in tuned),
        "tuned_memory_ratio": max(peaks["ours"] / peaks[name] for name in tuned),
        "gradient_difference": max(abs(norms["ours"] / norms[name] - 1) for name in peers),
    }


def _serve_lengths(folder: str, dtype: str, num_threads: int, connection: Connection) -> None:
    """A process that answers each packed length with microseconds a token; ends on None."""
    import torch
    from grpo.trainer.memory import keep_freed_memory

    torch.set_num_threads(num_threads)
    keep_freed_memory()
    policy = load_policy_of(Path(folder), dtype, sequence_len=max(PACKED_TOKENS))
    while (length := connection.recv()) is not None:
        repeats = max(1, TOKENS_A_TURN // length)
        tokens = _tokens(length)
        began_s = time.perf_counter()
        for _ in range(repeats):
            policy.logprobs(tokens).sum().backward()
            for parameter in policy.parameters:
                parameter.grad = None
        connection.send((time.perf_counter() - began_s) / (repeats * length) * 1e6)


def _tokens(length: int) -> Any:
    """Samples of 1,024 random tokens."""
    import torch
    from grpo.trainer.packing import pack

    num_samples = length // SAMPLE_LEN
    return pack(
        np.random.default_rng(0).integers(2, VOCAB, length, np.int32),
        np.full(num_samples, SAMPLE_LEN, np.int32),
        loss_mask=np.tile(np.arange(SAMPLE_LEN) >= SAMPLE_LEN - NUM_LOSS_TOKENS, num_samples),
        temperatures=np.ones(length, np.float32),
        device=torch.device("cpu"),
    )


def us_per_token(folder: str, *, dtype: str, num_threads: int) -> dict[int, float]:
    """Medians by packed length, measured in turn after the longest, by which the process has its memory."""
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_serve_lengths, args=(folder, dtype, num_threads, theirs))
    process.start()
    theirs.close()

    def measured(length: int) -> float:
        ours.send(length)
        result: float = ours.recv()
        return result

    measured(max(PACKED_TOKENS))
    rounds = [{length: measured(length) for length in PACKED_TOKENS} for _ in range(NUM_ROUNDS)]
    ours.send(None)
    process.join(30)
    return {length: statistics.median(times[length] for times in rounds) for length in PACKED_TOKENS}


def beside_trl(folder: str, **options: Any) -> dict[str, float]:
    """The figures of the comparison; tells TRL's trials as they come."""
    tried = trials(folder, **options)
    for name, turns in tried.items():
        for size, turn in turns.items():
            speed = num_tokens(samples()[:GROUP]) / turn.seconds
            print(f"TRL, {name}, {size} at a time: {speed:.0f} tokens/s, {turn.peak_bytes / 2**20:.0f} MiB", flush=True)
    best = {name: min(turns, key=lambda size: turns[size].seconds) for name, turns in tried.items()}
    half = comparison(compared(folder, best, silent_groups=NUM_GROUPS // 2, **options))
    return comparison(compared(folder, best, **options)) | {f"half_{name}": value for name, value in half.items()}


def by_length(folder: str, **options: Any) -> dict[str, float]:
    """The figures of packed lengths."""
    times_us = us_per_token(folder, **options)
    figures = {f"us_per_token_{length}": time_us for length, time_us in times_us.items()}
    return figures | {"largest_to_smallest_us_per_token": max(times_us.values()) / min(times_us.values())}


def of_trees(_given: str, *, num_threads: int, trees: int, **_options: Any) -> dict[str, float]:
    """The figures of samples that fork, in tokens of the samples by a processor second: medians of rounds in turn."""
    context, figures = multiprocessing.get_context("spawn"), dict[str, float]()
    with tempfile.TemporaryDirectory() as folder:
        _in_a_process(save_tree_model, Path(folder))
        ends: dict[str, Connection] = {}
        for name in PROCESSES:
            ends[name], theirs = multiprocessing.Pipe()
            context.Process(target=serve_tree, args=(name, folder, num_threads, theirs)).start()
            theirs.close()
        for case in ("thinking", "agents", "apart"):
            num_ids = sum(len(sample.ids) for sample in forked(case, trees))
            turns: dict[str, list[tuple[float, float]]] = {}
            for _ in range(NUM_ROUNDS):
                for end in ends.values():
                    end.send((case, trees))
                    for kind, turn in end.recv().items():
                        turns.setdefault(kind, []).append(turn)
            speeds = {kind: num_ids / statistics.median(seconds for seconds, _ in each) for kind, each in turns.items()}
            norms = {kind: each[0][1] for kind, each in turns.items()}
            figures |= {f"{case}_{kind}_tokens_per_s".replace(" ", "_"): speed for kind, speed in speeds.items()}
            figures[f"{case}_to_unshared"] = speeds["ours"] / speeds["ours unshared"]
            figures[f"{case}_to_trl"] = speeds["ours"] / speeds["trl tiles"]
            figures[f"{case}_to_trl_by_hand"] = speeds["ours"] / speeds["trl full logits"]
            figures[f"{case}_gradient_difference"] = max(abs(norms["ours"] / norm - 1) for norm in norms.values())
        for end in ends.values():
            end.send(None)
    return figures


def _in_a_process(work: Any, *arguments: Any) -> None:
    process = multiprocessing.get_context("spawn").Process(target=work, args=arguments)
    process.start()
    process.join()


PARTS: dict[str, Callable[..., dict[str, float]]] = {"trl": beside_trl, "lengths": by_length, "tree": of_trees}


def main() -> int:
    """The command."""
    command = parser(__doc__)
    command.add_argument("--part", choices=tuple(PARTS), help="only this one; all take some ten minutes")
    command.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of model and computation")
    command.add_argument("--threads", type=int, default=os.cpu_count(), help="of every process")
    command.add_argument("--trees", type=int, default=16, help="conversations or agents of the part `tree`")
    options = command.parse_args()
    print(f"{len(samples())} samples, {num_tokens(samples())} tokens; {options.dtype}, {options.threads} threads")
    print(f"{os.cpu_count()} cores, {platform.machine()}\n")
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        _in_a_process(save_model, Path(folder), options.dtype)
        for measure in (PARTS[options.part],) if options.part else PARTS.values():
            more = {"trees": options.trees} if measure is of_trees else {}
            figures |= measure(folder, dtype=options.dtype, num_threads=options.threads, **more)
    # Of numbers that have 8 bits each.
    rounded = (
        dict.fromkeys(("gradient_difference", "half_gradient_difference"), ("<=", 5e-3))
        if options.dtype == "bfloat16"
        else {}
    )
    return report("trainer", figures, TARGETS | rounded, check=options.check)


if __name__ == "__main__":
    raise SystemExit(main())

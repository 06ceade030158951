"""What a step of the trainer really allocates: one on made-up tokens, in a process of its own.

`python -m deploy.memory.dry_step FOLDER` reads the trainer's settings as JSON from standard input, and prints one line
of JSON. The process loads the base for itself, before a server has taken the device.
"""

import ctypes
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from configs.train import TrainSettings
from deploy.memory.estimate import Estimate, Need
from transport.records import Hint, MicroBatch, PreferencePair

_WARM_UP_TOKENS = 64
_NUM_MICRO_BATCHES = 2
"""In the second pass the gradients of the first are there."""


class DryStepError(RuntimeError):
    """The dry step could not be made; the message ends with what its process printed last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DryStep:
    """The most that a step had above the loaded model, in bytes."""

    allocated: int
    """In tensors."""
    held: int
    """Fragments between them included: of a GPU's memory what the allocator had reserved, on a CPU the resident set."""

    def corrected(self, estimate: Estimate) -> Need:
        """The trainer's need, with what was held in the place of the estimated step."""
        return Need(stays=estimate.stays, step=self.held)


def measure(
    settings: TrainSettings, folder: Path, *, timeout_s: float, environment: Mapping[str, str] | None = None
) -> DryStep:
    """A dry step with these settings, by one rank, of the model in `folder`; in this process's environment where none
    is given. Raises `DryStepError`."""
    alone = json.dumps(settings.model_dump(mode="json") | {"gpus": 1, "zero_level": 1})
    command = [sys.executable, "-m", "deploy.memory.dry_step", str(folder)]
    try:
        done = subprocess.run(command, input=alone, capture_output=True, text=True, timeout=timeout_s, env=environment)
    except subprocess.TimeoutExpired as error:
        raise DryStepError(
            f"the dry step took longer than {timeout_s:g} s; lower sequence_len, or do without"
        ) from error
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise DryStepError(f"the dry step ended with exit status {done.returncode}: {last}")
    return DryStep(**json.loads(done.stdout.splitlines()[-1]))


def batches(settings: TrainSettings, *, num_tokens: int, vocab_size: int) -> list[MicroBatch]:
    """Micro-batches of one sample each, all of whose tokens but the first carry loss, with data for every loss that is
    on: nothing that is as long asks for more memory."""
    ids = np.random.default_rng(0).integers(0, vocab_size, num_tokens, np.int32)
    mask = np.arange(num_tokens) > 0
    aligned, loss = np.arange(1, num_tokens, dtype=np.int32), settings.loss
    hint = Hint(teacher_token_ids=ids, student_index=aligned, teacher_index=aligned, weight=1.0)
    middle = num_tokens // 2
    pair = PreferencePair(
        prompt_ids=ids[:1],
        chosen_ids=ids[1:middle],
        rejected_ids=ids[middle:],
        chosen_ref_logprob=-1.0,
        rejected_ref_logprob=-1.0,
        source="dry step",
    )
    return [
        MicroBatch(
            run_id="dry",
            step=1,
            rank=0,
            index=index,
            num_micro_batches=_NUM_MICRO_BATCHES,
            num_loss_tokens=_NUM_MICRO_BATCHES * int(mask.sum()),
            num_hint_tokens=_NUM_MICRO_BATCHES * len(aligned),
            num_pairs=_NUM_MICRO_BATCHES,
            token_ids=ids,
            sequence_lengths=np.array([num_tokens], np.int32),
            loss_mask=mask,
            inference_logprobs=np.where(mask, -np.log(vocab_size), 0).astype(np.float32),
            advantages=np.ones(1, np.float32),
            temperatures=np.ones(1, np.float32),
            version_runs=np.array([[0, num_tokens]], np.int32),
            teacher_logprobs=np.zeros(num_tokens, np.float32) if loss.teacher_tau else None,
            hints=((0, hint),) if loss.alpha_sdpo else (),
            pairs=(pair,) if loss.beta_replay else (),
            rollout_ids=("dry",),
        )
        for index in range(_NUM_MICRO_BATCHES)
    ]


def measured_here(settings: TrainSettings, folder: Path) -> DryStep:
    """The same in this process, which loads the model and keeps what memory it gets."""
    from trainer.memory import keep_freed_memory
    from trainer.objective import Objective
    from trainer.parallel import ONE
    from trainer.startup import device_for, policy_for, set_threads

    device = device_for(settings.device)
    set_threads(settings.num_threads)
    if device.type == "cpu":
        keep_freed_memory()
    policy = policy_for(settings, folder, device, ONE)
    objective = Objective(policy, settings.loss, ONE, sequence_len=settings.sequence_len)

    def step(num_tokens: int) -> None:
        objective.accumulate(batches(settings, num_tokens=num_tokens, vocab_size=policy.vocab_size))
        for parameter in policy.parameters:
            parameter.grad = None

    step(min(_WARM_UP_TOKENS, settings.sequence_len))  # what the libraries take once is not the step's
    return (_on_gpu if device.type == "cuda" else _on_cpu)(lambda: step(settings.sequence_len))


def _on_gpu(step: Callable[[], None]) -> DryStep:
    """Not yet run: needs a GPU."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return DryStep(allocated=allocated - before, held=reserved - before)


def _on_cpu(step: Callable[[], None]) -> DryStep:
    """Two steps: torch's profiler, which counts what is allocated, has memory of its own."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)  # what was freed since loading is not there for the step to use
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again at what is resident
    step()
    held = _resident("VmHWM") - before
    return DryStep(allocated=_allocated_on_cpu(step), held=held)


def _allocated_on_cpu(step: Callable[[], None]) -> int:
    """The most that was allocated at a time, from the trace of allocations."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = [event for event in json.loads(trace.read_bytes())["traceEvents"] if event["name"] == "[memory]"]
    changes: list[int] = [event["args"]["Bytes"] for event in sorted(events, key=lambda event: event["ts"])]
    return max(accumulate(changes))


def _resident(name: str) -> int:
    """`VmRSS` or `VmHWM` of this process in bytes."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return 1024 * int(line.split()[1])


def main() -> None:
    """Exit status 1 with the reason in the last line of standard error where the model cannot be trained so."""
    from trainer.errors import ModelError

    settings = TrainSettings.model_validate_json(sys.stdin.read())
    try:
        print(json.dumps(asdict(measured_here(settings, Path(sys.argv[1])))))
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()

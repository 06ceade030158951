"""Measures what a step of the trainer needs of a device's memory, by one step on made-up tokens.

`python -m grpo.trainer.dry_step FOLDER` makes the step with the model in FOLDER: it reads the trainer's settings as
JSON from standard input and prints the measurement as JSON.
"""

import gc
import json
import os
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from grpo.configs.train import TrainSettings
from grpo.transport.cores import set_allocator
from grpo.transport.records import Hint, MicroBatch, PreferencePair

if TYPE_CHECKING:
    import torch
    from grpo.trainer.memory import ActivationCheckpointing


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The result of a dry step, in bytes. On a CPU `in_step` and `between` are of the process alone."""

    checkpointing: "ActivationCheckpointing"
    """The activations that layers kept for the backward pass."""
    total: int
    """Memory of the device."""
    in_step: int
    """In use at the peak of a step, by all processes."""
    between: int
    """In use when the step is over and its memory is given back: weights, optimizer's state, libraries."""
    base: int
    """The part of `between` that is the frozen base, which a co-located trainer imports from the server."""
    kv: int
    """Keys and values of one token in the server's cache."""
    longest: int
    """Tokens of the longest sequence that the model allows."""

    @property
    def needed(self) -> int:
        """In use at the peak of a step, without the base."""
        return self.in_step - self.base


def batches(settings: TrainSettings, *, num_tokens: int, vocab_size: int) -> list[MicroBatch]:
    """Returns two micro-batches of samples as long as may be, all of whose tokens but the first carry loss, with data
    for every loss that is on: nothing of `num_tokens` needs more memory. In the second the gradients of the first are
    there."""
    ids = np.random.default_rng(0).integers(0, vocab_size, num_tokens, np.int32)
    longest, loss = min(num_tokens, settings.sequence_len), settings.loss
    lengths = np.full(num_tokens // longest, longest, np.int32)
    lengths = np.append(lengths, np.int32(rest)) if (rest := num_tokens % longest) else lengths
    mask = np.concatenate([np.arange(length) > 0 for length in lengths])
    aligned, middle = np.arange(1, longest, dtype=np.int32), longest // 2
    hint = Hint(teacher_token_ids=ids[:longest], student_index=aligned, teacher_index=aligned, weight=1.0)
    pair = PreferencePair(
        prompt_ids=ids[:1],
        chosen_ids=ids[1:middle],
        rejected_ids=ids[middle:longest],
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
            num_micro_batches=2,
            token_ids=ids,
            sequence_lengths=lengths,
            loss_mask=mask,
            inference_logprobs=np.where(mask, -np.log(vocab_size), 0).astype(np.float32),
            advantages=np.ones(len(lengths), np.float32),
            temperatures=np.ones(len(lengths), np.float32),
            version_runs=np.array([[0, num_tokens]], np.int32),
            teacher_logprobs=np.zeros(num_tokens, np.float32) if loss.teacher_tau else None,
            hints=tuple((index, hint) for index in range(num_tokens // longest)) if loss.alpha_sdpo else (),
            pairs=(pair,) * (num_tokens // longest) if loss.beta_replay else (),
            rollout_ids=("dry",) * len(lengths),
        )
        for index in range(2)
    ]


def measured_here(settings: TrainSettings, folder: Path) -> Measurement:
    """Returns what a step needs, made in this process with the first of `checkpointing_kinds` that fits. Raises
    `ModelError`, and torch's `OutOfMemoryError` if none fits."""
    import torch
    from grpo.trainer.memory import checkpointing_kinds
    from grpo.trainer.startup import device_for, set_threads, warn_of_cpu

    device = device_for(settings.device)
    warn_of_cpu(settings.device, device)
    set_threads(settings.num_threads)
    *first, last = checkpointing_kinds(settings, device, shared=True)
    for kind in first:
        with suppress(torch.OutOfMemoryError):
            return _measured(settings, folder, device, kind)
        gc.collect()  # what is left of the step that did not fit
    return _measured(settings, folder, device, last)


def _measured(
    settings: TrainSettings, folder: Path, device: "torch.device", checkpointing: "ActivationCheckpointing"
) -> Measurement:
    import psutil
    import torch
    from grpo.trainer.distributed import ONE
    from grpo.trainer.flops import attention_heads
    from grpo.trainer.memory import release_memory
    from grpo.trainer.model import load_policy
    from grpo.trainer.objective import Objective
    from grpo.trainer.optim import Optimizer
    from transformers import AutoConfig

    release_memory(device)
    policy = load_policy(settings, folder, device, checkpointing=checkpointing)
    objective = Objective(policy, settings.loss, ONE, pack_tokens=settings.pack_tokens)
    optimizer = Optimizer(settings, policy.named_parameters)
    first = min(64, settings.pack_tokens)  # what libraries take once is not the step's
    for num_tokens in (first, settings.pack_tokens):
        release_memory(device)
        _forget_peak(device)
        objective.accumulate(batches(settings, num_tokens=num_tokens, vocab_size=policy.vocab_size), step=1)
        optimizer.step(learning_rate=0.0)
    in_step = _in_use(device, peak=True)
    release_memory(device)
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False).get_text_config()
    return Measurement(
        checkpointing=checkpointing,
        total=torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else psutil.virtual_memory().total,
        in_step=in_step,
        between=_in_use(device, peak=False),
        base=policy.base_bytes,
        kv=sum(2 * num_heads * size * policy.dtype.itemsize for _, num_heads, size in attention_heads(config)),
        longest=config.max_position_embeddings,
    )


def _in_use(device: "torch.device", *, peak: bool) -> int:
    """Returns bytes in use: of a GPU by all processes, torch's peak included; on a CPU this process's resident set, or
    its peak."""
    import torch

    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        above = torch.cuda.max_memory_reserved(device) - torch.cuda.memory_reserved(device)
        return total - free + (above if peak else 0)
    name = "VmHWM:" if peak else "VmRSS:"
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


def _forget_peak(device: "torch.device") -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def main() -> None:
    """Exits with 1, and the reason in the last line of standard error, if no step can be made."""
    set_allocator(os.environ)  # as the trainer
    import torch
    from grpo.trainer.errors import ModelError

    settings = TrainSettings.model_validate_json(sys.stdin.read())
    try:
        print(json.dumps(asdict(measured_here(settings, Path(sys.argv[1])))))
    except (ModelError, torch.cuda.OutOfMemoryError) as error:
        print("error:", str(error).replace("\n", " "), file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()

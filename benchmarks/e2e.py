"""Whole steps of GRPO side by side: three programs of ours against TRL's `GRPOTrainer`, on the same two cores.

    python -m benchmarks.e2e [--check] [--steps N] [--only CASE ...]

needs the extra `bench`. Both get the same model, prompts, rewards, group size, lengths and number of optimizer steps;
both train LoRA 16 on all linear layers with AdamW at the same rate, with beta 0 and every token sampled at temperature
1. The cases:

- `fixed`: a random 29M Qwen3 in bfloat16 that never ends an answer: 64 rollouts a step of 128 tokens each
- `log-normal`: the same model, but its answers end at log-normal lengths (median 40, sigma 1), or at 128 tokens. The
  end is sampled from the weights; see benchmarks/e2e_model.py
- `quickstart`: the embedded model and the settings of configs/quickstart, in float32

Ours is the `grpo` command with vLLM on the CPU, as a user starts it: how the cores are divided is its own decision.
TRL generates with transformers, which is its way on a CPU, in one process that has both cores. It is given what is best
for it here: two threads, all rollouts of a step in one call of `generate` and one forward pass, weights in the case's
type, no gradient checkpointing, no reference model, the samples used once, and the settings of the allocator that our
trainer sets for itself. `trl_micro_batch` is the number of samples that it computes at once; the best of several was
chosen by hand.

Rollouts a second are those of a step, by the median of the steps' seconds from the end of the second step on; what
comes before fills caches and the pipeline. Both processes run one after the other, start-up is not counted.
The last line is one JSON object. `--check` exits 1 where a target is missed.
"""

import contextlib
import itertools
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import yaml

from benchmarks.grpo_step import keeping_freed_memory
from benchmarks.report import parser, report
from orchestrator.envs.base import Environment
from orchestrator.envs.reverse_text import prompt, words
from orchestrator.rollouts.rubric import Rubric

NUM_CORES = 2
NUM_SKIPPED = 2
"""Steps before the measurement."""
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK, ALPHA = 16, 32
QUICKSTART = Path(__file__).parents[1] / "configs/quickstart"
NUM_WORDS = 10_000
LIMIT_S = 1800.0
"""What one run may take."""


def noise(completion: str, example: Mapping[str, Any]) -> float:
    """A reward that no policy can learn: the lengths must stay as they are."""
    return zlib.crc32(completion.encode()) % 1000 / 1000


class Noise(Environment):
    """The prompts of reverse-text with that reward."""

    rubric = Rubric([noise])

    def dataset(self, split: str) -> Sequence[Mapping[str, Any]]:
        return [{"prompt": prompt(word), "word": word} for word in train_words()]


def train_words() -> list[str]:
    """What is asked, in both contenders: reverse-text's examples with its defaults."""
    return words(0, NUM_WORDS, 3, 8, "train")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is compared, and how many times as fast ours must be."""

    name: str
    wanted: float
    ends: str | None
    """As in e2e_model; None for the embedded model."""
    dtype: str
    batch_size: int
    group_size: int
    max_tokens: int
    learning_rate: float
    weight_decay: float
    adam_beta2: float
    seq_len: int
    """Of our packed micro-batches, in tokens."""
    trl_micro_batch: int

    @property
    def env(self) -> dict[str, str]:
        """Our environment."""
        return {"id": "reverse-text"} if self.ends is None else {"id": f"{Path(__file__)}:Noise"}


RANDOM: dict[str, Any] = {
    "dtype": "bfloat16",
    "batch_size": 64,
    "group_size": 8,
    "max_tokens": 128,
    "learning_rate": 1e-5,
    "weight_decay": 0.0,
    "adam_beta2": 0.999,
    "seq_len": 2048,
    "trl_micro_batch": 64,
}
CASES = (
    Case(name="fixed", wanted=2.0, ends="never", **RANDOM),
    Case(name="log-normal", wanted=2.5, ends="log-normal", **RANDOM),
    Case(
        name="quickstart",
        wanted=1.0,
        ends=None,
        dtype="float32",
        batch_size=256,
        group_size=16,
        max_tokens=12,
        learning_rate=1e-3,
        weight_decay=0.0,
        adam_beta2=0.99,
        seq_len=4096,
        trl_micro_batch=256,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One contender's run."""

    step_s: Sequence[float]
    """Of each step that counts."""
    mean_tokens: float
    """Of an answer."""
    phases_s: Mapping[str, float]
    """Median seconds of a step in each phase; ours overlap."""


# --- ours ---


def measure_ours(case: Case, model: Path, folder: Path, *, num_steps: int) -> Measured:
    """Runs the `grpo` command to its end. Raises RuntimeError with its output where it fails."""
    write_settings(case, model, folder / "settings", num_steps=num_steps)
    run = folder / "run"
    files = [
        word for role in ("train", "infer", "orch") for word in (f"--{role}", str(folder / f"settings/{role}.yaml"))
    ]
    command = [sys.executable, "-m", "grpo.cli", *files, "--output_dir", str(run)]
    log = folder / "grpo.log"
    with log.open("w") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, timeout=LIMIT_S)
    if done.returncode != 0:
        raise RuntimeError(f"grpo ended with {done.returncode}:\n{log.read_text()[-4000:]}")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line.get("time/step_s") and line["progress/step"] > NUM_SKIPPED]
    summary = json.loads((run / "summary.json").read_text())
    names = ("generate", "train", "wait_batch", "wait_trainer", "publish", "load")
    return Measured(
        step_s=[line["time/step_s"] for line in steps],
        mean_tokens=summary["tokens"]["generate"] / summary["rollouts_issued"],
        phases_s={name: statistics.median(line[f"time/{name}_s"] for line in steps) for name in names},
    )


def write_settings(case: Case, model: Path, folder: Path, *, num_steps: int) -> None:
    """A run.yaml, as configs/quickstart has it."""
    infer = {"model": str(model), "dtype": case.dtype, "max_lora_rank": RANK, "max_model_len": case.max_tokens + 128}
    train = {
        "model": str(model),
        "recipe": {"bfloat16": "bf16", "float32": "fp32"}[case.dtype],
        "sequence_len": case.seq_len,
        "learning_rate": case.learning_rate,
        "optimizer": "adamw",
        "weight_decay": case.weight_decay,
        "adam_beta2": case.adam_beta2,
        "lora_rank": RANK,
        "lora_alpha": ALPHA,
    }
    orch = {
        "model": {"name": str(model), "lora_rank": RANK, "lora_alpha": ALPHA},
        "env": [case.env],
        "batch_size": case.batch_size,
        "rollouts_per_example": case.group_size,
        "seq_len": case.seq_len,
        "max_steps": num_steps,
        "sampling": {"max_tokens": case.max_tokens},
        "eval": {"num_examples": 0},
    }
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text(yaml.safe_dump({"train": train, "infer": infer, "orch": orch}))


# --- TRL's ---


def measure_trl(case: Case, model: Path, folder: Path, *, num_steps: int) -> Measured:
    """Runs GRPOTrainer in a process of its own. Raises RuntimeError where that ends without a result."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_trl, args=(case, str(model), str(folder), num_steps, theirs))
    with keeping_freed_memory():
        process.start()
    theirs.close()
    try:
        if not ours.poll(LIMIT_S):
            raise RuntimeError(f"TRL took longer than {LIMIT_S:g} s")
        measured: Measured = ours.recv()
    except EOFError:
        raise RuntimeError("TRL's process ended without a result; see above") from None
    finally:
        process.terminate()
        process.join()
    return measured


def run_trl(case: Case, model: str, folder: str, num_steps: int, connection: Connection) -> None:
    """The process: trains, and sends what was measured. What TRL prints is left out."""
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        connection.send(trained_by_trl(case, model, folder, num_steps))


def trained_by_trl(case: Case, model: str, folder: str, num_steps: int) -> Measured:
    """GRPOTrainer from its construction to its last step."""
    import warnings

    warnings.filterwarnings("ignore")
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(NUM_CORES)
    generate_s: list[float] = []
    ended_s: list[float] = []
    num_tokens: list[int] = []

    class Timed(GRPOTrainer):  # type: ignore[misc]
        """Measures what a step spends on generation."""

        def _generate(self, prompts: Any, *args: Any, **options: Any) -> Any:
            began_s = time.perf_counter()
            made = super()._generate(prompts, *args, **options)
            generate_s.append(time.perf_counter() - began_s)
            num_tokens.extend(len(ids) for ids in made[1])
            return made

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ended_s.append(time.perf_counter())

    def reward(completions: Any, word: Any, **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        if case.ends is not None:
            return [noise(text, {}) for text in texts]
        return [float(text.strip() == one[::-1]) for text, one in zip(texts, word, strict=True)]

    num_micro_batches = case.batch_size // case.trl_micro_batch
    trainer = Timed(
        AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, case.dtype)),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=f"{folder}/trl",
            use_cpu=True,
            bf16=False,  # the weights are in bfloat16 already; autocast would only add casts
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            max_steps=num_steps,
            num_generations=case.group_size,
            per_device_train_batch_size=case.trl_micro_batch,
            gradient_accumulation_steps=num_micro_batches,
            steps_per_generation=num_micro_batches,
            max_completion_length=case.max_tokens,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            beta=0.0,
            num_iterations=1,
            gradient_checkpointing=False,
            optim="adamw_torch",
            learning_rate=case.learning_rate,
            lr_scheduler_type="constant",
            weight_decay=case.weight_decay,
            adam_beta2=case.adam_beta2,
            dataloader_pin_memory=False,
        ),
        train_dataset=Dataset.from_list(
            [{"prompt": [{"role": "user", "content": prompt(word)}], "word": word} for word in train_words()]
        ),
        processing_class=AutoTokenizer.from_pretrained(model),
        peft_config=LoraConfig(
            r=RANK, lora_alpha=ALPHA, target_modules=list(TARGETS), lora_dropout=0.0, task_type="CAUSAL_LM"
        ),
        callbacks=[Clock()],
    )
    trainer.train()
    step_s = [after - before for before, after in itertools.pairwise(ended_s)][NUM_SKIPPED - 1 :]
    generation_s = statistics.median(generate_s[NUM_SKIPPED:])
    phases_s = {"generate": generation_s, "train": statistics.median(step_s) - generation_s}
    return Measured(step_s=step_s, mean_tokens=statistics.mean(num_tokens), phases_s=phases_s)


# --- both ---


def compare(case: Case, folder: Path, *, num_steps: int) -> dict[str, float]:
    """Runs both, and returns the figures: medians."""
    if case.ends is None:
        model = QUICKSTART / "model"
    else:
        model = folder / "model"
        in_process(make_model, str(model), case.ends)
    figures: dict[str, float] = {}
    for name, measure in {"ours": measure_ours, "trl": measure_trl}.items():
        run = measure(case, model, folder, num_steps=num_steps)
        figures[f"{name}_step_s"] = step_s = statistics.median(run.step_s)
        figures[f"{name}_rollouts_per_s"] = case.batch_size / step_s
        figures[f"{name}_mean_tokens"] = run.mean_tokens
        figures |= {f"{name}_{phase}_s": seconds for phase, seconds in run.phases_s.items()}
    return figures | {"times_as_fast": figures["trl_step_s"] / figures["ours_step_s"]}


def make_model(path: str, ends: Any) -> None:
    """In a process of its own, so that this one does not import torch."""
    from benchmarks.e2e_model import make_model

    make_model(Path(path), ends=ends)


def in_process(target: Any, *args: Any) -> None:
    """Runs a function in a fresh process. Raises RuntimeError where it fails."""
    process = multiprocessing.get_context("spawn").Process(target=target, args=args)
    process.start()
    process.join()
    if process.exitcode != 0:
        raise RuntimeError(f"{target.__name__} ended with exit code {process.exitcode}; see above")


def main() -> int:
    """The command."""
    command = parser(__doc__)
    command.add_argument("--steps", type=int, default=10, help="optimizer steps of each run, at least 4 (default: 10)")
    command.add_argument("--only", nargs="+", choices=[case.name for case in CASES], help="cases (default: all)")
    options = command.parse_args()
    if options.steps < NUM_SKIPPED + 2:
        command.error(f"--steps is {options.steps}, expected at least {NUM_SKIPPED + 2}")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:NUM_CORES])
    print(f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}")
    figures: dict[str, float] = {}
    for case in CASES:
        if options.only is None or case.name in options.only:
            with tempfile.TemporaryDirectory() as folder:
                found = compare(case, Path(folder), num_steps=options.steps)
            figures |= {f"{case.name} {key}": value for key, value in found.items()}
    targets = {f"{case.name} times_as_fast": (">=", case.wanted) for case in CASES}
    return report("e2e", figures, targets, check=options.check)


if __name__ == "__main__":
    raise SystemExit(main())

"""Whole steps of GRPO side by side: three programs of ours against TRL's `GRPOTrainer`, on the same two cores.

    python -m benchmarks.e2e [--check] [--rounds N] [--steps N] [--only CASE ...]

needs the extra `bench`. Both get the same model, prompts, rewards, group size, lengths and number of optimizer steps;
both train LoRA 16 on all linear layers with AdamW at the same rate, with beta 0 and every token sampled at temperature
1. The cases:

- `fixed`: a random 29M Qwen3 in bfloat16 that never ends an answer: 64 rollouts a step of 128 tokens each
- `log-normal`: the same model, but its answers end at log-normal lengths (median 40, sigma 1), or at 128 tokens
- `log-normal-oversampled`: the same, but ours begins the next batches' groups while long answers go on
  (`oversampling_factor: 2`), so that it trains on rollouts that are two versions old instead of one
- `quickstart`: the embedded model and the settings of configs/quickstart, in float32

Ours is the `grpo` command with vLLM on the CPU, as a user starts it: how the cores are divided is its own decision. Its
micro-batches are as long as the quickstart's. TRL generates with transformers, which is its way on a CPU, in one
process that has both cores. It is given what is best for it here: two threads, all rollouts of a step in one call of
`generate` and in one forward pass, weights in the case's type, no gradient checkpointing, no reference model, the
samples used once, and the settings of the allocator that our trainer sets for itself.

They run in turn, `--rounds` times. Seconds are the medians over the rounds of a round's median step from the third on;
start-up is not counted.
"""

import contextlib
import itertools
import json
import multiprocessing
import os
import statistics
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo.environments.reverse_text import ReverseText, exact
from grpo.orchestrator.rollouts.environment import Environment
from grpo.orchestrator.rollouts.rubric import Rubric

from benchmarks.grpo_step import TARGETS, keeping_freed_memory
from benchmarks.report import parser, report
from tests.e2e.runs import trained
from tests.support import options
from tools.random_models import MID, QUICKSTART_MODEL, make_random

NUM_CORES, NUM_SKIPPED, RANK, ALPHA = 2, 2, 16, 32
BEGIN_ID, END_ID = 257, 258
EXAMPLES = ReverseText().dataset("train")
Measured = tuple[list[float], float]
"""Seconds of each step that counts, and the mean number of an answer's tokens."""


def noise(completion: str, example: Mapping[str, Any]) -> float:
    """A reward that no policy can learn: the lengths must stay as they are."""
    return zlib.crc32(completion.encode()) % 1000 / 1000


class Noise(Environment):
    """The prompts of reverse-text with that reward."""

    rubric = Rubric([noise])

    def dataset(self, split: str) -> Sequence[Mapping[str, Any]]:
        return EXAMPLES


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison, and how many times as fast ours must be. The defaults are those of the random model."""

    wanted: float
    ends: tuple[float, float] | None
    """Passed to `make_model`; None for the embedded model."""
    dtype: str = "bfloat16"
    batch_size: int = 64
    group_size: int = 8
    max_tokens: int = 128
    learning_rate: float = 1e-5
    adam_beta2: float = 0.999
    oversampling: float = 1.0
    """Our `oversampling_factor`."""


LOG_NORMAL = (8.35, -0.03)
CASES = {
    "fixed": Case(wanted=2.7, ends=(-134.0, 0.0)),
    "log-normal": Case(wanted=5.0, ends=LOG_NORMAL),
    "log-normal-oversampled": Case(wanted=5.0, ends=LOG_NORMAL, oversampling=2.0),
    "quickstart": Case(
        wanted=2.5,
        ends=None,
        dtype="float32",
        batch_size=256,
        group_size=16,
        max_tokens=12,
        learning_rate=1e-3,
        adam_beta2=0.99,
    ),
}


def make_model(path: Path, ends: tuple[float, float]) -> None:
    """Saves a random 29M Qwen3 in bfloat16 whose answers never end, or at log-normal lengths.

    The end is sampled like every other token, so both contenders get the same distribution from the same weights. Three
    entries of the residual stream are kept free of the random layers: one that is the same for every token; one that
    marks where messages begin; and the mean of that over all tokens so far, which falls as 1 / t and is made by a head
    that attends to all of them alike. `ends` are the weights of the first and the last in the end's logit: with 8.35
    and -0.03, found by search, the distribution function of the lengths is within 0.05 of the log-normal one.
    """
    import torch
    from transformers import AutoModelForCausalLM

    same, mark, age = own = (0, 1, 2)
    model = AutoModelForCausalLM.from_pretrained(make_random(path, MID), dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
                projection.weight[[*own]] = 0.0
        attention = model.model.layers[0].self_attn
        attention.q_proj.weight[: attention.head_dim] = 0.0
        attention.v_proj.weight[0] = 0.0
        attention.v_proj.weight[0, mark] = attention.o_proj.weight[age, 0] = 1.0
        embedding = model.model.embed_tokens.weight
        embedding[:, [*own]] = torch.tensor([0.06, 0.0, 0.0])
        embedding[BEGIN_ID, mark] = 4.0
        embedding[END_ID] = 0.0
        embedding[END_ID, [same, age]] = torch.tensor(ends)
        # Large here, so that the entries are small elsewhere: other logits must not lose precision.
        model.model.norm.weight[[*own]] = torch.tensor([100.0, 0.0, 100.0])
    model.to(torch.bfloat16).save_pretrained(path)


def measure_ours(case: Case, model: Path, folder: Path, num_steps: int) -> Measured:
    """Runs the `grpo` command to its end."""
    own_env = {"orch.env": json.dumps([{"id": f"{Path(__file__)}:Noise"}])} if case.ends else {}
    settings = own_env | {
        "model": model,
        "max_steps": num_steps,
        "train.recipe": {"bfloat16": "bf16", "float32": "fp32"}[case.dtype],
        "train.learning_rate": case.learning_rate,
        "train.adam_beta2": case.adam_beta2,
        "infer.dtype": case.dtype,
        "infer.max_model_len": case.max_tokens + 128,
        "orch.batch_size": case.batch_size,
        "orch.rollouts_per_example": case.group_size,
        "orch.oversampling_factor": case.oversampling,
        "orch.sampling.max_tokens": case.max_tokens,
        "orch.eval.num_examples": 0,
    }
    run = trained("configs/quickstart", folder, *options(settings))
    mean_tokens = statistics.mean(line["rollout/num_tokens_mean"] for line in run.steps)
    return [line["time/step_s"] for line in run.steps[NUM_SKIPPED:]], mean_tokens


def measure_trl(case: Case, model: Path, folder: Path, num_steps: int) -> Measured:
    """Runs GRPOTrainer to its last step."""
    warnings.filterwarnings("ignore")
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(NUM_CORES)
    ended_s: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ended_s.append(time.perf_counter())

    def reward(completions: Any, word: Any, **_: Any) -> list[float]:
        score = exact if case.ends is None else noise
        return [score(said[0]["content"], {"word": one}) for said, one in zip(completions, word, strict=True)]

    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, case.dtype)),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=str(folder),
            use_cpu=True,
            bf16=False,  # the weights are in bfloat16 already; autocast would only add casts
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            max_steps=num_steps,
            num_generations=case.group_size,
            per_device_train_batch_size=case.batch_size,
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
            weight_decay=0.0,
            adam_beta2=case.adam_beta2,
            dataloader_pin_memory=False,
        ),
        train_dataset=Dataset.from_list(
            [{"prompt": [{"role": "user", "content": one["prompt"]}], "word": one["word"]} for one in EXAMPLES]
        ),
        processing_class=AutoTokenizer.from_pretrained(model),
        peft_config=LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(TARGETS), task_type="CAUSAL_LM"),
        callbacks=[Clock()],
    )
    with contextlib.redirect_stdout(None):
        trainer.train()
    lengths = [line["completions/mean_length"] for line in trainer.state.log_history[:num_steps]]
    step_s = [after - before for before, after in itertools.pairwise(ended_s)]
    return step_s[NUM_SKIPPED - 1 :], statistics.mean(lengths)


def in_process(work: Callable[..., Any], *args: Any) -> Any:
    """Runs `work` in a process of its own, so that this one imports no torch, and returns its result."""
    with keeping_freed_memory(), ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *args).result()


def compare(case: Case, folder: Path, *, num_steps: int, num_rounds: int) -> dict[str, float]:
    """Runs both in turn, and returns the figures."""
    model = QUICKSTART_MODEL
    if case.ends is not None:
        model = folder / "model"
        in_process(make_model, model, case.ends)
    rounds: dict[str, list[Measured]] = {"ours": [], "trl": []}
    for number in range(num_rounds):
        rounds["ours"].append(measure_ours(case, model, folder / f"ours_{number}", num_steps))
        rounds["trl"].append(in_process(measure_trl, case, model, folder / f"trl_{number}", num_steps))
    figures: dict[str, float] = {}
    for name, measured in rounds.items():
        figures[f"{name}_step_s"] = statistics.median(statistics.median(step_s) for step_s, _ in measured)
        figures[f"{name}_mean_tokens"] = statistics.median(mean_tokens for _, mean_tokens in measured)
    return figures | {"times_as_fast": figures["trl_step_s"] / figures["ours_step_s"]}


def main() -> int:
    """The command."""
    command = parser(__doc__)
    command.add_argument("--steps", type=int, default=8, help="optimizer steps of each run, at least 4 (default: 8)")
    command.add_argument("--rounds", type=int, default=3, help="runs of each contender (default: 3)")
    command.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="cases (default: all)")
    given = command.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:NUM_CORES])
    figures: dict[str, float] = {}
    for name in given.only:
        with tempfile.TemporaryDirectory() as folder:
            found = compare(CASES[name], Path(folder), num_steps=given.steps, num_rounds=given.rounds)
        figures |= {f"{name} {key}": value for key, value in found.items()}
    targets = {f"{name} times_as_fast": (">=", case.wanted) for name, case in CASES.items()}
    return report("e2e", figures, targets, check=given.check)


if __name__ == "__main__":
    raise SystemExit(main())

"""One GRPO step on the same samples, by this trainer and by TRL, each in a process of its own.

A step here is what a trainer computes between a batch and an optimizer's step: forward, loss, metrics and backward of
all samples. TRL's is `GRPOTrainer.compute_loss` with its defaults (gradient checkpointing on), on batches padded as it
pads them. From 1.15 on it computes the LM head in tiles of 32,768 tokens; `full_logits` makes all logits instead, as it
did until 1.14, by TRL's own functions for log-probabilities and entropy.
"""

import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from tools.random_models import QUICKSTART_MODEL, TOKENIZER_FILES

VOCAB, HIDDEN, LAYERS, RANK = 151_936, 256, 4, 16
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NUM_GROUPS, GROUP, MEDIAN, CAP = 2, 8, 64, 512
PACK_TOKENS = 2048
"""The trainer's default `sequence_len`."""


@contextmanager
def keeping_freed_memory() -> Iterator[None]:
    """Processes that are started within keep the memory that they free, as our trainer does (`trainer/memory.py`): a
    peer has the allocator's settings that are best for both."""
    settings = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}
    os.environ |= settings
    try:
        yield
    finally:
        for name in settings:
            del os.environ[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A prompt with one of its completions."""

    prompt: np.ndarray
    completion: np.ndarray
    advantage: float


def samples(*, silent_groups: int = 0) -> list[Sample]:
    """Returns the same samples each time: lengths of prompts and completions are log-normal, σ = 1. The last
    `silent_groups` have equal rewards: advantages of 0."""
    random = np.random.default_rng(0)

    def lengths(count: int) -> list[int]:
        drawn = np.exp(random.normal(np.log(MEDIAN), 1.0, count)).round().astype(int)
        return [int(length) for length in np.clip(drawn, 2, CAP)]

    def ids(length: int) -> np.ndarray:
        return random.integers(2, VOCAB, length, np.int32)

    return [
        Sample(
            prompt=prompt,
            completion=ids(length),
            advantage=float(random.standard_normal()) * (group < NUM_GROUPS - silent_groups),
        )
        for group, prompt in enumerate(map(ids, lengths(NUM_GROUPS)))
        for length in lengths(GROUP)
    ]


def num_tokens(chosen: Sequence[Sample]) -> int:
    """Real tokens: prompts, once for each sample, and completions."""
    return sum(len(sample.prompt) + len(sample.completion) for sample in chosen)


def save_model(folder: Path, dtype: str) -> None:
    """A random Qwen3, with the embedded model's tokenizer, which TRL asks for."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copyfile(QUICKSTART_MODEL / name, folder / name)


class Ours:
    """This trainer's objective on micro-batches as the orchestrator packs them."""

    def __init__(self, folder: Path, dtype: str) -> None:
        from grpo.configs.loss import LossSettings
        from grpo.trainer.distributed import ONE
        from grpo.trainer.memory import keep_freed_memory
        from grpo.trainer.objective import Objective

        keep_freed_memory()
        self._policy = load_policy_of(folder, dtype, sequence_len=PACK_TOKENS, gradient_checkpointing=True)
        self.named_parameters = self._policy.named_parameters
        set_adapter(self.named_parameters)
        self._objective = Objective(self._policy, LossSettings(), ONE, pack_tokens=PACK_TOKENS)

    def step_on(self, chosen: Sequence[Sample], **_: Any) -> Callable[[], object]:
        """Leaves the gradients of the samples."""
        batches = self._on_policy(packed(chosen))
        return lambda: self._objective.accumulate(batches, step=1)

    def _on_policy(self, batches: Sequence[Any]) -> list[Any]:
        """With this model's own log-probabilities as the server's, which makes all ratios 1, as TRL assumes."""
        import torch
        from grpo.trainer.packing import packed_tokens
        from msgspec.structs import replace

        result = []
        for batch in batches:
            logprobs = np.zeros(len(batch.token_ids), np.float32)
            with torch.no_grad():
                logprobs[batch.loss_mask] = self._policy.logprobs(packed_tokens(batch, torch.device("cpu"))).numpy()
            result.append(replace(batch, inference_logprobs=logprobs))
        return result


def load_policy_of(folder: Path, dtype: str, **options: Any) -> Any:
    """The model with its adapter, on the CPU."""
    import torch
    from grpo.configs.train import TrainSettings
    from grpo.trainer.model import load_policy

    fields = {"recipe": "fp32" if dtype == "float32" else "bf16", "seed": 0, "lora_rank": RANK, "lora_alpha": 2 * RANK}
    settings = TrainSettings.model_validate({"model": str(folder)} | fields | options)
    return load_policy(settings, folder, torch.device("cpu"))


def packed(chosen: Sequence[Sample]) -> Sequence[Any]:
    """Micro-batches of at most 2,048 tokens."""
    from grpo.orchestrator.packing import pack
    from grpo.transport.records import TrainingSample

    made = []
    for number, sample in enumerate(chosen):
        ids = np.concatenate([sample.prompt, sample.completion])
        made.append(
            TrainingSample(
                token_ids=ids,
                loss_mask=np.arange(len(ids)) >= len(sample.prompt),
                inference_logprobs=np.zeros(len(ids), np.float32),
                advantages=sample.advantage,
                temperatures=1.0,
                policy_versions=((0, len(ids)),),
                env="random",
                group_id=str(number // GROUP),
                rollout_id=str(number),
                reward=0.0,
                stop_reason="stop",
            )
        )
    [batches] = pack(made, capacity=PACK_TOKENS, num_ranks=1, run_id="run", step=1)
    return batches


class Trl:
    """TRL's trainer, without its data, its generation and its optimizer."""

    def __init__(self, folder: Path, dtype: str) -> None:
        import torch
        from datasets import Dataset
        from peft import LoraConfig
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from trl import GRPOConfig

        self._trainer = grpo_trainer_class()(
            AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=GRPOConfig(
                output_dir=str(folder / "trl"),
                use_cpu=True,
                bf16=dtype == "bfloat16",
                report_to=[],
                num_generations=GROUP,
                max_completion_length=CAP,
            ),
            train_dataset=Dataset.from_list([{"prompt": "a"}] * GROUP),
            processing_class=AutoTokenizer.from_pretrained(folder),
            peft_config=LoraConfig(
                r=RANK, lora_alpha=2 * RANK, target_modules=list(TARGETS), lora_dropout=0.0, task_type="CAUSAL_LM"
            ),
        )
        self._trainer.model.train()
        # Its normaliser is that of all tokens of the step, however many micro-batches it is made of.
        self._trainer.current_gradient_accumulation_steps = self._trainer.args.steps_per_generation
        self.named_parameters = {n: p for n, p in self._trainer.model.named_parameters() if p.requires_grad}
        set_adapter(self.named_parameters)

    def step_on(self, chosen: Sequence[Sample], *, size: int, full_logits: bool) -> Callable[[], None]:
        """Leaves the gradients of the samples, `size` of them at a time."""
        import torch

        total = torch.tensor(float(sum(len(sample.completion) for sample in chosen)))
        inputs = [padded(chosen[start : start + size], total) for start in range(0, len(chosen), size)]

        def step() -> None:
            self._trainer.full_logits = full_logits
            for one in inputs:
                self._trainer.compute_loss(self._trainer.model, one).backward()

        return step


def padded(part: Sequence[Sample], total: Any) -> dict[str, Any]:
    """Pads generated completions as TRL does: prompts padded on the left, completions on the right."""
    import torch
    from trl.trainer.utils import pad

    batch = {"advantages": torch.tensor([sample.advantage for sample in part]), "num_items_in_batch": total}
    for name, side in (("prompt", "left"), ("completion", "right")):
        ids = [torch.from_numpy(getattr(sample, name).astype(np.int64)) for sample in part]
        batch[f"{name}_ids"] = pad(ids, padding_value=0, padding_side=side)
        batch[f"{name}_mask"] = pad([torch.ones_like(one) for one in ids], padding_value=0, padding_side=side)
    return batch


def grpo_trainer_class() -> Any:
    """TRL's, which computes the logits as it did until 1.14 where `full_logits` is set."""
    from trl import GRPOTrainer
    from trl.trainer.utils import selective_log_softmax_and_entropy

    class Trainer(GRPOTrainer):  # type: ignore[misc]
        full_logits = False

        def _get_per_token_logps_and_entropies(
            self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, **options: Any
        ) -> tuple[Any, Any, Any]:
            if not self.full_logits:
                return super()._get_per_token_logps_and_entropies(  # type: ignore[no-any-return]
                    model, input_ids, attention_mask, logits_to_keep, **options
                )
            output = model(
                input_ids=input_ids, attention_mask=attention_mask, logits_to_keep=logits_to_keep + 1, use_cache=False
            )
            logits = output.logits[:, :-1, :][:, -logits_to_keep:, :] / self.temperature
            completion_ids = input_ids[:, -logits_to_keep:]
            return *selective_log_softmax_and_entropy(logits, completion_ids, entropy_requires_grad=False), None

    return Trainer


def set_adapter(named_parameters: dict[str, Any]) -> None:
    """Sets the adapter as at the start of a run: a random A, the same in both trainers, and B zero."""
    import torch

    random = torch.Generator().manual_seed(0)
    for name in sorted(named_parameters):
        with torch.no_grad():
            parameter = named_parameters[name]
            drawn = torch.randn(parameter.shape, generator=random) * 0.02
            parameter.copy_(drawn if "lora_A" in name else torch.zeros_like(drawn))


def serve(kind: str, folder: str, dtype: str, num_threads: int, connection: Connection) -> None:
    """A contender's process. Says what it holds in bytes once it has loaded, then answers each request (samples,
    options) with seconds, the peak of its memory above that, and the norm of the gradients; ends on None."""
    import torch

    warnings.filterwarnings("ignore")
    torch.set_num_threads(num_threads)
    contender: Any = Ours(Path(folder), dtype) if kind == "ours" else Trl(Path(folder), dtype)
    module = contender._policy._model if kind == "ours" else contender._trainer.model
    for parameter in module.parameters():
        parameter.sum()  # a weight that is mapped from its file is in memory once it is read
    before = resident_bytes("VmRSS")
    connection.send(before)
    while (request := connection.recv()) is not None:
        count, options = request
        own = dict(options)
        step = contender.step_on(samples(silent_groups=own.pop("silent_groups", 0))[:count], **own)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins again at what is resident
        began_s = time.perf_counter()
        step()
        seconds, peak = time.perf_counter() - began_s, resident_bytes("VmHWM") - before
        gradients = [p.grad for p in contender.named_parameters.values() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        for parameter in contender.named_parameters.values():
            parameter.grad = None
        connection.send((seconds, peak, norm))


def resident_bytes(name: str) -> int:
    """`VmRSS` or `VmHWM` of this process."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return 1024 * int(line.split()[1])

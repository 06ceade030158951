"""A step on samples that fork, by this trainer with and without sharing, and by TRL with its own tree packing: the part
`tree` of `python -m benchmarks.trainer`.

A random Qwen3 on the CPU whose LM head has the share of a token's work that it has in Qwen3-0.6B: 4 layers of hidden
size 256, a vocabulary of 4,096, LoRA 16 on all linear layers. `thinking`: conversations of 6 turns, each turn's sample
without the thinking of those before. `agents`: an episode and two sub-episodes at each of three places. `apart`:
samples that share nothing.

TRL's packing (`trl.experimental.async_grpo`) runs with flash attention 3 on GPUs alone. Here its kernel is torch's
attention, one call a run; the loss is its `compute_loss` without the metrics. Its head is used in two ways: in tiles of
all positions, as it runs on a CPU, and by hand with all logits of the labelled positions, which no setting gives.
Nobody recomputes activations. Seconds are those of the processor, all threads together, in turn.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.grpo_step import PACK_TOKENS, RANK, TARGETS, load_policy_of, set_adapter

VOCAB = 4_096


class Forked(NamedTuple):
    """A sample: its loss tokens are the last ones."""

    ids: np.ndarray
    num_loss: int
    group: int
    advantage: float


def forked(case: str, number: int) -> list[Forked]:
    """Returns the samples of so many conversations, agents or strangers, the same each time."""
    random = np.random.default_rng(0)

    def text(length: int) -> np.ndarray:
        return random.integers(2, VOCAB, length, np.int32)

    found = []
    for group in range(number):

        def add(*parts: np.ndarray, loss: int, group: int = group) -> None:
            found.append(Forked(np.concatenate(parts), loss, group, float(random.standard_normal())))

        history = text(256)
        if case == "thinking":
            for _ in range(6):
                thinking, answer = text(128), text(64)
                add(history, thinking, answer, loss=192)
                history = np.concatenate([history, answer, text(64)])
        elif case == "agents":
            for _ in range(3):
                for _ in range(2):
                    add(history, text(32), text(96), loss=96)
                history = np.concatenate([history, text(128)])
            add(history, text(64), loss=64)
        else:
            for _ in range(4):
                add(text(256), text(192), loss=192)
    return found


def save_tree_model(folder: Path, _: str = "") -> None:
    """The random Qwen3."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096}
    config = Qwen3Config(**sizes, **heads, tie_word_embeddings=True, eos_token_id=1, pad_token_id=0, bos_token_id=None)
    Qwen3ForCausalLM(config).save_pretrained(folder)


class Ours:
    """This trainer's objective on micro-batches as the orchestrator packs them."""

    def __init__(self, folder: Path) -> None:
        from grpo.configs.loss import LossSettings
        from grpo.trainer.distributed import ONE
        from grpo.trainer.memory import keep_freed_memory
        from grpo.trainer.objective import Objective

        keep_freed_memory()
        self._policy = load_policy_of(folder, "float32", sequence_len=PACK_TOKENS, gradient_checkpointing=False)
        self.named_parameters = self._policy.named_parameters
        set_adapter(self.named_parameters)
        self._objective = Objective(self._policy, LossSettings(), ONE, pack_tokens=PACK_TOKENS)

    def step_on(self, samples: Sequence[Forked]) -> Callable[[], object]:
        """Leaves the gradients of the samples, on policy."""
        import torch
        from grpo.orchestrator.packing import pack
        from grpo.trainer.packing import packed_tokens
        from grpo.transport.records import TrainingSample
        from msgspec.structs import replace

        made = [
            TrainingSample(
                token_ids=one.ids,
                loss_mask=np.arange(len(one.ids)) >= len(one.ids) - one.num_loss,
                inference_logprobs=np.zeros(len(one.ids), np.float32),
                advantages=one.advantage,
                temperatures=1.0,
                policy_versions=((0, len(one.ids)),),
                env="random",
                group_id=str(one.group),
                rollout_id=str(number),
                reward=0.0,
                stop_reason="stop",
            )
            for number, one in enumerate(samples)
        ]
        [packed] = pack(made, capacity=PACK_TOKENS, num_ranks=1, run_id="run", step=1)
        batches = []
        for batch in packed:
            logprobs = np.zeros(len(batch.token_ids), np.float32)
            with torch.no_grad():
                logprobs[batch.loss_mask] = self._policy.logprobs(packed_tokens(batch, torch.device("cpu"))).numpy()
            batches.append(replace(batch, inference_logprobs=logprobs))
        return lambda: self._objective.accumulate(batches, step=1)


class Unshared:
    """The same objective on rows of their own."""

    def __init__(self, ours: Ours) -> None:
        self._ours, self.named_parameters = ours, ours.named_parameters

    def step_on(self, samples: Sequence[Forked]) -> Callable[[], None]:
        """Leaves the gradients of the samples, on policy."""
        with _sharing_nothing():
            step = self._ours.step_on(samples)

        def unshared() -> None:
            with _sharing_nothing():
                step()

        return unshared


@contextlib.contextmanager
def _sharing_nothing() -> Iterator[None]:
    from grpo.orchestrator import packing
    from grpo.trainer import packing as tensors

    shared_prefixes, plan_tree = tensors.shared_prefixes, packing.plan_tree
    tensors.shared_prefixes = lambda ids, *_: (np.arange(len(ids)), np.arange(len(ids)))
    packing.plan_tree = lambda ids, _, **how: packing.plan([len(one) for one in ids], **how)
    try:
        yield
    finally:
        tensors.shared_prefixes, packing.plan_tree = shared_prefixes, plan_tree


class Trl:
    """TRL's `TreeRow`s, its model with the fused head, and its loss."""

    def __init__(self, folder: Path, *, full_logits: bool) -> None:
        import torch
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM
        from trl.experimental.async_grpo import packing
        from trl.trainer.utils import add_fused_lm_head

        packing.register_tree_attention()
        packing._flash_attn = lambda: _Kernel
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=packing.TREE_ATTENTION
        )
        add_fused_lm_head(model, temperature=1.0, outputs=("log_probs", "entropy"))
        options: dict[str, Any] = {"lora_dropout": 0.0, "task_type": "CAUSAL_LM"}
        config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=list(TARGETS), **options)
        self._model, self._full_logits = get_peft_model(model, config).train(), full_logits
        self.named_parameters = {n: p for n, p in self._model.named_parameters() if p.requires_grad}
        set_adapter(self.named_parameters)

    def step_on(self, samples: Sequence[Forked]) -> Callable[[], None]:
        """Leaves the gradients of the samples, whose groups stay together as its planner keeps them."""
        import torch
        from trl.experimental.async_grpo.packing import TreeRow

        rows = [TreeRow()]
        for one in samples:
            mask = torch.arange(len(one.ids)) >= len(one.ids) - one.num_loss
            sample: dict[str, Any] = {"input_ids": torch.from_numpy(one.ids).long(), "completion_mask": mask.long()}
            sample |= {"old_log_probs": torch.zeros(len(one.ids)), "advantage": one.advantage, "group_id": one.group}
            if not rows[-1].fits(sample, PACK_TOKENS):
                rows.append(TreeRow())
            rows[-1].add(sample)
        inputs, total = [row.pack() for row in rows], sum(one.num_loss for one in samples)
        for one in inputs:
            with torch.no_grad():
                one["old_log_probs"] = self._log_probs(one).detach()

        def step() -> None:
            for one in inputs:
                ratio = torch.exp(self._log_probs(one) - one["old_log_probs"])
                clipped = torch.clamp(ratio, 0.8, 1.2)
                loss = -torch.min(ratio * one["advantages"], clipped * one["advantages"]).sum() / total
                loss.backward()

        return step

    def _log_probs(self, row: dict[str, Any]) -> Any:
        from trl.trainer.utils import selective_log_softmax_and_entropy

        longest = row["tree_max_seqlens"].tolist()
        tree = {name: row[name] for name in ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")}
        tree |= {"tree_max_seqlen_q": longest[0], "tree_max_seqlen_k": longest[1]}
        both = {"input_ids": row["input_ids"][None], "position_ids": row["position_ids"][None], **tree}
        labels, index = row["shift_labels"], row["token_index"]
        if not self._full_logits:
            return self._model(shift_labels=labels[None], fused_lm_head=True, **both).log_probs.flatten()[index]
        base = self._model.get_base_model()
        chosen = (labels != -100).nonzero()[:, 0]
        logits = base.lm_head(base.model(use_cache=False, **both).last_hidden_state[0, chosen])
        found, _ = selective_log_softmax_and_entropy(logits, labels[chosen], entropy_requires_grad=False)
        return found.new_zeros(len(labels)).index_copy(0, chosen, found)[index]


class _Kernel:
    """Flash attention 3's function as TRL calls it, by torch's attention."""

    @staticmethod
    def flash_attn_varlen_func(
        q: Any, k: Any, v: Any, ends_q: Any, ends_k: Any, *_: int, softmax_scale: float, **__: Any
    ) -> Any:
        import torch

        sizes = [torch.diff(ends).tolist() for ends in (ends_q, ends_k)]
        outputs = []
        for queries, keys, values in zip(q.split(sizes[0]), k.split(sizes[1]), v.split(sizes[1]), strict=True):
            whole = len(queries) == len(keys)
            heads_first = [one.transpose(0, 1)[None] for one in (queries, keys, values)]
            mask = None if whole else _mask(len(queries), len(keys))
            options: Any = {"attn_mask": mask, "is_causal": whole, "scale": softmax_scale, "enable_gqa": True}
            output = torch.nn.functional.scaled_dot_product_attention(*heads_first, **options)
            outputs.append(output[0].transpose(0, 1))
        return torch.cat(outputs)


@functools.cache
def _mask(num_queries: int, num_keys: int) -> Any:
    import torch

    seen = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
    return torch.zeros(num_queries, num_keys).masked_fill(~seen, -torch.inf)


def _ours(folder: Path) -> dict[str, Any]:
    ours = Ours(folder)
    return {"ours": ours, "ours unshared": Unshared(ours)}


PROCESSES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "ours": _ours,
    "trl tiles": lambda folder: {"trl tiles": Trl(folder, full_logits=False)},
    "trl full logits": lambda folder: {"trl full logits": Trl(folder, full_logits=True)},
}
"""The contenders of each process. Ours are in one, because two differ by up to 3% in what is the same work."""


def serve_tree(name: str, folder: str, num_threads: int, connection: Connection) -> None:
    """The process of some contenders: answers each (case, number) with the processor seconds of each one's step and the
    norm of its gradients, after one step on a single tree to warm up; ends on None."""
    import torch

    torch.set_num_threads(num_threads)
    contenders = PROCESSES[name](Path(folder))
    for contender in contenders.values():
        contender.step_on(forked("thinking", 1))()
    while (request := connection.recv()) is not None:
        answers = {}
        for kind, contender in contenders.items():
            step = contender.step_on(forked(*request))
            for parameter in contender.named_parameters.values():
                parameter.grad = None
            began_s = time.process_time()
            step()
            seconds = time.process_time() - began_s
            gradients = [p.grad for p in contender.named_parameters.values() if p.grad is not None]
            answers[kind] = seconds, float(torch.nn.utils.get_total_norm(gradients))
        connection.send(answers)

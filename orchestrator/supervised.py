"""A supervised stage: this side sends the trainer batches of answers that are known, in the orchestrator's place.

With advantages of 1 and a ratio of 1 (`loss.name: reinforce`) the policy loss is the cross-entropy of the answers'
tokens.
"""

import contextlib
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
from grpo.configs.train import TrainSettings
from grpo.orchestrator.monitoring.metrics import STEP
from grpo.orchestrator.packing import pack
from grpo.orchestrator.renderer import ChatRenderer
from grpo.transport.batches.filesystem import BatchSender
from grpo.transport.checkpoints import Checkpoints
from grpo.transport.errors import UserError
from grpo.transport.folders import step_folder, steps_in
from grpo.transport.records import TrainingSample
from grpo.transport.run import RunFolder
from grpo.transport.traces import FOLDER, VOCABULARY_FILE
from grpo.transport.weights.store import METRICS_FILE

_AHEAD = 4
"""Batches that wait for the trainer, at most."""


@dataclass(frozen=True, slots=True)
class SupervisedExample:
    """One prompt and its answer as tokens."""

    token_ids: Sequence[int]
    loss_mask: Sequence[bool]
    """True for each token that is learned."""


def examples_of(
    rows: Sequence[tuple[list[dict[str, str]], str]], renderer: ChatRenderer, end: int
) -> list[SupervisedExample]:
    """Returns the rows as tokens: the prompt as a run will ask it, the answer with the token `end` that ends a turn."""
    examples = []
    for messages, text in rows:
        prompt, answer = renderer.prompt_ids(tuple(messages)), [*renderer.ids_of(text), end]
        examples.append(SupervisedExample([*prompt, *answer], [False] * len(prompt) + [True] * len(answer)))
    return examples


def rollouts_of(run: Path, renderer: ChatRenderer, *, min_reward: float) -> list[SupervisedExample]:
    """Returns the rollouts of a run's training steps that have at least this reward, each once, whoever sampled them;
    sampled tokens are learned. Raises UserError where the run has no traces, no such rollout, or another tokenizer."""
    try:
        known = pq.read_table(run / FOLDER / VOCABULARY_FILE)["text"].to_pylist()
    except OSError as error:
        raise UserError(f"{run} is no run with traces: {error}; give a file, or a run that keeps traces") from error
    if known != renderer.vocabulary():
        raise UserError(f"the run in {run} has another tokenizer than this model; give a file with texts")
    found: dict[bytes, SupervisedExample] = {}
    for path in sorted((run / FOLDER).glob("step_*.parquet")):
        table = pq.read_table(path, columns=["reward", "token_ids", "loss_mask"])
        for row in table.filter(pc.greater_equal(table["reward"], min_reward)).to_pylist():
            if any(row["loss_mask"]):
                ids = np.array(row["token_ids"], np.int32)
                found.setdefault(ids.tobytes(), SupervisedExample(row["token_ids"], row["loss_mask"]))
    if not found:
        raise UserError(f"no rollout of {run} has a reward of {min_reward:g} or more; lower --min_reward")
    print(f"{len(found)} different rollouts with a reward of {min_reward:g} or more")
    return list(found.values())


def fitting(examples: Sequence[SupervisedExample], *, sequence_len: int) -> list[SupervisedExample]:
    """Returns the examples that are not longer than `sequence_len` tokens, and prints how many were left out. Raises
    UserError where all of them are longer."""
    kept = [one for one in examples if len(one.token_ids) <= sequence_len]
    if len(kept) < len(examples):
        print(f"{len(examples) - len(kept)} of {len(examples)} rows are longer than sequence_len = {sequence_len}")
    if not kept:
        longest = max(len(one.token_ids) for one in examples)
        raise UserError(f"no row fits into sequence_len = {sequence_len}; the longest has {longest} tokens")
    return kept


def end_token(model: Path) -> int:
    """Returns the token at which servers end an answer of the model. Raises UserError where the model names none."""
    for name in ("generation_config.json", "config.json"):
        with contextlib.suppress(FileNotFoundError):
            found = json.loads((model / name).read_bytes()).get("eos_token_id")
            if isinstance(found, list) and found:
                found = found[0]
            if isinstance(found, int):
                return found
    raise UserError(f"{model} names no eos_token_id in generation_config.json or config.json, which ends an answer")


class SupervisedFeed:
    """Sends the trainer its batches, and reports its steps."""

    def __init__(
        self,
        examples: Sequence[SupervisedExample],
        settings: TrainSettings,
        run: RunFolder,
        sender: BatchSender,
        *,
        batch_size: int,
    ) -> None:
        self._examples, self._settings, self._run, self._sender = examples, settings, run, sender
        self._batch_size, self._sent = batch_size, Checkpoints(run).settle()
        self._reported = max(steps_in(run.broadcasts), default=0)
        self._finished = False

    def tick(self) -> None:
        """Sends batches while few wait, and reports new versions. The launcher calls this often."""
        while self._sent < self._settings.max_steps and self._sent - self._sender.received() < _AHEAD:
            self._sent += 1
            samples = [sample_of(one, step=self._sent, number=n) for n, one in enumerate(self._batch(self._sent))]
            batches = pack(
                samples,
                capacity=self._settings.pack_tokens,
                run_id=self._run.run_id,
                step=self._sent,
                num_ranks=self._settings.gpus,
            )
            self._sender.send(self._sent, batches)
        if self._sent >= self._settings.max_steps and not self._finished:
            self._sender.finish(self._settings.max_steps)
            self._finished = True
        self.report()

    def report(self) -> None:
        """Prints a line for each new version, and adds it to metrics.jsonl."""
        for step in (step for step in steps_in(self._run.broadcasts) if step > self._reported):
            self._reported = step
            with contextlib.suppress(OSError):  # it may be removed already
                metrics = json.loads((step_folder(self._run.broadcasts, step) / METRICS_FILE).read_bytes())
                with (self._run.path / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps({STEP: step, **metrics}) + "\n")
                print(
                    f"step {step}/{self._settings.max_steps}: loss {metrics['loss/total']:.4f} nats a token, "
                    f"{metrics['perf/train_tokens_per_s']:,.0f} tokens/s",
                    flush=True,
                )

    def _batch(self, step: int) -> list[SupervisedExample]:
        """Returns the examples of one step. Each epoch has an order of its own, which the seed determines."""
        numbers, length = range((step - 1) * self._batch_size, step * self._batch_size), len(self._examples)
        indices = (divmod(number, length) for number in numbers)
        return [self._examples[int(_order(self._settings.seed, epoch, length)[index])] for epoch, index in indices]


@functools.lru_cache(maxsize=2)
def _order(seed: int, epoch: int, length: int) -> Any:
    """Returns a permutation [length] of the examples."""
    return np.random.default_rng([seed, epoch]).permutation(length)


def sample_of(example: SupervisedExample, *, step: int, number: int) -> TrainingSample:
    """Returns an example in the form of a sampled rollout, with an advantage of 1 for each token that is learned."""
    length = len(example.token_ids)
    return TrainingSample(
        token_ids=np.array(example.token_ids, np.int32),
        loss_mask=np.array(example.loss_mask, np.bool_),
        inference_logprobs=np.zeros(length, np.float32),
        advantages=1.0,
        temperatures=1.0,
        policy_versions=((step - 1, length),),
        env="sft",
        group_id=f"{step}",
        rollout_id=f"{step}/{number}",
        reward=0.0,
        stop_reason="stop",
    )

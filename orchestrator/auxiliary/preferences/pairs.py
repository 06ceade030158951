"""Preferences as tokens: the records that the trainer gets, and those that the run keeps.

Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290, equation 7) trains
−log σ(β[(log π(chosen) − log π_ref(chosen)) − (log π(rejected) − log π_ref(rejected))]), with log-probabilities of
whole continuations of one prompt. π_ref is the base model, at temperature 1; its part is computed here, once.

Legend: `Lp`, `Lc`, `Lr` tokens of prompt, chosen and rejected continuation, `L` of a prompt with a continuation.
"""

import asyncio
import math
import random
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from grpo.orchestrator.auxiliary.preferences.agreement import Preference, Skipped
from grpo.orchestrator.auxiliary.preferences.turns import PolicyTurn
from grpo.orchestrator.hooks import Hook
from grpo.orchestrator.ledger import LEDGER_FILE
from grpo.orchestrator.ledger_reader import open_ledger
from grpo.orchestrator.packing import pair_len
from grpo.orchestrator.rollouts.templates import ChatTemplate
from grpo.orchestrator.seeds import mixed_seed
from grpo.transport.records import PreferencePair

Reference = Callable[[Sequence[int]], Awaitable[Sequence[float]]]
"""[L - 1] natural log-probabilities of tokens 1 to L - 1 under the base model at temperature 1."""


class PairRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A pair with where it comes from, a line of JSON in the ledger. Texts serve any model; tokens serve the model that
    they were made for."""

    messages: list[dict[str, Any]]
    """The state."""
    chosen: str
    rejected: str
    source: str
    version: int
    """The oldest that sampled any of what was rejected."""
    rollout_id: str
    env: str
    base_model: str
    """Identity of the model whose tokenizer made the tokens and whose log-probabilities are in them."""
    prompt_ids: list[int]
    """[Lp]"""
    chosen_ids: list[int]
    """[Lc]"""
    rejected_ids: list[int]
    """[Lr]"""
    chosen_ref_logprob: float
    rejected_ref_logprob: float
    adapter: int = 0
    score_gap: float = 1.0

    @property
    def pair(self) -> PreferencePair:
        """Returns the record for the trainer."""
        fields = {name: getattr(self, name) for name in PreferencePair.__struct_fields__}
        ids = {name: np.array(value, np.int32) for name, value in fields.items() if name.endswith("_ids")}
        return PreferencePair(**fields | ids)


def pair_record(data: str | bytes) -> PairRecord:
    """Returns a pair that was kept as JSON. Raises ValueError."""
    try:
        return msgspec.json.decode(data, type=PairRecord)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"no preference pair: {error}") from error


async def make_pair(
    preference: Preference,
    turn: PolicyTurn,
    template: ChatTemplate,
    reference: Reference,
    *,
    sequence_len: int,
    base_model: str,
) -> PairRecord | Skipped:
    """Returns the prompt as the server was given it with what teachers did, as tokens, and exactly what the policy
    sampled.

    `sequence_len`: the most tokens that the trainer takes for the prompt, once, with both continuations. Skipped are
    `empty`, `same_tokens`, `too_long`, and `reference_failed`.
    """
    prompt, rejected = turn.prompt_ids, turn.sampled_ids
    written = preference.chosen.written()
    chosen = answer_ids(written, template, prompt_ids=prompt, sampled_ids=rejected)
    if not (prompt and chosen and rejected):
        return Skipped(reason="empty")
    if chosen == rejected:
        return Skipped(reason="same_tokens")
    if (length := len(prompt) + len(chosen) + len(rejected)) > sequence_len:
        return Skipped(reason="too_long", message=f"a pair of {length} tokens, and seq_len is {sequence_len}")
    try:
        chosen_logprob, rejected_logprob = await asyncio.gather(
            _logprob(prompt, chosen, reference), _logprob(prompt, rejected, reference)
        )
    except Exception as error:  # whatever servers raise: the pair is lost, training goes on
        return Skipped(reason="reference_failed", message=f"{type(error).__name__}: {error}")
    return PairRecord(
        messages=[dict(message) for message in turn.messages],
        chosen=written,
        rejected=turn.action.text,
        source=preference.source,
        version=turn.version,
        rollout_id=turn.rollout.id,
        env=turn.rollout.task.env,
        base_model=base_model,
        prompt_ids=prompt,
        chosen_ids=chosen,
        rejected_ids=rejected,
        chosen_ref_logprob=chosen_logprob,
        rejected_ref_logprob=rejected_logprob,
        adapter=turn.answer.adapter,
        score_gap=preference.score_gap,
    )


def answer_ids(
    text: str, template: ChatTemplate, *, prompt_ids: Sequence[int], sampled_ids: Sequence[int]
) -> list[int]:
    """Returns an answer that somebody else wrote as the policy would have sampled it: its text, in which nothing is
    read as a control token, and the token that ends an answer. Where the template ends answers with plain text, that is
    the control token that ended the policy's, if one did. `prompt_ids` and `sampled_ids`: of the policy's turn."""
    renderer, opening = template.renderer, template.opening_ids
    harmless: str = renderer.without_control({"role": "assistant", "content": text})["content"]
    opened = tuple(prompt_ids[-len(opening) :]) == opening
    ids = renderer.ids_behind(template.opening, harmless) if opened else renderer.ids_of(harmless)
    end_id = template.end_id
    if end_id is None and sampled_ids and renderer.is_special(sampled_ids[-1]):
        end_id = sampled_ids[-1]
    return ids if end_id is None or not ids else [*ids, end_id]


async def _logprob(prompt_ids: Sequence[int], continuation_ids: Sequence[int], reference: Reference) -> float:
    """Returns log π_ref(continuation | prompt) = Σ_t log π_ref(token t | tokens before t), over the continuation's
    tokens. Raises ValueError where the reference gives no such numbers."""
    token_ids = [*prompt_ids, *continuation_ids]
    logprobs = await reference(token_ids)
    if len(logprobs) != len(token_ids) - 1:
        raise ValueError(f"the reference gave {len(logprobs)} log-probabilities for {len(token_ids)} tokens")
    total = math.fsum(logprobs[len(prompt_ids) - 1 :])
    if not math.isfinite(total):
        raise ValueError(f"the reference gave log-probabilities whose sum is {total}")
    return total


# --- the pairs of another run ---


def pairs_of_run(folder: Path, *, base_model: str, seq_len: int, num_adapters: int = 1) -> list[PreferencePair]:
    """Returns all pairs that another run has kept, for a run with this base model and so many adapters, whose trainer
    takes `seq_len` tokens for a pair. Raises ValueError where there are none, or one that cannot be trained."""
    path = folder / LEDGER_FILE
    try:
        with open_ledger(folder) as ledger:
            records = [pair_record(data) for data in ledger.pairs()]
    except sqlite3.Error as error:
        raise ValueError(f"{path} cannot be read: {error}; give the folder of a run that has kept pairs") from error
    if not records:
        raise ValueError(f"{path} has no pairs; give the folder of a run that has kept some")
    for one in records:
        if one.base_model != base_model or one.adapter >= num_adapters or pair_len(one.pair) > seq_len:
            raise ValueError(
                f"{path} has a pair of the base model {one.base_model}, of adapter {one.adapter} and of "
                f"{pair_len(one.pair)} tokens, expected {base_model}, an adapter below {num_adapters} and at most "
                f"seq_len = {seq_len} tokens; give the pairs of a run with the same model, adapters and seq_len"
            )
    return [one.pair for one in records]


class PairsOfRun(Hook):
    """Has every batch train some pairs of another run."""

    def __init__(self, pairs: Sequence[PreferencePair], *, max_pairs: int, seed: int) -> None:
        self._pairs, self._num, self._seed = pairs, min(max_pairs, len(pairs)), seed

    def before_batch(self, step: int) -> list[PreferencePair]:
        """Returns the pairs of batch `step`, from 1: all in a random order, then all again in another one, and so on.
        They depend on the seed and the step alone, so that a run that goes on needs no state."""
        num_pairs = len(self._pairs)
        drawn = [divmod(number, num_pairs) for number in range((step - 1) * self._num, step * self._num)]
        orders = {
            epoch: random.Random(mixed_seed(self._seed, "kept-pairs", epoch)).sample(range(num_pairs), num_pairs)
            for epoch in {epoch for epoch, _ in drawn}
        }
        return [self._pairs[orders[epoch][index]] for epoch, index in drawn]

"""Preferences as tokens: what the trainer gets.

Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290, equation 7) trains
−log σ(β[(log π(chosen) − log π_ref(chosen)) − (log π(rejected) − log π_ref(rejected))]), with log-probabilities of
whole continuations of one prompt. π_ref is the base model, at temperature 1; its part is computed here, once.

Legend: `Lp`, `Lc`, `Lr` tokens of prompt, chosen and rejected continuation, `L` of a prompt with a continuation.
"""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from orchestrator.disagreement.actions import Writer, write_tagged
from orchestrator.disagreement.turns import TraceTurn
from orchestrator.disagreement.verdicts import EMPTY, Preference, Skipped
from orchestrator.episodes.templates import ChatTemplate
from transport.records import PreferencePair

TOO_LONG = "too_long"
"""Prompt and both continuations do not fit into the trainer's sequence."""
SAME_TOKENS = "same_tokens"
"""Written as tokens, the teachers' action is the student's."""
REFERENCE_FAILED = "reference_failed"
"""The reference model could not be asked, or answered nonsense."""


class ReferenceScorer(Protocol):
    """The base model, without any adapter."""

    async def logprobs(self, token_ids: Sequence[int]) -> Sequence[float]:
        """[L] natural log-probabilities at temperature 1; element t is that of token t given those before it, and the
        first one's is not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTokens:
    """A pair without the reference's opinion. Example: ``PairTokens(prompt_ids=[5, 6], chosen_ids=[7], ...)``"""

    prompt_ids: Sequence[int]
    """[Lp]"""
    chosen_ids: Sequence[int]
    """[Lc]"""
    rejected_ids: Sequence[int]
    """[Lr]"""


def pair_tokens(
    preference: Preference,
    turn: TraceTurn,
    template: ChatTemplate,
    *,
    sequence_len: int,
    write: Writer = write_tagged,
) -> PairTokens | Skipped:
    """The prompt as the server was given it; what teachers did, as tokens; what the student sampled, exactly.

    `sequence_len`: the most tokens that the trainer takes for the prompt, once, with both continuations.
    """
    prompt, rejected = list(turn.prompt_ids), list(turn.sampled_ids)
    chosen = answer_ids(write(preference.chosen), turn, template)
    if not (prompt and chosen and rejected):
        return Skipped(reason=EMPTY)
    if chosen == rejected:
        return Skipped(reason=SAME_TOKENS)
    if (length := len(prompt) + len(chosen) + len(rejected)) > sequence_len:
        message = f"a pair of {len(prompt)} + {len(chosen)} + {len(rejected)} = {length} tokens, room is {sequence_len}"
        return Skipped(reason=TOO_LONG, message=message)
    return PairTokens(prompt_ids=prompt, chosen_ids=chosen, rejected_ids=rejected)


def answer_ids(text: str, turn: TraceTurn, template: ChatTemplate) -> list[int]:
    """An answer that somebody else wrote as the policy would have sampled it: its text, in which nothing is read as a
    control token, and the token that ends an answer. Where the template ends answers with plain text, that is the
    control token that ended the student's, if one did.

    The text is tokenized behind the opening of the turn, because some tokenizers treat the beginning of a text
    otherwise than its middle; alone, where the two would become one token.
    """
    renderer, opening = template.renderer, template.opening_ids
    harmless: str = renderer.without_control({"role": "assistant", "content": text})["content"]
    opened = bool(opening) and tuple(turn.prompt_ids[-len(opening) :]) == opening
    ids = renderer.ids_of(template.opening + harmless) if opened else []
    if opened and tuple(ids[: len(opening)]) == opening:
        ids = ids[len(opening) :]
    else:
        ids = renderer.ids_of(harmless)
    end_id = template.end_id
    if end_id is None and turn.sampled_ids and renderer.is_special(turn.sampled_ids[-1]):
        end_id = turn.sampled_ids[-1]
    return ids if end_id is None or not ids else [*ids, end_id]


async def referenced(
    tokens: PairTokens, scorer: ReferenceScorer, *, source: str, adapter: int = 0
) -> PreferencePair | Skipped:
    """The pair with the reference's log-probabilities, each the sum over its continuation. `adapter`: of the student
    who acted, which is the one that is trained."""
    try:
        chosen, rejected = await asyncio.gather(
            _logprob(tokens.prompt_ids, tokens.chosen_ids, scorer),
            _logprob(tokens.prompt_ids, tokens.rejected_ids, scorer),
        )
    except Exception as error:  # whatever servers raise: the pair is lost, training goes on
        return Skipped(reason=REFERENCE_FAILED, message=f"{type(error).__name__}: {error}")
    return PreferencePair(
        prompt_ids=np.array(tokens.prompt_ids, np.int32),
        chosen_ids=np.array(tokens.chosen_ids, np.int32),
        rejected_ids=np.array(tokens.rejected_ids, np.int32),
        chosen_ref_logprob=chosen,
        rejected_ref_logprob=rejected,
        source=source,
        adapter=adapter,
    )


async def _logprob(prompt_ids: Sequence[int], continuation_ids: Sequence[int], scorer: ReferenceScorer) -> float:
    """log π_ref(continuation | prompt) = Σ_t log π_ref(token t | tokens before t), over the continuation's tokens."""
    token_ids = [*prompt_ids, *continuation_ids]
    logprobs = await scorer.logprobs(token_ids)
    if len(logprobs) != len(token_ids):
        raise ValueError(f"the reference gave {len(logprobs)} log-probabilities for {len(token_ids)} tokens")
    total = math.fsum(logprobs[len(prompt_ids) :])
    if not math.isfinite(total):
        raise ValueError(f"the reference gave log-probabilities whose sum is {total}")
    return total

"""Maps the policy's token ids to a teacher's: only ids travel between them."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from grpo.orchestrator.renderer import load_tokenizer
from grpo.transport.records import NO_TEACHER_LOGPROB, Float32, Int32

FEWEST_SHARED = 0.95
"""The share of the policy's tokens that a teacher must know. Models of other families with one vocabulary differ in
their control tokens, a few in a hundred thousand; other vocabularies share at most some four in five."""


@dataclass(frozen=True, slots=True)
class SharedTokens:
    """The teacher's ids of the policy's tokens."""

    theirs: Int32
    """[V] by the policy's id; -1 where the teacher has no such token."""

    def translated(self, token_ids: Int32) -> Int32:
        """Returns the tokens of a row [L] that the teacher knows, by its ids. It reads the row without the others."""
        ids = self._theirs_of(token_ids)
        return ids[ids >= 0]

    def spread(self, scores: Float32, token_ids: Int32) -> Float32:
        """Returns [L] the scores of the row's `translated` tokens, of which the first has none, and NO_TEACHER_LOGPROB
        for all others but token 0."""
        row = np.full(len(token_ids), NO_TEACHER_LOGPROB, np.float32)
        row[np.flatnonzero(self._theirs_of(token_ids) >= 0)[1:]] = scores[1:]
        row[:1] = 0
        return row

    def _theirs_of(self, token_ids: Int32) -> Int32:
        inside = (token_ids >= 0) & (token_ids < len(self.theirs))
        return np.where(inside, self.theirs[np.where(inside, token_ids, 0)], -1).astype(np.int32)


def shared_tokens(policy: Path, teacher: Path | str) -> SharedTokens:
    """Returns the teacher's ids of the policy's tokens. Two tokens are the same where they are written the same and are
    control tokens for both or for neither. `teacher`: a folder, or a name in the local Hugging Face cache; nothing is
    fetched. Raises ValueError where the teacher knows too few, and where a tokenizer cannot be read."""
    ours, theirs = _vocabulary(policy), _vocabulary(teacher)
    by_token = {token: index for index, token in theirs.items()}
    ids = np.full(max(ours) + 1, -1, np.int32)
    for index, token in ours.items():
        ids[index] = index if theirs.get(index) == token else by_token.get(token, -1)
    unknown = [f"{token!r}" for index, (token, _) in ours.items() if ids[index] < 0]
    if len(unknown) > (1 - FEWEST_SHARED) * len(ours):
        raise ValueError(
            f"the tokenizer of the teacher, {teacher}, has another vocabulary than the policy's: {len(unknown)} of "
            f"{len(ours)} tokens are not in it, {', '.join(unknown[:3])} for example; take a teacher that shares at "
            f"least {FEWEST_SHARED:.0%} of them"
        )
    return SharedTokens(ids)


def _vocabulary(name: Path | str) -> dict[int, tuple[str, bool]]:
    """Returns (token as the tokenizer writes it, whether it is a control token) by id. Raises ValueError."""
    try:
        tokenizer = load_tokenizer(name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the tokens of policy and teacher cannot be compared: the tokenizer {name} cannot be read ({error}); set "
            "teacher_model.model.tokenizer to a folder that has the teacher's"
        ) from error
    added = tokenizer.added_tokens_decoder
    control = {int(index) for index, token in added.items() if token.special}
    tokens = {int(index): str(token) for token, index in tokenizer.get_vocab().items()}
    tokens |= {int(index): str(token) for index, token in added.items()}
    return {index: (token, index in control) for index, token in tokens.items()}

"""What a conversation leaves to the trainer: rows of tokens in which the policy's turns are marked.

Legend: `L` tokens of one row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from transport.records import Bool, Float32, Int32


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One answer of the policy within a row. Example: ``Turn(index=0, opens=12, begins=15, ends=20, ...)``"""

    index: int
    """Its place among the policy's answers in the conversation, from 0."""
    opens: int
    """Where the template opens the turn: everything before is what the policy was told. A hint goes here. Equal to
    `begins` where the template opens turns with nothing, or with what cannot be told apart."""
    begins: int
    """Its first sampled token."""
    ends: int
    """One past its last sampled token."""
    finish_reason: str
    """`stop` or `length`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRow:
    """A prompt with one answer or several, and what others said between them; it ends with an answer.

    Example: two answers, [8, 9] and [4]: ``token_ids=[5, 6, 8, 9, 7, 4]``, ``sampled=[0, 0, 1, 1, 0, 1]``
    """

    token_ids: Int32
    """[L] as the server was given and as it sampled them."""
    sampled: Bool
    """[L] exactly what the policy sampled in this row."""
    logprobs: Float32
    """[L] natural log, at the sampling temperature; 0 where not sampled."""
    temperatures: Float32
    """[L] of the sampling; what was not sampled has that of the answer that follows."""
    versions: tuple[tuple[int, int], ...]
    """Runs of (policy version, number of tokens) in order; the numbers sum to L. What was not sampled has the version
    that began the answer that follows."""
    turns: tuple[Turn, ...]
    """In order, at least one."""
    began: str | None
    """Why the row before it was not continued; None for the conversation's first row."""

    def spread(self, by_turn: Sequence[float] | Mapping[int, float]) -> Float32:
        """[L] a number for each of the conversation's turns (by `Turn.index`) on the tokens of this row's turns; 0
        where not sampled. Advantages, for example."""
        values = np.zeros(len(self.token_ids), np.float32)
        for turn in self.turns:
            values[turn.begins : turn.ends] = by_turn[turn.index]
        return values

"""The two contexts that self-distillation compares: a row as it was sampled, and the same row with hints in it.

A hint stands at the boundary of the turn that went wrong: behind all that the policy was told, before the template
opens the policy's turn (`Turn.opens`). The student reads the row, the teacher, the same model, the row with the hint;
compared are the tokens that were sampled in that turn, and all others are masked (SDPO, arXiv:2601.20802; OPSD,
arXiv:2601.18734):

    student  q  [answer]  r  [answer]  s  [answer]
    teacher  q  [answer]  r  hint  [answer]
                                    ======  compared

All of a row's hints make one `Hint`, because a sample takes one, and because the trainer computes for every `Hint` a
pass over the sample and one over the teacher's context: merged, two passes serve all errors of a row. In return, at its
later errors the teacher has read the earlier hints as well. Whoever wants a teacher that has read one hint alone limits
them to the first. The teacher's context ends with its last compared token; what follows has no say in it.

Legend: `L` tokens of the row, `L'` of the teacher's context, `K` compared tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from orchestrator.rollouts.records import TrainingRow, Turn
from transport.records import Bool, Hint

TOO_LONG = "too_long"
"""With the hint, the context would be longer than the trainer takes."""
NO_BOUNDARY = "no_boundary"
"""Where the policy's turn opens cannot be told."""
EMPTY_ANSWER = "empty_answer"
"""Nothing was sampled in the turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Insertion:
    """A hint for one of a row's turns."""

    turn: Turn
    token_ids: Sequence[int]
    """The whole message, at least one token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """The hints of a row that can be trained."""

    kept: tuple[Insertion, ...]
    """In the order of their turns."""
    left_out: tuple[tuple[Insertion, str], ...]
    """With the reason: TOO_LONG, NO_BOUNDARY or EMPTY_ANSWER."""


def fit(
    row: TrainingRow,
    insertions: Sequence[Insertion],
    *,
    max_len: int,
    until_end: bool = False,
    opens_turns: bool = True,
) -> Fitted:
    """Which hints go in, the earlier turns' first, while the teacher's context has at most `max_len` tokens up to its
    last compared one. `opens_turns`: whether the template opens turns with anything."""
    kept: list[Insertion] = []
    left_out = []
    for one in sorted(insertions, key=lambda insertion: insertion.turn.opens):
        if one.turn.begins == one.turn.ends:
            left_out.append((one, EMPTY_ANSWER))
        elif opens_turns and one.turn.opens == one.turn.begins:
            left_out.append((one, NO_BOUNDARY))
        elif context_len(row, [*kept, one], until_end=until_end) > max_len:
            left_out.append((one, TOO_LONG))
        else:
            kept.append(one)
    return Fitted(kept=tuple(kept), left_out=tuple(left_out))


def context_len(row: TrainingRow, insertions: Sequence[Insertion], *, until_end: bool = False) -> int:
    """Tokens of the teacher's context."""
    compared = np.flatnonzero(_compared(row, insertions, until_end))
    return int(compared[-1]) + 1 + sum(len(one.token_ids) for one in insertions)


def make_hint(row: TrainingRow, insertions: Sequence[Insertion], *, until_end: bool = False) -> Hint:
    """The row's one `Hint`, of insertions that `fit` has kept. Compared are the tokens sampled in the hinted turns, or,
    `until_end`, all that were sampled from the first hinted turn on."""
    ordered = sorted(insertions, key=lambda insertion: insertion.turn.opens)
    student_index = np.flatnonzero(_compared(row, ordered, until_end)).astype(np.int32)
    ids, pieces, start = row.token_ids, [], 0
    shift = np.zeros(len(ids), np.int32)
    for one in ordered:
        pieces += [ids[start : one.turn.opens], np.asarray(one.token_ids, np.int32)]
        start = one.turn.opens
        shift[start:] += len(one.token_ids)
    pieces.append(ids[start : student_index[-1] + 1])
    return Hint(
        teacher_token_ids=np.concatenate(pieces),
        student_index=student_index,
        teacher_index=student_index + shift[student_index],
        weight=1.0,
    )


def _compared(row: TrainingRow, insertions: Sequence[Insertion], until_end: bool) -> Bool:
    """[L] what the policy sampled in the hinted turns, or from the first of them on."""
    hinted = np.zeros(len(row.token_ids), np.bool_)
    if until_end:
        hinted[min(one.turn.begins for one in insertions) :] = True
    for one in insertions:
        hinted[one.turn.begins : one.turn.ends] = True
    return hinted & row.sampled

"""The two contexts that self-distillation compares: a row as it was sampled, and the same row with hints in it.

A hint stands at the boundary of the turn that went wrong: behind all that the policy was told, before the template
opens the policy's turn (`Turn.opens`). The student reads the row, the teacher, the same model, the row with the hint;
compared are the tokens that were sampled in that turn, and all others are masked (SDPO, arXiv:2601.20802; OPSD,
arXiv:2601.18734):

    student  q  [answer]  r  [answer]  s  [answer]
    teacher  q  [answer]  r  hint  [answer]
                                    ======  compared

All of a row's hints make one `Hint`, because the trainer computes for each `Hint` a pass over the sample and one over
the teacher's context: merged, two passes serve all errors of a row. In return, at its later errors the teacher has read
the earlier hints as well. The teacher's context ends with its last compared token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from orchestrator.rollouts.records import TrainingRow, Turn
from transport.records import Hint

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


LeftOut = list[tuple[Insertion, str]]
"""With the reason: TOO_LONG, NO_BOUNDARY or EMPTY_ANSWER."""


def fit(insertions: Sequence[Insertion], *, max_len: int, opens_turns: bool = True) -> tuple[list[Insertion], LeftOut]:
    """Which of a row's hints go in, the earlier turns' first, while the teacher's context has at most `max_len` tokens
    up to its last compared one, and which do not. `opens_turns`: whether the template opens turns with anything."""
    kept: list[Insertion] = []
    left_out: LeftOut = []
    for one in sorted(insertions, key=lambda insertion: insertion.turn.opens):
        if one.turn.begins == one.turn.ends:
            left_out.append((one, EMPTY_ANSWER))
        elif opens_turns and one.turn.opens == one.turn.begins:
            left_out.append((one, NO_BOUNDARY))
        elif one.turn.ends + sum(len(other.token_ids) for other in [*kept, one]) > max_len:
            left_out.append((one, TOO_LONG))
        else:
            kept.append(one)
    return kept, left_out


def make_hint(row: TrainingRow, insertions: Sequence[Insertion]) -> Hint:
    """The row's one `Hint`, of insertions that `fit` has kept. Compared are the tokens sampled in the hinted turns."""
    ids, pieces, start, num_inserted = row.token_ids, [], 0, 0
    student, teacher = [], []
    for one in insertions:
        pieces += [ids[start : one.turn.opens], np.asarray(one.token_ids, np.int32)]
        start = one.turn.opens
        num_inserted += len(one.token_ids)
        compared = np.arange(one.turn.begins, one.turn.ends, dtype=np.int32)
        student.append(compared)
        teacher.append(compared + np.int32(num_inserted))
    pieces.append(ids[start : insertions[-1].turn.ends])
    return Hint(
        teacher_token_ids=np.concatenate(pieces),
        student_index=np.concatenate(student),
        teacher_index=np.concatenate(teacher),
        weight=1.0,
    )

"""A hint as one more message of the user, and the two contexts that self-distillation compares: a row as it was
sampled, and the same row with hints in it.

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
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from grpo.orchestrator.rollouts.records import TrainingRow, Turn
from grpo.orchestrator.rollouts.templates import ChatTemplate, TemplateRefused
from grpo.transport.records import Hint

TOO_LONG = "too_long"
"""Reason: with the hint, the context would be longer than the trainer takes."""
NO_BOUNDARY = "no_boundary"
"""Reason: it is unknown where the policy's turn opens."""
EMPTY_ANSWER = "empty_answer"
"""Reason: nothing was sampled in the turn."""
_QUESTION = {"role": "user", "content": "x"}
_BEFORE: tuple[tuple[dict[str, str], ...], ...] = (
    (_QUESTION,),
    (_QUESTION, {"role": "assistant", "content": "y"}),
)
"""Messages before a hint while it is written: the second for templates whose speakers must take turns."""


class HintNotWritten(ValueError):
    """The chat template makes no message of a text."""


class HintWriter:
    """Hints to ids. Example: of ChatML, ``HintWriter(template).text("x")`` is ``<|im_start|>user\\nx<|im_end|>\\n``"""

    def __init__(self, template: ChatTemplate) -> None:
        """Tries it once. Raises TemplateRefused where the template takes no further message of the user."""
        self.template = template
        for self._before in _BEFORE:
            with suppress(HintNotWritten):
                self.text("probe-of-a-hint")
                break
        else:
            raise TemplateRefused(
                "the model's chat template takes no further message of the user, as which a hint is given; use a model "
                "whose template does"
            )
        self.opens_turns = bool(self._rendered(*self._before)[1])
        """Whether the template opens the policy's turn with anything: then a turn whose opening cannot be found in its
        row has no boundary for a hint."""

    def text(self, hint: str) -> str:
        """Returns the whole message; what would be read as a control token in it is made harmless, and half a surrogate
        pair a question mark. Raises HintNotWritten."""
        plain = hint.encode(errors="replace").decode().strip()
        message: dict[str, Any] = self.template.renderer.without_control({"role": "user", "content": plain})
        before, opening = self._rendered(*self._before)
        closed, opening_behind = self._rendered(*self._before, message)
        text = closed.removeprefix(before)
        if not closed.startswith(before) or opening_behind != opening:
            raise HintNotWritten("it writes what stands before the message, or the turn behind it, in another way")
        if not (content := str(message["content"])) or content not in text:
            raise HintNotWritten("a hint without text, or it leaves out the text, or changes it")
        return text

    def ids(self, hint: str) -> list[int]:
        """Returns the message's ids behind the token that ends a turn. Raises HintNotWritten."""
        renderer, end_id = self.template.renderer, self.template.end_id
        return renderer.ids_behind("" if end_id is None else renderer.raw_text([end_id]), self.text(hint))

    def _rendered(self, *messages: dict[str, Any]) -> tuple[str, str]:
        """Returns the messages, and how the policy's turn opens behind them. Raises HintNotWritten."""
        try:
            closed, opened = self.template.renderer.closed_and_opened(messages, tools=self.template.tools)
        except Exception as error:  # templates are code
            raise HintNotWritten(str(error) or type(error).__name__) from error
        if not opened.startswith(closed):
            raise HintNotWritten("it does not open the policy's turn behind the messages before")
        return closed, opened[len(closed) :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Insertion:
    """A hint for one of a row's turns."""

    turn: Turn
    token_ids: Sequence[int]
    """The whole message, at least one token."""


def fit(
    insertions: Sequence[Insertion], *, max_len: int, opens_turns: bool = True
) -> tuple[list[Insertion], list[tuple[Insertion, str]]]:
    """Returns which of a row's hints go in, the earlier turns' first, while the teacher's context has at most `max_len`
    tokens up to its last compared one, and which do not, with the reason."""
    kept: list[Insertion] = []
    left_out: list[tuple[Insertion, str]] = []
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
    """Returns the row's one `Hint`, of insertions that `fit` has kept. It compares the tokens of the hinted turns."""
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

"""What teachers' actions in a state say about the student's: a preference, or why there is none."""

from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.disagreement.actions import Action, Agreement, JudgeFailed

ALL_DISAGREE = "all_disagree"
"""No action has enough teachers for it."""
AGREES_WITH_STUDENT = "agrees_with_student"
"""Teachers would have done what the student did."""
TOO_FEW_ANSWERS = "too_few_answers"
"""Fewer teachers answered than must agree."""
TIE = "tie"
"""Two actions have equally many teachers for them, and none has more."""
EMPTY = "empty"
"""Enough teachers answered, but too few of them with anything that can be preferred."""
JUDGE_FAILED = "judge_failed"
"""Whoever says which actions are the same could not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """Teachers prefer one action to the student's."""

    chosen: Action
    """Of the first of the teachers that agree."""
    rejected: Action
    """The student's."""
    teachers: tuple[str, ...]
    """Who agree, in the order in which teachers were given."""
    num_answers: int
    """Teachers that answered with something usable."""

    @property
    def source(self) -> str:
        """For a pair: `2 of 3 teachers: a, b`."""
        return f"{len(self.teachers)} of {self.num_answers} teachers: {', '.join(self.teachers)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """No pair comes of it. Example: ``Skipped(reason="tie")``"""

    reason: str
    message: str = ""
    """For people, where there is more to say."""


Verdict = Preference | Skipped


async def score(
    teachers: Mapping[str, Action | None], student: Action, agreement: Agreement, *, at_least: int = 2
) -> Verdict:
    """The action that most teachers agree on, if they are `at_least` so many, and the student did another one.

    `teachers`: actions by teacher, None where one did not answer. The student's action is always one, also where it
    says nothing. Actions are put into groups by comparing each with the first of every group, so that what is no
    equivalence, a judge's opinion for example, still gives groups.
    """
    if at_least < 1:
        raise ValueError(f"at_least is {at_least}, expected 1 or more teachers that agree")
    answers = {name: action for name, action in teachers.items() if action is not None}
    usable = {name: action for name, action in answers.items() if agreement.usable(action)}
    if len(usable) < at_least:
        return Skipped(reason=EMPTY if len(answers) >= at_least else TOO_FEW_ANSWERS)
    try:
        return await _decided(usable, student, agreement, at_least)
    except JudgeFailed as error:
        return Skipped(reason=JUDGE_FAILED, message=str(error))


async def _decided(usable: Mapping[str, Action], student: Action, agreement: Agreement, at_least: int) -> Verdict:
    groups: list[list[str]] = []
    for name, action in usable.items():
        for group in groups:
            if await agreement.same(usable[group[0]], action):
                group.append(name)
                break
        else:
            groups.append([name])
    most = max(map(len, groups))
    if most < at_least:
        return Skipped(reason=ALL_DISAGREE)
    largest, *others = (group for group in groups if len(group) == most)
    if others:
        return Skipped(reason=TIE)
    chosen = usable[largest[0]]
    if await agreement.same(chosen, student):
        return Skipped(reason=AGREES_WITH_STUDENT)
    return Preference(chosen=chosen, rejected=student, teachers=tuple(largest), num_answers=len(usable))

"""The contexts of teacher and student, by hand and for any conversation."""

import numpy as np
from grpo.orchestrator.auxiliary.hints.contexts import EMPTY_ANSWER, NO_BOUNDARY, TOO_LONG, Insertion, fit, make_hint
from grpo.orchestrator.rollouts.records import TrainingRow, Turn


def turn(index: int, opens: int, begins: int, ends: int) -> Turn:
    return Turn(index=index, opens=opens, begins=begins, ends=ends, finish_reason="stop")


def row(*turns: Turn) -> TrainingRow:
    """Tokens 10, 11, ... up to the last turn's end."""
    length = turns[-1].ends
    sampled = np.zeros(length, np.bool_)
    for one in turns:
        sampled[one.begins : one.ends] = True
    return TrainingRow(
        token_ids=np.arange(10, 10 + length, dtype=np.int32),
        sampled=sampled,
        logprobs=np.zeros(length, np.float32),
        temperatures=np.ones(length, np.float32),
        versions=((1, length),),
        turns=turns,
    )


# 10 11 [12 opens] 13 14 | 15 16 [17 opens] 18 19 20 | 21 [22 opens] 23
FIRST, SECOND, THIRD = turn(0, 2, 3, 5), turn(1, 7, 8, 11), turn(2, 12, 13, 14)
ROW = row(FIRST, SECOND, THIRD)


def hint(of: Turn, *ids: int) -> Insertion:
    return Insertion(turn=of, token_ids=ids)


# --- by hand ---


def test_a_hint_stands_before_the_turn_opens_and_that_turn_alone_is_compared() -> None:
    made = make_hint(ROW, [hint(SECOND, 1, 2)])
    assert made.teacher_token_ids.tolist() == [10, 11, 12, 13, 14, 15, 16, 1, 2, 17, 18, 19, 20]
    assert made.student_index.tolist() == [8, 9, 10]
    assert made.teacher_index.tolist() == [10, 11, 12]


def test_hints_of_several_turns_are_one_context_in_the_order_of_turns() -> None:
    made = make_hint(ROW, [hint(FIRST, 1, 2), hint(THIRD, 3)])
    assert made.teacher_token_ids.tolist() == [10, 11, 1, 2, *range(12, 22), 3, 22, 23]
    assert made.student_index.tolist() == [3, 4, 13]
    assert made.teacher_index.tolist() == [5, 6, 16]


def test_a_hint_that_makes_the_context_too_long_is_left_out() -> None:
    # Up to the second turn's end there are 11 tokens, up to the third's 14: 11 + 2 = 13, 14 + 2 + 1 = 17.
    both = [hint(THIRD, 3), hint(SECOND, 1, 2)]
    assert [one.turn for one in fit(both, max_len=17)[0]] == [SECOND, THIRD]
    assert fit(both, max_len=16) == ([both[1]], [(both[0], TOO_LONG)])
    assert fit(both, max_len=12)[0] == []
    # A shorter one at a later turn may fit all the same.
    assert [one.turn for one in fit([hint(FIRST, *range(12)), hint(THIRD, 1, 2)], max_len=16)[0]] == [THIRD]


def test_a_turn_without_tokens_or_without_a_boundary_is_left_out() -> None:
    empty, unopened = turn(0, 2, 3, 3), turn(1, 8, 8, 11)
    _, left_out = fit([hint(empty, 1), hint(unopened, 1)], max_len=99)
    assert [reason for _, reason in left_out] == [EMPTY_ANSWER, NO_BOUNDARY]
    assert fit([hint(unopened, 1)], max_len=99, opens_turns=False)[0] == [hint(unopened, 1)]

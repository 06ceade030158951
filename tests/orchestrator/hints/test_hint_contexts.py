"""The contexts of teacher and student, by hand and for any conversation."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.hints.contexts import EMPTY_ANSWER, NO_BOUNDARY, TOO_LONG, HintWriter, Insertion, fit, make_hint
from orchestrator.rollouts.conversation import ChatMessage, Conversation
from orchestrator.rollouts.records import TrainingRow, Turn
from tests.orchestrator.hints.played import TINY, played, wrong
from tests.orchestrator.rollouts.test_conversation import TEMPLATES, completion, conversations
from transport.records import Hint

WRITERS = {name: HintWriter(template) for name, template in TEMPLATES.items()}


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


def test_the_tiny_model_s_context_reads_as_its_template_writes_it() -> None:
    [one] = played("a", [wrong("AD[1]"), wrong("b")]).rows
    writer = HintWriter(TINY)
    made = make_hint(one, [Insertion(turn=turn, token_ids=writer.ids("Mind x.")) for turn in one.turns])
    messages = [
        {"role": "user", "content": "q"},
        {"role": "user", "content": "Mind x."},
        {"role": "assistant", "content": "AD[1]"},
        {"role": "user", "content": "go on"},
        {"role": "user", "content": "Mind x."},
    ]
    text = TINY.render(messages) + "b<|im_end|>"
    assert made.teacher_token_ids.tolist() == TINY.renderer.ids_of(text)


# --- properties ---

Drawn = tuple[str, list[ChatMessage], list[tuple[list[int], bool, list[ChatMessage]]]]
TEXTS = st.text(st.sampled_from("ab \n.é🙂<>|"), max_size=12).map(lambda text: f"h{text}")


def rows_of(drawn: Drawn) -> list[TrainingRow]:
    name, before, turns = drawn
    conversation = Conversation(TEMPLATES[name], before)
    for ids, _, after in turns:
        conversation.answer(completion(ids, stop=bool(ids)), version=1, temperature=1.0)
        conversation.add(*after)
    return conversation.rows()


def without(made: Hint, insertions: list[Insertion]) -> list[int]:
    """The teacher's context with the hints taken out again, each where it must stand; they must be there."""
    ids: list[int] = made.teacher_token_ids.tolist()
    for one in sorted(insertions, key=lambda insertion: insertion.turn.opens):
        opens, num = one.turn.opens, len(one.token_ids)
        assert ids[opens : opens + num] == list(one.token_ids)
        del ids[opens : opens + num]
    return ids


@given(conversations(), st.data())
def test_the_teacher_reads_the_row_and_the_hints_and_the_same_tokens_are_compared(
    drawn: Drawn, data: st.DataObject
) -> None:
    writer = WRITERS[drawn[0]]
    for one in rows_of(drawn):
        chosen = data.draw(st.lists(st.sampled_from(one.turns), unique_by=lambda turn: turn.index))
        asked = [Insertion(turn=turn, token_ids=writer.ids(data.draw(TEXTS))) for turn in chosen]
        max_len = data.draw(st.integers(1, 2 * len(one.token_ids) + 200))
        kept, left_out = fit(asked, max_len=max_len)
        assert len(kept) + len(left_out) == len(asked)
        reasons = {reason for _, reason in left_out}
        assert reasons <= {TOO_LONG, EMPTY_ANSWER}
        if not kept:
            continue
        made = make_hint(one, kept)
        assert len(made.teacher_token_ids) <= max_len
        student = one.token_ids[: int(made.student_index[-1]) + 1].tolist()
        assert without(made, list(kept)) == student
        hinted = [other.turn for other in kept]
        assert made.student_index.tolist() == [place for turn in hinted for place in range(turn.begins, turn.ends)]
        assert one.token_ids[made.student_index].tolist() == made.teacher_token_ids[made.teacher_index].tolist()
        assert one.sampled[made.student_index].all()
        for turn in hinted:  # what the teacher has read more than the student, when the turn begins
            earlier = sum(len(other.token_ids) for other in kept if other.turn.index <= turn.index)
            at = made.student_index.tolist().index(turn.begins)
            assert made.teacher_index[at] - turn.begins == earlier

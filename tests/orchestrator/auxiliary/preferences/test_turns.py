"""The policy's turns, and which of them are worth asking about."""

from collections.abc import Mapping, Sequence

import pytest
from grpo.configs.auxiliary import Selection
from grpo.orchestrator.auxiliary.preferences.turns import chosen_turns, turns_of
from grpo.orchestrator.rollouts.conversation import Conversation
from grpo.orchestrator.rollouts.records import EpisodeResult, Step
from grpo.orchestrator.rollouts.state import StepError
from grpo.orchestrator.rollouts.templates import ChatTemplate
from msgspec.structs import replace

from tests.orchestrator import made
from tests.orchestrator.chat_templates import CHATML, LLAMA3, QWEN3, renderer
from tests.orchestrator.questions import END, TEMPLATE, result

TEMPLATES = [TEMPLATE, *(ChatTemplate.of(renderer(source)) for source in (CHATML, LLAMA3, QWEN3))]
TEMPLATES += [ChatTemplate.of(renderer(QWEN3, enable_thinking=False))]
HI = {"role": "user", "content": "hi"}
ERROR = StepError(error_kind="unknown_tool", hint_template_key="tools")


def rollout_of(template: ChatTemplate, *answers: str) -> EpisodeResult:
    """A conversation in which the same is said before every answer."""
    said: Sequence[Mapping[str, str]] = (HI,)
    conversation, steps = Conversation(template, said), list[Step]()
    for n, text in enumerate(answers):
        if n:
            conversation.add(HI)
        completion = made.completion([*text.encode(), END])
        conversation.prompt_ids()
        told = conversation.answer(completion, version=n, temperature=1.0)
        error = ERROR if n == 1 else None
        steps.append(made.step(completion=completion, text=told, version=n, messages=(HI,), error=error))
    rows = tuple(replace(row, steps=tuple(turn.index for turn in row.turns)) for row in conversation.rows())
    return made.result("0/0", *steps, rows=rows)


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_turn_is_what_the_policy_saw_and_what_it_sampled(template: ChatTemplate) -> None:
    rollout = rollout_of(template, "one", "two", "three")
    turns = turns_of(rollout)
    assert [(one.step, one.action.text) for one in turns] == [(0, "one"), (1, "two"), (2, "three")]
    for one, step in zip(turns, rollout.steps, strict=True):
        assert list(one.sampled_ids) == step.completion.token_ids.tolist()
        assert tuple(one.prompt_ids[-len(template.opening_ids) :]) == template.opening_ids
    answers = [{"role": "assistant", "content": text} for text in ("one", "two")]
    assert turns[2].messages == (HI, answers[0], HI, answers[1], HI)
    assert turns[2].version == 2


def test_every_conversation_of_a_rollout_begins_anew_and_a_state_that_is_told_is_all_of_it() -> None:
    first, second = rollout_of(TEMPLATE, "one", "two"), rollout_of(TEMPLATE, "three")
    [row] = second.rows
    board = replace(first.steps[1], observed=({"role": "user", "content": "board"},))
    both = replace(first, steps=(first.steps[0], board, *second.steps), rows=(*first.rows, replace(row, steps=(2,))))
    assert [[message["content"] for message in one.messages] for one in turns_of(both)] == [["hi"], ["board"], ["hi"]]


def chosen(group: Sequence[EpisodeResult], *select: Selection) -> list[str]:
    """As `rollout.turn`."""
    return [f"{turn.rollout.id}.{turn.step}" for turn in chosen_turns(group, select)]


GROUP = [
    result("a", "q", "x", "y", reward=1.0),
    result("b", "q", "x", "z", reward=0.0),
    result("c", "r", "w", reward=0.5, error=ERROR),
]


def test_strategies_name_turns() -> None:
    assert chosen(GROUP, "all") == ["a.0", "a.1", "b.0", "b.1", "c.0"]
    assert chosen(GROUP, "errors") == ["c.0"]
    assert chosen(GROUP, "low_reward") == ["b.0", "b.1"]  # the mean is 0.5
    assert chosen(GROUP, "errors", "low_reward") == ["b.0", "b.1", "c.0"]
    assert chosen([result(str(n), "q", "x", reward=0.1) for n in range(3)], "low_reward") == []  # none is, all alike

"""Where the texts of hints come from."""

import dataclasses

import pytest
from grpo.configs.auxiliary import ApiSettings
from grpo.orchestrator.auxiliary.hints.sources import (
    NoHint,
    Source,
    from_environment,
    from_model,
    from_siblings,
    from_solution,
    from_templates,
)
from grpo.orchestrator.endpoints import ApiModel, Costs
from grpo.orchestrator.rollouts.records import EpisodeResult
from msgspec.structs import replace

from tests.orchestrator.auxiliary.hints.played import TINY, Answer, played, site, wrong
from tests.orchestrator.chat_server import FakeChatServer, status


async def refused(source: Source, *rollouts: EpisodeResult) -> str:
    with pytest.raises(NoHint) as raised:
        await source(site(*rollouts))
    return raised.value.reason


async def test_a_template_is_filled_with_what_is_known_of_the_error() -> None:
    source = from_templates({"tools": "{error_kind} {hint_template_key}: {message} ({answer})", "loud": "{message}"})
    at = site(played("a", [Answer(text="well"), wrong("AD[1]", "no ad", key="tools")]))
    assert await source(at) == "unknown_tool tools: no ad (AD[1])"
    assert len(await source(site(played("a", [wrong("x", "m" * 2000, key="loud")])))) == 1004  # cut, with " ..."
    assert await refused(source, played("a", [wrong("x", key="words")])) == "off_template"
    assert await refused(source, played("a", [wrong("x", "", key="loud")])) == "environment_silent"


async def test_what_the_environment_said_is_a_hint() -> None:
    at = site(played("a", [wrong("x", " {tests} failed:\n1 != 2 ")]))
    assert await from_environment(at) == "The answer that was tried here before went wrong: {tests} failed:\n1 != 2"
    assert await refused(from_environment, played("a", [wrong("x", " ")])) == "environment_silent"


async def test_the_best_siblings_answer_to_the_same_is_a_hint() -> None:
    group = [
        played("g/0", [wrong("AD[1]")], reward=0.2),
        played("g/1", [Answer(text="ADD[1]"), Answer(text="1")], reward=0.8),
        played("g/2", [Answer(text="z")], children=[played("g/2.0", [Answer(text="ADD[2]")], reward=1.0)]),
        played("g/3", [Answer(text="ADD[3]")], reward=0.2),
    ]
    assert await from_siblings(site(*group)) == "Another attempt, which succeeded, answered here:\nADD[2]"
    assert await refused(from_siblings, group[0], group[3]) == "no_sibling"


async def test_a_sibling_helps_at_a_later_turn_only_where_all_before_it_is_the_same() -> None:
    first = played("g/0", [Answer(text="a"), wrong("AD[1]")])
    same = played("g/1", [Answer(text="a"), Answer(text="ADD[1]")], reward=1.0)
    assert (await from_siblings(site(first, same))).endswith("ADD[1]")
    for answers in ([Answer(text="b"), Answer(text="ADD[1]")], [Answer(text="a", told="stop"), Answer(text="ADD[1]")]):
        assert await refused(from_siblings, first, played("g/1", answers, reward=1.0)) == "no_sibling"


@pytest.mark.parametrize("answer", [Answer(text="AD[1]"), wrong("ADD[1]"), Answer(text="ADD[1]", whole=False)])
async def test_an_answer_that_shows_nothing_better_is_no_hint(answer: Answer) -> None:
    group = [played("g/0", [wrong("AD[1]")]), played("g/1", [answer], reward=1.0)]
    assert await refused(from_siblings, *group) == "no_sibling"


async def test_a_model_is_shown_what_went_wrong_and_writes_a_hint(chats: FakeChatServer) -> None:
    settings = ApiSettings(name="w", base_url=chats.base_url, model="m", retries=0)
    api = ApiModel(settings, Costs(), own_servers=list, own_key_var=None, own_model="")
    source, rollout = from_model(api, TINY.renderer), played("a", [wrong("AD[1]", "no <|im_end|>")])
    answers = [" Mind x.\n", " ", "m" * 2000]
    chats.does["m"] = lambda messages: answers.pop(0)
    assert await source(site(rollout)) == "Mind x."
    [asked] = chats.requests[0][1]["messages"]
    assert all(told in asked["content"] for told in ("user\nq", "AD[1]", "unknown_tool", "no < |im_end|>"))
    assert await refused(source, rollout) == "model_silent"
    assert len(await source(site(rollout))) == 1004
    chats.says["m"].append(status(500))
    assert await refused(source, rollout) == "model_failed"
    await api.close()


async def test_the_solution_of_the_example_is_a_hint() -> None:
    at = site(played("a", [wrong("x")]))
    assert await refused(from_solution, at.rollout) == "no_solution"
    solved = replace(at.rollout, task=replace(at.rollout.task, solution=" 42\n"))
    assert await from_solution(dataclasses.replace(at, rollout=solved)) == "The solution is:\n42"

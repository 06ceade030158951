"""Parsers: thinking, and answers in the usual forms."""

import time
from typing import Any

import pytest
from grpo.orchestrator.rollouts.parsers import BoxedParser, MarkerParser, Parsed, Parser, XMLParser
from grpo.orchestrator.rollouts.rubric import Rubric
from grpo.orchestrator.rollouts.state import Reply

from tests.orchestrator.rollouts.contexts import score_of


def reply(text: str, opening: str) -> Reply:
    return Reply(role="policy", messages=(), text=text, finish_reason="stop", num_tokens=1, index=0, opening=opening)


@pytest.mark.parametrize(
    ("text", "opening", "answer", "thinking"),
    [
        (" 5\n", "", "5", ""),
        ("<think>\n2 + 3\n</think>\n\n5", "", "5", "2 + 3"),
        ("Well <think>a</think> b <think>c</think> 5", "", "5", "a</think> b <think>c"),
        ("<think>\n2 + ", "<|im_start|>assistant\n", None, "2 +"),
        ("2 + 3</think>5", "", "5", "2 + 3"),  # the template has begun the thinking, and nobody says so
        ("2 + 3</think>5", "assistant\n<think>\n", "5", "2 + 3"),
        ("2 + 3 is 5", "assistant\n<think>\n", None, "2 + 3 is 5"),
        ("2 + 3 is 5", "assistant\n<think>\n\n</think>\n\n", "2 + 3 is 5", ""),
        ("<think></think>", "", None, ""),
    ],
)
def test_thinking_is_no_answer(text: str, opening: str, answer: str | None, thinking: str) -> None:
    assert Parser().parse(reply(text, opening)) == Parsed(answer=answer, thinking=thinking)
    if not opening:
        assert Parser().parse(text) == Parsed(answer=answer, thinking=thinking)


def test_other_tags_may_stand_around_the_thinking() -> None:
    assert Parser(thinking=("[THINK]", "[/THINK]")).parse("[THINK]a[/THINK]<think>b").answer == "<think>b"


@pytest.mark.parametrize(
    ("parser", "text", "answer"),
    [
        (BoxedParser(), r"\boxed{1} and \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (BoxedParser(), r"<think>\boxed{1}</think> 2", None),
        (BoxedParser(), r"\boxed{1} \boxed{2", None),
        (BoxedParser(), r"\boxed{ }", None),
        (MarkerParser("####"), "#### 4\nno\n####  5 \nbye", "5"),
        (MarkerParser("####"), "a #### 4 #### 5", "5"),
        (MarkerParser("####"), "5", None),
        (MarkerParser("####"), "5 ####", None),
        (MarkerParser("A:", pattern=r"-?\d+"), "A: -3, no, A: x", "-3"),
        (XMLParser("answer"), "<answer>4</answer><answer>\n5\n</answer>", "5"),
        (XMLParser("answer"), "<answer>5", None),
        (XMLParser("answer"), "5</answer>", None),
        (XMLParser("answer"), "<answer> </answer>", None),
    ],
)
def test_the_last_of_a_form_is_the_answer(parser: Parser, text: str, answer: str | None) -> None:
    parsed = parser.parse(text)
    assert parsed.answer == answer
    assert parser.follows_format(parsed) == float(answer is not None)


def test_each_tag_is_a_field_and_the_format_has_them_all() -> None:
    parser = XMLParser("reasoning", "answer")
    whole, half = parser.parse("<reasoning>r</reasoning> <answer>5</answer>"), parser.parse("<answer>5</answer>")
    assert whole.fields == {"reasoning": "r", "answer": "5"}
    assert (half.answer, parser.follows_format(whole), parser.follows_format(half)) == ("5", 1.0, 0.0)


@pytest.mark.parametrize("make", [lambda: XMLParser(), lambda: XMLParser("a b"), lambda: MarkerParser("")])
def test_what_makes_no_parser_is_refused(make: Any) -> None:
    with pytest.raises(ValueError, match="expected"):
        make()


def test_a_long_answer_is_parsed_at_once() -> None:
    began_s = time.perf_counter()
    for parser, piece in (
        (Parser(), "<think></think>"),
        (BoxedParser(), "\\boxed{"),
        (MarkerParser("####", pattern=r"\d+"), "####"),
        (XMLParser("a"), "<a></a>"),
    ):
        parser.parse(piece * 100_000)
    assert time.perf_counter() - began_s < 5


# --- in a rubric ---


def right(completion: str, example: Any) -> float:
    return float(completion == example["answer"])


def thoughts(parsed: Parsed) -> float:
    return float(len(parsed.thinking))


async def test_reward_functions_get_the_answer_and_the_thinking_where_the_rubric_has_a_parser() -> None:
    text, example = r"<think>2 + 3</think> So \boxed{5}", {"answer": "5"}
    rubric = Rubric([right, thoughts], parser=BoxedParser())
    assert (await score_of(rubric, text, example)).metrics == {"right": 1.0, "thoughts": 5.0}
    assert (await score_of(rubric, "5", example)).metrics == {"right": 0.0, "thoughts": 0.0}
    assert (await score_of(Rubric([right]), text, {"answer": text})).accuracy == 1.0
    with pytest.raises(ValueError, match="thoughts takes parsed"):
        Rubric([right], metrics=[thoughts])

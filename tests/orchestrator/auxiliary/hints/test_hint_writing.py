"""Hints as further messages of chat templates."""

import pytest
from grpo.orchestrator.auxiliary.hints.contexts import HintWriter
from grpo.orchestrator.rollouts.templates import ChatTemplate, TemplateRefused

from tests.orchestrator.chat_templates import CHATML, GEMMA, LLAMA3, PHI3, PLAIN, QWEN3, renderer

TURNS = """
{%- for m in messages -%}
{%- if m.role != ['user', 'assistant'][loop.index0 % 2] -%}{{ raise_exception('take turns') }}{%- endif -%}
{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""
FIRST_ALONE = """
{%- for m in messages -%}
{%- if m.role != 'user' or loop.first -%}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""
OPENS_AS_ASKED = """
{%- for m in messages -%}{{ m.role + ':' + m.content + '\n' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'assistant on ' + messages[-1].content + ':' }}{%- endif -%}
"""
LOUD = "{% for m in messages %}{{ m.content | upper }}\n{% endfor %}{% if add_generation_prompt %}A:{% endif %}"


def of(source: str) -> HintWriter:
    return HintWriter(ChatTemplate.of(renderer(source)))


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (CHATML, "<|im_start|>user\nMind x.<|im_end|>\n"),
        (LLAMA3, "<|start_header_id|>user<|end_header_id|>\n\nMind x.<|eot_id|>"),
        (PLAIN, "user: Mind x.\n\n"),
        (TURNS, "<|im_start|>user\nMind x.<|im_end|>"),
        (GEMMA, "<start_of_turn>user\nMind x.<end_of_turn>\n"),
        (PHI3, "<|user|>\nMind x.<|end|>\n"),  # which ends a text whose turn is not opened
    ],
)
def test_a_hint_is_one_more_message(source: str, text: str) -> None:
    writer = of(source)
    assert writer.text(" Mind x.\n") == text
    assert writer.ids("Mind x.") == writer.template.renderer.ids_of(text)
    assert writer.opens_turns


def test_a_hint_stands_before_the_empty_thinking_that_opens_the_turn() -> None:
    template = ChatTemplate.of(renderer(QWEN3, enable_thinking=False))
    assert HintWriter(template).text("Mind x.") == "<|im_start|>user\nMind x.<|im_end|>\n"
    assert template.opening.endswith("<think>\n\n</think>\n\n")


def test_a_hint_cannot_end_its_own_message() -> None:
    writer = of(CHATML)
    [im_end] = writer.template.renderer.ids_of("<|im_end|>")
    ids = writer.ids("a<|im_end|>\n<|im_start|>assistant\nb")
    assert ids.count(im_end) == 1
    assert ids[-2] == im_end


@pytest.mark.parametrize(
    "source", [LOUD, OPENS_AS_ASKED, FIRST_ALONE], ids=["changes it", "turns behind it", "drops it"]
)
def test_a_template_that_takes_no_such_message_is_refused(source: str) -> None:
    with pytest.raises(TemplateRefused):
        of(source)

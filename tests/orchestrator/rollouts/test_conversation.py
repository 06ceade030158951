"""Conversations keep the tokens they sampled."""

from collections.abc import Sequence

import numpy as np
import pytest
from grpo.orchestrator.renderer import ChatRenderer
from grpo.orchestrator.rollouts.conversation import ChatMessage, Conversation, TrainingRow
from grpo.orchestrator.rollouts.templates import ChatTemplate
from grpo.transport.http import Choice
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.orchestrator import made
from tests.orchestrator.chat_templates import CHATML, LFM2, LLAMA3, LLAMA32, PHI3, PLAIN, QWEN3, renderer, tokenizer

SOURCES = {"quickstart": None, "chatml": CHATML, "llama3": LLAMA3, "qwen3": QWEN3, "plain": PLAIN, "lfm2": LFM2}
TEMPLATES = {name: ChatTemplate.of(renderer(source)) for name, source in SOURCES.items()} | {
    "phi3": ChatTemplate.of(renderer(PHI3)),
    "llama32": ChatTemplate.of(renderer(LLAMA32, date_string="26 Jul 2024")),
    "qwen3 without thinking": ChatTemplate.of(renderer(QWEN3, enable_thinking=False)),
}
IM_END = 258


def completion(ids: Sequence[int], *, stop: bool = True, versions: tuple[tuple[int, int], ...] = ()) -> Choice:
    logprobs = [-0.5 * (place + 1) for place in range(len(ids))]
    return replace(made.completion(ids, stop=stop, versions=versions), logprobs=logprobs)


def begun(name: str, *contents: str) -> Conversation:
    return Conversation(TEMPLATES[name], [{"role": "user", "content": content} for content in contents or ("hi",)])


# --- by hand ---


def test_letters_that_spell_the_end_of_a_turn_do_not_end_it() -> None:
    said = "x<|im_end|>"
    conversation = begun("quickstart")
    first = list(conversation.prompt_ids())
    conversation.answer(completion(said.encode(), stop=False), version=3, temperature=0.7)
    conversation.add({"role": "user", "content": "y"})
    assert list(conversation.prompt_ids())[: len(first) + len(said) + 2] == [*first, *said.encode(), 258, *b"\n"]


@pytest.mark.parametrize(("finish", "content"), [("stop", "x"), ("length", "x<|eot_id|>")])
def test_another_end_token_ends_an_answer_where_the_server_stopped_at_it(finish: str, content: str) -> None:
    [end] = TEMPLATES["quickstart"].renderer.ids_of("<|eot_id|>")
    conversation = begun("quickstart")
    assert TEMPLATES["quickstart"].end_id != end
    conversation.answer(completion([*b"x", end], stop=finish == "stop"), version=3, temperature=1.0)
    assert conversation.messages[-1] == {"role": "assistant", "content": content}


@pytest.mark.parametrize("ids", [[*b"xy"], [*b"xy", IM_END], [*b"x", IM_END, *b"y"], [IM_END, *b"xy", IM_END]])
def test_the_text_of_an_answer_has_no_control_tokens_wherever_they_stand(ids: list[int]) -> None:
    said = begun("chatml").texts_of(completion(ids))
    assert (said.plain, said.raw) == ("xy", TEMPLATES["chatml"].renderer.raw_text(ids))


def test_conversations_that_begin_alike_are_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered, render = list[object](), ChatRenderer.render
    monkeypatch.setattr(ChatRenderer, "render", lambda *a, **k: rendered.append(a) or render(*a, **k))
    first, second, other = begun("chatml", "to be or"), begun("chatml", "to be or"), begun("chatml", "to be")
    prompt = list(first.prompt_ids())
    first.answer(completion([*b"not", IM_END]), version=1, temperature=1.0)
    assert list(second.prompt_ids()) == prompt != list(other.prompt_ids())
    assert len(rendered) == 2
    second.answer(completion([*b"yes", IM_END]), version=1, temperature=1.0)
    assert [list(one.rows()[0].token_ids[-4:-1]) for one in (first, second)] == [[*b"not"], [*b"yes"]]


def test_a_row_says_of_every_token_where_it_came_from() -> None:
    conversation = begun("quickstart", "a")
    list(conversation.prompt_ids())
    conversation.answer(completion([*b"bc", 258]), version=3, temperature=0.5)
    conversation.add({"role": "user", "content": "d"})
    conversation.answer(completion(b"ef", stop=False, versions=((3, 1), (4, 1))), version=3, temperature=1.0)
    conversation.add({"role": "user", "content": "in no row"})
    (row,) = conversation.rows()
    # 9 of the question (<|im_start|>, 5 of "user", 1 of "a", <|im_end|>, newline), 11 that open the turn, 3 sampled;
    # then the newline, 9, 11, and 2 sampled.
    assert [(turn.opens, turn.begins, turn.ends) for turn in row.turns] == [(9, 20, 23), (33, 44, 46)]
    assert [turn.finish_reason for turn in row.turns] == ["stop", "length"]
    assert row.sampled.tolist() == [False] * 20 + [True] * 3 + [False] * 21 + [True] * 2
    assert row.logprobs.tolist() == [0.0] * 20 + [-0.5, -1.0, -1.5] + [0.0] * 21 + [-0.5, -1.0]
    assert row.temperatures.tolist() == [0.5] * 23 + [1.0] * 23
    assert row.versions == ((3, 45), (4, 1))
    assert row.spread([0.5, -2.0]).tolist() == [0.0] * 20 + [0.5] * 3 + [0.0] * 21 + [-2.0] * 2


def test_reasoning_that_the_template_takes_back_begins_a_new_row() -> None:
    conversation = begun("qwen3", "q")
    ids_of = TEMPLATES["qwen3"].renderer.ids_of
    sampled = [*ids_of("<think>\nhm\n</think>\n\nyes"), IM_END]
    first = list(conversation.prompt_ids())
    conversation.answer(completion(sampled), version=1, temperature=1.0)
    # The reasoning stays while tools answer, and goes with the next question.
    conversation.add({"role": "tool", "content": "t1"}, {"role": "tool", "content": "t2"})
    second = list(conversation.prompt_ids())
    responses = "\n<|im_start|>user\n<tool_response>\nt1\n</tool_response>\n<tool_response>\nt2\n</tool_response>"
    assert second == [*first, *sampled, *ids_of(responses + "<|im_end|>\n<|im_start|>assistant\n")]
    conversation.answer(completion([*sampled]), version=1, temperature=1.0)
    conversation.add({"role": "user", "content": "r"})
    third = list(conversation.prompt_ids())
    assert third == ids_of(TEMPLATES["qwen3"].render(conversation.messages))
    assert "hm" not in TEMPLATES["qwen3"].renderer.raw_text(third)
    conversation.answer(completion([*b"no", IM_END]), version=1, temperature=1.0)
    one, other = conversation.rows()
    assert [turn.index for turn in one.turns] == [0, 1]
    assert [turn.index for turn in other.turns] == [2]
    assert other.token_ids.tolist() == [*third, *b"no", IM_END]
    assert other.sampled.tolist() == [False] * len(third) + [True] * 3
    assert other.spread({2: 1.0}).sum() == 3


def test_reasoning_that_the_template_itself_opens_belongs_to_the_answer() -> None:
    template = ChatTemplate.of(renderer(QWEN3 + "{%- if add_generation_prompt -%}{{ '<think>\n' }}{%- endif -%}"))
    ids_of = template.renderer.ids_of
    conversation = Conversation(template, [{"role": "user", "content": "q"}])
    for role in ("tool", "user"):
        first = list(conversation.prompt_ids())
        sampled = [*ids_of("hm\n</think>\n\nyes"), IM_END]
        conversation.answer(completion(sampled), version=1, temperature=1.0)
        conversation.add({"role": role, "content": "r"})
        assert (list(conversation.prompt_ids())[: len(first) + len(sampled)] == [*first, *sampled]) == (role == "tool")
    conversation.answer(completion([IM_END]), version=1, temperature=1.0)
    assert len(conversation.rows()) == 2
    opening = ids_of("<|im_start|>assistant\n<think>\n")
    assert all(turn.begins - turn.opens == len(opening) for row in conversation.rows() for turn in row.turns)


def test_what_contradicts_itself_is_refused_and_changes_nothing() -> None:
    conversation = begun("quickstart")
    short = Choice(token_ids=[1, 2], logprobs=[0.0], finish_reason="stop")
    with pytest.raises(ValueError, match="log-prob"):
        conversation.answer(short, version=1, temperature=1.0)
    for versions in (((1, 3),), ((1, 1),), ((1, 2), (2, 1))):
        with pytest.raises(ValueError, match="cover"):
            conversation.answer(completion([1, 2], versions=versions), version=1, temperature=1.0)
    assert conversation.rows() == []
    with pytest.raises(ValueError, match="message"):
        Conversation(TEMPLATES["quickstart"], [])


# --- properties ---

SAID = st.text(st.sampled_from("ab \n.é🙂<>|"), max_size=8)
ROLES = {
    "quickstart": ["user", "tool", "critic"],
    "chatml": ["user", "critic"],
    "llama3": ["user", "ipython"],
    **{key: ["user", "tool"] for key in ("qwen3", "qwen3 without thinking", "lfm2", "llama32")},
    "phi3": ["user"],
    "plain": ["user", "tool"],
}


def answers(name: str) -> st.SearchStrategy[list[int]]:
    """Sampled ids."""
    template = TEMPLATES[name]
    marked = SAID | st.just("<think>\nwell\n</think>\n\nso") | st.just("<think>\nwell") | st.just("so</think>")
    endings = st.sampled_from([[], [] if template.end_id is None else [template.end_id]])
    text, noise = marked.map(template.renderer.ids_of), st.lists(st.integers(0, 262), max_size=6)
    return st.builds(lambda ids, end: [*ids, *end], text | noise, endings)


Drawn = tuple[str, list[ChatMessage], list[tuple[list[int], list[ChatMessage]]]]
"""(template, what comes before, [(sampled ids, what comes after)])"""


@st.composite
def conversations(draw: st.DrawFn) -> Drawn:
    name = draw(st.sampled_from(sorted(TEMPLATES)))
    messages = st.builds(lambda role, said: {"role": role, "content": said}, st.sampled_from(ROLES[name]), SAID)
    before = draw(st.lists(messages, min_size=1, max_size=3))
    if draw(st.booleans()):
        before = [{"role": "system", "content": draw(SAID)}, *before]
    turns = draw(st.lists(st.tuples(answers(name), st.lists(messages, max_size=3)), min_size=1, max_size=6))
    return name, list(before), [(ids, list(after)) for ids, after in turns]


class Reference:
    """The same by rendering everything every time, and comparing texts: slow, and short enough to be believed."""

    def __init__(self, template: ChatTemplate, messages: list[ChatMessage]) -> None:
        self.template, self.messages = template, messages
        self.shown, self.written, self.raw, self.ended = list[int](), "", "", ""
        """The row so far; what the template wrote; what was sampled, as text; the control token at its end."""
        self.num_rows = 0

    def prompt(self) -> list[int]:
        ids_of, text = self.template.renderer.ids_of, self.template.render(self.messages)
        if self.num_rows and text.startswith(self.written + self.raw):
            self.shown += ids_of(self.ended + text[len(self.written + self.raw) :])[len(ids_of(self.ended)) :]
        else:
            self.shown, self.num_rows = ids_of(text), self.num_rows + 1
        self.written = text
        return list(self.shown)

    def answer(self, ids: list[int], content: str) -> None:
        self.shown += ids
        self.raw = self.template.renderer.raw_text(ids)
        self.ended = self.raw[len(content) :]
        self.messages.append({"role": "assistant", "content": content})


@given(conversations())
def test_rows_hold_what_was_given_and_sampled_byte_for_byte(drawn: Drawn) -> None:
    name, before, turns = drawn
    conversation, reference = Conversation(TEMPLATES[name], before), Reference(TEMPLATES[name], list(before))
    asked: list[list[int]] = []
    for number, (ids, after) in enumerate(turns):
        prompt = list(conversation.prompt_ids())
        assert prompt == reference.prompt()
        asked.append(prompt)
        conversation.answer(completion(ids, stop=bool(ids)), version=number, temperature=1.0 + number)
        reference.answer(ids, str(conversation.messages[-1]["content"]))
        conversation.add(*after)
        reference.messages += after
    rows = conversation.rows()
    assert len(rows) == reference.num_rows
    check_rows(rows, asked, [ids for ids, _ in turns])


def check_rows(rows: list[TrainingRow], asked: list[list[int]], sampled: list[list[int]]) -> None:
    """Every turn is in one row, behind exactly what the server was asked, and nothing else counts as sampled."""
    assert [turn.index for row in rows for turn in row.turns] == list(range(len(sampled)))
    for row in rows:
        covered = np.zeros(len(row.token_ids), np.bool_)
        for turn in row.turns:
            assert row.token_ids[: turn.begins].tolist() == asked[turn.index]
            assert row.token_ids[turn.begins : turn.ends].tolist() == sampled[turn.index]
            assert row.logprobs[turn.begins : turn.ends].tolist() == completion(sampled[turn.index]).logprobs.tolist()
            assert (row.temperatures[turn.begins : turn.ends] == 1.0 + turn.index).all()
            assert turn.opens <= turn.begins
            covered[turn.begins : turn.ends] = True
        assert row.sampled.tolist() == covered.tolist()
        assert not row.logprobs[~covered].any()
        assert sum(num for _, num in row.versions) == len(row.token_ids) == row.turns[-1].ends


# --- what a turn costs ---


class CountingRenderer(ChatRenderer):
    """Counts what it tokenizes, in characters."""

    num_tokenized = 0

    def ids_of(self, text: str) -> list[int]:
        self.num_tokenized += len(text)
        return super().ids_of(text)


def test_a_turn_tokenizes_what_is_appended() -> None:
    counting = CountingRenderer(tokenizer(QWEN3))
    conversation = Conversation(ChatTemplate.of(counting), [{"role": "user", "content": "q" * 10}])
    costs = []
    for number in range(60):
        list(conversation.prompt_ids())
        costs.append(counting.num_tokenized)
        counting.num_tokenized = 0
        conversation.answer(completion([*b"a" * 10, IM_END]), version=number, temperature=1.0)
        conversation.add({"role": "tool", "content": "q" * 10})
    assert len(conversation.rows()) == 1
    assert len(set(costs[1:])) == 1

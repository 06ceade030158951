"""What a conversation must know of the model's chat template: how a turn opens and ends, and whether a message has a
say in how others are written."""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, TemplateError, nodes

from orchestrator.renderer import ChatRenderer

_PROBE = "probe-of-an-answer"
_MESSAGES = "messages"
MAX_KNOWN = 256
"""Sets of tools whose template is kept: about 2 KiB each."""


class TemplateRefused(ValueError):
    """The model's chat template does not take a conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """A renderer with the facts about its template.

    Example: of ChatML, ``opening="<|im_start|>assistant\\n"``, ``end_id`` that of ``<|im_end|>``, ``local=True``.
    """

    renderer: ChatRenderer
    tools: tuple[Mapping[str, Any], ...] | None
    """What the policy may call, in the OpenAI format, as the template is given them; None: nothing."""
    opening: str
    """The text that opens the policy's turn; empty where there is none, or it cannot be told."""
    opening_ids: tuple[int, ...]
    """The same as ids."""
    end_id: int | None
    """The control token that follows an answer; None where plain text does."""
    local: bool
    """Every message is rendered by itself, but for knowing whether it is the first. Then a few messages tell how the
    conversation goes on, however long it is; otherwise only all of them do."""

    @classmethod
    def of(cls, renderer: ChatRenderer, tools: Sequence[Mapping[str, Any]] | None = None) -> "ChatTemplate":
        """Looks at the template once. Raises TemplateRefused where it takes no question with its answer."""
        kept = None if tools is None else tuple(tools)
        try:
            opening, end_id = _opening(renderer, kept), _end_id(renderer, kept)
        except Exception as error:  # templates are code: they add texts to what is none, for example
            raise TemplateRefused(
                f"the model's chat template does not take a user's message and an answer to it: {error}; use a model "
                "whose template does"
            ) from error
        return cls(
            renderer=renderer,
            tools=kept,
            opening=opening,
            opening_ids=tuple(renderer.ids_of(opening)),
            end_id=end_id,
            local=is_local(renderer.source(kept)),
        )

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The conversation and the opening of the policy's turn. Raises TemplateRefused."""
        try:
            return self.renderer.render(messages, tools=self.tools, opened=True)
        except Exception as error:
            roles = [message.get("role") for message in messages]
            raise TemplateRefused(
                f"the model's chat template does not take messages of the roles {roles}: {error}; order them as the "
                "template expects, or use a model whose template takes them"
            ) from error


def _opening(renderer: ChatRenderer, tools: tuple[Mapping[str, Any], ...] | None) -> str:
    asked = [{"role": "user", "content": "x"}]
    closed, opened = (renderer.render(asked, tools=tools, opened=opened) for opened in (False, True))
    return opened[len(closed) :] if opened.startswith(closed) else ""


def _end_id(renderer: ChatRenderer, tools: tuple[Mapping[str, Any], ...] | None) -> int | None:
    asked = {"role": "user", "content": "x"}
    answered = [asked, {"role": "assistant", "content": _PROBE}, asked]
    _, found, ending = renderer.render(answered, tools=tools, opened=True).rpartition(_PROBE)
    ids = renderer.ids_of(ending) if found else []
    return ids[0] if ids and renderer.is_special(ids[0]) else None


class Templates:
    """The model's chat template, looked at once for each set of tools that was asked for lately."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self.renderer = renderer
        self._with_tools = functools.lru_cache(maxsize=MAX_KNOWN)(self._look)

    def of(self, tools: Sequence[Mapping[str, Any]] | None) -> ChatTemplate:
        """What tools say cannot end the turn in which the template tells of them. Raises TemplateRefused."""
        return self._with_tools(json.dumps(tools))

    def _look(self, written: str) -> ChatTemplate:
        tools = json.loads(written)
        harmless = None if tools is None else [self.renderer.without_control(tool) for tool in tools]
        return ChatTemplate.of(self.renderer, harmless)


# --- whether a template is local ---


@functools.lru_cache(maxsize=8)
def is_local(source: str) -> bool:
    """Whether a Jinja template writes something that depends on nothing but its settings, then every message by
    itself, then something that again depends on nothing but its settings. False where that cannot be told."""
    try:
        template = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source)
    except TemplateError:
        return False
    if any(True for _ in template.find_all(_NEVER)):
        return False
    lists, num_loops = {_MESSAGES}, 0
    for statement in template.body:
        if isinstance(statement, nodes.Assign) and _is_name(statement.node, lists):
            if not isinstance(statement.target, nodes.Name):
                return False
            lists.add(statement.target.name)
        elif isinstance(statement, nodes.For) and _is_name(statement.iter, lists):
            num_loops += 1
            if not _reads_one_message(statement, lists):
                return False
        elif _names(statement, lists):
            return False
    return num_loops == 1


_NEVER = (
    *(nodes.NSRef, nodes.Macro, nodes.CallBlock, nodes.Extends, nodes.Block, nodes.Include, nodes.Import),
    *(nodes.FromImport, nodes.Break, nodes.Continue, nodes.ExprStmt, nodes.Scope, nodes.ScopedEvalContextModifier),
)
"""What carries something from one message to the next, or may."""
_CARRIERS = {"namespace", "cycler", "joiner", "self", "caller", "varargs", "kwargs", "add_generation_prompt"}


def _is_name(node: nodes.Node, names: set[str]) -> bool:
    return isinstance(node, nodes.Name) and node.name in names


def _names(node: nodes.Node, names: set[str]) -> bool:
    """Whether any of `names` occurs in it, to be read or to be set."""
    return _is_name(node, names) or any(_is_name(name, names) for name in node.find_all(nodes.Name))


def _reads_one_message(loop: nodes.For, lists: set[str]) -> bool:
    plain = isinstance(loop.target, nodes.Name) and loop.test is None and not loop.else_ and not loop.recursive
    return plain and all(_is_of_one(statement, lists | _CARRIERS) for statement in loop.body)


def _is_of_one(node: nodes.Node, forbidden: set[str]) -> bool:
    """Whether a part of the loop's body looks at its own message alone."""
    if isinstance(node, nodes.Name):
        return node.name not in forbidden and node.name != "loop"
    if _asks_whether_first(node):
        return True
    if isinstance(node, nodes.For):  # `loop` is that of the inner loop, in its body
        inner = {name for name in forbidden if name != "loop"}
        own = [node.iter, *([node.test] if node.test is not None else [])]
        return all(_is_of_one(part, forbidden) for part in own) and not any(
            _names(statement, inner) for statement in [*node.body, *node.else_]
        )
    return all(_is_of_one(child, forbidden) for child in node.iter_child_nodes())


def _asks_whether_first(node: nodes.Node) -> bool:
    """`loop.first`, or a comparison of `loop.index0` with 0."""
    if _is_of_loop(node, "first"):
        return True
    return (
        isinstance(node, nodes.Compare)
        and _is_of_loop(node.expr, "index0")
        and len(node.ops) == 1
        and node.ops[0].op in ("eq", "ne", "gt")
        and isinstance(node.ops[0].expr, nodes.Const)
        and node.ops[0].expr.value == 0
    )


def _is_of_loop(node: nodes.Node, attribute: str) -> bool:
    return isinstance(node, nodes.Getattr) and node.attr == attribute and _is_name(node.node, {"loop"})

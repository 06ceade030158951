"""A hint as the model's chat template writes one more message of a role."""

from dataclasses import dataclass, field
from typing import Any

from orchestrator.rollouts.templates import ChatTemplate, TemplateRefused

ROLES = ("user", "system", "tool")
"""Whose message a hint may be."""

_PROBE = "probe-of-a-hint"
_QUESTION = {"role": "user", "content": "x"}
_BEFORE: tuple[tuple[dict[str, str], ...], ...] = (
    (_QUESTION,),
    (_QUESTION, {"role": "assistant", "content": "y"}),
)
"""What may stand before the hint while it is written: the second for templates whose speakers must take turns."""


class HintNotWritten(ValueError):
    """The chat template makes no message of a text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HintWriter:
    """Hints to ids.

    Example: of ChatML, ``HintWriter.of(template).text("Mind x.")`` is ``<|im_start|>user\\nMind x.<|im_end|>\\n``
    """

    template: ChatTemplate
    role: str
    opens_turns: bool
    """Whether the template opens the policy's turn with anything: then a turn whose opening cannot be told from what
    stands before it has no boundary for a hint."""
    _before: tuple[dict[str, str], ...] = field(repr=False)
    _closed: str = field(repr=False)
    """Those as the template writes them."""
    _opening: str = field(repr=False)

    @classmethod
    def of(cls, template: ChatTemplate, role: str = "user") -> "HintWriter":
        """Tries it once. Raises TemplateRefused where the template takes no further message of this role, and
        ValueError for a role that is none of ROLES."""
        if role not in ROLES:
            raise ValueError(f"hints are to be messages of the role {role!r}, expected one of {', '.join(ROLES)}")
        problems = []
        for before in _BEFORE:
            try:
                closed, opened = (_render(template, before, opened=opened) for opened in (False, True))
                if not opened.startswith(closed):
                    raise HintNotWritten("it does not open the policy's turn behind what was said before")
                opening = opened[len(closed) :]
                made = cls(
                    template=template,
                    role=role,
                    opens_turns=bool(opening),
                    _before=before,
                    _closed=closed,
                    _opening=opening,
                )
                made.text(_PROBE)
            except HintNotWritten as error:
                problems.append(str(error))
            else:
                return made
        raise TemplateRefused(
            f"the model's chat template takes no hint as a further message of the role {role!r}: {problems[-1]}; give "
            f"hints another role of {', '.join(ROLES)}, or use a model whose template takes it"
        )

    def text(self, hint: str) -> str:
        """The whole message; what would be read as a control token in it is made harmless, and half a surrogate pair a
        question mark. Raises HintNotWritten."""
        plain = hint.encode(errors="replace").decode().strip()
        message: dict[str, Any] = self.template.renderer.without_control({"role": self.role, "content": plain})
        if not (content := str(message["content"])):
            raise HintNotWritten("a hint without text")
        closed, opened = (_render(self.template, (*self._before, message), opened=one) for one in (False, True))
        if not closed.startswith(self._closed) or opened != closed + self._opening:
            raise HintNotWritten("it writes what stands before the message, or the turn behind it, in another way")
        text = closed[len(self._closed) :]
        if content not in text:
            raise HintNotWritten("it leaves out the message's text, or changes it")
        return text

    def ids(self, hint: str) -> list[int]:
        """The message's ids, tokenized alone: behind the token that ends a turn, because some tokenizers treat the
        beginning of a text otherwise than its middle. Raises HintNotWritten."""
        renderer, end_id, text = self.template.renderer, self.template.end_id, self.text(hint)
        if end_id is not None:
            ids = renderer.ids_of(renderer.raw_text([end_id]) + text)
            if ids[:1] == [end_id]:
                return ids[1:]
        return renderer.ids_of(text)


def _render(template: ChatTemplate, messages: tuple[dict[str, Any], ...], *, opened: bool) -> str:
    try:
        return template.renderer.render(messages, tools=template.tools, opened=opened)
    except Exception as error:  # templates are code
        raise HintNotWritten(str(error) or type(error).__name__) from error

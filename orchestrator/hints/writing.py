"""A hint as the model's chat template writes one more message of the user."""

from dataclasses import dataclass
from typing import Any

from orchestrator.rollouts.templates import ChatTemplate, TemplateRefused

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
    before: tuple[dict[str, str], ...] = _BEFORE[0]
    """Messages before the hint while it is written."""

    @classmethod
    def of(cls, template: ChatTemplate) -> "HintWriter":
        """Tries it once. Raises TemplateRefused where the template takes no further message of the user."""
        problem = ""
        for before in _BEFORE:
            made = cls(template=template, before=before)
            try:
                made.text("probe-of-a-hint")
            except HintNotWritten as error:
                problem = str(error)
            else:
                return made
        raise TemplateRefused(
            f"the model's chat template takes no hint as a further message of the user: {problem}; use a model whose "
            "template does"
        )

    @property
    def opens_turns(self) -> bool:
        """Whether the template opens the policy's turn with anything: then a turn whose opening cannot be told from
        what stands before it has no boundary for a hint."""
        return bool(self._rendered(*self.before)[1])

    def text(self, hint: str) -> str:
        """The whole message; what would be read as a control token in it is made harmless, and half a surrogate pair a
        question mark. Raises HintNotWritten."""
        plain = hint.encode(errors="replace").decode().strip()
        message: dict[str, Any] = self.template.renderer.without_control({"role": "user", "content": plain})
        before, opening = self._rendered(*self.before)
        closed, opening_behind = self._rendered(*self.before, message)
        text = closed.removeprefix(before)
        if not closed.startswith(before) or opening_behind != opening:
            raise HintNotWritten("it writes what stands before the message, or the turn behind it, in another way")
        if not (content := str(message["content"])) or content not in text:
            raise HintNotWritten("a hint without text, or it leaves out the text, or changes it")
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

    def _rendered(self, *messages: dict[str, Any]) -> tuple[str, str]:
        """The messages, and how the policy's turn opens behind them. Raises HintNotWritten."""
        render, tools = self.template.renderer.render, self.template.tools
        try:
            closed, opened = (render(messages, tools=tools, opened=opened) for opened in (False, True))
        except Exception as error:  # templates are code
            raise HintNotWritten(str(error) or type(error).__name__) from error
        if not opened.startswith(closed):
            raise HintNotWritten("it does not open the policy's turn behind what was said before")
        return closed, opened[len(closed) :]

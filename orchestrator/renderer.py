"""The model's chat template and tokenizer: prompts to ids, sampled ids to text."""

import contextlib
import functools
import re
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from grpo.orchestrator.rollouts.records import Messages
from grpo.transport.errors import UserError
from grpo.transport.http import Choice
from grpo.transport.imports import import_transformers_by_names
from grpo.transport.records import Int32
from grpo.transport.weights.chat_template import check_arguments

MAX_CHARACTERS_ON_LOOP, MAX_TOKENS_ON_LOOP = 1 << 14, 1 << 12
"""Longer texts and answers are tokenized, and made texts, in a thread: on the event loop all else would wait for it."""
MAX_CHARACTERS_AT_ONCE = 1 << 12
"""Texts up to this length take a millisecond at most, and are tokenized without giving Python's lock to others."""
TEMPLATE_S = 20.0
"""Deadline for the first rendering, its imports included."""


class ChatRenderer:
    """Renders with a Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any] = MappingProxyType({})) -> None:
        """`arguments`: of the chat template, at each rendering."""
        self._tokenizer, self._arguments = tokenizer, dict(arguments)
        self._backend = _backend_of(tokenizer)
        self._special_ids = frozenset(
            number for number, token in tokenizer.added_tokens_decoder.items() if token.special
        )
        specials = [str(tokenizer.added_tokens_decoder[number]) for number in self._special_ids]
        self._special_texts = _any_of(specials) if specials else None
        self._longest_special = max(map(len, specials), default=0)

    @classmethod
    def of_model(cls, folder: Path, arguments: Mapping[str, Any] = MappingProxyType({})) -> "ChatRenderer":
        """Returns the renderer of the model in `folder`, with `arguments` of its chat template. Raises UserError where
        the model has no tokenizer, the tokenizer no chat template, or the template no use for an argument."""
        try:
            tokenizer = load_tokenizer(folder)
        except (ValueError, OSError) as error:
            raise UserError(f"the tokenizer of {folder} cannot be loaded: {error}") from error
        if tokenizer.chat_template is None:
            raise UserError(f"the tokenizer of {folder} has no chat template; give a model.name that has one")
        check_arguments(folder, arguments)
        renderer = cls(tokenizer, arguments)
        first = threading.Thread(target=renderer._try_template, name="template", daemon=True)
        first.start()
        first.join(TEMPLATE_S)
        if first.is_alive():  # the thread ends with the process
            raise UserError(
                f"the chat template of {folder} does not come to an end with a single message (it was given "
                f"{TEMPLATE_S:g} s); mend it, or give a model.name that has another"
            )
        return renderer

    def _try_template(self) -> None:
        with contextlib.suppress(Exception):  # raised again where somebody asks
            self.render([{"role": "user", "content": "x"}], opened=True)

    def prompt_ids(self, messages: Messages) -> list[int]:
        """Ids of the conversation, in which nobody can spell out a control token, and of the opening of the policy's
        turn."""
        return self.ids_of(self.render([self.without_control(message) for message in messages], opened=True))

    def vocabulary(self) -> list[str]:
        """The text of each token id alone; of one that is no whole character, the signs that stand for its bytes."""
        names = {number: name for name, number in self._tokenizer.get_vocab().items()}
        single: list[str] = self._tokenizer.batch_decode([[number] for number in range(max(names) + 1)])
        return [names.get(number, text) if "\ufffd" in text else text for number, text in enumerate(single)]

    @functools.cached_property
    def longest_token(self) -> int:
        """Characters that one token stands for at most: as many as the longest name in the vocabulary has, in which
        each sign stands for a byte or more. (A normalizer that shortens texts, or one token for any unknown word, is
        not counted.)"""
        return max(map(len, self._tokenizer.get_vocab()))

    def texts(self, completions: Sequence[Choice]) -> list[str]:
        """Each completion without special tokens."""
        ids = [completion.token_ids.tolist() for completion in completions]
        if self._backend is not None and sum(map(len, ids)) <= MAX_TOKENS_ON_LOOP:
            return [self._backend.decode(one, skip_special_tokens=True) for one in ids]
        decode = self._tokenizer.batch_decode if self._backend is None else self._backend.decode_batch
        texts: list[str] = decode(ids, skip_special_tokens=True)  # the backend's lets other threads run meanwhile
        return texts

    # --- the parts, for conversations of several turns ---

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        opened: bool,
    ) -> str:
        """The conversation as text, with the opening of the policy's turn where it shall be `opened`. Raises what the
        template raises."""
        text: str = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=None if tools is None else [dict(tool) for tool in tools],
            tokenize=False,
            add_generation_prompt=opened,
            **self._arguments,
        )
        return text

    def closed_and_opened(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[str, str]:
        """The conversation without the opening of the policy's turn, and with it. Raises what the template raises.

        The end of the whole text, which some templates (Phi's) write where no turn is opened, is no part of it."""
        closed, opened = (self.render(messages, tools=tools, opened=one) for one in (False, True))
        if not opened.startswith(closed):
            closed = closed.removesuffix(self._tokenizer.eos_token or "")
        return closed, opened

    def ids_of(self, text: str) -> list[int]:
        """Ids of text as it stands; special tokens in it are read as such, none is added. A plain fast tokenizer's
        `encode` holds Python's lock, for seconds a megabyte. `encode_batch_fast` lets other threads run meanwhile, and
        then waits until they give the lock back, which holds up the event loop: it is for long texts alone."""
        if self._backend is None:
            return list(self._tokenizer(text, add_special_tokens=False).input_ids)
        if len(text) <= MAX_CHARACTERS_AT_ONCE:
            encoding = self._backend.encode(text, add_special_tokens=False)
        else:
            [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids

    def ids_behind(self, before: str, text: str) -> list[int]:
        """Ids of text as it stands behind another one, because some tokenizers treat the beginning of a text otherwise
        than its middle; of the text alone, where the two would become one token."""
        ids_before, ids = self.ids_of(before), self.ids_of(before + text)
        num = len(ids_before)
        return ids[num:] if ids[:num] == ids_before else self.ids_of(text)

    def raw_text(self, ids: Sequence[int] | Int32) -> str:
        """Text of ids, special tokens included."""
        if self._backend is not None:
            if len(ids) <= MAX_TOKENS_ON_LOOP:
                return str(self._backend.decode(np.asarray(ids).tolist(), skip_special_tokens=False))
            return str(self._backend.decode_batch([np.asarray(ids).tolist()], skip_special_tokens=False)[0])
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def without_control(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message, or a tool, whose texts cannot end their own turn or open another one: a space is put into what
        would be read as a control token, wherever in it that stands. Whoever writes into a conversation of others may
        have spelled one out."""
        return {self._harmless_text(key): self._harmless(value) for key, value in message.items()}

    def _harmless(self, value: Any) -> Any:
        """A copy of plain data."""
        if isinstance(value, str):
            return self._harmless_text(value)
        if isinstance(value, Mapping):
            return self.without_control(value)
        if isinstance(value, list | tuple):
            return [self._harmless(part) for part in value]
        return value

    def _harmless_text(self, text: str) -> str:
        if self._special_texts is None:
            return text
        if len(text) <= MAX_CHARACTERS_ON_LOOP:
            return self._special_texts.sub(_spaced, text)
        # In pieces, between which other threads may run.
        parts, at = list[str](), 0
        for begin in range(0, len(text), MAX_CHARACTERS_ON_LOOP):
            end = begin + MAX_CHARACTERS_ON_LOOP
            while found := self._special_texts.search(text, max(at, begin), end + self._longest_special):
                if found.start() >= end:
                    break
                parts += [text[at : found.start()], _spaced(found)]
                at = found.end()
        return "".join([*parts, text[at:]])

    def is_special(self, token_id: int) -> bool:
        """Whether it is a control token, which is no part of any text."""
        return token_id in self._special_ids

    def is_plain(self, ids: Int32) -> bool:
        """Whether `raw_text` of these ids is what `texts` makes of them too: there are no control tokens in them."""
        return self._backend is not None and self._special_ids.isdisjoint(ids.tolist())


def _spaced(found: re.Match[str]) -> str:
    return f"{found[0][0]} {found[0][1:]}"


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    """Returns a pattern that finds the longest of some texts. Those that begin alike are told apart only behind their
    first two characters: a vocabulary may have hundreds, and texts with their first character, megabytes."""
    by_head = defaultdict[str, list[str]](list)
    for text in sorted(texts, key=len, reverse=True):
        by_head[text[:2]].append(re.escape(text[2:]))
    heads = sorted(by_head, key=len, reverse=True)
    return re.compile("|".join(f"{re.escape(head)}(?:{'|'.join(by_head[head])})" for head in heads))


def _backend_of(tokenizer: Any) -> Any:
    """Returns the backend of a plain fast tokenizer, whose own wrapping takes several times as long as the work. None
    where a tokenizer does more than wrap."""
    from transformers import PreTrainedTokenizerFast

    if type(tokenizer) is not PreTrainedTokenizerFast or tokenizer.clean_up_tokenization_spaces:
        return None
    backend = tokenizer.backend_tokenizer
    backend.no_padding()
    backend.no_truncation()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    return backend


_IMPORTING = threading.Lock()
"""The library imports its parts lazily, which two threads cannot do at once."""


def load_tokenizer(name: Path | str) -> Any:
    """Loads the tokenizer of a folder, or of a name in the local cache. Where tokenizer.json says all, it does so
    without AutoTokenizer, whose import of torch takes 2 s and 350 MB."""
    with _IMPORTING, import_transformers_by_names():
        if (Path(name) / "tokenizer.json").is_file():
            from transformers import PreTrainedTokenizerFast as Tokenizer
        else:
            from transformers import AutoTokenizer as Tokenizer
    # Without a word on it, transformers asks the terminal whether code that comes with the model may run.
    return Tokenizer.from_pretrained(name, local_files_only=True, trust_remote_code=False)

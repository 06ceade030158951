"""Whether the numbers of tokens mean the same to the policy and to its teacher. No I/O but reading a tokenizer's files.

Only ids travel between them, so every token of the policy's must be the teacher's token of the same id, control tokens
included. The teacher may have more tokens than the policy, never fewer or others.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from orchestrator.teachers.scoring import TeacherRefused

NUM_SAMPLED = 2048
"""Ordinary tokens that probes cover, spread over the vocabulary."""
TOKENS_PER_PROBE = 512
MAX_NAMED = 3
"""Differences that an error spells out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Tokens as the tokenizer writes them, by id. Example: ``Vocabulary(tokens={5: "Ġthe"}, control=frozenset())``"""

    tokens: Mapping[int, str]
    control: frozenset[int]
    """Ids of the tokens that are part of no text, such as the end of a turn."""

    @classmethod
    def of_folder(cls, folder: Path) -> "Vocabulary":
        """Of the tokenizer in a model's folder. Raises ValueError where there is none that can be read."""
        path = folder / "tokenizer.json"
        if path.is_file():
            return cls.of_json(path.read_bytes(), str(path))
        if not (folder / "tokenizer_config.json").is_file():
            raise ValueError(f"{folder} has no tokenizer.json and no tokenizer_config.json; name a tokenizer's folder")
        try:
            from transformers import AutoTokenizer

            return cls.of_tokenizer(AutoTokenizer.from_pretrained(folder))
        except (OSError, ValueError) as error:
            raise ValueError(f"the tokenizer in {folder} cannot be read: {error}") from error

    @classmethod
    def of_json(cls, data: bytes, where: str) -> "Vocabulary":
        """Of the contents of a tokenizer.json. Raises ValueError where they are something else."""
        try:
            content = json.loads(data)
            vocab, added = content["model"]["vocab"], content.get("added_tokens") or []
            listed = vocab if isinstance(vocab, dict) else {entry[0]: index for index, entry in enumerate(vocab)}
            tokens = {int(index): str(token) for token, index in listed.items()}
            tokens |= {int(one["id"]): str(one["content"]) for one in added}
            control = frozenset(int(one["id"]) for one in added if one.get("special"))
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(
                f"{where} is no tokenizer.json: {type(error).__name__}: {error}; save the tokenizer again"
            ) from error
        return cls(tokens=tokens, control=control)

    @classmethod
    def of_tokenizer(cls, tokenizer: Any) -> "Vocabulary":
        """Of a Hugging Face tokenizer."""
        added = tokenizer.added_tokens_decoder
        tokens = {int(index): str(token) for token, index in tokenizer.get_vocab().items()}
        tokens |= {int(index): str(token) for index, token in added.items()}
        return cls(tokens=tokens, control=frozenset(int(index) for index, token in added.items() if token.special))


def check_same(ours: Vocabulary, theirs: Vocabulary, teacher: str) -> None:
    """Raises TeacherRefused, with the first differences, unless each of our tokens is theirs by the same id, and a
    control token only where it is one there."""
    others = sorted(index for index, token in ours.tokens.items() if theirs.tokens.get(index) != token)
    roles = sorted((ours.control ^ theirs.control) & ours.tokens.keys() - set(others))
    if not others and not roles:
        return
    found = [_difference(ours, theirs, index) for index in [*others, *roles][:MAX_NAMED]]
    raise TeacherRefused(
        "other_vocabulary",
        f"{teacher} has another vocabulary than the policy: {len(others) + len(roles)} of {len(ours.tokens)} tokens "
        f"differ, {sum(index in ours.control for index in others)} of them control tokens: {'; '.join(found)}; take a "
        "teacher of the policy's own family, with the same tokenizer",
    )


def _difference(ours: Vocabulary, theirs: Vocabulary, index: int) -> str:
    mine, other = ours.tokens[index], theirs.tokens.get(index)
    if mine == other:
        return f"{index} is {mine!r} for both, a control token only for {_holder(index in ours.control)}"
    return f"{index} is {mine!r} for the policy and {'nothing' if other is None else repr(other)} for the teacher"


def _holder(is_ours: bool) -> str:
    return "the policy" if is_ours else "the teacher"


# --- of a server whose files are elsewhere ---


class TextCodec(Protocol):
    """The policy's tokenizer at work; the orchestrator's ChatRenderer is one."""

    def ids_of(self, text: str) -> list[int]:
        """Ids of text as it stands, control tokens in it read as such."""

    def raw_text(self, ids: Sequence[int]) -> str:
        """Text of ids, control tokens included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A text that both must read as the same tokens."""

    text: str
    token_ids: tuple[int, ...]
    tokens: tuple[str, ...]
    """As the tokenizer writes them, one for each id."""


def probes(ours: Vocabulary, codec: TextCodec) -> list[Probe]:
    """Texts in which all control tokens occur and a sample of the others, evenly spread."""
    ordinary = sorted(ours.tokens.keys() - ours.control)
    spread = ordinary[:: max(1, len(ordinary) // NUM_SAMPLED)]
    chunks = [spread[start : start + TOKENS_PER_PROBE] for start in range(0, len(spread), TOKENS_PER_PROBE)]
    texts = [" ".join(ours.tokens[index] for index in sorted(ours.control)), *map(codec.raw_text, chunks)]
    found = [(text, tuple(codec.ids_of(text))) for text in texts if text]
    return [
        Probe(text=text, token_ids=ids, tokens=tuple(ours.tokens.get(index, "") for index in ids))
        for text, ids in found
        if ids
    ]


def check_probe(probe: Probe, token_ids: Sequence[int], tokens: Sequence[str] | None, teacher: str) -> None:
    """Raises TeacherRefused unless the teacher read a probe's text as we do. `tokens` are its names of those ids, None
    where it gives none."""
    named = tokens is not None and len(tokens) == len(token_ids)
    ours = list(zip(probe.token_ids, probe.tokens, strict=True))
    theirs = list(zip(token_ids, tokens if tokens is not None and named else [""] * len(token_ids), strict=True))
    differs = [one != other if named else one[0] != other[0] for one, other in zip(ours, theirs, strict=False)]
    if tokens is not None and not named:
        what = f"it names {len(tokens)} tokens of {len(token_ids)}"
    elif any(differs):
        place = differs.index(True)
        what = f"it reads {_shown(theirs[place])} where the policy reads {_shown(ours[place])}"
    elif len(theirs) != len(ours):
        what = f"it reads {len(theirs)} tokens where the policy reads {len(ours)}"
    else:
        return
    raise TeacherRefused(
        "other_vocabulary",
        f"{teacher} has another tokenizer than the policy: {what}, in {probe.text[:60]!r}; take a teacher of the "
        "policy's own family, with the same tokenizer",
    )


def _shown(token: tuple[int, str]) -> str:
    return f"token {token[0]} ({token[1]!r})" if token[1] else f"token {token[0]}"

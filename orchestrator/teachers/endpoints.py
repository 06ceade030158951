"""The servers that can score by prefill: requests to bytes, answers to log-probabilities. No I/O.

`L` tokens of one row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import msgspec
import numpy as np

from orchestrator.teachers.alignment import problem_in
from orchestrator.teachers.scoring import TeacherRefused
from transport.records import Float32, Int32

A = TypeVar("A")


class Endpoint(Protocol):
    """One way of asking for the log-probabilities of given tokens."""

    @property
    def path(self) -> str:
        """Below the server's address."""

    @property
    def about(self) -> str:
        """The path that tells what the server reads."""

    @property
    def model(self) -> str | None:
        """The name by which the server's other routes know the teacher; None for its only one."""

    def request(self, token_ids: Int32, temperature: float) -> bytes:
        """The body. Raises TeacherRefused for a temperature that cannot be had exactly."""

    def read(self, data: bytes, token_ids: Int32) -> Float32:
        """[L] of the answer's body, the first 0. Raises TeacherRefused where it is none."""

    def longest(self, data: bytes) -> int | None:
        """Tokens of the longest row that the server can score, by what it says `about` itself; None where that does not
        tell. Raises TeacherRefused where the teacher is not there."""


def is_one(temperature: float) -> bool:
    """Whether it is 1, but for rounding to float32."""
    return abs(temperature - 1.0) < 1e-6


def knows_no_temperature(message: str) -> bool:
    """Whether a server's error says that it scores at temperature 1 only."""
    return "unknown field `temperature`" in message


# --- grpo-infer ---


class _Score(msgspec.Struct):
    version: int | None
    logprobs: list[float]


class PolicyInfo(msgspec.Struct):
    """What a grpo-infer says of itself."""

    max_model_len: int
    base_model: str | None = None
    """Its identity."""
    live: list[int] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyEndpoint:
    """A grpo-infer's POST /policy/score: its base model, or a version that it keeps live."""

    version: int | None
    """None is the base model."""
    path: ClassVar[str] = "/policy/score"
    about: ClassVar[str] = "/policy/info"
    model: ClassVar[None] = None

    def request(self, token_ids: Int32, temperature: float) -> bytes:
        """Names the temperature only where it is not 1: a server that knows no other refuses the request, and says
        so."""
        body: dict[str, Any] = {"version": self.version, "token_ids": token_ids.tolist()}
        return msgspec.json.encode(body if is_one(temperature) else body | {"temperature": temperature})

    def read(self, data: bytes, token_ids: Int32) -> Float32:
        """[L] of an answer that has [L - 1]."""
        answer = decoded(data, _Score)
        if answer.version != self.version:
            raise TeacherRefused(
                "nonsense", f"it scored under version {answer.version}, expected {self.version}; is it a grpo-infer?"
            )
        return checked(answer.logprobs, token_ids)

    def longest(self, data: bytes) -> int | None:
        """One token fewer than the model reads, for vLLM samples one more. Raises TeacherRefused where the version is
        not live."""
        info = decoded(data, PolicyInfo)
        if self.version is not None and self.version not in info.live:
            raise TeacherRefused(
                "refused",
                f"version {self.version} is not live; live are {info.live or 'none'}; load it, or name another",
            )
        return info.max_model_len - 1


# --- any vLLM server with OpenAI's routes ---


class _TokenLogprob(msgspec.Struct):
    logprob: float | None


class _Choice(msgspec.Struct):
    prompt_logprobs: list[dict[int, _TokenLogprob] | None] | None = None
    prompt_token_ids: list[int] | None = None


class _Completed(msgspec.Struct):
    choices: list[_Choice]


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionsEndpoint:
    """POST /v1/completions with `prompt_logprobs`, which vLLM's server has: the prompt is the row's token ids, and of
    the one token that must be sampled nothing is used.

    Only at temperature 1: vLLM takes `prompt_logprobs` before any processing, temperature included, whatever its
    `logprobs_mode` (ModelConfig.logprobs_mode). log softmax(z / t) of a token needs the sum of exp(z / t) over the
    whole vocabulary, which neither the token's own log-probability nor those of the k likeliest give. And scoring at 1
    what was sampled at t would teach a student that equals its teacher to become another: the term's expectation would
    not vanish there. So other temperatures are refused.
    """

    model: str
    path: ClassVar[str] = "/v1/completions"
    about: ClassVar[str] = "/v1/models"

    def request(self, token_ids: Int32, temperature: float) -> bytes:
        """Raises TeacherRefused unless the temperature is 1."""
        if not is_one(temperature):
            raise TeacherRefused(
                "temperature",
                f"it scores at temperature 1 only, and these tokens were sampled at {temperature:g}: OpenAI's routes "
                "give log-probabilities of the prompt before any temperature, and those of single tokens cannot be "
                "converted; set sampling.temperature to 1, or serve the teacher with grpo-infer",
            )
        return msgspec.json.encode(
            {
                "model": self.model,
                "prompt": token_ids.tolist(),
                "max_tokens": 1,
                "temperature": 0.0,
                "prompt_logprobs": 0,
                "return_token_ids": True,
            }
        )

    def read(self, data: bytes, token_ids: Int32) -> Float32:
        """[L] of an answer with one entry for each token of the prompt, the first of them null."""
        answer = decoded(data, _Completed)
        if len(answer.choices) != 1:
            raise TeacherRefused("nonsense", f"it answered {len(answer.choices)} choices, expected 1")
        choice = answer.choices[0]
        _same_ids(choice.prompt_token_ids, token_ids)
        entries = choice.prompt_logprobs
        if entries is None:
            raise TeacherRefused(
                "nonsense", "its answer has no prompt_logprobs; only a server of vLLM's kind can be a teacher"
            )
        if len(entries) != len(token_ids):
            raise _other_length(len(entries), len(token_ids))
        return checked([_own(entries[t], int(token_ids[t]), t) for t in range(1, len(entries))], token_ids)

    def longest(self, data: bytes) -> int | None:
        """One token fewer than the model reads, where the server tells. Raises TeacherRefused where it does not serve
        the model."""
        models = {one.id: one for one in decoded(data, _Models).data}
        if self.model not in models:
            raise TeacherRefused("refused", f"it does not serve {self.model!r}; it serves {sorted(models)}")
        length = models[self.model].max_model_len
        return None if length is None else length - 1


def decoded(data: bytes, answer: type[A]) -> A:
    """The record that the JSON holds. Raises TeacherRefused where it holds something else."""
    try:
        return msgspec.json.decode(data, type=answer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TeacherRefused("nonsense", f"its answer cannot be read: {error}; it begins {data[:100]!r}") from error


def _same_ids(theirs: list[int] | None, ours: Int32) -> None:
    """Servers that repeat the prompt must have read our tokens."""
    if theirs is None or theirs == ours.tolist():
        return
    if len(theirs) != len(ours):
        raise _other_length(len(theirs), len(ours))
    place = next(t for t in range(len(theirs)) if theirs[t] != ours[t])
    raise TeacherRefused(
        "other_tokens",
        f"it read token {theirs[place]} at place {place}, expected {ours[place]}; it changes what it gets",
    )


def _other_length(num_theirs: int, num_ours: int) -> TeacherRefused:
    return TeacherRefused(
        "other_tokens",
        f"it answered about {num_theirs} tokens, expected {num_ours}; a server that adds tokens to a prompt of ids, or "
        "cuts it, cannot be a teacher",
    )


def _own(entry: dict[int, _TokenLogprob] | None, token: int, place: int) -> float:
    if entry is None or token not in entry:
        about = "nothing" if not entry else f"the tokens {sorted(entry)[:5]}"
        raise TeacherRefused(
            "other_tokens",
            f"at place {place} it answered about {about}, expected token {token}; does it have another tokenizer?",
        )
    value = entry[token].logprob
    return float("nan") if value is None else value


def checked(logprobs: Sequence[float], token_ids: Int32) -> Float32:
    """[L] of those of tokens 1 to L - 1, the first 0. Raises TeacherRefused where they are too few or too many, or no
    log-probabilities."""
    if len(logprobs) != len(token_ids) - 1:
        raise _other_length(len(logprobs) + 1, len(token_ids))
    with np.errstate(over="ignore"):
        scored = np.array([0.0, *logprobs], np.float64).astype(np.float32)
    if (problem := problem_in(scored)) is not None:
        raise TeacherRefused("not_finite", f"among its log-probabilities {problem}")
    return np.minimum(scored, np.float32(0))

"""The two kinds of servers that can score by prefill: requests, and answers to log-probabilities. No I/O.

`L` tokens of one sample.
"""

from typing import Any, TypeVar

import msgspec

from orchestrator.teacher.scoring import TeacherFailure, checked
from transport.records import Float32, Int32

A = TypeVar("A")


class _Score(msgspec.Struct):
    version: int | None
    logprobs: list[float]


class PolicyInfo(msgspec.Struct):
    """What a grpo-infer says about itself."""

    max_model_len: int
    base_model: str | None = None


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


class ServedModels(msgspec.Struct):
    """What a server with OpenAI's routes serves."""

    data: list[_Model]


class PolicyScore:
    """The base model of a grpo-infer."""

    path = "/policy/score"

    def request(self, token_ids: Int32, temperature: float) -> dict[str, Any]:
        """The body."""
        return {"version": None, "token_ids": token_ids.tolist(), "temperature": temperature}

    def read(self, data: bytes, token_ids: Int32) -> Float32:
        """[L] of an answer that has [L - 1]. Raises TeacherFailure."""
        answer = decoded(data, _Score)
        if answer.version is not None:
            raise TeacherFailure("nonsense", f"it scored under version {answer.version}, expected its base model")
        return checked(answer.logprobs, token_ids)


class Completions:
    """The completions of any vLLM server: the prompt is the sample's token ids, and of the one token that must be
    sampled nothing is used.

    Only at temperature 1: vLLM takes `prompt_logprobs` before any processing, temperature included. log softmax(z / t)
    needs the sum of exp(z / t) over the whole vocabulary, which these do not give, and scoring at 1 what was sampled at
    t would teach a student that equals its teacher to become another.
    """

    path = "/v1/completions"

    def __init__(self, model: str) -> None:
        """`model`: the name under which the server has the teacher."""
        self.model = model

    def request(self, token_ids: Int32, temperature: float) -> dict[str, Any]:
        """The body. Raises TeacherFailure unless the temperature is 1."""
        if abs(temperature - 1.0) > 1e-6:
            raise TeacherFailure(
                "temperature",
                f"it scores at temperature 1 only, and these tokens were sampled at {temperature:g}; set "
                "sampling.temperature to 1, or serve the teacher with grpo-infer",
            )
        sampled = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "return_token_ids": True}
        return {"model": self.model, "prompt": token_ids.tolist(), **sampled}

    def read(self, data: bytes, token_ids: Int32) -> Float32:
        """[L] of an answer with one entry for each token of the prompt, the first of them null. Raises
        TeacherFailure."""
        choices = decoded(data, _Completed).choices
        if len(choices) != 1 or (entries := choices[0].prompt_logprobs) is None:
            raise TeacherFailure(
                "nonsense", "it gives no prompt_logprobs; only a server of vLLM's kind can be a teacher"
            )
        ids, read = token_ids.tolist(), choices[0].prompt_token_ids
        if len(entries) != len(ids) or read not in (None, ids):
            raise TeacherFailure("other_tokens", "it read other tokens than it was sent; it changes what it gets")
        logprobs = []
        for token, entry in zip(ids[1:], entries[1:], strict=True):
            if entry is None or token not in entry:
                raise TeacherFailure("other_tokens", f"it says nothing about token {token}, which it was sent")
            logprobs.append(entry[token].logprob)
        return checked(logprobs, token_ids)


def decoded(data: bytes, answer: type[A]) -> A:
    """The record that the JSON holds. Raises TeacherFailure."""
    try:
        return msgspec.json.decode(data, type=answer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TeacherFailure("nonsense", f"its answer cannot be read: {error}; it begins {data[:100]!r}") from error

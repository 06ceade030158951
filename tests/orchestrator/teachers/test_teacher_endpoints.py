"""The servers' formats, in bytes."""

import json
from typing import Any

import numpy as np
import pytest

from orchestrator.teachers.endpoints import CompletionsEndpoint, Endpoint, PolicyEndpoint
from orchestrator.teachers.scoring import TeacherRefused

IDS = np.array([5, 6, 7], np.int32)
OPENAI = CompletionsEndpoint(model="large")
OURS = PolicyEndpoint(version=3)


def completed(entries: Any, **more: Any) -> bytes:
    return json.dumps({"id": "x", "choices": [{"text": "a", "prompt_logprobs": entries, **more}]}).encode()


def entry(token: int, logprob: float | None) -> dict[str, Any]:
    return {str(token): {"logprob": logprob, "rank": 1, "decoded_token": "a"}}


def scored(*logprobs: float, version: int | None = 3) -> bytes:
    return json.dumps({"version": version, "logprobs": logprobs}).encode()


GOOD = [None, entry(6, -0.5), entry(7, -2.0)]


def test_a_completion_is_asked_for_by_ids_with_the_prompts_log_probabilities() -> None:
    assert json.loads(OPENAI.request(IDS, 1.0)) == {
        "model": "large",
        "prompt": [5, 6, 7],
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": 0,
        "return_token_ids": True,
    }


def test_each_token_has_the_log_probability_that_the_answer_gives_it() -> None:
    found = OPENAI.read(completed(GOOD, prompt_token_ids=[5, 6, 7]), IDS)
    assert (str(found.dtype), found.tolist()) == ("float32", [0, -0.5, -2])
    assert OURS.read(scored(-0.5, -2.0), IDS).tolist() == [0, -0.5, -2]


def test_likelier_tokens_beside_ours_are_passed_over() -> None:
    answer = completed([None, entry(6, -0.5) | entry(9, -0.1), entry(7, -2.0)])
    assert OPENAI.read(answer, IDS).tolist() == [0, -0.5, -2]


def test_rounding_above_zero_is_zero() -> None:
    assert OURS.read(scored(1e-6, -2.0), IDS).tolist() == [0, 0, -2]


@pytest.mark.parametrize("temperature", [0.7, 1.001, 2.0])
def test_openais_routes_refuse_other_temperatures_than_one(temperature: float) -> None:
    with pytest.raises(TeacherRefused, match=r"temperature 1 only.*set sampling\.temperature to 1") as caught:
        OPENAI.request(IDS, temperature)
    assert caught.value.reason == "temperature"


def test_a_temperature_of_one_in_float32_is_one() -> None:
    assert b"large" in OPENAI.request(IDS, float(np.float32(1) + np.float32(1e-7)))


def test_our_server_is_told_a_temperature_that_is_not_one() -> None:
    assert json.loads(OURS.request(IDS, 1.0)) == {"version": 3, "token_ids": [5, 6, 7]}
    assert json.loads(OURS.request(IDS, 0.5)) == {"version": 3, "token_ids": [5, 6, 7], "temperature": 0.5}


@pytest.mark.parametrize(
    ("endpoint", "data", "reason", "message"),
    [
        (OPENAI, b"<html>502</html>", "nonsense", "cannot be read.*<html>"),
        (OPENAI, b"\xff\xfe", "nonsense", "cannot be read"),
        (OPENAI, b'{"choices": ' + b"[" * 100_000, "nonsense", "cannot be read"),
        (OPENAI, b'{"choices": []}', "nonsense", "0 choices"),
        (OPENAI, completed(None), "nonsense", "no prompt_logprobs"),
        (OPENAI, completed(GOOD[:2]), "other_tokens", "about 2 tokens, expected 3"),
        (OPENAI, completed([None, *GOOD]), "other_tokens", "about 4 tokens, expected 3"),
        (
            OPENAI,
            completed([None, entry(6, -1), entry(8, -1)]),
            "other_tokens",
            "place 2 .* tokens .8., expected token 7",
        ),
        (OPENAI, completed([None, None, entry(7, -1)]), "other_tokens", "place 1 .* nothing, expected token 6"),
        (OPENAI, completed(GOOD, prompt_token_ids=[5, 9, 7]), "other_tokens", "read token 9 at place 1, expected 6"),
        (OPENAI, completed(GOOD, prompt_token_ids=[5, 7]), "other_tokens", "about 2 tokens"),
        (OPENAI, completed([None, entry(6, None), entry(7, -1)]), "not_finite", "not finite"),
        (OPENAI, completed([None, entry(6, -1), entry(7, -9999.0)]), "not_finite", "minus infinity"),
        (OPENAI, completed([None, entry(6, 14.5), entry(7, -1)]), "not_finite", "14.5.*raw_logits"),
        (OPENAI, completed([None, entry(6, float("nan")), entry(7, -1)]), "nonsense", "cannot be read"),
        (OURS, scored(-0.5, -2.0, version=2), "nonsense", "under version 2, expected 3"),
        (OURS, scored(-0.5, -2.0, version=None), "nonsense", "under version None, expected 3"),
        (OURS, scored(-0.5), "other_tokens", "about 2 tokens, expected 3"),
        (OURS, scored(-0.5, -1e300), "not_finite", "not finite"),
        (OURS, scored(-0.5, 3.0), "not_finite", "is 3, expected at most 0"),
    ],
)
def test_an_answer_that_is_none_is_refused_with_its_reason(
    endpoint: Endpoint, data: bytes, reason: str, message: str
) -> None:
    with pytest.raises(TeacherRefused, match=f"(?s){message}") as caught:
        endpoint.read(data, IDS)
    assert caught.value.reason == reason


def test_one_place_of_what_the_model_reads_is_for_the_token_that_vllm_samples() -> None:
    models = json.dumps({"object": "list", "data": [{"id": "large", "max_model_len": 64}]}).encode()
    assert OPENAI.longest(models) == 63
    assert OPENAI.longest(b'{"data": [{"id": "large"}]}') is None
    assert OURS.longest(b'{"max_model_len": 64, "live": [3]}') == 63


def test_a_model_or_version_that_is_not_served_is_refused() -> None:
    with pytest.raises(TeacherRefused, match=r"does not serve 'large'; it serves \['small'\]"):
        OPENAI.longest(b'{"data": [{"id": "small"}]}')
    with pytest.raises(TeacherRefused, match=r"version 3 is not live; live are \[4, 5\]"):
        OURS.longest(b'{"max_model_len": 64, "live": [4, 5]}')
    assert PolicyEndpoint(version=None).longest(b'{"max_model_len": 64}') == 63

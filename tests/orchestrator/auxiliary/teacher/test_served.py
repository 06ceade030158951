"""Asking a teacher over HTTP, and everything that it may do instead of answering."""

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from grpo.configs.auxiliary import TeacherSettings
from grpo.orchestrator.auxiliary.teacher.served import ServedTeacher, open_teacher
from grpo.orchestrator.auxiliary.teacher.tokens import shared_tokens
from grpo.orchestrator.endpoints import EndpointError
from grpo.transport.records import NO_TEACHER_LOGPROB, Float32, Int32

from tests.orchestrator.auxiliary.teacher.serving import FakeTeacher, Fault, answering, in_turn
from tests.orchestrator.chat_server import cut
from tests.orchestrator.fakes import MODEL


def ids(*tokens: int) -> Int32:
    return np.array(tokens, np.int32)


@pytest_asyncio.fixture
async def server() -> AsyncIterator[FakeTeacher]:
    async with FakeTeacher().serving() as server:
        yield server


def teacher(*servers: str) -> ServedTeacher:
    client = {"base_url": servers, "timeout": 60.0}
    settings = TeacherSettings.model_validate({"model": {"name": "large"}, "client": client})
    return ServedTeacher(settings, api_key=None)


async def scored(by: ServedTeacher, row: Int32) -> Float32:
    try:
        return await by.score(row, 1.0)
    finally:
        await by.close()


async def failure(by: ServedTeacher) -> EndpointError:
    with pytest.raises(EndpointError) as raised:
        await scored(by, ids(5, 6, 7))
    return raised.value


@pytest.mark.parametrize(
    "choice", [{"prompt_token_ids": [5, 6, 8]}, {"prompt_logprobs": [None, {"6": {"logprob": -1}}, {}]}]
)
async def test_answers_about_other_tokens_are_none(server: FakeTeacher, choice: dict[str, Any]) -> None:
    known = {"prompt_logprobs": [None, {"6": {"logprob": -1}}, {"7": {"logprob": -2}, "9": {"logprob": 0}}]}
    server.fault = in_turn(answering(200, text=json.dumps({"choices": [known | choice]})))
    assert (await failure(teacher(server.url))).reason == "nonsense"
    server.fault = in_turn(answering(200, text=json.dumps({"choices": [known]})))
    assert (await scored(teacher(server.url), ids(5, 6, 7))).tolist() == [0, -1, -2]


@pytest.mark.parametrize(
    ("faults", "reason", "num_tries"),
    [
        ([], None, 1),
        ([answering(503), cut], None, 3),  # may pass
        ([answering(400)], "refused", 1),
        ([answering(200, text="<html>")], "nonsense", 1),
    ],
)
async def test_what_may_pass_is_tried_again(
    server: FakeTeacher, faults: list[Fault], reason: str | None, num_tries: int
) -> None:
    server.fault, by = in_turn(*faults), teacher(server.url + "/v1")
    if reason is None:
        assert (await scored(by, ids(5, 6, 7))).tolist() == pytest.approx([0, -0.06, -0.07])
    else:
        found = await failure(by)
        assert found.reason == reason
        assert server.url in str(found)
    assert len(server.asked) == num_tries


# --- before the run ---


async def opened(
    *servers: FakeTeacher,
    name: str = str(MODEL),
    tokenizer: str | None = None,
    temperature: float = 1.0,
    wait_s: float = 60.0,
) -> ServedTeacher:
    model = {"name": name, "tokenizer": tokenizer}
    client = {"base_url": [one.url for one in servers]}
    settings = TeacherSettings.model_validate({"model": model, "client": client})
    found = await open_teacher(settings, model_folder=MODEL, api_key=None, temperatures=[temperature], wait_s=wait_s)
    await found.close()
    return found


async def test_our_servers_are_told_from_vllms_and_waited_for() -> None:
    ours, theirs = FakeTeacher(ours=True, num_busy=2), FakeTeacher(ours=False, model="served", num_busy=2)
    async with ours.serving(), theirs.serving():
        found = await opened(ours, temperature=1.5)
        assert (found.ours, found.longest, ours.asked[0]["temperature"]) == (True, 15, 1.5)
        found = await opened(theirs, name="served", tokenizer=str(MODEL))
        assert (found.ours, found.longest, theirs.asked[0]["prompt"][:2]) == (False, 15, [0, 1])
        for refused in (opened(ours, theirs), opened(theirs, name=str(MODEL)), opened(theirs, temperature=2.0)):
            with pytest.raises(ValueError, match=r"grpo-infer|does not serve|temperature"):
                await refused


async def test_a_teacher_that_never_comes_up_is_named() -> None:
    with pytest.raises(ValueError, match="did not come up"):
        await opened(FakeTeacher(), wait_s=0.3)


def made_tokenizer(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The policy's tokenizer with a change."""
    tokenizer = json.loads((MODEL / "tokenizer.json").read_bytes())
    change(tokenizer)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


async def test_tokens_that_mean_the_same_are_known_by_the_teachers_ids_and_others_are_left_out(
    server: FakeTeacher, tmp_path: Path
) -> None:
    def change(tokenizer: dict[str, Any]) -> None:
        first, second, third = tokenizer["added_tokens"][:3]
        first["content"], second["content"] = second["content"], first["content"]  # numbered otherwise
        third["content"] = "<|stop|>"  # another one

    ids = [one["id"] for one in json.loads((MODEL / "tokenizer.json").read_bytes())["added_tokens"]]
    tokens = shared_tokens(MODEL, made_tokenizer(tmp_path, change))
    row = np.array([65, ids[0], ids[2], 66], np.int32)
    assert tokens.translated(row).tolist() == [65, ids[1], 66]
    assert tokens.spread(np.array([0, -1, -2], np.float32), row).tolist() == [0, -1, NO_TEACHER_LOGPROB, -2]
    by = teacher(server.url)
    await by.use(tokens, [1.0])
    found = await scored(by, np.array([5, ids[2], 7], np.int32))
    assert found.tolist() == [0, NO_TEACHER_LOGPROB, pytest.approx(-0.07)]
    assert server.asked[-1]["prompt"] == [5, 7]


def test_a_teacher_that_knows_too_few_tokens_is_refused(tmp_path: Path) -> None:
    def change(tokenizer: dict[str, Any]) -> None:
        vocab = tokenizer["model"]["vocab"]
        tokenizer["model"]["vocab"] = {
            f"x{token}" if index % 8 == 0 else token: index for token, index in vocab.items()
        }
        tokenizer["model"]["merges"] = []

    with pytest.raises(ValueError, match="another vocabulary"):
        shared_tokens(MODEL, made_tokenizer(tmp_path, change))

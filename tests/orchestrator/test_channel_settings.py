"""What settings of teachers, hints and teachers' disagreement change, where no other test shows it.

Those of models behind an API are in `test_channel_apis.py`.
"""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import pytest_asyncio
from aiohttp import web
from msgspec.structs import replace

from configs.channels import TeacherSettings
from orchestrator.episodes.records import EpisodeResult
from orchestrator.frozen import FrozenVersion
from orchestrator.renderer import ChatRenderer
from orchestrator.scheduler import Scheduler, Ticket
from orchestrator.teachers.opening import open_teacher
from orchestrator.teachers.scoring import Scored, TeacherFailure
from tests.orchestrator.disagreement.teachers import FakeTeachers, drained, teachers_serving
from tests.orchestrator.disagreement.test_channel import result
from tests.orchestrator.disagreement.test_opening import channel_of, pairs_of, teachers
from tests.orchestrator.fakes import MODEL, FakeServer
from tests.orchestrator.test_channels import run
from transport.records import Hint

KEY_VAR = "CHANNEL_TEST_KEY"


@pytest_asyncio.fixture
async def fake() -> AsyncIterator[FakeTeachers]:
    async with teachers_serving() as serving:
        yield serving


@pytest_asyncio.fixture
async def server() -> AsyncIterator[FakeServer]:
    server = await FakeServer(lambda prompt, version: "abc").start()
    yield server
    await server.stop()


# --- teachers that may disagree ---


def saying(question: str, *before: dict[str, str]) -> EpisodeResult:
    """A rollout of one turn, with messages before its question."""
    made = result(0, 0, question, "Y")
    [step] = made.steps
    step = replace(step, messages=(*before, {"role": "user", "content": question}))
    return replace(made, steps=(step,))


@pytest.mark.parametrize("role", ["user", "tool"])
async def test_tools_speak_to_a_teacher_in_the_role_that_is_set(fake: FakeTeachers, role: str) -> None:
    settings = {"teachers": teachers(fake, tool_role=role), "select": ["all"]}
    await pairs_of(channel_of(settings), [saying("Where?", {"role": "tool", "content": "3"})])
    assert {body["messages"][0]["role"] for _, body in fake.requests} == {role}


@pytest.mark.parametrize(("most", "num"), [(None, 3), (2, 2)])
async def test_so_many_turns_of_a_rollout_are_asked_about(fake: FakeTeachers, most: int | None, num: int) -> None:
    made = result(0, 0, "Where?", "Y")
    steps = [replace(made.steps[0], messages=({"role": "user", "content": f"{n}"},)) for n in range(3)]
    [row] = made.rows
    rows = tuple(replace(row, steps=(n,)) for n in range(3))
    settings = {"teachers": teachers(fake), "select": ["all"], "max_turns": most}
    assert len(await pairs_of(channel_of(settings), [replace(made, steps=tuple(steps), rows=rows)])) == num


@pytest.mark.parametrize(("most", "num"), [(0, 4), (1, 3), (2, 2)])
async def test_so_many_states_are_remembered(fake: FakeTeachers, most: int, num: int) -> None:
    channel = channel_of({"teachers": teachers(fake), "select": ["all"], "max_cached_states": most})
    for number, question in enumerate(("here", "there", "there", "here")):
        channel.offer([result(number, 0, question, "Y")])
        await drained(channel)
    await channel.close()
    assert fake.num_requests("a") == num


# --- the teacher ---


class Busy(FakeServer):
    """Answers `num_busy` requests for log-probabilities with 429, and the others `after_s` later."""

    num_busy, after_s = 0, 0.0
    num_running = most_running = 0

    async def _score(self, request: web.Request) -> web.Response:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await asyncio.sleep(self.after_s)
            if self.num_busy:
                self.num_busy -= 1
                return web.Response(status=429)
            return await super()._score(request)
        finally:
            self.num_running -= 1


async def scored(client: dict[str, Any], *, num_rows: int = 1, **faults: Any) -> tuple[Busy, list[Scored]]:
    """What a teacher says to different rows that is well when it is opened, and has `faults` then."""
    server = Busy()
    await server.start()
    settings = {"model": {"name": str(MODEL)}, "client": {"base_url": [server.url], **client}}
    teacher = await open_teacher(
        TeacherSettings.model_validate(settings),
        model_folder=MODEL,
        renderer=ChatRenderer.of_model(MODEL),
        api_key=None,
        temperatures=[1.0],
        wait_s=5.0,
    )
    for name, value in faults.items():
        setattr(server, name, value)
    rows = [np.array([5, token], np.int32) for token in range(num_rows)]
    answers = await teacher.score(rows, [1.0] * num_rows)
    await teacher.close()
    await server.stop()
    return server, answers


@pytest.mark.parametrize(
    ("client", "faults", "told"),
    [
        ({"timeout": 0.1}, {"after_s": 2.0}, "no answer within 0.1 s"),
        ({"try_timeout_s": 0.1, "retries": 0}, {"after_s": 2.0}, "1 tries, the last: no answer within 0.1 s"),
        ({"retries": 0}, {"num_busy": 1}, "1 tries, the last: /policy/score answered 429"),
        ({"retries": 1}, {"num_busy": 1}, ""),
    ],
)
async def test_deadlines_and_tries_of_a_teacher_are_those_of_the_settings(
    client: dict[str, Any], faults: dict[str, Any], told: str
) -> None:
    _, [answer] = await scored(client, **faults)
    assert isinstance(answer, TeacherFailure) == bool(told)
    assert told in str(answer)


@pytest.mark.parametrize("most", [1, 3])
async def test_so_many_requests_to_a_teacher_are_under_way(most: int) -> None:
    server, _ = await scored({"max_concurrent_requests": most}, num_rows=6, after_s=0.01)
    assert server.most_running == most


async def test_a_run_asks_the_teacher_at_its_address_with_the_key_that_is_named(
    tmp_path: Path, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VAR, "secret")
    teacher = await FakeServer().start()
    teacher.api_key, teacher.scored = "secret", -0.25
    client = {"base_url": [teacher.url], "api_key_var": KEY_VAR}
    asking = {"model": {"name": str(MODEL)}, "client": client}
    batches, _ = await run(tmp_path, server, {"teacher_tau": 1.0}, teacher_model=asking, max_steps=1)
    await teacher.stop()
    for batch in batches[1]:
        assert batch.teacher_logprobs is not None
        assert set(batch.teacher_logprobs[batch.loss_mask].tolist()) == {-0.25}
    assert server.scores == []


# --- hints ---

MARKING = '''
from grpo import Environment, MultiTurnEpisode, Rubric

def zero(completion):
    return 0.0

class Wrong(MultiTurnEpisode, Environment):
    """Marks the first two of three answers."""
    rubric = Rubric([zero])
    max_turns = 3
    def dataset(self, split):
        return [{"prompt": f"{split} {number}"} for number in range(8)]
    async def respond(self, state, ctx):
        if state.turn < 3:
            state.mark_error("unknown_word", "words", "there is no such word")
        return "go on"
'''


async def hinted(folder: Path, server: FakeServer, **hints: Any) -> tuple[list[Hint], dict[str, float], str]:
    """The hints of a batch of 8 rollouts, its metrics, and the first of what the teacher of hints read."""
    (folder / "envs.py").write_text(MARKING)
    batches, [line] = await run(
        folder / "run",
        server,
        {"alpha_sdpo": 0.1},
        env=[{"id": f"{folder / 'envs.py'}:Wrong"}],
        hints=hints,
        batch_size=8,
        max_steps=1,
    )
    found = [hint for batch in batches[1] for _, hint in batch.hints]
    return found, line, ChatRenderer.of_model(MODEL).raw_text(found[0].teacher_token_ids.tolist())


async def test_hints_come_from_the_sources_with_the_texts_the_length_and_the_role_that_are_set(
    tmp_path: Path, server: FakeServer
) -> None:
    (tmp_path / "own.yaml").write_text('words: "Mind this. {message}"\n')
    templates = {"sources": ["sibling", "templates"], "templates": str(tmp_path / "own.yaml")}
    found, line, text = await hinted(tmp_path, server, **templates, role="system", max_per_sample=1, max_chars=9)
    assert (len(found), line["hints/given_templates"], line["hints/left_out_beyond_first"]) == (8, 8, 8)
    assert line["hints/declined_no_sibling"] == 8
    assert "<|im_start|>system\nMind this. there is ...<|im_end|>\n<|im_start|>assistant\nabc<|im_end|>" in text
    assert {len(hint.student_index) for hint in found} == {len("abc") + 1}


HALF = '''
from grpo import Environment, MultiTurnEpisode, Rubric

def half(completion):
    return 0.5

class Half(MultiTurnEpisode, Environment):
    """Marks one of two answers, and gives half a point for either."""
    rubric = Rubric([half])
    max_turns = 2
    def dataset(self, split):
        return [{"prompt": f"{split} {number}"} for number in range(8)]
    async def respond(self, state, ctx):
        if state.last_text == "bad":
            state.mark_error("unknown_word", "words", "there is no such word")
        return "go on"
'''


@pytest.mark.parametrize(("reward", "given"), [({}, False), ({"sibling_reward": 0.5}, True)])
async def test_a_sibling_succeeded_from_the_reward_that_is_set(
    tmp_path: Path, server: FakeServer, reward: dict[str, float], given: bool
) -> None:
    answers = cycle(["bad", "good"])
    server.answer = lambda prompt, version: next(answers)
    (tmp_path / "envs.py").write_text(HALF)
    env = [{"id": f"{tmp_path / 'envs.py'}:Half"}]
    hints = {"sources": ["sibling"], "max_per_sample": 1} | reward
    _, [line] = await run(
        tmp_path / "run", server, {"alpha_sdpo": 0.1}, env=env, hints=hints, batch_size=8, max_steps=1
    )
    assert line["hints/errors"] > 0
    assert (line["hints/given"] > 0, line.get("hints/declined_no_sibling", 0) > 0) == (given, not given)


async def test_a_model_writes_hints_and_what_follows_is_compared_if_wanted(
    tmp_path: Path, server: FakeServer, fake: FakeTeachers
) -> None:
    fake.does["writer"] = lambda messages: "Mind the gap."
    writer = {"name": "w", "base_url": fake.base_url, "model": "writer", "price": {"prompt": 10.0}}  # 1 a question
    found, line, text = await hinted(
        tmp_path, server, sources=["model"], model=writer, max_per_sample=1, until_end=True
    )
    assert line["hints/given_model"] == 8
    assert line["hints/model_cost"] == line["hints/model_answered"] == fake.num_requests("writer")
    assert "<|im_start|>user\nMind the gap.<|im_end|>\n" in text
    assert {len(hint.student_index) for hint in found} == {3 * (len("abc") + 1)}
    assert "there is no such word" in json.dumps(fake.requests[0][1]["messages"])


# --- how many versions are asked at once (`max_loras` in configs/cross.py) ---

Event = tuple[Literal["start", "teach", "finish", "train"], int]


def most_at_once(max_lag: int, every: int, events: Iterable[Event]) -> int:
    """Versions that are sampled under, scored under or loaded at once, at most, when groups and versions come so. The
    number of an event chooses among the groups that it can be about."""
    scheduler = Scheduler(
        groups_per_batch=2,
        max_async_level=min(1, max_lag),
        max_off_policy_steps=max_lag,
        max_in_flight=100,
        max_steps=None,
        oversampling_factor=3.0,
    )
    frozen, sampled, taught = FrozenVersion(every, scheduler), list[Ticket](), list[tuple[Ticket, int, ExitStack]]()
    most, live = 0, 0
    for told in (scheduler, frozen):
        told.version_live(0)
    for what, which in events:
        if what == "start":
            while (ticket := scheduler.start()) is not None:
                sampled.append(ticket)
        elif what == "teach" and sampled:
            using = ExitStack()
            using.enter_context(frozen.using())
            taught.append((sampled.pop(which % len(sampled)), frozen.version or 0, using))
        elif what == "finish" and taught:
            ticket, _, using = taught.pop(which % len(taught))
            using.close()
            scheduler.completed(ticket.group)
        elif what == "train":
            while scheduler.ship() is not None:
                pass
            loading = {live + 1} if live < scheduler.shipped else set()
            scored_under = {version for _, version, _ in taught if version}
            most = max(most, len({ticket.version for ticket in sampled} | scored_under | loading))
            for version in loading:
                live = version
                scheduler.version_live(live)
                frozen.version_live(live)
    return most


def drawn(seed: int) -> Iterator[Event]:
    """Groups of all speeds, the newer ones often the faster."""
    draw = random.Random(seed)
    for _ in range(300):
        yield draw.choice(("start", "teach", "teach", "finish", "train")), draw.choice((0, 1, 3, -1, -1, -1, -1))


@pytest.mark.parametrize(("every", "num_more"), [(0, 0), (1, 0), (2, 1), (3, 1), (10, 1)])
@pytest.mark.parametrize("max_lag", [1, 2])
def test_besides_the_versions_of_groups_in_flight_and_the_one_that_is_loaded_one_teaches_and_no_other(
    max_lag: int, every: int, num_more: int
) -> None:
    most = max(most_at_once(max_lag, every, drawn(seed)) for seed in range(100))
    assert most == max_lag + 1 + num_more

"""What the settings of a model behind an API change: a teacher that may disagree, the judge, who writes hints."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

from configs.channels import ApiSettings
from orchestrator.disagreement.asked import AskedForHints, NoAnswer
from orchestrator.disagreement.channel import DisagreementChannel
from orchestrator.disagreement.opening import open_hint_model
from tests.orchestrator.disagreement.teachers import FakeTeachers, Say, drained, slow, status, teachers_serving
from tests.orchestrator.disagreement.test_channel import result
from tests.orchestrator.disagreement.test_opening import OWN_KEY_VAR, channel_of, teachers

KEY_VAR = "CHANNEL_TEST_KEY"


@pytest_asyncio.fixture
async def fake() -> AsyncIterator[FakeTeachers]:
    async with teachers_serving() as serving:
        yield serving


WHOEVER = pytest.mark.parametrize("who", ["teacher", "judge", "hint_model"])
PREFIX = {"teacher": "pairs/questions_", "judge": "pairs/judge_", "hint_model": "hints/model_"}
NO_OUTCOMES = ("asked", "requests", "cost", "cached")


class Asked:
    """One of them, made from its settings, asked one question after the other."""

    def __init__(self, who: str, opened: DisagreementChannel | AskedForHints) -> None:
        self._prefix, self._opened = PREFIX[who], opened
        self.told = ""
        """What people were told of the newest question."""
        self.cost = 0.0

    async def ask(self, number: int) -> str:
        """What became of question `number`, as it is counted."""
        if isinstance(self._opened, AskedForHints):
            try:
                self.told = await self._opened([{"role": "user", "content": f"Where {number}?"}])
            except NoAnswer as error:
                self.told = str(error)
        else:
            self._opened.offer([result(number, 0, f"Where {number}?", "Y")])
            await drained(self._opened)
            self.told = " ".join(self._opened.problems().values())
        metrics = self._opened.metrics()
        self.cost = metrics.get("pairs/cost", metrics.get("hints/model_cost", 0.0))
        counts = {key.removeprefix(self._prefix): num for key, num in metrics.items() if key.startswith(self._prefix)}
        [outcome] = [key for key, num in counts.items() if num and "/" not in key and key not in NO_OUTCOMES]
        return outcome


@asynccontextmanager
async def asked(who: str, fake: FakeTeachers, servers: Sequence[str] = (), **settings: Any) -> AsyncIterator[Asked]:
    """Called `one`, and its model `large` at `fake`, unless `settings` say otherwise."""
    one = {"name": "one", "base_url": fake.base_url, "model": "large"} | settings
    opened: DisagreementChannel | AskedForHints
    if who == "hint_model":
        made = ApiSettings.model_validate(one)
        own: dict[str, Any] = {"own_servers": lambda: servers, "own_api_key_var": OWN_KEY_VAR}
        opened = open_hint_model(made, **own, base_model_name="configs/some/model", seed=0)
    elif who == "judge":
        fake.does |= dict.fromkeys("ab", lambda messages: str(messages[-1]["content"]))
        both = teachers(fake)[:2]
        opened = channel_of({"teachers": both, "select": ["all"], "agreement": "judge", "judge": one}, servers)
    else:
        opened = channel_of({"teachers": [one], "num_agreeing": 1, "select": ["all"]}, servers)
    try:
        yield Asked(who, opened)
    finally:
        await opened.close()


@WHOEVER
async def test_a_request_is_what_the_settings_say(
    fake: FakeTeachers, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VAR, "k-1")
    odd = {"temperature": None, "max_tokens_field": "max_completion_tokens", "extra": {"top_p": 0.5}}
    own = {"api_key_var": KEY_VAR, "max_tokens": 7}
    for settings in ({"temperature": 0.3}, odd | own):
        async with asked(who, fake, **settings) as one:
            assert await one.ask(0) == "answered"
    (plain_headers, plain), (headers, body) = [request for request in fake.requests if request[1]["model"] == "large"]
    assert "Authorization" not in plain_headers
    assert headers["Authorization"] == "Bearer k-1"
    assert {key: plain[key] for key in plain if key != "messages"} == {
        "model": "large",
        "temperature": 0.3,
        "max_tokens": 1024,
    }
    assert {key: body[key] for key in body if key != "messages"} == {
        "model": "large",
        "max_completion_tokens": 7,
        "top_p": 0.5,
    }


@WHOEVER
async def test_without_an_address_the_runs_own_servers_are_asked_for_the_base_model(
    fake: FakeTeachers, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OWN_KEY_VAR, "k-2")
    own = [fake.base_url.removesuffix("/v1")]
    async with asked(who, fake, own, base_url=None, model=None) as one:
        assert await one.ask(0) == "answered"
    [headers] = [headers for headers, body in fake.requests if body["model"] == "configs/some/model"]
    assert headers["Authorization"] == "Bearer k-2"


@WHOEVER
async def test_whoever_does_not_answer_is_called_by_name(fake: FakeTeachers, who: str) -> None:
    fake.says["large"].append(status(400))
    async with asked(who, fake, name="the-wise") as one:
        assert await one.ask(0) == "refused"
        assert "the-wise did not answer" in one.told


FAILS = status(500)


@WHOEVER
@pytest.mark.parametrize(
    ("settings", "says", "outcomes"),
    [
        ({"timeout": 0.05}, [slow], ["timeout"]),
        ({"retries": 0}, [FAILS], ["server_error", "answered"]),
        ({"requests_per_s": 0.001, "burst": 1}, [], ["answered", "over_rate"]),
        ({"requests_per_s": 0.001, "burst": 2}, [], ["answered", "answered", "over_rate"]),
        ({"requests_per_s": 1000.0, "burst": 1}, [], ["answered", "answered"]),
        ({"retries": 0, "failure_threshold": 1}, [FAILS], ["server_error", "resting"]),
        ({"retries": 0, "failure_threshold": 2}, [FAILS] * 2, ["server_error", "server_error", "resting"]),
        ({"retries": 0, "failure_threshold": 1, "cooldown_s": 1e-6}, [FAILS], ["server_error", "answered"]),
    ],
)
async def test_deadlines_tries_rates_and_rests_are_those_of_the_settings(
    fake: FakeTeachers, who: str, settings: dict[str, Any], says: list[Say], outcomes: list[str]
) -> None:
    fake.says["large"] += says
    async with asked(who, fake, **settings) as one:
        assert [await one.ask(number) for number in range(len(outcomes))] == outcomes


@WHOEVER
@pytest.mark.parametrize(
    ("price", "cost"),
    [({}, 0.0), ({"prompt": 10}, 1.0), ({"completion": 50}, 0.5), ({"prompt": 1, "completion": 1}, 0.11)],
)
async def test_prices_make_the_cost(fake: FakeTeachers, who: str, price: dict[str, float], cost: float) -> None:
    # 100,000 tokens of prompt and 10,000 of the answer: 0.1 and 0.01 of the price of a million
    async with asked(who, fake, price=price) as one:
        await one.ask(0)
        assert one.cost == pytest.approx(cost)

"""What settings of the orchestrator change in what the program does."""

import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from grpo.orchestrator.checks import Mismatch
from grpo.orchestrator.inference.client import ServerError
from grpo.orchestrator.loops.sample import temperature_of

from tests.orchestrator import running
from tests.orchestrator.fakes import FakeServer, settings_for
from tests.orchestrator.running import Run

OWN = """
from grpo import Environment, Rubric

def number(completion, example):
    return float(completion)

class Words(Environment):
    rubric = Rubric([number])

    def __init__(self, words="abcdefgh"):
        self.words = words

    def dataset(self, split):
        return [{"prompt": word, "length": len(self.words)} for word in self.words]

def hungry(completion, example):
    return float(len(bytearray(3_000_000_000 if completion == "1" else 1)))

class Hungry(Words):
    rubric = Rubric([hungry])

def zeros(rewards, lengths, *, plus=0.0):
    return [plus] * len(rewards)
"""


def asked_of(server: FakeServer) -> list[str]:
    """The words that were asked, in the order of asking."""
    texts = [bytes(i for i in request["prompt_token_ids"] if i < 256).decode() for request in server.requests]
    return [text.split("\n")[1] for text in texts]


def sampled(server: FakeServer) -> list[dict[str, Any]]:
    """The requests but for those of the evaluation."""
    return [request for request in server.requests if request["temperature"] > 0]


def by_turns(*answers: str) -> Callable[[str, int], str]:
    """The answers to each prompt, one after the other and then again."""
    given: Counter[str] = Counter()

    def answer(prompt: str, version: int) -> str:
        given[prompt] += 1
        return answers[(given[prompt] - 1) % len(answers)]

    return answer


async def run(folder: Path, server: FakeServer, **changes: Any) -> Run:
    """A run of two steps of two groups of two, unless told otherwise; one group at a time, so in a known order."""
    base = {
        "env": [{"id": f"{folder / 'own.py'}:Words"}],
        "batch_size": 4,
        "rollouts_per_example": 2,
        "max_steps": 2,
        "max_concurrent_groups": 1,
        "eval": {"num_examples": 0},
    }
    settings = base | changes
    server.requests.clear()
    sequence_len = {"sequence_len": settings.get("seq_len", 128)}
    adapters = {"lora_adapters": settings.get("model", {}).get("lora_adapters", ())}
    trainer = {"settings": sequence_len | adapters, **sequence_len}
    return await running.run(Path(tempfile.mkdtemp(dir=folder)), server, trainer=trainer, **settings)


@pytest.fixture
def env(tmp_path: Path) -> str:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return f"{path}:Words"


@pytest.fixture
def server(server: FakeServer) -> FakeServer:
    server.answer = by_turns("0", "1")
    return server


async def test_names_sizes_and_requests_are_as_they_are_set(tmp_path: Path, env: str, server: FakeServer) -> None:
    model = settings_for(tmp_path, server).model.model_dump() | {"lora_adapter": "mine"}
    named = [{"id": env, "name": "words", "args": {"words": "xyz"}}, {"id": env, "name": "a", "args": {"words": "ab"}}]
    sizes: dict[str, Any] = {"batch_size": 12, "rollouts_per_example": 3, "max_steps": 3, "seq_len": 32}
    schedule = {"type": "linear", "start_temperature": 1.5, "end_temperature": 0.5}
    sampling = {"max_tokens": 9, "seed": 5, "temp_scheduler": schedule}
    buffer = {"env_ratios": [3, 1], "hash_keys": ["length"]}  # all words of an environment are one example
    made = await run(tmp_path, server, model=model, env=named, sampling=sampling, buffer=buffer, **sizes)
    assert {load["alias"] for load in server.loads} == {"mine"}
    assert {"reward/mean/words", "reward/mean/a"} <= made.steps[0].keys()
    assert Counter(asked_of(server)) == {"x": 9, "a": 3}
    assert made.steps[0]["progress/examples_duplicate"] == 3
    assert {(request["n"], request["max_tokens"]) for request in sampled(server)} == {(3, 9)}
    assert len({request["seed"] for request in sampled(server)} - {None}) == len(sampled(server))
    # Strictly on-policy: versions 0, 1 and 2 are at 1.5, 1.0 and 0.5.
    at = {request["version"]: request["temperature"] for request in sampled(server)}
    assert at == {0: 1.5, 1: 1.0, 2: 0.5}
    assert [line["rollout/temperature"] for line in made.steps] == [1.5, 1.0, 0.5]
    for step, expected in ((1, 1.5), (2, 1.0), (3, 0.5)):
        # Each sample has 24 tokens or so, and shares its prompt's: one prompt and its answers in 32, not both.
        assert sorted(len(batch.sequence_lengths) for batch in made.batches[step]) == [3, 9]
        assert {number for batch in made.batches[step] for number in batch.temperatures.tolist()} == {expected}


async def test_a_role_samples_trains_and_is_evaluated_with_its_adapter_or_the_one_that_is_set(
    tmp_path: Path, env: str, server: FakeServer
) -> None:
    model = settings_for(tmp_path, server).model.model_dump() | {"lora_adapters": ("one", "two")}
    server.adapters = ("two",)
    mine: dict[str, Any] = {"env": [{"id": env, "adapters": {"policy": "two"}}], "max_steps": 1}
    for own, evaluated in (({}, "two"), ({"env": [{"id": env, "adapters": {"policy": "one"}}]}, "one")):
        made = await run(tmp_path, server, model=model, eval={"num_examples": 1} | own, **mine)
        assert {request["adapter"] for request in sampled(server)} == {"two"}
        assert {request["adapter"] for request in server.requests if request["temperature"] == 0} == {evaluated}
        trained = [batch.adapters for batch in made.batches[1]]
        assert [places for one in trained if one is not None for places in one.tolist()] == [1] * 4

    with pytest.raises(Mismatch, match="judge"):  # which is no role of the environment
        await run(tmp_path, server, model=model, env=[{"id": env, "adapters": {"judge": "two"}}])


async def test_an_answer_whose_reward_needs_too_much_memory_is_dropped(
    tmp_path: Path, env: str, server: FakeServer
) -> None:
    server.answer = by_turns("0", "1", "2")
    sizes: dict[str, Any] = {"batch_size": 6, "rollouts_per_example": 3, "max_steps": 1}
    hungry = {"id": f"{tmp_path / 'own.py'}:Hungry", "memory_gb": 1}
    made = await run(tmp_path, server, env=[hungry], **sizes)
    assert made.summary.rollouts_dropped == {"env_memory": 2}


async def test_without_verification_no_rubric_runs_and_every_reward_is_0(
    tmp_path: Path, env: str, server: FakeServer
) -> None:
    server.answer = lambda prompt, version: "no number, which the rubric cannot read"
    own = {"type": "custom", "import_path": f"{tmp_path / 'own.py'}:zeros", "kwargs": {"plus": 1.0}}
    made = await run(tmp_path, server, buffer={"skip_verification": True}, advantage=own)
    assert [line["reward/mean"] for line in made.steps] == [0, 0]
    assert made.summary.rollouts_trained == 8
    assert made.summary.rollouts_dropped == {}


async def test_a_locked_server_and_another_model_are_refused_unless_settings_say_otherwise(
    tmp_path: Path, env: str, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.api_key, server.info["base_model"] = "secret", "other"
    monkeypatch.setenv("MY_KEY", "secret")
    client = {"base_url": [server.url], "timeout": 2}
    with pytest.raises(ServerError, match="401"):
        await run(tmp_path, server, client=client)
    with pytest.raises(Mismatch):
        await run(tmp_path, server, client=client | {"api_key_var": "MY_KEY"})
    opened = client | {"api_key_var": "MY_KEY", "skip_model_check": True}
    assert (await run(tmp_path, server, client=opened)).summary.steps == 2


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        # From 1.2 to 0.4 in 4 equal steps of -0.2: versions 0 to 4 of 5 steps. There it stays.
        (("linear", 1.2, 0.4), [1.2, 1.0, 0.8, 0.6, 0.4, 0.4]),
        # (1 - cos(π x)) / 2 at x = 0, 1/4, 1/2, 3/4, 1 is 0, 0.1464, 0.5, 0.8536, 1.
        (("cosine", 1.0, 2.0), [1, 1.146447, 1.5, 1.853553, 2, 2]),
        (None, [1.0] * 6),
    ],
)
def test_a_temp_scheduler_goes_from_version_0_to_the_last_batchs_version(
    schedule: tuple[str, float, float] | None, expected: list[float]
) -> None:
    keys = ("type", "start_temperature", "end_temperature")
    chosen = {"temp_scheduler": dict(zip(keys, schedule, strict=True))} if schedule else {}
    settings = settings_for(Path("x"), max_steps=5, sampling=chosen, client={})
    assert [temperature_of(settings, version) for version in range(6)] == pytest.approx(expected)

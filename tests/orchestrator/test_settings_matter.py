"""For every setting of the orchestrator a test that changing it changes what the program does.

Tests here say by `@matters` which settings they are about; `ELSEWHERE` names the tests of the others.
"""

import ast
import asyncio
import json
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import pytest_asyncio
from aiohttp import web

from configs.orch import OrchSettings
from configs.reference import rows
from orchestrator.client import ServerError
from orchestrator.loop import orchestrate
from orchestrator.monitoring.summary import Summary
from orchestrator.parts import make_buffer, make_temperature
from orchestrator.startup import Mismatch
from tests.orchestrator.fakes import FakeServer, FakeTrainer, settings_for
from transport.errors import StaleRunError
from transport.records import MicroBatch

TESTS = Path(__file__).parents[1]
REFUSED = "configs/test_settings.py::test_values_that_cannot_be_honoured_are_errors"
CROSS = "configs/test_cross.py::test_a_contradiction_names_both_files_keys_and_values"
CHANNELS = "transport/test_channels.py"
RESUMING = "orchestrator/test_resuming.py"
LOOP = "orchestrator/test_loop.py"
EVALUATE = "orchestrator/test_evaluate.py"
REPORTING = "orchestrator/test_trackers.py"

ELSEWHERE = {
    "model.name": "orchestrator/test_cli.py::test_a_missing_model_ends_with_1_and_says_what_was_looked_for",
    "model.lora_rank": f"{LOOP}::test_a_trainer_with_other_settings_is_an_error_with_both_values_before_it_has_loaded_"
    "its_model",
    "model.lora_alpha": CROSS,
    "env[].id": f"{LOOP}::test_an_environment_that_always_raises_stops_the_run_with_its_traceback",
    "output_dir": f"{LOOP}::test_summary_metrics_ledger_and_picture_tell_the_same_story",
    "max_async_level": f"{LOOP}::test_every_batch_is_shipped_once_and_its_lag_stays_within_the_bound",
    "max_off_policy_steps": "orchestrator/test_scheduler.py::test_a_batch_waits_for_a_slow_group_that_would_age_out",
    "sleep_mode": "orchestrator/test_sleep.py::test_servers_sleep_before_a_batch_leaves_and_wake_before_its_version_is"
    "_loaded",
    "client.base_url": "orchestrator/test_relay.py::test_a_run_begins_with_one_of_two_servers_and_the_other_joins_late",
    "client.elastic.hostname": "orchestrator/test_discovery.py::test_a_run_finds_its_server_by_name",
    "client.elastic.port": "orchestrator/test_discovery.py::test_a_run_finds_its_server_by_name",
    "client.elastic.sync_interval": "orchestrator/test_discovery.py::test_the_name_is_looked_up_once_in_the_interval",
    "client.health_interval_s": "orchestrator/test_pacing.py::test_a_server_is_asked_once_in_the_interval",
    "client.health_timeout_s": "orchestrator/test_health.py::test_what_a_server_was_asked_that_falls_silent_goes_"
    "elsewhere_and_it_returns_when_it_speaks",
    "min_concurrent_groups": "orchestrator/test_pacing.py::test_the_groups_in_flight_follow_what_the_server_says",
    "client.timeout": f"{LOOP}::test_a_server_that_never_comes_up_is_named_within_the_deadline",
    "eval.env[].num_workers": "orchestrator/test_hosted.py::test_a_whole_run_of_episodes_in_two_processes",
    "eval.env[].memory_gb": "orchestrator/test_hosted.py::test_code_that_misbehaves_costs_its_own_rollout_alone",
    "env[].num_workers": "orchestrator/test_hosted.py::test_a_whole_run_of_episodes_in_two_processes",
    "eval.num_examples": f"{LOOP}::test_without_examples_there_is_no_evaluation_and_its_split_is_not_loaded",
    **dict.fromkeys(
        (
            "eval.rollouts_per_example",
            "eval.sampling.temperature",
            "eval.sampling.max_tokens",
            "eval.env[].num_examples",
            "eval.env[].rollouts_per_example",
            "eval.env[].interval",
            "eval.env[].sampling.temperature",
            "eval.env[].sampling.max_tokens",
        ),
        f"{EVALUATE}::test_each_environment_is_evaluated_as_it_says_and_all_figures_are_told",
    ),
    "eval.skip_eval_on_resume": f"{EVALUATE}::test_the_version_that_a_run_is_resumed_at_is_not_evaluated_unless_that_"
    "is_wanted",
    "eval.cancel_inflight_rollouts_on_eval": f"{EVALUATE}::test_training_rollouts_are_cancelled_counted_and_asked_"
    "again_if_evaluations_are_to_run_alone",
    "report_to.offline": f"{REPORTING}::test_without_a_key_a_run_that_would_upload_ends_before_it_begins",
    **dict.fromkeys(
        ("report_to.project", "report_to.name"),
        f"{REPORTING}::test_project_and_name_are_those_of_the_settings_whatever_variables_say",
    ),
    **dict.fromkeys(
        ("report_to.to", "report_to.samples", "report_to.distributions", "report_to.interval"),
        f"{REPORTING}::test_an_offline_run_logs_every_line_of_metrics_the_settings_samples_and_distributions",
    ),
    "reward_timeout_s": f"{LOOP}::test_a_reward_that_hangs_stops_the_run_with_its_name_long_before_the_trainer_has_"
    "waited",
    "max_env_failure_rate": f"{LOOP}::test_failures_of_the_evaluation_count_towards_the_limit_as_they_come",
    "wait_timeout_s": f"{LOOP}::test_a_trainer_that_vanishes_is_named",
    "rollout_transport.type": "e2e/test_pipeline.py::test_the_served_policy_is_the_trained_one",
    **dict.fromkeys(
        ("env[].address", "eval.env[].address"),
        "orchestrator/test_environment_server.py::test_it_scores_like_a_process_of_our_own",
    ),
    "ckpt.resume_step": f"{RESUMING}::test_a_finished_run_is_given_more_steps_and_asks_on_where_it_stood",
    "ckpt.skip_progress": f"{RESUMING}::test_totals_begin_anew_without_the_progress",
    "ckpt.skip_buffer": f"{RESUMING}::test_examples_are_asked_from_the_beginning_without_the_buffer",
    "ckpt.wait_for_weights_timeout": f"{RESUMING}::test_the_version_to_go_on_with_is_waited_for",
    "rollout_transport.host": "transport/test_zmq.py::test_an_address_that_others_reach_is_refused_without_a_key",
    "rollout_transport.port": "transport/test_zmq.py::test_a_port_in_use_is_named",
    "rollout_transport.hwm": f"{CHANNELS}::test_a_sender_that_is_too_far_ahead_is_slowed_and_nothing_is_dropped",
    "rollout_transport.key_var": "transport/test_zmq.py::test_both_ends_with_the_same_key_understand_each_other",
    "weight_broadcast.type": "orchestrator/test_relay.py::test_servers_that_receive_a_broadcast_get_their_ranks_and_"
    "must_all_be_there",
    "weight_broadcast.format": "orchestrator/test_relay.py::test_where_servers_hold_one_version_they_drain_before_"
    "each_switch",
    **dict.fromkeys(("sampling.min_tokens", "sampling.top_p", "sampling.top_k", "sampling.min_p"), REFUSED),
    **dict.fromkeys(
        ("sampling.repetition_penalty", "sampling.presence_penalty", "sampling.frequency_penalty"), REFUSED
    ),
}
HERE: dict[str, str] = {}
"""Key: test. Filled by `matters`."""

F = TypeVar("F", bound=Callable[..., Any])


def matters(*keys: str) -> Callable[[F], F]:
    """Marks a test as the one that shows what `keys` change."""

    def mark(test: F) -> F:
        HERE.update(dict.fromkeys(keys, test.__name__))
        return test

    return mark


def test_every_setting_has_a_test_that_shows_its_effect_and_every_such_test_is_there() -> None:
    of_losses = ("teacher_model.", "hints.", "preferences.")
    keys = (key for key, *_ in rows(OrchSettings))
    assert sorted([*HERE, *ELSEWHERE]) == sorted(key for key in keys if not key.startswith(of_losses))
    for where in set(ELSEWHERE.values()):
        file, _, name = where.partition("::")
        tree = ast.parse((TESTS / file).read_text())
        assert name in {getattr(node, "name", "") for node in tree.body}, where


# --- a run ---

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

def sevens(results):
    return {(result.rollout.id, index): 7 for result in results for index in range(len(result.rollout.steps))}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a run has done, as its server, its trainer and its files saw it."""

    folder: Path
    summary: Summary
    batches: dict[int, tuple[MicroBatch, ...]]
    lines: list[dict[str, float]]
    requests: list[dict[str, Any]]
    """Of rollouts, not of the evaluation."""

    @property
    def asked(self) -> list[str]:
        """The words that were asked, in the order of asking."""
        return [word_of(request["prompt_token_ids"]) for request in self.requests]

    @property
    def advantages(self) -> list[float]:
        """Of all samples of the first batch, in no order."""
        return sorted(number for batch in self.batches[1] for number in batch.advantages.tolist())


def word_of(prompt: str | list[int]) -> str:
    """The user's message."""
    text = prompt if isinstance(prompt, str) else bytes(i for i in prompt if i < 256).decode()
    return text.split("\n")[1]


def by_turns(*answers: str) -> Callable[[str, int], str]:
    """The answers to each prompt, one after the other and then again."""
    given: Counter[str] = Counter()

    def answer(prompt: str, version: int) -> str:
        given[prompt] += 1
        return answers[(given[prompt] - 1) % len(answers)]

    return answer


@pytest.fixture
def env(tmp_path: Path) -> str:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return f"{path}:Words"


@pytest_asyncio.fixture
async def server() -> AsyncIterator[FakeServer]:
    server = await FakeServer(by_turns("0", "1")).start()
    yield server
    await server.stop()


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
    output_dir = Path(tempfile.mkdtemp(dir=folder))
    server.requests.clear()
    sequence_len = {"sequence_len": settings.get("seq_len", 128)}
    adapters = {"lora_adapters": settings.get("model", {}).get("lora_adapters", ())}
    trainer = FakeTrainer(output_dir, settings=sequence_len | adapters, **sequence_len)
    trainer.start()
    summary = await orchestrate(settings_for(output_dir, server, **settings))
    lines = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    sampled = [request for request in server.requests if request["temperature"] > 0]
    return Run(folder=output_dir, summary=summary, batches=trainer.batches, lines=lines, requests=sampled)


# --- names and sizes ---


@matters("model.lora_adapter")
async def test_the_newest_version_is_served_under_the_name_that_is_set(
    tmp_path: Path, env: str, server: FakeServer
) -> None:
    model = settings_for(tmp_path, server).model.model_dump()
    await run(tmp_path, server, model=model | {"lora_adapter": "mine"})
    assert {load["alias"] for load in server.loads} == {"mine"}


@matters("model.lora_adapters", "env[].adapters", "eval.env[].adapters")
async def test_a_role_samples_and_trains_its_adapter_and_is_evaluated_with_that_or_the_one_that_is_set(
    tmp_path: Path, env: str, server: FakeServer
) -> None:
    model = settings_for(tmp_path, server).model.model_dump() | {"lora_adapters": ("one", "two")}
    server.adapters = ("two",)
    mine: dict[str, Any] = {"env": [{"id": env, "adapters": {"policy": "two"}}], "max_steps": 1}
    for own, evaluated in (({}, "two"), ({"env": [{"id": env, "adapters": {"policy": "one"}}]}, "one")):
        made = await run(tmp_path, server, model=model, eval={"num_examples": 1} | own, **mine)
        assert {request["adapter"] for request in made.requests} == {"two"}
        assert {request["adapter"] for request in server.requests if request["temperature"] == 0} == {evaluated}
        trained = [batch.adapters for batch in made.batches[1]]
        assert [places for one in trained if one is not None for places in one.tolist()] == [1] * 4


async def test_a_run_with_one_adapter_says_nothing_of_any(tmp_path: Path, env: str, server: FakeServer) -> None:
    made = await run(tmp_path, server, max_steps=1)
    assert all("adapter" not in request for request in made.requests)
    assert [batch.adapters for batch in made.batches[1]] == [None] * len(made.batches[1])


async def test_an_adapter_for_a_role_that_an_environment_has_not_is_an_error_with_those_it_has(
    tmp_path: Path, env: str, server: FakeServer
) -> None:
    model = settings_for(tmp_path, server).model.model_dump() | {"lora_adapters": ("one", "two")}
    expected = "adapters of environment .* names the roles judge, expected some of policy"
    with pytest.raises(Mismatch, match=expected):
        await run(tmp_path, server, model=model, env=[{"id": env, "adapters": {"judge": "two"}}])


@matters("env[].name", "env[].args")
async def test_metrics_have_the_environments_name_and_its_arguments_make_its_examples(
    tmp_path: Path, env: str, server: FakeServer
) -> None:
    named = await run(tmp_path, server, env=[{"id": env, "name": "words", "args": {"words": "xyz"}}])
    assert "reward/mean/words" in named.lines[0]
    assert set(named.asked) == set("xyz")


@matters("env[].memory_gb")
async def test_an_answer_whose_reward_needs_more_memory_than_is_allowed_is_dropped(
    tmp_path: Path, env: str, server: FakeServer
) -> None:
    server.answer = by_turns("0", "1", "2")
    sizes: dict[str, Any] = {"batch_size": 6, "rollouts_per_example": 3, "max_steps": 1}
    for memory_gb, dropped in ((None, {}), (1, {"env_memory": 2})):
        hungry = {"id": f"{tmp_path / 'own.py'}:Hungry", "memory_gb": memory_gb}
        made = await run(tmp_path, server, env=[hungry], **sizes)
        assert made.summary.rollouts_dropped == dropped


@matters("run_id")
async def test_only_the_run_whose_id_is_given_is_joined(tmp_path: Path, server: FakeServer) -> None:
    trainer = FakeTrainer(tmp_path / "one")
    trainer.start()
    summary = await orchestrate(settings_for(tmp_path / "one", server, run_id=trainer.run_folder.run_id, max_steps=1))
    assert summary.run_id == trainer.run_folder.run_id
    FakeTrainer(tmp_path / "other").start()
    with pytest.raises(StaleRunError, match=f"expected run_id {summary.run_id}"):
        await orchestrate(settings_for(tmp_path / "other", server, run_id=summary.run_id))


@matters("seed", "buffer.seed")
async def test_seeds_change_the_order_of_examples(tmp_path: Path, env: str, server: FakeServer) -> None:
    changes: list[dict[str, Any]] = [{}, {"seed": 1}, {"buffer": {"seed": 1}}, {"buffer": {"seed": 2}}]
    orders = [(await run(tmp_path, server, **change)).asked for change in changes]
    assert orders[1] == orders[2]
    assert len({tuple(order) for order in orders}) == 3


@matters("batch_size", "rollouts_per_example", "max_steps")
async def test_a_batch_has_its_size_a_group_its_rollouts_and_a_run_its_steps(
    tmp_path: Path, env: str, server: FakeServer
) -> None:
    made = await run(tmp_path, server, batch_size=6, rollouts_per_example=3, max_steps=3)
    assert [sum(len(batch.rollout_ids) for batch in made.batches[step]) for step in (1, 2, 3)] == [6, 6, 6]
    assert sorted(made.batches) == [1, 2, 3]
    assert {request["n"] for request in made.requests} == {3}


@matters("seq_len")
async def test_micro_batches_are_as_long_as_seq_len_allows(tmp_path: Path, env: str, server: FakeServer) -> None:
    # Each of four samples has 24 tokens or so: 48 holds two of them, 128 all.
    for seq_len, num in ((64, 2), (128, 1)):
        made = await run(tmp_path, server, seq_len=seq_len)
        assert len(made.batches[1]) == num
        assert all(len(batch.token_ids) <= seq_len for batch in made.batches[1])


class Counting(FakeServer):
    """Knows how many requests it had at once."""

    def __init__(self) -> None:
        super().__init__(by_turns("0", "1"))
        self.now = self.most = 0

    async def _generate(self, request: web.Request) -> web.Response:
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            return await super()._generate(request)
        finally:
            self.now -= 1


@matters("oversampling_factor")
async def test_oversampled_groups_are_on_their_way_besides_those_that_the_next_batches_lack(
    tmp_path: Path, env: str
) -> None:
    # A batch has two groups; one and a half times as many are three.
    for factor, most in ((1.0, 2), (1.5, 3)):
        server = Counting()
        await server.start()
        server.latency_s = 0.4
        pace = {"max_async_level": 1, "max_concurrent_groups": None, "oversampling_factor": factor}
        made = await run(tmp_path, server, **pace)
        await server.stop()
        assert server.most == most
        assert made.summary.rollouts_trained == made.summary.rollouts_issued == 8


class Patient(FakeServer):
    """Has answered the second batch's requests only once version 1 is live."""

    def __init__(self) -> None:
        super().__init__(by_turns("0", "1"))
        self.updated = asyncio.Event()

    async def _load(self, request: web.Request) -> web.StreamResponse:
        response = await super()._load(request)
        if 1 in self.live:
            self.updated.set()
        return response

    async def sampling(self, body: dict[str, Any]) -> None:
        if len(self.requests) > 2:
            await self.updated.wait()


@matters("inflight_weight_updates")
async def test_answers_in_flight_go_on_under_a_new_version_if_wanted_and_each_token_has_its_own(
    tmp_path: Path, env: str
) -> None:
    versions = {}
    for updates in (False, True):
        server = Patient()
        await server.start()
        pace = {"max_async_level": 1, "max_concurrent_groups": None, "inflight_weight_updates": updates}
        made = await run(tmp_path, server, **pace)
        await server.stop()
        assert {request["follow"] for request in made.requests} == {updates}
        assert made.summary.rollouts_trained == made.summary.rollouts_issued == 8
        assert [line["policy/lag_max"] for line in made.lines] == [0, 1]
        assert [line["rollout/several_versions"] for line in made.lines] == [0, 1 if updates else 0]
        [batch] = made.batches[2]
        versions[updates] = [part.tolist() for part in np.split(batch.policy_versions, batch.starts[1:])]
    assert all(set(of_sample) == {0} for of_sample in versions[False])
    # prompt and first token under version 0, the end of the turn under version 1
    assert all(of_sample[-1] == 1 and set(of_sample[:-1]) == {0} for of_sample in versions[True])


@matters("max_concurrent_groups")
@pytest.mark.parametrize(("limit", "most"), [(1, 1), (3, 3), (None, 4)])
async def test_so_many_groups_are_in_flight_at_once(tmp_path: Path, env: str, limit: int | None, most: int) -> None:
    server = Counting()
    await server.start()
    server.latency_s = 0.4
    await run(tmp_path, server, batch_size=8, max_steps=1, max_concurrent_groups=limit)
    await server.stop()
    assert server.most == most


# --- sampling ---


@matters("sampling.max_tokens", "sampling.seed")
async def test_requests_have_the_longest_answer_and_the_seed_that_are_set(
    tmp_path: Path, env: str, server: FakeServer
) -> None:
    plain = await run(tmp_path, server, sampling={"max_tokens": 9})
    seeded = await run(tmp_path, server, sampling={"seed": 5})
    assert {(request["max_tokens"], request["seed"]) for request in plain.requests} == {(9, None)}
    assert {request["max_tokens"] for request in seeded.requests} != {9}
    assert len({request["seed"] for request in seeded.requests} - {None}) == len(seeded.requests)


@matters("sampling.temperature")
async def test_the_temperature_is_asked_for_and_goes_with_every_rollout(
    tmp_path: Path, env: str, server: FakeServer
) -> None:
    made = await run(tmp_path, server, sampling={"temperature": 0.5})
    assert {request["temperature"] for request in made.requests} == {0.5}
    assert {number for batch in made.batches[1] for number in batch.temperatures.tolist()} == {0.5}


SCHEDULE = {"type": "linear", "start_temperature": 1.5, "end_temperature": 0.5}


@matters("sampling.temp_scheduler.start_temperature", "sampling.temp_scheduler.end_temperature")
async def test_each_version_is_sampled_at_its_temperature_which_goes_with_every_rollout(
    tmp_path: Path, env: str, server: FakeServer
) -> None:
    made = await run(tmp_path, server, sampling={"temp_scheduler": SCHEDULE}, max_steps=3)
    # Strictly on-policy: versions 0, 1 and 2 are at 1.5, 1.0 and 0.5.
    assert {(request["version"], request["temperature"]) for request in made.requests} == {(0, 1.5), (1, 1.0), (2, 0.5)}
    assert [line["rollout/temperature"] for line in made.lines] == [1.5, 1.0, 0.5]
    for step, expected in ((1, 1.5), (2, 1.0), (3, 0.5)):
        assert {number for batch in made.batches[step] for number in batch.temperatures.tolist()} == {expected}


@matters("sampling.temp_scheduler.type")
def test_the_shape_of_the_schedule_changes_the_temperatures_between_its_ends() -> None:
    at = {}
    for shape in ("linear", "cosine"):
        sampling = {"temp_scheduler": SCHEDULE | {"type": shape}}
        at[shape] = make_temperature(settings_for(Path("x"), FakeServer(), sampling=sampling, max_steps=5))
    assert at["linear"](4) == at["cosine"](4) == 0.5
    # A quarter of the way: 1.5 - 0.25 and 1.5 - 0.146.
    assert (at["linear"](1), at["cosine"](1)) == pytest.approx((1.25, 1.353553))


# --- examples ---


@matters("buffer.env_ratios")
async def test_environments_are_asked_by_their_ratios(tmp_path: Path, env: str, server: FakeServer) -> None:
    environments = [{"id": env, "name": name, "args": {"words": words}} for name, words in (("a", "abc"), ("x", "xyz"))]
    even = await run(tmp_path, server, env=environments)
    uneven = await run(tmp_path, server, env=environments, buffer={"env_ratios": [3, 1]})
    assert [sum(word in "abc" for word in made.asked) for made in (even, uneven)] == [2, 3]


@matters("buffer.hash_keys")
async def test_examples_that_agree_in_the_fields_that_are_set_are_asked_as_one(
    tmp_path: Path, env: str, server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    twice = [{"id": env, "args": {"words": "aab"}}]
    by_prompt = await run(tmp_path, server, env=twice)
    with caplog.at_level("INFO"):
        by_length = await run(tmp_path, server, env=twice, buffer={"hash_keys": ["length"]})
    assert set(by_prompt.asked) == set("ab")
    assert by_prompt.lines[0]["progress/examples_duplicate"] == 1
    assert set(by_length.asked) == {"a"}
    assert by_length.lines[0]["progress/examples_duplicate"] == 2
    message = f"environment {env}: left out 2 examples that are there already, by buffer.hash_keys"
    assert message in caplog.messages


@matters("buffer.online_difficulty_filtering")
async def test_groups_whose_rewards_are_all_0_or_all_1_are_replaced_and_counted(
    tmp_path: Path, env: str, server: FakeServer
) -> None:
    server.answer = lambda prompt, version: {"a": "0", "b": "1"}.get(word_of(prompt), "0.5")
    made = await run(tmp_path, server, buffer={"online_difficulty_filtering": True}, max_steps=4)
    plain = await run(tmp_path, server, max_steps=4)
    times = Counter(made.asked)
    assert made.summary.rollouts_dropped == {"all_rewards_0": 2 * times["a"], "all_rewards_1": 2 * times["b"]}
    assert min(times["a"], times["b"]) >= 1
    assert made.summary.rollouts_trained == plain.summary.rollouts_trained == 16
    assert plain.summary.rollouts_dropped == {}


@matters("buffer.easy_threshold", "buffer.hard_threshold")
async def test_easy_and_hard_examples_are_not_asked_again(tmp_path: Path, env: str, server: FakeServer) -> None:
    rewards = dict(zip("abcdefgh", ("0", "0.1", "0.5", "0.5", "0.5", "0.9", "1", "1"), strict=True))
    server.answer = lambda prompt, version: rewards[word_of(prompt)]
    everything = await run(tmp_path, server, max_steps=8)
    made = await run(tmp_path, server, buffer={"easy_threshold": 0.9, "hard_threshold": 0.1}, max_steps=8)
    assert Counter(everything.asked) == dict.fromkeys("abcdefgh", 2)
    times = Counter(made.asked)
    assert {word for word, num in times.items() if num == 1} == set("abfgh")
    sizes = [made.lines[-1][f"progress/examples_{pool}"] for pool in ("normal", "easy", "hard")]
    assert sizes == [3, 3, 2]


@matters("buffer.easy_fraction", "buffer.hard_fraction")
def test_a_share_of_what_was_easy_or_hard_is_asked_again_after_a_restart() -> None:
    keys = {"e": list("abcd")}
    changes = {"easy_threshold": 1, "hard_threshold": 0}
    for fractions, normal in (((0, 0), 0), ((1, 0), 2), ((0, 0.5), 1)):
        chosen = changes | dict(zip(("easy_fraction", "hard_fraction"), fractions, strict=True))
        settings = settings_for(Path("x"), FakeServer(), buffer=chosen, ckpt={"resume_step": -1})
        buffer = make_buffer(settings, keys)
        for group in range(4):
            key = buffer.issue(group).key
            buffer.returned(group, [float(key in "ab")])
            buffer.closed(group)
        again = make_buffer(settings, keys, buffer.state())
        assert again.num_examples()["normal"] == normal


@matters("buffer.skip_verification")
async def test_without_verification_no_rubric_runs_and_every_reward_is_0(
    tmp_path: Path, env: str, server: FakeServer
) -> None:
    server.answer = lambda prompt, version: "no number, which the rubric cannot read"
    own = {"type": "custom", "import_path": f"{tmp_path / 'own.py'}:zeros", "kwargs": {"plus": 1.0}}
    made = await run(tmp_path, server, buffer={"skip_verification": True}, advantage=own)
    assert [line["reward/mean"] for line in made.lines] == [0, 0]
    assert made.summary.rollouts_trained == 8
    assert made.summary.rollouts_dropped == {}


# --- advantages ---


@matters("advantage.length_weighted_mean")
async def test_a_length_weighted_mean_changes_the_advantages(tmp_path: Path, env: str, server: FakeServer) -> None:
    # Answers and their ends: 2 tokens with the reward 1, and 5 with 0; so (2·1 + 5·0) / 7 = 2/7, where the mean is 1/2.
    server.answer = by_turns("1", "0000")
    plain = await run(tmp_path, server)
    weighted = await run(tmp_path, server, advantage={"length_weighted_mean": True})
    assert plain.advantages == [-0.5, -0.5, 0.5, 0.5]
    assert weighted.advantages == pytest.approx([-2 / 7, -2 / 7, 5 / 7, 5 / 7])


@matters("advantage.type", "advantage.import_path", "advantage.kwargs")
async def test_a_function_of_the_users_makes_the_advantages(tmp_path: Path, env: str, server: FakeServer) -> None:
    own = {"type": "custom", "import_path": f"{tmp_path / 'own.py'}:zeros"}
    assert (await run(tmp_path, server, advantage=own)).advantages == [0, 0, 0, 0]
    assert (await run(tmp_path, server, advantage=own | {"kwargs": {"plus": 2.0}})).advantages == [2, 2, 2, 2]


@matters("advantage.positive_only", "advantage.value")
async def test_the_kinds_of_credit_that_are_built_in(tmp_path: Path, env: str, server: FakeServer) -> None:
    # Each group has the rewards 0 and 1, the mean 0.5 and the standard deviation 0.5.
    for advantage, expected in (
        ({"positive_only": True}, [0, 0, 0.5, 0.5]),
        ({"type": "normalized"}, [-1, -1, 1, 1]),
        ({"type": "leave_one_out"}, [-1, -1, 1, 1]),
        ({"type": "episodic"}, [0, 0, 1, 1]),
        ({"type": "constant"}, [1, 1, 1, 1]),
        ({"type": "constant", "value": 0.25}, [0.25] * 4),
        ({"type": "custom_credit", "import_path": f"{tmp_path / 'own.py'}:sevens"}, [7] * 4),
    ):
        assert (await run(tmp_path, server, advantage=advantage)).advantages == pytest.approx(expected), advantage


async def test_where_rollouts_are_not_compared_a_group_may_be_one(tmp_path: Path, env: str, server: FakeServer) -> None:
    made = await run(tmp_path, server, rollouts_per_example=1, advantage={"type": "constant"})
    assert (made.advantages, made.summary.rollouts_dropped) == ([1] * 4, {})


# --- what is kept to be read ---


@matters("conversations.interval", "conversations.num_groups")
async def test_conversations_are_kept_of_the_first_batch_and_then_at_intervals(
    tmp_path: Path, env: str, server: FakeServer
) -> None:
    def kept(made: Run) -> dict[str, int]:
        files = sorted((made.folder / "conversations").glob("*.jsonl"))
        return {file.name: len(file.read_text().splitlines()) for file in files}

    assert kept(await run(tmp_path, server)) == {"step_000001.jsonl": 2}
    both = await run(tmp_path, server, conversations={"interval": 2, "num_groups": 2})
    assert kept(both) == {"step_000001.jsonl": 4, "step_000002.jsonl": 4}
    first = json.loads((both.folder / "conversations" / "step_000001.jsonl").read_text().splitlines()[0])
    assert first["rewards"] == {"policy": float(first["steps"][0]["answer"])}
    assert first["steps"][0]["messages"] == [{"role": "user", "content": both.asked[0]}]
    assert kept(await run(tmp_path, server, conversations={"interval": None})) == {}


# --- filters ---


@matters("filters[].type", "filters[].enforce", "filters[].window", "filters[].prob_threshold")
async def test_a_filter_of_repetitions_finds_what_its_window_and_threshold_say_and_withholds_it_if_enforced(
    tmp_path: Path, env: str, server: FakeServer
) -> None:
    # Every token has the probability exp(-0.5) = 0.61; answers have 2 and 4 tokens with their end.
    server.answer = by_turns("1", "000")
    for window, prob_threshold, found in ((3, 0.6, 0.5), (3, 0.62, 0), (5, 0.6, 0)):
        one = {"type": "repetition", "window": window, "prob_threshold": prob_threshold}
        made = await run(tmp_path, server, filters=[one])
        assert [line["rollout/found_repetition"] for line in made.lines] == [found, found]
        assert made.summary.rollouts_dropped == {}
    enforced = await run(tmp_path, server, filters=[one | {"window": 3, "enforce": True}])
    # The rewards 1 and 0 still have the mean 0.5, and only the short answer is trained.
    assert enforced.advantages == [0.5, 0.5]
    assert [line["reward/mean"] for line in enforced.lines] == [0.5, 0.5]
    assert enforced.summary.rollouts_dropped == {"repetition": 4}
    assert enforced.summary.rollouts_trained == 4


@matters("filters[].token_id_threshold", "filters[].logprob_offset")
async def test_a_filter_of_gibberish_finds_what_its_thresholds_say(
    tmp_path: Path, env: str, server: FakeServer
) -> None:
    # The model has 259 tokens, so -log(V) = -5.56. The answer is cut at max_tokens: all tokens are ord("1").
    server.answer, server.logprob = by_turns("1" * 200), -8.0
    one = ord("1")
    for threshold, offset, found in ((one - 1, 2.0, 1), (one - 1, 2.5, 0), (one, 2.0, 0)):
        gibberish = {"type": "gibberish", "token_id_threshold": threshold, "logprob_offset": offset}
        made = await run(tmp_path, server, filters=[gibberish])
        assert [line["rollout/found_gibberish"] for line in made.lines] == [found, found]


async def test_a_filter_that_can_find_nothing_with_this_model_is_an_error_before_the_first_rollout(
    tmp_path: Path, env: str, server: FakeServer
) -> None:
    with pytest.raises(ValueError, match="token_id_threshold = 100000 finds nothing: the model's token ids end at 258"):
        await run(tmp_path, server, filters=[{"type": "gibberish"}])
    assert server.requests == []


async def test_a_group_of_which_everything_is_withheld_is_replaced(
    tmp_path: Path, env: str, server: FakeServer
) -> None:
    server.answer = lambda prompt, version: "111" if word_of(prompt) == "a" else "1"
    one = {"type": "repetition", "window": 3, "prob_threshold": 0.6, "enforce": True}
    made = await run(tmp_path, server, filters=[one], max_steps=4)
    assert made.summary.rollouts_dropped["repetition"] == 2 * made.asked.count("a") > 0
    assert made.summary.rollouts_trained == 16


# --- servers ---


@matters("client.api_key_var")
async def test_the_key_is_taken_from_the_variable_that_is_named(
    tmp_path: Path, env: str, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.api_key = "secret"
    monkeypatch.setenv("MY_KEY", "secret")
    client = {"base_url": [server.url], "timeout": 5}
    with pytest.raises(ServerError, match="401"):
        await run(tmp_path, server, client=client)
    assert (await run(tmp_path, server, client=client | {"api_key_var": "MY_KEY"})).summary.steps == 2


@matters("client.skip_model_check")
async def test_a_server_with_another_model_is_refused_unless_the_check_is_skipped(
    tmp_path: Path, env: str, server: FakeServer
) -> None:
    server.info["base_model"] = "other"
    client = {"base_url": [server.url], "timeout": 5}
    with pytest.raises(Mismatch, match="serves a base model with identity other"):
        await run(tmp_path, server, client=client)
    assert (await run(tmp_path, server, client=client | {"skip_model_check": True})).summary.steps == 2


# --- evaluation ---


@matters("eval.interval", "eval.eval_base_model", "eval.env[].id", "eval.env[].name", "eval.env[].args")
async def test_evaluation_is_at_its_interval_with_the_base_model_if_wanted_and_under_its_name(
    tmp_path: Path, env: str, server: FakeServer
) -> None:
    held_out = {"id": "reverse-text", "name": "held-out", "args": {"num_eval": 3}}
    chosen: dict[str, Any] = {"env": [held_out], "interval": 2}
    for more, versions in (({}, [0, 2, 3]), ({"eval_base_model": False}, [2, 3]), ({"interval": 1}, [0, 1, 2, 3])):
        made = await run(tmp_path, server, eval=chosen | more, max_steps=3)
        evaluated = [line["progress/step"] for line in made.lines if "eval/accuracy/held-out" in line]
        assert evaluated == versions
        asked = [word_of(r["prompt_token_ids"]) for r in server.requests if r["temperature"] == 0]
        assert len(asked) == 3 * len(versions)
        assert all(word.startswith("Reverse: ") for word in asked)


# --- what only the trainer can honour ---


@matters(
    "weight_broadcast.allow_rounding",
    "weight_broadcast.max_shard_bytes",
    "weight_broadcast.keep_last",
    "weight_broadcast.keep_interval",
    "weight_broadcast.host",
    "weight_broadcast.port",
    "weight_broadcast.timeout",
    "weight_broadcast.inference_world_size",
)
def test_what_only_the_trainer_can_honour_is_refused() -> None:
    keys = [key for key, test in HERE.items() if test == "test_what_only_the_trainer_can_honour_is_refused"]
    for key in keys:
        name = key.partition(".")[2]
        value: Any = {"allow_rounding": True, "host": "elsewhere"}.get(name, 3)
        settings = settings_for(Path("x"), FakeServer(), weight_broadcast={name: value})
        assert (key, "has no effect on the orchestrator; set it for the trainer") in list(settings.conflicts())

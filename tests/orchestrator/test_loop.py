"""The whole orchestrator against a server and a trainer that are stand-ins."""

import asyncio
import itertools
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from grpo.configs.errors import SettingsError
from grpo.configs.train import TrainSettings
from grpo.orchestrator.checks import Mismatch
from grpo.orchestrator.inference.client import ServerError, ServersAway
from grpo.orchestrator.ledger_reader import open_ledger
from grpo.orchestrator.monitoring.timeline import read_timeline
from grpo.orchestrator.run import orchestrate
from grpo.orchestrator.witness import differs
from grpo.orchestrator.workers.failures import EnvironmentFailed
from grpo.transport.batches.filesystem import BatchReceiver
from grpo.transport.errors import DeadlineError, ProofFailed
from grpo.transport.importing import FunctionFailed
from grpo.transport.receipts import RECEIPT_FILE, Receipt, Witness
from grpo.transport.run import create_run, join_run, only_one
from grpo.transport.status import read_status
from grpo.transport.weights.store import METRICS_FILE, PolicyPublisher

from grpo.commands.status import run_status, text
from tests import support
from tests.orchestrator.fakes import WORDS, FakeServer, FakeTrainer, error, settings_for, until
from tests.orchestrator.running import check_drops, rewarded, rows_of, run


def improving(prompt: str, version: int) -> str:
    """Right more often with every version."""
    word = prompt.partition("Reverse: ")[2].partition("\n")[0]
    return word[::-1] if random.random() < version / 3 else "x"


@pytest.fixture
def server(server: FakeServer) -> FakeServer:
    server.answer = improving
    return server


@pytest.mark.parametrize("level", [0, 1])
async def test_every_batch_is_shipped_once_and_its_lag_stays_within_the_bound(
    tmp_path: Path, server: FakeServer, level: int
) -> None:
    pace = {"max_async_level": level, "max_off_policy_steps": level, "max_steps": 5}
    made = await run(tmp_path, server, trainer={"step_s": 0.05}, **pace)
    assert made.trainer.ended_after == 5
    assert sorted(made.batches) == [1, 2, 3, 4, 5]
    assert len(made.trained) == len(set(made.trained)) == 5 * 16
    for step, batches in made.batches.items():
        for batch in batches:
            lags = step - 1 - batch.policy_versions
            assert lags.min() >= 0
            assert lags.max() <= level
    assert made.summary.rollouts_issued == made.summary.rollouts_trained == 80
    assert made.summary.rollouts_dropped == {}
    assert made.summary.versions_served == (0, 1, 2, 3, 4, 5)
    assert server.live == {5}


async def test_every_rollout_is_in_the_ledger_before_a_server_is_asked(tmp_path: Path, server: FakeServer) -> None:
    asked = itertools.count(1)

    def answer(prompt: str, version: int) -> str:
        assert rows_of(tmp_path, "SELECT COUNT(*) FROM rollouts")[0][0] >= next(asked)
        return "x"

    server.answer = answer
    made = await run(tmp_path, server, eval={"num_examples": 0})
    assert made.summary.rollouts_issued == next(asked) - 1


class GoesBack(FakeTrainer):
    """Publishes version 1 twice, the second time with other bytes, and version 2 once servers have loaded that."""

    server: FakeServer

    def _train(self, publisher: PolicyPublisher, receiver: BatchReceiver) -> None:
        def publish(version: int, canary: bytes) -> None:
            files = {"canary.json": canary, METRICS_FILE: b'{"loss/policy": 0.5}'}
            publisher.publish(version=version, spec=self.spec, files=files)

        receiver.receive(1, timeout_s=120)
        publish(1, b"{}")
        receiver.receive(2, timeout_s=120)
        publish(1, b'{"another": 1}')
        support.until(lambda: len(self.server.loads) >= 3)
        publish(2, b"{}")
        assert receiver.receive(3, timeout_s=60) is None


@pytest.mark.parametrize("form", ["adapter", "merged"])
async def test_a_version_that_is_published_again_with_other_bytes_is_loaded_again(
    tmp_path: Path, server: FakeServer, form: Any
) -> None:
    server.info |= {"kinds": ["adapter", "merged"]}
    broadcast = {"weight_broadcast": {"format": form}}
    trainer = GoesBack(tmp_path, kind=form, settings=broadcast)
    trainer.server = server
    await run(tmp_path, server, trainer=trainer, max_steps=2, **broadcast)
    assert [load["version"] for load in server.loads] == [0, 1, 1, 2]
    proved = rows_of(tmp_path, "SELECT version, snapshot FROM proofs")
    assert proved == [(load["version"], load["snapshot"]) for load in server.loads]
    assert len(set(proved)) == 4


class PublishedAgainMeanwhile(FakeServer):
    """Finds another snapshot of version 1 than it is asked for, the first time."""

    trainer: FakeTrainer

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["version"] != 1 or any(load["version"] == 1 for load in self.loads):
            return await super()._load(request)
        self.loads.append(body)
        publisher = PolicyPublisher(self.trainer.run_folder.broadcasts, run_id=body["run_id"])
        files = {"canary.json": b'{"another": 1}', METRICS_FILE: b'{"loss/policy": 0.5}'}
        publisher.publish(version=1, spec=self.trainer.spec, files=files)
        return error(409, "other_snapshot", "version 1 is published as another snapshot")


async def test_a_version_that_is_published_again_before_servers_load_it_is_asked_for_by_its_new_name(
    tmp_path: Path,
) -> None:
    async with PublishedAgainMeanwhile() as server:
        server.trainer = FakeTrainer(tmp_path)
        await run(tmp_path, server, trainer=server.trainer, max_steps=2)
    assert [load["version"] for load in server.loads] == [0, 1, 1, 2]
    assert len({(load["version"], load["snapshot"]) for load in server.loads}) == 4


async def test_what_is_trained_is_what_the_server_sampled(tmp_path: Path, server: FakeServer) -> None:
    server.answer = lambda prompt, version: "abc"
    trainer = {"settings": {"sequence_len": 256}, "sequence_len": 256}
    made = await run(tmp_path, server, trainer=trainer, max_steps=1, batch_size=4, seq_len=256)
    [batch] = made.batches[1]
    [request] = [r for r in server.requests if r["n"] == 4]
    expected = [*request["prompt_token_ids"], *b"abc", 258]
    length = len(expected)
    assert batch.token_ids.tolist() == expected * 4
    assert batch.sequence_lengths.tolist() == [length] * 4
    assert batch.loss_mask.tolist() == ([False] * (length - 4) + [True] * 4) * 4
    assert batch.inference_logprobs.tolist() == ([0.0] * (length - 4) + [-0.5] * 4) * 4


async def test_summary_metrics_and_ledger_tell_the_same_story_and_evaluations_are_without_noise(
    tmp_path: Path, server: FakeServer
) -> None:
    made = await run(tmp_path, server)
    steps = [line for line in made.lines if "loss/policy" in line]
    assert [line["progress/step"] for line in steps] == [1, 2, 3]
    assert all(line["policy/lag_max"] == 0 for line in steps)
    assert (made.summary.accuracy_before, made.summary.accuracy_after) == (0, 1)
    assert (made.summary.mismatch_max_lag0, made.summary.canary_max_abs) == (3e-6, 2e-6)
    assert {made.summary.canary_base_max_abs, *(line["policy/canary_base_max_abs"] for line in steps)} == {1e-6}
    assert made.summary.seconds["train"] == 0.75
    states = Counter(rows_of(tmp_path, "SELECT state, step FROM rollouts"))
    assert states == {("trained", 1): 16, ("trained", 2): 16, ("trained", 3): 16}
    spans = read_timeline(tmp_path)
    done = {what: [one.step for one in spans if one.what == what] for what in ("load", "pack", "ship", "evaluate")}
    assert done == {"load": [0, 1, 2, 3], "pack": [1, 2, 3], "ship": [1, 2, 3], "evaluate": [0, 3]}
    assert {one.who for one in spans if one.what == "load"} == {f"grpo-infer {server.url.removesuffix('/v1')}"}
    generated = {one.step: one.end_s for one in spans if one.what == "generate"}
    assert all(generated[one.step] <= one.start_s for one in spans if one.what == "ship")
    assert all(one.seconds >= 0 for one in spans)
    # Three batches of four groups, and five held-out examples before and after.
    kinds = Counter((request["temperature"] == 0, request["noisy"]) for request in server.requests)
    assert kinds == {(False, True): 12, (True, False): 10}


class TrainsNothing(FakeTrainer):
    """Its gradients have none of the samples of step 2, and just those of the other steps."""

    def receipt(self, step: int) -> dict[str, bytes]:
        with open_ledger(self.run_folder.path) as ledger:
            witness, _ = ledger.receipts()[step]
        assert witness is not None
        factor = float(step != 2)
        found = Witness(
            presence=tuple(factor * one for one in witness.presence),
            content=tuple(factor * one for one in witness.content),
        )
        return {RECEIPT_FILE: Receipt(step=step, num_tokens=1, witness=found).to_json()}


async def test_gradients_without_their_samples_stop_the_run_or_are_told(
    tmp_path: Path, server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    stops, warns = tmp_path / "stops", tmp_path / "warns"
    stops.mkdir()
    warns.mkdir()
    says = "the gradients of step 2 are not those of batch 2's samples: the whole batch: missing"
    with pytest.raises(ProofFailed, match=says):
        await run(stops, server, trainer=TrainsNothing(stops))
    with open_ledger(stops) as ledger:
        assert ledger.findings() == {2: "the whole batch: missing"}
    assert max(load["version"] for load in server.loads) == 1
    going_on = {"proofs": {"on_failure": "warn"}}
    await run(warns, server, trainer=TrainsNothing(warns, settings=going_on), **going_on)
    assert [one.getMessage().startswith(says) for one in caplog.records if "gradients" in one.getMessage()] == [True]
    with open_ledger(warns) as ledger:
        assert ledger.findings() == {2: "the whole batch: missing"}
        receipts, kept = ledger.receipts(), ledger.kept()
    assert 2 not in kept
    expected, receipt = receipts.pop(2)
    assert expected is not None
    assert receipt is not None
    assert receipt.witness is not None
    assert differs(expected, receipt.witness)
    for step, (expected, receipt) in receipts.items():  # what agrees is kept as 64 bytes alone
        assert receipt is not None
        assert (expected, receipt.witness) == (None, None)
        assert len(kept[step].components) == 64
        assert kept[step].gap == 0


async def test_a_run_that_cannot_learn_says_so(
    tmp_path: Path, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answer = lambda prompt, version: "x"  # never right
    made = await run(tmp_path, server)
    [warning] = [one for one in made.summary.warnings if "rewards are equal" in one["message"]]
    assert (warning["program"], warning["step"], warning["times"]) == ("grpo-orch", 1, 1)
    made.summary.print()
    status = run_status(tmp_path)
    assert capsys.readouterr().out.count("rewards are equal") == text(status).count("rewards are equal") == 1
    assert [line["reward/groups_without_spread"] for line in made.lines if "loss/policy" in line] == [1.0, 1.0, 1.0]


async def test_a_trainer_that_vanishes_is_named(tmp_path: Path, server: FakeServer) -> None:
    with pytest.raises(DeadlineError, match="version 2"):
        await run(tmp_path, server, trainer={"vanish_after": 1}, wait_timeout_s=3)
    # The ledger still tells every rollout's fate.
    assert Counter(rows_of(tmp_path, "SELECT state, step FROM rollouts")) == {("trained", 1): 16, ("shipped", 2): 16}


async def test_the_trainers_time_runs_from_the_version_before_it(tmp_path: Path, server: FakeServer) -> None:
    # Batches 1 to 8 ship at once: version 8 comes 4.0 s later, and no version later than 0.5 s after the one before.
    pace = {"max_async_level": 7, "max_off_policy_steps": 7, "max_steps": 8}
    made = await run(tmp_path, server, trainer={"step_s": 0.5}, **pace, wait_timeout_s=3.5)
    waits_s = [line["time/wait_trainer_s"] for line in made.lines if "time/wait_trainer_s" in line]
    assert len(waits_s) == 8
    assert max(waits_s) < 3.5


LONG_WORDS = WORDS | {"args": {"num_train": 20, "num_eval": 5, "min_len": 40, "max_len": 50}}


async def test_a_trainer_with_other_settings_is_an_error_at_once(tmp_path: Path, server: FakeServer) -> None:
    folder, theirs = create_run(tmp_path), {"model": "m", "sequence_len": 128, "lora_rank": 8}
    settings = TrainSettings.model_validate(theirs).model_dump(mode="json")

    async def join_later() -> None:
        await asyncio.sleep(0.3)
        join_run(tmp_path, role="train", record={"settings": settings}, run_id=folder.run_id, timeout_s=1)

    with only_one(tmp_path, "train"), pytest.raises(SettingsError, match="lora_rank = 16"):
        await asyncio.gather(orchestrate(settings_for(tmp_path, server)), join_later())


@pytest.mark.parametrize(
    ("info", "trainer", "changes", "error", "message"),
    [
        ({}, {"base_model": "another"}, {}, Mismatch, r"model\.name"),
        ({"max_lora_rank": 8}, {}, {}, Mismatch, "max_lora_rank"),
        ({"max_model_len": 20}, {}, {}, Mismatch, "max_model_len"),
        ({}, {}, {"client": {"base_url": ["http://127.0.0.1:9"], "timeout": 1.5}}, ServerError, r"client\.timeout"),
        ({}, {}, {"sampling": {"max_tokens": 120}, "eval": {"num_examples": 0}}, ValueError, "50"),
        ({}, {}, {"eval": {"env": [LONG_WORDS]}, "sampling": {"max_tokens": 80}}, ValueError, "eval:words"),
    ],
)
async def test_what_does_not_fit_or_never_comes_is_an_error_that_names_it(
    tmp_path: Path,
    server: FakeServer,
    info: dict[str, Any],
    trainer: dict[str, Any],
    changes: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    server.info |= info
    with pytest.raises(error, match=message):
        await run(tmp_path, server, trainer=trainer, **({"eval": {"sampling": {"max_tokens": 30}}} | changes))


async def test_a_version_that_a_server_cannot_load_ends_the_run(tmp_path: Path, server: FakeServer) -> None:
    server.refuse_version = 2
    with pytest.raises(ServerError, match="409"):
        await run(tmp_path, server)


async def test_a_trainer_that_never_comes_is_named(tmp_path: Path, server: FakeServer) -> None:
    create_run(tmp_path)
    with pytest.raises(DeadlineError, match="grpo-train"):
        await orchestrate(settings_for(tmp_path, server, wait_timeout_s=0.5))


MIXED = """
from grpo import Environment, Rubric

def graded(completion, example):
    return {"b": 1 / 3, "c": 2 / 3, "e" * 14: -1e6}.get(completion) or 1 / (completion == "a")

class Mixed(Environment):
    rubric = Rubric([graded])
    def dataset(self, split):
        return [{"prompt": "say " + "x" * (600 if number % 5 == 3 else number)} for number in range(20)]
"""


async def test_what_cannot_be_trained_is_dropped_with_one_reason_everywhere(tmp_path: Path, server: FakeServer) -> None:
    (tmp_path / "mixed.py").write_text(MIXED)
    draws = random.Random(0)
    # By the prompt all rewards are 1, most rollouts fail, or some do; the penalty for length makes some too large.
    answers = (["a"], [*"dddda"], [*"abcd", "e" * 14])
    server.answer = lambda prompt, version: draws.choice(answers[prompt.count("x") % 3])
    given: dict[str, Any] = {"eval": {"num_examples": 0}, "max_env_failure_rate": 1.0, "max_steps": 6}
    given |= {"env": [{"id": f"{tmp_path / 'mixed.py'}:Mixed"}], "buffer": {"online_difficulty_filtering": True}}
    made = await run(tmp_path, server, **given, reward_shaping={"overlong_interval": 4})
    reasons = {"env_error", "prompt_too_long", "group_too_small", "all_rewards_1", "reward_too_large"}
    assert check_drops(tmp_path) >= reasons
    dropped = sum(made.summary.rollouts_dropped.values())
    assert made.summary.rollouts_issued == made.summary.rollouts_trained + dropped
    assert len(made.trained) == made.summary.rollouts_trained
    assert (made.summary.accuracy_before, made.summary.accuracies) == (None, {})  # and nothing was evaluated
    assert not [request for request in server.requests if request["temperature"] == 0]


OWN_ADVANTAGE = """
calls = []

def sometimes(rewards, lengths):
    calls.append(rewards)
    return [1.0] * len(rewards) if len(calls) % 2 else 1 / 0

def never(rewards, lengths):
    return ["much"]
"""


async def test_a_failing_advantage_and_refused_numbers_cost_their_groups(tmp_path: Path, server: FakeServer) -> None:
    (tmp_path / "own.py").write_text(OWN_ADVANTAGE)
    numbers = itertools.count()

    def answer(prompt: str, version: int) -> str:
        server.logprob = -1e39 if next(numbers) % 20 == 5 else -0.5
        return random.choice("ab")

    server.answer = answer

    def given(name: str) -> dict[str, Any]:
        return {
            "eval": {"num_examples": 0},
            "advantage": {"type": "custom", "import_path": f"{tmp_path}/own.py:{name}"},
        }

    made = await run(tmp_path / "run", server, **given("sometimes"))
    assert made.summary.rollouts_trained == 48
    for reason in ("function_failed", "not_finite"):
        assert made.summary.rollouts_dropped[reason] in range(4, 1000, 4)
    assert made.summary.rollouts_issued == 48 + sum(made.summary.rollouts_dropped.values())
    [(state,)] = rows_of(tmp_path / "run", "SELECT state FROM steps ORDER BY step DESC LIMIT 1")
    assert json.loads(state)["open"] == [], "examples of dropped groups need not come again"
    with pytest.raises(FunctionFailed, match=r"own\.py:never"):
        await run(tmp_path / "other", server, **given("never"))


DELAYED = """
import asyncio
from pathlib import Path
from grpo import Environment, Rubric

FOLDER = Path(__file__).parent

async def later(completion, example, ctx):
    number = example["number"]
    if number > 2:
        await asyncio.sleep(0.01)
        return float(completion == "a")
    async with ctx.delayed(timeout_s=(60, 1, 600)[number]):
        (FOLDER / f"waits {number}").touch()
        while number == 2 or not (FOLDER / "go").exists():
            await asyncio.sleep(0.01)
    return float(bool(await ctx.ask([{"role": "user", "content": "was it good?"}], model="policy", max_tokens=4)))

class Delayed(Environment):
    rubric = Rubric([later])

    def dataset(self, split):
        return [{"prompt": f"number {number}", "number": number} for number in range(8)]
"""


async def test_a_reward_may_come_later_while_other_groups_take_the_slots(tmp_path: Path, server: FakeServer) -> None:
    (tmp_path / "late.py").write_text(DELAYED)
    server.answer = lambda prompt, version: random.choice("ab")

    async def go() -> None:
        await until(lambda: (tmp_path / "waits 0").exists() and max(server.live) >= 22)
        late = "SELECT COUNT(*) FROM rollouts WHERE example = 1 AND reason = 'env_timeout'"
        await until(lambda: rows_of(tmp_path / "run", late) >= [(4,)])
        (tmp_path / "go").touch()

    opening = asyncio.create_task(go())
    env = [{"id": f"{tmp_path / 'late.py'}:Delayed"}]
    given = {"env": env, "max_steps": 60, "batch_size": 4, "max_async_level": 1, "max_off_policy_steps": 59}
    given |= {"max_env_failure_rate": 1.0, "eval": {"num_examples": 0}}
    made = await run(tmp_path / "run", server, trainer={"step_s": 0.06}, **given)
    await opening
    assert made.summary.rollouts_dropped["env_timeout"] >= 4
    assert made.summary.rollouts_dropped["run_ended"] >= 4, "a run that has all its batches waits for no reward"
    assert made.summary.rollouts_trained == 240
    query = "SELECT min(step), min(version) FROM rollouts WHERE example = 0 AND state = 'trained'"
    [(step, version)] = rows_of(tmp_path / "run", query)
    assert step - version > 10  # it waited while others were trained


# --- environments that fail ---


async def states_of(folder: Path, seen: set[tuple[str, str | None]]) -> None:
    """Gathers what the orchestrator says about itself until it is cancelled."""
    while True:
        if status := read_status(folder / "status" / "orch.json"):
            seen.add((status["state"], status["waiting_for"]))
        await asyncio.sleep(0.02)


async def test_a_reward_that_hangs_stops_the_run_with_its_name(tmp_path: Path, server: FakeServer) -> None:
    env = rewarded(tmp_path, "time.sleep(1000)")
    limits = {"reward_timeout_s": 1, "wait_timeout_s": 16, "max_env_failure_rate": 1.0}
    watch = asyncio.create_task(states_of(tmp_path, seen := set[tuple[str, str | None]]()))
    with pytest.raises(EnvironmentFailed, match=r"rewarded\.py"):
        await run(tmp_path, server, env=env, eval={"eval_base_model": False}, **limits)
    watch.cancel()
    assert ("scoring", f"environment {env[0]['id']}") in seen


@pytest.mark.parametrize(
    ("right", "step_s", "changes"),
    [
        ("()", 0, {"eval": {"num_examples": 5}}),
        # Before version 1, 18 of 20 evaluations fail and 16 rollouts do not: 5 of some 16 in a row do.
        ("(1, 2)", 2, {"max_env_failure_rate": 0.25}),
    ],
    ids=["a whole evaluation", "as they come"],
)
async def test_an_environment_that_fails_too_often_stops_the_run_with_its_traceback(
    tmp_path: Path, server: FakeServer, right: str, step_s: float, changes: dict[str, Any]
) -> None:
    body = f"return 1.0 if example['split'] == 'train' or example['index'] in {right} else 1 / 0"
    with pytest.raises(EnvironmentFailed, match="ZeroDivisionError"):
        await run(tmp_path, server, trainer={"step_s": step_s}, env=rewarded(tmp_path, body), **changes)


class Hanging(FakeServer):
    """Answers the fourth request never."""

    async def sampling(self, body: dict[str, Any]) -> None:
        await asyncio.sleep(600 if len(self.requests) == 4 else self.latency_s)


async def test_an_answer_that_takes_too_long_costs_its_group_and_not_its_server(tmp_path: Path) -> None:
    async with Hanging(improving) as server:
        client = {"base_url": [server.url], "timeout": 5}
        made = await run(tmp_path, server, client=client, eval={"num_examples": 0})
    assert made.summary.rollouts_dropped == {"server_timeout": 4}
    assert made.summary.rollouts_trained == 48
    assert [load["version"] for load in server.loads] == [0, 1, 2, 3]  # it was never out of the routing


async def test_a_run_whose_servers_stay_away_ends_and_can_be_started_again(tmp_path: Path, server: FakeServer) -> None:
    server.latency_s = 0.2
    limits = {"client": {"base_url": [server.url], "timeout": 3}, "eval": {"num_examples": 0}}
    running = asyncio.create_task(run(tmp_path, server, **limits))
    await until(lambda: server.requests)
    await server.stop()
    with pytest.raises(ServersAway, match=r"client\.timeout"):
        await running
    await server.start()
    made = await run(tmp_path, server, trainer={"goes_on_after": 0}, eval=limits["eval"])
    assert made.summary.rollouts_trained == 48


async def test_a_run_survives_a_server_that_fails_and_says_that_it_waits(tmp_path: Path, server: FakeServer) -> None:
    server.latency_s, server.num_failures = 0.2, 5
    watch = asyncio.create_task(states_of(tmp_path, seen := set[tuple[str, str | None]]()))
    running = asyncio.create_task(run(tmp_path, server, eval={"num_examples": 0}))
    await until(lambda: server.requests)
    await server.stop()
    await until(lambda: ("waiting", f"inference servers: {server.url.removesuffix('/v1')}") in seen)
    await server.start()
    assert (await running).summary.rollouts_trained == 48
    watch.cancel()

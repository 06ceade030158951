"""Scored rollouts to training samples: baselines, filters, versions."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from grpo.orchestrator.advantage import group_credit
from grpo.orchestrator.filters import Filter, is_gibberish, is_repetition
from grpo.orchestrator.monitoring.metrics import lag
from grpo.orchestrator.packing import pack
from grpo.orchestrator.rollouts.records import EpisodeResult, single_row
from grpo.orchestrator.samples import ScoredGroup, add_samples, judge_group, unfit
from grpo.transport.codec import decode, encode
from grpo.transport.http import Choice
from grpo.transport.records import Tolerance
from msgspec.structs import replace

from tests.orchestrator import made


def finished(results: list[EpisodeResult], *judged: Any, **scored: Any) -> ScoredGroup:
    group = ScoredGroup(results, *judged, **scored)
    add_samples(group, group_credit, number="9")
    return group


def last_of_three(*, enforce: bool) -> Filter:
    """Finds token 14, whose log-probability of -0.4 is below -log(16) + 2.4 = -0.373."""
    finds = partial(is_gibberish, token_id_threshold=13, logprob_offset=-2.4, vocab_size=16)
    return Filter(name="gibberish", finds=finds, enforce=enforce)


def single(number: int, completion: Choice, *, version: int = 5) -> EpisodeResult:
    """The group's rollout `number`, a single answer whose reward is that number."""
    step = made.step(temperature=0.7, completion=completion, version=version)
    row = single_row([1, 2], completion, opening=(2,), version=version, temperature=0.7)
    return made.result(f"9/{number}", step, rows=(row,), rewards=float(number))


def group_of(num: int) -> list[EpisodeResult]:
    """`num` rollouts with the rewards 2, 3, … whose only tokens are 12, 13, …"""
    return [single(n, Choice(token_ids=[10 + n], logprobs=[-0.1 * n], finish_reason="stop")) for n in range(2, num + 2)]


def test_each_token_of_a_sample_has_the_version_that_sampled_it_and_the_prompt_that_of_the_first() -> None:
    runs = ((5, 1), (6, 2), (8, 1))
    one = single(2, Choice(token_ids=[12] * 4, logprobs=[-0.1] * 4, finish_reason="stop", versions=runs))
    [_, other] = group_of(2)
    assert (one.versions, other.versions) == ([5, 6, 8], [5])
    group = finished([one, other])
    assert [sample.policy_versions for sample in group.samples] == [((5, 3), (6, 2), (8, 1)), ((5, 3),)]
    later = replace(other, steps=(replace(other.steps[0], version=7),))
    for results, oldest in (([one, other], 5), ([later, one], 5), ([one, later], 5), ([later], 7)):
        assert finished(results).oldest_version == oldest
    assert [lag(result, 10) for result in (one, other, later)] == [4, 4, 2]


@pytest.mark.parametrize(
    ("change", "fits"),
    [
        ({}, True),
        ({"advantages": 1e39}, False),
        ({"advantages": float("nan")}, False),
        ({"temperatures": 0.0}, False),
        ({"temperatures": np.array([1, 1, -1], np.float32)}, False),
        ({"inference_logprobs": np.array([0, 0, -np.inf], np.float32)}, False),
        ({"teacher_logprobs": np.array([0, 0, np.nan], np.float32)}, False),
    ],
)
def test_a_sample_that_the_trainer_would_refuse_is_known(change: dict[str, Any], fits: bool) -> None:
    first, second = finished(group_of(2)).samples
    assert (unfit([first, replace(second, **change)]) is None) == fits


def test_a_sample_has_the_temperature_and_adapter_that_it_was_sampled_with() -> None:
    first, second = group_of(2)
    second = replace(second, steps=(replace(second.steps[0], adapter=1),))
    samples = finished([first, second]).samples
    assert [(sample.temperatures, sample.adapter) for sample in samples] == [(0.7, 0), (0.7, 1)]


def test_what_a_rollout_spawned_is_trained_or_withheld_with_it() -> None:
    parent, child, other = group_of(3)
    group = [replace(parent, children=(child,)), other]
    assert [one.rollout_id for one in finished(group).samples] == ["9/2", "9/2", "9/4"]
    kept = finished(group, withheld={"9/2": "gibberish"})
    assert [one.rollout_id for one in kept.samples] == ["9/4"]


def test_evidence_goes_on_top_of_the_advantage_of_its_answer() -> None:
    tokens = Choice(token_ids=[12, 13], logprobs=[-0.1] * 2, finish_reason="stop")
    # Rewards 2 and 3: advantages -1/2 and 1/2.
    group = [single(number, tokens) for number in (2, 3)]
    scored = ScoredGroup(group)
    for gains in ([0.25, -1.0], [0.0, -1.0]):
        scored.add_evidence(("9/3", 0), np.array(gains, np.float32), consensus=0.5)
    seen = []
    add_samples(scored, lambda results: seen.extend(results) or group_credit(results), number="9")
    samples = scored.samples
    assert [one.steps[0].evidence and one.steps[0].evidence.consensus for one in seen] == [None, 0.5]
    assert samples[0].advantages == -0.5
    assert np.asarray(samples[1].advantages)[samples[1].loss_mask].tolist() == [0.75, -1.5]


def test_a_rollout_that_a_filter_withholds_gives_no_sample_but_counts_in_the_baseline() -> None:
    results = group_of(3)
    finds = partial(is_repetition, window=1, prob_threshold=0.7)  # log(0.7) = -0.357: all but the last
    filters = [Filter(name="repetition", finds=finds), last_of_three(enforce=True)]
    group = finished(results, *judge_group(results, filters))
    assert group.results == results
    assert group.found == ["repetition", "repetition", "gibberish"]
    assert group.withheld == {"9/4": "gibberish"}
    assert [one.rollout_id for one in group.samples] == ["9/2", "9/3"]
    # Rewards 2, 3 and 4 have the mean 3, with the withheld one.
    assert [sample.advantages for sample in group.samples] == [-1, 0]

    detected = finished(results, *judge_group(results, [last_of_three(enforce=False)]))
    assert detected.found == ["gibberish"]
    assert [one.rollout_id for one in detected.samples] == ["9/2", "9/3", "9/4"]


def test_a_sample_names_the_servers_of_its_turns_and_packing_brings_what_each_is_held_to() -> None:
    known = {"a": Tolerance(gap=0.01, measure="max_abs"), "b": Tolerance(gap=0.02, measure="max_abs")}
    results = group_of(3)
    for number, server in enumerate(["a", "c", ""]):
        completion = replace(results[number].steps[0].completion, server=server)
        results[number] = replace(results[number], steps=(replace(results[number].steps[0], completion=completion),))
    samples = [*finished(results).samples]
    assert [sample.server for sample in samples] == ["a", "c", ""]
    samples.append(replace(samples[0], server="a b"))
    [[batch]] = pack(samples, capacity=64, num_ranks=1, run_id="run", step=1, tolerances=known)
    [decoded] = decode(encode([batch]))
    assert sorted(decoded.servers) == ["", "a", "a b", "c"]
    assert decoded.tolerances == {"a": known["a"], "a b": known["b"]}

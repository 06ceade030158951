"""When providers may be asked, what that costs, and what is remembered."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.disagreement.budget import Budget, Price, Usage
from orchestrator.disagreement.cache import AnswerCache, state_key
from orchestrator.disagreement.pacing import Rest, TokenBucket, pause_s


class Hands:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


# --- rates ---


def test_a_burst_is_free_and_then_one_comes_after_the_other() -> None:
    clock = Hands()
    bucket = TokenBucket(2.0, burst=3, clock=clock)
    assert [bucket.take() for _ in range(5)] == [0.0, 0.0, 0.0, 0.5, 1.0]
    clock.now_s += 1.25  # the sixth was due after 1.5 s
    assert bucket.take() == 0.25
    clock.now_s += 100.0
    assert [bucket.take() for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]


def test_a_provider_that_wants_a_pause_gets_it() -> None:
    clock = Hands()
    bucket = TokenBucket(2.0, burst=3, clock=clock)
    bucket.hold(10.0)
    assert bucket.wait_s == 10.0
    clock.now_s += 4.0
    assert [bucket.take() for _ in range(3)] == [6.0, 6.5, 7.0]
    bucket.hold(1.0)  # a shorter one changes nothing
    assert bucket.take() == 7.5


@given(st.lists(st.floats(0, 3), min_size=1, max_size=40), st.integers(1, 5), st.floats(0.5, 8))
def test_no_stretch_of_time_sees_more_than_the_burst_and_the_rate_allow(
    gaps: list[float], burst: int, per_s: float
) -> None:
    clock = Hands()
    bucket, used = TokenBucket(per_s, burst=burst, clock=clock), []
    for gap in gaps:
        clock.now_s += gap
        used.append(clock.now_s + bucket.take())
    for first, begin in enumerate(used):
        for last in range(first, len(used)):
            assert last - first + 1 <= burst + (used[last] - begin) * per_s + 1e-6


def test_pauses_grow_with_a_jitter_of_half_of_them() -> None:
    draw = random.Random(0)
    for tries, full_s in ((1, 1.0), (2, 2.0), (3, 4.0), (4, 5.0), (1000, 5.0)):
        pauses = [pause_s(tries, first_s=1.0, most_s=5.0, draw=draw) for _ in range(200)]
        assert full_s / 2 <= min(pauses) < full_s * 0.55
        assert full_s * 0.95 < max(pauses) <= full_s


# --- rests ---


def failed(rest: Rest) -> None:
    begun = rest.begin()
    assert begun is not None
    rest.end(begun, False)


def test_a_provider_that_fails_in_a_row_rests_longer_and_longer_until_it_answers() -> None:
    clock = Hands()
    rest = Rest(after=2, cooldown_s=10.0, clock=clock)
    failed(rest)
    rest.end(rest.begin() or 0, True)
    failed(rest)  # not in a row
    assert not rest.resting
    failed(rest)
    for rested_s in (10.0, 20.0, 40.0, 80.0, 160.0, 160.0):
        assert rest.resting
        clock.now_s += rested_s - 0.1
        assert rest.begin() is None
        clock.now_s += 0.1
        failed(rest)
    clock.now_s += 160.0
    begun = rest.begin()
    assert begun is not None
    assert rest.begin() is None, "it is tried with one question at a time"
    rest.end(begun, True)
    assert not rest.resting
    assert rest.begin() is not None


def test_what_was_asked_before_the_rest_has_no_say_in_it() -> None:
    clock = Hands()
    rest = Rest(after=1, cooldown_s=10.0, clock=clock)
    early = [rest.begin() for _ in range(4)]
    for begun in early[:3]:
        assert begun is not None
        rest.end(begun, False)
    clock.now_s += 10.0  # not 40: three that failed together are one failure
    trying = rest.begin()
    assert trying is not None
    assert early[3] is not None
    rest.end(early[3], True)
    assert rest.resting
    assert rest.begin() is None


def test_a_question_that_teaches_nothing_lets_the_next_one_try() -> None:
    clock = Hands()
    rest = Rest(after=1, cooldown_s=10.0, clock=clock)
    failed(rest)
    clock.now_s += 10.0
    rest.end(rest.begin() or 0, None)
    assert rest.resting
    assert rest.begin() is not None


def test_rates_and_rests_that_cannot_be_are_errors() -> None:
    with pytest.raises(ValueError, match="a rate of 0 a second with bursts of 1"):
        TokenBucket(0, burst=1, clock=Hands())
    with pytest.raises(ValueError, match="a rest of 1 s after 0 failures"):
        Rest(after=0, cooldown_s=1, clock=Hands())


# --- the budget ---

PRICES = {"a": Price(prompt=2.0, completion=10.0), "own": Price()}
MOST = Usage(prompt_tokens=1_000_000, completion_tokens=100_000)  # 2 + 1 = 3


def test_a_price_is_by_the_million() -> None:
    assert PRICES["a"].of(Usage(prompt_tokens=1500, completion_tokens=200)) == pytest.approx(0.003 + 0.002)
    with pytest.raises(ValueError, match=r"prices are -1 and 0.0 a million tokens"):
        Price(prompt=-1)


def test_requests_under_way_cannot_pass_the_ceiling_together() -> None:
    budget = Budget(PRICES, ceiling=7.0)
    first, second = (budget.reserve("a", "t", MOST) for _ in range(2))
    assert first is not None
    assert second is not None
    assert budget.reserve("a", "t", MOST) is None  # 3 + 3 + 3 > 7
    assert budget.settle(first, Usage(prompt_tokens=500_000, completion_tokens=0)) == 1.0
    third = budget.reserve("a", "u", MOST)  # 1 + 3 + 3 = 7
    assert third is not None
    assert budget.settle(second, None) == 3.0  # unknown: at its most
    assert budget.settle(third, None, billed=False) == 0.0
    assert budget.reserve("own", "t", MOST) is not None
    assert (budget.total, budget.num_traces, budget.cost_per_trace) == (4.0, 2, 2.0)
    assert (budget.close_trace("t"), budget.close_trace("u"), budget.close_trace("v")) == (4.0, 0.0, 0.0)


def test_a_rollout_has_a_ceiling_of_its_own() -> None:
    budget = Budget(PRICES, trace_ceiling=4.0)
    reserved = budget.reserve("a", "t", MOST)
    assert reserved is not None
    assert budget.reserve("a", "t", MOST) is None
    assert budget.reserve("a", "u", MOST) is not None
    budget.settle(reserved, Usage(prompt_tokens=0, completion_tokens=0))
    assert budget.reserve("a", "t", MOST) is not None


def test_what_is_asked_once_more_about_a_rollout_that_is_done_with_is_not_paid() -> None:
    budget = Budget(PRICES, trace_ceiling=4.0)
    reserved = budget.reserve("a", "t", MOST)
    assert reserved is not None
    budget.settle(reserved, None, billed=False)
    budget.close_trace("t")
    assert budget.reserve("a", "t", MOST) is None
    assert (budget.num_traces, budget.close_trace("t")) == (1, 0.0)
    assert budget.reserve("a", "u", MOST) is not None


def test_a_run_that_goes_on_has_spent_what_it_had_spent() -> None:
    budget = Budget(PRICES, ceiling=10.0)
    reserved = budget.reserve("a", "t", MOST)
    assert reserved is not None
    budget.settle(reserved, None)
    assert budget.reserve("a", "t", MOST) is not None  # under way when the process ends: counts at its most
    state = json.loads(json.dumps(budget.state()))
    again = Budget(PRICES, ceiling=10.0, state=state)
    assert (again.total, again.num_traces) == (6.0, 1)
    assert again.reserve("a", "u", MOST) is not None
    assert again.reserve("a", "v", MOST) is None


@pytest.mark.parametrize("state", [{}, {"spent": 3, "num_traces": 1}, {"spent": {"a": -1}, "num_traces": 1}, []])
def test_a_state_that_was_never_given_is_an_error(state: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="the teachers' budget was kept as"):
        Budget(PRICES, state=state)


def test_ceilings_that_cannot_be_are_errors() -> None:
    with pytest.raises(ValueError, match="ceiling is -1, expected 0 or more, or none"):
        Budget(PRICES, ceiling=-1)
    with pytest.raises(ValueError, match="trace_ceiling is nan"):
        Budget(PRICES, trace_ceiling=float("nan"))


# --- the cache ---


def test_equal_states_have_equal_keys_and_others_have_others() -> None:
    messages = [{"role": "user", "content": "hé"}]
    keys = [
        state_key(messages),
        state_key([{"content": "hé", "role": "user"}]),
        state_key([{"role": "user", "content": "he"}]),
        state_key(messages, []),
        state_key(messages, [{"type": "function"}]),
        state_key([{"role": "user", "content": "hé"}, {"role": "user", "content": ""}]),
    ]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 5
    assert len(keys[0]) == 32


def test_states_that_were_not_looked_at_for_longest_go_first() -> None:
    cache = AnswerCache[str](2)
    cache.put("s1", "a", "one")
    cache.put("s1", "b", "other")
    cache.put("s2", "a", "two")
    assert cache.get("s1", "a") == "one"
    cache.put("s3", "a", "three")
    assert [cache.get("s1", "b"), cache.get("s2", "a"), cache.get("s3", "a"), cache.get("s3", "b")] == [
        "other",
        None,
        "three",
        None,
    ]
    assert len(cache) == 2


def test_a_cache_may_keep_nothing() -> None:
    cache = AnswerCache[str](0)
    cache.put("s1", "a", "one")
    assert cache.get("s1", "a") is None
    with pytest.raises(ValueError, match="max_states is -1"):
        AnswerCache[str](-1)

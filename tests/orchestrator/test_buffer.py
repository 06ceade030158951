"""Which example is asked next, and which groups are worth training."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from grpo.orchestrator.buffer import MAX_REFILLS, Buffer, NothingToAsk, Order, make_buffer
from grpo.orchestrator.resuming import Progress
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.orchestrator.fakes import settings_for

KEYS = {env: [f"{env}{i}" for i in range(5)] for env in "ab"}
FOUR = {"a": ["p", "q", "r", "s"]}


def issue(buffer: Buffer, group: int) -> str:
    """The key of the example that the group gets."""
    buffer.issue(group)
    env, number, _ = buffer._open[group]
    return env.key(number)


def asked(buffer: Buffer, num: int) -> list[str]:
    """Keys of the next `num` examples, each of which comes to nothing."""
    keys = []
    for group in range(num):
        keys.append(issue(buffer, group))
        buffer.closed(group)
    return keys


def reward(buffer: Buffer, key: str, *rewards: float) -> str | None:
    """Asks until `key` comes, and says what its group was worth."""
    group = -1
    while issue(buffer, group) != key:
        buffer.closed(group)
    reason = buffer.returned(group, rewards)
    buffer.closed(group)
    return reason


# --- order ---


def test_environments_take_turns_and_every_epoch_has_every_example_once() -> None:
    keys = asked(Buffer(KEYS, seed=1), 20)
    assert [key[0] for key in keys] == ["a", "b"] * 10
    first, second = keys[0:10:2], keys[10:20:2]
    assert sorted(first) == sorted(second) == KEYS["a"]
    assert first != second


@given(st.integers(1, 300), st.integers(0, 9))
def test_an_order_has_each_number_at_one_place_and_another_seed_gives_another_order(num: int, seed: int) -> None:
    order = Order(f"seed {seed}", num)
    numbers = order.numbers(0, num)
    assert sorted(numbers) == [*range(num)]
    assert order.places(numbers).tolist() == [*range(num)]
    if num > 20:
        assert numbers.tolist() != Order(f"seed {seed + 1}", num).numbers(0, num).tolist()


@pytest.mark.parametrize("few", [1, 4, 100])
@settings(max_examples=20)
@given(st.data())
def test_the_next_example_is_the_next_normal_one_however_few_those_are(few: int, data: st.DataObject) -> None:
    num = data.draw(st.integers(1, 40))
    buffer = Buffer({"a": [f"{number}" for number in range(num)]}, seed=1)
    env, place = buffer._environments["a"], 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("grpo.orchestrator.buffer._FEW", few)
        for group in range(30):
            for number in data.draw(st.lists(st.integers(0, num - 1), max_size=4)):
                pool = data.draw(st.sampled_from(["normal", "hard"]))
                if pool == "normal" or env.sizes["normal"] > 1:
                    env.put(number, pool)
            while True:
                epoch, at = divmod(place, num)
                [expected] = Order(f"{env.seed}/{epoch}", num).numbers(at, at + 1).tolist()
                place += 1
                if env.pools[expected] == 0:
                    break
            assert buffer.issue(group)[1:] == (expected, epoch)


def test_ratios_hold_over_every_stretch_of_turns() -> None:
    keys = {"a": ["a1", "a2"], "b": ["b1", "b2"], "c": ["c1"]}
    # Shares 2 : 1 : 0, so a b a repeats, and c is never asked.
    turns = [key[0] for key in asked(Buffer(keys, seed=1, env_ratios=[2, 1, 0]), 9)]
    assert turns == ["a", "b", "a"] * 3


def test_the_order_is_by_the_seed_of_the_buffer_or_else_of_the_run() -> None:
    def order(**changes: Any) -> list[str]:
        return asked(make_buffer(settings_for(Path("x"), client={}, **changes), KEYS, Progress()), 10)

    assert order(seed=1) == order(seed=2, buffer={"seed": 1}) != order(seed=2)


def test_the_example_of_a_group_that_was_withdrawn_is_asked_again_before_any_other() -> None:
    buffer = Buffer(FOUR, seed=1)
    first, second = issue(buffer, 0), issue(buffer, 1)
    buffer.withdrawn(0)
    assert sorted(buffer.state()["open"]) == sorted([(first, 0), (second, 0)])
    assert issue(buffer, 2) == first
    assert issue(buffer, 3) not in (first, second)


# --- identity ---


def test_an_example_that_occurs_again_is_left_out_and_counted_by_its_environment() -> None:
    buffer = Buffer({"a": ["x", "x", "y"]}, seed=1)
    assert {buffer.issue(0), buffer.issue(1)} == {("a", 0, 0), ("a", 2, 0)}
    buffer = Buffer({"a": ["x", "y", "x"], "b": ["y", "z"]}, seed=1)
    assert Counter(asked(buffer, 4)) == {"x": 1, "y": 1, "z": 2}
    assert buffer.num_duplicates == {"a": 1, "b": 1}
    assert buffer.metrics()["progress/examples_duplicate"] == 2
    with pytest.raises(ValueError, match="duplicates"):
        Buffer({"a": ["x"], "b": ["x", "x"]}, seed=1)


# --- difficulty ---


@pytest.mark.parametrize(
    ("rewards", "pool"),
    [((1.0, 0.6), "easy"), ((0.8, 0.79), "normal"), ((0.0, 0.5), "normal"), ((0.0, 0.4), "hard")],
)
def test_the_mean_reward_of_a_group_makes_its_example_easy_or_hard(rewards: tuple[float, ...], pool: str) -> None:
    # Means 0.8, 0.795, 0.25 and 0.2 with thresholds 0.8 and 0.2.
    buffer = Buffer(FOUR, seed=1, easy_threshold=0.8, hard_threshold=0.2)
    reward(buffer, "q", *rewards)
    assert buffer.num_examples() == {"normal": 3, "easy": 0, "hard": 0} | {pool: 4 if pool == "normal" else 1}
    assert ("q" in asked(buffer, 8)) == (pool == "normal")


def test_when_no_normal_example_is_left_the_error_says_what_the_others_are() -> None:
    buffer = Buffer(FOUR, seed=1, easy_threshold=1, hard_threshold=0)
    for key, mean in zip(FOUR["a"], (1, 0, 0, 0), strict=True):
        reward(buffer, key, mean)
    with pytest.raises(NothingToAsk, match=r"1 easy, 3 hard"):
        buffer.issue(9)
    resumed = Buffer(FOUR, seed=1, hard_threshold=0)  # without the other, easy examples are asked again
    assert resumed.restore(buffer.state(), buffer.moved()) == 0
    assert tuple(resumed.num_examples().values()) == (1, 0, 3)
    assert resumed.moved() == {"p": "normal"}, "so that the next process does not find it easy"


# --- online filtering ---


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ((0.0, 0.0), "all_rewards_0"),
        ((1.0, 1.0), "all_rewards_1"),
        ((0.1 + 0.2, 0.3), "all_rewards_equal"),
        ((0.0, 1.0), None),
        ((0.0,), "all_rewards_0"),
        ((0.5,), None),
    ],
)
def test_groups_without_spread_are_not_trained(rewards: tuple[float, ...], reason: str | None) -> None:
    assert reward(Buffer(FOUR, seed=1, online_difficulty_filtering=True), "p", *rewards) == reason
    assert reward(Buffer(FOUR, seed=1), "p", *rewards) is None


def test_a_group_in_which_one_role_did_better_is_trained() -> None:
    buffer = Buffer(FOUR, seed=1, online_difficulty_filtering=True)
    buffer.issue(0)
    assert buffer.returned(0, [0.5, 0.5], of_roles=[[0, 1], [1, 0]]) is None


def test_groups_are_sampled_anew_as_long_as_any_have_spread_and_then_a_batch_is_filled_all_the_same() -> None:
    buffer = Buffer(FOUR, seed=1, online_difficulty_filtering=True, groups_per_batch=2)
    reasons = [reward(buffer, "p", 0.0, 0.0) for _ in range(2 * MAX_REFILLS + 1)]
    assert reasons == ["all_rewards_0"] * 2 * MAX_REFILLS + [None]
    assert reward(buffer, "p", 0.0, 1.0) is None  # which pays for as many others
    reasons = [reward(buffer, "p", 0.0, 0.0) for _ in range(MAX_REFILLS + 1)]
    assert reasons == ["all_rewards_0"] * MAX_REFILLS + [None]


# --- restarts ---


UNEVEN: dict[str, Any] = {"seed": 1, "env_ratios": [3, 0.1], "easy_threshold": 1, "hard_threshold": 0}


def used() -> Buffer:
    """A buffer in the middle of its second epoch, with easy and hard examples, and groups 100 to 102 open."""
    buffer = Buffer(KEYS, **UNEVEN)
    reward(buffer, "a1", 1.0)
    reward(buffer, "b2", 0.0)
    asked(buffer, 7)
    for group in (100, 101, 102):
        buffer.issue(group)
    return buffer


def again(state: dict[str, Any], keys: dict[str, list[str]] = KEYS) -> tuple[Buffer, int]:
    buffer = Buffer(keys, **UNEVEN)
    return buffer, buffer.restore(json.loads(json.dumps(state)), {"a1": "easy", "b2": "hard"})


def test_a_restored_buffer_has_the_same_state_and_asks_first_what_was_open_and_then_what_the_other_asks() -> None:
    buffer = used()
    restored, num_lost = again(buffer.state())
    assert num_lost == 0
    assert restored.state() == buffer.state()
    assert asked(restored, 3) == [key for key, _ in buffer.state()["open"]]
    for group in (100, 101, 102):
        buffer.closed(group)
    assert asked(restored, 40) == asked(buffer, 40)
    assert restored.state() == buffer.state()


@given(st.lists(st.integers(0, 9), max_size=30), st.randoms())
def test_a_restored_buffer_asks_every_example_in_the_epoch_of_an_unbroken_one(lags: list[int], shuffler: Any) -> None:
    """`lags`: how many groups are left open as each group is issued."""
    whole, open_groups = Buffer({"a": ["p", "q", "r"], "b": ["s"]}, seed=1), list[int]()
    for group, lag in enumerate(lags):
        whole.issue(group)
        open_groups.append(group)
        while len(open_groups) > lag:
            closed = open_groups.pop(shuffler.randrange(len(open_groups)))
            shuffler.choice((whole.closed, whole.closed, whole.withdrawn))(closed)
    state = json.loads(json.dumps(whole.state()))
    resumed = Buffer({"a": ["p", "q", "r"], "b": ["s"]}, seed=1)
    resumed.restore(state, {})
    for group in open_groups:
        whole.withdrawn(group)  # an uninterrupted run trains it, once, and nothing else is asked in its place
    again = Counter(resumed.issue(100 + number) for number in range(40))
    assert again == Counter(whole.issue(100 + number) for number in range(40))


def test_examples_are_known_by_their_keys_when_the_dataset_has_changed() -> None:
    state = used().state()
    # a1 is easy and b2 hard; a1 has moved, b2 is gone, and c is new.
    keys = {"a": ["c", *reversed(KEYS["a"])], "b": ["b0", "b1", "b3", "b4"]}
    gone = sum(key == "b2" for key, _ in state["open"])
    restored, num_lost = again(state, keys)
    assert num_lost == 1 + gone
    assert restored.num_examples("a") == {"normal": 5, "easy": 1, "hard": 0}
    assert restored.num_examples("b") == {"normal": 4, "easy": 0, "hard": 0}
    epochs = [one["epoch"] for one in restored.state()["environments"].values()]
    assert epochs == [one["epoch"] + 1 for one in state["environments"].values()]


@pytest.mark.parametrize(
    ("easy", "hard", "sizes"), [(0.5, 0.0, (2, 1, 2)), (0.0, 1.0, (3, 2, 0)), (0.2, 0.2, (1, 2, 2))]
)
def test_shares_of_the_easy_and_hard_examples_become_normal(easy: float, hard: float, sizes: tuple[int, ...]) -> None:
    # Two are easy and two hard: halves are one each, a fifth of two rounds to none.
    buffer = Buffer({"a": [f"k{i}" for i in range(5)]}, seed=1, easy_threshold=1, hard_threshold=0)
    for key, mean in (("k0", 1), ("k1", 1), ("k2", 0), ("k3", 0)):
        reward(buffer, key, mean)
    assert buffer.promote(easy_fraction=easy, hard_fraction=hard) == sizes[0] - 1
    assert tuple(buffer.num_examples().values()) == sizes

"""Stores of artifacts: what they draw, what they drop, and what a run that goes on finds."""

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from grpo.orchestrator.ledger import Ledger
from grpo.orchestrator.rollouts.stores import ArtifactStore, ArtifactStores


def fill(store: ArtifactStore, **weights: float) -> ArtifactStore:
    for name, weight in weights.items():
        store.add({"topic": name}, weight=weight)
    return store


def topics(store: ArtifactStore) -> dict[str, float]:
    return {artifact.data["topic"]: artifact.weight for artifact in store.all()}


def test_equal_values_are_one_artifact_with_the_newest_weight() -> None:
    store = ArtifactStore("topics")
    first = store.add({"a": 1, "b": [2.5, None]})
    assert store.add({"b": (2.5, None), "a": 1}, weight=3.0) == first
    assert [(one.id, one.weight) for one in store.all()] == [(first, 3.0)]
    assert store.add({"a": 1.0, "b": [2.5, None]}) != first
    assert not store.set_weight("another", 1.0)
    store.all()[0].data["b"].append("c")
    assert store.all()[0].data["b"] == [2.5, None]  # what is stored is nobody else's
    with pytest.raises(ValueError, match="topics"):
        store.add(float("nan"))


def test_a_full_store_drops_the_lightest_and_among_equals_the_oldest() -> None:
    store = fill(ArtifactStore("topics", max_size=3), a=2.0, b=1.0, c=1.0, d=1.5)
    assert topics(store) == {"a": 2.0, "c": 1.0, "d": 1.5}
    store.set_weight(store.all()[0].id, 0.5)
    assert topics(fill(store, e=1.0)) == {"c": 1.0, "d": 1.5, "e": 1.0}
    assert topics(fill(store, f=0.1)) == {"c": 1.0, "d": 1.5, "e": 1.0}


def test_weighted_draws_are_by_weight_and_others_are_not() -> None:
    store = fill(ArtifactStore("topics"), tea=3.0, rain=1.0, never=0.0)
    weighted = Counter(artifact.data["topic"] for artifact in store.sample(4000, weighted=True))
    # Expected 3000 of 4000, with a standard deviation of sqrt(4000 * 0.75 * 0.25) = 27: six of them either way.
    assert weighted["tea"] == pytest.approx(3000, abs=165)
    assert "never" not in weighted
    without = [store.sample(2, weighted=True, replace=False) for _ in range(2000)]
    assert all(sorted(one.data["topic"] for one in drawn) == ["rain", "tea"] for drawn in without)
    # The first of them is drawn by weight: 1500 of 2000, with a standard deviation of 19.
    assert sum(drawn[0].data["topic"] == "tea" for drawn in without) == pytest.approx(1500, abs=120)
    alike = Counter(artifact.data["topic"] for artifact in store.sample(3000))
    assert all(count == pytest.approx(1000, abs=160) for count in alike.values())
    assert len(alike) == 3


@pytest.mark.parametrize("num", [10**7, 10**400, -1, True, 2.0, "3", float("nan")])
def test_draws_and_values_that_are_too_many_or_too_long_are_refused(num: Any) -> None:
    store = fill(ArtifactStore("topics"), tea=1e308, rain=1e308)
    with pytest.raises(ValueError, match="drawn"):
        store.sample(num)
    with pytest.raises(ValueError, match="topics"):
        store.add("x" * (1 << 21))
    assert len(store.sample(10_000, weighted=True)) == 10_000
    long = ArtifactStore("long")
    long.add("x" * 1_000_000)
    assert len(long.sample(16)) == 16
    with pytest.raises(ValueError, match="fewer"):
        long.sample(17)  # of 16,777,216 characters in all
    assert len(store.all()) == 2


# --- the ledger ---


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        yield ledger


def stores_of(ledger: Ledger, max_size: int = 100, seed: str = "0") -> ArtifactStores:
    stores = ArtifactStores(ledger, seed=seed)
    stores.open("e", {"topics": max_size})
    return stores


def test_a_run_that_goes_on_finds_its_stores_as_they_were_last_whatever_batch_it_goes_on_after(ledger: Ledger) -> None:
    store = fill(stores_of(ledger, 3).of("e", "train", "topics"), tea=1.0, rain=2.0, snow=0.5)
    ledger.shipping([], 1, state={}, metrics={})()
    store.set_weight(store.all()[0].id, 4.0)
    store.add({"topic": "sun"})  # the lightest leaves
    ledger.changes()()
    ledger.resume(1)
    assert stores_of(ledger, 3).of("e", "train", "topics").all() == store.all()
    assert topics(store) == {"tea": 4.0, "rain": 2.0, "sun": 1.0}
    assert topics(stores_of(ledger, 2).of("e", "train", "topics")) == {"tea": 4.0, "rain": 2.0}
    ledger.changes()()
    assert len(ledger.artifacts("e/train/topics")) == 2


def test_another_process_of_a_run_does_not_draw_again_what_the_one_before_it_has_drawn(ledger: Ledger) -> None:
    store = stores_of(ledger).of("e", "train", "topics")
    for number in range(50):
        store.add(number)
    ledger.changes()()

    def draws(seed: str) -> list[int]:
        return [one.data for one in stores_of(ledger, seed=seed).of("e", "train", "topics").sample(20)]

    assert draws("0/0") == draws("0/0") != draws("0/17")


def test_stores_are_those_that_environments_name_and_evaluation_has_its_own(ledger: Ledger) -> None:
    stores = stores_of(ledger)
    stores.of("e", "train", "topics").add(1)
    assert stores.of("e", "eval", "topics").all() == []
    with pytest.raises(KeyError, match="other"):
        stores.of("e", "train", "other")
    with pytest.raises(ValueError, match="up"):
        stores.open("e", {"up": 0})

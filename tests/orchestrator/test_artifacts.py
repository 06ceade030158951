"""Stores of artifacts: what they draw, what they drop, and what their files survive."""

import json
import resource
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.episodes.artifacts import ArtifactStore, ArtifactStores
from transport.errors import CorruptError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "artifacts" / "topics.jsonl"


_OPEN: list[ArtifactStore] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while _OPEN:
        _OPEN.pop().close()


def opened(path: Path, **settings: int) -> ArtifactStore:
    """Closed after the test."""
    _OPEN.append(ArtifactStore("topics", path=path, **settings))
    return _OPEN[-1]


def filled(path: Path | None = None, **weights: float) -> ArtifactStore:
    store = ArtifactStore("topics") if path is None else opened(path)
    for name, weight in weights.items():
        store.add({"topic": name}, weight=weight)
    return store


def topics(store: ArtifactStore) -> dict[str, float]:
    return {artifact.data["topic"]: artifact.weight for artifact in store.all()}


# --- what is stored ---


def test_equal_values_are_one_artifact_with_the_newest_weight() -> None:
    store = ArtifactStore("topics")
    first = store.add({"a": 1, "b": [2.5, None]})
    second = store.add({"b": (2.5, None), "a": 1}, weight=3.0)
    assert first.id == second.id
    assert len(store) == 1
    assert store.get(first.id).weight == 3.0
    assert store.add({"a": 1.0, "b": [2.5, None]}).id != first.id


def test_what_is_stored_is_nobody_elses() -> None:
    store, value = ArtifactStore("topics"), {"words": ["a"]}
    artifact = store.add(value)
    value["words"].append("b")
    artifact.data["words"].append("c")
    assert store.get(artifact.id).data == {"words": ["a"]}


def test_artifacts_can_be_removed_and_weighed() -> None:
    store = filled(tea=1.0, rain=1.0)
    tea, rain = store.all()
    store.set_weight(rain.id, 0.5)
    store.remove(tea.id)
    assert topics(store) == {"rain": 0.5}
    assert tea.id not in store
    for missing in (store.get, store.remove, lambda one: store.set_weight(one, 1.0)):
        with pytest.raises(KeyError):
            missing(tea.id)


@pytest.mark.parametrize(("data", "told"), [(float("nan"), "JSON"), ({1, 2}, "set"), ({"a": [{"b": {2: 3}}]}, "key 2")])
def test_what_json_would_lose_is_refused(data: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ArtifactStore("topics").add(data)


def test_what_is_too_deep_to_be_read_again_is_refused() -> None:
    nested: list[Any] = []
    for _ in range(200):
        nested = [nested]
    with pytest.raises(ValueError, match="100"):
        ArtifactStore("topics").add(nested)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), "1"])
def test_a_weight_that_cannot_be_drawn_by_is_refused(weight: Any) -> None:
    store = filled(tea=1.0)
    with pytest.raises(ValueError, match="weight"):
        store.add("x", weight=weight)
    with pytest.raises(ValueError, match="weight"):
        store.set_weight(store.all()[0].id, weight)
    assert topics(store) == {"tea": 1.0}


@pytest.mark.parametrize("name", ["", "../up", "x" * 129])
def test_a_name_that_is_no_files_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="store"):
        ArtifactStore(name)


# --- eviction ---


def test_a_full_store_drops_the_lightest_and_among_equals_the_oldest() -> None:
    store = ArtifactStore("topics", max_size=3)
    for name, weight in [("a", 2.0), ("b", 1.0), ("c", 1.0)]:
        store.add({"topic": name}, weight=weight)
    store.add({"topic": "d"}, weight=1.5)
    assert topics(store) == {"a": 2.0, "c": 1.0, "d": 1.5}
    store.set_weight(store.all()[0].id, 0.5)
    store.add({"topic": "e"}, weight=1.0)
    assert topics(store) == {"c": 1.0, "d": 1.5, "e": 1.0}
    lightest = store.add({"topic": "f"}, weight=0.1)
    assert lightest.id not in store
    assert topics(store) == {"c": 1.0, "d": 1.5, "e": 1.0}
    assert store.num_evicted == 3


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 5)), max_size=60))
def test_eviction_is_that_of_a_store_that_looks_at_all(operations: list[tuple[int, int]]) -> None:
    store, expected = ArtifactStore("topics", max_size=4), dict[int, int]()
    for value, weight in operations:
        store.add(value, weight=weight)
        expected[value] = weight
        if len(expected) > 4:
            del expected[min(expected, key=lambda one: expected[one])]  # the first of the lightest is the oldest
    assert {artifact.data: artifact.weight for artifact in store.all()} == expected


# --- draws ---


def test_draws_are_those_of_the_seed_and_the_stores_name() -> None:
    def drawn(name: str, seed: int) -> list[int]:
        store = ArtifactStore(name, seed=seed)
        for number in range(20):
            store.add(number)
        return [artifact.data for _ in range(3) for artifact in store.sample(4)]

    assert drawn("a", 1) == drawn("a", 1)
    assert drawn("a", 1) != drawn("a", 2)
    assert drawn("a", 1) != drawn("b", 1)
    assert drawn("a", 1)[:4] != drawn("a", 1)[4:8]


def test_weights_may_be_of_any_size() -> None:
    store = ArtifactStore("topics")
    for number, weight in enumerate([1e308, 1e308, 5e-324, 0.0]):
        store.add(number, weight=weight)
    drawn = {artifact.data for artifact in store.sample(100, weighted=True)}
    assert drawn == {0, 1}
    assert {artifact.data for artifact in store.sample(3, weighted=True, replace=False)} == {0, 1, 2}


def test_weighted_draws_are_by_weight_and_others_are_not() -> None:
    store = filled(tea=3.0, rain=1.0, never=0.0)
    weighted = Counter(artifact.data["topic"] for artifact in store.sample(4000, weighted=True))
    # Expected 3000 of 4000, with a standard deviation of sqrt(4000 * 0.75 * 0.25) = 27: six of them either way.
    assert weighted["tea"] == pytest.approx(3000, abs=165)
    assert "never" not in weighted
    alike = Counter(artifact.data["topic"] for artifact in store.sample(3000))
    assert all(count == pytest.approx(1000, abs=160) for count in alike.values())
    assert len(alike) == 3


def test_draws_without_replacement_are_all_different_and_by_weight() -> None:
    store = filled(tea=2.0, rain=1.0, snow=1.0, never=0.0)
    firsts = Counter[str]()
    for _ in range(2000):
        drawn = [artifact.data["topic"] for artifact in store.sample(3, weighted=True, replace=False)]
        assert sorted(drawn) == ["rain", "snow", "tea"]
        firsts[drawn[0]] += 1
    # The first is drawn by weight: 1000 of 2000, standard deviation 22.
    assert firsts["tea"] == pytest.approx(1000, abs=135)
    assert sorted(artifact.data["topic"] for artifact in store.sample(4, replace=False)) == [
        "never",
        "rain",
        "snow",
        "tea",
    ]


def test_draws_that_cannot_be_made_are_refused_and_none_can_always_be() -> None:
    empty, weightless, one = ArtifactStore("topics"), filled(never=0.0), filled(tea=1.0, never=0.0)
    assert empty.sample(0) == empty.sample(0, weighted=True, replace=False) == []
    with pytest.raises(ValueError, match="topics"):
        empty.sample()
    with pytest.raises(ValueError, match="weight"):
        weightless.sample(weighted=True)
    with pytest.raises(ValueError, match="weight"):
        one.sample(2, weighted=True, replace=False)
    with pytest.raises(ValueError, match="-1"):
        one.sample(-1)
    assert len(one.sample(5)) == 5


# --- the file ---


def test_a_store_is_there_again_in_another_process(path: Path) -> None:
    store = filled(path, tea=1.0, rain=2.0, snow=0.5)
    tea, rain, _ = store.all()
    store.set_weight(rain.id, 4.0)
    store.remove(tea.id)
    again = opened(path)  # the other was never closed
    assert again.all() == store.all()
    assert topics(again) == {"rain": 4.0, "snow": 0.5}


def test_an_end_that_was_not_written_whole_is_cut_off(path: Path) -> None:
    filled(path, tea=1.0, rain=2.0).close()
    whole = path.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    for length in range(1, len(last)):
        path.write_bytes(whole[: len(whole) - length])
        store = opened(path)
        assert topics(store) == {"tea": 1.0}
        store.add({"topic": "rain"}, weight=2.0)
        store.close()
        assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b'{"op":"put","id":"0","weight":1.0,"data":1}',  # not its digest
        b'{"op":"weigh","id":"0","weight":1.0}',  # not there
        b"[]",
        b'{"op":"put"}',
    ],
)
def test_damage_elsewhere_is_an_error_and_the_file_stays_as_it_is(path: Path, line: bytes) -> None:
    filled(path, tea=1.0, rain=2.0).close()
    lines = path.read_bytes().splitlines()
    damaged = b"\n".join([lines[0], line, *lines[2:], b"torn"])
    path.write_bytes(damaged)
    with pytest.raises(CorruptError):
        opened(path)
    assert path.read_bytes() == damaged


@pytest.mark.parametrize(
    "content",
    [
        b"not ours",
        b'{"store":"other","format":1,"after":0,"base":0}\n',
        b'{"store":"topics","format":2,"after":0,"base":0}\n',
        b'{"store":"topics","format":1,"after":5,"base":2}\n',  # two lines are missing
    ],
)
def test_a_file_of_something_else_is_refused_and_stays(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(CorruptError):
        opened(path)
    assert path.read_bytes() == content


def test_what_cannot_be_written_has_not_happened(path: Path) -> None:
    store = filled(path, tea=1.0)
    before = path.read_bytes()
    old, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5, most))  # as on a disk that is full after 5 more bytes
    try:
        with pytest.raises(OSError, match="File too large"):
            store.add({"topic": "rain"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (old, most))
    assert topics(store) == {"tea": 1.0}
    assert path.read_bytes() == before


# --- resuming ---


def test_a_run_that_goes_back_finds_its_store_as_it_was(path: Path) -> None:
    store = filled(path, tea=1.0, rain=2.0)
    store.sample(2)
    state = json.loads(json.dumps(store.state()))
    then, draws = store.all(), [artifact.id for _ in range(3) for artifact in store.sample(2, weighted=True)]
    store.remove(then[0].id)
    store.add({"topic": "snow"})
    store.close()

    again = opened(path)
    again.restore(state)
    assert again.all() == then
    assert [artifact.id for _ in range(3) for artifact in again.sample(2, weighted=True)] == draws
    again.add({"topic": "hail"})
    again.close()
    assert topics(opened(path)) == {"tea": 1.0, "rain": 2.0, "hail": 1.0}


def test_a_store_that_lost_its_end_cannot_go_on(path: Path) -> None:
    store = filled(path, tea=1.0, rain=2.0)
    state = store.state()
    store.close()
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CorruptError):
        opened(path).restore(state)


def test_a_smaller_store_drops_what_is_too_much_when_it_is_opened(path: Path) -> None:
    store = filled(path, tea=1.0, rain=2.0, snow=3.0)
    state = store.state()
    store.close()
    smaller = opened(path, max_size=2)
    assert topics(smaller) == {"rain": 2.0, "snow": 3.0}
    smaller.restore(state)
    assert topics(smaller) == {"rain": 2.0, "snow": 3.0}
    smaller.close()
    assert topics(opened(path)) == {"rain": 2.0, "snow": 3.0}


def test_a_settled_file_is_compacted_and_says_the_same(path: Path) -> None:
    store = opened(path, max_size=10)
    for number in range(3000):
        store.add({"topic": str(number % 20)}, weight=float(number))
    unsettled = path.stat().st_size
    state, then = store.state(), store.all()
    for number in range(50):
        store.add({"topic": f"later {number}"}, weight=float(5000 + number))
    store.settle(state)
    assert path.stat().st_size < unsettled / 5
    now = store.all()
    store.close()

    again = opened(path, max_size=10)
    assert again.all() == now
    again.restore(state)
    assert again.all() == then
    with pytest.raises(CorruptError):
        again.restore({"num_operations": state["num_operations"] - 1, "num_draws": 0})
    again.close()
    assert opened(path, max_size=10).state()["num_operations"] == state["num_operations"]


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["add", "remove", "draw", "state", "settle", "restore", "reopen"]), st.integers(0, 9)),
    max_size=40,
)


@given(OPERATIONS)
def test_whatever_happens_a_store_is_what_its_file_says(
    tmp_path_factory: pytest.TempPathFactory, operations: list[tuple[str, int]]
) -> None:
    path = tmp_path_factory.mktemp("stores") / "topics.jsonl"
    store = opened(path, max_size=5, compact_above=4)
    states = [(store.state(), store.all())]
    for kind, value in operations:
        if kind == "add":
            store.add(value, weight=float(value % 4))
        elif kind == "remove" and len(store):
            store.remove(store.all()[value % len(store)].id)
        elif kind == "draw" and len(store):
            assert {artifact.id for artifact in store.sample(len(store), replace=False)} == {
                artifact.id for artifact in store.all()
            }
        elif kind == "state":
            states.append((store.state(), store.all()))
        elif kind == "settle":
            store.settle(states[-1][0])
            states = states[-1:]
        elif kind == "restore":
            place = value % len(states)
            store.restore(states[place][0])
            states = states[: place + 1]
            assert store.all() == states[place][1]
        elif kind == "reopen":
            before = store.all()
            store.close()
            store = opened(path, max_size=5, compact_above=4)
            assert store.all() == before
    store.close()


# --- several ---


def test_stores_go_on_together(tmp_path: Path) -> None:
    stores = ArtifactStores(tmp_path / "artifacts", seed=3)
    stores.add("topics").add({"topic": "tea"})
    state = stores.state()
    stores["topics"].add({"topic": "rain"})
    stores.add("questions", max_size=5).add("why?")
    assert list(stores) == ["topics", "questions"]
    with pytest.raises(ValueError, match="topics"):
        stores.add("topics")
    with pytest.raises(KeyError, match="questions"):
        stores["other"]
    stores.settle(state)
    stores.close()

    again = ArtifactStores(tmp_path / "artifacts", seed=3, state=state)
    assert topics(again.add("topics")) == {"tea": 1.0}
    assert len(again.add("questions", max_size=5)) == 0
    again.close()
    assert [file.name for file in sorted((tmp_path / "artifacts").iterdir())] == ["questions.jsonl", "topics.jsonl"]


def test_stores_without_a_folder_keep_nothing() -> None:
    stores = ArtifactStores(None)
    stores.add("topics").add(1)
    stores.settle(stores.state())
    stores.close()
    assert len(stores["topics"]) == 1

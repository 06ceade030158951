"""The order of examples, seeds of requests, and prompts as ids."""

from orchestrator.episodes.types import Completion
from orchestrator.loop import group_seed
from orchestrator.renderer import ChatRenderer
from orchestrator.tasks import TaskSource
from tests.orchestrator.fakes import MODEL

PROMPTS = {env: [({"role": "user", "content": f"{env}{i}"},) for i in range(5)] for env in "ab"}


def test_environments_take_turns_and_every_epoch_has_every_example_once() -> None:
    source = TaskSource(PROMPTS, seed=1)
    tasks = [source.next() for _ in range(20)]
    assert [task.env for task in tasks] == ["a", "b"] * 10
    first, second = [[t.index for t in tasks[start : start + 10] if t.env == "a"] for start in (0, 10)]
    assert sorted(first) == sorted(second) == list(range(5))
    assert first != second


def test_the_same_seed_gives_the_same_order_and_another_one_another() -> None:
    one, same, other = (TaskSource(PROMPTS, seed=seed) for seed in (1, 1, 2))
    orders = [[source.next().index for _ in range(10)] for source in (one, same, other)]
    assert orders[0] == orders[1] != orders[2]


def test_every_group_has_its_own_seed_and_without_one_the_server_decides() -> None:
    seeds = {group_seed(7, group) for group in range(100)}
    assert len(seeds) == 100
    assert all(seed is not None and 0 <= seed < 2**63 - 1024 for seed in seeds)
    assert group_seed(None, 3) is None


def test_prompts_are_rendered_by_the_models_template_once() -> None:
    renderer = ChatRenderer.of_model(MODEL)
    messages = ({"role": "user", "content": "Reverse: abc"},)
    ids = renderer.prompt_ids(messages)
    # 257 opens a turn, 258 ends it; the rest are bytes.
    assert ids == [257, *b"user\nReverse: abc", 258, *b"\n", 257, *b"assistant\n"]
    assert renderer.prompt_ids(messages) is ids


def test_texts_are_without_special_tokens() -> None:
    completion = Completion(token_ids=[*b"cba", 258], logprobs=[0.0] * 4, finish_reason="stop")
    assert ChatRenderer.of_model(MODEL).texts([completion]) == ["cba"]

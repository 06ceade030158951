"""Seeds of requests, and prompts as ids."""

from orchestrator.episodes.types import Completion
from orchestrator.loops.sample import group_seed
from orchestrator.renderer import ChatRenderer
from tests.orchestrator.fakes import MODEL


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

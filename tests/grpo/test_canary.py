"""`grpo canary`'s judgement of one way to ask, with the embedded model's own numbers in the server's place."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from grpo.transport.errors import UserError
from grpo.transport.run import create_run

from grpo.commands.canary import Answer, Reference, Route, verdict
from tests.infer.published import Publisher

MODEL = Path(__file__).parents[2] / "configs/quickstart/model"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp("adapter")
    publisher = Publisher(run=create_run(folder / "run"), model_dir=MODEL)
    for file, content in publisher.files(version=1, seed=1, scale=0.1).items():
        (folder / file).write_bytes(content)
    return Reference(folder, str(MODEL), dtype="float32")


def sampled(reference: Reference, seed: int, *, by_adapter: bool) -> Answer:
    """An answer that is sampled by the adapter or by the base, with the adapter's log-probabilities in any case."""
    draws, ids, logprobs = np.random.default_rng(seed), [40, 41, 42], list[float]()
    for _ in range(24):
        probs = np.exp(reference.distributions([*ids, 0], with_adapter=by_adapter)[-1])
        token = int(draws.choice(len(probs), p=probs / probs.sum()))
        logprobs.append(float(reference.distributions([*ids, 0], with_adapter=True)[-1, token]))
        ids.append(token)
    return Answer(token_ids=ids, logprobs=np.array(logprobs), sampled=True)


@pytest.mark.parametrize("by_adapter", [True, False])
def test_a_server_that_tells_the_adapters_numbers_and_samples_from_the_base_is_seen(
    reference: Reference, by_adapter: bool
) -> None:
    def base(_: str, ids: list[int], *, seed: int | None) -> Answer:
        found = reference.distributions(ids, with_adapter=False)
        return Answer(token_ids=ids, logprobs=found[np.arange(len(ids) - 1), ids[1:]], sampled=False)

    server: Any = SimpleNamespace(url="here", base="base", completion=base)
    route = Route(name="sampled", ask=lambda _, index: sampled(reference, index, by_adapter=by_adapter))
    found = verdict(route, server, reference, "policy", floor=1e-3)
    assert found.to_adapter < 1e-5
    assert (found.problem is None) == by_adapter, found


def test_an_answer_without_what_is_compared_is_told(reference: Reference) -> None:
    def ask(*_: Any) -> Answer:
        raise KeyError("prompt_token_ids")

    server: Any = SimpleNamespace(url="here", base="base")
    with pytest.raises(UserError, match="prompt_token_ids"):
        verdict(Route(name="chat, scored", ask=ask), server, reference, "policy", floor=1e-3)

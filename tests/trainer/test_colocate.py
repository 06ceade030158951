"""A trainer on imported base weights: the same numbers, nothing copied or changed, everything that is not the
checkpoint's refused by name, and an end with its server."""

from pathlib import Path

import pytest
import torch
from grpo.trainer.errors import ExporterGone, ModelError
from grpo.trainer.packing import PackedTokens, packed_tokens

from tests.trainer.bench import Bench
from tests.trainer.exported import Change, imported
from tests.trainer.models import CPU, save_tiny_model, tiny_batch, tiny_policy

DOWN, NORM = "model.layers.1.mlp.down_proj.weight", "model.norm.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), tie_word_embeddings=True)


def packed() -> PackedTokens:
    return packed_tokens(tiny_batch((20, 13)), CPU)


@pytest.mark.parametrize("tied", [False, True])
def test_log_probabilities_and_gradients_are_those_of_a_model_of_its_own(tmp_path: Path, tied: bool) -> None:
    folder = save_tiny_model(tmp_path, tie_word_embeddings=tied)
    own, other = tiny_policy(folder), tiny_policy(folder, imported=imported(folder))
    for policy in (own, other):
        policy.logprobs(packed()).sum().backward()
    with torch.no_grad():
        assert torch.equal(own.logprobs(packed()), other.logprobs(packed()))
    assert own.named_parameters.keys() == other.named_parameters.keys()
    for name, parameter in own.named_parameters.items():
        grad = other.named_parameters[name].grad
        assert parameter.grad is not None
        assert grad is not None
        assert torch.equal(parameter.grad, grad), name


def test_the_base_is_the_imported_memory_itself_and_a_step_leaves_it_as_it_is(folder: Path) -> None:
    base = imported(folder)
    policy = tiny_policy(folder, imported=base)
    places = {tensor.data_ptr() for tensor in base.tensors.values()}
    frozen = [p for p in policy._model.parameters() if not p.requires_grad]
    assert {parameter.data_ptr() for parameter in frozen} == places
    before = {name: tensor.clone() for name, tensor in base.tensors.items()}
    optimizer = torch.optim.AdamW(policy.parameters, lr=0.1, weight_decay=0.1)
    logprobs = policy.logprobs(packed())
    (-logprobs.sum()).backward()
    optimizer.step()
    assert not torch.equal(policy.logprobs(packed()), logprobs)
    for name, tensor in base.tensors.items():
        assert torch.equal(tensor, before[name]), name


def without(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


def cut(tensors: dict[str, torch.Tensor]) -> None:
    tensors[DOWN] = tensors[DOWN][:-1].clone()


def more(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.9.more"] = torch.zeros(2)


@pytest.mark.parametrize(
    ("change", "said", "named"),
    [
        (without(DOWN), {}, DOWN),
        (cut, {}, DOWN),
        (more, {}, "model.layers.9.more"),
        (None, {"base_model": "0000"}, "0000"),
        (None, {"dtype": "bfloat16"}, "bf16"),
    ],
)
def test_what_is_not_the_checkpoints_is_named(
    folder: Path, change: Change | None, said: dict[str, str], named: str
) -> None:
    with pytest.raises(ModelError, match=named):
        tiny_policy(folder, imported=imported(folder, change, **said))


def test_what_the_server_leaves_out_is_read_from_disk(folder: Path) -> None:
    policy = tiny_policy(folder, imported=imported(folder, without(NORM), left={NORM: "the server has its own"}))
    own = tiny_policy(folder)
    with torch.no_grad():
        assert torch.equal(own.logprobs(packed()), policy.logprobs(packed()))


def ended(folder: Path, tmp_path: Path) -> Bench:
    """A trainer that has published version 0, has batch 1, and whose server ends then."""
    base = imported(folder)
    bench = Bench(folder, tmp_path, imported=base)
    bench.trainer.begin(None)
    bench.send(1, tiny_batch((20, 13)))
    object.__setattr__(base, "lives", False)
    return bench


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_counts_only_if_the_server_lived_until_its_end(
    folder: Path, tmp_path: Path, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = ended(folder, tmp_path)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access")

    if fails:
        monkeypatch.setattr(bench.trainer._objective, "accumulate", fail)
    with pytest.raises(ExporterGone):
        bench.trainer.update(1, [tiny_batch((20, 13))])
    with pytest.raises(ExporterGone):
        bench.trainer.publish(1)


def test_a_trainer_that_waits_ends_with_its_server(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ExporterGone):
        ended(folder, tmp_path).trainer.receive(2)

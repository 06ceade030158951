import pytest
import torch
from grpo.trainer import ema
from grpo.trainer.ema import MovingAverage


def parameters(**values: list[float]) -> dict[str, torch.nn.Parameter]:
    return {name: torch.nn.Parameter(torch.tensor(numbers)) for name, numbers in values.items()}


def test_the_average_begins_as_the_weights_and_keeps_its_share_of_itself_at_each_step() -> None:
    weights = parameters(a=[8.0, 0.0])
    average = MovingAverage(weights, decay=0.75)
    assert average.averages["a"].tolist() == [8.0, 0.0]
    with torch.no_grad():
        weights["a"].copy_(torch.tensor([4.0, 16.0]))
    average.update()
    # 0.75 · 8 + 0.25 · 4 = 7 and 0.75 · 0 + 0.25 · 16 = 4
    assert average.averages["a"].tolist() == [7.0, 4.0]
    average.update()
    # 0.75 · 7 + 0.25 · 4 = 6.25 and 0.75 · 4 + 0.25 · 16 = 7
    assert average.averages["a"].tolist() == [6.25, 7.0]


def test_the_average_takes_the_weights_place_and_both_are_restored_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ema, "_CHUNK", 4)
    generator = torch.Generator().manual_seed(0)
    weights = {"a": torch.nn.Parameter(torch.randn(3, 5, generator=generator)), **parameters(b=[2.0])}
    average = MovingAverage(weights, decay=0.5)
    addresses = [p.data_ptr() for p in weights.values()]
    with torch.no_grad():
        for parameter in weights.values():
            parameter.add_(1 / 3)
    current = {name: p.detach().clone() for name, p in weights.items()}
    earlier = {name: tensor.clone() for name, tensor in average.averages.items()}
    with average.in_place():
        assert all(torch.equal(p, earlier[name]) for name, p in weights.items())
    assert all(torch.equal(p, current[name]) for name, p in weights.items())
    assert all(torch.equal(tensor, earlier[name]) for name, tensor in average.averages.items())
    assert [p.data_ptr() for p in weights.values()] == addresses


def test_an_error_within_leaves_the_weights_in_their_place() -> None:
    weights = parameters(a=[1.0])
    average = MovingAverage(weights, decay=0.5)
    with torch.no_grad():
        weights["a"].fill_(3.0)
    with pytest.raises(KeyError), average.in_place():
        raise KeyError
    assert (weights["a"].item(), average.averages["a"].item()) == (3.0, 1.0)

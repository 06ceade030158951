"""Ranks of tokens, against vLLM's own formula, and where they are put."""

import sys
from types import ModuleType

import pytest
import torch

from infer import ranks


@pytest.mark.parametrize(("num_rows", "size"), [(1, 7), (50, 512), (700, 512), (3, ranks.PART + 5)])
def test_ranks_are_those_of_vllms_formula(num_rows: int, size: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randint(-9, 9, (num_rows, size), generator=generator).float()  # many are equal
    x[:, 1] = -torch.inf
    values = x.gather(-1, torch.randint(0, size, (num_rows, 1), generator=generator))
    found = ranks.num_at_least(x, values)
    assert found.dtype == torch.int64
    assert torch.equal(found, (x >= values).sum(-1))


def test_the_most_probable_token_has_rank_one() -> None:
    assert ranks.num_at_least(torch.tensor([[-1.0, -3.0, -2.0]]), torch.tensor([[-1.0]])).tolist() == [1]


def test_vllms_sampler_gets_it_where_it_has_that_function(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = ModuleType("sampler")
    monkeypatch.setitem(sys.modules, "vllm.v1.sample.sampler", sampler)
    assert not ranks.install()
    assert not hasattr(sampler, "batched_count_greater_than")
    sampler.batched_count_greater_than = None  # type: ignore[attr-defined]
    assert ranks.install()
    assert sampler.batched_count_greater_than is ranks.num_at_least  # type: ignore[attr-defined]

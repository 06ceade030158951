"""Passes that two processes compute together."""

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from grpo.service.errors import RankGone
from grpo.service.ranks import other_ranks
from grpo.service.training import Base, TrainedModel, for_ranks
from grpo.trainer.distributed import leave_group

from tests.service.data import SHAPE, datum, request_of, tiny_base
from tests.support import until
from tests.trainer.models import tiny_settings

CAPACITY = 128
LOSSES = ("cross_entropy", "importance_sampling")


def requests(seed: int) -> list[Any]:
    """A request that one rank has room for, and one of several passes."""
    sizes = [[9, 30, 4], [70, 50, 40, 20]]
    return [
        request_of([datum(length, seed + place, loss_fn) for place, length in enumerate(lengths)], loss_fn, seq=seq)
        for seq, (lengths, loss_fn) in enumerate(zip(sizes, LOSSES, strict=True), start=1)
    ]


def trained(models: Sequence[TrainedModel], *, joined: bool) -> list[Any]:
    """Two steps of each model, one pass of all at a time if `joined`. Returns each one's answers."""
    answers: list[Any] = [[] for _ in models]
    for step in range(2):
        for which in range(2):
            works = [model.forward_backward(requests(1000 * n + 100 * step)[which]) for n, model in enumerate(models)]
            for group in [[*range(len(models))]] if joined else [[number] for number in range(len(models))]:
                results: dict[int, Any] = dict.fromkeys(group)
                while results:
                    asked = {}
                    for number, result in results.items():
                        try:
                            asked[number] = works[number].send(result)
                        except StopIteration as done:
                            answers[number].append(done.value)
                    found = models[0].base.compute(list(asked.values())) if asked else []
                    results = dict(zip(asked, found, strict=True))
        for model, of_model in zip(models, answers, strict=True):
            of_model.append(model.optim_step({"learning_rate": 1e-2, "grad_clip_norm": 1.0})["grad_norm"])
    return answers


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Base, Any, psutil.Process]]:
    """A base with another rank, what looks for that one, and its process."""
    torch.set_num_threads(1)
    leave_group()  # of tests before, in this process
    folder = tmp_path_factory.mktemp("ranks")
    base = tiny_base(folder / "model", micro_batch_tokens=CAPACITY)
    settings = tiny_settings(folder / "model", micro_batch_tokens=CAPACITY, num_threads=1)
    before = {one.pid for one in psutil.Process().children()}
    with other_ranks(settings, folder / "model", folder / "logs", num=2, max_rank=64) as (join, check):
        both = Base(settings, folder / "model", base.resting.device, max_rank=64, num_ranks=2)
        both.others = join(both)
        [process] = [one for one in psutil.Process().children() if one.pid not in before]
        yield both, check, process
    leave_group()


def test_runs_of_equal_size_for_ranks() -> None:
    assert for_ranks([5, 5, 5, 5], 2, capacity=20) == [[[0, 1], [2, 3]]]
    assert for_ranks([5, 5, 5, 5], 2, capacity=10) == [[[0, 1], [2, 3]]]
    assert for_ranks([9, 9, 9], 2, capacity=10) == [[[0], [1]], [[2]]]
    assert for_ranks([3, 4, 2], 1, capacity=5) == [[[0, 2]], [[1]]]


def test_two_ranks_train_as_one_does(two: tuple[Base, Any, psutil.Process], tmp_path: Path) -> None:
    """And a model as it does beside another, to the bit."""
    alone, _, _ = two
    first = [TrainedModel(alone, SHAPE) for _ in range(2)]
    apart = trained(first, joined=False)
    second = [TrainedModel(alone, SHAPE) for _ in range(2)]
    assert trained(second, joined=True) == apart
    assert [model.files() for model in second] == [model.files() for model in first]
    [one] = trained(
        [model := TrainedModel(tiny_base(tmp_path / "model", micro_batch_tokens=CAPACITY), SHAPE)], joined=False
    )
    assert [found for found in one if isinstance(found, float)] == pytest.approx(
        [found for found in apart[0] if isinstance(found, float)], rel=1e-4
    )
    for name, expected in model.policy.named_parameters.items():
        gap = (first[0].policy.named_parameters[name] - expected).detach().abs().max()
        assert float(gap) < 1e-5, name
    for model in (*first, *second):
        model.close()


def test_a_pass_that_fails_on_another_rank_costs_its_request_alone(two: tuple[Base, Any, psutil.Process]) -> None:
    base, check, _ = two
    model = TrainedModel(base, SHAPE)
    work = model.forward_backward(requests(0)[1])
    asked = work.send(None)
    broken = np.full_like(asked.parts[1][0].targets, 1 << 20)  # no id of the vocabulary
    object.__setattr__(asked.parts[1][0], "targets", broken)
    with pytest.raises(RuntimeError, match="rank 1: "):
        base.compute([asked])
    work.close()
    check()
    trained([model], joined=False)


def test_a_rank_that_is_killed_is_named(two: tuple[Base, Any, psutil.Process]) -> None:
    base, check, process = two
    model = TrainedModel(base, SHAPE)
    os.kill(process.pid, signal.SIGSTOP)
    asked = model.forward_backward(requests(0)[1]).send(None)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(RankGone):
        base.compute([asked])

    def told() -> str:
        try:
            check()
        except RankGone as gone:
            return str(gone)
        return ""

    assert "exit code -9" in until(told, limit_s=30.0)

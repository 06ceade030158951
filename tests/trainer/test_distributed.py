"""Two real processes with gloo against one process with all their micro-batches."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo.trainer.distributed import ONE
from safetensors.torch import load_file

from tests.trainer.forked import run_ranks
from tests.trainer.models import save_tiny_model
from tests.trainer.rank_cases import CASES, Case, run_case, worker


@dataclass(frozen=True)
class Session:
    """What two workers have left behind, by rank."""

    model: Path
    folder: Path
    results: tuple[dict[str, Any], dict[str, Any]]

    def tensors(self, case: Case, rank: int) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = load_file(self.folder / f"{case.name}.{rank}")
        return tensors


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    folder = tmp_path_factory.mktemp("ranks")
    model = save_tiny_model(folder / "model", tie_word_embeddings=True)
    run_ranks(worker, model, folder, num_ranks=2)
    first, second = (json.loads((folder / f"results.{rank}.json").read_text()) for rank in (0, 1))
    return Session(model, folder, (first, second))


def relative_gap(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference, by the largest value."""
    return float((one - other).abs().max() / other.abs().max())


def test_collectives_give_the_same_on_every_rank(session: Session) -> None:
    expected = {
        "max": 3,  # of 3 and 2
        "sum": [5, 1],
        "broadcast": {"run_id": "é", "rank": 0},
        "merged": {
            "loss/both": 4.0,  # 1.5 + 2.5
            "policy/mean": 4 / 3,  # (0 + 4) / (1 + 2)
            "policy/smallest": -1.0,
            "policy/largest": float("inf"),
            "policy/other": 7.0,  # which only one rank has
        },
    }
    assert [result["communicated"] for result in session.results] == [expected, expected]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_two_ranks_make_the_steps_of_one_with_all_micro_batches(session: Session, case: Case) -> None:
    expected, metrics = run_case(case, session.model, ONE)
    assert all(metrics[f"{step}/loss/{term}"] for step in (1, 2) for term in ("policy", "sdpo", "dpo"))
    exact = case.recipe == "float32" and case.optimizer != "muon"  # which iterates in bfloat16
    for rank in (0, 1):
        tensors = session.tensors(case, rank)
        mine = {name: tensor for name, tensor in expected.items() if rank == 0 or not name.startswith("snapshot/")}
        assert tensors.keys() == mine.keys()
        gaps = {name: relative_gap(tensors[name], tensor) for name, tensor in mine.items()}
        worst = max(gaps, key=gaps.__getitem__)
        assert gaps[worst] <= (1e-5 if exact else 1e-2), (worst, gaps[worst])
        assert session.results[rank][case.name] == pytest.approx(metrics, rel=1e-5 if exact else 1e-2, abs=1e-6)
    assert session.results[0][case.name] == session.results[1][case.name]

"""docs/metrics.md lists what a step emits, and says how it is reduced."""

import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from configs.loss import LossSettings
from orchestrator.monitoring.metrics import check_name
from tests.trainer.bench import Bench
from tests.trainer.models import hint_for, pair_of, tiny_batch, tiny_policy
from trainer.distributed import Ranks
from trainer.metrics import State
from trainer.objective import Objective
from transport.records import MicroBatch

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
# Everything that adds a metric: sequence ratios have a bound and the token masks, which importance: clip has not.
LOSS = {
    "ratio_type": "sequence",
    "teacher_tau": 0.5,
    "alpha_sdpo": 0.5,
    "beta_replay": 0.5,
    "sdpo": {"token_clip": 1.0},
}
KINDS = {"sum": "sum", "mean": "mean", "min": "smallest", "max": "largest"}


def documented() -> dict[str, str]:
    """How each metric is reduced: the first word of the last column."""
    rows = re.findall(r"^\| `([\w/]+)` \|.*\| (\w+)[^|]*\|$", DOCS.read_text(), flags=re.M)
    assert len(rows) == len(dict(rows)), "a metric stands twice"
    return dict(rows)


def general(key: str) -> str:
    return re.sub(r"_lag\d+$", "_lagN", key).replace("entropy/math", "entropy/ENV")


def batch_of_all_streams() -> MicroBatch:
    batch = tiny_batch((6, 9))
    hint = hint_for(batch, 1, places=(4, 5), before=3)
    streams = {"hints": ((1, hint),), "pairs": (pair_of([4], [5, 6], [7]),)}
    return replace(batch, teacher_logprobs=np.zeros(15, np.float32), envs=("math", "math"), **streams)


def test_the_tables_list_every_metric_of_a_step_with_all_streams_on_and_no_other(
    tiny_model: Path, tmp_path: Path
) -> None:
    others = {"noise_scheduler": {"enabled": True, "num_stages": 3}, "ckpt": {"interval": 1}}
    bench = Bench(tiny_model, tmp_path, max_steps=3, loss=LOSS, **others)
    bench.send(1, batch_of_all_streams())
    bench.finish(1)
    bench.trainer.train()
    bench.trainer.close()
    on_a_gpu = {"perf/train_mfu"}
    assert {general(key) for key in bench.metrics(1)} | on_a_gpu == documented().keys()


def test_the_orchestrator_takes_every_metric_of_the_trainer() -> None:
    for key in (*documented(), "policy/custom_surrogate", "policy/adapter_tokens_solver"):
        check_name(key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording(Ranks):
    """Keeps what it is asked to reduce."""

    seen: dict[str, State] = field(default_factory=dict)

    def merged(self, metrics: dict[str, State]) -> dict[str, State]:  # type: ignore[override]
        self.seen.update(metrics)
        return metrics


def test_the_tables_say_how_each_metric_is_reduced(tiny_model: Path) -> None:
    ranks = Recording(rank=0, size=1)
    objective = Objective(tiny_policy(tiny_model), LossSettings.model_validate(LOSS), ranks, sequence_len=128)
    metrics = objective.accumulate([batch_of_all_streams()], step=1)
    kinds = dict.fromkeys(metrics, "step") | {key: KINDS[one[0]] for key, one in ranks.seen.items()}
    tables = documented()
    assert {key: tables[general(key)] for key in kinds} == kinds

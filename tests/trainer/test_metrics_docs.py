"""docs/metrics.md lists what a step emits."""

import re
from pathlib import Path

import numpy as np
from grpo.orchestrator.monitoring.metrics import check_name
from grpo.transport.records import MicroBatch
from msgspec.structs import replace

from tests.trainer.bench import Bench
from tests.trainer.models import hint_for, pair_of, tiny_batch

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
# Everything that adds a metric: sequence ratios have a bound and the token masks, which importance: clip has not.
LOSS = {
    "ratio_type": "sequence",
    "teacher_tau": 0.5,
    "alpha_sdpo": 0.5,
    "beta_replay": 0.5,
    "sdpo": {"token_clip": 1.0},
}


def documented() -> set[str]:
    """Those of the section on the trainer."""
    [section] = re.findall(r"^## The trainer's\n(.*?)^## ", DOCS.read_text(), flags=re.M | re.S)
    items = re.findall(r"^- ((?:`[\w/]+`,?\s+)*`[\w/]+`): ", section, flags=re.M)
    names = [name for item in items for name in re.findall(r"`([\w/]+)`", item)]
    assert len(names) == len(set(names)), "a metric stands twice"
    return set(names)


def general(key: str) -> str:
    return re.sub(r"_lag\d+$", "_lagN", key).replace("entropy/math", "entropy/ENV")


def batch_of_all_streams() -> MicroBatch:
    batch = tiny_batch((6, 9))
    hint = hint_for(batch, 1, places=(4, 5), before=3)
    streams = {"hints": ((1, hint),), "pairs": (pair_of([4], [5, 6], [7]),)}
    return replace(batch, teacher_logprobs=np.zeros(15, np.float32), envs=("math", "math"), **streams)


def test_the_lists_have_every_metric_of_a_step_with_all_streams_on_and_no_other(
    tiny_model: Path, tmp_path: Path
) -> None:
    others = {"noise_scheduler": {"enabled": True, "num_stages": 3}, "ckpt": {"interval": 1}}
    bench = Bench(tiny_model, tmp_path, max_steps=3, loss=LOSS, **others)
    bench.train(batch_of_all_streams())
    elsewhere = {"perf/train_mfu", "policy/moved_kl_lagN"}  # on a GPU, and with samples of earlier versions
    assert {general(key) for key in bench.metrics(1)} | elsewhere == documented()


def test_the_orchestrator_takes_every_metric_of_the_trainer() -> None:
    for key in (*documented(), "policy/custom_surrogate", "policy/adapter_tokens_solver"):
        check_name(key)

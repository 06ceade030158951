"""Measures how soon a new policy is in use, and what that takes of a step.

    python -m benchmarks.publish [--check]

Two real runs. In one, on policy, a random 29M Qwen3 with a 10 MB adapter (rank 32, float32) answers one prompt a step
with one token: from the beginning of the trainer's call to the end of that answer and its scoring, as `timeline.jsonl`
has them, with the server idle before. In the other, the quickstart, the parts of the steps' time: what publishing holds
up the trainer, and what goes on beside the next step (files written, versions loaded and proved).
"""

import statistics
import tempfile
from pathlib import Path

from grpo.orchestrator.monitoring.timeline import SERVERS, TRAINER, read_timeline

from benchmarks.report import parser, report
from tests.e2e.runs import trained
from tests.support import options
from tools.random_models import MID, make_random

NUM_STEPS, NUM_WARM_UP = 20, 4
LARGE = {
    "lora_rank": 32,
    "lora_alpha": 64,
    "max_steps": NUM_STEPS,
    "orch.max_async_level": 0,
    "orch.max_off_policy_steps": 0,
    "orch.batch_size": 2,
    "orch.rollouts_per_example": 2,
    "orch.sampling.max_tokens": 1,
    "orch.eval.num_examples": 0,
}
TARGETS = {"total_ms": ("<=", 400.0), "publish_share": ("<=", 0.02)}


def until_first_token(folder: Path) -> dict[str, float]:
    """Median milliseconds: until the version's files are seen, until it is loaded and proved, and until its answer."""
    model = make_random(folder.with_name("model"), MID)
    trained("configs/quickstart", folder, "--model", model, *options(LARGE))
    spans = read_timeline(folder)
    called = {span.step: span.start_s for span in spans if (span.who, span.what) == (TRAINER, "publish")}
    loaded = {span.step: span for span in spans if span.what == "load"}
    answered = {span.step: span.end_s for span in spans if (span.who, span.what) == (SERVERS, "generate")}
    versions = range(NUM_WARM_UP, NUM_STEPS)
    parts = {
        "seen": [loaded[version].start_s - called[version] for version in versions],
        "load": [loaded[version].seconds for version in versions],
        "token": [answered[version + 1] - loaded[version].end_s for version in versions],
        "total": [answered[version + 1] - called[version] for version in versions],
    }
    return {f"{part}_ms": 1e3 * statistics.median(seconds) for part, seconds in parts.items()}


def shares(folder: Path) -> dict[str, float]:
    """Returns shares of the time of the quickstart's steps, without the first, in which everything starts up."""
    steps = trained("configs/quickstart", folder, "--max_steps", NUM_STEPS).steps[1:]
    total_s = sum(line["time/step_s"] for line in steps)
    names = ("publish", "write_version", "load")
    return {f"{name}_share": sum(line[f"time/{name}_s"] for line in steps) / total_s for name in names}


def main() -> int:
    """The command."""
    given = parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = until_first_token(Path(folder) / "large") | shares(Path(folder) / "quickstart")
    return report("publish", figures, TARGETS, check=given.check)


if __name__ == "__main__":
    raise SystemExit(main())

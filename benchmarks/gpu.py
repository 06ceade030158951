"""`make gpu PART=…`: everything that has not run on a GPU, in parts of at most nine minutes, each with one JSON line.

    python -m benchmarks.gpu [attention|train|serve|colocate|e2e|quantized|multi …]

Runs the parts one after the other (all of them without a name), prints a JSON line for each and writes the table of
`docs/gpu.md` between its markers. A part is a list of commands that exist anyway: tests of `tests/gpu` and benchmarks.
On a machine without an NVIDIA GPU it says so and ends with 0. Not yet run on a GPU.
"""

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "gpu.md"
PART_S = 540
_TEST = (sys.executable, "-m", "pytest", "-q", "-m", "gpu")
_BENCH = (sys.executable, "-m", "benchmarks.trainer_gpu", "--compile")
_RUN = (sys.executable, "-m", "grpo.cli", "configs/quickstart", "--overwrite_output_dir", "--output_dir")
PARTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "attention": ((*_TEST, "tests/gpu/test_attention.py"),),
    "train": (
        (*_TEST, "tests/gpu/test_step.py", "-k", "not quantized"),
        *((*_BENCH, "--tokens", tokens) for tokens in ("2048", "8192", "16384")),
        (*_BENCH, "--sample-len", "16384"),
    ),
    "serve": ((*_TEST, "tests/gpu/test_sleep.py"),),
    "colocate": ((*_TEST, "tests/gpu/test_shared_base.py"),),
    "e2e": ((*_RUN, "outputs/gpu", "--max_steps", "20"),),
    "quantized": ((*_TEST, "tests/gpu/test_step.py", "-k", "quantized"), (*_BENCH, "--quantized")),
    "multi": ((*_RUN, "outputs/gpus", "--max_steps", "5", "--train.gpus", "2"),),
}
_TABLE = re.compile(r"(?<=<!-- make gpu -->\n).*?(?=<!-- end -->)", re.DOTALL)


def run_part(name: str) -> dict[str, Any]:
    """Returns what the commands of a part came to: its exit status, seconds, and what their last lines say as JSON."""
    started_s, status, figures = time.monotonic(), 0, []
    for command in PARTS[name]:
        left_s = PART_S - (time.monotonic() - started_s)
        try:
            done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, timeout=max(1.0, left_s))
        except subprocess.TimeoutExpired:
            status = 124
            break
        last = (done.stdout.strip().splitlines() or [""])[-1]
        figures.append(json.loads(last) if last.startswith("{") else last)
        status = status or done.returncode
    return {"part": name, "status": status, "seconds": round(time.monotonic() - started_s), "figures": figures}


def write_table(results: list[dict[str, Any]]) -> None:
    """Puts the results into the page, in the place of earlier ones."""
    rows = ["| part | exit status | seconds | figures |", "|---|---|---|---|"]
    rows += [f"| {r['part']} | {r['status']} | {r['seconds']} | {json.dumps(r['figures'])} |" for r in results]
    table = "\n".join(rows) + "\n"
    PAGE.write_text(_TABLE.sub(lambda _: table, PAGE.read_text()))


def main() -> int:
    """Runs the parts that were named, or all. Returns 1 where one failed, 2 for a name that is no part."""
    import torch

    names = sys.argv[1:] or list(PARTS)
    if unknown := sorted(set(names) - PARTS.keys()):
        print(f"no parts {unknown}; there are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print(json.dumps({"skipped": names, "why": "torch sees no NVIDIA GPU"}))
        return 0
    results = []
    for name in names:
        if name == "multi" and torch.cuda.device_count() < 2:
            results.append({"part": name, "status": 0, "seconds": 0, "figures": ["skipped: one GPU"]})
        else:
            results.append(run_part(name))
        print(json.dumps(results[-1]), flush=True)
    write_table(results)
    return int(any(result["status"] for result in results))


if __name__ == "__main__":
    raise SystemExit(main())

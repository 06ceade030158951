"""`make gpu PART=…`: everything that has not run on a GPU, in parts of at most nine minutes, each with one JSON line.

    python -m benchmarks.gpu [attention|train|serve|colocate|e2e|quantized|multi …]

Runs the parts one after the other (all of them without a name), prints a JSON line for each and writes the table of
`docs/gpu.md` between its markers. A part is a list of commands that exist anyway: tests of `tests/gpu` and benchmarks.
What they print goes to standard error as it comes; where a part runs out of time, the figures until then count. On a
machine without an NVIDIA GPU it says so and ends with 0. Not yet run on a GPU.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "gpu.md"
PART_S = 540
# A warning of a library's is no failure of the machine's.
_TEST = (sys.executable, "-m", "pytest", "-q", "-W", "default", "-m", "gpu")
_BENCH = (sys.executable, "-m", "benchmarks.trainer_gpu")
_RUN = (sys.executable, "-m", "grpo.cli", "configs/quickstart", "--overwrite_output_dir", "--output_dir")
_IN_16_BITS = ("--train.recipe", "bf16", "--infer.dtype", "bfloat16")
_SHARED = ("--infer.gpu_memory_utilization", "0.5")
PARTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "attention": ((*_TEST, "tests/gpu/test_attention.py"),),
    "train": (_BENCH, (*_TEST, "tests/gpu/test_step.py", "-k", "not quantized")),
    "serve": ((*_TEST, "tests/gpu/test_sleep.py"),),
    "colocate": ((*_TEST, "tests/gpu/test_shared_base.py"),),
    "e2e": (
        (*_RUN, "outputs/gpu", "--max_steps", "20", *_SHARED),
        (*_RUN, "outputs/gpu16", "--max_steps", "20", *_SHARED, *_IN_16_BITS),
    ),
    "quantized": ((*_TEST, "tests/gpu/test_step.py", "-k", "quantized"), (*_BENCH, "--quantized")),
    "multi": ((*_RUN, "outputs/gpus", "--max_steps", "5", "--train.gpus", "2"),),
}
_TABLE = re.compile(r"(?<=<!-- make gpu -->\n).*?(?=<!-- end -->)", re.DOTALL)


def run_part(name: str) -> dict[str, Any]:
    """Returns what the commands of a part came to: the first exit status that is not 0 (-9: out of time), seconds, and
    of each command its report, or else the figures that it told, or its last line."""
    started_s, status, figures = time.monotonic(), 0, list[Any]()
    for command in PARTS[name]:
        left_s = PART_S - (time.monotonic() - started_s)
        code, lines = run(command, timeout_s=max(1.0, left_s))
        status = status or code
        told = [json.loads(line) for line in lines if line.startswith("{")]
        figures += [one for one in told if "benchmark" in one] or told or lines[-1:]
    return {"part": name, "status": status, "seconds": round(time.monotonic() - started_s), "figures": figures}


def run(command: tuple[str, ...], *, timeout_s: float) -> tuple[int, list[str]]:
    """Returns a command's exit status and its lines. It is killed with all that it has started after `timeout_s`."""
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True, **options) as process:
        timer = threading.Timer(timeout_s, os.killpg, (process.pid, signal.SIGKILL))
        timer.start()
        lines = []
        for line in process.stdout or ():
            print(line, end="", file=sys.stderr, flush=True)
            lines.append(line.strip())
        timer.cancel()
    return process.returncode, [line for line in lines if line]


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

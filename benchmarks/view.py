"""Measures how soon `grpo view` shows a large run, and how much memory that takes.

    python -m benchmarks.view [--check]

Makes a run of 10,000 steps with 130 metrics, of 512 rollouts of 2,000 tokens each, one with rollouts of 32,000 tokens,
and one whose step has 100 MB of traces, and opens pages of them in headless Chromium, each for the first time. With the
seconds it gives the processor seconds of the server for each page, which depend less on what else runs.
"""

import shutil
import tempfile
import time
from pathlib import Path

import psutil
from grpo.transport.traces import trace_path
from playwright.sync_api import sync_playwright

from benchmarks.report import parser, report
from tests.grpo.view.made_run import make_run
from tests.grpo.view.served import served

SHOWN = {
    "run of 10,000 steps": ("run/large", ".u-over", 0.3),
    "step": ("run/large/step/5000", "table.rollouts .clip", 0.3),
    "step with 100 MB of traces": ("run/heavy/step/1", "table.rollouts .clip", 0.3),
    "first rollout, of 2,000 tokens": ("run/large/step/5000/rollout/3%2F2", ".tokens span", None),
    "rollout of 32,000 tokens": ("run/long/step/2/rollout/0%2F1", ".tokens span", 0.5),
    "prompt in all steps": ("run/large/prompt/reverse-text/5", "td.answer", None),
    "worst tokens of 100 MB": ("run/heavy/step/1?worst=log-ratio", "table[aria-label='worst tokens'] ins", None),
    "text in 100 MB": ("run/heavy/step/1?find=so%20be%20it%203", "[role=status]:text-is('64 of 512')", None),
}
"""Address, what is waited for, and the target in seconds."""
MAX_MB = 400.0


def measure(folder: Path) -> dict[str, float]:
    """Seconds until each page is shown, and the memory afterwards."""
    figures: dict[str, float] = {}
    with served(folder) as view, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(view.address)
        page.wait_for_selector("a[href='#/run/large']")
        for name, (path, shows, _) in SHOWN.items():
            began_s, used_s, painted_s = time.perf_counter(), _processor_s(view.pid), _browser_s()
            page.goto(f"http://127.0.0.1:{view.port}/#/{path}")
            page.wait_for_selector(shows)
            figures[f"{name} (s)"] = time.perf_counter() - began_s
            figures[f"{name}, server (processor s)"] = _processor_s(view.pid) - used_s
            figures[f"{name}, browser (processor s)"] = _browser_s() - painted_s
        browser.close()
        figures["memory (MB)"] = psutil.Process(view.pid).memory_info().rss / 1e6
    return figures


def _processor_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def _browser_s() -> float:
    """Returns the processor seconds of all processes of the browser."""
    return sum(_processor_s(one.pid) for one in psutil.Process().children(recursive=True) if "chrom" in one.name())


def main() -> int:
    """The command."""
    options = parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_run(Path(folder) / "large", steps=10_000, groups=64, size=8, tokens=2000, more_metrics=117)
        make_run(Path(folder) / "long", steps=3, groups=1, size=2, tokens=32_000)
        make_run(Path(folder) / "heavy", steps=1, groups=64, size=8, tokens=22_000, text="so be it " * 3000)
        figures = {"one step's traces (MB)": trace_path(Path(folder) / "heavy", 1).stat().st_size / 1e6}
        figures |= measure(Path(folder))
    targets = {f"{name} (s)": ("<=", most_s) for name, (_, _, most_s) in SHOWN.items() if most_s is not None}
    return report("view", figures, targets | {"memory (MB)": ("<=", MAX_MB)}, check=options.check)


if __name__ == "__main__":
    raise SystemExit(main())

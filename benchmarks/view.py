"""Measures how soon `grpo view` shows a large run, and how much memory that takes.

    python -m benchmarks.view [--check]

Makes a run of 1,000 steps of 512 rollouts of 2,000 tokens, and one with rollouts of 32,000 tokens, and opens pages of
them in headless Chromium, each for the first time.
"""

import shutil
import tempfile
import time
from pathlib import Path

import psutil
from playwright.sync_api import sync_playwright

from benchmarks.report import parser, report
from tests.grpo.view.made_run import make_run
from tests.grpo.view.served import served

SHOWN = {
    "run": ("run/large", ".u-over", 1.0),
    "step": ("run/large/step/500", ".heat a", 0.5),
    "first rollout, of 2,000 tokens": ("run/large/step/500/rollout/3%2F2", ".tokens span", None),
    "rollout of 32,000 tokens": ("run/long/step/2/rollout/0%2F1", ".tokens span", 0.5),
    "prompt in all steps": ("run/large/prompt/reverse-text/5", "td.answer", None),
}
"""Address, what is waited for, and the target in seconds."""
MAX_MB = 300.0


def measure(folder: Path) -> dict[str, float]:
    """Seconds until each page is shown, and the memory afterwards."""
    figures: dict[str, float] = {}
    with served(folder) as view, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(view.address)
        page.wait_for_selector("table")
        for name, (path, shows, _) in SHOWN.items():
            began_s = time.perf_counter()
            page.goto(f"http://127.0.0.1:{view.port}/#/{path}")
            page.wait_for_selector(shows)
            figures[f"{name} (s)"] = time.perf_counter() - began_s
        browser.close()
        figures["memory (MB)"] = psutil.Process(view.pid).memory_info().rss / 1e6
    return figures


def main() -> int:
    """The command."""
    options = parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_run(Path(folder) / "large", steps=1000, groups=64, size=8, tokens=2000)
        make_run(Path(folder) / "long", steps=3, groups=1, size=2, tokens=32_000)
        figures = measure(Path(folder))
    targets = {f"{name} (s)": ("<=", most_s) for name, (_, _, most_s) in SHOWN.items() if most_s is not None}
    return report("view", figures, targets | {"memory (MB)": ("<=", MAX_MB)}, check=options.check)


if __name__ == "__main__":
    raise SystemExit(main())

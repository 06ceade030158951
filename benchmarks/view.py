"""How fast `grpo view` answers for a large run, and what memory it takes.

    python -m benchmarks.view [--check]

Makes a run of 1,000 steps of 512 rollouts of 2,000 tokens, and one with rollouts of 32,000 tokens; asks for each page's
data once cold and then warm, and has headless Chromium show four pages. `--check` exits 1 where a target is missed.
"""

import http.cookiejar
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import psutil
from playwright.sync_api import sync_playwright

from benchmarks.report import parser, report
from tools.made_run import make_run

ASKED = {
    "runs": "runs",
    "curves": "runs/large/curves",
    "timeline": "runs/large/timeline",
    "a step": "runs/large/step/500/rollouts",
    "a rollout of 2,000 tokens": "runs/large/step/500/rollouts/3/2",
    "a rollout of 32,000 tokens": "runs/long/step/2/rollouts/0/0",
    "a prompt in all steps": "runs/large/prompt?env=reverse-text&example=5",
    "evaluation": "runs/large/evaluation",
    "proof": "runs/large/proof",
}
SHOWN = {
    "run page": ("run/large", ".u-over", 1.0),
    "step page": ("run/large/step/500", ".heat a", 0.5),
    "rollout of 32,000 tokens": ("run/long/step/2/rollout/0%2F1", ".tokens span", 0.5),
}
"""Address, what is waited for, and the target in seconds."""
MAX_MB = 300.0
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


def main() -> int:
    """The command."""
    options = parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_run(Path(folder) / "large", steps=1000, groups=64, size=8, tokens=2000)
        make_run(Path(folder) / "long", steps=3, groups=1, size=2, tokens=32_000)
        figures = _measured(folder)
    targets = {f"{name}, shown (s)": ("<=", most_s) for name, (_, _, most_s) in SHOWN.items()}
    return report("view", figures, targets | {"memory (MB)": ("<=", MAX_MB)}, check=options.check)


def _measured(folder: str) -> dict[str, float]:
    figures: dict[str, float] = {}
    command = [str(Path(sys.executable).with_name("grpo")), "view", folder]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as view:
        assert view.stdout is not None
        address = view.stdout.readline().strip()
        base = address.partition("?")[0]
        client = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar()))
        client.open(address).read()
        for state in ("cold", "warm"):
            for name, path in ASKED.items():
                began_s = time.perf_counter()
                client.open(f"{base}api/{path}").read()
                figures[f"{name}, {state} (s)"] = time.perf_counter() - began_s
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=ARGUMENTS)
            page = browser.new_page()
            page.goto(address)
            page.wait_for_selector("table")
            for name, (path, shows, _) in SHOWN.items():
                began_s = time.perf_counter()
                page.goto(f"{base}#/{path}")
                page.wait_for_selector(shows)
                figures[f"{name}, shown (s)"] = time.perf_counter() - began_s
            browser.close()
        figures["memory (MB)"] = psutil.Process(view.pid).memory_info().rss / 1e6
        view.terminate()
    return figures


if __name__ == "__main__":
    sys.exit(main())

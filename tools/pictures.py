"""Makes the pictures of README.md from a finished run: `python -m tools.pictures outputs/quickstart` writes
docs/pictures/run.png and rollout.png. Needs Chromium and the extra `dev`."""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

from grpo.run_files import read_run
from grpo.view.traces import rollouts_of
from transport.traces import traced_steps

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
WIDTH, HEIGHT = 1200, 720
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    run: Path = parser.parse_args().run
    read_run(run)
    command = [str(Path(sys.executable).with_name("grpo")), "view", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as view:
        try:
            assert view.stdout is not None
            take(view.stdout.readline().strip(), run)
        finally:
            view.terminate()


def take(address: str, run: Path) -> None:
    """Pictures of the run's page, and of the rollout in the middle step whose entropy is largest."""
    from playwright.sync_api import sync_playwright

    FOLDER.mkdir(exist_ok=True)
    steps, name = traced_steps(run), quote(run.resolve().name)
    step = steps[len(steps) // 4]
    rollout = max(rollouts_of(run, step), key=lambda row: row["mean_entropy"] or 0.0)["rollout"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=ARGUMENTS)
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.goto(address)
        page.wait_for_selector("table")
        base = address.partition("?")[0]
        for picture, place, shows in (
            ("run", f"run/{name}", ".u-over"),
            ("rollout", f"run/{name}/step/{step}/rollout/{quote(rollout, safe='')}?colour=entropy", ".tokens span"),
        ):
            page.goto(f"{base}#/{place}")
            page.wait_for_selector(shows)
            page.wait_for_timeout(500)
            page.evaluate("scrollTo(0, 0)")
            page.screenshot(path=FOLDER / f"{picture}.png")
        browser.close()


if __name__ == "__main__":
    main()

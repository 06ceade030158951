"""`make size`: lines of Python of each package beside its budget. A budget is a warning: with `--check` it exits 1
where one is exceeded."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
BUDGETS = {
    "grpo": 3_000,
    "grpo/view": 800,
    "deploy": 1_600,
    "configs": 2_500,
    "environments": 3_300,
    "infer": 2_600,
    "orchestrator": 10_600,
    "orchestrator/auxiliary": 1_800,
    "orchestrator/arena": 1_000,
    "service": 2_000,
    "trainer": 5_000,
    "transport": 3_300,
}
"""How many lines of Python a folder may have, without the folders below it that have a budget of their own."""
TOTAL = 36_500
BESIDE = {"tests": 26_000, "benchmarks": 4_000, "tools": 800}
"""What is no product code, and how many lines it should have."""
PAGE = ("grpo/view/static/*.*", 2_200)
"""HTML, CSS and JavaScript of the page, without what is vendored, and how many lines they may have."""


def num_lines(folder: str) -> int:
    """Returns how many lines of Python git knows or would add below `folder`, without presets, which are folders of
    `configs`, and without what has a budget of its own."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", f"{folder}/*.py"]
    names = set(subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split())
    apart = tuple(f"{other}/" for other in BUDGETS if other.startswith(f"{folder}/"))
    files = [ROOT / one for one in names if not one.startswith(apart) and (folder != "configs" or one.count("/") == 1)]
    return sum(len(path.read_text().splitlines()) for path in files if path.exists())


def num_page_lines() -> int:
    """Returns how many lines the page's own files have."""
    return sum(len(path.read_text().splitlines()) for path in ROOT.glob(PAGE[0]))


def main() -> int:
    """Prints the table."""
    exceeded = []
    sizes = {folder: num_lines(folder) for folder in (*BUDGETS, *BESIDE)}
    rows = [(folder, sizes[folder], budget) for folder, budget in BUDGETS.items()]
    rows += [("product code", sum(sizes[folder] for folder in BUDGETS), TOTAL)]
    rows += [(folder, sizes[folder], budget) for folder, budget in BESIDE.items()]
    rows += [("page of grpo view", num_page_lines(), PAGE[1])]
    print(f"{'folder':24} {'lines':>7} {'budget':>7}")
    for name, lines, budget in rows:
        over = "" if lines <= budget else f"  {lines - budget:,} too many"
        print(f"{name:24} {lines:7,} {budget:7,}{over}")
        exceeded += [name] if lines > budget else []
    if exceeded:
        print(f"\nover budget: {', '.join(exceeded)}")
    return int(bool(exceeded) and "--check" in sys.argv)


if __name__ == "__main__":
    raise SystemExit(main())

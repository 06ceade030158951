"""`make size`: lines of Python of each package beside its budget. A budget is a warning: with `--check` it exits 1
where one is exceeded."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
BUDGETS = (
    (("grpo",), 2_400),
    (("deploy",), 1_600),
    (("configs",), 1_500),
    (("transport",), 2_300),
    (("infer",), 2_600),
    (("orchestrator",), 10_500),
    (("trainer",), 4_100),
)
"""Packages, and how many lines they may have together."""
BESIDE = (("tests", 25_000), ("benchmarks", 1_200), ("tools", 600))
"""What is no product code, and how many lines it should have."""
PAGE = ("grpo/view/static/*.*", 1_800)
"""HTML, CSS and JavaScript of the page, without what is vendored, and how many lines they may have."""


def num_lines(package: str) -> int:
    """Of the modules below `package` that git knows or would add. Folders of `configs` are presets, no modules."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", f"{package}/*.py"]
    names = set(subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split())
    files = [ROOT / name for name in names if package != "configs" or name.count("/") == 1]
    return sum(len(path.read_text().splitlines()) for path in files if path.exists())


def num_page_lines() -> int:
    """Of the page's own files."""
    return sum(len(path.read_text().splitlines()) for path in ROOT.glob(PAGE[0]))


def main() -> int:
    """Prints the table."""
    total, exceeded = 0, []
    print(f"{'package':20} {'lines':>7} {'budget':>7}")
    for packages, budget in BUDGETS:
        lines, name = sum(map(num_lines, packages)), " + ".join(packages)
        total += lines
        over = "" if lines <= budget else f"  {lines - budget:,} too many"
        print(f"{name:20} {lines:7,} {budget:7,}{over}")
        if lines > budget:
            exceeded.append(name)
    print(f"{'product code':20} {total:7,} {25_000:7,}\n")
    for package, budget in BESIDE:
        print(f"{package:20} {num_lines(package):7,} {budget:7,}")
    print(f"{'page of grpo view':20} {num_page_lines():7,} {PAGE[1]:7,}")
    if exceeded:
        print(f"\nover budget: {', '.join(exceeded)}")
    return int(bool(exceeded) and "--check" in sys.argv)


if __name__ == "__main__":
    raise SystemExit(main())

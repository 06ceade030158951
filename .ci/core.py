"""The core's unit tests in a copy of the tree that has nothing of what stands on the core: `orchestrator/` moves
rollouts and batches without it."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
REMOVED = ("environments", "orchestrator/auxiliary", "tests/environments", "tests/orchestrator/auxiliary")
"""Folders that the copy does not have."""
TESTS = ("tests/orchestrator",)
FINDER = """
import sys
from importlib.machinery import PathFinder

class Copy:
    @staticmethod
    def find_spec(name, path=None, target=None):
        is_ours = name.partition(".")[0] == "grpo" and name.count(".") < 2
        return PathFinder.find_spec(name, [{copy!r}]) if is_ours else None

installed = [one for one in sys.meta_path if getattr(one, "__module__", "").startswith("__editable__")]
sys.meta_path[:] = [Copy, *(one for one in sys.meta_path if one not in installed)]
"""
"""Imports `grpo` from the copy in every process; the tree that is installed in this environment is not found."""
CHECK = """
from importlib.util import find_spec
from pathlib import Path
import grpo.orchestrator.run, grpo.api
for module in (grpo, grpo.api, grpo.orchestrator.run):
    assert Path(module.__file__).is_relative_to({copy!r}), module
for name in {removed}:
    assert find_spec(name) is None, name
"""


def main() -> int:
    """Returns the tests' exit status. Arguments go to pytest in place of the core's tests."""
    with tempfile.TemporaryDirectory(prefix="core-") as folder:
        copy, finder = Path(folder, "tree"), Path(folder, "finder")
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
            if (ROOT / name).is_file() and not name.startswith(tuple(f"{one}/" for one in REMOVED)):
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
        finder.mkdir()
        (finder / "sitecustomize.py").write_text(FINDER.format(copy=str(copy)))
        environment = os.environ | {"PYTHONPATH": str(finder)}
        removed = [f"grpo.{one.replace('/', '.')}" for one in REMOVED if not one.startswith("tests/")]
        check = [sys.executable, "-c", CHECK.format(copy=str(copy), removed=removed)]
        subprocess.run(check, cwd=folder, env=environment, check=True)
        chosen = sys.argv[1:] or ["-q", "-n", "3", "--dist", "loadfile", *TESTS]
        pytest = [sys.executable, "-m", "pytest", "-m", "not gpu and not e2e", "-p", "no:cacheprovider", *chosen]
        return subprocess.run(pytest, cwd=copy, env=environment).returncode


if __name__ == "__main__":
    raise SystemExit(main())

"""Whole runs of the core, with stand-ins for server and trainer, in a copy of the tree that has nothing of what stands
on the core: `orchestrator/` moves rollouts and batches without it. `make core ARGS=tests/orchestrator` runs all its
tests there, which `make test` runs in the whole tree."""

import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
REMOVED = ("environments", "orchestrator/auxiliary", "tests/environments", "tests/orchestrator/auxiliary")
"""Folders that the copy does not have."""
TESTS = tuple(f"tests/orchestrator/{name}.py" for name in ("test_loop", "test_evaluate", "rollouts/test_engine"))
FINDER = """
import sys
from importlib import import_module
from importlib.machinery import PathFinder

class Copy:
    @staticmethod
    def find_spec(name, path=None, target=None):
        is_ours = name.partition(".")[0] == "grpo" and name.count(".") < 2
        return PathFinder.find_spec(name, [{copy!r}]) if is_ours else None

sys.meta_path.insert(0, Copy)
for name in {installed}:
    import_module(name).MAPPING.clear()
"""
"""Imports `grpo` from the copy; the tree that is installed in this environment is not found."""
CHECK = """
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import walk_packages
import grpo.orchestrator.run, grpo.api
for module in walk_packages(grpo.orchestrator.__path__, "grpo.orchestrator."):
    import_module(module.name)
for module in (grpo, grpo.api, grpo.orchestrator.run):
    assert Path(module.__file__).is_relative_to({copy!r}), module
for name in {removed}:
    assert (found := find_spec(name)) is None, found
"""


def main() -> int:
    """Returns the tests' exit status. Arguments go to pytest in place of the core's tests."""
    with tempfile.TemporaryDirectory(prefix="core-") as folder:
        copy = Path(folder, "tree")
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
            if (ROOT / name).is_file() and not name.startswith(tuple(f"{one}/" for one in REMOVED)):
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
        python = _environment(Path(folder, "environment"), copy)
        removed = [f"grpo.{one.replace('/', '.')}" for one in REMOVED if not one.startswith("tests/")]
        subprocess.run([python, "-c", CHECK.format(copy=str(copy), removed=removed)], cwd=folder, check=True)
        chosen = sys.argv[1:] or ["-q", "-n", "3", "--dist", "worksteal", *TESTS]
        pytest = [python, "-m", "pytest", "-m", "not gpu and not e2e", "-p", "no:cacheprovider", *chosen]
        return subprocess.run(pytest, cwd=copy).returncode


def _environment(folder: Path, copy: Path) -> Path:
    """Makes a virtual environment with the packages of this one, and `grpo` from the copy. Returns its Python."""
    venv.create(folder)
    [packages], installed = folder.glob("lib/python*/site-packages"), Path(sysconfig.get_path("purelib"))
    finders = [path.stem for path in installed.glob("__editable___grpo*_finder.py")]
    (packages / "1_installed.pth").write_text(f"import site; site.addsitedir({str(installed)!r})\n")
    (packages / "2_copy.pth").write_text("import grpo_of_the_copy\n")
    (packages / "grpo_of_the_copy.py").write_text(FINDER.format(copy=str(copy), installed=finders))
    return folder / "bin" / "python"


if __name__ == "__main__":
    raise SystemExit(main())

"""What takes long to make and several tests only look at."""

import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT
from tests.support import END_S


def pip(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "pip", *map(str, words)], check=True, capture_output=True, timeout=END_S)


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs of an environment that has the wheel, and sees the libraries of this one."""
    folder = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / "source" / name)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, folder / "source")
    shutil.rmtree(folder / "source")
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "empty", with_pip=False)
    (packages,) = (folder / "empty").glob("lib/python*/site-packages")
    pip("--python", folder / "empty/bin/python", "install", "--no-deps", "--no-index", wheel)
    libraries = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "libraries.pth").write_text("\n".join(libraries))
    return folder / "empty/bin"

"""The files that settings name are part of what a run is."""

import json
from pathlib import Path
from typing import Any

import pytest
from grpo.transport.code import digests
from grpo.transport.errors import RunFolderError
from grpo.transport.run import changes_of, code_changes, create_run, join_run

from grpo.run_files import read_run


def names(settings: dict[str, Any]) -> set[str]:
    return set(digests(settings))


def test_code_that_settings_name_brings_what_it_imports_from_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {
        "mine.py": "import json, helper\nfrom pack import part\nfrom . import beside",
        "helper.py": "import deeper",
        "deeper.py": "import mine  # a circle",
        "beside.py": "this is no Python",
        "pack/__init__.py": "",
        "pack/part.py": "from .other import x",
        "pack/other.py": "x = 1",
        "stranger.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    settings = {"env": [{"id": "reverse-text"}, {"id": "mine.py:Env"}], "loss": {"import_path": "pack.part:loss"}}
    assert names(settings) == {
        *(f"env.1.id {name}" for name in files if name != "stranger.py"),
        *(f"loss.import_path {tmp_path}/pack/{name}.py" for name in ("__init__", "part", "other")),
    }


def test_data_that_settings_name_counts_and_what_is_no_file_does_not(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("a,b\n")
    rows = str(tmp_path / "rows.csv")
    args = {
        "path": rows,
        "split": "train",
        "url": "http://a:1/v1",
        "long": "x" * 5000,
        "none": None,
        "module": "json:x",
    }
    settings = {"env": [{"id": "dataset", "args": args}], "hints": {"templates": rows}, "name": rows}
    settings |= {"arena": "grpo.orchestrator.arena.arena:Arena", "advantage": {"import_path": "not_there:f"}}
    assert names(settings) == {f"env.0.args.path {rows}", f"hints.templates {rows}"}


def test_a_run_whose_code_has_changed_is_refused_or_with_a_word_taken_and_noted_with_the_step(tmp_path: Path) -> None:
    code, run = tmp_path / "mine.py", create_run(tmp_path / "run")
    settings: dict[str, Any] = {"env": [{"id": f"{code}:Env"}]}
    who: Any = {"role": "orch", "may_change": frozenset({"resume_with_changed_code"})}
    code.write_text("reward = 1")
    join_run(run.path, **who, settings=settings, timeout_s=1)
    join_run(run.path, **who, settings=settings, timeout_s=1)
    code.write_text("reward = 2")
    (run.broadcasts / "step_000007").mkdir()
    for refuses in (lambda: join_run(run.path, **who, settings=settings, timeout_s=1),
                    lambda: changes_of(run.path, **who, settings=settings)):  # fmt: skip
        with pytest.raises(RunFolderError, match=r"mine\.py.*resume_with_changed_code"):
            refuses()
    asked = settings | {"resume_with_changed_code": True}
    assert f"code env.0.id {code}" in changes_of(run.path, **who, settings=asked)
    join_run(run.path, **who, settings=asked, timeout_s=1)
    join_run(run.path, **who, settings=settings, timeout_s=1)
    program = json.loads((run.path / "run.json").read_text())["programs"]["orch"]
    [change] = [one for one in program["changes"] if one["key"].startswith("code ")]
    assert (change["step"], change["now"]) == (7, program["code"][f"env.0.id {code}"])
    assert change["before"] != change["now"]
    assert code_changes(read_run(run.path)) == {7: [str(code)]}

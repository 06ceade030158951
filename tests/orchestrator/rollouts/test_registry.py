"""How an environment is found by its id."""

from pathlib import Path
from typing import Any

import pytest
from grpo.orchestrator.rollouts.registry import check_arena, check_id, make_environment
from grpo.transport.errors import UserError

from tests.orchestrator.registered import install
from tests.orchestrator.worker_pools import pool_for, reason, scored

SHOUT = """
from grpo import Environment, Rubric

class Shout(Environment):
    {}
    def dataset(self, split):
        return [{{"prompt": "a"}}]
"""


def test_a_file_or_a_class_that_is_not_there_is_refused_before_the_file_runs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{Path.cwd()}/no/such.py"):
        check_id("no/such.py:Class")
    (file := tmp_path / "mine.py").write_text(SHOUT.format("") + "\nraise SystemExit('it runs')\n")
    with pytest.raises(UserError, match=r"NoSuch.*Shout"):
        check_id(f"{file}:NoSuch")
    for arena in ("nope", "no_such_module:Arena", "no/such.py:Arena", f"{file}:NoSuch", str(file)):
        with pytest.raises(UserError, match=r"orch\.arena"):
            check_arena(arena)
    check_arena(f"{file}:Shout")
    file.write_text("class Mine(")
    with pytest.raises(UserError, match=r"mine\.py"):
        check_id(f"{file}:Mine")


@pytest.mark.parametrize("env_id", ["mine.py:Shout", "mine:Shout"])
def test_what_there_is_is_found(env_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(SHOUT.format("rubric = Rubric([lambda completion: 1.0])"))
    monkeypatch.chdir(tmp_path)
    check_id(env_id)


def test_what_is_no_environment_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SHOUT.format(""))
    with pytest.raises(UserError, match="rubric"):
        make_environment(f"{tmp_path}/mine.py:Shout", {})
    with pytest.raises(UserError, match="Environment"):
        make_environment("collections:Counter", {})


# --- names that installed packages register ---


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # for workers
    return tmp_path


async def test_a_worker_finds_an_environment_by_the_name_that_a_package_registers(site: Path) -> None:
    code = SHOUT.format("rubric = Rubric([lambda completion: float(completion == 'A')])")
    install(site, "shouting", "shout-env = shouting:Shout", code)
    check_id("shout-env")
    async with pool_for("shout-env") as pool:
        outcomes = [await scored(pool, text, prompt="a") for text in ("A", "a")]
    assert [reason(outcome) for outcome in outcomes] == ["", ""]
    assert [outcome.rewards["policy"] for outcome in outcomes] == [1.0, 0.0]
    for unknown in ("shout-en", "owner/nosuch-env", "nosuch:Class"):
        with pytest.raises(UserError, match="Of installed packages: shout-env"):
            check_id(unknown)


def test_a_name_that_two_packages_register_is_refused_with_both(site: Path) -> None:
    for package in ("one", "two"):
        install(site, package, f"twice = {package}:Shout", SHOUT.format("rubric = Rubric([lambda completion: 1.0])"))
    for ask in (check_id, lambda name: make_environment(name, {})):
        with pytest.raises(UserError, match=r"\bone\b.*\btwo\b"):
            ask("twice")
    check_id("one:Shout")


def test_a_registered_module_that_cannot_be_imported_is_named_with_its_package(site: Path) -> None:
    names = "gone = no_such_module:Env\nbroken = hollow:Env\nempty = hollow:Nothing"
    install(site, "hollow", names, "import no_such\n")
    for ask in (check_id, lambda name: make_environment(name, {})):
        with pytest.raises(UserError, match=r"hollow.*no_such_module"):
            ask("gone")
    with pytest.raises(ModuleNotFoundError, match="no_such") as raised:
        make_environment("broken", {})
    assert any("hollow" in note for note in raised.value.__notes__)
    (site / "hollow.py").write_text("")
    with pytest.raises(UserError, match=r"hollow.*Nothing"):
        make_environment("empty", {})


@pytest.mark.parametrize(
    ("env", "args", "said"),
    [
        ("Plain", {"a": 1}, "takes none"),
        ("Sized", {"sise": 1}, "did you mean size"),
        ("Sized", {}, "'size' is missing"),
        ("Sized", {"size": 1, "seed": 2}, None),
        ("Open", {"anything": 1}, None),
        ("Heir", {"size": 1}, None),
    ],
)
def test_arguments_that_an_environment_does_not_take_are_refused_before_it_is_made(
    env: str, args: dict[str, Any], said: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "raise OSError('imported')\n"
        "class Plain(Environment): pass\n"
        "class Sized(Environment):\n    def __init__(self, size, *, seed=0): pass\n"
        "class Open(Environment):\n    def __init__(self, **more): pass\n"
        "class Heir(Sized): pass\n"
    )
    env_id = f"{file}:{env}"
    if said is None:
        check_id(env_id, args)
        return
    with pytest.raises(UserError, match=said):
        check_id(env_id, args)

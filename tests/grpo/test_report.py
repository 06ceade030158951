"""`grpo report`: one page of runs, from their folders alone."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import yaml
from grpo.configs.run import load_run
from grpo.deploy.launcher import checked
from grpo.deploy.plan import with_run, write_settings

from grpo.commands.report import interval
from tests.grpo.run_folder import finish, grpo
from tests.grpo.view.made_run import HOSTILE, make_run

ROOT = Path(__file__).parents[2]


def made(folder: Path, *words: str) -> Path:
    """A finished run of the quickstart with the settings that these words give."""
    plan = checked(load_run(ROOT / "configs/quickstart", [*words, "--output_dir", str(folder)]))
    make_run(folder)
    write_settings(with_run(plan, "5f0c"), folder / "settings")
    finish(folder)
    return folder


def told(page: str) -> list[str]:
    """The blocks of code in a page of Markdown: for each arm its settings, and its commands."""
    return re.findall(r"^```\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


def test_the_settings_on_the_page_of_a_copy_make_the_same_run_again(tmp_path: Path) -> None:
    run = made(tmp_path / "first", "--train.learning_rate", "0.002", "--max_steps", "7")
    copy = shutil.copytree(run, tmp_path / "copy/first")
    shutil.rmtree(run)
    assert grpo("report", copy, "--output", tmp_path / "page.md").returncode == 0
    settings, commands = told((tmp_path / "page.md").read_text())
    (tmp_path / "run.yaml").write_text(settings)
    [line, *_] = commands.splitlines()
    words = line.replace("run.yaml", str(tmp_path / "run.yaml")).split()[1:]
    again = checked(load_run(words[0], words[1:]))
    first = checked(load_run(ROOT / "configs/quickstart", ["--train.learning_rate", "0.002", "--max_steps", "7"]))
    for role, one in first.settings().items():
        places = {"output_dir", "port", "client", "run_id", "model"}
        assert again.settings()[role].model_dump(exclude=places) == one.model_dump(exclude=places), role


def test_runs_that_differ_in_seeds_alone_are_one_arm_with_an_interval(tmp_path: Path) -> None:
    runs = [made(tmp_path / f"a{seed}", "--seed", str(seed)) for seed in (1, 2, 3)]
    runs.append(made(tmp_path / "b", "--train.learning_rate", "0.002"))
    lines = (runs[0] / "metrics.jsonl").read_text()
    (runs[0] / "metrics.jsonl").write_text(lines.replace('"eval/accuracy": 0.4}', '"eval/accuracy": 0.1}'))
    assert grpo("report", *runs, "--output", tmp_path / "page.md").returncode == 0
    page = (tmp_path / "page.md").read_text()
    # 0.1, 0.4, 0.4: mean 0.3, s = 0.1732, t(2) = 4.303: 4.303 · 0.1732 / √3 = 0.43
    assert "| 0 | 0.3 ± 0.43 | 0.4 |" in page
    assert "a1 and 2 more" in page
    settings = [yaml.safe_load(one) for one in told(page)[::2]]
    assert [one["train"]["learning_rate"] for one in settings] == [0.001, 0.002]
    assert [told(page)[1].count(f"--seed {seed}") for seed in (1, 2, 3)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("values", "expected"),
    [([2.0], (2.0, 0.0)), ([1.0, 3.0], (2.0, 12.706)), ([0.0, 1.0, 2.0], (1.0, 4.303 / math.sqrt(3)))],
)
def test_an_interval_is_students(values: list[float], expected: tuple[float, float]) -> None:
    assert interval(values) == pytest.approx(expected, rel=1e-3)


def test_neither_names_nor_settings_can_change_the_page_and_secrets_are_not_on_it(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    file = run / "settings/orch.yaml"
    tree = yaml.safe_load(file.read_text())
    tree["env"] = [
        {
            "id": "x",
            "args": {"api_key": "sk-1234", "key_var": "MY_KEY", "tokens_field": "t", "prompt": f"```\n{HOSTILE}"},
        }
    ]
    file.write_text(yaml.safe_dump(tree, default_style="|"))
    for name in ("page.html", "page.md"):
        assert grpo("report", run, "--title", HOSTILE, "--output", tmp_path / name).returncode == 0
        page = (tmp_path / name).read_text()
        assert "sk-1234" not in page
        assert "api_key: " in page
        assert "MY_KEY" in page
        assert "tokens_field: " in page.replace('"', "")
        if name == "page.html":
            assert "<script" not in page
            assert page.count("<svg") == 2


def test_what_is_asked_wrongly_is_told(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    for words, said in (
        ([tmp_path / "nowhere"], "holds no run"),
        ([run, "--output", tmp_path / "page.pdf"], ".html or .md"),
        ([run, "--metric", "reward/nothing"], "reward/nothing"),
    ):
        done = grpo("report", *words)
        assert done.returncode == 2
        assert said in done.stderr


def test_a_run_without_any_metrics_and_of_an_unknown_base_model_has_a_page(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    record = json.loads((run / "run.json").read_text())
    record["programs"]["train"] = {"base_model": None, "versions": {"torch": "2.13.0"}}
    (run / "run.json").write_text(json.dumps(record))
    (run / "metrics.jsonl").unlink()
    (run / "summary.json").unlink()
    assert grpo("report", run).returncode == 0
    assert "<svg" not in (run / "report.html").read_text()

"""`grpo compare`: which runs are made, what is measured of them, and what is not made again."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from grpo.orchestrator.monitoring.timeline import Timeline
from grpo.transport.errors import UserError

from grpo.commands import compare
from grpo.commands.compare import arms_of, planned
from grpo.commands.figures import measured, report
from grpo.run import Run
from tests.grpo.run_folder import found, grpo

PRESET = "configs/quickstart"


def finished(folder: Path, *, rewards: tuple[float, ...] = (0.0, 0.25, 0.5, 1.0), level: int = 0) -> Path:
    """A run of four steps, each of which takes 1 s to generate and 2 s to train; with `level` 1 the two overlap."""
    found(folder)
    lines, spans = [], [("grpo-infer http://a", "load", 0, 9.0, 10.0)]
    for step, reward in enumerate(rewards, 1):
        start_s = 10.0 + (step - 1) * (2.0 if level else 3.0)
        spans.append(("grpo-infer", "busy", None, start_s, start_s + 1.0))
        spans.append(("grpo-train", "train", step, start_s + 1.0, start_s + 3.0))
        spans.append(("grpo-infer http://a", "load", step, start_s + 3.0, start_s + 3.0))
        rollouts = {"reward/mean": reward, "rollout/num": 8.0, "rollout/num_tokens_mean": 3.0}
        lags = {"policy/lag_mean": level, "policy/lag_max": level}
        others = {"time/step_s": 3.0, "hints/given": 2.0, "pairs/cost": step}
        lines.append({"progress/step": step, **rollouts, **lags, **others})
    for version, accuracy in ((0, 0.25), (4, 0.75)):
        evaluation = {"eval/accuracy": accuracy, "eval/accuracy/e": accuracy, "eval/failed": 0, "time/evaluate_s": 1.0}
        lines.append({"progress/step": version, **evaluation})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    timeline = Timeline(folder)
    for who, what, at_step, start_s, end_s in spans:
        timeline.add(who, what, start_s=start_s, end_s=end_s, step=at_step)
    timeline.close()
    (folder / "summary.json").write_text(json.dumps({"steps": len(rewards), "tokens": {"generate": 96}}))
    return folder


def words_of(
    arms: Mapping[str, list[str]], others: tuple[str, ...], seeds: tuple[int | None, ...] = (None,)
) -> list[tuple[str, ...]]:
    return [run.words for run in planned(arms, (PRESET, *others), folder=Path("o"), steps=5, seeds=seeds)]


def test_arms_are_what_was_given_and_named_ones_can_be_added_to() -> None:
    assert arms_of(None, [("a", "x=1"), ("b", ""), ("a", "y=2")]) == {"a": ["x=1", "y=2"], "b": []}
    assert arms_of("async", [("async", "seed=2")])["async"] == ["orch.max_async_level=1", "seed=2"]
    assert list(arms_of("ablation", [])) == ["baseline", "sdpo", "replay", "full"]
    with pytest.raises(UserError):
        arms_of(None, [("a", "x=1")])


def test_arms_can_stand_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "arms.yaml").write_text("a: {x.y: 1e-3, z: text}\nb:\n  x: null\n  y: [{k: 1}]\nc:\n")
    assert arms_of(str(tmp_path / "arms.yaml"), []) == {
        "a": ["x.y=1e-3", "z=text"],
        "b": ["x=null", 'y=[{"k": 1}]'],
        "c": [],
    }
    for wrong in ("a: 1", "[a]", "a b: {}", "a: {"):
        (tmp_path / "arms.yaml").write_text(wrong)
        with pytest.raises(UserError):
            arms_of(str(tmp_path / "arms.yaml"), [])
    with pytest.raises(UserError):
        arms_of(str(tmp_path / "none.yaml"), [])


def test_the_arms_of_games_can_be_honoured(tmp_path: Path) -> None:
    words = ("compare", "kuhn", "--arms", "configs/kuhn/arms.yaml", "--output_dir", tmp_path, "--dry-run")
    assert grpo(*words).returncode == 0


MEETS = """
import os, sys, time
from pathlib import Path
here = Path(sys.argv[1])
(here / sys.argv[2]).touch()
print(os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
until = time.monotonic() + 60
while len([*here.glob("--seed=*")]) < 2:
    if time.monotonic() > until:
        sys.exit(1)
    time.sleep(0.01)
"""
"""A run that ends when another one has begun."""


def test_several_runs_at_a_time_share_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "GRPO", (sys.executable, "-c", MEETS))
    monkeypatch.setattr(compare, "visible_gpus", lambda _: ("0", "1", "4", "5"))
    runs = [
        compare.Training(arm="a", seed=seed, folder=tmp_path / f"a/{seed}", words=(str(tmp_path), f"--seed={seed}"))
        for seed in (1, 2, 3)
    ]
    compare.train(runs, 2)
    said = [(tmp_path / f"a/{seed}.log").read_text().strip() for seed in (1, 2)]
    assert said == ["0,1", "4,5"]
    assert (tmp_path / "--seed=3").exists()


def test_where_a_run_fails_the_others_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import sys, time; sys.exit(3) if sys.argv[1] == 'fails' else time.sleep(600)"
    monkeypatch.setattr(compare, "GRPO", (sys.executable, "-c", script))
    runs = [
        compare.Training(arm=what, seed=None, folder=tmp_path / what, words=(what,))
        for what in ("sleeps", "fails", "waits")
    ]
    with pytest.raises(SystemExit) as left:
        compare.train(runs, 2)
    assert left.value.code == 3
    assert not (tmp_path / "waits.log").exists()


def test_each_arm_is_run_with_each_seed_in_a_folder_of_its_own() -> None:
    assert words_of({"a": [], "b": ["x.y=1"]}, ("--colocate",), seeds=(1, 2)) == [
        (PRESET, "--colocate", "--max_steps=5", "--output_dir=o/a/seed_1", "--seed=1"),
        (PRESET, "--colocate", "--max_steps=5", "--x.y=1", "--output_dir=o/b/seed_1", "--seed=1"),
        (PRESET, "--colocate", "--max_steps=5", "--output_dir=o/a/seed_2", "--seed=2"),
        (PRESET, "--colocate", "--max_steps=5", "--x.y=1", "--output_dir=o/b/seed_2", "--seed=2"),
    ]


@pytest.mark.parametrize("others", [("--x.y=2", "--z", "3"), ("--x.y", "2", "--z", "3")])
def test_an_arms_setting_takes_the_place_of_that_of_all_runs(others: tuple[str, ...]) -> None:
    a, b = words_of({"a": ["x.y=1"], "b": []}, others)
    assert a == (PRESET, "--z", "3", "--max_steps=5", "--x.y=1", "--output_dir=o/a")
    assert b == (PRESET, *others, "--max_steps=5", "--output_dir=o/b")


def test_the_ablation_leaves_out_what_has_no_effect_without_its_weight(tmp_path: Path) -> None:
    done = grpo("compare", "configs/all_channels", "--arms", "ablation", "--output_dir", tmp_path, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 4


@pytest.mark.parametrize(
    "words",
    [
        ("--arm", "a"),
        ("--arm", "a:x"),
        ("--arm", "a:orch.max_async_level=0"),
        ("--arm", "a:orch.max_async_level=0", "--arm", "b:orch.no_such_key=1"),
        ("--arm", "a:", "--arm", "b:train.learning_rate=1e-3"),  # the preset's own
        ("--arms", "async", "--seeds", "1,1"),
    ],
)
def test_comparisons_that_make_no_sense_give_exit_code_2(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = grpo("compare", PRESET, *words, "--output_dir", tmp_path / "o")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(("level", "wall_s"), [(0, 12.0), (1, 9.0)])
def test_times_are_those_between_the_first_and_the_last_version_being_live(
    tmp_path: Path, level: int, wall_s: float
) -> None:
    figures = measured(Run(finished(tmp_path / "run", level=level)))
    assert figures["wall time, s"] == wall_s  # 4 · 3 s one after the other, 3 s and 3 · 2 s overlapping
    assert (figures["generating, s"], figures["training, s"]) == (4.0, 8.0)
    assert figures["wall / longer of generating and training"] == wall_s / 8
    assert figures["rollouts a second"] == 32 / wall_s
    assert figures["sampled tokens a second"] == 96 / wall_s
    assert (figures["lag, mean"], figures["lag, largest"]) == (level, level)


def test_rewards_are_of_the_last_quarter_sums_of_all_steps_and_accuracies_before_and_after(tmp_path: Path) -> None:
    figures = measured(Run(finished(tmp_path / "run")))
    assert figures["reward, last quarter"] == 1.0
    assert (figures["hints given"], figures["cost of teachers"]) == (8.0, 4.0)
    assert (figures["accuracy/e before"], figures["accuracy/e after"]) == (0.25, 0.75)
    assert "loss, last quarter" not in figures


def test_the_lowest_quarter_of_many_evaluations_is_a_figure(tmp_path: Path) -> None:
    folder = finished(tmp_path / "run")
    assert "accuracy/e, lowest quarter" not in measured(Run(folder))
    rise = [0.0, 0.5, 0.5, 0.5, 0.1, 0.3, 0.5, 0.5, 0.75]
    with (folder / "metrics.jsonl").open("a") as metrics:
        for step, one in enumerate(rise):
            line = {"progress/step": step, "eval/accuracy/e": one, "eval/failed": 0, "time/evaluate_s": 1.0}
            metrics.write(json.dumps(line) + "\n")
    assert measured(Run(folder))["accuracy/e, lowest quarter"] == pytest.approx(0.2)  # (0.1 + 0.3) / 2


def test_the_report_has_means_and_deviations_over_seeds_and_curves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = [(seed, finished(tmp_path / f"a/seed_{seed}", rewards=(0.0, 0.0, 0.0, seed / 4))) for seed in (1, 3)]
    report({"a": a, "b": [(1, finished(tmp_path / "b/seed_1", level=1))]}, tmp_path)
    arms = json.loads((tmp_path / "summary.json").read_text())["arms"]
    assert arms["a"]["mean"]["reward, last quarter"] == 0.5  # (1/4 + 3/4) / 2
    assert arms["a"]["deviation"]["reward, last quarter"] == pytest.approx(0.125**0.5)  # √(2 · 0.25² / 1)
    assert arms["b"]["deviation"] == {}
    assert [run["seed"] for run in arms["a"]["runs"]] == [1, 3]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "0.5 ± 0.35" in capsys.readouterr().out


def test_a_folder_with_a_run_of_another_command_is_refused(tmp_path: Path) -> None:
    (tmp_path / "commands.json").write_text(json.dumps({str(tmp_path / "sync"): [PRESET, "--seed=7"]}))
    assert grpo("compare", PRESET, "--arms", "async", "--output_dir", tmp_path).returncode == 2


def test_rows_of_only_some_arms_stand_beside_what_they_belong_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, full = finished(tmp_path / "plain"), finished(tmp_path / "full")
    lines = [json.loads(line) for line in (full / "metrics.jsonl").read_text().splitlines()]
    more = {"loss/total": 1.0, "loss/policy": 0.5, "loss/sdpo": 0.5, "time/train_s": 2.0}
    (full / "metrics.jsonl").write_text("".join(json.dumps(line | more) + "\n" for line in lines))
    report({"plain": [(None, plain)], "full": [(None, full)]}, tmp_path / "plain")
    rows = [line.split("│")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    loss = rows.index("loss, last quarter")
    assert rows[loss : loss + 3] == ["loss, last quarter", "of the policy", "of hints"]
    assert loss < rows.index("hints given") < rows.index("wall time, s")
    figures = measured(Run(full))
    assert (figures["weight syncs"], figures["rollouts"], figures["training a step, s, mean"]) == (4.0, 32.0, 2.0)

"""`grpo ablate`: which arms are run with which settings, what is run again, and what is measured and shown."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import deploy.launcher
import deploy.single_questions
from configs.common import load
from configs.orch import OrchSettings
from configs.train import TrainSettings
from deploy.ablate import Run, main, planned
from deploy.ablation_table import measured, rows
from deploy.arguments import parse
from deploy.plan import Plan, with_run, write_settings

PRESET = "configs/quickstart"
TEACHERS = json.dumps([{"name": name, "base_url": "http://127.0.0.1:9/v1", "model": "m"} for name in ("a", "b")])
PAIRS = ("--orch.preferences.teachers", TEACHERS)
NAMES = ["baseline", "sdpo", "replay", "full"]


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[OrchSettings]:
    """Stands for a look at the environments, each of which would be a process: here they mark errors."""
    looked: list[OrchSettings] = []

    def only_single_questions(settings: OrchSettings) -> bool:
        looked.append(settings)
        return False

    monkeypatch.setattr(deploy.single_questions, "only_single_questions", only_single_questions)
    return looked


def write_run(plan: Plan, *, steps: int = 8) -> None:
    """A finished run of so many steps with 0.1 reward in the first, 0.2 in the second, …; hints in 2, pairs in 3."""
    folder, loss = plan.output_dir, plan.train.loss
    write_settings(with_run(plan, "id"), folder / "settings")
    (folder / "run.json").write_text("{}")
    lines = []
    for step in range(1, steps + 1):
        record = {"progress/step": step, "reward/mean": step / 10 + loss.alpha_sdpo, "time/step_s": float(step)}
        record |= {"loss/total": 1.0 / step, "loss/policy": 0.5 / step}
        if loss.alpha_sdpo:
            record |= {"hints/errors": 3.0, "hints/given": 2.0, "hints/model_cost": 0.25 * step}
            record |= {"loss/sdpo": 0.25, "optim/grad_share_sdpo": 0.125}
        if loss.beta_replay:
            record |= {"policy/dpo_pairs": 3.0, "pairs/made": 4.0, "pairs/cost": 0.5 * step}
        lines.append(record)
    lines.append({"progress/step": steps, "eval/accuracy/reverse-text": 0.5})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = {
        version: {"eval/accuracy/reverse-text": accuracy, "eval/measure/edits/reverse-text": 1.0, "eval/failed": 0.0}
        for version, accuracy in (("0", 0.25), (str(steps), 0.75))
    }
    tokens = {"generate": 100, "train": 300, "evaluate": 20}
    summary = {"steps": steps, "evaluations": found, "tokens": tokens, "wall_s": 12.5}
    (folder / "summary.json").write_text(json.dumps(summary))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Stands for the launcher: writes the run that it is to make."""
    started: list[Plan] = []

    def run_plan(plan: Plan) -> int:
        started.append(plan)
        plan.output_dir.mkdir(parents=True, exist_ok=True)
        write_run(plan)
        return 0

    monkeypatch.setattr(deploy.launcher, "run_plan", run_plan)
    return started


def runs(*argv: str, alpha: float | None = None, beta: float | None = None) -> dict[str, Run]:
    found = planned(parse([PRESET, *PAIRS, *argv]), Path("o"), alpha=alpha, beta=beta, seeds=(None,))
    return {run.arm: run for run in found}


def weights(found: dict[str, Run]) -> dict[str, tuple[float, float]]:
    return {arm: (run.plan.train.loss.alpha_sdpo, run.plan.train.loss.beta_replay) for arm, run in found.items()}


def test_the_four_arms_have_either_weight_or_both_or_none() -> None:
    assert weights(runs()) == {"baseline": (0, 0), "sdpo": (0.1, 0), "replay": (0, 0.05), "full": (0.1, 0.05)}
    configured = runs("--train.loss.alpha_sdpo", "0.3", "--train.loss.beta_replay", "0.2")
    assert weights(configured)["full"] == (0.3, 0.2)
    assert weights(runs("--train.loss.alpha_sdpo", "0.3", alpha=0.7, beta=0.9))["full"] == (0.7, 0.9)


def test_arms_differ_in_nothing_but_weights_and_folder() -> None:
    found = runs("--seed", "7", "--train.learning_rate", "0.5", "--orch.hints.until_end", "true")
    for arm, run in found.items():
        assert run.folder == Path("o") / arm
        folders = {run.plan.train.output_dir, run.plan.infer.output_dir, run.plan.orch.output_dir}
        assert folders == {f"o/{arm}"}
        assert (run.plan.train.seed, run.plan.orch.seed, run.plan.train.learning_rate) == (7, 7, 0.5)
        assert run.plan.orch.model_copy(update={"output_dir": "x"}) == found["full"].plan.orch.model_copy(
            update={"output_dir": "x"}
        )


def test_settings_that_an_arm_could_not_use_are_left_out_of_it(tmp_path: Path) -> None:
    sections = ("--train.loss.alpha_sdpo=0.2", "--train.loss.sdpo.beta=0.3", "--train.loss.dpo.beta=0.4")
    found = runs(*sections, "--train.loss.beta_replay=0.1")
    for arm, (has_hints, has_pairs) in {"baseline": (0, 0), "sdpo": (1, 0), "replay": (0, 1), "full": (1, 1)}.items():
        files = write_settings(with_run(found[arm].plan, "id"), tmp_path / arm)
        loss = load(TrainSettings, file=files["train"]).settings.loss  # would refuse what has no effect
        assert (loss.sdpo.beta, loss.dpo.beta) == (0.3 if has_hints else 0.5, 0.4 if has_pairs else 0.1)


def test_settings_from_the_environment_are_left_out_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_TRAIN_LOSS__ALPHA_SDPO", "0.2")
    monkeypatch.setenv("GRPO_TRAIN_LOSS__SDPO__TOP_K", "4")
    found = runs()
    assert weights(found)["sdpo"] == (0.2, 0)
    assert found["baseline"].plan.train.loss.sdpo.top_k is None
    assert found["full"].plan.train.loss.sdpo.top_k == 4


def test_gpus_are_asked_for_all_arms(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SystemExit):
        runs("--infer_gpus", "0", "--train_gpus", "1")
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(": no GPU is visible here")[0] for line in lines] == [
        "error: command line: infer_gpus = '0'",
        "error: command line: train_gpus = '1'",
    ]


def test_a_teacher_is_part_of_every_arm() -> None:
    taught = ("--train.loss.teacher_tau", "0.5", "--orch.teacher_model.model.name", "configs/tiny/model")
    for arm, run in runs(*taught).items():
        assert run.plan.teacher is not None
        assert run.plan.teacher.output_dir == f"o/{arm}/teacher"


def test_each_seed_repeats_all_arms(tmp_path: Path, launched: list[Plan]) -> None:
    argv = [PRESET, *PAIRS, "--steps", "8", "--seeds", "1,2", "--output_dir", str(tmp_path)]
    assert main([*argv, "--orch.buffer.seed", "5"]) == 0
    assert [str(plan.output_dir.relative_to(tmp_path)) for plan in launched] == [
        f"{arm}/seed_{seed}" for seed in (1, 2) for arm in NAMES
    ]
    seeds = [(plan.train.seed, plan.infer.seed, plan.orch.buffer.seed) for plan in launched]
    assert seeds == [(seed, seed, seed) for seed in (1, 2) for _ in NAMES]
    arms = json.loads((tmp_path / "ablate.json").read_text())["arms"]
    assert [run["seed"] for run in arms["full"]["runs"]] == [1, 2]
    assert arms["full"]["deviation"]["reward_last_quarter"] == 0.0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((PRESET,), "preferences.teachers = (): are needed with the trainer's loss.beta_replay = 0.05"),
        (
            (PRESET, *PAIRS, "--train.loss.adv_tau", "0", "--train.loss.alpha_sdpo", "0.2"),
            "arm baseline (default): loss.adv_tau = 0.0: is 0, and so are",
        ),
        ((PRESET, *PAIRS, "--train.learning_rat", "1"), "learning_rat = '1': unknown key"),
        ((PRESET, *PAIRS, "--stepz", "3"), "--stepz: unknown option"),
        ((PRESET, *PAIRS, "--alpha", "0"), "argument --alpha: 0: expected a number above 0"),
        ((PRESET, *PAIRS, "--seeds", "1,1"), "argument --seeds: 1,1: expected different seeds"),
    ],
)
def test_what_any_arm_cannot_honour_is_refused_before_the_first(
    argv: tuple[str, ...],
    message: str,
    launched: list[Plan],
    asked: list[OrchSettings],
    capsys: pytest.CaptureFixture[str],
) -> None:
    try:
        code: object = main(argv)
    except SystemExit as ended:
        code = ended.code
    assert (code, launched, asked) == (2, [], [])
    assert message in capsys.readouterr().err


def test_runs_without_an_end_and_resumed_ones_are_refused(
    launched: list[Plan], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    without_end = [PRESET, *PAIRS, "--orch.max_steps", "null"]
    assert main(without_end) == 1
    assert "error: the runs need an end; give --steps N" in capsys.readouterr().err
    assert main([PRESET, *PAIRS, "--resume_step", "-1"]) == 1
    assert "error: resume_step is -1, and each run is a new one" in capsys.readouterr().err
    assert launched == []


def test_a_dry_run_lists_the_runs(launched: list[Plan], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([PRESET, *PAIRS, "--dry-run", "--output_dir", "o", "--seeds", "3", "--alpha", "0.25"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "baseline (alpha_sdpo 0, beta_replay 0, seed 3) in o/baseline/seed_3",
        "sdpo (alpha_sdpo 0.25, beta_replay 0, seed 3) in o/sdpo/seed_3",
        "replay (alpha_sdpo 0, beta_replay 0.05, seed 3) in o/replay/seed_3",
        "full (alpha_sdpo 0.25, beta_replay 0.05, seed 3) in o/full/seed_3",
    ]
    assert launched == []


# --- going on ---


def names(launched: list[Plan]) -> list[str]:
    return [plan.output_dir.name for plan in launched]


def test_what_is_complete_is_not_run_again_unless_it_is_to_be_overwritten(
    tmp_path: Path, launched: list[Plan], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [PRESET, *PAIRS, "--steps", "8", "--output_dir", str(tmp_path)]
    assert main(argv) == 0
    assert names(launched) == NAMES
    (tmp_path / "replay" / "summary.json").unlink()
    launched.clear()
    capsys.readouterr()
    assert main(argv) == 0
    assert names(launched) == ["replay"]
    assert launched[0].train.overwrite_output_dir
    said = capsys.readouterr().out
    assert f"complete already: full (alpha_sdpo 0.1, beta_replay 0.05) in {tmp_path}/full\n" in said
    assert "was not completed, and is made again: replay" in said
    launched.clear()
    assert main([*argv, "--overwrite_output_dir"]) == 0
    assert names(launched) == NAMES


def test_a_folder_with_other_settings_is_left_alone(
    tmp_path: Path, launched: list[Plan], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [PRESET, *PAIRS, "--steps", "8", "--output_dir", str(tmp_path)]
    assert main(argv) == 0
    launched.clear()
    assert main([*argv, "--train.learning_rate", "0.5"]) == 1
    assert f"error: {tmp_path}/baseline holds a run with other settings; give another" in capsys.readouterr().err
    assert main([*argv, "--orch.client.timeout", "5"]) == 1
    assert launched == []
    assert main([*argv, "--infer.port", "4321", "--train.num_threads", "2"]) == 0
    assert launched == []


def test_a_run_that_fails_ends_the_ablation_with_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = iter([0, 143])

    def run_plan(plan: Plan) -> int:
        return next(codes)

    monkeypatch.setattr(deploy.launcher, "run_plan", run_plan)
    assert main([PRESET, *PAIRS, "--output_dir", str(tmp_path)]) == 143
    [told] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("not completed: ")]
    assert told.startswith("not completed: sdpo (alpha_sdpo 0.1, beta_replay 0)")
    assert told.endswith(
        "; once what ended it is mended, the same command makes this run again, and none that is complete"
    )
    assert not (tmp_path / "ablate.json").exists()


# --- figures ---


def test_the_figures_of_a_run(tmp_path: Path) -> None:
    plan = runs()["full"].plan
    write_run(replace(plan, train=plan.train.model_copy(update={"output_dir": str(tmp_path)})))
    figures = measured(tmp_path)
    assert (figures["accuracy_before/reverse-text"], figures["accuracy_after/reverse-text"]) == (0.25, 0.75)
    assert figures["reward_last_quarter"] == pytest.approx(0.85)  # of 0.7 + 0.1 and 0.8 + 0.1
    assert figures["loss_policy"] == pytest.approx((0.5 / 7 + 0.5 / 8) / 2)
    assert (figures["loss_sdpo"], figures["grad_share_sdpo"]) == (0.25, 0.125)
    assert (figures["errors"], figures["hints_given"]) == (24, 16)  # of 8 steps
    assert (figures["pairs_made"], figures["pairs_trained"]) == (32, 24)
    assert figures["cost"] == 6.0  # 0.5 · 8 for pairs, 0.25 · 8 for who writes hints: as it stands after the last step
    assert (figures["seconds_per_step"], figures["wall_s"]) == (4.5, 12.5)
    assert (figures["tokens_sampled"], figures["tokens_trained"], figures["tokens_total"]) == (100, 300, 420)
    assert "errors_per_rollout" not in figures


def test_the_table_has_a_column_for_each_arm_and_the_last_line_is_json(
    tmp_path: Path, launched: list[Plan], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([PRESET, *PAIRS, "--steps", "8", "--output_dir", str(tmp_path)]) == 0
    fields = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert fields == json.loads((tmp_path / "ablate.json").read_text())
    assert fields["steps"] == 8
    assert [title for title, *_ in rows(fields)][:7] == [
        "alpha_sdpo",
        "beta_replay",
        "reverse-text, accuracy before",
        "reverse-text, accuracy after",
        "reverse-text, edits before",
        "reverse-text, edits after",
        "reward, last quarter",
    ]
    table = {title: texts for title, *texts in rows(fields)}
    assert table["alpha_sdpo"] == ["0", "0.1", "0", "0.1"]
    assert table["reverse-text, accuracy after"] == ["0.750"] * 4
    assert table["reward, last quarter"] == ["0.750", "0.850", "0.750", "0.850"]
    assert table["hints given"] == ["", "16", "", "16"]
    assert table["cost of teachers"] == ["", "2.0000", "4.0000", "6.0000"]
    assert "KL to the teacher" not in table
    assert fields["arms"]["sdpo"]["deviation"] == {}


def test_over_several_seeds_the_table_has_means_and_standard_deviations() -> None:
    arm = {"alpha_sdpo": 0.0, "beta_replay": 0.0, "runs": [{}, {}]}
    arm |= {"mean": {"reward_last_quarter": 0.5}, "deviation": {"reward_last_quarter": 0.25}}
    table = {title: texts for title, *texts in rows({"arms": {"baseline": arm}})}
    assert table["reward, last quarter"] == ["0.500 ± 0.250"]

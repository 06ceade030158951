"""`grpo bench-async`: what is run, what is measured of two runs, and how they are compared."""

import json
import time
from pathlib import Path

import pytest

import deploy.launcher
from deploy.arguments import Arguments, parse
from deploy.bench_async import Comparison, Figures, delay_for, main, measured, rows, training
from deploy.compare import CannotCompare, with_options
from deploy.delayed import Delayed
from orchestrator.monitors.timeline import Timeline, read_timeline

PRESET = "configs/quickstart"


def write_run(folder: Path, *, generate_s: float, train_s: float, overlap: bool, steps: int = 8) -> None:
    """A run whose batches take `generate_s` to generate and `train_s` to train, one after the other or overlapping.
    Version 0 is live at 10 s; loading, packing and shipping take no time."""
    folder.mkdir(parents=True)
    timeline, lines = Timeline(folder), []
    timeline.add("grpo-infer a", "load", start_s=9.0, end_s=10.0, step=0)
    timeline.add("grpo-train", "wait", start_s=5.0, end_s=10.0 + generate_s, step=1)
    generated_s = trained_s = 10.0
    for step in range(1, steps + 1):
        begins_s = generated_s if overlap else trained_s
        generated_s = begins_s + generate_s
        for what in ("generate", "busy"):
            timeline.add("grpo-infer", what, start_s=begins_s, end_s=generated_s, step=step)
        if step > 1:
            timeline.add("grpo-train", "wait", start_s=trained_s, end_s=max(trained_s, generated_s), step=step)
        starts_s = max(trained_s, generated_s)
        trained_s = starts_s + train_s
        timeline.add("grpo-train", "train", start_s=starts_s, end_s=trained_s, step=step)
        timeline.add("grpo-infer a", "load", start_s=trained_s, end_s=trained_s, step=step)
        record = {"progress/step": step, "reward/mean": step / 10, "rollout/num": 4, "rollout/num_tokens_mean": 5.0}
        lines.append(record | {"policy/lag_mean": float(overlap), "policy/lag_max": float(overlap)})
    timeline.close()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Arguments]:
    """Stands for the launcher: writes the run that its settings ask for, on two seconds of generation (and what rewards
    are delayed by) and three of training."""
    started: list[Arguments] = []

    def run(arguments: Arguments) -> int:
        started.append(arguments)
        options = dict(option.removeprefix("--").split("=", 1) for option in arguments.options["orch"])
        environment = json.loads(options.get("env", "[{}]"))[0].get("args", {})
        generate_s = 2.0 + 256 * environment.get("delay_s", 0.0)
        overlap = options["max_async_level"] != "0"
        write_run(Path(options["output_dir"]), generate_s=generate_s, train_s=3.0, overlap=overlap)
        return 0

    monkeypatch.setattr(deploy.launcher, "run", run)
    return started


def test_the_figures_leave_start_up_out(tmp_path: Path) -> None:
    write_run(tmp_path / "run", generate_s=2.0, train_s=3.0, overlap=False)
    figures = measured(tmp_path / "run", mode="sync", max_async_level=0)
    assert (figures.wall_s, figures.generate_s, figures.train_s) == (40.0, 16.0, 24.0)  # 8 steps of 2 + 3 s
    assert (figures.generate_step_s, figures.train_step_s) == (2.0, 3.0)
    assert figures.trainer_waits_s == 14.0  # 2 s in each step but the first
    assert (figures.rollouts, figures.rollouts_per_s, figures.tokens_per_s) == (32, 0.8, 4.0)
    assert figures.reward_last == pytest.approx(0.75)  # of 0.7 and 0.8
    assert figures.reward_stderr == pytest.approx(0.05)  # a deviation of 0.0707, divided by the root of 2


def test_the_window_begins_with_version_0_and_ends_with_the_last_version(tmp_path: Path) -> None:
    write_run(tmp_path / "run", generate_s=2.0, train_s=3.0, overlap=False, steps=3)
    spans = training(read_timeline(tmp_path / "run"), last=2)
    assert (spans[0].start_s, max(span.end_s for span in spans)) == (10.0, 20.0)
    assert training(read_timeline(tmp_path / "run"), last=9) == []


def test_both_runs_differ_only_in_folder_and_level(tmp_path: Path, launched: list[Arguments]) -> None:
    argv = [PRESET, "--steps", "8", "--output_dir", str(tmp_path), "--seed", "7", "--orch.sampling.max_tokens", "5"]
    assert main(argv) == 0
    sync, asynchronous = launched
    for role in ("train", "infer", "orch"):
        both = [
            [option for option in one.options[role] if "output_dir" not in option and "max_async_level" not in option]
            for one in (sync, asynchronous)
        ]
        assert both[0] == both[1]
        assert "--seed=7" in both[0]
        assert f"--output_dir={tmp_path / 'sync'}" in sync.options[role]
        assert f"--output_dir={tmp_path / 'async'}" in asynchronous.options[role]
    assert "--max_steps=8" in sync.options["train"]
    assert "--max_async_level=0" in sync.options["orch"]
    assert "--max_async_level=1" in asynchronous.options["orch"]


def test_gpus_are_asked_for_both_runs(
    tmp_path: Path, launched: list[Arguments], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SystemExit):
        main([PRESET, "--steps", "8", "--output_dir", str(tmp_path), "--infer_gpus", "0"])
    assert "command line: infer_gpus = '0': no GPU is visible here" in capsys.readouterr().err
    assert launched == []


def test_the_report_compares_them(
    tmp_path: Path, launched: list[Arguments], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([PRESET, "--steps", "8", "--output_dir", str(tmp_path)]) == 0
    fields = json.loads((tmp_path / "bench_async.json").read_text())
    assert fields["sync"]["wall_s"] == 40.0
    assert fields["async"]["wall_s"] == 26.0  # 2 s of generation, then 8 steps of 3 s
    assert fields["ideal_s"] == 24.0
    assert fields["async"]["wall_over_ideal"] == pytest.approx(26 / 24)
    assert fields["speedup"] == pytest.approx(40 / 26)
    assert (fields["sync"]["lag_max"], fields["async"]["lag_max"]) == (0, 1)
    assert (fields["reward_difference"], fields["delay_s"]) == (0.0, None)
    assert (tmp_path / "gantt.png").read_bytes().startswith(b"\x89PNG")
    assert "wall / longer of the two" in capsys.readouterr().out


def test_rewards_are_delayed_until_generation_takes_as_long_as_training(
    tmp_path: Path, launched: list[Arguments], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([PRESET, "--steps", "8", "--equalise", "--output_dir", str(tmp_path)]) == 0
    folders = [Path(dict(o.split("=", 1) for o in one.options["orch"])["--output_dir"]).name for one in launched]
    assert folders == ["calibration_0", "calibration_1", "sync", "async"]
    fields = json.loads((tmp_path / "bench_async.json").read_text())
    assert fields["delay_s"] == pytest.approx(1.0 / 256)  # a second over the 256 rollouts of a batch
    assert (fields["sync"]["generate_s"], fields["sync"]["train_s"]) == (pytest.approx(24.0), 24.0)
    assert fields["async"]["wall_s"] == pytest.approx(27.0)
    assert "generation and training are equal" in capsys.readouterr().out


def test_the_delay_is_interpolated_between_what_was_measured_and_added_beyond() -> None:
    known = {0.0: 2.0, 0.01: 4.0}
    assert delay_for(3.0, known, batch_size=100) == pytest.approx(0.005)  # half of what 0.01 adds
    assert delay_for(5.0, known, batch_size=100) == pytest.approx(0.02)  # another second for 100 rollouts
    assert delay_for(1.0, known, batch_size=100) == 0.0
    assert delay_for(3.0, {0.0: 2.0, 0.01: 2.0}, batch_size=100) == pytest.approx(0.02)


def test_training_that_is_the_shorter_cannot_be_equalised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(arguments: Arguments) -> int:
        folder = dict(option.split("=", 1) for option in arguments.options["orch"])["--output_dir"]
        write_run(Path(folder), generate_s=3.0, train_s=2.0, overlap=False)
        return 0

    monkeypatch.setattr(deploy.launcher, "run", run)
    assert main([PRESET, "--steps", "8", "--equalise", "--output_dir", str(tmp_path)]) == 1
    assert "generation takes 3 s a step, training 2 s; --equalise only lengthens" in capsys.readouterr().err


def test_a_run_that_fails_ends_the_comparison_with_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deploy.launcher, "run", lambda arguments: 130)
    assert main([PRESET, "--steps", "8", "--output_dir", str(tmp_path)]) == 130


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        ([PRESET, "--stepz", "3"], 2, "--stepz: unknown option"),
        (["nowhere", "--steps", "3"], 2, "nowhere/train.yaml: no such file"),
    ],
)
def test_a_wrong_command_line_is_refused(
    argv: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == code
    assert message in capsys.readouterr().err


def test_a_setting_that_is_given_again_replaces_the_earlier_one() -> None:
    arguments = parse([PRESET, "--orch.max_async_level", "3", "--orch.seed=5"])
    changed = with_options(arguments, "orch", {"max_async_level": 0})
    assert changed.options["orch"] == ("--seed=5", "--max_async_level=0")
    assert changed.options["train"] == arguments.options["train"]


def test_a_run_without_a_timeline_is_named(tmp_path: Path) -> None:
    with pytest.raises(CannotCompare, match="has no metrics of any step"):
        measured(tmp_path, mode="sync", max_async_level=0)
    write_run(tmp_path / "run", generate_s=1.0, train_s=1.0, overlap=False)
    (tmp_path / "run" / "timeline.jsonl").unlink()
    with pytest.raises(CannotCompare, match="has no timeline"):
        measured(tmp_path / "run", mode="sync", max_async_level=0)


def test_the_noise_of_rewards_is_two_standard_errors(tmp_path: Path) -> None:
    write_run(tmp_path / "run", generate_s=1.0, train_s=1.0, overlap=False)
    one: Figures = measured(tmp_path / "run", mode="sync", max_async_level=0)
    comparison = Comparison(sync=one, asynchronous=one, delay_s=None)
    assert comparison.reward_noise == pytest.approx(2 * 0.05 * 2**0.5)
    assert {name: ratio for name, _, _, ratio in rows(comparison)}["wall time, s"] == "1.00"


async def test_a_delayed_environment_scores_as_the_other_does_but_later() -> None:
    delayed = Delayed(id="reverse-text", args={"num_train": 3, "reward": "partial"}, delay_s=0.05)
    plain = Delayed(id="reverse-text", args={"num_train": 3, "reward": "partial"}, delay_s=0.0)
    example = delayed.dataset("train")[0]
    assert list(delayed.dataset("train")) == list(plain.dataset("train"))
    began_s = time.monotonic()
    score = await delayed.rubric.score(example["word"][::-1], example)
    assert time.monotonic() - began_s >= 0.05
    assert score == await plain.rubric.score(example["word"][::-1], example)
    assert score.accuracy == 1.0

"""What the launcher says of a run's end, in its folder and on the screen."""

import signal
import sys
from pathlib import Path

import pytest
from grpo.configs.errors import SettingsError
from grpo.configs.loading import Given
from grpo.configs.run import load_run
from grpo.deploy.launcher import explain, goes_on, launched, with_template
from grpo.deploy.plan import Plan, resolve
from grpo.deploy.programs import Child, Outcome, Program
from grpo.orchestrator.workers.failures import EnvironmentFailed
from grpo.orchestrator.workers.pool import WorkerPool
from grpo.transport.run import RunFolder, open_run

from grpo.commands.status import run_status
from tests.orchestrator.chat_templates import QWEN3, model_with
from tests.orchestrator.fakes import MODEL


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return open_run(tmp_path / "run", resume="auto")


def ended(run: RunFolder, said: str) -> Child:
    """A program that says something and ends with an error."""
    command = (sys.executable, "-c", f"import sys; sys.stderr.write({said!r}); sys.exit(1)")
    child = Child(Program(role="orch", command=command, log=run.logs / "orch.log"), restarts=0, tidy=lambda: None)
    while child.failure is None:
        child.look()
    return child


def test_the_folder_says_how_the_run_has_ended(run: RunFolder) -> None:
    failed = Outcome(failed=ended(run, "error: sums.csv: no such file\n"))
    for outcome, state in (
        (Outcome(), "finished"),
        (Outcome(stopped_by=signal.SIGTERM), "stopped"),
        (failed, "failed"),
    ):
        with launched(run) as end:
            assert run_status(run.path).state == "starting"
            end(outcome)
        assert run_status(run.path).state == state
    assert "sums.csv" in run_status(run.path).waits


@pytest.mark.parametrize(
    ("published", "checkpoints", "said"),
    [
        ([], [], ""),
        ([0], [], ""),
        ([0, 4, 5, 6], [6], "going on from step 6\n"),
        ([0, 7, 8], [6], "going on from the checkpoint of step 6; what came after it, up to step 8, is made again"),
    ],
)
def test_a_run_that_goes_on_says_from_where(
    run: RunFolder, published: list[int], checkpoints: list[int], said: str
) -> None:
    for step in published:
        (run.broadcasts / f"step_{step:06d}").mkdir()
    for step in checkpoints:
        (run.checkpoints / f"step_{step:06d}" / "trainer").mkdir(parents=True)
    assert goes_on(run).startswith(said)
    assert bool(goes_on(run)) == bool(said)


@pytest.mark.parametrize(("error", "state"), [(OSError("no space"), "failed"), (SystemExit(130), "stopped")])
def test_an_error_of_the_launcher_ends_the_run_too(run: RunFolder, error: BaseException, state: str) -> None:
    with pytest.raises(type(error)), launched(run):
        raise error
    assert run_status(run.path).state == state


def test_what_programs_said_last_does_not_act_on_the_terminal(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    explain(Outcome(failed=ended(run, "before \x1b]0;title\x07\nerror: a\x1b[2Jb\n")))
    shown = capsys.readouterr().err
    assert shown.replace("\n", "").isprintable()
    assert "error: grpo-orch ended with exit code 1: a\\x1b[2Jb" in shown


async def test_the_launcher_tells_the_cause_of_a_missing_data_file(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = WorkerPool(label="dataset", env_id="dataset", args={"path": "gone.csv"}, timeout_s=60, num_workers=1)
    with pytest.raises(EnvironmentFailed) as failure:
        await pool.prompts("train")
    await pool.close()
    explain(Outcome(failed=ended(run, f"error: {failure.value}\n")))
    assert "gone.csv" in capsys.readouterr().err.splitlines()[-1]


# --- the chat template's arguments ---


def of_reverse_text(model: Path, *words: str) -> tuple[Plan, Given]:
    asked = load_run("reverse_text", ["--model", str(model), "--device", "cpu", *words])
    return resolve(asked), asked.given


def test_a_presets_arguments_of_the_template_belong_to_its_own_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder, kept in ((MODEL, {}), (model_with(tmp_path, QWEN3), {"enable_thinking": False})):
        plan = with_template(*of_reverse_text(folder), model=folder)
        assert plan.orch.model.chat_template_kwargs == plan.infer.chat_template_kwargs == kept
    assert capsys.readouterr().out.count("left out") == 1
    given = of_reverse_text(tmp_path, "--chat_template_kwargs", '{"enable_thinking": null}')
    assert with_template(*given, model=tmp_path).orch.model.chat_template_kwargs == {}
    with pytest.raises(SettingsError, match=r"chat_template_kwargs\.thinking.*knows enable_thinking") as refused:
        with_template(*of_reverse_text(tmp_path, "--chat_template_kwargs", '{"thinking": true}'), model=tmp_path)
    assert refused.value.problems[0].origin == "command line"

"""README.md's comparison of two runs on real vLLM, from an installed wheel, and what is done with a finished run.

Answers of its asynchronous run go on under new versions; test_infer_noise.py and test_infer_in_place.py compare such
answers with Hugging Face's token by token."""

import json
import re
import shutil
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.configs.test_reference import QUICK_START
from tests.e2e.runs import ROOT, Run, done, grpo, told
from tests.pages import README

pytestmark = pytest.mark.e2e

NUM_STEPS, CHECKPOINT = 8, 6
SAME = {"GRPO_ORCH_SAMPLING__SEED": "7", "GRPO_RUN_MAX_STEPS": str(NUM_STEPS), "GRPO_ORCH_BATCH_SIZE": "128"}
SAME |= {"GRPO_TRAIN_WEIGHT_BROADCAST__KEEP_LAST": "20", "GRPO_TRAIN_CKPT__INTERVAL": str(CHECKPOINT)}
"""What a rollout samples does not depend on when it is asked for, and all versions are kept: so two runs that are
strictly on-policy can be compared."""
EXACT = 1e-4


@pytest.fixture(scope="module")
def compared(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished comparison, of fewer steps, in a folder outside the checkout."""
    folder, words = tmp_path_factory.mktemp("first"), README.command("grpo compare quickstart --arms async")
    words[words.index("--steps") + 1] = str(NUM_STEPS)
    # So few sequences at once that the server is at work when most versions come.
    for setting in ("orch.inflight_weight_updates=true", 'infer.vllm={"max_num_seqs": 16}'):
        words += ["--arm", f"async:{setting}"]
    done(*words, cwd=folder, program=installed / "grpo", variables=SAME)
    return folder / "outputs/compare"


@pytest.fixture(scope="module")
def run(compared: Path) -> Run:
    """The run that is strictly on-policy."""
    return Run(compared / "sync")


def test_a_comparison_has_figures_and_pictures(compared: Path) -> None:
    arms = json.loads((compared / "summary.json").read_text())["arms"]
    sync, asynchronous = (arms[name]["mean"]["lag, largest"] for name in ("sync", "async"))
    assert sync == 0 < asynchronous
    assert (compared / "curves.png").exists()


@pytest.mark.parametrize("arm", ["sync", "async"])
def test_every_version_was_served_as_it_was_trained_and_nothing_was_dropped(compared: Path, arm: str) -> None:
    """With answers that go on under new versions too: a token that were trained with another version than its own would
    differ where its lag is 0."""
    run = Run(compared / arm)
    assert run.summary["versions_served"] == list(range(NUM_STEPS + 1))
    assert run.summary["rollouts_dropped"] == {}
    assert run.summary["rollouts_trained"] == run.summary["rollouts_issued"] == NUM_STEPS * run.batch_size
    assert run.summary["canary_max_abs"] < EXACT
    assert run.summary["mismatch_max_lag0"] < EXACT


def test_with_inflight_updates_every_token_has_the_lag_of_the_version_that_sampled_it(compared: Path) -> None:
    run = Run(compared / "async")
    assert 1 <= max(run.by_step("policy/lag_max").values()) <= 8
    # above 0 where generation is the slower half
    assert all(0 <= share <= 1 for share in run.by_step("rollout/several_versions").values())
    assert max(run.by_step("policy/mismatch_max_lag1").values()) > 1e-2  # 0.30 to 0.46 in 3 runs


def test_the_wheels_programs_are_there_and_their_modules_are_its_own(installed: Path, tmp_path: Path) -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for name in scripts:
        assert done("--help", program=installed / name, cwd=tmp_path)
    modules = sorted({entry.partition(":")[0] for entry in scripts.values()})
    code = f"import importlib; print([importlib.import_module(name).__file__ for name in {modules}])"
    assert done("-c", code, program=installed / "python", cwd=tmp_path).count(str(installed.parent)) == len(modules)


def test_the_accuracy_on_words_never_trained_on_rises(run: Run) -> None:
    assert len(run.rewards) == NUM_STEPS
    assert 0.25 <= run.summary["accuracy_before"] <= 0.5
    # The same 200 words are answered greedily: from 0.32 to between 0.94 and 0.96 in 3 runs of different seeds.
    assert run.summary["accuracy_after"] > run.summary["accuracy_before"] + 0.2


def test_metrics_logs_status_and_ledger_are_there(run: Run) -> None:
    keys = set().union(*run.metrics)
    expected = {"reward/mean", "loss/policy", "policy/kl", "policy/lag_max", "optim/grad_norm", "time/train_s"}
    assert expected <= keys
    assert any(key.startswith("policy/mismatch_kl_lag") for key in keys)
    assert all((run.folder / "logs" / f"{name}.log").stat().st_size > 0 for name in ("infer", "orch", "train"))
    status = told("status", run.folder)
    assert len(re.findall(rf"grpo-(?:orch|train) +finished in step {NUM_STEPS}", status)) == 2
    told("prove", run.folder)


def test_every_proof_holds_is_the_same_on_a_copy_and_a_flipped_byte_is_named(compared: Path, tmp_path: Path) -> None:
    proved = told("prove", compared / "async", "--strict", "--json")
    facts = {part["name"]: part["facts"] for part in json.loads(proved)["parts"]}
    assert len(facts["versions"]["proved"]) == len(facts["versions"]["files"]) == NUM_STEPS + 1
    assert facts["tokens"]["spots"] >= 2
    copy = shutil.copytree(compared / "async", tmp_path / "copy")
    assert told("prove", copy, "--json") == proved
    file = copy / "broadcasts" / f"step_{NUM_STEPS:06d}" / "adapter_model.safetensors"
    weights = bytearray(file.read_bytes())
    weights[len(weights) // 2] ^= 1
    file.write_bytes(weights)
    ended = grpo("prove", copy)
    assert (ended.returncode, str(file.relative_to(copy)) in ended.stdout) == (1, True)


def test_the_settings_in_the_report_of_copies_are_those_of_the_runs(compared: Path, tmp_path: Path) -> None:
    copies = [shutil.copytree(compared / arm, tmp_path / arm) for arm in ("sync", "async")]
    told("report", *copies, "--output", tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert page.count("everything is proved") + page.count("nothing is broken; unproved") == 2
    settings = [yaml.safe_load(one) for one in re.findall(r"^```\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)[::2]]
    assert [one["orch"].get("max_async_level", 1) for one in settings] == [0, 1]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings[1]))
    again = yaml.safe_load(done("run.yaml", "--output_dir", "again", "--dry-run", cwd=tmp_path))
    recorded = json.loads((copies[1] / "run.json").read_text())["programs"]["orch"]["settings"]
    for key in ("batch_size", "env", "sampling", "max_async_level", "inflight_weight_updates", "eval"):
        assert again["orch"].get(key, recorded[key]) == recorded[key], key


def test_a_finished_run_is_left_as_it_is_and_with_resume_never_it_is_refused(run: Run) -> None:
    before = (run.folder / "metrics.jsonl").read_bytes()
    words = ("configs/quickstart", "--output_dir", run.folder, "--orch.max_async_level", "0")
    refused = grpo(*words, "--resume", "never", variables=SAME)
    assert (refused.returncode, "overwrite_output_dir" in refused.stderr) == (2, True)
    assert grpo(*words, "--max_steps", "1", variables=SAME).returncode == 2  # which would have no effect
    done(*words, variables=SAME)
    assert (run.folder / "metrics.jsonl").read_bytes() == before


def test_a_finished_run_goes_back_to_a_step_and_on_to_its_end_as_before(run: Run, tmp_path: Path) -> None:
    again = Run(shutil.copytree(run.folder, tmp_path / "run"))
    words = ("--orch.max_async_level", "0", "--resume_step", CHECKPOINT)
    done("quickstart", "--output_dir", again.folder, *words, variables=SAME)
    [aside] = (again.folder / "superseded").iterdir()
    assert sorted(path.name for path in (aside / "broadcasts").iterdir())[-1] == f"step_{NUM_STEPS:06d}"
    assert [line["progress/step"] for line in again.steps] == list(range(1, NUM_STEPS + 1))
    assert again.summary["versions_served"][-1] == again.summary["steps"] == NUM_STEPS
    told("prove", again.folder)
    for key in ("perf/generate_tokens", "reward/mean"):
        assert again.steps[CHECKPOINT][key] == run.steps[CHECKPOINT][key]
    first = f"broadcasts/step_{CHECKPOINT + 1:06d}/canary.json"
    ours, before = (json.loads((one.folder / first).read_text())["logprobs"] for one in (again, run))
    assert ours == pytest.approx(before, abs=EXACT)


def test_an_exported_model_answers_as_its_last_version_did(run: Run, tmp_path: Path) -> None:
    folder = told("export", run.folder, "--merged", "--output", tmp_path / "merged").strip()
    words = ("--env", "reverse-text", "--num_examples", "200", "--max_tokens", "12")
    found = json.loads(told("evaluate", folder, *words, "--dtype", "float32", "--max_model_len", "128", "--json"))
    for key in ("eval/accuracy", "eval/accuracy_stderr/reverse-text", "eval/num_tokens_mean/reverse-text"):
        assert found["metrics"][key] == pytest.approx(run.summary["evaluations"][str(NUM_STEPS)][key], abs=0.011)


# --- other runs ---


def test_the_three_files_of_the_references_quick_start_train(tmp_path: Path) -> None:
    """In bfloat16, and the heads in float32."""
    words = [*QUICK_START, "--model", "configs/quickstart/model", "--max_steps", "1", "--orch.eval.num_examples", "0"]
    words += ["--orch.batch_size", "32"]
    refused = grpo(*words, "--output_dir", tmp_path / "fp8")  # there is no GPU that could
    assert (refused.returncode, "fp8_hybrid" in refused.stderr) == (2, True)
    run, heads = Run(tmp_path / "run"), ("--train.fp32_lm_head", "true", "--infer.fp32_lm_head", "true")
    done(*words, "--output_dir", run.folder, "--train.recipe", "bf16", *heads)
    assert len(run.steps) == 1
    assert run.summary["versions_served"] == [0, 1]

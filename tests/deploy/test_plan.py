"""Resolving the three settings together, and what the launcher adds."""

import json
import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from grpo.configs.errors import SettingsError
from grpo.configs.loading import load
from grpo.configs.resuming import record_of
from grpo.configs.run import PROGRAMS, load_run
from grpo.deploy.launcher import make_programs, run
from grpo.deploy.plan import Plan, resolve, with_run, with_threads, write_settings
from grpo.deploy.programs import Outcome
from grpo.transport.errors import RunFolderError, StorageError
from grpo.transport.run import Role, RunFolder, create_run, join_run, only_one

from grpo.commands.status import shown

PRESET = "configs/quickstart"


def plan(*argv: str) -> Plan:
    return resolve(load_run(PRESET, argv))


@pytest.mark.parametrize(
    ("argv", "key"),
    [
        (("--orch.run_id", "x"), "run_id"),
        (("--orch.client.base_url", "http://far:8000/v1"), "client.base_url"),
        (("--orch.client.elastic.hostname", "servers"), "client.elastic"),
        (("--train.nodes", "2", "--train.rendezvous", "one:29400", "--train.optimizer", "adamw"), "nodes"),
    ],
)
def test_what_grpo_chooses_itself_is_refused(argv: tuple[str, ...], key: str) -> None:
    with pytest.raises(SettingsError) as caught:
        plan(*argv)
    assert key in {problem.key.removeprefix("orch.").removeprefix("train.") for problem in caught.value.problems}


@pytest.mark.parametrize(
    ("argv", "num", "ports"),
    [
        ((), 1, None),
        (("--infer_replicas", "2"), 2, None),
        (("--infer.port", "4321"), 1, (4321,)),
        (("--infer_replicas", "2", "--infer.port", "4321"), 2, (4321, 4322)),
    ],
)
def test_the_launcher_chooses_free_ports_or_keeps_a_persons_and_leads_the_orchestrator_to_them(
    argv: tuple[str, ...], num: int, ports: tuple[int, ...] | None
) -> None:
    ready = with_run(plan(*argv), "abc")
    assert (ready.train.run_id, ready.orch.run_id) == ("abc", "abc")
    assert ready.orch.client.base_url == tuple(f"http://127.0.0.1:{port}/v1" for port in ready.ports)
    assert len(set(ready.ports)) == num
    assert ready.ports[0] == ready.infer.port != 8000
    assert ports in (None, ready.ports)


def test_the_port_of_an_address_that_was_given_is_the_servers() -> None:
    assert with_run(plan("--orch.client.base_url", "http://localhost:8000/v1"), "abc").infer.port == 8000


def test_versions_over_http_get_a_free_port_too_and_the_server_is_led_to_it() -> None:
    ready = with_run(plan("--weight_broadcast.type", "http"), "abc")
    assert (port := ready.orch.weight_broadcast.port) == ready.train.weight_broadcast.port != 5556  # type: ignore[union-attr]
    assert ready.infer.weight_broadcast_url == f"http://localhost:{port}"
    chosen = with_run(plan("--weight_broadcast.type", "http", "--weight_broadcast.port", "4321"), "abc")
    assert chosen.infer.weight_broadcast_url == "http://localhost:4321"


def test_threads_are_given_only_on_a_cpu_and_where_the_user_left_them_open() -> None:
    # Without _threads of its own machine: what `resolve` filled in does not count as the user's choice again.
    bare = load_run(PRESET, ["--train.device", "cpu"])
    train = bare.train.settings
    start = Plan(train=train, infer=bare.infer.settings, orch=bare.orch.settings, free_port=True)
    on_cpu = with_threads(start, 4, gpu=False)
    assert (on_cpu.train.num_threads, on_cpu.infer.num_threads) == (4, 4)
    with_gpu = with_threads(start, 4, gpu=True)
    assert (with_gpu.train.num_threads, with_gpu.infer.num_threads) == (4, None)
    for gpus, num_threads in ((2, 2), (3, 1), (8, 1)):  # 4 threads for all ranks together, at least one each
        ranks = replace(start, train=train.model_copy(update={"gpus": gpus}))
        assert with_threads(ranks, 4, gpu=False).train.num_threads == num_threads
    chosen = plan("--train.num_threads", "2")
    assert with_threads(chosen, 4, gpu=False).train.num_threads == 2


def test_the_files_that_are_written_start_each_program_with_the_same_settings(tmp_path: Path) -> None:
    ready = with_run(plan("--overwrite_output_dir", "--orch.sampling.max_tokens", "9", "--train.seed", "2"), "abc")
    files = write_settings(ready, tmp_path / "settings")
    assert {role: load(PROGRAMS[role], file=file).settings for role, file in files.items()} == ready.settings()
    assert ready.train.overwrite_output_dir is False
    # A default would count as set.
    written = yaml.safe_load(files["train"].read_text())
    assert written["seed"] == 2
    assert not {"max_grad_norm", "zero_level", "offload"} & set(written)


def test_the_files_are_the_owners_alone_and_one_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    run = create_run(tmp_path)
    ready, folder = with_run(plan(), run.run_id), tmp_path / "settings"
    folder.mkdir(exist_ok=True)
    (folder / "train.yaml").touch(0o644)  # as an earlier release left it
    for file in (run.path / "run.json", *write_settings(ready, folder).values()):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    (folder / "orch.yaml").unlink()
    (folder / "orch.yaml").mkdir()
    with pytest.raises(StorageError, match=r"settings/orch\.yaml"):
        write_settings(ready, folder)


def started_with(folder: Path, *options: str) -> dict[str, Mapping[str, str]]:
    """The environment of each program."""
    ready = with_run(plan(*options), "abc")
    files = write_settings(ready, folder / "settings")
    return {one.role: one.environment for one in make_programs(ready, files, RunFolder(path=folder, run_id="abc"))}


def test_the_programs_do_not_see_settings_in_the_environment_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"GRPO_{one}_SEED" for one in ("RUN", "TRAIN", "INFER", "ORCH")]
    for name in names:
        monkeypatch.setenv(name, "1")
    programs = started_with(tmp_path, "--seed", "2", "--train.num_threads", "5")
    assert set(programs) == {"infer", "train", "orch"}
    for environment in programs.values():
        assert not set(names) & set(environment)
    assert programs["train"]["OMP_NUM_THREADS"] == "5"


def test_a_program_gets_the_keys_that_its_own_settings_name_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"VLLM_API_KEY", "GRPO_TRANSPORT_KEY", "GRPO_ENV_KEY", "WANDB_API_KEY", "JUDGE_KEY", "HF_TOKEN"}
    for name in keys:
        monkeypatch.setenv(name, "key")
    apis = [{"name": n, "base_url": "http://a/v1", "model": "m", "api_key_var": n} for n in ("JUDGE_KEY", "HF_TOKEN")]
    options = ["--orch.preferences.teachers", json.dumps(apis), "--train.loss.beta_replay", "1"]
    options += ["--rollout_transport.type", "zmq"]
    seen = {role: keys & set(environment) for role, environment in started_with(tmp_path, *options).items()}
    assert seen["orch"] == keys
    assert seen["infer"] == {"VLLM_API_KEY", "GRPO_TRANSPORT_KEY", "HF_TOKEN"}
    assert seen["train"] == {"GRPO_TRANSPORT_KEY", "HF_TOKEN"}


def test_with_nccl_no_program_is_started_again() -> None:
    over_nccl = ("--weight_broadcast.type", "nccl")
    assert (plan().restarts, plan(*over_nccl).restarts) == (3, 0)
    with pytest.raises(SettingsError, match="restarts"):
        plan(*over_nccl, "--restarts", "2")


def test_dry_run_prints_the_effective_settings_of_all_three(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(load_run(PRESET, ["--max_steps", "30", "--model", "not/there"]), shown, dry_run=True) == 0
    settings = yaml.safe_load(capsys.readouterr().out)
    assert settings["train"]["max_steps"] == settings["orch"]["max_steps"] == 30
    assert settings["infer"]["model"] == settings["orch"]["model"]["name"] == "not/there"
    assert settings["train"]["loss"]["token_mask_high"] == 8.0
    assert not Path("not").exists()


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_model_that_is_not_there_is_refused_before_anything_starts(dry_run: bool, tmp_path: Path) -> None:
    output_dir = tmp_path / "run"
    with pytest.raises(FileNotFoundError, match=r"\./no/model"):
        run(load_run(PRESET, ["--model", "./no/model", "--output_dir", str(output_dir)]), shown, dry_run=dry_run)
    assert not output_dir.exists()


def test_a_run_that_shall_never_be_gone_on_with_is_refused(tmp_path: Path) -> None:
    earlier = create_run(tmp_path)
    with pytest.raises(RunFolderError, match=earlier.run_id):
        run(load_run(PRESET, ["--output_dir", str(tmp_path), "--resume", "never"]), shown)


@pytest.mark.parametrize(
    ("role", "change"), [("train", "max_grad_norm=0.5"), ("infer", "dtype=bfloat16"), ("orch", "batch_size=128")]
)
def test_a_run_of_other_settings_is_refused_with_the_difference_before_anything_starts(
    tmp_path: Path, role: Role, change: str
) -> None:
    create_run(tmp_path)
    earlier = plan().settings()[role].model_dump(mode="json")
    join_run(tmp_path, role=role, record={"settings": earlier}, timeout_s=1)
    with pytest.raises(SettingsError, match=f"{change.partition('=')[0]} = "):
        run(load_run(PRESET, ["--output_dir", str(tmp_path), f"--{role}.{change}"]), shown)


@pytest.mark.parametrize(
    ("words", "starts"),
    [("", False), ("--resume_step=-1", False), ("--max_steps=61", True), ("--overwrite_output_dir", True)],
)
def test_a_run_that_has_done_its_steps_is_shown_and_nothing_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: str, starts: bool
) -> None:
    started = []
    launcher = "grpo.deploy.launcher.run_programs"
    monkeypatch.setattr(launcher, lambda programs, **_: started.append(programs) or Outcome())
    create_run(tmp_path)
    (tmp_path / "summary.json").write_text('{"steps": 60}')
    run(load_run(PRESET, ["--output_dir", str(tmp_path), *words.split()]), shown)
    assert bool(started) == starts
    assert ("60 steps" in capsys.readouterr().out) != starts


def test_a_run_that_has_done_its_steps_does_not_swallow_a_setting(tmp_path: Path) -> None:
    create_run(tmp_path)
    earlier = plan().settings()
    for role in ("train", "orch"):
        join_run(tmp_path, role=role, record={"settings": earlier[role].model_dump(mode="json")}, timeout_s=1)
    (tmp_path / "summary.json").write_text('{"steps": 60}')
    for change in ("train.learning_rate=1e-4", "orch.eval.interval=7", "train.max_grad_norm=0.5"):
        with pytest.raises((RunFolderError, SettingsError), match=change.partition("=")[0].partition(".")[2]):
            run(load_run(PRESET, ["--output_dir", str(tmp_path), f"--{change}"]), shown)
    run(load_run(PRESET, ["--output_dir", str(tmp_path), "--resume_with_changed_code"]), shown)


def test_code_that_has_changed_is_refused_before_anything_starts(tmp_path: Path) -> None:
    code, folder = tmp_path / "own.py", tmp_path / "run"
    code.write_text("class Own: pass")
    words = ["--output_dir", str(folder), "--env", f"{code}:Own"]
    create_run(folder)
    join_run(folder, role="orch", record=record_of(plan(*words[2:]).orch.model_dump(mode="json")), timeout_s=1)
    code.write_text("class Own: reward = 1")
    with pytest.raises(SettingsError, match=r"own\.py.*resume_with_changed_code"):
        run(load_run(PRESET, words), shown)
    (folder / "summary.json").write_text('{"steps": 60}')
    with pytest.raises(RunFolderError, match="has done its steps"):
        run(load_run(PRESET, [*words, "--resume_with_changed_code"]), shown)


def test_what_goes_back_is_the_launcher_and_not_a_program_that_it_starts_again() -> None:
    ready = with_run(plan("--resume_step", "4"), "abc")
    assert (ready.train.ckpt.resume_step, ready.orch.ckpt.resume_step) == (None, None)
    assert (ready.train.resume, ready.orch.resume, ready.train.run_id) == ("auto", "auto", "abc")


def test_a_folder_in_use_is_refused_although_overwriting_is_allowed(tmp_path: Path) -> None:
    with only_one(tmp_path, "launcher"):
        with pytest.raises(RunFolderError, match="grpo-launcher"):
            run(load_run(PRESET, ["--overwrite_output_dir", "--output_dir", str(tmp_path)]), shown)
        with pytest.raises(RunFolderError), only_one(tmp_path, "launcher"):
            pass
    with only_one(tmp_path, "launcher"):
        pass

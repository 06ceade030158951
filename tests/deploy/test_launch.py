"""`grpo launch`: what is handed to Slurm and SkyPilot, and what is refused."""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from grpo.configs.errors import SettingsError
from grpo.configs.infer import InferSettings
from grpo.configs.loading import S, load
from grpo.configs.orch import OrchSettings
from grpo.configs.run import LoadedRun, load_part, load_run
from grpo.configs.train import TrainSettings
from grpo.deploy import service, slurm
from grpo.deploy.cluster import HARDWARE, Places, parts
from grpo.deploy.service import ServiceLaunch
from grpo.deploy.sky import group
from grpo.deploy.slurm import script
from grpo.transport.errors import UserError
from grpo.transport.run import create_run

from grpo.commands.launch import launched
from grpo.commands.service import add_arguments
from tests.grpo.run_folder import grpo

ROOT = Path(__file__).parents[2]
TOPOLOGY = {
    "infer": {"replicas": 3, "gpus": 2, "cpus": 8, "memory_gb": 64},
    "train": {"nodes": 2, "gpus": 4},
    "env": {"replicas": 1},
    "slurm": {"partition": "gpu", "time": "24:00:00"},
}
WORDS = ["--topology", json.dumps(TOPOLOGY), "--max_steps", "7", "--orch.batch_size", "64"]


def test_slurms_file_has_a_group_of_machines_for_each_part_and_the_same_command() -> None:
    text = script(load_run("quickstart", WORDS), "quickstart", WORDS)
    head, *groups = text.split("#SBATCH hetjob\n")
    assert all(line in head for line in ("--requeue", "--signal=B:USR1@120", "/logs/slurm.log"))
    assert all("--partition=gpu" in one and "--time=24:00:00" in one for one in (head, *groups))
    servers, trainer, environment = groups
    asked = ("--ntasks=3", "--gpus-per-task=2", "--cpus-per-task=8", "--mem-per-cpu=8192")
    assert all(word in servers for word in asked)
    assert all(word in trainer for word in ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-task=4"))
    words = shlex.split(re.findall(r"^exec (.*)$", environment, re.M)[0])
    assert words[words.index("launch") :] == ["launch", "quickstart", "--on", "slurm", "--inside", *WORDS]


def test_values_reach_sbatch_whole_and_no_value_can_end_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / 'my "best" run #1 100%'
    here.mkdir()
    monkeypatch.chdir(here)
    words = ["--output_dir", "out $HOME", "--topology.slurm", json.dumps({"comment": "first; \\ try", "time": "20"})]
    head = script(load_run("quickstart", words), "quickstart", words).partition("#SBATCH hetjob")[0]
    lines = [line.removeprefix("#SBATCH ") for line in head.splitlines() if line.startswith("#SBATCH ")]
    given = dict(shlex.split(line)[0].partition("=")[::2] for line in lines)  # sbatch's quotes are those of a shell
    assert given["--chdir"] == str(here)
    assert given["--output"] == f"{here}/out $HOME/logs/slurm.log".replace("%", "%%")
    assert (given["--comment"], given["--time"]) == ("first; \\ try", "20")


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["--output_dir", "out\ntouch x #"], "output_dir"),
        (["--output_dir", "out\\run"], "output_dir"),
        (["--topology.slurm", '{"comment": "a\\ntouch x"}'], "topology.slurm.comment"),
        (["--topology.slurm", '{"time=1\\ntouch x": "1"}'], "topology.slurm"),
    ],
)
def test_what_sbatch_would_read_otherwise_is_refused(words: list[str], key: str) -> None:
    with pytest.raises(SettingsError) as caught:
        script(load_run("quickstart", words), "quickstart", words)
    assert [problem.key for problem in caught.value.problems] == [key]


@pytest.mark.parametrize(
    ("runtime", "image", "start"),
    [
        (
            "pyxis",
            "registry.example#team/grpo:gpu",
            [
                "--container-image=registry.example#team/grpo:gpu",
                "--container-mounts={m}",
                "--container-workdir={here}",
            ],
        ),
        (
            "apptainer",
            "/images/grpo.sif",
            ["apptainer", "exec", "--nv", "--bind={m}", "--pwd={here}", "/images/grpo.sif"],
        ),
    ],
)
def test_in_a_container_every_program_sees_the_runs_folder_and_its_file(
    runtime: str, image: str, start: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        monkeypatch.setenv(f"SLURM_JOB_NODELIST_HET_GROUP_{number}", "n0")
    scontrol = tmp_path / "bin/scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text("#!/bin/sh\necho NodeName=n0 NodeAddr=10.0.0.1 Port=1\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{scontrol.parent}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "mine/run.yaml"
    mine.parent.mkdir()
    mine.write_text((ROOT / "configs/quickstart/run.yaml").read_text().replace("model: model", "model: me/model"))
    container = {"image": image, "runtime": runtime, "mounts": ["/data", "/a:/b"]}
    words = ["--topology", json.dumps(TOPOLOGY | {"container": container}), "--output_dir", "out"]
    run = load_run(mine, words, hardware=HARDWARE)
    found = {one.role: list(one.command) for one in slurm._programs(run, str(mine), create_run(tmp_path / "out"))}
    mounts = f"{tmp_path}/out:{tmp_path}/out,{tmp_path}:{tmp_path},{mine.parent}:{mine.parent},/data:/data,/a:/b"
    expected = [one.format(m=mounts, here=tmp_path) for one in start]
    for role, command in found.items():
        module = command.index("python")
        asked = [one for one in expected if one != "--nv" or role[:5] in ("infer", "train")]
        assert command[0] == "srun"
        assert command[module - len(asked) - 2 : module - 2] == asked, role
        assert command[module + 1 : module + 3] == ["-P", "-m"]
    assert str(mine) in found["train"]
    assert "--overlap" in found["orch"]
    assert not {"--overlap", sys.executable} & set(found["infer.0"])
    bare = load_run("quickstart", ["--topology", json.dumps(TOPOLOGY)], hardware=HARDWARE)
    plain = {one.role: list(one.command) for one in slurm._programs(bare, "quickstart", create_run(tmp_path / "p"))}
    assert plain["orch"][0] == sys.executable in plain["train"]


def argv_of(run: LoadedRun, **places: Any) -> dict[str, tuple[str, ...]]:
    """The command of each part."""
    return {
        part.role: part.argv for part in parts(run, Places(target="quickstart", output_dir="/shared/run", **places))
    }


def taken(cls: type[S], argv: tuple[str, ...]) -> S:
    """The settings that a program takes from its command."""
    return load_part(cls, argv[1], list(argv[2:]))


def test_each_parts_command_has_what_the_command_line_gave_its_program_and_the_programs_take_it() -> None:
    run = load_run("quickstart", WORDS)
    found = argv_of(run, trainer="t0", orchestrator="o0", environments=("e0",))
    trainer = taken(TrainSettings, found["train"])
    assert (trainer.nodes, trainer.gpus, trainer.rendezvous, trainer.max_steps) == (2, 4, "t0:29400", 7)
    orchestrator = taken(OrchSettings, found["orch"])
    assert orchestrator.client.elastic is not None
    assert (orchestrator.batch_size, orchestrator.output_dir) == (64, "/shared/run")
    assert [env.address for env in orchestrator.env] == ["tcp://e0:7000"]
    assert found["env.0"] == ("grpo-env", "reverse-text", "--host", "0.0.0.0", "--port", "7000")


def test_settings_of_the_environment_and_lists_reach_their_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_ORCH_BATCH_SIZE", "48")
    words = ["--orch.env", '[{"id": "zorplex"}]', "--lora_target_modules", "q_proj,v_proj"]
    run = load_run("quickstart", words)
    monkeypatch.delenv("GRPO_ORCH_BATCH_SIZE")
    found = argv_of(run, trainer="", orchestrator="")
    orchestrator = taken(OrchSettings, found["orch"])
    assert (orchestrator.batch_size, [env.id for env in orchestrator.env]) == (48, ["zorplex"])
    assert taken(TrainSettings, found["train"]).lora_target_modules == ("q_proj", "v_proj")


def test_batches_and_versions_that_travel_over_sockets_lead_to_the_orchestrators_machine() -> None:
    words = [*WORDS, "--rollout_transport.type", "zmq", "--weight_broadcast.type", "http"]
    found = argv_of(load_run("quickstart", words), trainer="t0", orchestrator="o0", servers="s")
    assert "--weight_broadcast_url=http://o0:5556" in found["infer"]
    for role in ("train", "orch"):
        assert {"--rollout_transport.host=o0", "--weight_broadcast.host=o0"} <= set(found[role])


def test_skypilots_group_has_a_task_for_each_part_that_is_started_again_after_75() -> None:
    head, *tasks = yaml.safe_load_all(group(load_run("quickstart", WORDS), "quickstart"))
    assert head == {"name": "quickstart", "execution": "parallel", "primary_tasks": ["train", "orch"]}
    by_name = {task["name"]: task for task in tasks}
    assert {name: task["num_nodes"] for name, task in by_name.items()} == {
        "infer": 3,
        "train": 2,
        "orch": 1,
        "env-0": 1,
    }
    assert all(task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75] for task in tasks)
    assert by_name["train"]["resources"]["accelerators"] == "H100:4"
    assert "--rendezvous=train-0.quickstart:29400" in by_name["train"]["run"]
    assert "http://infer-2.quickstart:8000/v1" in by_name["orch"]["run"]


@pytest.mark.parametrize("engine", ["slurm", "kubernetes", "sky"])
def test_a_dry_run_prints_and_writes_nothing(engine: str, tmp_path: Path) -> None:
    done = grpo("launch", "quickstart", "--on", engine, "--dry-run", "--output_dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "quickstart" in done.stdout
    assert not list(tmp_path.iterdir())


def test_without_the_servers_key_nothing_is_queued_and_the_key_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "")
    done = grpo("launch", "quickstart", "--on", "slurm", "--output_dir", tmp_path / "run")
    assert (done.returncode, "VLLM_API_KEY" in done.stderr) == (2, True)
    assert not (tmp_path / "run").exists()


# --- a training service ---

SERVICE = ["--model", "configs/tiny/model", "--tenants", "a,b", "--max_rank", "16"]
TWO_SERVERS = json.dumps({"infer": {"replicas": 2, "gpus": 1}, "train": {"cpus": 8}, "slurm": {"partition": "gpu"}})


def service_launch(folder: Path, *words: str) -> ServiceLaunch:
    return launched([*SERVICE, "--output_dir", str(folder), "--topology", TWO_SERVERS, *words])


def test_slurms_file_of_a_service_starts_a_server_on_each_machine_and_gives_their_names_to_the_service(
    tmp_path: Path,
) -> None:
    """Run by a shell, with a word in the place of each program that a cluster has."""
    folder, programs, told = tmp_path / "my run", tmp_path / "programs", tmp_path / "told"
    programs.mkdir()
    text = service.script(service_launch(folder))
    head, servers = text.split("#SBATCH hetjob\n")
    assert all("--partition=gpu" in one for one in (head, servers))
    assert "--cpus-per-task=8" in head
    assert all(word in servers for word in ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-task=1"))
    for name, body in {
        "scontrol": "echo n1; echo n2",
        "srun": f'for word; do echo "$word"; done > {told}.srun',
        "python": f'for word; do echo "$word"; done > {told}.service',
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{body}\n")
        (programs / name).chmod(0o755)
    text = text.replace(shlex.quote(sys.executable), "python").replace("#!/bin/bash\n", "#!/bin/bash\n", 1)
    variables = {"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_NODELIST_HET_GROUP_1": "n[1-2]"}
    subprocess.run(["bash", "-c", f"{text.replace('exec ', '')}wait\n"], env=variables, check=True, timeout=60)
    given = Path(f"{told}.service").read_text().splitlines()
    assert "--server=http://n1:8000,http://n2:8000" in given
    assert {f"--output_dir={folder}", "--tenants=a,b", "--host=0.0.0.0", "--port=8100"} <= set(given)
    started = Path(f"{told}.srun").read_text().splitlines()
    assert {"grpo.infer.cli", f"--output_dir={folder}", "--max_lora_rank=16", "--max_model_len=512"} <= set(started)


def test_service_and_servers_take_what_they_are_given(tmp_path: Path) -> None:
    infer, own = service.parts(service_launch(tmp_path), output_dir="/outputs/x", servers="http://s:8000")
    found = load(InferSettings, file=None, arguments=infer.argv[1:]).settings
    assert (found.max_lora_rank, found.max_model_len, found.output_dir) == (16, 512, "/outputs/x")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = parser.parse_args(own.argv[2:])
    assert (options.tenants, options.server, options.device) == (("a", "b"), ("http://s:8000",), "cuda")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--server", "http://x:1"), "--server"),
        (("--topology", '{"infer": {"replicas": 0}}'), "replicas"),
        (("--topology", '{"train": {"nodes": 2}}'), "nodes"),
    ],
)
def test_a_service_that_no_cluster_can_start_is_refused(words: tuple[str, str], named: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=named):
        service_launch(tmp_path, *words)


def test_without_the_servers_key_no_service_is_queued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_SERVICE_SERVER_KEY", "")
    done = grpo("launch", "service", "--on", "slurm", *SERVICE, "--output_dir", tmp_path / "run")
    assert (done.returncode, "GRPO_SERVICE_SERVER_KEY" in done.stderr) == (2, True)
    assert not (tmp_path / "run").exists()


def test_kubernetes_gets_a_service_and_the_servers_that_it_names(tmp_path: Path) -> None:
    resources = list(yaml.safe_load_all(service.files(service_launch(tmp_path / "lab"))["base/resources.yaml"]))
    for one in resources:
        kubernetes_validate.validate(one, "1.32.0", strict=True)
    sets = {one["metadata"]["name"]: one["spec"] for one in resources if one["kind"] == "StatefulSet"}
    assert {name: spec["replicas"] for name, spec in sets.items()} == {"lab-infer": 2, "lab-service": 1}
    (container,) = sets["lab-service"]["template"]["spec"]["containers"]
    urls = "http://lab-infer-0.lab-infer:8000,http://lab-infer-1.lab-infer:8000"
    assert f"--server={urls}" in container["command"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/api/v1/healthz"
    services = {one["metadata"]["name"] for one in resources if one["kind"] == "Service"}
    assert services == {"lab-infer", "lab-service"}

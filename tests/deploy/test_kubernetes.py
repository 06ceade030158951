"""Kubernetes' files: valid, built by kustomize, and their commands run as processes in the order of a cluster."""

import json
import re
import shutil
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from grpo.configs.errors import SettingsError
from grpo.configs.run import load_run
from grpo.deploy.cluster import check, name_of
from grpo.deploy.kubernetes import OVERLAYS, files
from grpo.transport.errors import PROOF_FAILED, START_AGAIN
from grpo.transport.ports import free_port
from grpo.transport.run import current_run_id

from tests.deploy.containers import start, substituted
from tests.e2e.runs import Run
from tests.infer.server_process import children_of
from tests.support import END_S, until, until_gone

VERSION = "1.32.0"
TOPOLOGY = {
    "infer": {"replicas": 2, "cpus": 4, "memory_gb": 16.5},
    "train": {"nodes": 2, "min_nodes": 1, "gpus": 1},
    "env": {"replicas": 2},
}
WORDS = ["--topology", json.dumps(TOPOLOGY), "--train.optimizer", "adamw", "--device", "cpu"]


def rendered(*words: str, target: str = "quickstart") -> dict[str, str]:
    run = load_run(target, [*WORDS, *words])
    check(run)
    return files(run, target)


def resources(texts: dict[str, str], folder: str = "base") -> dict[tuple[str, str], dict[str, Any]]:
    """By kind and name; kustomization files are none."""
    found = {}
    for path, text in texts.items():
        if path.startswith(folder) and path.endswith(".yaml") and "kustomization" not in path:
            for one in yaml.safe_load_all(text):
                if isinstance(one, dict) and "kind" in one:
                    found[one["kind"], one["metadata"]["name"]] = one
    return found


def pods(all_of: dict[tuple[str, str], dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The pods' specs, by the name of their workload."""
    return {name: one["spec"]["template"]["spec"] for (_, name), one in all_of.items() if "template" in one["spec"]}


def test_what_kueue_admits_names_its_queue_and_priority_and_nothing_else_does() -> None:
    words = ("--topology.kueue.queue", "gpus", "--topology.kueue.priority", "high")
    label, kinds = "kueue.x-k8s.io/queue-name", set()
    for overlay in OVERLAYS:
        for (kind, _), one in resources(rendered(*words), overlay).items():
            if kind in ("Job", "StatefulSet", "Deployment", "JobSet", "LeaderWorkerSet"):
                kinds.add(kind)
                labels = one["metadata"]["labels"]
                assert (labels[label], labels["kueue.x-k8s.io/priority-class"]) == ("gpus", "high")
            else:
                assert label not in one["metadata"].get("labels", {}), kind
    assert len(kinds) == 5
    assert "kueue" not in "".join(rendered().values())


@pytest.mark.parametrize(
    "words", [("--topology.kueue.queue", "a b"), ("--topology.kueue.priority", "high"), ("--topology.kueue.queue", "A")]
)
def test_a_queue_that_is_no_name_and_a_priority_without_a_queue_are_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(SettingsError, match=words[0].removeprefix("--")):
        rendered(*words)


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl here")
def test_kustomize_builds_the_base_and_its_overlays(overlay: str, tmp_path: Path) -> None:
    for path, text in rendered().items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    command = ["kubectl", "kustomize", str(tmp_path / overlay)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kinds = {(one["kind"], one["metadata"]["name"]) for one in yaml.safe_load_all(done.stdout)}
    jobs, servers = {("Job", "quickstart-train"), ("Job", "quickstart-orch")}, {("StatefulSet", "quickstart-infer")}
    assert (jobs <= kinds) == (overlay != "jobset")
    assert (("JobSet", "quickstart") in kinds) == (overlay == "jobset")
    assert (servers <= kinds) == (overlay != "leaderworkerset")


def test_no_container_is_root_and_keys_come_from_a_secret_by_reference() -> None:
    for name, pod in pods(resources(rendered("--topology.secret", "keys"))).items():
        assert pod["securityContext"]["runAsNonRoot"], name
        (container,) = pod["containers"]
        assert container["envFrom"] == [{"secretRef": {"name": "keys"}}]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert "env" not in container


@pytest.mark.parametrize("name", ["quickstart-train", "quickstart-orch"])
def test_jobs_are_started_again_after_75_and_fail_after_1_and_2(name: str) -> None:
    spec = resources(rendered())["Job", name]["spec"]
    rules = spec["podFailurePolicy"]["rules"][:2]
    codes = {rule["action"]: rule["onExitCodes"]["values"] for rule in rules}
    assert codes == {"FailJob": [1, 2, PROOF_FAILED], "Ignore": [START_AGAIN]}
    assert spec["completionMode"] == "Indexed"
    [container] = spec["template"]["spec"]["containers"]
    assert {rule["onExitCodes"]["containerName"] for rule in rules} == {container["name"]}


def test_the_parts_find_each_other_by_names_that_services_have_and_keep_to_their_cores() -> None:
    all_of = resources(rendered())
    services = {f"quickstart-{part}" for part in ("infer", "train", "orch", "env-0")}
    assert services == {name for kind, name in all_of if kind == "Service"}
    orch = pods(all_of)["quickstart-orch"]["containers"][0]["command"]
    train = pods(all_of)["quickstart-train"]
    assert '--client.elastic={"hostname": "quickstart-infer", "port": 8000}' in orch
    assert any("tcp://quickstart-env-0:7000" in word for word in orch)
    assert "--rendezvous=quickstart-train-0.quickstart-train:29400" in train["containers"][0]["command"]
    assert train["subdomain"] == "quickstart-train"
    server = pods(all_of)["quickstart-infer"]["containers"][0]["resources"]
    assert server["limits"]["cpu"] == server["requests"]["cpu"] == "4", "which its program reads as its quota"


def test_the_rendezvous_of_a_job_set_has_the_name_that_it_gives_its_pods() -> None:
    job_set = resources(rendered(), "jobset")["JobSet", "quickstart"]["spec"]
    command = job_set["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]["command"]
    assert f"--rendezvous=quickstart-train-0-0.{job_set['network']['subdomain']}:29400" in command


def test_a_run_of_ones_own_brings_its_file_along(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model: Qwen/Qwen3-0.6B\noutput_dir: outputs/Mine\nenv: zorplex\n")
    texts = rendered(target=str(tmp_path))
    kustomization = yaml.safe_load(texts["base/kustomization.yaml"])
    assert kustomization["configMapGenerator"] == [{"name": "mine-settings", "files": ["run.yaml"]}]
    container = pods(resources(texts))["mine-train"]["containers"][0]
    assert container["command"][:2] == ["grpo-train", "/etc/grpo/run.yaml"]
    assert {"name": "settings", "mountPath": "/etc/grpo", "readOnly": True} in container["volumeMounts"]


@pytest.mark.parametrize("folder", ["2026-11-23", "a" * 120, "-", "Übung 3", "-".join("9" * 99)])
def test_every_resource_is_valid_its_name_one_for_services_and_what_kubernetes_appends_fits(folder: str) -> None:
    all_of = resources(rendered("--output_dir", f"outputs/{folder}"))
    for (kind, name), one in all_of.items():
        kubernetes_validate.validate(one, VERSION, strict=True)
        assert re.fullmatch("[a-z]([a-z0-9-]*[a-z0-9])?", name), "RFC 1035, of Services"
        # The name of a pod is a host's, at most 63; a StatefulSet's revision is a label, with a digest after its name.
        assert len(name) + len("-0-0-abcde" if kind != "StatefulSet" else "-abcdefabcd") <= 63
        labels = one["metadata"]["labels"].values()
        assert all(re.fullmatch("[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", label) for label in labels)


def test_names_that_are_cut_stay_different_and_a_secret_must_have_one() -> None:
    runs = [load_run("quickstart", ["--output_dir", f"outputs/{'a' * 60}{number}"]) for number in (1, 2)]
    assert len({name_of(run) for run in runs}) == 2
    with pytest.raises(SettingsError, match=r"topology\.secret"):
        rendered("--topology.secret", "My Keys")


def test_no_value_is_expanded_by_the_kubelet() -> None:
    def expanded(word: str) -> str:
        return re.sub(r"\$\$|\$\([^)]*\)", lambda found: "$" if found[0] == "$$" else "secret", word)

    prompt = "cost: $(VLLM_API_KEY) or $$5, $HOME"
    env = json.dumps([{"id": "reverse-text", "args": {"system_prompt": prompt}}])
    container = pods(resources(rendered("--orch.env", env)))["quickstart-orch"]["containers"][0]
    assert any(prompt in expanded(word) for word in container["command"]), container["command"]


# --- the commands, run ------------------------------------------------------------------------------------------------


@pytest.mark.e2e
def test_the_containers_commands_killed_and_started_again_go_on_with_the_run(tmp_path: Path) -> None:
    words = ["--max_steps", "2", "--orch.batch_size", "32", "--orch.eval.num_examples", "0"]
    words += ["--infer.num_threads", "1", "--train.num_threads", "1", "--train.ckpt.interval", "1"]
    one_machine = {"infer": {"replicas": 1}, "train": {"nodes": 2, "gpus": 1}, "env": {"replicas": 1}}
    run = load_run("quickstart", [*words, "--topology", json.dumps(one_machine), "--device", "cpu"])
    commands = {
        name.removeprefix("quickstart-"): pod["containers"][0]["command"]
        for name, pod in pods(resources(files(run, "quickstart"))).items()
    }
    names = {"8000": str(free_port()), "29400": str(free_port()), "7000": str(free_port())}
    hosts = ("quickstart-train-0.quickstart-train", "quickstart-infer", "quickstart-env-0")
    folder = tmp_path / "quickstart"

    def started(stack: ExitStack, number: int) -> dict[str, subprocess.Popen[bytes]]:
        found = {}
        for name in ("env-0", "infer", "train", "train-1", "orch"):
            argv = substituted(
                commands[name.removesuffix("-1")], volume=("/outputs", tmp_path), names=names, hosts=hosts
            )
            more = {"VLLM_API_KEY": "a-secret-of-this-test", "GRPO_ENV_KEY": "another-secret-of-this-test"}
            found[name] = start(stack, argv, tmp_path / f"{name}.{number}.log", **more)
        return found

    with ExitStack() as stack:
        first = started(stack, 1)
        # As soon as there is a run: the server is still starting.
        until(lambda: current_run_id(folder), *first.values())
        pids = [pid for process in first.values() for pid in children_of(process.pid)]
        for process in first.values():
            process.kill()
            process.wait()
        run_id = current_run_id(folder)
        until_gone(pids)
        programs = started(stack, 2)
        assert programs["orch"].wait(timeout=END_S) == 0, (tmp_path / "orch.2.log").read_text()
        assert [programs[name].wait(timeout=END_S) for name in ("train", "train-1")] == [0, 0]
        assert current_run_id(folder) == run_id
        assert [line["progress/step"] for line in Run(folder).steps] == [1, 2]
        for name in ("infer", "env-0"):
            programs[name].send_signal(signal.SIGTERM)
        assert [programs[name].wait(timeout=END_S) for name in ("infer", "env-0")] == [143, 143]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--train.colocate", "true", "--infer.colocate", "true"), "colocate"),
        (("--topology", '{"train": {"nodes": 1, "min_nodes": 2}}'), "must not exceed nodes"),
        (("--topology", '{"train": {"nodes": 2, "min_nodes": 1}}', "--train.optimizer", "adamw_8bit"), "8-bit"),
    ],
)
def test_settings_that_a_cluster_cannot_have_are_refused(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check(load_run("quickstart", words))

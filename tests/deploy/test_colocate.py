"""`grpo --colocate`: what it sets, and what server and trainer must agree in."""

from pathlib import Path

import pytest

from configs.errors import SettingsError
from configs.run import load_run
from deploy.plan import Plan, resolve

PRESET = "configs/quickstart"


def plan(*argv: str) -> Plan:
    return resolve(load_run(PRESET, argv))


def problems(*argv: str) -> str:
    with pytest.raises(SettingsError) as caught:
        plan(*argv)
    return str(caught.value)


def test_the_flag_is_for_both_and_off_by_default() -> None:
    both = plan("--colocate")
    assert (both.train.colocate, both.infer.colocate) == (True, True)
    neither = plan()
    assert (neither.train.colocate, neither.infer.colocate) == (False, False)


def test_one_of_the_two_is_for_both_unless_the_other_refuses() -> None:
    assert "must equal train.colocate = True" in problems("--train.colocate", "true", "--infer.colocate", "false")
    assert plan("--infer.colocate", "true").train.colocate


def test_the_server_computes_in_the_trainers_type(tmp_path: Path) -> None:
    assert plan("--colocate", "--train.recipe", "bf16", "--infer.dtype", "bfloat16").infer.dtype == "bfloat16"
    run = tmp_path / "run.yaml"
    run.write_text(Path(PRESET, "run.yaml").read_text().replace("  dtype: float32\n", ""))
    model = ["--model", f"{PRESET}/model"]
    assert resolve(load_run(run, [*model, "--colocate"])).infer.dtype == "float32"
    assert resolve(load_run(run, model)).infer.dtype == "auto"


def test_both_are_on_the_same_device() -> None:
    assert plan("--colocate", "--train.device", "cpu").infer.device == "cpu"
    assert plan("--colocate", "--infer.device", "cpu").train.device == "cpu"
    apart = plan("--train.device", "cpu")
    assert (apart.train.device, apart.infer.device) == ("cpu", "auto")


def test_the_dry_run_says_who_sets_the_servers_share_of_a_gpu() -> None:
    note = "# on a GPU, grpo sets infer's gpu_memory_utilization to what the trainer leaves"
    assert note in plan("--colocate").effective()
    assert note not in plan("--colocate", "--infer.gpu_memory_utilization", "0.5").effective()
    assert note not in plan().effective()

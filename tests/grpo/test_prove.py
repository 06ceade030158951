"""`grpo prove`: what it says of runs that are whole, damaged, alive, killed and resumed."""

import asyncio
import ctypes
import json
import random
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grpo.configs.loss import LossSettings
from grpo.configs.train import TrainSettings
from grpo.orchestrator.ledger import Ledger
from grpo.orchestrator.witness import expected_witness, kept_of
from grpo.transport.batches.store import StepStore
from grpo.transport.codec import encode
from grpo.transport.digests import DIGESTS_FILE, read_digests
from grpo.transport.http import CanaryFigures, LoadReport
from grpo.transport.receipts import REFUSED, WITNESS_SIZE, ExpectedWitness, Receipt, SpotProof, Witness
from grpo.transport.run import join_run
from msgspec.structs import replace

from grpo.proofs import Page, Part, prove
from tests.grpo.run_folder import finish, found, gone_pid, grpo, says, write_ledger, write_metrics
from tests.orchestrator.fakes import FakeServer, FakeTrainer
from tests.orchestrator.running import run as run_once
from tests.support import until
from tests.trainer import witness_cases

ROOT = Path(__file__).parents[2]
LIGHT = ("grpo", "msgspec", "numpy", "pyarrow", "xxhash")
"""The packages, besides the standard library, that the command may import."""
IN_ANOTHER_PYTHON = f"""
import importlib.machinery, sys

class OnlyLight:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in (*{LIGHT}, *sys.stdlib_module_names) and not name.startswith("__editable__"):
            raise ModuleNotFoundError(f"no module named {{name!r}} here", name=name)

sys.meta_path.insert(0, OnlyLight())
from grpo.cli import main
sys.argv[0] = "grpo"
main()
"""


async def _run(folder: Path, **changes: Any) -> None:
    server = await FakeServer().start()
    try:
        await run_once(folder, server, **changes)
    finally:
        await server.stop()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps that an orchestrator has brought to its end."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    asyncio.run(_run(folder))
    return folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(finished, tmp_path / "elsewhere" / "copy"))


def part_of(page: Page, name: str) -> Part:
    [part] = [part for part in page.parts if part.name == name]
    return part


# --- a finished run, and copies of it ---


def test_a_finished_run_is_whole_and_what_has_no_proof_is_told(finished: Path) -> None:
    page = prove(finished)
    assert (page.state, page.step, page.max_steps, page.broken) == ("finished", 3, 3, [])
    assert part_of(page, "versions").facts["proved"] == [0, 1, 2, 3]
    assert part_of(page, "versions").facts["files"].keys() == {"0", "1", "2", "3"}
    assert part_of(page, "batches").facts["files"].keys() == {"1", "2", "3"}
    assert part_of(page, "rollouts").facts["states"] == {"trained": 48}
    assert page.digest == read_digests(finished)[1]
    assert any("receipt" in one for one in page.unproved), "this trainer writes none"
    assert (page.exit_code(), page.exit_code(strict=True)) == (0, 3)


def test_the_page_is_the_same_on_a_read_only_copy_by_a_python_without_heavy_libraries(
    finished: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "other" / "place"
    shutil.copytree(finished, copy)
    for words in ([], ["--json"]):
        page = by_a_stranger(sys.executable, "-c", IN_ANOTHER_PYTHON, "prove", copy, *words, run=copy)
        assert page.returncode == 0, page.stderr
        assert page.stdout == grpo("prove", finished, *words).stdout


def by_a_stranger(*command: str | Path, run: Path) -> subprocess.CompletedProcess[str]:
    """The end of a command that may not write to the run's folder, not even where the user is root."""
    for path in (*run.rglob("*"), run):
        path.chmod(0o555 if path.is_dir() else 0o444)
    kinds: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 60, "cwd": ROOT}
    return subprocess.run(command, preexec_fn=_drop_capability, **kinds)


def _drop_capability() -> None:
    """CAP_DAC_OVERRIDE, by which root writes where nobody may."""
    PR_CAPBSET_DROP, CAP_DAC_OVERRIDE = 24, 1
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE)


def test_one_flipped_byte_in_any_named_file_is_found_and_named(copied: Path) -> None:
    draw = random.Random(7)
    digests, _ = read_digests(copied)
    kinds = {"run.json", "ledger.sqlite", "metrics.jsonl", "timeline.jsonl", "summary.json", "batches", "broadcasts"}
    assert {name.partition("/")[0] for name in digests.files} == kinds | {"traces"}
    for name in (*digests.files, DIGESTS_FILE):
        whole = (copied / name).read_bytes()
        for _ in range(2):
            place, changed = draw.randrange(len(whole)), bytearray(whole)
            changed[place] ^= 1 << draw.randrange(8)
            (copied / name).write_bytes(changed)
            page = prove(copied)
            assert any(name in one for one in page.broken), (name, place)
            assert page.exit_code() == 1
        (copied / name).write_bytes(whole)
    assert prove(copied).broken == []


def test_what_is_missing_is_broken_and_what_may_be_left_out_is_unproved(copied: Path) -> None:
    shutil.rmtree(copied / "broadcasts" / "step_000001")
    (copied / "traces" / "step_000002.parquet").unlink()
    page = prove(copied)
    assert page.broken == []
    assert any("step_000001" in one for one in page.unproved)
    assert any("step_000002.parquet" in one for one in page.unproved)
    (copied / "broadcasts" / "step_000002" / "canary.json").unlink()
    (copied / "traces" / "step_000009.parquet").write_bytes(b"")
    (copied / "metrics.jsonl").unlink()
    (copied / "ledger.sqlite-wal").touch()  # as a reader may leave it
    broken = "\n".join(prove(copied).broken)
    for name in (
        "broadcasts/step_000002/canary.json is missing",
        "metrics.jsonl is missing",
        "step_000009.parquet was",
    ):
        assert name in broken


def test_a_version_on_disk_that_is_not_the_proved_snapshot_is_broken(copied: Path) -> None:
    with sqlite3.connect(copied / "ledger.sqlite") as database:
        database.execute("UPDATE proofs SET snapshot = 'another' WHERE version = 2")
    [told] = part_of(prove(copied), "versions").broken
    assert told.startswith("2 on disk")


def test_a_folder_without_a_run_and_one_of_another_release_are_wrong_use(tmp_path: Path) -> None:
    assert grpo("prove", tmp_path).returncode == 2
    file = found(tmp_path / "run") / "run.json"
    file.write_text(file.read_text().replace('"schema_version": ', '"schema_version": 9'))
    assert grpo("prove", tmp_path / "run").returncode == 2


# --- runs that are alive, killed, resumed ---


class LookedAt(FakeTrainer):
    """Publishes each version while somebody who has begun to look at the run since the one before may still look."""

    num_looks, num_seen = 0, 0

    def receipt(self, step: int) -> dict[str, bytes]:
        until(lambda: self.num_looks > self.num_seen)
        self.num_seen = self.num_looks
        return super().receipt(step)


def test_a_living_run_gives_no_false_alarm_while_its_files_are_written(tmp_path: Path) -> None:
    pages: list[Page] = []
    trainer = LookedAt(tmp_path)
    thread = threading.Thread(target=lambda: asyncio.run(_run(tmp_path, trainer=trainer, max_steps=8)))
    thread.start()
    while thread.is_alive():
        trainer.num_looks += 1
        pages.append(prove(tmp_path))
    thread.join()
    assert [one for page in pages for one in page.broken] == []
    assert {"starting", "running", "finished"} >= {page.state for page in pages} >= {"running"}
    assert len({page.step for page in pages}) > 3
    assert prove(tmp_path).step == 8


def test_a_killed_run_says_what_holds_also_on_a_read_only_copy(tmp_path: Path) -> None:
    run = found(tmp_path / "run")
    ledger = write_ledger(run, close=False)
    write_metrics(run)
    says(run, "orch", "sampling", step=3, pid=gone_pid())
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    assert (copy / "ledger.sqlite-wal").stat().st_size > 0
    (copy / "ledger.sqlite-shm").unlink()
    done = by_a_stranger(sys.executable, "-m", "grpo", "prove", copy, run=copy)
    ledger.close()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ended early" in done.stdout
    assert "digests.json" in done.stdout
    assert "7 trained" in done.stdout


def test_who_joins_a_finished_run_makes_it_one_that_goes_on_and_its_new_end_is_final_again(copied: Path) -> None:
    before = prove(copied).digest
    join_run(copied, role="infer", record={"settings": {}}, timeout_s=1)
    page = prove(copied)
    assert (page.digest, page.broken) == (None, [])

    async def on() -> None:
        server = await FakeServer().start()
        await run_once(copied, server, trainer=FakeTrainer(copied, goes_on_after=3), max_steps=5)
        await server.stop()

    asyncio.run(on())
    page = prove(copied)
    assert (page.state, page.step, page.broken) == ("finished", 5, [])
    assert page.digest not in (None, before)


def test_a_ledger_for_which_there_is_no_time_is_unproved_and_not_broken(run: Path) -> None:
    ledger = Ledger(run / "ledger.sqlite")
    for group in range(10, 2000):
        ledger.issued(group, num=8, env="reverse-text", example=1, version=2)
    ledger.close()
    page = prove(run, limit_s=0)
    assert page.broken == []
    assert any("too large" in one for one in page.unproved)


# --- what single proofs say ---

RIGHT = Witness(presence=(0.5,) * WITNESS_SIZE, content=(-0.25,) * WITNESS_SIZE)
EXPECTED = ExpectedWitness(presence=RIGHT.presence, content=RIGHT.content, presence_size=1.0, content_size=0.5)
SPOT = SpotProof(
    rollout="0/1",
    server="http://127.0.0.1:1",
    version=0,
    num_tokens=5,
    max_abs=2e-5,
    mean_abs=1e-6,
    tolerance=1e-4,
    measure="max_abs",
)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """A finished run of two steps without digests, made by hand."""
    folder = found(tmp_path / "run")
    write_ledger(folder)
    write_metrics(folder)
    finish(folder)
    return folder


def receive(run: Path, *receipts: Receipt) -> None:
    ledger = Ledger(run / "ledger.sqlite")
    for receipt in receipts:
        ledger.expects(receipt.step, EXPECTED)
        ledger.received(receipt, finding=None if receipt.witness in (None, RIGHT) else "rollout 0/1: missing")
    ledger.close()


def test_witnesses_and_spot_proofs_are_counted(run: Path) -> None:
    receipts = [
        Receipt(step=1, num_tokens=100, num_proved_now=60, witness=RIGHT, spots=(SPOT, SPOT)),
        Receipt(step=2, num_tokens=100, num_proved_now=100, witness=RIGHT),
    ]
    receive(run, *receipts)
    page = prove(run)
    tokens, gradients = part_of(page, "tokens"), part_of(page, "gradients")
    assert {key: tokens.facts[key] for key in ("trained", "proved_at_lag_0", "proved_in_spots", "spots")} == {
        "trained": 200,
        "proved_at_lag_0": 160,
        "proved_in_spots": 10,
        "spots": 2,
    }
    assert tokens.facts["by_server"] == {"http://127.0.0.1:1": 2}
    assert (gradients.facts["gaps"], gradients.facts["largest"]) == ({"1": 0, "2": 0}, 0)
    assert tokens.facts["by_step"] == {"1": [100, 60, 10], "2": [100, 100, 0]}
    assert [part.unproved + part.broken for part in (tokens, gradients)] == [[], []]


@pytest.mark.parametrize(
    "change",
    [
        {"presence": (0.5,) * (WITNESS_SIZE - 1) + (0.50001,)},
        {"content": (0.0,) * WITNESS_SIZE},
    ],
)
def test_a_gradient_that_bears_another_witness_is_named_with_what_differs(run: Path, change: dict[str, Any]) -> None:
    witness = Witness(**{"presence": RIGHT.presence, "content": RIGHT.content, **change})
    receive(run, Receipt(step=1, num_tokens=100, num_proved_now=100, witness=witness))
    [told] = part_of(prove(run), "gradients").broken
    assert "step 1" in told
    assert "rollout 0/1: missing" in told


def test_a_spot_proof_that_has_failed_names_rollout_server_version_and_both_numbers(run: Path) -> None:
    failed = {"max_abs": 0.75, "failed_at": 3, "trained_logprob": -1.5, "served_logprob": -0.75}
    spot = SpotProof(**{name: getattr(SPOT, name) for name in SPOT.__struct_fields__} | failed)
    receive(run, Receipt(step=2, num_tokens=100, witness=RIGHT, spots=(SPOT, spot)))
    [told] = part_of(prove(run), "tokens").broken
    for one in ("step 2", "0/1", "127.0.0.1:1", "version 0", "0.75", "token 3", "-1.5", "-0.75"):
        assert one in told
    assert grpo("prove", run).returncode == 1


def test_a_step_that_a_proof_has_stopped_is_broken_until_it_is_trained(run: Path) -> None:
    failed = replace(SPOT, max_abs=0.75, failed_at=3, trained_logprob=-1.5, served_logprob=-0.75)
    (run / REFUSED).mkdir()
    (run / REFUSED / "step_000002.json").write_bytes(Receipt(step=2, num_tokens=0, spots=(failed,)).to_json())
    [told] = part_of(prove(run), "tokens").broken
    assert "step 2: rollout 0/1" in told
    receive(run, Receipt(step=2, num_tokens=100, num_proved_now=100, witness=RIGHT))
    tokens = part_of(prove(run), "tokens")
    assert tokens.broken == []
    assert any("step 2: rollout 0/1" in one for one in tokens.unproved)


def test_a_mismatch_that_the_policy_does_not_explain_and_a_proof_that_ended_the_run_are_broken(run: Path) -> None:
    receive(run, Receipt(step=1, num_tokens=9, witness=RIGHT, unexplained={"1": 0.71}, moved={"1": 0.001}))
    says(run, "train", "failed", message="ProofFailed: a spot proof does not hold: rollout 9/9", pid=gone_pid())
    page = prove(run)
    [ended], [unexplained] = part_of(page, "tokens").broken, part_of(page, "rollouts").broken
    assert "rollout 9/9" in ended
    assert "0.71" in unexplained


def test_a_run_whose_versions_are_gone_is_unproved_and_strictly_has_a_code_of_its_own(
    finished: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(finished, tmp_path / "copy"))
    for folder in (copy / "broadcasts").iterdir():
        shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
    page = prove(copy)
    assert page.broken == []
    assert any("gone from disk" in one for one in part_of(page, "versions").unproved)
    assert [grpo("prove", copy, *words).returncode for words in ((), ("--strict",))] == [0, 3]
    (copy / "metrics.jsonl").write_bytes(b"x" + (copy / "metrics.jsonl").read_bytes())
    assert grpo("prove", copy, "--strict").returncode == 1


def test_a_run_without_any_spot_proof_says_so(run: Path) -> None:
    receive(run, *(Receipt(step=step, num_tokens=100, num_proved_now=90, witness=RIGHT) for step in (1, 2)))
    [told] = part_of(prove(run), "tokens").unproved
    assert "no sample of lag 1 or more" in told


def test_what_has_no_proof_says_why(run: Path) -> None:
    receive(run, Receipt(step=1, num_tokens=100, num_proved_now=40, num_unproved=3))
    file, settings = run / "run.json", {"lora": False, "proofs": {"share": 0.01}}
    fields = json.loads(file.read_text())
    fields["programs"]["train"]["settings"] = settings
    file.write_text(json.dumps(fields))
    unproved = prove(run).unproved
    assert any("3 samples" in one and "lora: false" in one for one in unproved)
    assert any("receipt of step 2" in one for one in unproved)
    assert any("witness of steps 1 to 2" in one for one in unproved)
    assert any("gone from disk" in one or "no server has proved 0 to 1" in one for one in unproved)
    assert any(DIGESTS_FILE in one for one in unproved)


def test_code_that_changed_between_starts_is_told_without_saying_where_it_lay(run: Path) -> None:
    file = run / "run.json"
    fields = json.loads(file.read_text())
    code = {"env.0.id /home/me/work/my_env.py": "sha256:2", "env.0.id /home/me/work/parts/judge.py": "9999999999 bytes"}
    change = {"step": 1, "key": "code env.0.id /home/me/work/my_env.py", "before": "sha256:1", "now": "sha256:2"}
    fields["programs"]["orch"] |= {"code": code, "changes": [change]}
    file.write_text(json.dumps(fields))
    part = part_of(prove(run), "code")
    assert part.facts["files"].keys() == {"env.0.id my_env.py", "env.0.id parts/judge.py"}
    assert part.facts["changed"] == {"1": ["my_env.py"]}
    assert len(part.unproved) == 2
    assert "/home" not in grpo("prove", run, "--json").stdout


def test_a_version_that_a_server_has_not_proved_within_the_tolerance_is_broken(run: Path) -> None:
    ledger = Ledger(run / "ledger.sqlite")
    gaps = {"mean_abs": 1e-6, "base_max_abs": 1e-6, "base_mean_abs": 1e-6, "tolerance": 1e-4}
    report = {"name": "p", "snapshot": "s", "load_s": 0.1, "canary_s": 0.1}
    mean = CanaryFigures(max_abs=2e-3, **gaps)  # what counts in 16 bits
    ledger.proved("http://a", LoadReport(version=0, canary=mean, **report))
    largest = CanaryFigures(max_abs=2e-3, measure="max_abs", **gaps)
    ledger.proved("http://b", LoadReport(version=1, canary=largest, **report))
    ledger.close()
    [told] = part_of(prove(run), "versions").broken
    assert "version 1" in told
    assert "http://b" in told


def test_a_ledger_that_expects_another_witness_than_the_batch_on_disk_is_found(run: Path) -> None:
    loss = {"normaliser": "sequence", "alpha_sdpo": 0.5, "beta_replay": 0.3}
    settings = TrainSettings.model_validate({"model": "m", "loss": loss}).model_dump(mode="json")
    file = json.loads((run / "run.json").read_text())
    file["programs"]["train"]["settings"] = settings
    (run / "run.json").write_text(json.dumps(file))
    samples = witness_cases.samples(8, hints=True)
    pairs = witness_cases.PAIRS
    [batches] = witness_cases.packed(samples, pairs=pairs)
    batches = [replace(batch, run_id="5f0c") for batch in batches]
    StepStore(run / "batches", run_id="5f0c").write(1, [encode(batches)])
    right = expected_witness(samples, pairs, LossSettings.model_validate(loss), step=1).witness
    witness = Witness(presence=right.presence, content=right.content)
    forged = replace(right, content=right.content[1:] + right.content[:1])
    for expected, borne, num_broken in ((right, witness, 0), (forged, Witness(**fields_of(forged)), 1)):
        ledger = Ledger(run / "ledger.sqlite")
        ledger.expects(1, expected)
        ledger.received(Receipt(step=1, num_tokens=100, num_proved_now=100, witness=borne))
        ledger.close()
        gradients = part_of(prove(run), "gradients")
        assert gradients.facts["again"] == [1]
        assert len(gradients.broken) == num_broken


def test_the_kept_part_of_a_witness_is_compared_with_the_batch_on_disk(run: Path) -> None:
    samples, loss = witness_cases.samples(8), LossSettings()
    samples = [replace(one, teacher_logprobs=None) for one in samples]
    file = json.loads((run / "run.json").read_text())
    file["programs"]["train"]["settings"] = TrainSettings.model_validate({"model": "m"}).model_dump(mode="json")
    (run / "run.json").write_text(json.dumps(file))
    [batches] = witness_cases.packed(samples)
    StepStore(run / "batches", run_id="5f0c").write(1, [encode([replace(one, run_id="5f0c") for one in batches])])
    right = expected_witness(samples, [], loss, step=1).witness
    other = expected_witness(samples[1:], [], loss, step=1).witness
    wrong = "the gradients of step 1 are not those of its batch: it was trained before"
    for kept, finding, broken in (
        (kept_of(right, right), None, None),
        (kept_of(other, other), None, "is not that of the batch on disk"),
        (replace(kept_of(right, right), gap=0.5), None, "as the ledger says"),
        (kept_of(right, right), "it was trained before", wrong),
    ):
        ledger = Ledger(run / "ledger.sqlite")
        ledger.expects(1, right)
        receipt = Receipt(step=1, num_tokens=100, num_proved_now=100, witness=Witness(**fields_of(other)))
        ledger.received(receipt, kept=kept)
        if finding:
            ledger.received(receipt, finding=finding)
        ledger.close()
        gradients = part_of(prove(run), "gradients")
        assert gradients.facts["again"] == [1]
        assert ([] if broken is None else [True]) == [broken in one for one in gradients.broken]


def fields_of(witness: Witness) -> dict[str, Any]:
    return {"presence": witness.presence, "content": witness.content}

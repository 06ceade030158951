"""A service's folder as other commands see it."""

import json
import shutil
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from grpo.service.engine import Engine
from grpo.service.log import Answer, Command, CommandLog
from grpo.service.recorder import Recorder
from grpo.service.training import Base
from grpo.service.wire import parse, received, samples_of
from grpo.transport.digests import write_digests
from grpo.transport.http import CanaryFigures, LoadReport
from grpo.transport.run import RunFolder, create_run, join_run
from grpo.transport.status import STOPPED, StatusFile
from grpo.transport.traces import trace_path, traced_steps
from grpo.transport.weights.identity import base_identity
from tinker.proto import tinker_public_pb2 as schema

from grpo.commands.export import export
from grpo.commands.status import run_status, text
from grpo.policy_version import open_checkpoint
from grpo.run_files import metrics
from grpo.service_folder import open_service
from grpo.service_proofs import prove
from grpo.view.data import curves, find_runs, overview, rollout
from tests.service.data import datum, message_of, tiny_base

MODEL = "0123456789abcdef:train:0"
NAME = "ann-01234567-0"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def base(model_folder: Path) -> Base:
    return tiny_base(model_folder, micro_batch_tokens=128)


class Service:
    """What a service does between its routes and its files."""

    def __init__(self, base: Base, run: RunFolder) -> None:
        self.log = CommandLog(run.path / "commands.sqlite")
        self.recorder = Recorder(run.path, self.log, share=0.01)
        ended: list[str] = []
        self.engine = Engine(base, self.log, run.path, recorder=self.recorder, finished=ended.append, publish=None)
        self.recorder.start(lambda: ["a", "b"])
        self.engine.start()

    def send(self, seq: int, kind: str, body: bytes, *, model: str = MODEL) -> Command:
        command = Command(target=model, seq=seq, tenant="ann", kind=kind, body=body)
        datums = received(parse(body)) if kind == "forward_backward" else None
        if self.log.add(command, datums).result():
            self.engine.submit(command)
        return command

    def done(self, *asked: Any, **options: Any) -> str:
        """Returns how the command has ended."""
        command, deadline_s = self.send(*asked, **options), time.monotonic() + 60
        while (answer := self.log.answer(command.request_id, "ann")) is None:
            assert time.monotonic() < deadline_s, command
            time.sleep(0.005)
        return answer.state

    def forward(self, seq: int, data: list[Any], loss_fn: str = "cross_entropy") -> str:
        return self.done(seq, "forward_backward", message_of(data, loss_fn, seq=seq).SerializeToString())

    def step(self, seq: int, **adam: Any) -> str:
        return self.done(seq, "optim_step", json.dumps({"adam_params": {"learning_rate": 1e-2} | adam}).encode())

    def close(self) -> None:
        self.engine.close()
        self.recorder.close()
        self.log.close()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, base: Base, model_folder: Path) -> RunFolder:
    """A service's folder in which commands of every kind have ended, and the service too."""
    run = create_run(tmp_path_factory.mktemp("made") / "run")
    settings = base.settings.model_dump(mode="json") | {"model": str(model_folder)}
    record = {"settings": settings, "tenants": ["ann"], "base_model": base_identity(model_folder), "samples": False}
    join_run(run.path, role="service", record=record, timeout_s=5.0)
    service = Service(base, run)
    service.log.add_session(MODEL.partition(":")[0], "ann")
    service.log.add_model(MODEL, MODEL.partition(":")[0], "ann", {"lora_config": {"rank": 4}})
    assert service.done(0, "create_model", json.dumps({"lora_config": {"rank": 4, "seed": 1}}).encode()) == "done"
    assert service.forward(1, [datum(9, 1), datum(12, 2)]) == "proto"
    assert service.forward(2, [datum(9, 3)]) == "proto"
    assert service.step(3) == "done"
    assert service.forward(4, [datum(9, 4, target_tokens=np.full(9, 10**6))] * 3) == "failed"
    assert service.forward(5, [datum(9, 5, "importance_sampling")], "importance_sampling") == "proto"
    assert service.step(6, beta1=7) == "failed", "and the gradient waits"
    assert service.step(7) == "done"
    assert service.step(8) == "done", "without a gradient, which is no step"
    assert service.forward(9, [datum(9, 6, weights=np.full(9, 1e33, np.float32))]) == "proto"
    assert service.step(10) == "failed", "its norm is not finite, and the gradient is dropped"
    only_forward = message_of([datum(9, 7)], seq=11)
    only_forward.forward_only = True
    assert service.done(11, "forward_backward", only_forward.SerializeToString()) == "proto"
    assert service.done(12, "save_weights", b'{"path": "last"}') == "done"
    assert service.forward(13, [datum(9, 8), datum(9, 9)]) == "proto"
    service.close()
    StatusFile(run.status / "service.json").set(STOPPED)
    return run


@pytest.fixture
def run(tmp_path: Path, made: RunFolder) -> RunFolder:
    """A copy of it."""
    return RunFolder(path=shutil.copytree(made.path, tmp_path / "run"), run_id=made.run_id)


FATES = {"trained": 4, "refused": 3, "dropped": 1, "computed": 1, "waiting": 2}


def datums(run: RunFolder) -> dict[str, Any]:
    with open_service(run.path) as reader:
        (model,) = reader.models()
        return {one.id: one for one in reader.datums(model)}


def test_every_datum_has_one_fate(run: RunFolder) -> None:
    found = datums(run)
    assert Counter(one.fate for one in found.values()) == FATES
    assert {name: one.step for name, one in found.items() if one.step} == {"1/0": 1, "1/1": 1, "2/0": 1, "5/0": 2}
    assert "target_tokens" in found["4/0"].reason
    assert "norm" in found["9/0"].reason
    assert [found[name].num_tokens for name in ("1/0", "1/1")] == [10, 13]
    assert found["4/0"].digest == found["4/2"].digest != found["1/0"].digest
    log = CommandLog(run.path / "commands.sqlite")
    log.finish_session(MODEL.partition(":")[0], "ann")
    log.close()
    fates = Counter(one.fate for one in datums(run).values())
    assert (fates["ended"], fates["waiting"], fates["trained"]) == (2, 0, 4)


def test_what_is_done_again_counts_once(run: RunFolder, base: Base) -> None:
    """As after a kill between the log and the other files."""
    folder = run.path / "models" / NAME
    lines, found = (folder / "metrics.jsonl").read_text(), datums(run)
    (folder / "metrics.jsonl").write_text(lines[: len(lines) // 2])
    trace_path(folder, 2).unlink()
    service = Service(base, run)
    assert service.forward(14, [datum(9, 10)]) == "proto"
    assert service.step(15) == "done"
    service.close()
    again = (folder / "metrics.jsonl").read_text()
    assert again.startswith(lines)
    assert [line["progress/step"] for line in metrics(folder)] == [1, 2, 3]
    assert traced_steps(folder) == [1, 2, 3]
    now = datums(run)
    assert {name: now[name] for name in found if found[name].fate != "waiting"} == {
        name: one for name, one in found.items() if one.fate != "waiting"
    }
    assert {name for name, one in now.items() if one.step == 3} == {"13/0", "13/1", "14/0"}
    assert prove(run.path).exit_code() == 0


def test_status_and_view_know_the_service_and_its_models(run: RunFolder) -> None:
    status = run_status(run.path)
    assert (status.state, status.rollouts) == (STOPPED, FATES)
    (model,) = status.models or ()
    assert (model.name, model.tenant, model.steps, model.commands["failed"]) == (NAME, "ann", 2, 3)
    assert "ann" in text(status)
    runs = find_runs([run.path])
    assert list(runs) == [run.path.name, NAME]
    assert overview(NAME, runs[NAME])["traced"] == [1, 2]
    train = curves(runs[NAME])["train"]
    assert train["progress/step"] == [1, 2]
    assert train["rollout/num"] == [3, 1]
    (row,) = rollout(runs[NAME], 2, "5/0", evaluation=False)
    given = datum(9, 5, "importance_sampling")
    assert row["token_ids"][:-1] == given.model_input.to_ints()
    np.testing.assert_allclose(row["logprobs"][1:], given.loss_fn_inputs["logprobs"].to_numpy(), atol=1e-5)
    np.testing.assert_allclose(row["advantages"][1:], given.loss_fn_inputs["advantages"].to_numpy(), atol=1e-5)
    assert all(value < 0 for value in row["trainer_logprobs"][1:])


def test_prove_says_what_holds_and_finds_what_was_changed(run: RunFolder) -> None:
    write_digests(run.path, run_id=run.run_id)
    page = prove(run.path)
    parts = {part.name: part for part in page.parts}
    assert (page.broken, page.step) == ([], 2)
    assert parts["datums"].facts["states"] == FATES
    assert parts["gradients"].facts["steps"] == 2
    assert len(parts["checkpoints"].facts["files"]) == 1
    assert prove(run.path / "models" / NAME).exit_code() == 0
    (adapter,) = run.path.glob("checkpoints/*/weights/last/adapter_model.safetensors")
    for path in (adapter, run.path / "models" / NAME / "metrics.jsonl"):
        good = path.read_bytes()
        path.write_bytes(good[:-3] + b"???")
        assert any(path.name in one for one in prove(run.path).broken), path
        path.write_bytes(good)
    table = pq.read_table(trace_path(run.path / "models" / NAME, 2))
    pq.write_table(table, trace_path(run.path / "models" / NAME, 1))
    assert any("traces show just the datums" in one for one in prove(run.path).broken)


def test_a_steps_trace_shows_samples_before_it_that_it_has_not_trained(run: RunFolder, base: Base) -> None:
    service, log, sampler = Service(base, run), CommandLog(run.path / "commands.sqlite"), "0123456789abcdef:sample:0"
    version = log.new_version(Command(target=MODEL, seq=13, tenant="ann", kind="x", body=b""), "tinker://x")
    log.add_sampler(sampler, "ann", None, version)
    trained, asked = datum(9, 20), {"prompt": {"chunks": [{"tokens": [5, 6]}]}, "sampling_params": {"temperature": 0.5}}
    ids = [*trained.model_input.to_ints(), int(trained.loss_fn_inputs["target_tokens"].to_numpy()[-1])]
    answers = {0: [7, 8, 9], 1: ids[2:]}
    for seq, tokens in answers.items():
        body = json.dumps(asked if seq == 0 else {"prompt": {"chunks": [{"tokens": ids[:2]}]}}).encode()
        command = Command(target=sampler, seq=seq, tenant="ann", kind="asample", body=body)
        content = schema.SampleResponse()
        logprobs = np.full(len(tokens), -1.5, "<f4").tobytes()
        content.sequences.add(tokens=np.array(tokens, "<i4").tobytes(), logprobs=logprobs)
        assert log.add(command).result()
        log.finish(command, Answer(state="proto", content=content.SerializeToString())).result()
    assert service.forward(14, [trained]) == "proto"
    assert service.step(15) == "done"
    assert service.forward(16, [trained]) == "proto"
    assert service.step(17) == "done"
    service.close()
    log.close()
    folder = run.path / "models" / NAME
    rows = pq.read_table(trace_path(folder, 3)).to_pylist()
    assert [row["rollout"] for row in rows if row["trained"]] == ["13/0", "13/1", "14/0"]
    (sample,) = (row for row in rows if not row["trained"])
    assert (sample["rollout"], sample["token_ids"], sample["temperature"]) == ("sample:0:0/0", [5, 6, 7, 8, 9], 0.5)
    assert (sample["logprobs"], sample["versions"]) == ([0.0, 0.0, -1.5, -1.5, -1.5], [version] * 5)
    assert all(pq.read_table(trace_path(folder, 4))["trained"].to_pylist()), "what was sampled before step 3 is there"
    assert rollout(folder, 3, "sample:0:0/0", evaluation=False)
    assert not prove(run.path).broken


def test_any_checkpoint_is_exported_and_computes_as_it_did(run: RunFolder, tmp_path: Path) -> None:
    adapter = export(open_checkpoint(run.path, "weights/last"), output=tmp_path / "adapter")
    merged = export(
        open_checkpoint(run.path, f"tinker://{MODEL}/weights/last"), kind="merged", output=tmp_path / "whole"
    )
    assert {"adapter_model.safetensors", "proof.json", "README.md"} <= {path.name for path in adapter.iterdir()}
    assert any(merged.glob("model*.safetensors"))
    with pytest.raises(ValueError, match="which is 0 checkpoints"):
        open_checkpoint(run.path, "first")


def test_samples_of_the_very_weights_are_proved_or_refuse_the_step(run: RunFolder, base: Base) -> None:
    """By what the log has of a server's answer: right log-probabilities of one, wrong ones of another."""
    service, log = Service(base, run), CommandLog(run.path / "commands.sqlite")
    service.step(14)
    plain, answer = datum(9, 20), schema.ForwardBackwardOutput()
    only_forward = message_of([plain], seq=15)
    only_forward.forward_only = True
    command = service.send(15, "forward_backward", only_forward.SerializeToString())
    service.done(16, "save_weights", b"{}")
    answer.ParseFromString(log.answer(command.request_id, "ann").content)
    right = np.frombuffer(answer.loss_fn_outputs[0].fields["logprobs"].data, np.float32)
    figures: Any = dict.fromkeys(("max_abs", "mean_abs", "base_max_abs", "base_mean_abs"), 0.0)
    canary = CanaryFigures(**figures, tolerance=1e-4, measure="max_abs")
    ids = [*plain.model_input.to_ints(), int(plain.loss_fn_inputs["target_tokens"].to_numpy()[-1])]
    cases = (18, right[4:] - 0.5, "failed"), (21, right[4:], "done"), (24, right[4:], "done"), (27, right[4:], "failed")
    for seq, logprobs, end in cases:
        if seq < 24:  # the later ones are sampled by the version before the step
            version = log.new_version(replace(command, seq=seq - 1), "tinker://x")
            report = LoadReport(version=version, name="x", snapshot="x", canary=canary, load_s=0.0, canary_s=0.0)
            log.add_canary(version, report.to_json().decode())
            (adapter,) = run.path.glob("checkpoints/*/weights/000016/adapter_model.safetensors")
            (run.broadcasts / f"step_{version:06d}").mkdir()
            (run.broadcasts / f"step_{version:06d}" / adapter.name).write_bytes(adapter.read_bytes())
        service.done(seq - 1, "save_weights", b"{}")
        if seq == 27:  # a version that is not what sampled
            (other,) = run.path.glob("checkpoints/*/weights/000026/adapter_model.safetensors")
            (run.broadcasts / f"step_{version:06d}" / adapter.name).write_bytes(other.read_bytes())
        content = schema.SampleResponse()
        content.sequences.add(tokens=np.array(ids[5:], "<i4").tobytes(), logprobs=logprobs.astype("<f4").tobytes())
        samples = samples_of(ids[:5], content.SerializeToString(), version=version)
        ended = Answer(state="proto", content=b"")
        log.finish(replace(command, target="x:sample:0"), ended, samples=samples).result()
        changes: Any = {"target_tokens": np.array(ids[1:]), "advantages": np.array([0] * 4 + [1] * 5, np.float32)}
        given = datum(9, 20, "importance_sampling", logprobs=np.append(np.zeros(4, np.float32), logprobs), **changes)
        assert service.forward(seq, [given], "importance_sampling") == "proto"
        assert service.step(seq + 1) == end
    for seq in (19, 28):
        assert "spot proof" in log.answer(f"{MODEL}:{seq}", "ann").content.decode()
    service.close()
    log.close()
    with open_service(run.path) as reader:
        now, later = (step.receipt for step in reader.steps(MODEL)[-2:])
    assert (now.num_proved_now, len(now.spots)) == (5, 0)
    assert (later.num_proved_now, [(spot.rollout, spot.num_tokens) for spot in later.spots]) == (0, [("24/0", 5)])
    assert later.spots[0].max_abs < 1e-4

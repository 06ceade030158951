"""Self-play, real vLLM included: proposers and solvers with an adapter of their own each, and beside them the presets'
debate and critique, whose revisions run in the sandbox. The base is quantized, and each program has a copy of it."""

import json
from typing import Any

import numpy as np
import pytest
import yaml
from grpo.transport.codec import decode
from grpo.transport.records import Canary
from tokenizers import Tokenizer

from tests.e2e.runs import ROOT, Run, trained
from tests.environments.conftest import why_no_sandbox
from tests.support import options

pytestmark = pytest.mark.e2e

NUM_STEPS = 3
NAMES = '["solver", "proposer"]'
FOLDERS = {"solver": "", "proposer": "adapters/proposer"}
ARGS = {"num_solvers": 4, "proposer_prompt": "Ask a sum like {question}.", "solver_prompt": "Compute: {question}"}
PRESETS = ("debate", "critique")
ROLES = {"Compute:": 0, "Ask a sum like": 1}
"""Which adapter is whose, by how the prompt begins; whatever else is asked is for the first one."""
ADAPTERS: dict[str, object] = {
    "train.lora_adapters": NAMES,
    "train.qlora_bnb": "true",
    "orch.model.lora_adapters": NAMES,
    "infer.max_loras": "22",
    "orch.max_async_level": "0",
    "orch.batch_size": "32",
    "max_steps": NUM_STEPS,
    "orch.eval.eval_base_model": "false",
    "orch.eval.num_examples": "4",
}


def others() -> list[dict[str, Any]]:
    """The environments of the presets, with their arguments."""
    presets = [name for name in PRESETS if name != "critique" or why_no_sandbox() is None]
    files = [yaml.safe_load((ROOT / f"configs/{name}/run.yaml").read_text()) for name in presets]
    return [env for file in files for env in file["orch"]["env"]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`grpo configs/proposer_solver` with an adapter for each role, and with the environments of other presets."""
    play = {"id": "proposer-solver", "name": "play", "args": ARGS, "adapters": {"Proposer": "proposer"}}
    words = options(ADAPTERS | {"orch.env": json.dumps([play, *others()])})
    return trained("configs/proposer_solver", tmp_path_factory.mktemp("adapters") / "run", *words)


def file(run: Run, version: int, adapter: str, name: str) -> bytes:
    return (run.folder / f"broadcasts/step_{version:06d}" / FOLDERS[adapter] / name).read_bytes()


def weights(run: Run, adapter: str) -> list[bytes]:
    """By version."""
    return [file(run, version, adapter, "adapter_model.safetensors") for version in range(NUM_STEPS + 1)]


def test_both_adapters_are_trained_and_none_is_the_other(run: Run) -> None:
    for adapter in FOLDERS:
        assert len(set(weights(run, adapter))) == NUM_STEPS + 1
    assert not set(weights(run, "solver")) & set(weights(run, "proposer"))
    assert run.summary["rollouts_dropped"] == {}
    assert run.summary["rollouts_trained"] == run.summary["rollouts_issued"] == NUM_STEPS * 32
    tokens = [line for line in run.metrics if "policy/tokens" in line]
    assert len(tokens) == NUM_STEPS
    for line in tokens:
        own = [line[f"policy/adapter_tokens_{adapter}"] for adapter in FOLDERS]
        assert min(own) > 0
        assert sum(own) == line["policy/tokens"]
    for name in ("play", *(env["id"] for env in others())):
        assert any(f"reward/mean/{name}" in line for line in run.steps)


def test_each_adapter_of_each_version_was_proved_by_a_canary_of_its_own(run: Run) -> None:
    assert run.summary["versions_served"] == list(range(NUM_STEPS + 1))
    assert run.summary["canary_max_abs"] < 1e-4
    for version in range(1, NUM_STEPS + 1):
        canaries = [Canary.from_json(file(run, version, adapter, "canary.json")) for adapter in FOLDERS]
        assert {canary.version for canary in canaries} == {version}
        solver, proposer = (np.array(canary.logprobs) for canary in canaries)
        assert np.abs(solver - proposer).max() > 1e-3  # so that the proof of one is none of the other


def test_each_role_is_sampled_and_trained_by_its_own_adapter(run: Run) -> None:
    """The largest mismatch of all tokens at lag 0, those of both roles, is that of one and the same adapter."""
    worst = [line["policy/mismatch_max_lag0"] for line in run.metrics if "policy/mismatch_max_lag0" in line]
    assert len(worst) == NUM_STEPS
    assert max(worst) < 1e-4
    tokenizer = Tokenizer.from_file(str(ROOT / "configs/tiny/model/tokenizer.json"))
    seen: set[int] = set()
    for step in range(1, NUM_STEPS + 1):
        for batch in decode((run.folder / f"batches/step_{step:06d}/rank_0.msgpack").read_bytes()):
            assert batch.adapters is not None
            for start, length, adapter in zip(batch.starts, batch.sequence_lengths, batch.adapters, strict=True):
                text = tokenizer.decode(batch.token_ids[start : start + length].tolist(), skip_special_tokens=False)
                assert ([own for begin, own in ROLES.items() if begin in text] or [0]) == [adapter], text
                seen.add(int(adapter))
    assert seen == {0, 1}

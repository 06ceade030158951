"""One server with two engines (`dp: 2`): each of them proves each version, and both answer."""

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from grpo.transport.run import create_run

from tests.e2e.plain_server import MODEL, Live
from tests.infer.published import Publisher, logprobs_of, reference
from tests.infer.server_process import running

pytestmark = pytest.mark.e2e

SERVED = re.compile(r'vllm:request_success_total\{engine="(\d)",finished_reason="(?:stop|length)".*\} ([\d.]+)')


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("dp")
    publisher = Publisher(run=create_run(folder / "run"), model_dir=MODEL)
    arguments = {"model": MODEL, "output_dir": publisher.run.path, "max_lora_rank": 8, "max_model_len": 512, "dp": 2}
    with running(log=folder / "infer.log", vllm=json.dumps({"max_num_seqs": 64}), **arguments) as server:
        yield Live(server=server, publisher=publisher)


@pytest.fixture
def served(live: Live) -> Callable[[], dict[str, int]]:
    """Requests that each engine has answered."""

    def counts() -> dict[str, int]:
        found = {"0": 0, "1": 0}
        for engine, number in SERVED.findall(live.server.get("/metrics").text):
            found[engine] += int(float(number))
        return found

    return counts


def test_each_engine_proves_each_version_and_answers_with_it(live: Live, served: Callable[[], dict[str, int]]) -> None:
    for version in (1, 2):
        before = served()
        live.publisher.publish(version, live.publisher.files(version=version, seed=version, scale=0.1 * version))
        assert live.load(version).status_code == 200
        proofs = {engine: after - before[engine] for engine, after in served().items()}
        assert proofs == dict.fromkeys("01", 2 if version == 1 else 1), "the first load scores the base as well"
    before = served()
    ids = list(range(40, 80))
    body = {"version": 2, "token_ids": ids, "temperature": 1.0}
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: live.server.answer("/policy/score", **body)["logprobs"], range(16)))
    right = logprobs_of(reference(MODEL, live.publisher.run.broadcasts / "step_000002"), ids)
    assert all(abs(x - y) < 1e-4 for answer in answers for x, y in zip(answer, right, strict=True))
    assert all(after > before[engine] for engine, after in served().items()), "both are asked"

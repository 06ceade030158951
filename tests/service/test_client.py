"""The stock client against a service without sampling, as people's scripts use it."""

import io
import json
import stat
import time
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from safetensors.numpy import load
from tinker import types

from tests.service.data import datum, message_of
from tests.service.running import Running, done

pytestmark = [
    pytest.mark.service,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::ResourceWarning"),
]


def waited(holds: Callable[[], bool]) -> None:
    """Returns once it holds."""
    deadline_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def step(client: Any, seed: int, **adam: float) -> tuple[Any, Any]:
    """What is in flight for one step of random data."""
    forward = client.forward_backward([datum(9, seed), datum(14, seed + 1)], "cross_entropy")
    return forward, client.optim_step(types.AdamParams(**({"learning_rate": 1e-2} | adam)))


def weights_of(service: Running, path: str, tenant: str = "default") -> dict[str, np.ndarray[Any, Any]]:
    """The adapter of a checkpoint, downloaded by the addresses that the service gives."""
    model_id, rest = path.removeprefix("tinker://").split("/", 1)
    url = f"{service.about['base_url']}/api/v1/training_runs/{model_id}/checkpoints/{rest}/external_weights_urls"
    urls = httpx.get(url, headers={"X-API-Key": service.about["api_keys"][tenant]}).raise_for_status().json()["urls"]
    assert json.loads(httpx.get(urls["adapter_config.json"]).content)["peft_type"] == "LORA"
    return load(httpx.get(urls["adapter_model.safetensors"]).raise_for_status().content)


def test_where_it_is_and_its_keys_are_for_this_user_alone(service: Running) -> None:
    file = service.folder / "service.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert set(json.loads(file.read_text())) >= {"base_url", "api_key"}
    assert service.about["api_key"].startswith("tml-")


def test_a_supervised_loop_learns(service: Running) -> None:
    client = service.training_client()
    info = client.get_info()
    assert (info.model_name, info.lora_rank, info.is_lora) == (service.model, 4, True)
    futures = [step(client, 5) for _ in range(8)]
    losses = [done(forward).metrics["loss:sum"] for forward, _ in futures]
    assert losses[-1] < 0.8 * losses[0]
    output = done(futures[0][0]).loss_fn_outputs
    assert [len(one["logprobs"].data) for one in output] == [9, 14]
    assert all(done(optim).metrics["grad_norm"] > 0 for _, optim in futures)


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo", "cispo"])
def test_policy_losses_make_good_answers_likelier(service: Running, loss_fn: str) -> None:
    client = service.training_client()
    plain = [datum(9, 1), datum(9, 2)]
    sampled = [one["logprobs"].to_numpy() for one in done(client.forward(plain, "cross_entropy")).loss_fn_outputs]
    data = [
        datum(9, seed, loss_fn, logprobs=logprobs, advantages=np.full(9, sign, np.float32))
        for seed, logprobs, sign in zip((1, 2), sampled, (1.0, -1.0), strict=True)
    ]
    first = done(client.forward_backward(data, loss_fn))
    # Every ratio is 1 before the first step; cispo's value is of log-probabilities.
    expected = -(sampled[0].sum() - sampled[1].sum()) if loss_fn == "cispo" else 0
    assert first.metrics["loss:sum"] == pytest.approx(expected, abs=1e-4)
    done(client.optim_step(types.AdamParams(learning_rate=1e-3)))
    after = [one["logprobs"].to_numpy().sum() for one in done(client.forward(plain, "cross_entropy")).loss_fn_outputs]
    assert after[0] > sampled[0].sum()
    assert after[1] < sampled[1].sum()


def test_a_loss_of_ones_own_has_its_gradient(service: Running) -> None:
    """The client computes it from forward's log-probabilities, and sends weights that have its gradient."""

    def squared(data: Any, logprobs: Any) -> Any:
        loss = sum((one**2).sum() for one in logprobs)
        return loss, {"mine": float(loss.detach())}

    client = service.training_client()
    before = done(client.forward_backward_custom([datum(9, 1)], squared)).metrics["mine"]
    done(client.optim_step(types.AdamParams(learning_rate=1e-3)))
    assert done(client.forward_backward_custom([datum(9, 1)], squared)).metrics["mine"] < before


def test_state_is_saved_loaded_listed_and_downloaded(service: Running) -> None:
    client = service.training_client(rank=8)
    done(step(client, 1)[1])
    path = done(client.save_state("first")).path
    assert path == f"tinker://{client.model_id}/weights/first"
    with pytest.raises(tinker.TinkerError, match="there already"):
        done(client.save_state("first"))
    weights = weights_of(service, path)
    assert any(tensor.any() for name, tensor in weights.items() if "lora_B" in name)

    resumed = done(service.client().create_training_client_from_state_with_optimizer(path))
    assert resumed.get_info().lora_rank == 8
    for one in (client, resumed):
        done(step(one, 3)[1])
    ends = [weights_of(service, done(one.save_state("end")).path) for one in (client, resumed)]
    assert all(np.array_equal(ends[0][name], ends[1][name]) for name in ends[0])
    assert any(not np.array_equal(ends[0][name], weights[name]) for name in weights)

    rest = service.client().create_rest_client()
    listed = [one.tinker_path for one in done(rest.list_checkpoints(client.model_id)).checkpoints]
    assert listed == [path, f"tinker://{client.model_id}/weights/end"]
    assert client.model_id in [one.training_run_id for one in done(rest.list_training_runs(limit=100)).training_runs]
    session = client.model_id.partition(":")[0]
    assert done(rest.get_session(session)).training_run_ids == [client.model_id]


def test_checkpoints_are_deleted_and_expire(service: Running) -> None:
    client = service.training_client()
    rest = service.client().create_rest_client()

    def listed() -> list[str]:
        return [one.tinker_path for one in done(rest.list_checkpoints(client.model_id)).checkpoints]

    paths = [done(client.save_state(name, ttl_seconds=ttl)).path for name, ttl in (("a", None), ("b", 3600), ("c", 1))]
    folders = [service.folder / "checkpoints" / path.removeprefix("tinker://") for path in paths]
    waited(lambda: listed() == paths[:2])
    waited(lambda: not folders[2].exists())
    assert [one.expires_at is None for one in done(rest.list_checkpoints(client.model_id)).checkpoints] == [True, False]
    done(rest.delete_checkpoint_from_tinker_path(paths[0]))
    assert listed() == [paths[1]]
    waited(lambda: not folders[0].exists())
    with pytest.raises(tinker.TinkerError, match="no such checkpoint"):
        done(service.client().create_training_client_from_state(paths[0]))
    done(rest.set_checkpoint_ttl_from_tinker_path(paths[1], ttl_seconds=None))
    assert done(rest.list_checkpoints(client.model_id)).checkpoints[0].expires_at is None
    with pytest.raises(tinker.TinkerError, match="ttl_seconds"):
        done(rest.set_checkpoint_ttl_from_tinker_path(paths[1], ttl_seconds=0))
    assert paths[0] not in [one.tinker_path for one in done(rest.list_user_checkpoints()).checkpoints]
    assert done(client.save_state("a")).path == paths[0], "the name is free again"
    with pytest.raises(tinker.TinkerError, match="no such checkpoint"):
        done(service.client("other").create_rest_client().delete_checkpoint_from_tinker_path(paths[1]))


def test_a_model_that_is_unloaded_takes_no_more_commands(service: Running) -> None:
    client = service.training_client()
    in_flight = client.forward_backward([datum(9, 1)], "cross_entropy")
    done(in_flight)
    path = done(client.save_state("kept")).path
    futures = [service.post("unload_model", json={"model_id": client.model_id}) for _ in range(2)]
    assert futures[0].json() == futures[1].json()
    answer = service.post("retrieve_future", json=futures[0].json()).json()
    assert answer == {"type": "unload_model", "model_id": client.model_id}
    with pytest.raises(tinker.TinkerError, match="unloaded"):
        done(client.optim_step(types.AdamParams(learning_rate=1e-2)))
    assert service.post("unload_model", json={"model_id": client.model_id}, tenant="other").status_code == 404
    assert done(service.client().create_training_client_from_state(path)).get_info().lora_rank == 4


def test_a_tenant_lists_its_sessions(service: Running) -> None:
    session = service.training_client().model_id.partition(":")[0]
    assert session in done(service.client().create_rest_client().list_sessions(limit=1000)).sessions
    assert session not in done(service.client("other").create_rest_client().list_sessions(limit=1000)).sessions


def test_a_session_that_is_finished_makes_no_more_models(service: Running) -> None:
    session = service.training_client().model_id.partition(":")[0]
    assert service.post(f"sessions/{session}/finish", json={}, tenant="other").status_code == 404
    assert service.post(f"sessions/{session}/finish", json={"reason": {"type": "success"}}).status_code == 200
    asked = {"session_id": session, "model_seq_id": 7, "base_model": service.model, "lora_config": {"rank": 4}}
    assert service.post("create_model", json=asked).status_code == 410
    assert service.post("session_heartbeat", json={"session_id": session}).status_code == 410


def test_layers_can_be_chosen(service: Running) -> None:
    client = service.training_client(train_mlp=False, train_unembed=False)
    names = weights_of(service, done(client.save_state("a")).path)
    assert names
    assert all("self_attn" in name for name in names)


@pytest.mark.parametrize(
    ("bad", "loss_fn", "named"),
    [
        ({"weights": np.ones(8, np.float32)}, "cross_entropy", "weights has 8 values"),
        ({"target_tokens": np.full(9, 64, np.int64)}, "cross_entropy", "target_tokens has the id 64"),
        ({"target_tokens": np.full(9, -1, np.int64)}, "cross_entropy", "target_tokens has the id -1"),
        ({"target_tokens": np.ones(9, np.float32)}, "cross_entropy", "target_tokens has the type float32"),
        ({"weights": np.full(9, np.nan, np.float32)}, "cross_entropy", "weights has the value nan"),
        ({"mask": np.ones(9, np.float32)}, "cross_entropy", "mask"),
        ({}, "ppo", "loss_fn_inputs"),
        ({}, "stable_reinforce", "stable_reinforce"),
    ],
)
def test_a_mistake_costs_its_own_future_alone(service: Running, bad: dict[str, Any], loss_fn: str, named: str) -> None:
    client = service.training_client()
    good, wrong = datum(9, 1), datum(9, 2, **bad)
    first = client.forward_backward([good], "cross_entropy")
    refused = client.forward_backward([good, wrong], loss_fn)
    optim = client.optim_step(types.AdamParams(learning_rate=1e-2))
    with pytest.raises(tinker.RequestFailedError, match=named):
        done(refused)
    alone = service.training_client()
    done(alone.forward_backward([good], "cross_entropy"))
    assert done(optim).metrics == done(alone.optim_step(types.AdamParams(learning_rate=1e-2))).metrics
    assert done(first).metrics["loss:sum"] > 0


def test_other_optimizers_and_too_high_ranks_are_refused_by_name(service: Running) -> None:
    with pytest.raises(tinker.TinkerError, match="at most 32"):
        service.training_client(rank=64)
    created = service.post("create_session", json={"tags": [], "user_metadata": {}, "sdk_version": "0"}).json()
    asked = {**created, "model_seq_id": 0, "base_model": service.model, "lora_config": {"rank": 4}}
    future = service.post("create_model", json={**asked, "optimizer_config": {"type": "dimuon"}}).json()
    assert "dimuon" in service.post("retrieve_future", json=future).json()["error"]
    assert "another" in service.post("create_model", json={**asked, "base_model": "another"}).json()["detail"]


def test_a_tenant_sees_and_names_nothing_of_another(service: Running) -> None:
    client = service.training_client()
    path = done(client.save_state("mine")).path
    session = client.model_id.partition(":")[0]
    foreign: list[tuple[str, dict[str, Any]]] = [
        ("get_info", {"model_id": client.model_id}),
        ("optim_step", {"model_id": client.model_id, "seq_id": 2, "adam_params": {}}),
        ("save_weights", {"model_id": client.model_id, "seq_id": 2}),
        ("load_weights", {"path": path, "optimizer": False, "session_id": session, "model_seq_id": 9}),
        ("weights_info", {"tinker_path": path}),
        ("session_heartbeat", {"session_id": session}),
        ("create_model", {"session_id": session, "model_seq_id": 5, "base_model": service.model, "lora_config": {}}),
        ("retrieve_future", {"request_id": f"{client.model_id}:1"}),
    ]
    for route, asked in foreign:
        assert service.post(route, json=asked, tenant="other").status_code == 404, route
    data = message_of([datum(9, 1)])
    data.model_id = client.model_id
    assert service.post("forward_backward", content=data.SerializeToString(), tenant="other").status_code == 404
    rest = service.client("other").create_rest_client()
    assert client.model_id not in [
        one.training_run_id for one in done(rest.list_training_runs(limit=100)).training_runs
    ]
    assert service.post("get_info", json={"model_id": client.model_id}, tenant=None).status_code == 401
    headers = {"X-API-Key": service.about["api_key"][:-1]}
    assert service.post("get_info", json={"model_id": client.model_id}, tenant=None, headers=headers).status_code == 401
    url = f"{service.about['base_url']}/files/{client.model_id}/weights/mine/adapter_config.json"
    assert httpx.get(url, params={"expires": "9999999999", "signature": "0" * 64}).status_code == 403


def test_asking_twice_is_asking_once(service: Running) -> None:
    """A client whose connection broke sends the same number again."""
    client = service.training_client()
    data = message_of([datum(9, 1)])
    data.model_id = client.model_id
    futures = [service.post("forward_backward", content=data.SerializeToString()).json() for _ in range(3)]
    assert futures[0] == futures[1] == futures[2]
    answers = {service.post("retrieve_future", json=future).content for future in futures}
    assert len(answers) == 1
    step_request = {"model_id": client.model_id, "seq_id": 2, "adam_params": {"learning_rate": 0.01}}
    norms = [service.post("retrieve_future", json=service.post("optim_step", json=step_request).json()).json()] * 2
    alone = service.training_client()
    done(alone.forward_backward([datum(9, 1)], "cross_entropy"))
    assert norms == [{"metrics": done(alone.optim_step(types.AdamParams(learning_rate=0.01))).metrics}] * 2
    other = service.post("optim_step", json={**step_request, "adam_params": {"learning_rate": 0.02}})
    assert other.status_code == 400
    assert "another command" in other.json()["detail"]


def test_what_is_malformed_or_not_served_is_refused_at_once(service: Running) -> None:
    client = service.training_client()
    body = message_of([datum(9, 1)])
    body.model_id = client.model_id
    whole = body.SerializeToString()
    draw = np.random.default_rng(0)
    for length in draw.integers(1, len(whole) - 1, 40).tolist():  # truncated: no protobuf, or one that names no model
        answer = service.post("forward_backward", content=whole[:length])
        assert answer.status_code in (200, 400, 404)
        if answer.status_code == 200:
            assert "error" in service.post("retrieve_future", json=answer.json()).json()
    assert service.post("forward_backward", content=b"\x28\xb5\x2f\xfd", headers={"Content-Encoding": "zstd"}).is_error
    assert service.post("forward_backward", content=whole, headers={"Content-Encoding": "br"}).status_code == 415
    assert service.post("forward_backward", content=io.BytesIO(bytes(65 << 20)).read()).status_code == 413
    for wrong in (b"", b"[]", b"{", b'{"model_id": 3}', b'{"model_id": "x", "seq_id": true}', b"[" * 100_000):
        assert 400 <= service.post("optim_step", content=wrong).status_code < 500
    for route, named in (("billing/usage/events", "billing"), ("create_custom_loss", "loss"), ("nothing", "nothing")):
        answer = service.post(route, json={})
        assert answer.status_code == 404
        assert named in answer.json()["detail"]
    assert service.is_up()
    assert service.training_client().get_info().lora_rank == 4

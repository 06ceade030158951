"""What the engine says to vLLM, with a stand-in for its client; answers that follow the newest version; vLLM's own
parser for what passes through."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from grpo.configs.infer import VLLM_REFUSED, InferSettings
from grpo.infer.arguments import ArgumentError, device_defaults, device_of, make_args, served_rank
from grpo.infer.engine import Adapter, Engine, EngineEnded, EngineError
from grpo.infer.following import continued_seed, follow
from grpo.transport.http import Choice, GenerateRequest
from grpo.transport.run import create_run
from grpo.transport.weights.nccl import Announcement, Rendezvous

from tests.infer.versions_fakes import FakeEngine, publish, table_of
from tests.transport.samples import skip_before_nccl

MODEL = Path(__file__).parents[2] / "configs/quickstart/model"
ADAPTER = Adapter(name="policy-v3", key=7, path="/", noisy=True)
ANNOUNCEMENT = Announcement(
    rendezvous=Rendezvous(host="trainer", port=29501, world_size=3),
    session="first",
    names=("a.weight", "b.weight"),
    dtypes=("float32", "bfloat16"),
    shapes=((2, 3), (4,)),
)


def wanted(**changes: Any) -> GenerateRequest:
    fields = {"version": 3, "prompt_token_ids": [1, 2], "max_tokens": 8, "temperature": 0.7, "stop_token_ids": [9]}
    return GenerateRequest(**(fields | {"cache_salt": "s"} | changes))


class FakeClient:
    """Notes every call. Requests run until they are aborted, of which the first two are lost."""

    def __init__(self, *, fails: str = "", unanswered: str = "") -> None:
        self.calls: list[str] = []
        self.said: dict[str, Any] = {}
        self.errored = False
        self.asked = asyncio.Event()
        self.prompts: list[Any] = []
        self.params: list[Any] = []
        self.running: dict[str, asyncio.Future[str]] = {}
        self.lost = 2
        self.model_config = SimpleNamespace(max_model_len=64, get_vocab_size=lambda: 8, dtype=torch.float32)
        self._fails, self._unanswered = fails, unanswered

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **kwargs: Any) -> list[int]:
            said = str(args[0]) if name == "collective_rpc" else name
            self.calls.append(said)
            self.said[said] = (args, kwargs)
            if said == self._unanswered:
                self.asked.set()
                await asyncio.Future()
            if said == self._fails:
                raise RuntimeError("out of memory")
            return [5]

        return call

    async def generate(self, prompt: Any, params: Any, *, request_id: str, **_: Any) -> AsyncIterator[Any]:
        self.prompts.append(prompt)
        self.params.append(params)
        self.asked.set()
        self.running[request_id] = asyncio.get_running_loop().create_future()
        reason = await self.running[request_id]
        logprobs = SimpleNamespace(logprobs=[-0.5, -0.625])
        yield SimpleNamespace(
            outputs=[SimpleNamespace(index=0, token_ids=[5, 6], logprobs=logprobs, finish_reason=reason)]
        )

    async def abort(self, names: list[str]) -> None:
        self.lost -= 1
        for name in names if self.lost < 0 else ():
            if not self.running[name].done():
                self.running[name].set_result("abort")


def engine_of(client: FakeClient) -> Engine:
    return Engine(client, device="cuda", model_dir=Path("base"))


# --- weights ----------------------------------------------------------------------------------------------------------


async def test_weights_are_received_while_the_engine_is_paused() -> None:
    skip_before_nccl()
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferInitInfo, NCCLWeightTransferUpdateInfo

    client = FakeClient()
    engine = engine_of(client)
    await engine.join_trainer(ANNOUNCEMENT.rendezvous, rank_offset=2)
    await engine.receive_weights(ANNOUNCEMENT)
    update = ["start_weight_update", "update_weights", "finish_weight_update", "resume_generation"]
    join = ["pause_generation", "init_weight_transfer_engine", "resume_generation"]
    assert client.calls == [*join, "pause_generation", *update]
    assert client.said["pause_generation"][1] == {"mode": "wait", "clear_cache": True}
    joined = NCCLWeightTransferInitInfo(**client.said["init_weight_transfer_engine"][0][0].init_info)
    told = {"master_address": "trainer", "master_port": 29501, "rank_offset": 2, "world_size": 3}
    assert told.items() <= vars(joined).items()
    sent = NCCLWeightTransferUpdateInfo(**client.said["update_weights"][0][0].update_info)
    assert (sent.names, sent.shapes) == (["a.weight", "b.weight"], [[2, 3], [4]])


@pytest.mark.parametrize("fails", ["update_weights", "load_policy_weights"])
async def test_after_weights_that_cannot_be_loaded_the_engine_goes_on(fails: str) -> None:
    client = FakeClient(fails=fails)
    engine = engine_of(client)
    on_disk = fails == "load_policy_weights"
    with pytest.raises(EngineError):
        await (engine.load_weights(None) if on_disk else engine.receive_weights(ANNOUNCEMENT))
    assert client.calls[-1] == "resume_generation"


async def test_a_sleeping_engine_is_woken_once_and_sleeps_on_where_that_fails() -> None:
    client = FakeClient(fails="wake_up")
    engine = engine_of(client)
    await engine.wake()
    await engine.sleep()
    assert (engine.asleep, client.said["sleep"][1]) == (True, {"level": 1, "mode": "wait"})
    with pytest.raises(EngineError):
        await engine.wake()
    assert engine.asleep
    client._fails = ""
    await engine.wake()
    await engine.wake()
    assert client.calls == ["sleep", "wake_up", "wake_up"]


# --- its end ----------------------------------------------------------------------------------------------------------

CALLS: dict[str, Callable[[Engine], Awaitable[object]]] = {
    "add_lora": lambda engine: engine.add_adapter(ADAPTER),
    "remove_lora": lambda engine: engine.remove_adapter(ADAPTER),
    "pause_generation": lambda engine: engine.load_weights(None),
    "generate": lambda engine: engine.generate(wanted(), ADAPTER),
}


@pytest.mark.parametrize("name", CALLS)
async def test_whoever_waits_for_an_engine_that_dies_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo.infer.engine.ENGINE_CHECK_S", 0.01)
    client = FakeClient(unanswered=name)
    engine = engine_of(client)
    watch = asyncio.create_task(engine.watch())
    waiting = asyncio.create_task(engine.or_end(CALLS[name](engine)))
    async with asyncio.timeout(60):
        await client.asked.wait()
        client.errored = True
        with pytest.raises(EngineEnded):
            await waiting
        await watch
    assert engine.ended.is_set()


# --- requests ---------------------------------------------------------------------------------------------------------


async def test_vllm_is_asked_for_all_that_the_request_says() -> None:
    asked = {"n": 1, "max_tokens": 7, "min_tokens": 2, "temperature": 0.7, "seed": 11, "stop_token_ids": [5, 4]}
    client = FakeClient()
    answering = asyncio.create_task(engine_of(client).generate(wanted(**asked), ADAPTER))
    await client.asked.wait()
    await asyncio.sleep(0)
    client.running["policy-1"].set_result("stop")
    [answer] = await answering
    assert (answer.token_ids.tolist(), answer.logprobs.tolist(), answer.stop_reason) == ([5, 6], [-0.5, -0.625], 6)
    [prompt], [params] = client.prompts, client.params
    assert prompt["prompt_token_ids"] == [1, 2]
    assert {name: getattr(params, name) for name in asked} == asked
    assert (params.top_p, params.top_k, params.logprobs, params.detokenize) == (1.0, 0, 0, False)


# --- requests that follow ---------------------------------------------------------------------------------------------


async def test_requests_of_vllms_own_routes_count_for_their_adapter_as_long_as_they_run() -> None:
    client, counted = FakeClient(), list[int]()
    engine = engine_of(client)

    @asynccontextmanager
    async def using(key: int) -> AsyncIterator[None]:
        counted.append(key)
        yield
        counted.remove(key)

    engine.count_requests(using)
    chat = client.generate([1], None, request_id="chat", lora_request=SimpleNamespace(lora_int_id=7))
    answering = asyncio.ensure_future(anext(chat))
    await client.asked.wait()
    assert counted == [7]
    client.running["chat"].set_result("stop")
    assert (await answering).outputs[0].token_ids == [5, 6]
    assert [output async for output in chat] == counted == []
    client.asked.clear()
    ours = asyncio.create_task(engine.generate(wanted(), ADAPTER))
    await client.asked.wait()
    assert counted == [], "ours are counted by the table"
    ours.cancel()
    await asyncio.gather(ours, return_exceptions=True)


async def test_requests_in_flight_end_where_they_stand_when_they_are_superseded() -> None:
    client, superseded = FakeClient(), asyncio.Event()
    asked = asyncio.create_task(engine_of(client).generate_until([wanted(), wanted()], ADAPTER, superseded))
    while len(client.running) < 2:  # noqa: ASYNC110 - the fake tells nobody
        await asyncio.sleep(0)
    client.running["policy-2"].set_result("length")
    superseded.set()
    first, second = await asked
    assert (first.token_ids.tolist(), first.finish_reason) == ([5, 6], "superseded")
    assert first.logprobs.tolist() == [-0.5, -0.625]
    assert second.finish_reason == "length"
    # The prefix cache keeps what each adapter has computed apart.
    assert [prompt["cache_salt"] for prompt in client.prompts] == ["policy-v3/7/s"] * 2


async def test_an_answer_that_vllm_cuts_unasked_is_an_error_and_a_cancelled_one_leaves_nothing_running() -> None:
    for cut in (True, False):
        client = FakeClient()
        asked = asyncio.create_task(engine_of(client).generate_until([wanted()], ADAPTER, asyncio.Event()))
        await client.asked.wait()
        await asyncio.sleep(0)
        if cut:
            client.running["policy-1"].set_result("abort")
        else:
            asked.cancel()
        with pytest.raises(EngineEnded if cut else asyncio.CancelledError):
            await asked
        assert client.running["policy-1"].done()


class Sampler(FakeEngine):
    """Answers with these parts, a list for each call, and lets another version become live after each."""

    def __init__(self, parts: list[list[Choice]], publish_next: Callable[[], Awaitable[object]]) -> None:
        super().__init__()
        self.parts, self.publish_next = parts, publish_next
        self.requests: list[list[GenerateRequest]] = []

    async def generate_until(self, requests: list[GenerateRequest], adapter: Adapter, superseded: asyncio.Event) -> Any:
        self.requests.append(requests)
        await self.publish_next()
        assert superseded.is_set()
        return self.parts.pop(0)


def part(ids: list[int], ends: str) -> Choice:
    stop = ids[-1] if ends == "stop" else None
    return Choice(token_ids=ids, logprobs=[-i / 8 for i in ids], finish_reason=ends, stop_reason=stop)


async def test_answers_go_on_under_each_version_for_the_rest_of_their_tokens(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run")
    version = 3

    async def publish_next() -> None:
        nonlocal version
        publish(run, version := version + 1)
        await table.load(run_id=run.run_id, version=version)

    engine = Sampler(
        [
            [part([3], "superseded"), part([], "superseded"), part([8, 9], "stop")],
            [part([4, 5], "superseded"), part([7] * 8, "superseded")],
            [part([6, 9], "stop")],
        ],
        publish_next,
    )
    table = table_of(engine, run)
    publish(run, 3)
    await table.load(run_id=run.run_id, version=3)
    fake: Any = engine
    first, second, third = await follow(fake, table, wanted(n=3, seed=5, min_tokens=2, follow=True))
    assert (first.token_ids.tolist(), first.finish_reason) == ([3, 4, 5, 6, 9], "stop")
    assert first.versions == ((3, 1), (4, 2), (5, 2))
    assert (-8 * first.logprobs).tolist() == [3, 4, 5, 6, 9]
    assert (second.token_ids.tolist(), second.versions, second.finish_reason) == ([7] * 8, ((4, 8),), "length")
    assert (third.token_ids.tolist(), third.versions, third.stop_reason) == ([8, 9], ((3, 2),), 9)
    begun, continued, last = engine.requests
    assert [(one.n, one.seed) for one in begun] == [(1, 5), (1, 6), (1, 7)]
    assert (continued[1].prompt_token_ids, continued[1].seed) == ([1, 2], 6), "nothing was sampled of it yet"
    assert (last[0].prompt_token_ids, last[0].max_tokens, last[0].min_tokens) == ([1, 2, 3, 4, 5], 5, 0)
    assert last[0].seed == continued_seed(5, 5) != continued[0].seed == continued_seed(5, 4)


# --- vLLM's own arguments ---------------------------------------------------------------------------------------------


def arguments(**settings: Any) -> Any:
    return make_args(InferSettings(model="m", **settings), model_dir=MODEL, device="cpu")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_vllms_own_arguments_pass_through_its_parser_and_what_it_does_not_know_is_refused_by_name() -> None:
    drafting = {"method": "ngram", "num_speculative_tokens": 3}
    passed = {"max_num_seqs": 4, "speculative_config": drafting, "enable_chunked_prefill": False, "stream_interval": 2}
    args = arguments(vllm=passed)
    assert (args.max_num_seqs, args.enable_chunked_prefill, args.stream_interval) == (4, False, 2)
    assert args.speculative_config == drafting
    assert (args.max_num_batched_tokens, args.enable_lora, args.logprobs_mode) == (2048, True, "processed_logprobs")
    assert arguments().max_num_seqs == 256
    assert arguments(chat_template_kwargs={"enable_thinking": False}).default_chat_template_kwargs == {
        "enable_thinking": False
    }
    with pytest.raises(ArgumentError, match="max-num-sqs"):
        arguments(vllm={"max_num_sqs": 4})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_cache_on_a_cpu_holds_two_of_the_longest_sequences() -> None:
    assert arguments().kv_cache_memory_bytes == 128 * 2**20  # the model's 512 tokens are 1 MiB
    # Keys and values, layers, heads, their size, float32: 2 KiB a token.
    settings = InferSettings(model="m", max_model_len=2**16)
    assert device_defaults(settings, MODEL, "cpu")["kv_cache_memory_bytes"] == 2 * 2**16 * 2 * 4 * 2 * 32 * 4
    assert arguments(vllm={"kv_cache_memory_bytes": 2**24}).kv_cache_memory_bytes == 2**24


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_on_a_cpu_blocks_are_small_where_all_layers_attend(tmp_path: Path) -> None:
    assert arguments().block_size == 32
    config = json.loads((MODEL / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"layer_types": ["mamba", "attention"]}))
    assert "block_size" not in device_defaults(InferSettings(model="m"), tmp_path, "cpu")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_on_a_gpu_kernels_are_launched_for_the_adapters_in_use() -> None:
    def specialized(**settings: Any) -> bool:
        args = make_args(InferSettings(model="m", **settings), model_dir=MODEL, device="cuda")
        return bool(args.specialize_active_lora)

    assert specialized()
    assert not specialized(vllm={"specialize_active_lora": False})
    assert not specialized(enable_lora=False)
    assert not arguments().specialize_active_lora


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("shorter", sorted({name[:-1] for name in VLLM_REFUSED} - VLLM_REFUSED.keys()))
def test_no_refused_argument_passes_as_its_abbreviation(shorter: str) -> None:
    with pytest.raises(ArgumentError, match=f"unrecognized arguments: --{shorter.replace('_', '-')}"):
        arguments(vllm={shorter: {"a": "b"}})


def test_nccl_is_refused_where_vllm_has_no_trainer_side_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = InferSettings(model="m", weight_broadcast_type="nccl")
    with pytest.raises(ArgumentError, match="cpu device"):
        device_of(settings)
    monkeypatch.setattr("vllm.platforms.current_platform", SimpleNamespace(is_cpu=lambda: False))
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.nccl_engine", ModuleType("as_in_0_26"))
    with pytest.raises(ArgumentError, match=r"0\.28 or later"):
        device_of(settings)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_rank_is_rounded_up_to_one_that_vllm_knows() -> None:
    assert [served_rank(InferSettings(model="m", max_lora_rank=rank)) for rank in (None, 9, 32)] == [16, 16, 32]
    with pytest.raises(ArgumentError, match="512"):
        arguments(max_lora_rank=513)

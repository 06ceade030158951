"""Giving back a KV cache's memory: on a CPU for real, on a GPU with stand-ins for vLLM's worker."""

import contextlib
import importlib.util
import mmap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from infer.sharing import give_back_freed_memory

from configs.infer import InferSettings
from infer.rest import RestError
from infer.resting import DeviceCache, HostCache, OnlyCache, cache_of, kv_storages
from infer.vllm_api import Engine, EngineError, _arguments

MEBIBYTE = 2**20


def worker_with(caches: Any, layers: dict[str, Any], *, device: str = "cpu", **more: Any) -> Any:
    context = SimpleNamespace(static_forward_context=layers)

    def initialize_kv_cache(config: object, kv_cache_allocation_context: object = None) -> None: ...

    runner = SimpleNamespace(kv_caches=caches, initialize_kv_cache=initialize_kv_cache)
    return SimpleNamespace(
        model_runner=runner,
        device=torch.device(device),
        vllm_config=SimpleNamespace(compilation_config=context),
        **more,
    )


def resident_bytes(tensor: torch.Tensor) -> int:
    """Of the tensor's memory, by the kernel's list of pages of this process."""
    first = tensor.data_ptr() // mmap.PAGESIZE
    num_pages = -(-tensor.nbytes // mmap.PAGESIZE)
    with open("/proc/self/pagemap", "rb", buffering=0) as pages:  # noqa: PTH123 - unbuffered
        pages.seek(8 * first)
        entries = memoryview(pages.read(8 * num_pages)).cast("Q")
    return sum(entry >> 63 for entry in entries) * mmap.PAGESIZE


def test_every_memory_with_keys_and_values_is_found_once() -> None:
    """As vLLM holds it: the layers have views of what the runner has, or memory of their own, or lists."""
    shared, own, nested = torch.zeros(100), torch.zeros(50), torch.zeros(25)
    layers = {
        "a": SimpleNamespace(kv_cache=shared[:50].view(5, 10)),
        "b": SimpleNamespace(kv_cache=[own.view(2, 25), (nested,)]),
        "c": SimpleNamespace(),
        "d": SimpleNamespace(kv_cache=torch.tensor([])),
    }
    storages = kv_storages(worker_with([shared[:50], shared[50:]], layers))
    assert sorted(storage.nbytes() for storage in storages) == [100, 200, 400]
    assert cache_of(worker_with([shared], {})).num_bytes == 400


def test_a_worker_without_any_is_refused() -> None:
    with pytest.raises(TypeError, match=r"no KV cache that is known; use one of 0\.24 to 0\.32"):
        cache_of(worker_with([], {}))


def test_on_a_cpu_the_pages_go_and_come_again_as_zeros_under_the_same_tensors() -> None:
    give_back_freed_memory()  # what earlier tests have left would count as freed
    buffer = torch.ones(64 * MEBIBYTE, dtype=torch.int8)
    keys = buffer[: 32 * MEBIBYTE].view(torch.float32).view(1024, -1)
    cache = cache_of(worker_with([keys], {"a": SimpleNamespace(kv_cache=keys)}))
    assert isinstance(cache, HostCache)
    assert cache.num_bytes == buffer.nbytes
    assert resident_bytes(buffer) >= 64 * MEBIBYTE
    address = buffer.data_ptr()
    freed = cache.give_back()
    assert freed == pytest.approx(64 * MEBIBYTE, rel=0.05)
    assert resident_bytes(buffer) <= 2 * mmap.PAGESIZE  # the pages that it shares with neighbours
    cache.take_back()
    assert buffer.data_ptr() == address
    assert int(buffer.count_nonzero()) < 2 * mmap.PAGESIZE
    keys.fill_(2.0)
    assert float(keys.sum()) == 2.0 * keys.numel()
    assert cache.give_back() == pytest.approx(32 * MEBIBYTE, rel=0.05)  # as much as was written meanwhile


def test_memory_within_one_page_stays() -> None:
    small = torch.ones(16)
    cache_of(worker_with([small], {})).give_back()
    assert float(small.sum()) == 16.0


class Pool:
    """In the place of a GPU worker's part in vLLM's sleep mode."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[tuple[str, object]] = []
        self.error = error

    def discard(self, tags: tuple[str, ...]) -> None:
        self.calls.append(("discard", tags))

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(("wake_up", tags))
        if self.error is not None:
            raise self.error


@pytest.fixture
def torch_has_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """1000 bytes, of which 300 are freed when the cache is emptied."""
    reserved = iter((1000, 700, 700, 700))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: next(reserved))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def device_cache(pool: Pool) -> tuple[DeviceCache, torch.Tensor]:
    cache = torch.ones(10)
    return DeviceCache(pool, [cache.untyped_storage()], lambda: 17), cache


@pytest.mark.usefixtures("torch_has_kept")
def test_on_a_gpu_the_cache_alone_is_discarded_and_mapped_again_as_zeros() -> None:
    cache, tensor = device_cache(pool := Pool())
    assert cache.give_back() == 40 + 300  # 10 of 4 bytes, and what torch had kept
    cache.take_back()
    assert pool.calls == [("discard", ("kv_cache",)), ("wake_up", ["kv_cache"])]
    assert float(tensor.sum()) == 0


def test_on_a_gpu_what_has_not_been_given_is_not_overwritten() -> None:
    cache, tensor = device_cache(pool := Pool())
    cache.take_back()
    assert (pool.calls, float(tensor.sum())) == ([], 10.0)


@pytest.mark.usefixtures("torch_has_kept")
def test_on_a_gpu_that_is_full_the_error_names_both_sizes_and_the_next_time_it_is_tried_again() -> None:
    cache, tensor = device_cache(pool := Pool())
    cache.give_back()
    pool.error = RuntimeError("CUDA Error: out of memory")
    with pytest.raises(MemoryError, match=r"needs 40 bytes and 17 of the GPU are free; .* \(CUDA Error: out of"):
        cache.take_back()
    pool.error = None
    cache.take_back()
    assert [what for what, _ in pool.calls] == ["discard", "wake_up", "wake_up"]
    assert float(tensor.sum()) == 0
    cache.take_back()
    assert len(pool.calls) == 3


def test_a_vllm_that_cannot_discard_the_cache_alone_is_refused_on_a_gpu() -> None:
    able = worker_with([torch.ones(10)], {}, device="cuda", discard=None)
    assert isinstance(cache_of(able), DeviceCache)
    older = worker_with([torch.ones(10)], {}, device="cuda", discard=None)
    older.model_runner.initialize_kv_cache = lambda config: None
    for worker in (worker_with([torch.ones(10)], {}, device="cuda"), older):
        with pytest.raises(TypeError, match=r"cannot discard the KV cache alone on a GPU; use 0\.32, or no sleep_mode"):
            cache_of(worker)


def test_only_the_cache_goes_into_the_pool() -> None:
    tags: list[str] = []

    class Base:
        def _maybe_get_memory_pool_context(self, tag: str) -> Any:
            @contextlib.contextmanager
            def pool() -> Iterator[None]:
                tags.append(tag)
                yield

            return pool()

    class Worker(OnlyCache, Base):
        pass

    for tag in ("weights", "runtime", "kv_cache", "workspace"):
        with Worker()._maybe_get_memory_pool_context(tag):
            pass
    assert tags == ["kv_cache"]


def test_this_vllm_has_what_is_built_on_for_gpus() -> None:
    """Its source is read: importing it takes long."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    worker = (Path(spec.origin).parent / "v1/worker/gpu_worker.py").read_text()
    for said in (
        "\nclass Worker(",
        "    def _maybe_get_memory_pool_context(self, tag: str) ->",
        '_maybe_get_memory_pool_context(tag="kv_cache")',
        "kv_cache_allocation_context=",
        "    def discard(self, tags: tuple[str, ...]) ->",
        "    def wake_up(self, tags: list[str] | None = None) ->",
    ):
        assert said in worker, said


# The engine's side, over a stand-in for vLLM's client.


class FakeClient:
    """Notes every call; answers for two workers, or fails at one of the calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.fails = ""
        self.errored = False
        self.model_config = SimpleNamespace(max_model_len=64, get_vocab_size=lambda: 8, dtype=torch.float32)

    async def collective_rpc(self, method: str) -> list[int]:
        self._note(method)
        return [30, 12]

    async def pause_generation(self, **how: object) -> None:
        self._note(("pause", how))

    async def resume_generation(self) -> None:
        self._note("resume")

    def _note(self, call: Any) -> None:
        self.calls.append(call)
        if call == self.fails:
            raise RuntimeError("out of memory")


async def test_the_engine_is_paused_and_emptied_before_and_goes_on_afterwards() -> None:
    client = FakeClient()
    engine = Engine(client, device="cpu", model_dir=Path("base"))
    await engine.find_kv_cache()
    assert await engine.give_back() == 42
    await engine.take_back()
    pause = ("pause", {"mode": "wait", "clear_cache": True})
    assert client.calls == ["find_kv_cache", pause, "give_back_kv_cache", "take_back_kv_cache", "resume"]


async def test_an_engine_whose_memory_is_missing_does_not_go_on() -> None:
    client = FakeClient()
    engine = Engine(client, device="cpu", model_dir=Path("base"))
    client.fails = "give_back_kv_cache"
    with pytest.raises(RestError, match="could not be given back: out of memory"):
        await engine.give_back()
    client.fails = "take_back_kv_cache"
    with pytest.raises(RestError, match="could not be taken again: out of memory"):
        await engine.take_back()
    assert "resume" not in client.calls
    client.errored = True
    with pytest.raises(EngineError, match="has ended"):
        await engine.take_back()


async def test_a_server_whose_cache_cannot_be_given_back_does_not_start() -> None:
    client = FakeClient()
    client.fails = "find_kv_cache"
    with pytest.raises(EngineError, match="sleep_mode: the KV cache's memory cannot be given back: out of memory"):
        await Engine(client, device="cpu", model_dir=Path("base")).find_kv_cache()


@pytest.mark.parametrize(
    ("device", "sleep_mode", "chosen"), [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)]
)
def test_on_a_gpu_vllm_is_told_to_keep_the_cache_in_its_sleep_modes_pool(
    tmp_path: Path, device: str, sleep_mode: bool, chosen: bool
) -> None:
    (tmp_path / "config.json").write_text("{}")
    found = _arguments(InferSettings(model="m", sleep_mode=sleep_mode), tmp_path, device)
    worker = "infer.resting_worker.RestingWorker"
    assert (found["enable-sleep-mode"], found["worker-cls"]) == ((True, worker) if chosen else (None, None))

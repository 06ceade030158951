"""vLLM's worker for GPUs with only the KV cache in the pool of its sleep mode. Named to vLLM as `worker_cls` where the
weights are shared (`colocate`): CUDA cannot share what lies in that pool. Not yet run on a GPU."""

from contextlib import AbstractContextManager, nullcontext

from vllm.v1.worker.gpu_worker import Worker


class CacheSleepWorker(Worker):  # type: ignore[misc]
    """Its weights stay where they are while it sleeps."""

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = super()._maybe_get_memory_pool_context(tag)
        return context if tag == "kv_cache" else nullcontext()

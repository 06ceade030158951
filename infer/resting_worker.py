"""vLLM's worker for GPUs, of which the KV cache alone can be discarded. Named to vLLM as `worker_cls`, which imports
this module in the engine process; not yet run on a GPU."""

from vllm.v1.worker.gpu_worker import Worker

from infer.resting import OnlyCache


class RestingWorker(OnlyCache, Worker):  # type: ignore[misc]
    """vLLM's worker with nothing else in the pool of its sleep mode."""

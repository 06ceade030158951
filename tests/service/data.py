"""Requests as the client sends them, and models that train without a service around them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from grpo.service.training import AdapterShape, Base, TrainedModel
from grpo.service.wire import ForwardBackward, parse, read_forward_backward
from tinker import types
from tinker.proto import tinker_public_pb2 as schema
from tinker.proto.request_conv import forward_backward_request_to_proto

from tests.trainer.models import VOCAB, save_tiny_model, tiny_settings

SHAPE = AdapterShape(rank=4, seed=3, attn=True, mlp=True)


def tiny_base(folder: Path, **settings: Any) -> Base:
    """A tiny random model as everybody's base."""
    save_tiny_model(folder)
    return Base(tiny_settings(folder, **settings), folder, torch.device("cpu"), max_rank=64)


def datum(length: int, seed: int, loss_fn: str = "cross_entropy", **changes: Any) -> types.Datum:
    """A random sequence with what the loss takes."""
    draw = np.random.default_rng(seed)
    ids = draw.integers(2, VOCAB, length + 1)
    inputs: dict[str, Any] = {"target_tokens": ids[1:].astype(np.int64)}
    if loss_fn == "cross_entropy":
        inputs["weights"] = draw.random(length).astype(np.float32)
    else:
        inputs["logprobs"] = (-4 + 0.3 * draw.standard_normal(length)).astype(np.float32)
        inputs["advantages"] = draw.standard_normal(length).astype(np.float32)
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1].tolist()), loss_fn_inputs=inputs | changes)


def message_of(data: Sequence[types.Datum], loss_fn: str = "cross_entropy", *, seq: int = 1, **config: float) -> Any:
    """The client's own message."""
    asked = types.ForwardBackwardInput(data=list(data), loss_fn=loss_fn, loss_fn_config=config or None)
    request = types.ForwardBackwardRequest(forward_backward_input=asked, model_id="model", seq_id=seq)
    return forward_backward_request_to_proto(request)


def request_of(
    data: Sequence[types.Datum], loss_fn: str = "cross_entropy", *, seq: int = 1, **config: float
) -> ForwardBackward:
    """The same as the service reads it."""
    message = parse(message_of(data, loss_fn, seq=seq, **config).SerializeToString())
    return read_forward_backward(message, vocab_size=VOCAB, max_tokens=127)


def finished(work: Any) -> Any:
    """The answer of a piece of work, each pass alone."""
    results = None
    while True:
        try:
            asked = work.send(results)
        except StopIteration as done:
            answer = schema.ForwardBackwardOutput()
            answer.ParseFromString(done.value)
            return answer
        (results,) = asked.model.base.compute([asked])


def trained(model: TrainedModel, *, steps: int, seed: int) -> None:
    """Makes steps of a few random datums."""
    for step in range(steps):
        data = [datum(9 + number, seed * 100 + step * 10 + number) for number in range(3)]
        finished(model.forward_backward(request_of(data)))
        model.optim_step({"learning_rate": 1e-2})

"""What a client of any version is told: `python versions.py MODEL` writes it as JSON, with the tinker that it finds.

Losses, norms and answers without chance are the same for all versions."""

import json
import sys
from typing import Any

import numpy as np
import tinker
from tinker import types

INPUTS: dict[str, dict[str, list[float]]] = {
    "cross_entropy": {"weights": [0.0, 1.0, 0.5]},
    "importance_sampling": {"logprobs": [0.0, -2.0, -3.0], "advantages": [0.0, 1.0, -1.0]},
}


def done(given: Any) -> Any:
    """What newer clients return as a future and older ones at once."""
    return given.result() if hasattr(given, "result") else given


def datum(ids: bytes, loss_fn: str) -> types.Datum:
    """Four tokens with what the loss takes."""
    inputs: dict[str, Any] = {name: np.array(values, np.float32) for name, values in INPUTS[loss_fn].items()}
    inputs["target_tokens"] = np.array([*ids[1:]], np.int64)
    return types.Datum(model_input=types.ModelInput.from_ints([*ids[:-1]]), loss_fn_inputs=inputs)


def told(service: tinker.ServiceClient, model: str) -> dict[str, Any]:
    """Trains a model, goes on from its checkpoint, samples from it, and makes a mistake."""
    (served,) = done(service.get_server_capabilities()).supported_models
    training = done(service.create_lora_training_client(base_model=model, rank=4, seed=7))
    answers: dict[str, Any] = {"served": served.model_name, "rank": training.get_info().lora_rank}
    for loss_fn in INPUTS:
        forward = training.forward_backward([datum(b"cabs", loss_fn), datum(b"cafe", loss_fn)], loss_fn)
        step = training.optim_step(types.AdamParams(learning_rate=1e-2, grad_clip_norm=1.0))
        logprobs = [one["logprobs"].tolist() for one in done(forward).loss_fn_outputs]
        answers[loss_fn] = [done(forward).metrics["loss:sum"], done(step).metrics["grad_norm"], logprobs]
    refused = training.forward_backward([datum(b"cabs", "cross_entropy")], "ppo")
    try:
        done(refused)
    except tinker.TinkerError as error:
        answers["mistake"] = type(error).__name__, "loss_fn_inputs" in str(error)
    path = done(training.save_state("state")).path
    resumed = done(service.create_training_client_from_state_with_optimizer(path))
    checkpoints = done(service.create_rest_client().list_checkpoints(training.model_id)).checkpoints
    answers["listed"] = [one.tinker_path == path for one in checkpoints]
    done(resumed.load_state(path))
    forward = resumed.forward([datum(b"cabs", "cross_entropy")], "cross_entropy")
    answers["resumed"] = done(forward).metrics["loss:sum"]
    sampler = done(resumed.save_weights_and_get_sampling_client())
    params, prompt = types.SamplingParams(max_tokens=5, temperature=0.0), types.ModelInput.from_ints([*b"cab "])
    (sequence,) = done(sampler.sample(prompt, num_samples=1, sampling_params=params)).sequences
    answers["sampled"] = list(sequence.tokens)
    answers["sampled logprobs"] = [round(one, 4) for one in sequence.logprobs]
    answers["prompt logprobs"] = [round(one, 4) for one in done(sampler.compute_logprobs(prompt))[1:]]
    return answers


if __name__ == "__main__":
    print(json.dumps({"version": tinker.__version__, **told(tinker.ServiceClient(), sys.argv[1])}))

"""`grpo canary URL --adapter FOLDER`: whether anybody's server serves a PEFT adapter, by log-probabilities computed
here with transformers and PEFT."""

import argparse
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from grpo.transport.errors import UserError

EPILOG = """\
Asks the server for the adapter's log-probabilities of fixed token sequences and of answers that it samples, over
/completions and /chat/completions (vLLM), or /generate (SGLang), and computes the same numbers here. Both bases are
compared on the same tokens: an adapter is right where it is off by no more than 1.5 times what the bases are, or by
--floor. What is sampled must also be as much likelier than under the base as the adapter expects.

exit codes: 0 the server serves this adapter, 1 it does not, or it cannot be told, 2 the command line is wrong"""
TIMEOUT_S = 120.0
NUM_SEQUENCES, NUM_TOKENS = 4, 64
"""Of each kind: scored, and sampled after `NUM_PROMPT` tokens."""
NUM_PROMPT = 8
QUESTIONS = (
    "Name three rivers and say where each of them ends.",
    "Why is the sky blue? Answer in two sentences.",
    "Write a short note to a neighbour about a lost key.",
    "What is seventeen times six, and how do you know?",
)
GAP_FACTOR = 1.5
"""How many times the bases' mean difference an adapter's may be."""
MAX_Z = 5.0
"""Standard deviations by which the likelihood ratio of adapter and base on sampled tokens may miss its expectation
under the adapter."""
Array = NDArray[np.float64]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("url", metavar="URL", help="the server's address, as http://127.0.0.1:8000")
    parser.add_argument("--adapter", type=Path, required=True, metavar="FOLDER", help="the PEFT adapter's folder")
    parser.add_argument("--base", metavar="MODEL", help="the base (default: the one that the adapter names)")
    parser.add_argument("--name", help="the adapter's name on the server (default: the only adapter that it lists)")
    parser.add_argument(
        "--floor", type=float, default=1e-3, help="a mean difference in nats that is always allowed (%(default)s)"
    )
    parser.add_argument(
        "--dtype", default="float32", choices=("float32", "bfloat16"), help="computed here in %(default)s"
    )
    parser.add_argument(
        "--api-key-var", "--api_key_var", default="OPENAI_API_KEY", help="names the variable with the key"
    )


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A token sequence and what the server says of its end."""

    token_ids: list[int]
    logprobs: Array
    """[n] of the last n tokens, in nats."""
    sampled: bool


@dataclass(frozen=True, kw_only=True)
class Route:
    """One way to ask a server."""

    name: str
    ask: Callable[[str, int], Answer]
    """The answer of a model, by its name, to the question with this index."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of one route, in nats a token over all its questions."""

    route: str
    num_tokens: int
    to_adapter: float
    """Mean difference between the server's numbers and the adapter's here."""
    to_base: float
    bases: float
    """Mean difference between the two bases on the same tokens."""
    effect: float
    """Mean change by the adapter here."""
    z: float | None
    """The likelihood ratio of adapter and base on the sampled tokens, in standard deviations from what the adapter
    expects."""
    floor: float

    @property
    def allowed(self) -> float:
        """The mean difference up to which two numbers are the same."""
        return max(self.floor, GAP_FACTOR * self.bases)

    @property
    def problem(self) -> str | None:
        """Why this is not the adapter; None where it is."""
        if self.to_adapter > self.allowed and self.to_base <= self.allowed:
            return "answers as the base: the adapter is not applied"
        if self.to_adapter > self.allowed:
            return f"is {self.to_adapter:.3g} nats a token off this adapter, and {self.to_base:.3g} off the base"
        if self.effect <= 2 * self.allowed:
            change = f"the adapter changes {self.effect:.3g} nats a token, and {self.allowed:.3g} may be rounding"
            return f"cannot be told from the base: {change}"
        if self.z is not None and abs(self.z) > MAX_Z:
            return f"says the adapter's numbers, but samples other tokens ({self.z:+.1f} standard deviations)"
        return None


class Reference:
    """The base with the adapter, computed here."""

    def __init__(self, adapter: Path, base: str, *, dtype: str) -> None:
        """Raises UserError for a folder that is no adapter of the base."""
        import torch
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        try:
            model = AutoModelForCausalLM.from_pretrained(base, dtype=getattr(torch, dtype))
            self._model: Any = PeftModel.from_pretrained(model, str(adapter)).eval()
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(f"{adapter} cannot be put on {base}: {error}") from error
        self.vocab_size = int(model.config.get_text_config().vocab_size)

    def distributions(self, token_ids: Sequence[int], *, with_adapter: bool) -> Array:
        """Returns the log-probabilities [L - 1, V] of each next token."""
        import contextlib

        import torch

        with torch.no_grad(), contextlib.nullcontext() if with_adapter else self._model.disable_adapter():
            logits = self._model(input_ids=torch.tensor([list(token_ids)])).logits[0, :-1]
        return logits.double().log_softmax(-1).numpy()  # type: ignore[no-any-return]


class Server:
    """A server by its OpenAI routes, as vLLM has them, or by SGLang's own."""

    def __init__(self, http: httpx.Client) -> None:
        """`http` has the server's address. Raises UserError where nobody answers."""
        self._http, self.url = http, str(http.base_url).rstrip("/")
        self.models: list[dict[str, Any]] = self._json("GET", "/v1/models")["data"]
        self.is_sglang = any(one.get("owned_by") == "sglang" for one in self.models)

    def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        try:
            answer = self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise UserError(f"{self.url}{path} does not answer: {error}") from error
        if answer.status_code != 200:
            raise UserError(f"{self.url}{path} answers with status {answer.status_code}: {answer.text[:500]}")
        return answer.json()

    @property
    def base(self) -> str:
        """The base's name: the first model that has no parent."""
        return str(next(one["id"] for one in self.models if not one.get("parent")))

    def adapter(self) -> str:
        """Returns the only adapter's name. Raises UserError where there is none, or several."""
        names = [one["id"] for one in self.models if one.get("parent")]
        if len(names) != 1:
            found = f"the adapters {', '.join(names)}; say which with --name" if names else "no adapter"
            raise UserError(f"{self.url} lists {found} (models: {', '.join(one['id'] for one in self.models)})")
        return str(names[0])

    def completion(self, model: str, ids: list[int], *, seed: int | None) -> Answer:
        """Returns the scored `ids`, or with a seed what is sampled after them. Raises UserError."""
        if self.is_sglang:
            return self._generated(model, ids, seed=seed)
        made = self._json("POST", "/v1/completions", {"model": model, "prompt": ids, **_options(seed)})["choices"][0]
        return _answer(ids, made["prompt_logprobs"], made["logprobs"], sampled=seed is not None)

    def chat(self, model: str, question: str, *, seed: int | None) -> Answer:
        """Returns a scored conversation, or with a seed what is sampled after it. Raises UserError."""
        body = {"model": model, "messages": [{"role": "user", "content": question}], **_options(seed)}
        made = self._json("POST", "/v1/chat/completions", body | {"logprobs": True, "top_logprobs": 0})
        choice = made["choices"][0]
        content = choice["logprobs"]["content"] if choice["logprobs"] else []
        logprobs = {
            key: [one[name] for one in content] for key, name in (("tokens", "token"), ("token_logprobs", "logprob"))
        }
        return _answer(made["prompt_token_ids"], made["prompt_logprobs"], logprobs, sampled=seed is not None)

    def _generated(self, model: str, ids: list[int], *, seed: int | None) -> Answer:
        """SGLang's own route, by its documentation; not yet run against SGLang itself."""
        sampling = {"temperature": 1.0, "max_new_tokens": 1 if seed is None else NUM_TOKENS, "ignore_eos": True}
        sampling |= {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
        body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
        meta = self._json("POST", "/generate", body | ({} if model == self.base else {"lora_path": model}))["meta_info"]
        found = meta["input_token_logprobs"][1:] if seed is None else meta["output_token_logprobs"]
        values = np.array([one[0] for one in found], np.float64)
        token_ids = ids if seed is None else [*ids, *(int(one[1]) for one in found)]
        return Answer(token_ids=token_ids, logprobs=values, sampled=seed is not None)


def _options(seed: int | None) -> dict[str, Any]:
    """Returns how vLLM is asked to score (without a seed) or to sample, from the whole distribution."""
    options = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "logprobs": 0}
    options |= {"return_tokens_as_token_ids": True, "return_token_ids": True}
    return options | (
        {"max_tokens": 1, "prompt_logprobs": 0} if seed is None else {"max_tokens": NUM_TOKENS, "seed": seed}
    )


def _answer(ids: list[int], scored: Any, generated: Any, *, sampled: bool) -> Answer:
    """Returns vLLM's numbers: `scored` is [L] of {id: {logprob}}, the first without; `generated` has `token_logprobs`
    and `tokens` such as "token_id:17"."""
    if sampled:
        ids = [*ids, *(int(token.removeprefix("token_id:")) for token in generated["tokens"])]
        values = generated["token_logprobs"]
    else:
        values = [one[str(token)]["logprob"] for token, one in zip(ids[1:], scored[1:], strict=True)]
    return Answer(token_ids=ids, logprobs=np.array(values, np.float64), sampled=sampled)


def routes_of(server: Server, vocab_size: int) -> list[Route]:
    """Returns all ways to ask this server."""
    draws = np.random.default_rng(0)
    ids = draws.integers(vocab_size // 2, size=(NUM_SEQUENCES, NUM_TOKENS)).tolist()  # special tokens lie at the end
    routes = [
        Route(name="completions, scored", ask=lambda model, index: server.completion(model, ids[index], seed=None)),
        Route(
            name="completions, sampled",
            ask=lambda model, index: server.completion(model, ids[index][:NUM_PROMPT], seed=index),
        ),
    ]
    if server.is_sglang:
        return routes
    return [
        *routes,
        Route(name="chat, scored", ask=lambda model, index: server.chat(model, QUESTIONS[index], seed=None)),
        Route(name="chat, sampled", ask=lambda model, index: server.chat(model, QUESTIONS[index], seed=index)),
    ]


def verdict(route: Route, server: Server, reference: Reference, name: str, *, floor: float) -> Verdict:
    """Asks all questions of a route, and compares. Raises UserError where the server refuses one."""
    gaps: dict[str, list[Array]] = {"adapter": [], "base": [], "bases": [], "effect": []}
    surprise = variance = 0.0
    for index in range(NUM_SEQUENCES):
        try:
            answer = route.ask(name, index)
        except (KeyError, TypeError, IndexError) as error:
            expected = "expected token ids with log-probabilities, as vLLM's and SGLang's own servers give them"
            raise UserError(f"{server.url}, {route.name}: the answer lacks {error}; {expected}") from error
        if not (num := len(answer.logprobs)):
            raise UserError(f"{server.url}, {route.name}: the answer has no tokens, expected at least one")
        last = np.array(answer.token_ids[-num:])
        with_adapter, without = (
            reference.distributions(answer.token_ids, with_adapter=one)[-num:] for one in (True, False)
        )
        here, base = (found[np.arange(num), last] for found in (with_adapter, without))
        of_base = server.completion(server.base, answer.token_ids, seed=None).logprobs[-num:]
        for key, values in {
            "adapter": answer.logprobs - here,
            "base": answer.logprobs - base,
            "bases": of_base - base,
            "effect": here - base,
        }.items():
            gaps[key].append(np.abs(values))
        if answer.sampled:  # the likelihood ratio of adapter and base is what tells most between the two
            probs, ratios = np.exp(with_adapter), with_adapter - without
            expected = (probs * ratios).sum(-1)
            surprise += float((here - base - expected).sum())
            variance += float(((probs * ratios**2).sum(-1) - expected**2).sum())
    means = {key: float(np.concatenate(values).mean()) for key, values in gaps.items()}
    return Verdict(
        route=route.name,
        num_tokens=sum(map(len, gaps["adapter"])),
        to_adapter=means["adapter"],
        to_base=means["base"],
        bases=means["bases"],
        effect=means["effect"],
        z=surprise / math.sqrt(variance) if variance > 0 else None,
        floor=floor,
    )


def main(options: argparse.Namespace) -> int:
    """Prints what each route says. Returns the exit code."""
    import json

    config = options.adapter / "adapter_config.json"
    if not config.is_file():
        raise FileNotFoundError(f"{options.adapter} has no adapter_config.json, expected a PEFT adapter's folder")
    base = options.base or json.loads(config.read_text()).get("base_model_name_or_path")
    if not base:
        raise FileNotFoundError(f"{config} names no base; name it with --base")
    key = os.environ.get(options.api_key_var)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    found = []
    with httpx.Client(base_url=options.url.rstrip("/").removesuffix("/v1"), headers=headers, timeout=TIMEOUT_S) as http:
        server = Server(http)
        name = options.name or server.adapter()
        reference = Reference(options.adapter, base, dtype=options.dtype)
        print("mean difference in nats a token     tokens  to the adapter  to the base  bases apart")
        for route in routes_of(server, reference.vocab_size):
            one = verdict(route, server, reference, name, floor=options.floor)
            found.append(one)
            figures = f"{one.num_tokens:6d}  {one.to_adapter:14.3g}  {one.to_base:11.3g}  {one.bases:11.3g}"
            print(f"{one.route:34}  {figures}  {'ok' if one.problem is None else 'WRONG'}", flush=True)
    if problems := [one for one in found if one.problem is not None]:
        print(f"{name} at {server.url} does not serve {options.adapter}: {problems[0].route}: it {problems[0].problem}")
        return 1
    print(f"{name} at {server.url} serves {options.adapter}")
    return 0

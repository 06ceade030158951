"""A random 29M Qwen3 whose answers end when the benchmark wants: never, or at log-normal lengths.

No engine has to be told anything: the end of an answer is sampled like every other token, so TRL and we get the same
distribution from the same weights. Three of the 512 entries of the residual stream are kept free of the random layers:

- `GROUND` is the same for every token. An answer never ends where the end token's logit is a large negative multiple.
- `AGE` is written by a head of the first layer that attends to all tokens alike, and sees only the three tokens of a
  prompt that begin and end a message: as 1 / t at the t-th token.
- `MEAN_AGE` is written by such a head of the second layer, which sees `AGE`: as the mean of 1 / t, about ln(t) / t.

The logit of the end token is a weighted sum of these three. Its weights are fitted to the log-odds that an answer of
log-normal length ends at its k-th token; the distribution function is met within 0.03.
"""

import math
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

from orchestrator.envs.reverse_text import prompt, words
from tools.random_models import make_mid

MEDIAN, SIGMA, LONGEST = 40, 1.0, 128
"""Of the answers' lengths in tokens, the end token included."""
GROUND, AGE, MARK, MEAN_AGE = 0, 1, 2, 3
BEGIN_ID, END_ID = 257, 258
NEVER = -100.0
"""Logit of an end that must not come, about."""
NUM_FITTED = 64
"""Random answers that the logits are fitted on."""
Ends = Literal["never", "log-normal"]


def make_model(path: Path, *, ends: Ends) -> Path:
    """Saves the model in bfloat16, with the quickstart's tokenizer, and returns `path`."""
    import torch
    from transformers import AutoModelForCausalLM

    make_mid(path, dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        _free_entries(model)
        _write_age(model)
        _write_mean_age(model)
        end = model.model.embed_tokens.weight[END_ID]
        end.zero_()
        end[MARK] = 4.0
        if ends == "never":
            end[GROUND] = NEVER / _entries_at_answers(model)[0][..., 0].mean()
        else:
            _fit_end(model)
    model.to(torch.bfloat16).save_pretrained(path)
    return path


def ends_at(k: int) -> float:
    """Probability that a log-normal answer that has not ended before ends at its k-th token."""
    normal = NormalDist(math.log(MEDIAN), SIGMA)
    before, now = (normal.cdf(math.log(max(k + half, 1e-9))) for half in (-0.5, 0.5))
    return (now - before) / (1 - before)


def _free_entries(model: Any) -> None:
    """No layer writes to our entries, no token but the marked one has them, and no logit but the end's sees them."""
    for layer in model.model.layers:
        for name in (GROUND, AGE, MEAN_AGE):
            layer.self_attn.o_proj.weight[name] = 0.0
            layer.mlp.down_proj.weight[name] = 0.0
    embedding = model.model.embed_tokens.weight
    embedding[:, [AGE, MARK, MEAN_AGE]] = 0.0
    embedding[:, GROUND] = 0.06
    embedding[BEGIN_ID, MARK] = 4.0
    final = model.model.norm.weight
    final[MARK] = 0.0
    final[[GROUND, AGE, MEAN_AGE]] = 100.0  # keeps our entries small elsewhere: other logits must not lose precision


def _write_age(model: Any) -> None:
    _uniform_head(model, layer=0, reads=MARK, writes=AGE, gain=1.0)


def _write_mean_age(model: Any) -> None:
    _uniform_head(model, layer=1, reads=AGE, writes=MEAN_AGE, gain=4.0)


def _uniform_head(model: Any, *, layer: int, reads: int, writes: int, gain: float) -> None:
    """The first head adds, to the entry `writes`, the mean over all tokens so far of the normed entry `reads`: with a
    query of zeros, all keys are alike."""
    attention = model.model.layers[layer].self_attn
    attention.q_proj.weight[: attention.head_dim] = 0.0
    attention.v_proj.weight[0] = 0.0
    attention.v_proj.weight[0, reads] = gain
    attention.o_proj.weight[writes, 0] = 1.0


def _entries_at_answers(model: Any) -> tuple[Any, Any]:
    """Of random answers: our entries [NUM_FITTED, LONGEST, 3] as the head sees them before each token, and there the
    logarithm of the summed exponentials of all other tokens' logits [NUM_FITTED, LONGEST]."""
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model.config.name_or_path)
    conversations = [[{"role": "user", "content": prompt(word)}] for word in words(0, NUM_FITTED, 6, 6, "train")]
    texts = tokenizer.apply_chat_template(conversations, tokenize=False, add_generation_prompt=True)
    prompts = tokenizer(texts, add_special_tokens=False, return_tensors="pt").input_ids
    random = torch.Generator().manual_seed(0)
    answers = torch.randint(END_ID + 1, model.config.vocab_size, (NUM_FITTED, LONGEST - 1), generator=random)
    hidden = model.model(torch.cat([prompts, answers], dim=1)).last_hidden_state[:, prompts.shape[1] - 1 :]
    logits = model.lm_head(hidden)
    logits[..., END_ID] = -math.inf
    return hidden[..., [GROUND, AGE, MEAN_AGE]], logits.logsumexp(-1)


def _fit_end(model: Any) -> None:
    """Least squares over all places of the random answers, each weighted by how often an answer ends there."""
    import torch

    hazards = torch.tensor([ends_at(k) for k in range(1, LONGEST + 1)])
    ending = hazards * torch.cat([torch.ones(1), (1 - hazards).cumprod(0)[:-1]])
    end = model.model.embed_tokens.weight[END_ID]
    for _ in range(3):  # the end token is in the prompt too: its row changes what it is fitted to, a little
        entries, others = _entries_at_answers(model)
        wanted = others + torch.logit(hazards)
        weights = ending.sqrt().expand_as(wanted)
        solution = torch.linalg.lstsq((entries * weights[..., None]).flatten(0, 1), (wanted * weights).flatten())
        end[[GROUND, AGE, MEAN_AGE]] = solution.solution.flatten()

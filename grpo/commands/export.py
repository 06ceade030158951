"""`grpo export RUN`: a policy version as a PEFT adapter or as a whole model, which others load."""

import argparse
import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from grpo import service_proofs
from grpo.commands.model_card import write_card
from grpo.policy_version import CannotExport, Version, open_checkpoint, open_version, recorded_arguments
from grpo.transport.folders import Content, chunks_of
from grpo.transport.weights.chat_template import with_arguments
from grpo.transport.weights.shards import Weight, checkpoint_files, shard_files
from grpo.transport.weights.store import ADAPTER_CONFIG_FILE, ADAPTER_FILE

PROOF_FILE = "proof.json"
"""The page of `grpo prove` of the run, beside what is exported."""
PEFT_PREFIX = "base_model.model."
EPILOG = """\
The version of step N is in RUN/broadcasts as long as weight_broadcast.keep_last and keep_interval keep it; without
--step it is the newest one. Of a training service --checkpoint names any checkpoint of any model. What is exported is
loaded with transformers (and PEFT), computes the canary, and appears only if it agrees with the trainer's numbers.
Beside it lies proof.json, what grpo prove says of the run.

  grpo export outputs/quickstart                         outputs/quickstart/export/step_60-adapter
  grpo export outputs/quickstart --step 58 --merged --output my-model --push-to me/my-model

exit codes: 0 done, 1 the version cannot be exported, 2 there is no run, or the command line is wrong"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder (its output_dir)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, metavar="N", help="the version of this step (default: the newest)")
    which.add_argument("--checkpoint", metavar="PATH", help="of a training service: tinker://…, or the path's end")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--adapter", action="store_true", help="a PEFT adapter (the default where the run trains one)")
    kind.add_argument("--merged", action="store_true", help="a whole model, the adapter merged into its base")
    parser.add_argument("--lora", metavar="NAME", help="of several adapters (lora_adapters) this one, not the first")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of a whole model's weights")
    parser.add_argument("--output", type=Path, metavar="DIR", help="default: RUN/export/step_N-adapter or -merged")
    parser.add_argument(
        "--push-to", metavar="NAME", help="upload it to this private repository of the Hugging Face hub"
    )


def main(options: argparse.Namespace) -> int:
    """Returns the exit code."""
    kind = "merged" if options.merged else "adapter" if options.adapter else None
    if options.checkpoint is None:
        version = open_version(options.run, options.step, lora=options.lora)
    else:
        version = open_checkpoint(options.run, options.checkpoint)
    folder = export(version, kind=kind, dtype=options.dtype, output=options.output)
    print(folder)
    if options.push_to is not None:
        print(push(folder, options.push_to))
    return 0


def export(version: Version, *, kind: str | None = None, dtype: str | None = None, output: Path | None = None) -> Path:
    """Returns the folder with the version as `adapter` or `merged`, once its canary agrees. Raises `CannotExport` and
    OSError; nothing appears then."""
    of_adapter = version.manifest.spec.kind == "adapter"
    kind = kind or ("adapter" if of_adapter else "merged")
    if kind == "adapter" and not of_adapter:
        raise CannotExport(f"the run publishes {version.manifest.spec.kind} weights, no adapters; give --merged")
    if kind == "adapter" and dtype is not None:
        raise CannotExport("--dtype is of a whole model's weights, and an adapter has float32; give --merged with it")
    dtype = dtype or version.manifest.spec.dtype
    output = output or version.run / "export" / f"{version.name}-{kind}"
    if output.exists():
        raise CannotExport(f"{output} is there already; remove it, or give another --output")
    temporary = output.with_name(f".{output.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        files = adapter_files(version) if kind == "adapter" else model_files(version, dtype)
        files = with_arguments(files, recorded_arguments(version.run))
        for name, content in files.items():
            (temporary / name).parent.mkdir(exist_ok=True)
            with (temporary / name).open("wb") as file:
                file.writelines(chunks_of(content))
        figures = prove(version, temporary, kind, dtype)
        page = service_proofs.prove(version.run)
        (temporary / PROOF_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(page.as_fields()), indent=1))
        write_card(version, temporary, kind=kind, figures=figures, page=page)
        temporary.rename(output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return output


def adapter_files(version: Version) -> dict[str, Content]:
    """Returns the files of a PEFT adapter, with the base's tokenizer."""
    files = checkpoint_files(version.base, dtype=version.manifest.spec.dtype)
    del files["config.json"]
    config = json.loads(version.files[f"{version.prefix}{ADAPTER_CONFIG_FILE}"])
    config["base_model_name_or_path"] = version.base_name
    own: dict[str, Content] = {ADAPTER_FILE: version.files[f"{version.prefix}{ADAPTER_FILE}"]}
    return files | own | {ADAPTER_CONFIG_FILE: json.dumps(config, indent=1).encode()}


def model_files(version: Version, dtype: str) -> dict[str, Content]:
    """Returns the files of a whole model: `W + alpha / rank · B A`, summed in float32 and rounded once to `dtype`."""
    from safetensors.torch import load

    spec, data = version.manifest.spec, version.files.get(f"{version.prefix}{ADAPTER_FILE}")
    lora = {} if data is None else load(data)
    replaced = tensor_files(version.folder) if spec.kind != "adapter" else {}
    base = {} if spec.kind == "full" else tensor_files(version.base)
    weights = []
    for name, path in (base | replaced).items():
        layer = f"{PEFT_PREFIX}{name.removesuffix('.weight')}"
        factors = [lora.pop(f"{layer}.lora_{part}.weight", None) for part in "BA"]
        weights.append(_weight(name, path, factors, spec.alpha / max(1, spec.rank), dtype))
    if lora:
        raise CannotExport(f"the adapter has {sorted(lora)[0]}, and its base no such layer")
    return checkpoint_files(version.base, dtype=dtype) | shard_files(weights)


def tensor_files(folder: Path) -> dict[str, Path]:
    """Returns the file of each tensor of a checkpoint or version."""
    from safetensors import safe_open

    found: dict[str, Path] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    return found


def _weight(name: str, path: Path, factors: Sequence[Any], scale: float, dtype: str) -> Weight:
    """Returns one tensor of the whole model; `factors` are the adapter's B and A, or None."""
    import torch
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        shape = tuple(file.get_slice(name).get_shape())

    def tensor() -> torch.Tensor:
        with safe_open(path, framework="pt") as file:
            value: torch.Tensor = file.get_tensor(name)
        b, a = factors
        whole = value if b is None else torch.addmm(value.float(), b.float(), a.float(), alpha=scale)
        return whole.to(getattr(torch, dtype))

    return Weight(name=name, dtype=dtype, shape=shape, tensor=tensor)


def prove(version: Version, folder: Path, kind: str, dtype: str) -> dict[str, float]:
    """Returns how far the canary's log-probabilities are from the trainer's, in nats, by transformers and PEFT on a
    CPU. Raises `CannotExport` beyond what servers are allowed, which the base's own difference tells."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from grpo.infer.canary import compare

    disable_progress_bar()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # PEFT looks for kernels of it that nobody needs here
    canary = version.canary
    computed = canary.dtype if kind == "adapter" else dtype
    chosen = torch.tensor(canary.token_ids[1:])[:, None]

    def logprobs(source: Path, adapter: Path | None = None) -> list[float]:
        model: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype=getattr(torch, computed), local_files_only=True, trust_remote_code=False
        )
        if adapter is not None:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, str(adapter))
        with torch.no_grad():
            logits = model.eval()(input_ids=torch.tensor([canary.token_ids])).logits[0, :-1].float()
        return list(logits.log_softmax(-1).gather(1, chosen)[:, 0].tolist())

    own = logprobs(version.base, folder) if kind == "adapter" else logprobs(folder)
    figures = compare(canary, own, logprobs(version.base), dtype=computed, device="cpu")
    if not figures.agrees:
        raise CannotExport(
            f"the exported version differs from the trainer's by {figures.gap:.3g} nats at the canary "
            f"({figures.measure}), allowed are {figures.tolerance:.3g}, and the base differs by "
            f"{figures.base_gap:.3g}; a merged model in 16 bits may lose small updates: give --adapter, or --dtype "
            "float32"
        )
    return {name: getattr(figures, name) for name in ("max_abs", "mean_abs", "tolerance")}


def push(folder: Path, name: str) -> str:
    """Uploads an exported folder to a private repository, made where there is none; of a base on this machine the name
    goes, not the path. Returns the repository's address. Raises `CannotExport` with the hub's reason."""
    from huggingface_hub import HfApi, get_token

    api, config = HfApi(), folder / ADAPTER_CONFIG_FILE
    note = "grpo export"
    try:
        address = str(api.create_repo(name, private=True, exist_ok=True))
        api.upload_folder(folder_path=folder, repo_id=name, commit_message=note, ignore_patterns=[config.name])
        if config.exists():
            content = _without_path(config.read_bytes())
            api.upload_file(path_or_fileobj=content, path_in_repo=config.name, repo_id=name, commit_message=note)
    except Exception as error:  # those of the HTTP library that it happens to use, too
        reason = str(error)
        if token := get_token():  # which an answer may repeat
            reason = reason.replace(token, "***")
        raise CannotExport(f"{folder} was exported, and could not be pushed to {name}: {reason}") from None
    return address


def _without_path(config: bytes) -> bytes:
    """An adapter's configuration as other machines get it: a folder of this one is none there."""
    fields = json.loads(config)
    if (base := Path(fields["base_model_name_or_path"])).exists():
        fields["base_model_name_or_path"] = base.name
    return json.dumps(fields, indent=1).encode()

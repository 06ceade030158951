"""`make contracts`: whether vLLM has what we use of it, and whether we have what it expects of us, in the CUDA builds
of the oldest vLLM that is supported, of the one that the CUDA extra installs and of the newest. Downloads their wheels
once (960 MB) and reads the sources; imports nothing of them. Exits 1 where something is missing, and says what.

There are three kinds of contracts: names of vLLM's that we use (`CONTRACTS`), members that vLLM's modules read of our
classes (`PROTOCOLS`), and classes of ours that stand for one of vLLM's or are mixed into it (`CLASSES`)."""

import ast
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from grpo.configs.infer import InferSettings
from grpo.infer.arguments import ON_CPU, own_arguments

ROOT = Path(__file__).parent.parent
CACHE = Path.home() / ".cache" / "grpo" / "contracts"
VERSIONS = ("0.26.0", "0.30.0", "0.33.0")
WHEEL = ("--only-binary=:all:", "--platform", "manylinux_2_28_x86_64", "--python-version", "3.12", "--abi", "abi3")
USERS = ("infer/*.py", "transport/weights/nccl.py")
# A line: `module[|another] Name[.method](parameters or members)`; `!` before it: from vLLM 0.28 on.
CONTRACTS = """
_custom_ops rotary_embedding(positions,query,key,head_size,cos_sin_cache,is_neox)
entrypoints.common.cli_args|entrypoints.launchers.cli_args|entrypoints.openai.cli_args make_arg_parser(parser)
entrypoints.common.cli_args|entrypoints.launchers.cli_args|entrypoints.openai.cli_args validate_parsed_serve_args(args)
entrypoints.common.cli_args|entrypoints.launchers.cli_args|entrypoints.openai.cli_args BaseFrontendArgs(default_chat_template_kwargs,enable_auto_tool_choice)
entrypoints.common.cli_args|entrypoints.launchers.cli_args|entrypoints.openai.cli_args FrontendArgs(host,port)
utils.argparse_utils FlexibleArgumentParser()
entrypoints.launchers.api_server.entry|entrypoints.openai.api_server build_async_engine_client(args)
entrypoints.launchers.api_server.entry|entrypoints.openai.api_server build_async_engine_client_from_engine_args(engine_args)
entrypoints.launchers.app|entrypoints.openai.api_server build_app(args,supported_tasks,model_config)
entrypoints.launchers.api_server.app_state|entrypoints.openai.api_server init_app_state(engine_client,state,args,supported_tasks)
entrypoints.openai.models.serving OpenAIServingModels(lora_requests,base_model_paths)
entrypoints.openai.models.protocol BaseModelPath(name,model_path)
engine.arg_utils EngineArgs.from_cli_args(args)
engine.arg_utils EngineArgs.create_engine_config()
platforms.interface Platform.is_cpu()
v1.engine.async_llm AsyncLLM(errored,model_config,get_supported_tasks,resume_generation,wake_up,start_weight_update,reset_prefix_cache,finish_weight_update)
v1.engine.async_llm AsyncLLM.generate(prompt,sampling_params,request_id,lora_request,priority,data_parallel_rank)
v1.engine.async_llm AsyncLLM.abort(request_id)
v1.engine.async_llm AsyncLLM.collective_rpc(method,args)
v1.engine.async_llm AsyncLLM.add_lora(lora_request)
v1.engine.async_llm AsyncLLM.remove_lora(lora_id)
v1.engine.async_llm AsyncLLM.pause_generation(mode,clear_cache)
v1.engine.async_llm AsyncLLM.sleep(level,mode)
v1.engine.async_llm AsyncLLM.init_weight_transfer_engine(request)
v1.engine.async_llm AsyncLLM.update_weights(request)
v1.engine.utils CoreEngineProcManager(processes)
v1.engine.utils CoreEngineProcManager.finished_procs()
config.model ModelConfig(max_model_len,dtype,enforce_eager,is_multimodal_model,get_vocab_size,get_hidden_size)
config.scheduler SchedulerConfig(max_num_batched_tokens)
config.lora LoRAConfig(max_loras,max_lora_rank)
config.vllm get_current_vllm_config()
sampling_params RequestOutputKind(FINAL_ONLY)
sampling_params SamplingParams(n,max_tokens,min_tokens,temperature,seed,stop_token_ids,logprobs,prompt_logprobs,flat_logprobs,detokenize,output_kind,extra_args)
sampling_params SamplingParams(stop,ignore_eos,top_k,top_p,skip_special_tokens,logprob_token_ids)
outputs CompletionOutput(index,token_ids,logprobs,finish_reason)
outputs RequestOutput(outputs,prompt_logprobs)
logprobs FlatLogprobs(logprobs,token_ids)
lora.request LoRARequest(lora_name,lora_int_id,lora_path)
lora.layers.utils LoRAMapping(index_mapping)
lora.model_manager LoRAModelManager(modules,punica_wrapper_mapping,lora_config)
lora.model_manager LoRAModelManager.activate_adapter(lora_id)
lora.punica_wrapper.punica_base PunicaWrapperBase.update_metadata(mapping,lora_index_to_id)
v1.worker.gpu_worker Worker._maybe_get_memory_pool_context(tag)
v1.worker.gpu_worker Worker(get_model,model_runner,device)
v1.worker.gpu_model_runner GPUModelRunner(requests,num_prompt_logprobs,sampler,_get_prompt_logprobs_dict)
v1.worker.gpu_model_runner GPUModelRunner.reload_weights(weights_iterator)
v1.worker.gpu.model_runner GPUModelRunner(prompt_logprobs_worker,reload_weights)
v1.worker.gpu.sample.prompt_logprob PromptLogprobsWorker.add_request(req_id,req_idx,sampling_params)
v1.worker.gpu.sample.prompt_logprob PromptLogprobsWorker.compute_prompt_logprobs(logits_fn,hidden_states,input_batch)
v1.worker.gpu.input_batch InputBatch(idx_mapping_np,query_start_loc_np)
v1.sample.sampler Sampler(topk_topp_sampler)
v1.sample.sampler Sampler.compute_logprobs(logits)
v1.sample.ops.topk_topp_sampler apply_top_k_top_p(logits,k,p)
v1.sample.ops.topk_topp_sampler TopKTopPSampler.forward_native(logits,generators,k,p)
model_executor.custom_op CustomOp.register_oot(name)
model_executor.layers.layernorm RMSNorm(variance_epsilon,has_weight,hidden_size,variance_size_override)
model_executor.layers.layernorm RMSNorm.forward_cuda(x,residual)
model_executor.layers.layernorm RMSNorm.forward_native(x,residual)
model_executor.layers.linear ColumnParallelLinear(output_partition_sizes)
model_executor.model_loader.reload.layerwise finalize_layerwise_reload()
v1.executor.uniproc_executor UniProcExecutor()
model_executor.layers.vocab_parallel_embedding VocabParallelEmbedding(org_vocab_size)
model_executor.layers.utils dispatch_cpu_unquantized_gemm(layer,remove_weight)
model_executor.models.utils WeightsMapper.apply_list(values)
distributed.weight_transfer.base WeightTransferInitRequest(init_info)
distributed.weight_transfer.base WeightTransferUpdateRequest(update_info)
!distributed.weight_transfer.base ParamMeta(name,dtype,shape)
!distributed.weight_transfer.base TrainerInitInfo(rank)
!distributed.weight_transfer.factory WeightTransferTrainerFactory.trainer_init(init_info,client,source)
!distributed.weight_transfer.nccl_engine NCCLTrainerInitInfo(master_address,master_port,world_size)
!distributed.weight_transfer.nccl_engine NCCLWeightTransferUpdateInfo(names,dtype_names,shapes)
!distributed.weight_transfer.nccl_common NCCLWeightTransferInitInfo(master_address,master_port,rank_offset,world_size,packed)
"""  # noqa: E501
# Classes of ours that vLLM reads: `our_file.py Class module name version`; the module calls it `name`, from then on.
PROTOCOLS = """
transport/weights/nccl.py Source distributed.weight_transfer.nccl_engine source 0.28
transport/weights/nccl.py _ServersByThemselves distributed.weight_transfer.nccl_engine client 0.28
"""
# Classes of ours beside vLLM's: `our_file.py Class relation module Theirs version`, from that version on. One that `is`
# or `resembles` theirs has every abstract member of it, as a property where theirs is one; methods of one that `is`
# theirs take all parameters of those that they override. One that `extends` theirs has none of its names: vLLM refuses
# to mix it in.
CLASSES = """
transport/weights/nccl.py Source resembles distributed.weight_transfer.base WeightSource 0.28
infer/sleep_worker.py CacheSleepWorker is v1.worker.gpu_worker Worker 0.26
infer/noise.py NoisyRMSNorm is model_executor.layers.layernorm RMSNorm 0.26
infer/worker.py PolicyWorker extends v1.worker.gpu_worker Worker 0.26
infer/noise.py NoisyPolicyWorker extends v1.worker.gpu_worker Worker 0.26
"""
Scope = ast.Module | ast.ClassDef
Function = ast.FunctionDef | ast.AsyncFunctionDef


def members(scope: Scope) -> Iterator[tuple[str, ast.AST]]:
    """Yields what a module or class defines: functions, classes, names with a value or a type, and attributes that its
    methods set."""
    methods = [node for node in scope.body if isinstance(node, Function)] if isinstance(scope, ast.ClassDef) else []
    for node in [*scope.body, *(inner for method in methods for inner in ast.walk(method))]:
        if isinstance(node, Function | ast.ClassDef):
            yield node.name, node
        for target in node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]:
            if isinstance(target, ast.Name) and node in scope.body:
                yield target.id, node
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                yield target.attr, node


def missing_in(tree: ast.Module, name: str, wanted: list[str]) -> list[str]:
    """Returns what of `wanted` the class has not as a member, or the function or method not as a parameter; `name`
    itself where that is missing."""
    found: ast.AST = tree
    for part in name.split("."):
        inner = dict(members(found)) if isinstance(found, Scope) else {}
        if part not in inner:
            return [name]
        found = inner[part]
    if isinstance(found, Function):
        return [f"{name}({one})" for one in wanted if one not in parameters(found)]
    known = {member for member, _ in members(found)} if isinstance(found, ast.ClassDef) else set()
    return [f"{name}.{one}" for one in wanted if one not in known]


def check(wheel: zipfile.ZipFile, contracts: list[str], version: tuple[int, ...]) -> list[str]:
    """Returns what is missing in a wheel."""
    files, problems = set(wheel.namelist()), []
    for line in contracts:
        if line.startswith("!") and version < (0, 28):
            continue
        modules, name, names = re.fullmatch(r"!?(\S+) ([\w.]+)\((.*)\)", line).groups()  # type: ignore[union-attr]
        paths = [
            f"vllm/{module.replace('.', '/')}{end}" for module in modules.split("|") for end in (".py", "/__init__.py")
        ]
        path = next((one for one in paths if one in files), None)
        wanted = [one for one in names.split(",") if one]
        gone = [modules] if path is None else missing_in(ast.parse(wheel.read(path)), name, wanted)
        problems += [f"{one} ({path})" for one in gone]
    return problems


def class_in(tree: ast.Module, name: str) -> ast.ClassDef | None:
    """Returns the class of that name, wherever in the module it is defined; None where there is none."""
    return next((node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name), None)


def lineage(wheel: zipfile.ZipFile, module: str, name: str) -> Iterator[ast.ClassDef]:
    """Yields a class of vLLM's and those of vLLM's that it inherits from, itself first; nothing where it is missing."""
    path = f"vllm/{module.replace('.', '/')}.py"
    tree = ast.parse(wheel.read(path)) if path in wheel.namelist() else ast.Module([], [])
    if (found := class_in(tree, name)) is None:
        return
    yield found
    imported = {
        alias.asname or alias.name: (str(node.module).removeprefix("vllm."), alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for base in (ast.unparse(one) for one in found.bases):
        yield from lineage(wheel, *imported.get(base, (module, base)))


def decorators(node: ast.AST) -> set[str]:
    """Returns the last words of a function's decorators, for example `cached_property`."""
    return {ast.unparse(one).rpartition(".")[2] for one in getattr(node, "decorator_list", ())}


def parameters(function: Function) -> set[str]:
    """Returns the names of a function's parameters."""
    arguments = function.args
    return {one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}


def broken_by(own: ast.ClassDef, theirs: Mapping[str, ast.AST], relation: str) -> Iterator[str]:
    """Yields what a class of ours lacks of the members of vLLM's class, or has against it."""
    known = dict(members(own))
    if relation == "extends":
        yield from (f"{name}, which is there already" for name in known.keys() & theirs.keys() if name[:2] != "__")
        return
    for name, member in theirs.items():
        mine = known.get(name)
        if mine is None:
            if "abstractmethod" in decorators(member):
                yield f"{name}, which is abstract"
            continue
        is_method = isinstance(mine, Function) and not decorators(mine) & {"property", "cached_property"}
        if "property" in decorators(member) and is_method:
            yield f"{name} as a property"
        if relation == "is" and isinstance(mine, Function) and isinstance(member, Function) and not mine.args.kwarg:
            yield from (f"{name}({one})" for one in parameters(member) - parameters(mine))


def check_classes(wheel: zipfile.ZipFile, classes: list[str], version: tuple[int, ...], root: Path = ROOT) -> list[str]:
    """Returns what is wrong with classes of ours below `root`, beside those of a wheel."""
    problems = []
    for line in classes:
        file, name, relation, module, theirs, since = line.split()
        if version < tuple(map(int, since.split("."))):
            continue
        own = class_in(ast.parse((root / file).read_text()), name)
        family = list(lineage(wheel, module, theirs))
        if own is None or not family:
            problems.append(f"{name} ({file}) or {theirs} ({module})")
            continue
        inherited = {member: node for one in reversed(family) for member, node in members(one)}
        problems += [f"{name}.{one} ({file}, beside {theirs})" for one in sorted(broken_by(own, inherited, relation))]
    return problems


def read_of(name: str, tree: ast.Module) -> set[str]:
    """Returns which members a module reads of what it calls `name`; `__iter__` where it goes through it."""
    wanted = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).rpartition(".")[2] == name:
            wanted.add(node.attr)
        if isinstance(node, ast.For | ast.comprehension) and ast.unparse(node.iter) == name:
            wanted.add("__iter__")
    return wanted


def check_protocols(
    wheel: zipfile.ZipFile, protocols: list[str], version: tuple[int, ...], root: Path = ROOT
) -> list[str]:
    """Returns what a wheel's modules read of classes of ours below `root` that these have not."""
    problems = []
    for line in protocols:
        file, own, module, name, since = line.split()
        if version < tuple(map(int, since.split("."))):
            continue
        path = f"vllm/{module.replace('.', '/')}.py"
        known = class_in(ast.parse((root / file).read_text()), own)
        if known is None:
            problems.append(f"{own} ({file})")
            continue
        missing = read_of(name, ast.parse(wheel.read(path))) - {member for member, _ in members(known)}
        problems += [f"{own}.{one} ({file}; {path} reads it)" for one in sorted(missing)]
    return problems


def all_contracts() -> list[str]:
    """Returns `CONTRACTS`, and one for the arguments that the server gives vLLM."""
    settings, model_dir = InferSettings(model="m", dtype="float32"), ROOT / "configs" / "quickstart" / "model"
    server = {"host", "port", "enable_auto_tool_choice", "default_chat_template_kwargs"}
    own = (own_arguments(settings, model_dir=model_dir, device="cuda").keys() | ON_CPU.keys()) - server
    return [*CONTRACTS.split("\n")[1:-1], f"engine.arg_utils EngineArgs({','.join(sorted(own))})"]


def modules_without(contracts: list[str]) -> list[str]:
    """Returns the modules of vLLM that our sources name and for which there is no contract."""
    texts = [path.read_text() for pattern in USERS for path in ROOT.glob(pattern)]
    used = {name.strip(".") for text in texts for name in re.findall(r"(?:from |import |\")vllm\.([a-z0-9_.]+)", text)}
    named = {module for line in contracts for module in line.split(" ")[0].lstrip("!").split("|")}
    return sorted(one for one in used if not any(known == one or known.startswith(f"{one}.") for known in named))


def main() -> int:
    """Checks every version."""
    contracts = all_contracts()
    protocols, classes = PROTOCOLS.split("\n")[1:-1], CLASSES.split("\n")[1:-1]
    problems = [f"tools/contracts.py has no contract for vllm.{one}" for one in modules_without(contracts)]
    total = len(contracts) + len(protocols) + len(classes)
    for version in VERSIONS:
        folder = CACHE / version
        if not (found := sorted(folder.glob("*.whl"))):
            download = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), *WHEEL)
            subprocess.run([*download, f"vllm=={version}"], check=True)
            found = sorted(folder.glob("*.whl"))
        with zipfile.ZipFile(found[-1]) as wheel:
            release = tuple(map(int, version.split(".")))
            missing = check(wheel, contracts, release)
            unmet = check_protocols(wheel, protocols, release) + check_classes(wheel, classes, release)
        print(f"vLLM {version}: {total} contracts, {len(missing + unmet)} broken")
        problems += [f"vLLM {version} lacks {one}" for one in missing]
        problems += [f"for vLLM {version} we lack, or have too much: {one}" for one in unmet]
    print("\n".join(problems))
    return int(bool(problems))


if __name__ == "__main__":
    raise SystemExit(main())

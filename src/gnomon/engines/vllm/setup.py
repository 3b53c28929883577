"""vLLM, built for reinforcement learning: in this process, one step at a time, no tokenizer, no telemetry."""

import contextlib
import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnomon.core.errors import EngineError
from gnomon.engines.vllm.sampling import PROCESSOR
from gnomon.models.attention import longrope_scale
from gnomon.models.auto_class import reads_images
from gnomon.models.load import model_config
from gnomon.models.tokenizer import context_of
from gnomon.models.transfer.file import lent, read

# Read when vLLM is imported. Stepping in this process is what lets weights change between two tokens; no program
# outside this machine is told anything.
FIXED = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    # Processes that hold a model together: this one has threads of its own, so they cannot be its forks.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
# Bound to cores, engines of one machine would all be bound to the same ones.
USUAL = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_HOST_IP": "127.0.0.1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


def build(
    folder: str, dtype: torch.dtype, max_concurrent: int, parts: int = 1, transfer: str = "", draws: str = "keyed"
) -> Any:
    """Return an ``LLMEngine`` of the model in ``folder``, to be stepped by the thread that calls this.

    Compiled on an accelerator; not on a CPU, where compiling took 70 to 86 s and made decoding 1.2 times faster.

    Keys and values get what ``max_concurrent`` answers of the whole context need, at most half of the memory that is
    free; VLLM_CPU_KVCACHE_SPACE (GiB) overrides it on a CPU.

    Args:
        parts: Processes, beside this one, that hold the model together (tensor parallel); one is this process itself.
        transfer: Name of the weight transfer by which the engine can receive weights (`transfer`); "" is none.
        draws: "keyed" needs a logits processor of ours, which is written for the first of vLLM's two model runners and
            steps one at a time; with "vllm" the runner is vLLM's choice, and the second one schedules ahead.
    """
    os.environ.update(FIXED)
    # A user's setting would choose a runner that does not fit ``draws``.
    os.environ.pop(_RUNNER, None)
    keyed = draws == "keyed"
    if keyed:
        os.environ[_RUNNER] = "0"
    for name, value in USUAL.items():
        os.environ.setdefault(name, value)
    with _untouched():
        from vllm import EngineArgs
        from vllm.platforms import current_platform
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        published = model_config(folder)
        arguments = EngineArgs(
            model=folder,
            # Beyond it rotary tables may be others, and vLLM chooses one for all rows by this length.
            max_model_len=context_of(published),
            hf_overrides=_overrides(published),
            dtype=str(dtype).removeprefix("torch."),
            max_num_seqs=max_concurrent,
            # Only text is asked, as token ids. What prepares images wants a tokenizer nevertheless.
            language_model_only=True,
            skip_tokenizer_init=not reads_images(published),
            # Rows of one prompt share its keys and values.
            enable_prefix_caching=True,
            enforce_eager=current_platform.is_cpu(),
            use_tqdm_on_load=False,
            async_scheduling=False,
            # Not the model's own generation config, whose temperature or penalties would change the policy.
            generation_config="vllm",
            logits_processors=[PROCESSOR],
            logprobs_mode="raw_logprobs" if keyed else "processed_logprobs",
            disable_log_stats=True,
            tensor_parallel_size=parts,
            weight_transfer_config={"backend": transfer} if transfer else None,
            # Never Ray's, although an engine may be one of its actors: all parts are in its own place.
            distributed_executor_backend="mp" if parts > 1 else "uni",
            # Only checked against what is free; the real amount is set below, once the model's shape is known.
            kv_cache_memory_bytes=1,
        )
        if not keyed:
            arguments = replace(arguments, **_native(arguments))
        config = arguments.create_engine_config(UsageContext.LLM_CLASS)
        _check_heads(config.model_config.get_head_size())
        if config.cache_config.kv_cache_memory_bytes == 1:
            config.cache_config.kv_cache_memory_bytes = _cache_bytes(config, max_concurrent)
        return LLMEngine.from_vllm_config(config, usage_context=UsageContext.LLM_CLASS, disable_log_stats=True)


def _overrides(config: Any) -> dict[str, Any]:
    """Return what vLLM has to be given in a config to compute what transformers computes from it.

    A sliding window of Cohere 2 is one token longer in vLLM 0.32 than in transformers, which the learner computes with.
    The attention scale of longrope follows from the two lengths in vLLM, whatever ``factor`` and ``attention_factor``
    say; Phi-3.5-MoE gives both scales itself.
    """
    if config.model_type == "cohere2" and config.sliding_window is not None:
        return {"sliding_window": config.sliding_window - 1}
    scale = longrope_scale(config)
    if scale is None or config.model_type == "phimoe":
        return {}
    return {"rope_parameters": {**config.rope_parameters, "short_mscale": scale, "long_mscale": scale}}


def _native(arguments: Any) -> dict[str, Any]:
    """Return what differs where vLLM's sampler draws, on the model runner that vLLM chooses for this model here.

    The second replays given tokens itself, for `VllmEngine.score`. The first leaves that to our logits processor, and
    gets prompts whole: where it cuts one it turns a seeded generator back, which those of CPUs cannot do.
    """
    from vllm.usage.usage_lib import UsageContext

    asked = replace(arguments, logits_processors=None)
    if asked.create_engine_config(UsageContext.LLM_CLASS).use_v2_model_runner:
        return {"logits_processors": None, "async_scheduling": None, "enable_trace_replay": True}
    return {"enable_chunked_prefill": False}


def tear_down(engine: Any) -> None:
    """Free what an engine holds, so that another can be built in this process."""
    from vllm.distributed import cleanup_dist_env_and_memory

    engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


def exchange_weights(engine: Any, tensors: Mapping[str, Tensor]) -> None:
    """Put a complete set of weights in place, by the names of the model's files, between two steps.

    Raises:
        EngineError: vLLM left weights of its own unchanged, which it reports in its log only; the message names them.
    """
    if engine.vllm_config.parallel_config.world_size == 1:
        missed = engine.collective_rpc(_reload, args=(tensors,))
    else:
        # Each process reads all of them and keeps its part; a message to it would be another copy for each.
        with lent(tensors.items()) as path:
            missed = engine.collective_rpc(_reload_file, args=(path,))
    pack(engine, missed)


def pack(engine: Any, missed: Iterable[Sequence[str]]) -> None:
    """Let every layer compute with the weights that it was given, once all are there.

    Args:
        missed: Of each process, the weights of its own that were left as they were.

    Raises:
        EngineError: A weight was left unchanged; the message names each one.
    """
    for passed_over in missed:
        if passed_over:
            raise EngineError(f"it took no new numbers for {', '.join(passed_over)}")
    engine.collective_rpc(_pack_tied)


def _reload_file(worker: Any, path: str) -> list[str]:
    return _reload(worker, dict(read(path)))


def _reload(worker: Any, tensors: Mapping[str, Tensor]) -> list[str]:
    """Reload, and return the names of weights, as vLLM has them, that nothing was loaded into.

    No names for an architecture that does not say what it loaded.
    """
    model = worker.model_runner.get_model()
    missed = {name for name, _ in model.named_parameters()}
    load = model.load_weights

    def noting(weights: Any) -> Any:
        loaded = load(weights)
        missed.difference_update(missed if loaded is None else loaded)
        return loaded

    # The instance's attribute hides the class's method until it is deleted below.
    model.load_weights = noting
    try:
        worker.reload_weights(weights_iterator=iter(tensors.items()))
    finally:
        del model.load_weights
    return sorted(missed)


def _pack_tied(worker: Any) -> None:
    """Pack weights that several layers share again, for each of them.

    On a CPU a layer computes with a copy of its weight, packed when it was loaded. Reloading packs the layer that the
    weight was loaded into; a head tied to the embedding would go on with the first weights, without a word.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    sharing: dict[int, list[Any]] = {}
    for layer in worker.model_runner.get_model().modules():
        for weight in layer.parameters(recurse=False):
            if weight.numel():
                sharing.setdefault(weight.data_ptr(), []).append(layer)
    for layers in sharing.values():
        for layer in layers if len(layers) > 1 else ():
            layer.quant_method.process_weights_after_loading(layer)


def _check_heads(size: int) -> None:
    """Refuse heads that vLLM's kernels for CPUs do not know: it would find out with the first token."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        known = CPUAttentionBackend.get_supported_head_sizes()
        if size not in known:
            raise ValueError(f"its attention heads are {size} wide, and on a CPU vLLM knows {known}")


def _cache_bytes(config: Any, max_concurrent: int) -> int:
    model = config.model_config
    block = int(config.cache_config.block_size or 16)
    # Each part keeps its own heads; where there are fewer heads than parts, parts keep the same one.
    parts, width = config.parallel_config.tensor_parallel_size, model.get_head_size()
    heads = max(1, model.get_total_num_kv_heads() // parts)
    # Keys and values of one position in all layers.
    token = int(2 * model.hf_text_config.num_hidden_layers * heads * width * model.dtype.itemsize)
    # One block more an answer, for its last one is seldom full; vLLM keeps one block for itself.
    tokens = int(max_concurrent * (-(-model.max_model_len // block) + 1) * block + 2 * block)
    # Half at most: the learner, graders and other engines of the machine need the rest.
    return min(token * tokens, _free_bytes() // 2)


def _free_bytes() -> int:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return int(torch.cuda.mem_get_info()[0])
    stated = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(stated["MemAvailable"].removesuffix("kB")) * 1024


@contextlib.contextmanager
def _untouched() -> Iterator[None]:
    """Keep what vLLM changes for its whole process from the learner beside it: generators, `set_num_threads`."""
    threads, plain, numbers = torch.set_num_threads, random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        torch.set_num_threads = threads
        random.setstate(plain)
        np.random.set_state(numbers)

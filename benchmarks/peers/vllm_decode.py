"""vLLM (its build for processors) on the same prompts: every answer runs to the whole budget.

python vllm_decode.py WORK.json REPEATS [bfloat16|float32 [eager]]   prints one JSON object as its last line

WORK.json comes from ``python -m benchmarks.harness.contender work``. Two measures: with log-probabilities of the
sampled tokens, which reinforcement learning needs and gnomon's engine always returns, and without. Prefix caching is
on, and emptied before each repeat, so that a prompt is computed once for its group and never carried over.
"""

import json
import os
import resource
import sys
import time

# GiB for keys and values; as many cores as everybody has; one process, so that its peak is the peak.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
CORES = sorted(os.sched_getaffinity(0))[: int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)]
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, CORES)))
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def main() -> None:
    """Load, decode, print."""
    import torch
    import vllm
    from vllm import LLM, SamplingParams, TokensPrompt

    with open(sys.argv[1], encoding="utf-8") as file:
        work = json.load(file)
    repeats, dtype = int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "bfloat16"
    budget = work["max_new_tokens"]
    asked = [TokensPrompt(prompt_token_ids=ids) for ids in work["prompt_ids"] for _ in range(work["generations"])]
    longest = max(len(ids) for ids in work["prompt_ids"]) + budget
    began = time.perf_counter()
    engine = LLM(
        work["model"],
        dtype=dtype,
        max_model_len=-(-longest // 128) * 128,
        max_num_seqs=len(asked),
        enable_prefix_caching=True,
        enforce_eager="eager" in sys.argv[4:],
    )
    loaded = time.perf_counter() - began
    measures = []
    for name, logprobs in (("decode", 0), ("decode without log-probabilities", None)):
        sampling = SamplingParams(temperature=1.0, max_tokens=budget, ignore_eos=True, logprobs=logprobs)
        rates = []
        for _ in range(repeats + 1):
            engine.reset_prefix_cache()
            began = time.perf_counter()
            answers = engine.generate(asked, sampling, use_tqdm=False)
            tokens = sum(len(answer.outputs[0].token_ids) for answer in answers)
            rates.append(tokens / (time.perf_counter() - began))
        measures.append({"name": name, "unit": "tokens/s", "values": rates[1:]})
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    measures.append({"name": "peak memory", "unit": "GiB", "values": [peak]})
    facts = {"versions": {"vllm": vllm.__version__, "torch": torch.__version__}, "dtype": dtype, "load_seconds": loaded}
    print(json.dumps({"case": "engine", "contender": "vllm", "measures": measures, "facts": facts}), flush=True)


if __name__ == "__main__":
    main()

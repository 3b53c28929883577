"""``python -m benchmarks.architectures``: twenty architectures beside plain transformers.

Each is built from a small config with seeded weights. Numbers are those of engine and learner against a plain forward
pass of each row alone, at every length at which the config changes behavior. Speed is that of 16 rows, the same model
made wider, against `generate` with a cache and against a padded forward and backward pass.
"""

import argparse
import asyncio
import json
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from benchmarks.harness.machine import describe
from benchmarks.harness.timing import repeat
from gnomon.core.types import Completion
from gnomon.engines.base import Sampling
from gnomon.engines.local import LocalEngine
from gnomon.models.attention import rotary_edge
from gnomon.models.cuda_graph_decoder import fastest_decoder
from gnomon.models.logprobs import TokenScorer
from gnomon.models.tokenizer import context_of

Shape = tuple[str, Mapping[str, Any]]
"""A family of transformers, and what its config changes."""

SHAPE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.2,
}  # fmt: skip
EDGE, LIMIT = 24, 64
TURN = {"rope_theta": 10000.0}
LONG = {
    **TURN, "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 4.0,
    "original_max_position_embeddings": EDGE,
}  # fmt: skip
YARN = {**TURN, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": EDGE}
MSCALE = YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}
LLAMA3 = {
    **TURN, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": EDGE,
}  # fmt: skip
TWO_TABLES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {**TURN, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": EDGE},
}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0, "head_dim": 8}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
NEXT = {
    "head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "shared_expert_intermediate_size": 16, **MOE,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
STATE = {
    "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1,
    "mamba_chunk_size": 8, "head_dim": 8,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip

ARCHITECTURES: Mapping[str, Shape] = {
    "Llama 3": ("Llama", {"rope_parameters": LLAMA3}),
    "Mistral, window": ("Mistral", {"sliding_window": 9}),
    "Qwen2": ("Qwen2", {}),
    "Qwen3": ("Qwen3", {"head_dim": 8}),
    "Qwen3-MoE": ("Qwen3Moe", {**MOE, "head_dim": 8}),
    "Qwen3-Next": ("Qwen3Next", NEXT),
    "Gemma 2": ("Gemma2", {"sliding_window": 9, **CAPS}),
    "Gemma 3": ("Gemma3Text", {"sliding_window": 9, "head_dim": 8, "rope_parameters": TWO_TABLES}),
    "Phi-3, longrope": ("Phi3", {"rope_parameters": LONG, "original_max_position_embeddings": EDGE}),
    "OLMo 2": ("Olmo2", {}),
    "OLMoE": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "Granite": ("Granite", {"logits_scaling": 2.0}),
    "SmolLM3": ("SmolLM3", {}),
    "Mixtral": ("Mixtral", EXPERTS),
    "gpt-oss": ("GptOss", {"sliding_window": 9, "rope_parameters": YARN | {"truncate": False}, **EXPERTS}),
    "DeepSeek-V3": ("DeepseekV3", {**LATENT, "rope_parameters": MSCALE}),
    "GLM4": ("Glm4", {"head_dim": 8}),
    "Falcon-H1": ("FalconH1", STATE),
    "LFM2": ("Lfm2", {"layer_types": ["conv", "full_attention"]}),
    "Llama 4": ("Llama4Text", {"attention_chunk_size": 8, "intermediate_size_mlp": 48, **EXPERTS}),
}

_WIDER = 8
_WIDE = {"vocab_size": 4096, "num_hidden_layers": 4, "max_position_embeddings": 512, "initializer_range": 0.02}
_WIDTHS = frozenset(
    [
        "hidden_size",
        "intermediate_size",
        "head_dim",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "mamba_d_ssm",
        "mamba_d_head",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_rope_head_dim",
        "qk_nope_head_dim",
        "v_head_dim",
        "intermediate_size_mlp",
        "sliding_window",
        "attention_chunk_size",
        "mamba_chunk_size",
        "original_max_position_embeddings",
    ]
)
"""Sizes that grow with a model, and lengths at which something changes."""
_PROMPTS, _ANSWERS, _BUDGET = (24, 33, 41, 52), 4, 64


@dataclass(frozen=True)
class Row:
    """One line of the table: differences of log-probabilities, ways, and seconds (plain transformers beside them)."""

    name: str
    learner_difference: float
    engine_difference: float
    drawn_by: str
    scored_by: str
    draw: tuple[float, ...]
    plain_draw: tuple[float, ...]
    update: tuple[float, ...]
    plain_update: tuple[float, ...]


def made(shape: Shape) -> Any:
    """Return a seeded model."""
    family, changes = shape
    torch.manual_seed(0)
    config = getattr(hf, f"{family}Config")(**SHAPE | dict(changes))
    # Scores that are bounded are computed by eager attention, as `load_model` asks for.
    eager = {"attn_implementation": "eager"} if "attn_logit_softcapping" in changes else {}
    return hf.AutoModelForCausalLM.from_config(config, **eager).eval()


def wider(shape: Shape) -> Shape:
    """Return the same architecture with every width and length times eight, four layers and 4,096 tokens."""
    family, changes = shape
    grown: dict[str, Any] = {name: _grown(name, value) for name, value in (SHAPE | dict(changes)).items()} | _WIDE
    if "layer_types" in grown:
        grown["layer_types"] = grown["layer_types"] * 2
    return family, grown


def _grown(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _grown(key, own) for key, own in value.items()}
    if name in ("short_factor", "long_factor"):
        return value * _WIDER
    return value * _WIDER if name in _WIDTHS and isinstance(value, int) else value


def lengths_of(model: Any) -> list[int]:
    """Return lengths around every length at which the config changes behavior, and far from them."""
    text, limit = model.config.get_text_config(), context_of(model.config) or LIMIT
    stated = [vars(text).get(name) for name in ("sliding_window", "attention_chunk_size")]
    marks = [n for n in (*stated, rotary_edge(model.config), EDGE, limit) if isinstance(n, int)]
    near = {n + by for n in marks for by in (-1, 0, 1)} | {6, 40}
    longest = vars(text).get(text.attribute_map.get("max_position_embeddings", "max_position_embeddings")) or LIMIT
    return sorted(n for n in near if 6 <= n <= min(longest, LIMIT))


def alone(model: Any, row: Tensor, prompt: int) -> Tensor:
    """Return the log-probabilities of a row's answer by a plain forward pass of the row."""
    with torch.no_grad():
        policy = model(input_ids=row[None], use_cache=False).logits[0, prompt - 1 : -1].float().log_softmax(-1)
    return policy.gather(1, row[prompt:, None])[:, 0]


def differences(model: Any) -> tuple[float, float]:
    """Return the largest difference of log-probabilities from rows alone, of learner and engine.

    Rows of all `lengths_of` a model are scored together, and drawn together by five; some have one prompt.
    """
    lengths, prompt = lengths_of(model), 4
    tokens = torch.randint(3, 96, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(1))
    tokens[::2, :prompt] = tokens[0, :prompt]
    mask = torch.arange(max(lengths) - prompt) < (torch.tensor(lengths) - prompt)[:, None]
    with torch.no_grad():
        scores = TokenScorer(model)(tokens, torch.full((len(lengths),), prompt), mask).logprobs
    pairs = [
        (scores[row, : length - prompt], alone(model, tokens[row, :length], prompt))
        for row, length in enumerate(lengths)
    ]
    limit = context_of(model.config) or LIMIT
    prompts = [tokens[row, : length - 4] for row, length in enumerate(lengths) if 6 <= length <= limit]
    asks = [(p.tolist(), [i], Sampling(max_completion_length=4)) for i, p in enumerate(prompts)]
    answers = []
    for given, [done] in zip(prompts, drawn(model, asks), strict=True):
        whole = torch.cat([given, torch.tensor(done.tokens)])
        answers.append((torch.tensor(done.logprobs), alone(model, whole, len(given))))
    return _farthest(pairs), _farthest(answers)


def _farthest(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    return max(float((found - exact).abs().max()) for found, exact in pairs)


def drawn(model: Any, asks: Sequence[tuple[Sequence[int], Sequence[int], Sampling]]) -> list[list[Completion]]:
    """Return the answers of a local engine, five rows at a time, to prompts with keys that are asked at once."""

    async def together() -> list[list[Completion]]:
        engine = LocalEngine(model, max_concurrent=5)
        answers = await asyncio.gather(*(engine.generate(*each) for each in asks))
        await engine.close()
        return answers

    return asyncio.run(together())


def row_of(name: str, repeats: int) -> Row:
    """Measure one architecture; with no ``repeats`` without its speed."""
    shape = ARCHITECTURES[name]
    apart = differences(made(shape))
    model, plain = made(wider(shape)), made(wider(shape))
    scorer = TokenScorer(model)
    ways = (type(fastest_decoder(model)).__name__, way_of(scorer))
    if not repeats:
        return Row(name, *apart, *ways, (), (), (), ())
    prompts = [torch.randint(3, 4096, (n,), generator=torch.Generator().manual_seed(n)) for n in _PROMPTS]
    draws = _in_turns(repeats, _draw(model, prompts), _draw_plainly(plain, prompts))
    updates = _in_turns(repeats, _update(scorer, prompts), _update_plainly(plain, prompts))
    return Row(name, *apart, *ways, *draws, *updates)


def way_of(scorer: TokenScorer) -> str:
    """Return how the learner computes the rows of a group."""
    return "shared prompts" if scorer.shares_prompts else "padded rows" if scorer.is_split else "rows alone"


def _in_turns(repeats: int, *works: Callable[[], None]) -> list[tuple[float, ...]]:
    """Return the seconds of each work, which take turns, after one turn that does not count."""
    rounds = [[repeat(work, 1, 0)[0] for work in works] for _ in range(repeats + 1)]
    return list(zip(*rounds[1:], strict=True))


def _draw(model: Any, prompts: Sequence[Tensor]) -> Callable[[], None]:
    sampling = Sampling(max_completion_length=_BUDGET)
    asks = [(p.tolist(), [4 * i + k for k in range(_ANSWERS)], sampling) for i, p in enumerate(prompts)]
    engine = LocalEngine(model, max_concurrent=len(prompts) * _ANSWERS)

    async def ask() -> None:
        await asyncio.gather(*(engine.generate(*each) for each in asks))

    return lambda: asyncio.run(ask())


def _draw_plainly(model: Any, prompts: Sequence[Tensor]) -> Callable[[], None]:
    rows = [p for p in prompts for _ in range(_ANSWERS)]
    longest = max(map(len, rows))
    tokens = torch.stack([nn.functional.pad(row, (longest - len(row), 0)) for row in rows])
    mask = torch.stack([torch.arange(longest) >= longest - len(row) for row in rows]).long()
    budget = {"min_new_tokens": _BUDGET, "max_new_tokens": _BUDGET}

    def generate() -> None:
        with torch.inference_mode():
            model.generate(input_ids=tokens, attention_mask=mask, do_sample=True, top_k=0, pad_token_id=0, **budget)

    return generate


def _answered(prompts: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens Int[B S], prompt lengths Int[B] and mask Bool[B T] of 16 rows with answers of 17 to 64 tokens."""
    generator = torch.Generator().manual_seed(0)
    rows = [p for p in prompts for _ in range(_ANSWERS)]
    answers = [torch.randint(3, 4096, (17 + 47 * (place % 4) // 3,), generator=generator) for place in range(len(rows))]
    whole = [torch.cat(pair) for pair in zip(rows, answers, strict=True)]
    tokens = nn.utils.rnn.pad_sequence(whole, batch_first=True)
    mask = torch.stack([torch.arange(_BUDGET) < len(answer) for answer in answers])
    return tokens, torch.tensor([len(row) for row in rows]), mask


def _update(scorer: TokenScorer, prompts: Sequence[Tensor]) -> Callable[[], None]:
    tokens, lengths, mask = _answered(prompts)

    def work() -> None:
        (-scorer(tokens, lengths, mask).logprobs.sum()).backward()
        scorer.model.zero_grad()

    return work


def _update_plainly(model: Any, prompts: Sequence[Tensor]) -> Callable[[], None]:
    tokens, lengths, mask = _answered(prompts)
    places = torch.arange(tokens.shape[1])
    inside = (places[None] < (lengths + mask.sum(1))[:, None]).long()
    wanted = (places[None] >= lengths[:, None]) & inside.bool()

    def work() -> None:
        logits = model(input_ids=tokens, attention_mask=inside, use_cache=False).logits[:, :-1]
        losses = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        (losses * wanted[:, 1:].flatten()).sum().backward()
        model.zero_grad()

    return work


def table(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown; times are those of plain transformers over ours, by least seconds."""
    lines = [
        "| | learner | engine | drawn by | scored by | drawing | updating |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        times = [
            f"{min(b) / min(a):.2f}x" if a else ""
            for a, b in ((row.draw, row.plain_draw), (row.update, row.plain_update))
        ]
        numbers = f"{row.learner_difference:.0e} | {row.engine_difference:.0e}"
        lines.append(f"| {row.name} | {numbers} | {row.drawn_by} | {row.scored_by} | {times[0]} | {times[1]} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the architectures named, or all, and print JSON and a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.architectures", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ARCHITECTURES)}; all where none is")
    parser.add_argument("--repeats", type=int, default=3, help="turns that count; 0: no speed")
    parser.add_argument("--json", metavar="FILE", help="where every measurement is written")
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    hf.logging.set_verbosity_error()
    rows = []
    for name in given.names or ARCHITECTURES:
        began = time.perf_counter()
        rows.append(row_of(name, given.repeats))
        print(f"{name}: {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    if given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump({"machine": describe(), "rows": [asdict(row) for row in rows]}, file, indent=1)
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What must hold for every algorithm when processes hold the model together: they are one machine (P4)."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.laws.batches import presets
from tests.learner.together import alone, apart, moved, recipe_for, together, walk
from transformers import Gemma2Config, Gemma2ForCausalLM, GptOssConfig, GptOssForCausalLM

from gnomon.algorithms import GRPO, P3O, PPO, Algorithm, CriticConfig, EmaProximal, Kl, Updates
from gnomon.core.errors import LearnerError
from gnomon.core.types import Batch, State
from gnomon.learner.distributed import DistributedLearner
from gnomon.models.adapter_config import LoraConfig
from gnomon.models.hf_names import HfNames
from gnomon.models.tiny import BYTES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = 20
PADS = BYTES + 2
WITH_REFERENCE = replace(GRPO, name="grpo-kl", regularizers=(Kl("reference", 0.1),), updates=Updates(2, 2))
SHARED = replace(PPO, name="ppo-shared", critic=CriticConfig(trunk="shared"))
AVERAGED = replace(PPO, name="ppo-ewma", critic=CriticConfig(), proximal=EmaProximal(0.9))
LAGGED = replace(P3O, name="p3o-lagged", scope="lagged")
ROUTED = replace(GRPO, name="grpo-r2", routing="proximal", updates=Updates(2, 2))
VARIANTS: dict[str, tuple[Algorithm, dict[str, Any]]] = {
    "reference": (WITH_REFERENCE, {}),
    "shared-trunk": (SHARED, {}),
    "averaged": (AVERAGED, {}),
    "lagged": (LAGGED, {}),
    "lora": (WITH_REFERENCE, {"lora": LoraConfig(rank=4, alpha=8.0)}),
    "checkpointing": (P3O, {"gradient_checkpointing": True}),
    "mixture": (ROUTED, {"model": "tiny-moe"}),
}


@pytest.fixture(scope="module")
def gang_for() -> Iterator[Callable[[Algorithm, int], tuple[DistributedLearner, State]]]:
    """Started processes for whatever networks an algorithm needs, and the state that they began with."""
    started: dict[Any, tuple[DistributedLearner, State]] = {}
    with ExitStack() as stack:

        def get(algorithm: Algorithm, processes: int) -> tuple[DistributedLearner, State]:
            kind = (processes, algorithm.critic and algorithm.critic.trunk, "reference" in algorithm.needs)
            if kind not in started:
                distributed = stack.enter_context(together(recipe_for(algorithm, processes)))
                started[kind] = distributed, distributed.state()
            return started[kind]

        yield get


def drawn(make_batch: Callable[..., Batch], count: int = STEPS) -> list[Batch]:
    """Batches of 7 to 10 rows in groups of their own sizes, so that no number of processes parts them evenly.

    In each an answer begins with the token that pads, which a model may draw like any other.
    """
    found = []
    for seed in range(count):
        batch = make_batch(seed, 5, 2) if seed % 2 else make_batch(seed, 3, 3)
        tokens = batch.tokens.clone()
        tokens[1, batch.prompt_lengths[1]] = PADS
        found.append(batch.with_fields(tokens=tokens).rows(range(len(batch) - seed % 3)))
    return found


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("algorithm", presets(), ids=lambda a: a.name)
def test_processes_make_the_steps_of_one(algorithm: Algorithm, processes: int, gang_for, make_batch):
    """Over 20 steps weights, moments and every measure are those of a single process, to 1e-6.

    A critic makes several updates a step, at a multiple of the rate: to 2e-6.
    """
    distributed, first = gang_for(algorithm, processes)
    distributed.restore(first)
    single = alone(recipe_for(algorithm))
    batches = drawn(make_batch)
    mine, theirs = (walk(learner, algorithm, batches) for learner in (single, distributed))
    mine_after, theirs_after = single.state().tensors, distributed.state().tensors

    difference = apart(theirs_after, mine_after)
    far = moved(mine_after, first.tensors)
    print(f"{algorithm.name} in {processes}: {difference:.2e} apart after moving by {far:.2e}")
    assert difference < (1e-6 if algorithm.critic is None else 2e-6)
    assert far > 1e-4
    for one, other in zip(mine, theirs, strict=True):
        assert other == pytest.approx(one, rel=1e-3, abs=2e-6)


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("name", VARIANTS)
def test_whatever_else_is_trained_is_trained_alike(name: str, processes: int, make_batch):
    """References, critics on either trunk, averages, adapters, recomputed layers, replayed routing: the same."""
    algorithm, changes = VARIANTS[name]
    single, batches = alone(recipe_for(algorithm, 1, **changes)), drawn(make_batch, 8)
    first = single.state().tensors
    with together(recipe_for(algorithm, processes, **changes)) as distributed:
        assert apart(distributed.state().tensors, first) == 0.0
        mine, theirs = (walk(learner, algorithm, batches) for learner in (single, distributed))
        mine_after, theirs_after = single.state(), distributed.state()
        sent = dict(distributed.snapshot().tensors())
    difference = apart(theirs_after.tensors, mine_after.tensors)
    print(f"{name} in {processes}: {difference:.2e} apart")

    assert difference < 2e-6
    assert apart(sent, dict(single.snapshot().tensors())) < 2e-6
    assert {k: v for k, v in theirs_after.values.items() if k != "work"}.keys() == mine_after.values.keys() - {"work"}
    assert theirs_after.values["frozen"] == mine_after.values["frozen"]
    for one, other in zip(mine, theirs, strict=True):
        assert other == pytest.approx(one, rel=1e-3, abs=2e-6)


def test_a_process_that_stands_still_counts_as_dead(make_batch, monkeypatch: pytest.MonkeyPatch):
    """Frozen in a step, it gives no sign of life; the others wait for it, and nobody waits for them forever."""
    monkeypatch.setattr("gnomon.learner.worker_group.STILL_SECONDS", 6.0)
    with together(recipe_for(GRPO)) as distributed:
        walk(distributed, GRPO, drawn(make_batch, 1))
        programs = [member.program for member in distributed.worker_group.members]
        os.kill(programs[1].pid, signal.SIGSTOP)
        with pytest.raises(LearnerError, match="process 1 of the learner's 2 stood still for 6 s"):
            walk(distributed, GRPO, drawn(make_batch, 1))
    assert None not in [program.poll() for program in programs]


SMALL: dict[str, Any] = {
    "vocab_size": BYTES + 8, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8,
    "num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.2, "sliding_window": 5,
}  # fmt: skip
FORMS: dict[str, Callable[[], Any]] = {
    "logits that are bounded": lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, final_logit_softcapping=2.0)),
    "experts with biases, windows and sinks": lambda: GptOssForCausalLM(
        GptOssConfig(**SMALL, num_local_experts=6, num_experts_per_tok=2)
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_model_of_another_form_is_trained_alike(form: str, make_batch, tmp_path: Path):
    """Gemma 2 and gpt-oss in two processes make the steps of one, and are sent and written as one is."""
    torch.manual_seed(0)
    FORMS[form]().save_pretrained(tmp_path / "model")
    model, batches = str(tmp_path / "model"), drawn(make_batch, 4)
    single = alone(recipe_for(GRPO, 1, model=model))
    with together(recipe_for(GRPO, 2, model=model)) as distributed:
        walk(single, GRPO, batches)
        walk(distributed, GRPO, batches)
        difference = apart(distributed.state().tensors, single.state().tensors)
        sent = HfNames(model).spell(distributed.snapshot().tensors())
        distributed.write_model(tmp_path / "written")

    assert difference < 2e-6
    written = load_file(tmp_path / "written" / "model.safetensors")
    assert {name: sent[name].shape for name in written} == {name: tensor.shape for name, tensor in written.items()}
    assert apart(written, {name: sent[name] for name in written}) == 0.0


def test_bfloat16_has_float32_masters_in_parts(make_batch):
    """What is gathered is the masters' rounding, so the first step differs by the rounding of sums alone."""
    first, second = drawn(make_batch, 2)
    single = alone(recipe_for(GRPO, 1, precision="bf16"))
    with together(recipe_for(GRPO, 2, precision="bf16")) as distributed:
        walk(single, GRPO, [first])
        walk(distributed, GRPO, [first])
        assert {t.dtype for _, t in distributed.snapshot().tensors()} == {torch.bfloat16}
        sent = dict(distributed.snapshot().tensors())
        state = distributed.state().tensors
        assert apart({n: state[f"master/{n}"].bfloat16() for n in sent}, sent) == 0.0
        single.restore(distributed.state())
        for learner in (single, distributed):
            walk(learner, GRPO, [second])
        assert apart(distributed.state().tensors, single.state().tensors) < 1e-3

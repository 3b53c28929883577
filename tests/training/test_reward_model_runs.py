"""A reward model that a run trains on pairs: what it learns, what is resumed, and who reads its folder."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from tests.training.runs import broken_off, same, trace

from gnomon.config.experiment import supervised
from gnomon.core.errors import UserError
from gnomon.models.tiny import save_tiny, tiny_tokenizer
from gnomon.rewards.base import Sample
from gnomon.rewards.model import RewardModel
from gnomon.training.api import export, resume, train_experiment
from gnomon.training.python_api import evaluate
from gnomon.training.result import Result
from gnomon.training.reward_models import load_scorer

PAIRS = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": "9+9"} for n in range(12)]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SETTINGS: dict[str, Any] = {
    "steps": 5, "rollouts_per_step": 8, "held_out.size": 4, "learner.precision": "fp32", "checkpoints.every": 2,
    "checkpoints.keep_every": 1, "learner.optimizer.learning_rate": 3e-3, "device": "cpu",
}  # fmt: skip


def table(folder: Path, rows: list[dict[str, Any]], name: str = "pairs.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def model(folder: Path, template: str | None) -> str:
    """Write the tiny model whose chat template, if any, has text behind the end of an answer."""
    save_tiny(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.backend.chat_template = template
    tokenizer.save(folder)
    return str(folder)


def trained(folder: Path, template: str | None, **more: Any) -> Result:
    settings = {"model": model(folder / "begin", template), "task": table(folder, PAIRS), **SETTINGS, **more}
    return train_experiment(supervised({"name": "judge"}, [*settings.items()], "reward-model"), folder / "run")


@pytest.mark.slow
def test_a_run_learns_which_answer_was_chosen_and_goes_on_exactly(tmp_path: Path):
    """Log 2 and every pair a tie at first, all held-out pairs in order at last; broken off at step 2 it is the same."""
    run = trained(tmp_path, TEMPLATE)

    assert run.metrics["critic/loss"][0] == pytest.approx(math.log(2), abs=1e-6)
    assert run.metrics["critic/loss"][-1] < 0.5
    assert run.metrics["loss/policy"] == run.metrics["critic/loss"]
    first, last = run.evaluations[0], run.evaluations[-1]
    assert (first.scores["accuracy"].mean, first.scores["margin"].mean) == (0.5, 0)
    assert last.scores["accuracy"].mean == 1
    assert last.scores["accuracy"].low < 1
    assert evaluate(tmp_path / "run").scores["margin"].mean == pytest.approx(last.scores["margin"].mean, abs=1e-5)
    whole = trace(tmp_path / "run", 5)

    again = broken_off(tmp_path / "run", tmp_path / "again", 2)
    resume(again)

    same(trace(again, 5), whole)


@pytest.mark.slow
@pytest.mark.parametrize("cut", [{"learner.max_tokens_per_micro_batch": 32}, {"learner.processes": 2}])
def test_pairs_may_be_cut_anywhere(cut: dict[str, Any], tmp_path: Path):
    """Answers of a pair in two micro-batches, or in two processes: the weights of one pass over all, to 1e-5."""
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    for place, more in ((whole, {}), (parted, cut)):
        place.mkdir()
        trained(place, None, **more)

    heads = [run / "run" / "checkpoints" / "step-5" / "critic" / "value_head.safetensors" for run in (whole, parted)]
    one, other = (load_file(head)["score.weight"] for head in heads)
    assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("template", "form"), [(TEMPLATE, "chat"), (None, "plain")])
def test_the_score_is_one_number_wherever_it_is_read(template: str | None, form: Any, tmp_path: Path):
    """The margin of the evaluation, `kind = "model"` of the run's checkpoint and of what `gnomon export` writes, and
    transformers' own classifier of that folder: the same, at the same token.
    """
    others = [{"prompt": f"2{row['prompt']}", "chosen": f"2{row['chosen']}", "rejected": "9"} for row in PAIRS]
    asked = {"evaluation.task": table(tmp_path, others, "others.jsonl"), "held_out.size": len(others)}
    run = trained(tmp_path, template, steps=2, **asked)
    folder = export(tmp_path / "run", tmp_path / "exported")
    samples = [Sample(row["prompt"], row[kind]) for row in others for kind in ("chosen", "rejected")]

    scores = []
    for place in (run.model, folder):
        reward = RewardModel(str(place), form=form, precision="fp32", device="cpu")
        scores.append([found[""] for found in load_scorer(reward)(samples)])
    classifier = hf.AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    if template is None:
        ids = [[*tokenizer(s.prompt)["input_ids"], *s.completion.encode(), tokenizer.eos_token_id] for s in samples]
    else:
        chats = [
            [{"role": "user", "content": s.prompt}, {"role": "assistant", "content": s.completion}] for s in samples
        ]
        ids = [tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False) for chat in chats]
    padded = tokenizer.pad({"input_ids": ids}, return_tensors="pt")
    theirs = classifier(**padded).logits[:, 0]

    assert classifier.config.num_labels == 1
    assert scores[0] == pytest.approx(scores[1], abs=1e-5)
    assert scores[0] == pytest.approx(theirs.tolist(), abs=1e-5)
    margins = [a - b for a, b in zip(scores[0][::2], scores[0][1::2], strict=True)]
    assert run.evaluations[-1].scores["margin"].mean == pytest.approx(sum(margins) / len(margins), abs=1e-5)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"chosen": "", "rejected": "no"}, "chosen: .* begins and ends with an assistant's message that has text"),
        ({"chosen": "yes", "rejected": " "}, "rejected: .* has text"),
        ({"chosen": "yes", "rejected": "yes"}, "rejected: is the same as chosen, so neither is preferred"),
        ({"chosen": "yes"}, "rejected: missing"),
        ({"rejected": "no"}, "chosen: missing"),
        ({"chosen": math.nan, "rejected": "no"}, "chosen: "),
        ({"chosen": "yes", "rejected": 3}, "rejected: must be text"),
        ({"chosen": "yes", "rejected": None}, "rejected: missing"),
    ],
)
def test_rows_that_prefer_nothing_are_refused(row: dict[str, Any], said: str, tmp_path: Path):
    """Before a model is loaded, naming the row and the column."""
    path = table(tmp_path, [*PAIRS, {"prompt": "1+1=", **row}])
    settings = [("model", "tiny"), ("task", path), *SETTINGS.items()]

    with pytest.raises(UserError, match=f"(?s)pairs.jsonl:13: {said}"):
        train_experiment(supervised({}, settings, "reward-model"), tmp_path / "run")

    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"algorithm": "dpo"}, "gnomon reward-model ranks pairs .* algorithm = 'dpo' does not"),
        ({"rewards": [{"kind": "numeric"}]}, "writes no answers that could be judged; set rewards"),
        ({"max_staleness": 1}, "set max_staleness = 0"),
    ],
)
def test_what_a_reward_model_cannot_be_is_refused(more: dict[str, Any], said: str):
    """Each message names the setting."""
    with pytest.raises(UserError, match=said):
        supervised({"model": "tiny", "task": "pairs.jsonl"}, [*more.items()], "reward-model")

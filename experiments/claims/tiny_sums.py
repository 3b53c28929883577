"""Make the weights of the built-in model tiny-sums, with which `gnomon train tiny` begins.

    python -m experiments.claims.tiny_sums

The model `tiny` is taught by supervised steps on the hundred sums of two digits: at first rightly one time in five
and with another digit otherwise, for so long that the right answer to each sum is the likeliest; then rightly one time
in seven at a lower rate of learning. So it knows little and that little of every sum, as a language model does of what
its pretraining saw, the sums that are held out later among them. Five minutes on one core.
"""

from dataclasses import replace
from pathlib import Path
from random import Random

import torch
from experiments.claims.exact_rates import answer_logprobs, success_rates
from experiments.claims.pretrain import PretrainingTask
from safetensors.torch import save_file
from torch import nn

from gnomon.models.logprobs import TokenScorer
from gnomon.models.lora import merged_tensors
from gnomon.models.tiny import TINY_MODELS, TINY_SUMS, TinyConfig, tiny_model, tiny_tokenizer
from gnomon.tasks.arithmetic import ArithmeticTask
from gnomon.tasks.build import build_split
from gnomon.tasks.chat import ChatRenderer
from gnomon.tasks.split import HeldOut

# Steps, the share of right answers, and the learning rate, which falls to zero over the second half of the steps.
_STAGES = ((3000, 0.2, 3e-3), (400, 0.15, 1e-3))
_ROWS = 256


def main() -> None:
    """Write the weights in float16 beside the module that reads them, and print the model's chance to be right."""
    shape = TinyConfig()
    tokenizer, model = tiny_tokenizer(shape), tiny_model(0, shape)
    task = replace(ArithmeticTask(highest=9), size=4000)
    questions = build_split(task, HeldOut(size=0), ChatRenderer(tokenizer)).train
    for steps, rate, learning_rate in _STAGES:
        _teach(model, PretrainingTask.on(questions, tokenizer, rate, 0.0, 0.0), steps, learning_rate)
    different = list({question.text: question for question in (questions[n] for n in range(len(questions)))}.values())
    rates = success_rates(model, tokenizer, different)
    print(f"of {len(rates)} sums {sum(rates) / len(rates):.3f} are right: {min(rates):.3f} to {max(rates):.3f}")
    place = Path(__file__).parents[2] / "src" / "gnomon" / "models" / TINY_MODELS[TINY_SUMS].weights
    save_file({name: tensor.detach().to(torch.float16).contiguous() for name, tensor in merged_tensors(model)}, place)


def _teach(model: nn.Module, taught: PretrainingTask, steps: int, learning_rate: float) -> None:
    random, scorer = Random(0), TokenScorer(model)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = learning_rate * min(1.0, step / 20, 2 * (steps - step + 1) / steps)
        tasks, answers = taught.draw(_ROWS, random)
        loss = -answer_logprobs(scorer, tasks, answers).sum() / sum(map(len, answers))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


if __name__ == "__main__":
    main()

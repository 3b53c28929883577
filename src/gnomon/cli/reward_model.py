"""gnomon reward-model [EXPERIMENT] [key=value ...]: train a reward model on pairs of answers.

    gnomon reward-model model=smollm2-135m-instruct task=pairs.jsonl --run-dir runs/judge
    gnomon reward-model model=smollm2-135m-instruct task=pairs.jsonl epochs=1 max_length=1024 lora={}
    gnomon evaluate runs/judge --task more-pairs.jsonl
    gnomon export runs/judge my-reward-model

A row has prompt, chosen (the answer that was preferred) and rejected, as text or messages; or two conversations that
begin alike. The loss is -log sigmoid(score of chosen - score of rejected), the score a linear function of the state
after the last token. A later run takes it as a reward by its folder: [[rewards]] kind = "model", model = "runs/judge".
"""

from collections.abc import Sequence

from gnomon.cli import sft


def run(arguments: Sequence[str]) -> int:
    """Train a reward model; return the exit code."""
    return sft.run(arguments, "reward-model", __doc__)

"""Make the weights of the built-in model tiny-sums, with which `gnomon train tiny-sums` begins.

    python -m experiments.claims.tiny_sums

The model of `tiny` is taught by supervised steps on the hundred sums of two digits, rightly one time in seven and with
another digit otherwise (`warm_start.warm_model`), until it answers one in eight rightly: what a language model brings
along from its pretraining, which saw the sums that are held out later too.
"""

import tempfile
from pathlib import Path

import torch
from experiments.claims.warm_start import Warming, warm_model
from safetensors.torch import load_file, save_file

from gnomon.models.tiny import TINY_MODELS, TINY_SUMS
from gnomon.tasks.arithmetic import ArithmeticTask
from gnomon.tasks.split import HeldOut

WARMING = Warming(steps=900, spread=0.0, tolerance=0.005, rows=128, malformed=0.0)


def main() -> None:
    """Write the weights in float16 beside the module that reads them."""
    with tempfile.TemporaryDirectory() as spare:
        folder = warm_model(ArithmeticTask(highest=9), Path(spare), 0.15, plan=WARMING, held_out=HeldOut(size=0))
        weights = load_file(folder / "model.safetensors")
    place = Path(__file__).parents[2] / "src" / "gnomon" / "models" / TINY_MODELS[TINY_SUMS].weights
    save_file({name: tensor.to(torch.float16) for name, tensor in weights.items()}, place)


if __name__ == "__main__":
    main()

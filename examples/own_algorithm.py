"""An algorithm of your own is an expression over the pieces.

Try it:

    gnomon train tiny algorithm=examples/own_algorithm.py:CAUTIOUS steps=3
    gnomon algorithms examples/own_algorithm.py:CAUTIOUS
"""

from dataclasses import replace

from gnomon.algorithms import GRPO, Clip, ClippedSurrogate, Entropy, GroupRelative, TokenMean

CAUTIOUS = replace(
    GRPO,
    name="cautious",
    paper="ours: GRPO without the group's standard deviation, clip-higher, token mean and a little entropy",
    advantage=GroupRelative(scale="none"),
    surrogate=ClippedSurrogate(Clip(low=0.2, high=0.28)),
    aggregate=TokenMean(),
    regularizers=(Entropy(coefficient=0.001),),
)

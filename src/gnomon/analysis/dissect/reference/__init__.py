"""A second implementation of every preset: float64 numpy, written from the papers, without gnomon's pieces.

An oracle takes the arrays of one optimizer step and returns advantages, loss and gradient in closed form. Every policy
loss is -sum a c log current, with a the weight of the mean and c a coefficient; each c is written down and not
differentiated. A response is the list of its trained tokens, so an error with masks, padding or holes cannot occur in
both implementations.
"""

from gnomon.analysis.dissect.reference.arrays import ReferenceAnswer, Response, Step
from gnomon.analysis.dissect.reference.losses import ORACLES, Oracle

__all__ = ["ORACLES", "Oracle", "ReferenceAnswer", "Response", "Step"]

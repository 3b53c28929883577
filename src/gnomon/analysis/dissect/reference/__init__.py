"""Every preset a second time: float64 numpy, written from the papers' formulas, knowing none of our pieces.

An oracle takes one optimizer step's plain arrays and returns advantages, loss, and the gradient in closed form: every
policy loss is -sum a c log current (a the weight of the mean, c a coefficient), and c is written down here for each,
not differentiated. A response is the list of its trained tokens, so no mask, padding or hole can go wrong in the same
way twice.
"""

from gnomon.analysis.dissect.reference.arrays import ReferenceAnswer, Response, Step
from gnomon.analysis.dissect.reference.table import ORACLES, Oracle

__all__ = ["ORACLES", "Oracle", "ReferenceAnswer", "Response", "Step"]

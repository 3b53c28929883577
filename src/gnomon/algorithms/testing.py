"""What tests are made of, for this project's and for a user's own pieces."""

from gnomon.algorithms.piece_trial import loss_and_gradient, make_batch, try_pieces

__all__ = ["loss_and_gradient", "make_batch", "try_pieces"]

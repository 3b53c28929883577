"""WHAT TRAVELS: weights on their way from the learner to engines, rounded, and recognized where they arrive."""

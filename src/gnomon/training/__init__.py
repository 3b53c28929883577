"""The training loop, what it is built of, and evaluation."""

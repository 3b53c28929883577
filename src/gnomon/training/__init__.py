"""WHO CALLS WHOM: the walk of training, and evaluation."""

"""Computations before and after training: plans, comparisons of runs, dissected batches."""

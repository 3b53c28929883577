"""What is computed before or after training: plans, comparisons of runs, dissected batches."""

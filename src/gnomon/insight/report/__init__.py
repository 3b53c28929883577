"""One HTML page of a run, or of several beside each other, that loads nothing else."""

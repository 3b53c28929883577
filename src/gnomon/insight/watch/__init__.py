"""A run seen live on a terminal, or as lines: it reads files alone, and neither loads tensors nor takes a lock."""

"""A run seen live on a terminal, or as lines: it reads files, loads no tensors and disturbs nobody."""

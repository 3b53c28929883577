"""Which prompt is asked next, and what is remembered about each."""

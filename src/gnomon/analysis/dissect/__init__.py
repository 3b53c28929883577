"""Each algorithm's effect on one batch, checked by an independent computation."""

"""Several algorithms trained with several seeds, and what their difference is."""

"""What each algorithm makes of one batch, beside an independent computation."""

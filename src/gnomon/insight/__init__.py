"""What a person sees of a run: a page, a live view."""

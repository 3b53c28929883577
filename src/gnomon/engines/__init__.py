"""Engines: from prompts to completions."""

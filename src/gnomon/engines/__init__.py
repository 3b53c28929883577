"""WHO ANSWERS: prompts to completions."""

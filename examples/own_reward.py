"""A reward of your own, in the three signatures that gnomon understands; told apart by their parameter names.

Try it:

    gnomon train examples/own_reward.toml
"""


def brief(prompt: str, completion: str, **columns: object) -> float:
    """gnomon's: one sample, the dataset's columns as keywords."""
    return 1.0 if len(completion) <= 2 else 0.0


def starts_with_a_digit(prompts: list[str], completions: list[str], **columns: object) -> list[float | None]:
    """TRL's: lists of one; None where the reward does not apply to a sample."""
    return [float(completion[:1].isdigit()) if completion else None for completion in completions]


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    """verl's: the answer and its ground truth."""
    return float(solution_str.strip() == str(ground_truth))

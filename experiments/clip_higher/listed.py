"""What is right: three letters, each of which the question lists."""

LENGTH = 3


def listed(prompt: str, completion: str, letters: str, **columns: object) -> float:
    """Return 1 for as many letters as are asked for, all of them in the list."""
    return float(len(completion) == LENGTH and set(completion) <= set(letters))

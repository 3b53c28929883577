"""An environment that says at once whether the answer to come is right, by the toss of a coin."""

from random import Random

from gnomon.tasks.environment import Reply

SHOWN = {1.0: "yes", 0.0: "no"}


class Coin:
    """One conversation: the coin is shown before the first answer, and is its reward whatever is said."""

    def __init__(self) -> None:
        self.reward = 0.0

    def reset(self, seed: int, **columns: object) -> str:
        """Toss, and show it."""
        self.reward = float(Random(seed).random() < 0.5)
        return SHOWN[self.reward]

    def step(self, text: str) -> Reply:
        """End."""
        return Reply("", reward=self.reward, is_done=True)

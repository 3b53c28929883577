"""An environment of your own: a wrong answer to a sum is replied to with "low" or "high", and may be given again.

Try it:

    gnomon train examples/own_environment.toml
"""

from gnomon.tasks.environment import Reply


class Hints:
    """One conversation, for one rollout: `reset` begins it with the task's columns, `step` replies to an answer."""

    def __init__(self, pay: float = 1.0) -> None:
        self.pay = pay
        self.answer = 0

    def reset(self, answer: str, **columns: object) -> str | None:
        """Take what the task knows; a text returned here would be shown before the first answer."""
        self.answer = int(answer)
        return None

    async def step(self, text: str) -> Reply:
        """Reply to an answer; the first number is worth a little, the right one ends the conversation."""
        said = text.strip()
        if not (said.isascii() and said.isdigit()):
            return Reply("a number!")
        if int(said) == self.answer:
            return Reply("yes", reward=self.pay, is_done=True)
        return Reply("low" if int(said) < self.answer else "high", reward=0.1)

"""A reward model: a sequence classifier, or a language model with a value head, that scores answers."""

from dataclasses import dataclass, field
from typing import Literal

from gnomon.core.errors import ConfigError, bounded
from gnomon.rewards.base import Sample, Verifier, VerifierError


@dataclass(frozen=True)
@bounded(mean="finite", std="above 0 and finite", max_length="at least 1", batch_size="at least 1")
class RewardModel(Verifier):
    """The score of a reward model for question and answer: (scaling(logit) - mean) / std.

    The model reads the conversation by its own tokenizer and chat template. It computes in the process of the graders'
    owner, never in a grading process, and scores all answers to a question in one batch.

    Attributes:
        model: A folder or a hub name ("org/name") of a sequence classifier; or a folder that gnomon saved with a value
            head, whose value at the last token is the score.
        kind: "model".
        label: The output that is the score, by name or number, where the model has several labels.
        scaling: "none" takes the logit, "sigmoid" its logistic function, in (0, 1), and "softmax" the label's
            probability among all labels.
        mean: Subtracted from the scaled score.
        std: Divides the difference, > 0.
        form: "chat" renders the messages by the model's chat template. "pair" gives question and answer as the
            tokenizer's pair of texts, for encoders without a template; "plain" question, answer and the end token, as
            `gnomon reward-model` trains a model without a template.
        max_length: Most tokens that the model reads; none takes what its config and its tokenizer allow.
        truncation: "none" makes a longer conversation an error of that answer; "left" drops its first tokens, "right"
            its last ones. For the form "chat".
        batch_size: Conversations in one forward pass, >= 1.
        device: "auto" (PyTorch's first GPU, or the CPU), "cpu", "cuda" or "cuda:N".
        precision: "fp32", "bf16", or "auto": bf16 where the device multiplies it in hardware.

    Raises:
        ConfigError: A setting is out of bounds, or the form "pair" is to be truncated.
    """

    model: str
    kind: Literal["model"] = field(default="model", kw_only=True)
    label: str | None = None
    scaling: Literal["none", "sigmoid", "softmax"] = "none"
    mean: float = 0.0
    std: float = 1.0
    form: Literal["chat", "pair", "plain"] = "chat"
    max_length: int | None = None
    truncation: Literal["none", "left", "right"] = "none"
    batch_size: int = 8
    device: str = "auto"
    precision: Literal["auto", "fp32", "bf16"] = "auto"

    def __post_init__(self) -> None:
        if self.form == "pair" and self.truncation != "none":
            raise ConfigError(
                f"RewardModel.truncation = '{self.truncation}' would cut the marks between question and answer of the "
                "form 'pair'; set truncation = 'none', or form = 'chat'"
            )

    def __call__(self, sample: Sample) -> float:
        """Refuse: the score is computed before the sample is judged, and stands in its ``scores``."""
        raise VerifierError("a reward model's scores are computed by the grading pool, which has none for this answer")

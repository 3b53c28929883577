"""A learner whose weights move as if it had learned, and nothing more."""

import torch
from torch import nn

from gnomon.learner.learner import TorchLearner
from gnomon.learner.sections import LearnerConfig


def learner_of(model: nn.Module) -> TorchLearner:
    """Return a learner of the model."""
    return TorchLearner(model, LearnerConfig(precision="fp32"), steps=9)


def move(model: nn.Module, spread: float = 0.05) -> None:
    """Change every weight that is trained, as an update would."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * spread * parameter.requires_grad)

"""Experiments to runs, and runs to results: what the commands and the Python interface call."""

import asyncio
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gnomon.assemble import Choosing, Questions, choosing, keeping, questions
from gnomon.engines.local import LocalEngine
from gnomon.experiment import Experiment
from gnomon.learner.machine import tune_allocator
from gnomon.learner.precision import dtype_of, resolve_precision
from gnomon.learner.torch import TorchLearner
from gnomon.loop.evaluate import Evaluation, Evaluator
from gnomon.models.load import load_model


def checked(experiment: Experiment) -> Questions:
    """Return tokenizer, tasks, sampling and grading; everything that can be wrong without weights is found here.

    Raises: UserError.
    """
    return questions(experiment)

"""One update on the same rollouts: whole, with dead rows, and with a long prompt shared or not."""

from dataclasses import replace
from functools import partial

from benchmarks.harness.materials import BenchShape, Trainer, experiment_of, make_batch
from benchmarks.harness.report import BenchMeasure, BenchResult
from benchmarks.harness.sizes import Size
from benchmarks.harness.timing import peak_gib, repeat
from gnomon.learner.allocator import tune_machine
from gnomon.learner.learner import TorchLearner
from gnomon.learner.precision import dtype_of
from gnomon.models.decoder import vocabulary_size
from gnomon.models.load import load_model


def shapes(size: Size) -> dict[str, BenchShape]:
    """Return the work of each measure.

    "half dead" is "full" with equal rewards in half of the groups. "long prompt" is one group with a long prompt;
    "long prompt, not shared" the same tokens as rows of their own, each with a prompt that no other row has.
    """
    full = BenchShape((size.prompt,) * size.prompts, size.generations, size.answer, size.budget)
    long = BenchShape((size.shared_prompt,), size.generations, size.answer, size.budget)
    return {
        "full": full,
        "half dead": replace(full, degenerate=size.prompts // 2),
        "long prompt": long,
        "long prompt, not shared": replace(long, is_shared=False),
    }


def update(size: Size, repeats: int) -> BenchResult:
    """Return the seconds of one optimizer step of the fixed work's model and algorithm on made-up rollouts."""
    trainer, vocabulary = trainer_of(size)
    measures, works = [], {}
    for name, shape in shapes(size).items():
        batch = trainer.on_policy(make_batch(shape, vocabulary))
        measures.append(BenchMeasure(name, "s", repeat(partial(trainer.step, batch), repeats)))
        works[name] = [shape.work("update")]
    measures.append(BenchMeasure("peak memory", "GiB", (peak_gib(),)))
    return BenchResult("update", "gnomon", tuple(measures), {"precision": trainer.precision, "works": works})


def trainer_of(size: Size) -> tuple[Trainer, int]:
    """Return the fixed work's model and algorithm under a learner of their own, and the width of the logits."""
    tune_machine()
    experiment = experiment_of(size)
    precision = experiment.learner.precision
    assert precision != "auto", "it was resolved"
    model = load_model(experiment.model, dtype_of(precision))
    learner = TorchLearner(model, experiment.learner, 1)
    return Trainer(learner, experiment.algorithm, precision), vocabulary_size(model)

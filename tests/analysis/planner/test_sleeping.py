"""One set of devices for both: an engine that sleeps while the learner of its device works."""

from dataclasses import replace

import pytest

from gnomon.analysis.planner.deployment import Deployment, place_of
from gnomon.analysis.planner.layout import engine_memory, learner_memory
from gnomon.analysis.planner.search import best_layout
from gnomon.analysis.planner.text import forecast
from gnomon.config.experiment import load
from gnomon.core.errors import ConfigError
from gnomon.training.resolve import Resolved


def asleep(place: Deployment) -> Deployment:
    return replace(place, job=replace(place.job, is_sleeping=True))


def test_every_device_learns_and_answers(make_place):
    """Eight devices are eight learners and eight engines, and neither's own part is counted for the other."""
    divided = make_place(devices=8)
    place = asleep(divided)

    layout = best_layout(place).layout
    learner, engine = learner_memory(place, layout), engine_memory(place, layout)

    assert (layout.learners, layout.engines, layout.parts) == (8, 8, 1)
    assert learner.fits
    assert engine.fits
    weights = place.shape.parameters * place.job.item
    kept = sum(learner.parts[name] for name in ("weights", "gradients", "moments"))
    assert engine.parts["weights and what is learned with"] == pytest.approx(kept + weights)
    assert "cache" not in learner.parts
    assert "activations" not in engine.parts
    # The activations of one and the weights and cache of the other: the larger and not the sum has to fit.
    both = learner.total + weights + engine.parts["cache"]
    assert max(learner.total, engine.total) < both
    # Two processes have two sets of libraries.
    assert learner.parts["libraries"] == 2 * learner_memory(divided, layout).parts["libraries"]


def test_weights_cross_from_process_to_process(make_place):
    """The engine has its own, so that they are sent; the advice is not given where it is followed."""
    divided = forecast(make_place(devices=8))
    shared = forecast(asleep(make_place(devices=8)))

    assert shared.found.stages.publishing > 0
    assert any("engine.sleeps = true" in said for said in divided.limits)
    assert not any("engine.sleeps" in said for said in shared.limits)
    assert "8 learn, 8 answer as 8 engines of 1, the same in turn" in " ".join(shared.sentences())


def test_one_device_needs_weights_that_can_be_released():
    """With an offloaded learner the engine's weights are not counted while it learns; otherwise they are one's own."""

    def place(*overrides: str) -> Deployment:
        settings = ["model=qwen3-8b", "learner.precision=bf16", "sampling.max_completion_length=4096", *overrides]
        return place_of(Resolved(load("tiny", settings).experiment), "h100", 1, 512, 1024)

    with pytest.raises(ConfigError, match=r"leave engine\.sleeps out, or set learner.offload = true"):
        place("engine.sleeps=true")
    awake, turns = place("learner.offload=true"), place("learner.offload=true", "engine.sleeps=true")
    layout = best_layout(turns).layout
    weights = turns.shape.parameters * turns.job.item
    saved = learner_memory(awake, layout).total - learner_memory(turns, layout).total
    assert saved == pytest.approx(weights - turns.reached.libraries)

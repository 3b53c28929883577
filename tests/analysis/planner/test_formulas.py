"""Memory, traffic and seconds: laws that hold for every layout, and numbers worked out by hand."""

from collections.abc import Callable
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.analysis.planner.deployment import Deployment, Lengths, PlannedJob
from gnomon.analysis.planner.hardware import GPUS, PUBLISHED, SOURCES, Efficiencies, hardware_of
from gnomon.analysis.planner.layout import (
    Layout,
    answering,
    concurrency,
    engine_memory,
    flowing,
    gathering,
    host_memory,
    learner_memory,
    micro_batches,
    pace_of,
    publishing,
    stages,
    traffic,
    update_seconds,
)
from gnomon.analysis.planner.shapes import SHAPES
from gnomon.core.errors import ConfigError

Maker = Callable[..., Deployment]
PARTED = ("weights", "gradients", "moments", "reference", "critic", "average")


def test_every_efficiency_says_where_it_is_from():
    """No number in the formulas is without a kind and a source."""
    assert {field.name for field in fields(Efficiencies)} == set(SOURCES)


@pytest.mark.parametrize("name", GPUS)
def test_data_sheets_are_plausible(name: str):
    """Computing a number takes longer than reading it, the link is slower than memory, the network than the link."""
    gpu = hardware_of(name)

    assert gpu.operations > 70 * gpu.bandwidth > 70 * gpu.link > 70 * gpu.net
    assert gpu.source


def test_unknown_hardware_is_refused_with_the_nearest_name():
    """h10 is h100."""
    with pytest.raises(ConfigError, match="'h100'"):
        hardware_of("h10")


@pytest.mark.parametrize("job", [{}, {"has_reference": True, "has_critic": True, "has_average": True}, {"rank": 16}])
def test_memory_falls_as_one_over_the_devices_plus_constants(job: dict[str, object], make_place: Maker):
    """What is parted is exactly half on twice as many; everything else is the same."""
    place = make_place(**job)
    few, many = (learner_memory(place, Layout(n, 4)).parts for n in (8, 16))

    for name, size in few.items():
        assert many[name] == pytest.approx(size / 2 if name in PARTED else size)


def test_a_weight_that_is_trained_takes_16_bytes(make_place: Maker):
    """Float32 master 4, gradient 4, two moments 8, over all devices together, whatever the computing precision."""
    place = make_place()
    for item in (2, 4):
        held = learner_memory(replace(place, job=replace(place.job, item=item)), Layout(8, 4)).parts
        whole = 8 * (held["weights"] + held["gradients"] + held["moments"])
        assert whole == pytest.approx(16 * place.shape.parameters)


def test_adapters_leave_the_frozen_weights_and_little_else(make_place: Maker):
    """Frozen weights are 2 bytes each; adapters of rank 16 on an 8-billion model are 44 million: 0.7 GB in all."""
    place = make_place(rank=16)
    held = learner_memory(place, Layout(1, 4)).parts

    assert place.shape.adapters(16) / 1e6 == pytest.approx(43.6, abs=0.1)
    assert held["weights"] == pytest.approx(2 * place.shape.parameters + 4 * place.shape.adapters(16))
    assert held["moments"] == 8 * place.shape.adapters(16)
    assert host_memory(place, Layout(1, 4))["saving"] < 20e9 < host_memory(make_place(), Layout(1, 4))["saving"]


def test_offloaded_parts_are_on_no_device(make_place: Maker):
    """They are in the nodes' memory instead, each device's share of 16 bytes a weight."""
    place = make_place(is_offloaded=True)
    held = learner_memory(place, Layout(16, 4)).parts

    assert sum(held[name] for name in PARTED) == 0
    assert host_memory(place, Layout(16, 4))["offloaded"] == pytest.approx(16 * place.shape.parameters / 2)


def test_computing_layers_again_keeps_one_number_a_width_of_each_layer(make_place: Maker):
    """36 layers of width 4096 keep 22 widths each, or their inputs and one layer's 22: 792 or 58 numbers."""
    place = make_place()
    kept, again = (
        learner_memory(place, Layout(8, 4, micro=1000, is_recomputed=is_recomputed)).parts["activations"]
        for is_recomputed in (False, True)
    )

    assert kept == 1000 * 2 * 792 * 4096
    assert again == 1000 * 2 * 58 * 4096


def test_the_cache_has_room_for_what_memory_leaves(make_place: Maker):
    """72 GB to plan less 2 of libraries and 16.4 of weights; an answer of 506 tokens on average takes 144 KiB each."""
    place = make_place(concurrent=10_000)
    room = 72e9 - 2e9 - 2 * place.shape.parameters
    rows = concurrency(place, Layout(8, 8))

    assert rows == int(room / (506 * 36 * 2 * 8 * 128 * 2))
    assert engine_memory(place, Layout(8, 8)).fits
    assert concurrency(make_place("qwen3-235b-a22b"), Layout(8, 8)) == 0


def test_a_gather_is_size_over_rate_and_a_ring_of_hops(make_place: Maker):
    """8 devices: 360 GB/s, 7 hops. 16 in two nodes: 320 GB/s by eight adapters, 14 hops inside, one between."""
    place = make_place()

    assert gathering(place, 1, 1e9, 5) == 0
    assert gathering(place, 8, 36e9, 0) == pytest.approx(0.1)
    assert gathering(place, 8, 0, 10) == pytest.approx(10 * 7 * 3.4e-6)
    assert gathering(place, 16, 32e9, 1) == pytest.approx(0.1 + 14 * 3.4e-6 + 14e-6)


def test_two_copies_of_the_weights_and_one_of_the_gradients_travel_a_pass(make_place: Maker):
    """docs/scaling.md: weights in bfloat16 twice, gradients in float32 once, times (N - 1) / N."""
    place = make_place()
    layout = Layout(8, 8, micro=4096)
    moved, passes = traffic(place, layout), micro_batches(place, layout)

    assert passes == 3  # 16 prompts of 256 and 128 answers of 500 are 68,096 tokens, 8,512 a device
    assert moved.gathered == pytest.approx(7 / 8 * 2 * 2 * place.shape.parameters * passes)
    assert moved.reduced == pytest.approx(7 / 8 * 4 * place.shape.parameters * passes)
    assert moved.published == 2 * place.shape.parameters


def test_adapters_travel_alone_and_are_merged_on_each_node(make_place: Maker):
    """Float32 A and B are put and fetched; the whole weights are merged at 8 GB/s and go to the devices."""
    whole, place = make_place(), make_place(rank=32)
    layout = Layout(8, 8)
    adapters, size = 4 * place.shape.adapters(32), 2 * place.shape.parameters

    assert traffic(place, layout).published == adapters < size / 20
    assert publishing(place, layout)["store"] < publishing(whole, layout)["store"]
    assert publishing(place, layout)["store"] > size / 8e9


def test_a_step_of_decoding_by_hand(make_place: Maker):
    """One row of the 8-billion model: 1.4 ms, and 15.1 GB of layers and head at 0.75 of 3.35 TB/s are 6.0 ms."""
    pace = pace_of(make_place(), Layout(8, 8))
    read = 2 * (pace.shape.body + pace.shape.embedding)

    assert pace.fixed(1) == pytest.approx(1.4e-3 + read / (0.75 * 3.35e12) + read / (0.54 * 989e12))
    assert pace.fixed(1) * 1e3 == pytest.approx(7.46, abs=0.01)


def test_an_update_by_hand(make_place: Maker):
    """Six operations a weight and token of the layers, eight with layers computed again; the head on answers alone."""
    place = make_place(answers=Lengths(500, 500, sigma=0))
    shape, job = place.shape, place.job
    pairs = 16 * 256**2 / 2 + 128 * (500 * 256 + 500**2 / 2)
    forward = 2 * shape.body * job.computed + 4 * 36 * 32 * 128 * pairs
    head = 2 * shape.embedding * job.answered

    for again, times in ((False, 3), (True, 4)):
        computing, _ = update_seconds(place, Layout(8, 8, is_recomputed=again))
        assert computing == pytest.approx((times * forward + 3 * head) / (8 * 989e12 * 0.33), rel=2e-3)


@settings(deadline=None, max_examples=40)
@given(
    engines=st.integers(1, 64),
    prompts=st.integers(1, 200),
    mean=st.integers(10, 1900),
    concurrent=st.integers(1, 512),
    model=st.sampled_from(["qwen3-8b", "qwen2.5-7b"]),
)
def test_more_engines_never_answer_slower(engines: int, prompts: int, mean: int, concurrent: int, model: str):
    """Neither a step's answers by themselves nor a stream of them, whatever is asked."""
    job = PlannedJob(prompts, 8, 256, Lengths(mean, 2000), concurrent=concurrent)
    place = Deployment(SHAPES[model], GPUS["h100"], job, PUBLISHED, 1024)

    for seconds in (answering, flowing):
        assert seconds(place, Layout(8, engines + 1)) <= seconds(place, Layout(8, engines)) * (1 + 1e-9)


@settings(deadline=None, max_examples=40)
@given(learners=st.integers(1, 64), micro=st.integers(1000, 50_000))
def test_more_learners_never_compute_longer(learners: int, micro: int):
    """What is computed is parted evenly; only communicating grows."""
    place = Deployment(SHAPES["qwen3-8b"], GPUS["h100"], PlannedJob(64, 8, 256, Lengths(500, 2000)), PUBLISHED, 1024)
    fewer, more = (update_seconds(place, Layout(n, 8, micro=micro)) for n in (learners, learners + 1))

    assert more[0] < fewer[0]


def test_stages_add_up(make_place: Maker):
    """A synchronous step is every stage, an overlapped one the slowest side or the longest answers."""
    taken = stages(make_place(), Layout(8, 8))

    assert taken.synchronous() == taken.answering + taken.grading + taken.driving + taken.updating + taken.publishing
    assert taken.overlapped(1) == max(taken.answering, taken.flowing, taken.learning)
    assert taken.overlapped(1000) == max(taken.flowing, taken.learning)
    assert max(taken.computing, taken.communicating) <= taken.updating <= taken.computing + taken.communicating


def test_weights_travel_by_the_store_slower_than_by_nccl(make_place: Maker):
    """In one node and between nodes; and between nodes longer than in one."""
    inside, between = (publishing(make_place(), layout) for layout in (Layout(4, 4), Layout(8, 8)))

    assert inside["store"] > inside["nccl"]
    assert between["store"] > between["nccl"]
    assert between["store"] > inside["store"]


@settings(deadline=None, max_examples=60)
@given(longest=st.integers(2, 30_000), share=st.floats(0.05, 0.95), sigma=st.floats(0, 2))
def test_lengths_have_the_mean_that_was_asked_for(longest: int, share: float, sigma: float):
    """Cut at the budget, the mean is what it should be; quantiles rise, and no answer is longer than the budget."""
    mean = max(1.0, share * longest)
    lengths = Lengths(mean, longest, sigma)
    drawn = [lengths.of((n + 0.5) / 400) for n in range(400)]

    assert sum(drawn) / 400 == pytest.approx(mean, rel=0.03, abs=1)
    assert drawn == sorted(drawn)
    assert 1 <= drawn[0] <= drawn[-1] <= longest
    assert lengths.alive(0) == pytest.approx(1)


def test_lengths_that_cannot_be_are_refused():
    """A mean above the most that an answer may have."""
    with pytest.raises(ConfigError, match=r"lengths\.mean must be from 1 to longest = 100 tokens, got 101"):
        Lengths(101, 100)

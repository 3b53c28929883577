"""Compositions that cannot be meant, each refused with its fix."""

import random
import re
from dataclasses import fields, replace
from math import inf, nan
from typing import Any, get_type_hints

import pytest

from gnomon.algorithms import (
    A_STAR_PO,
    CISPO,
    DAPO,
    DR_GRPO,
    GMPO,
    GRPO,
    GSPO,
    LUFFY,
    NAMED,
    P3O,
    PPO,
    PRESETS,
    RAFT,
    REINFORCE_PP_BASELINE,
    SAPO,
    SDFT,
    SDPO,
    SPO,
    VAPO,
    VAPO_REVIEW,
    Algorithm,
    Cap,
    Clip,
    ClippedSurrogate,
    ConstantAdvantage,
    ConstantLength,
    CriticConfig,
    EmaProximal,
    EssCap,
    EssKl,
    Gae,
    GeometricClip,
    GivenShaping,
    Greso,
    GroupRelative,
    Informative,
    Kl,
    MaskedIS,
    OptimalValue,
    OverlongPenalty,
    PolicyGradient,
    Prioritized,
    Ratio,
    ReferencePolicy,
    Regression,
    RejectionSampling,
    SelfImitation,
    SelfImitationBuffer,
    SequenceMean,
    SigmoidGate,
    TokenMean,
    TrackedBaseline,
    TrackerConfig,
    TruncatedIS,
    Uniform,
    Updates,
    Whitened,
)
from gnomon.algorithms.build import _value, resolve
from gnomon.algorithms.validate import Fix, changed, refusals, said
from gnomon.config.experiment import load, to_toml
from gnomon.config.reading import parse_override
from gnomon.core.errors import ConfigError
from gnomon.core.tables import set_path
from gnomon.testing import loss_and_gradient, make_batch

REFUSED: list[tuple[str, Any, dict[str, Any], str]] = [
    ("sequence ratio, token mean", GSPO, {"aggregate": TokenMean()}, 'set algorithm.aggregate = "SequenceMean"'),
    ("token mean, sequence ratio", DAPO, {"ratio": Ratio(level="sequence_token")}, "TokenMean"),
    ("behavior ratio, correction", P3O, {"correction": TruncatedIS()}, 'set algorithm.correction = "none"$'),
    ("group of one", GRPO, {"num_generations": 1}, "group size 1.*'spo'.*set algorithm.num_generations = 2"),
    ("no generations", SPO, {"num_generations": 0}, "at least 1, got 0"),
    ("tracked without tracker", SPO, {"tracker": None}, "the advantage TrackedBaseline needs a tracker"),
    ("prioritized without tracker", GRPO, {"sampler": Prioritized()}, "sampler Prioritized needs a tracker"),
    ("tracked and keep", SPO, {"keep": Informative(), "num_generations": 4}, 'algorithm.keep = "none"'),
    ("keep of one", PRESETS["reinforce"], {"keep": Informative()}, "one response is never kept"),
    (
        "whitened group score",
        REINFORCE_PP_BASELINE,
        {"advantage": Whitened(GroupRelative())},
        'algorithm.advantage.of.scale = "none"',
    ),
    ("whitened twice", SPO, {"advantage": Whitened(TrackedBaseline())}, "advantage.of.normalize = false"),
    (
        "whitened whitened",
        DR_GRPO,
        {"advantage": Whitened(Whitened(GroupRelative("none")))},
        'algorithm.advantage.of = {piece = "GroupRelative", scale = "none"}',
    ),
    (
        "drift that nobody measures",
        SPO,
        {"tracker": TrackerConfig(drift="accumulated"), "updates": Updates()},
        '"replayed" or algorithm.tracker.drift = "constant" or algorithm.updates.minibatches = 2',
    ),
    (
        "effective size of the wrong ratio",
        P3O,
        {"ratio": Ratio()},
        'EssCap .* EssKl .* algorithm.ratio.anchor = "behavior"',
    ),
    (
        "effective size of the wrong ratio, inside of another surrogate",
        LUFFY,
        {"surrogate": GivenShaping(PolicyGradient(EssCap()))},
        'EssCap .* algorithm.ratio.anchor = "behavior" or algorithm.surrogate.of.trust = "Cap"',
    ),
    (
        "two lengths of the reference's distributions",
        SDFT,
        {"regularizers": (Kl("reference", 0.1, "exact"),)},
        "100 likeliest tokens .* set algorithm.regularizers.0.top_k = 100",
    ),
    ("leash of the wrong ratio", CISPO, {"regularizers": (EssKl(),)}, 'EssKl .* algorithm.ratio.anchor = "behavior"'),
    ("soft gate with a correction", SAPO, {"correction": TruncatedIS()}, "SigmoidGate"),
    ("geometric clip, token mean", GMPO, {"aggregate": TokenMean()}, "only SequenceMean"),
    ("geometric clip, sequence ratio", GMPO, {"ratio": Ratio(level="sequence")}, 'algorithm.ratio.level = "token"'),
    ("another answer of a group of one", SDPO, {"num_generations": 1}, "no row would be taught; set .*generations = 2"),
    ("the best of one", RAFT, {"num_generations": 1}, "set algorithm.num_generations = 2"),
    ("an advantage of 0", SDFT, {"advantage": ConstantAdvantage(0.0)}, "set algorithm.advantage.value = 1.0"),
    ("one term twice", GRPO, {"regularizers": (Kl(), Kl())}, "kl_reference appear more than once"),
    ("punished and masked", DAPO, {"mask_truncated": True}, 'mask_truncated = false or algorithm.overlong = "none"'),
    (
        "lambda by length without a critic",
        VAPO,
        {"critic": None},
        'Gae reads the values of a critic.*set algorithm.critic = "CriticConfig"',
    ),
    (
        "a critic that nobody reads",
        GRPO,
        {"critic": CriticConfig()},
        'GroupRelative reads no values.*algorithm.critic = "none"',
    ),
    ("imitation without a critic", GRPO, {"regularizers": (SelfImitation(),)}, "SelfImitation reads the values"),
    (
        "surplus without a critic",
        GRPO,
        {"replay": SelfImitationBuffer(weigh="surplus")},
        'algorithm.replay.weigh = "all"',
    ),
    (
        "regression on a ratio",
        GRPO,
        {"surrogate": Regression()},
        r'ratio = \{anchor = "reference", level = "sequence_product", clamp = inf\}',
    ),
    ("ratio to the reference", GRPO, {"ratio": Ratio(anchor="reference")}, 'set algorithm.ratio.anchor = "proximal"'),
    ("regression of tokens", A_STAR_PO, {"aggregate": ConstantLength(8)}, 'aggregate = "SequenceMean"'),
    ("regression, correction", A_STAR_PO, {"correction": TruncatedIS()}, 'algorithm.correction = "none"'),
    ("regression, scaled", A_STAR_PO, {"advantage": TrackedBaseline()}, "advantage.normalize = false"),
    (
        "scope that nobody reads",
        GRPO,
        {"scope": "lagged"},
        'only a ratio to behavior reads; set algorithm.scope = "step"',
    ),
    ("average that nobody reads", P3O, {"proximal": EmaProximal()}, 'set algorithm.proximal = "none"$'),
    ("average and drift", SPO, {"proximal": EmaProximal()}, 'algorithm.tracker.drift = "constant"'),
    ("average and shared trunk", VAPO_REVIEW, {"proximal": EmaProximal()}, 'algorithm.critic.trunk = "separate"'),
    (
        "uncertainty of fixed values",
        A_STAR_PO,
        {"sampler": Prioritized()},
        'needs a tracker; set algorithm.tracker = "TrackerConfig"',
    ),
    (
        "values that nobody reads",
        GRPO,
        {"tracker": OptimalValue()},
        "nothing reads the values of tracker = OptimalValue",
    ),
    ("skipping single responses", PPO, {"sampler": Greso()}, "set algorithm.num_generations = 2"),
    (
        "rows that are never there",
        GRPO,
        {"replay": SelfImitationBuffer(capacity=2, rows=3)},
        "replay.rows = 2 or .*capacity = 3",
    ),
    ("cap without a ratio, corrected", P3O, {"ratio": Ratio(), "correction": TruncatedIS()}, "EssCap"),
    ("regression of tokens, tracked", DAPO, {"surrogate": Regression()}, "Regression has one error a response"),
    (
        "a critic for imitation alone",
        VAPO,
        {"critic": None, "regularizers": (SelfImitation(),)},
        "Gae reads.*SelfImitation reads",
    ),
    (
        "a mistake that one change cannot mend",
        P3O,
        {"surrogate": Regression(), "aggregate": SequenceMean()},
        r"clamp = inf\} and algorithm.regularizers = \[\]",
    ),
    (
        "everything at once",
        P3O,
        {"correction": TruncatedIS(), "sampler": Prioritized(), "proximal": EmaProximal()},
        "; and ",
    ),
    (
        "binary tracker of other rewards",
        SPO,
        {"overlong": OverlongPenalty()},
        'algorithm.tracker.rewards = "continuous"',
    ),
]


PARTS: dict[str, list[Any]] = {
    "advantage": [GroupRelative(), TrackedBaseline(), Gae(), Whitened(GroupRelative()), Whitened(TrackedBaseline())],
    "ratio": [Ratio(), Ratio("behavior"), Ratio("reference"), Ratio("behavior", "sequence")],
    "surrogate": [
        ClippedSurrogate(),
        PolicyGradient(EssCap()),
        PolicyGradient(Cap()),
        SigmoidGate(),
        GeometricClip(),
        Regression(),
    ],
    "aggregate": [TokenMean(), SequenceMean()],
    "correction": [None, TruncatedIS()],
    "regularizers": [(), (EssKl(),), (Kl(), Kl()), (Kl(), SelfImitation())],
    "updates": [Updates(), Updates(2, 2)],
    "num_generations": [0, 1, 8],
    "sampler": [Uniform(), Prioritized(), Greso()],
    "tracker": [None, TrackerConfig(), TrackerConfig(drift="accumulated"), OptimalValue()],
    "keep": [None, Informative()],
    "overlong": [None, OverlongPenalty()],
    "critic": [None, CriticConfig()],
    "proximal": [None, EmaProximal()],
    "replay": [None, SelfImitationBuffer(weigh="surplus"), SelfImitationBuffer(rows=5, capacity=2)],
    "scope": ["step", "lagged"],
}


@pytest.mark.parametrize(("base", "changes", "message"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_what_cannot_be_meant_is_refused(base: Any, changes: dict[str, Any], message: str):
    """Each composition raises ConfigError that names the algorithm and the fix."""
    with pytest.raises(ConfigError, match=message) as raised:
        replace(base, **changes)

    assert str(raised.value).startswith(f"algorithm '{base.name}': ")


def fixes(message: str) -> list[str]:
    """Return what a refusal says to set, as it is typed: "algorithm.keep = "none"", joined by " and " if several."""
    said = message.partition("': ")[2].split("; ")
    return [fix for part in said if part.startswith("set ") for fix in part.removeprefix("set ").split(" or ")]


def mended(algorithm: Algorithm, changes: dict[str, Any], typed: str) -> dict[str, Any]:
    """Return the changes with those that ``typed`` makes on top, as the fields of a composition that may be wrong."""
    table = {key: value for key, value in parsed(typed).items() if key != "preset"}
    there = {f.name: getattr(algorithm, f.name) for f in fields(algorithm)} | changes
    hints = get_type_hints(Algorithm)
    return {**changes, **{key: _value(hints[key], there[key], value, key) for key, value in table.items()}}


def parsed(typed: str) -> dict[str, Any]:
    """Return the algorithm's table after such overrides on the command line."""
    whole: dict[str, Any] = {"algorithm": {}}
    for override in typed.split(" and "):
        set_path(whole, *parse_override(override))
    return dict(whole["algorithm"])


@pytest.mark.parametrize(("base", "changes"), [r[1:3] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_every_fix_that_a_refusal_offers_works(base: Any, changes: dict[str, Any]):
    """Typed as the message has it, each fix builds, or leaves fewer mistakes, whose fixes work too."""
    open_ends, seen = [changes], 0
    while open_ends:
        tried = open_ends.pop()
        with pytest.raises(ConfigError, match="algorithm") as raised:
            replace(base, **tried)
        mistakes, offered = str(raised.value).count("; and ") + 1, fixes(str(raised.value))
        assert offered, f"nothing to do: {raised.value}"
        for fix in offered:
            seen += 1
            after = mended(base, tried, fix)
            found = refusals(unchecked(base, after))
            assert len(found) < mistakes, f"{fix} after {raised.value}"
            open_ends += [after] if found else []
    assert seen > 0


def unchecked(algorithm: Algorithm, changes: dict[str, Any]) -> Algorithm:
    """Return a composition that may be wrong."""
    for path, value in changes.items():
        algorithm = changed(algorithm, Fix(path, value))
    return algorithm


@pytest.mark.parametrize("preset", PRESETS.values(), ids=lambda a: a.name)
def test_no_refusal_is_without_a_way_out(preset: Algorithm):
    """Whatever two or three parts are exchanged, each mistake comes with a fix that works there."""
    generator = random.Random(preset.name)
    for _ in range(40):
        parts = generator.sample(sorted(PARTS), generator.choice((2, 3)))
        algorithm = unchecked(preset, {part: generator.choice(PARTS[part]) for part in parts})
        for refusal in refusals(algorithm):
            assert fixes(f"': {said(refusal, algorithm, refusals)}"), refusal.reason


def test_everything_that_is_wrong_is_said_at_once():
    """Two mistakes make one error with both."""
    with pytest.raises(ConfigError, match=r"group size 1.*; and .*sampler Prioritized"):
        replace(GRPO, num_generations=1, sampler=Prioritized())


@pytest.mark.parametrize("name", [name for name in NAMED if name != "reward-model"])
@pytest.mark.parametrize("generations", [1, 2, 3])
def test_no_group_size_is_accepted_that_teaches_nothing(name: str, generations: int):
    """Each algorithm with such groups is refused, or has a gradient on groups of different rewards, on policy."""
    try:
        algorithm = resolve({"preset": name, "num_generations": generations})
    except ConfigError:
        return
    rows = 4 * generations
    group = [row // generations for row in range(rows)]
    rewards = [[1.0, 0.0, 0.25][(row + row // generations) % 3] for row in range(rows)]
    if algorithm.samples in ("pairs", "labels"):
        rewards = [1.0 - 2 * (row % 2) for row in range(rows)]
    tokens = [[-0.3 - 0.1 * row, -0.7] for row in range(rows)]
    batch = make_batch(rewards, [[1, 1]] * rows, group, behavior=tokens, proximal=tokens, sharpened=tokens,
                       reference=[[-0.5, -0.6]] * rows, values=[[0.1, 0.4]] * rows, baseline=[0.3] * rows,
                       component_rewards=[[r, 1 - r] for r in rewards], components=("a", "b"),
                       component_weights=(1.0, 0.5))  # fmt: skip

    _, gradient = loss_and_gradient(algorithm, algorithm.prepare(batch), batch.behavior)

    assert bool(gradient.isfinite().all())
    assert float(gradient.abs().max()) > 1e-9


@pytest.mark.parametrize(("low", "high"), [(2.0, 5.0), (0.1, 0.9), (1.0, 1.0), (-1.0, 2.0)])
@pytest.mark.parametrize("piece", [MaskedIS, RejectionSampling])
def test_a_band_of_weights_holds_1(piece: Any, low: float, high: float):
    """A band without the weight of equal policies drops every token on policy."""
    assert piece(0.0, 1.0).high == piece(1.0, 2.0).low == 1
    with pytest.raises(ConfigError, match=r"low.*(with 1 between them|must be >= 0)"):
        piece(low, high)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("{question} {", "a '{' without its other brace"),
        ("{question} answer}", "a '}' without its other brace"),
        ("{question} {answer", "a '{' without its other brace"),
        ("{question} { answer }", "write {answer}"),
        ("{question} {answer }", "write {answer}"),
        (" {question}\n", "asks the reference what the policy is asked"),
        ("{answer}", "has no {question}"),
    ],
)
def test_a_prompt_of_the_reference_is_read_as_it_is_meant(prompt: str, said: str):
    """A slip is refused; braces that mean themselves are not."""
    for fine in (r"{question} \boxed{{answer}}", '{question} {"a": {"b": 1}}', r"{question} \{1, 2", "{question} {}"):
        assert ReferencePolicy(prompt=fine).prompt == fine
    with pytest.raises(ConfigError, match=re.escape(said)):
        ReferencePolicy(prompt=prompt)


def test_a_dual_clip_needs_a_clip():
    """Caps belong to PolicyGradient, which has no dual clip; a dual clip of at most 1 would stop every token."""
    with pytest.raises(ConfigError, match="caps belong to PolicyGradient"):
        ClippedSurrogate(Cap(5.0), dual=3.0)
    with pytest.raises(ConfigError, match="dual must be > 1, got 1"):
        ClippedSurrogate(dual=1.0)


def test_what_can_be_meant_is_accepted():
    """A tracker may serve as curriculum of a group algorithm, and drift may add up over several updates."""
    replace(GRPO, sampler=Prioritized(), tracker=TrackerConfig())
    replace(SPO, tracker=TrackerConfig(drift="accumulated"))
    replace(SPO, num_generations=4)
    replace(SPO, overlong=OverlongPenalty(), tracker=TrackerConfig(rewards="continuous"))


@pytest.mark.parametrize(
    ("algorithm", "needs"),
    [
        (GRPO, set()),
        (SPO, {"proximal"}),
        (P3O, set()),
        (replace(P3O, updates=Updates(minibatches=4)), set()),
        (PRESETS["rloo"], {"proximal", "reference"}),
        (REINFORCE_PP_BASELINE, {"reference"}),
        (replace(GRPO, regularizers=(Kl(coefficient=0.0),)), set()),
    ],
    ids=lambda x: x.name if hasattr(x, "name") else "",
)
def test_nothing_is_scored_without_a_reader(algorithm: Any, needs: set[str]):
    """No proximal pass for one update or a behavior ratio, no reference pass at coefficient 0."""
    assert algorithm.needs == needs


@pytest.mark.parametrize(
    ("made", "place"),
    [
        (lambda x: replace(GRPO, regularizers=(Kl(coefficient=x),)), r"regularizers\.0\.coefficient"),
        (lambda x: replace(GRPO, advantage=GroupRelative(epsilon=x)), r"advantage\.epsilon"),
        (lambda x: replace(SPO, tracker=replace(SPO.tracker, d_half=x)), r"tracker\.d_half"),
        (lambda x: replace(PPO, advantage=Whitened(Gae(kl=x))), r"advantage\.of\.kl"),
        (lambda x: replace(PPO, critic=CriticConfig(clip=x)), r"critic\.clip"),
    ],
)
@pytest.mark.parametrize("value", [inf, -inf, nan])
def test_numbers_are_finite_but_for_bounds(made: Any, place: str, value: float):
    """An infinite coefficient, epsilon or half-life is refused with its place; an infinite clip is no clip."""
    name = place.rpartition(".")[2]
    if value == inf and name == "clip":
        assert made(value).critic.clip == inf
    else:
        with pytest.raises(ConfigError, match=rf"{place} = {value} is no finite number|{name} must be .* got {value}"):
            made(value)


@pytest.mark.parametrize(
    "settings",
    [
        ["algorithm.surrogate.trust.high=inf", "learner.optimizer.max_gradient_norm=inf"],
        ["algorithm=cispo", "algorithm.surrogate.trust.cap=inf"],
    ],
)
def test_a_bound_may_be_left_out_in_a_file(settings: list[str]):
    """What the documentation says of inf is understood on the command line."""
    assert "inf" in to_toml(load("tiny", settings).experiment)


@pytest.mark.parametrize("key", ["learner.optimizer.weight_decay", "budget.seconds", "algorithm.overlong.factor"])
@pytest.mark.parametrize("value", ["inf", "nan"])
def test_other_numbers_of_a_file_are_finite(key: str, value: str):
    """In any section, before anything is loaded."""
    with pytest.raises(
        ConfigError, match=rf"= {value} is no finite number|= nan: should be a number|must be .* got {value}"
    ):
        load("tiny", ["algorithm=dapo", f"{key}={value}"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_generations": "8"}, "algorithm.num_generations = '8': should be a whole number; write 8"),
        ({"updates": Updates(epochs=1.5)}, "algorithm.updates.epochs = 1.5: should be a whole number"),
        (
            {"surrogate": ClippedSurrogate(Clip("0.2", 0.2))},
            "algorithm.surrogate.trust.low = '0.2': should be a number",
        ),
        ({"routing": "engine"}, "algorithm.routing = 'engine': should be 'free', 'proximal' or 'behavior'"),
    ],
)
def test_a_value_of_another_type_is_refused_in_python_too(changes: dict[str, Any], said: str):
    """Whatever piece it stands in: it would be an error of Python's in the first step, or none."""
    with pytest.raises(ConfigError, match=re.escape(said)):
        replace(GRPO, **changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"surrogate": PolicyGradient(Cap(2.0), negative=0.5)}, "surrogate.negative `builtins:float` has no __call__"),
        ({"advantage": Whitened(of=0.5)}, "advantage.of `builtins:float` has no "),
    ],
    ids=["a bound", "an advantage"],
)
def test_a_number_in_the_place_of_a_pieces_part_is_refused(changes: dict[str, Any], said: str):
    """Made in Python no table is read, so the composition looks at parts of pieces, too."""
    with pytest.raises(ConfigError, match=re.escape(said)):
        replace(GRPO, **changes)

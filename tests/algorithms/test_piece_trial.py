"""Pieces of a user's own that are wrong, found out before anything is loaded."""
# ruff: noqa: E501

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gnomon.algorithms import (
    GRPO,
    NAMED,
    VAPO,
    Algorithm,
    Distillation,
    Entropy,
    GroupRelative,
    PolicyGradient,
    Unbounded,
    Whitened,
    resolve,
)  # fmt: skip
from gnomon.algorithms.build import to_table
from gnomon.algorithms.piece_trial import loss_and_gradient, make_batch, try_pieces
from gnomon.core.errors import ConfigError
from gnomon.core.user_code import _shared, running_user_code

HEAD = """
import random
from dataclasses import dataclass, field, replace
import torch
from gnomon.algorithms import GRPO, PPO, PolicyGradient, ClippedSurrogate, GroupRelative, TokenMean, Gae, Uniform, Whitened
from gnomon.core.metrics import Max, Mean, Metrics

@dataclass(frozen=True)
class Mine:
"""
SURROGATE = "    def __call__(self, view):\n        ratio, advantages, mask = view.log_ratio.exp(), view.advantages, view.batch.mask\n"
ADVANTAGE = (
    "    needs = frozenset()\n    minimum_generations = 2\n"
    "    def center(self, batch): return GroupRelative(scale='none').center(batch)\n    def __call__(self, batch):\n"
    "        a = self.center(batch)\n"
)
REGULARIZER = "    name = 'mine'\n    needs = frozenset()\n    def weights(self, batch, default): return default\n"
TERM = REGULARIZER + "    def __call__(self, view):\n"


@pytest.fixture
def algorithm(tmp_path: Path) -> Any:
    """Return a function that writes a piece's body to a file and has GRPO, or another, take it in a place."""

    def made(place: str, body: str) -> Algorithm:
        path = tmp_path / "mine.py"
        path.write_text(f"{HEAD}{body}\n")
        preset = "vapo" if place.startswith("advantage.policy") else "grpo"
        piece: Any = {"piece": f"{path}:Mine"}
        if place == "regularizers":
            piece = [piece]
        if place == "surrogate.trust":
            return resolve({"preset": preset, "surrogate": {"piece": "PolicyGradient", "trust": piece}})
        return resolve({"preset": preset, place: piece})

    return made


LOSSES = [
    ("return (-advantages * ratio).mean(), Metrics()", r"returned shape \(\) for \[8, 5\].*return one number a token"),
    ("return (-advantages * ratio).sum(1), Metrics()", r"returned shape \(8,\) for \[8, 5\]"),
    ("return (-advantages * ratio).sum(1, keepdim=True), Metrics()", r"returned shape \(8, 1\)"),
    ("return (-advantages * ratio)[mask], Metrics()", r"returned shape \(\d+,\) for \[8, 5\]"),
    ("return -advantages * ratio", r"returned a tensor of shape \(8, 5\).*\(loss, Metrics\(\)\)"),
    ("return (-advantages * ratio).mean()", r"returned a tensor of shape \(\).*one number a token"),
    ("return -advantages * ratio, {'kl': 1.0}", "returned dict beside its tensor; .*Metrics.of"),
    ("return -advantages * ratio, Metrics(), 1", "returned 3 values"),
    ("return None", "returned NoneType"),
    ("return 1.5, Metrics()", "returned float, expected a tensor"),
    ("return (-advantages * ratio).detach(), Metrics()", "returned numbers without a gradient"),
    ("with torch.no_grad(): return -advantages * ratio, Metrics()", "without a gradient"),
    ("return 0 * ratio, Metrics()", "has a gradient of 0 everywhere"),
    ("return -advantages * ratio - ratio.log().sqrt(), Metrics()", "returned nan at row"),
    ("return -advantages * ratio / (ratio - 1), Metrics()", "where all policies are one, -?(inf|nan)"),
    ("return -advantages * ratio + (ratio - 1).abs().sqrt(), Metrics()", "has, where all policies are one, a gradient"),
    ("return -advantages * ratio / mask.sum(), Metrics()", "depends on how a batch is cut into micro-batches"),
    ("return -(advantages - advantages.mean()) * ratio, Metrics()", "depends on how a batch is cut"),
    ("return -advantages * ratio / mask.shape[1], Metrics()", "depends on what is padded"),
    ("return -advantages * (view.current - view.batch.behavior).mean(1, keepdim=True).expand_as(ratio).exp(), Metrics()",
     "depends on what is padded"),
    ("view.batch.advantages.mul_(2); return -advantages * ratio, Metrics()", "changed LossInputs.batch|changed Batch.advantages"),
    ("view.batch.weights[0] = 0; return -advantages * ratio, Metrics()", "changed Batch.weights in place"),
    ("return (-advantages * ratio).half(), Metrics()", "returned float16 for float32"),
    ("return (-advantages * ratio).bfloat16(), Metrics()", "returned bfloat16 for float32"),
    ("return (-advantages * ratio).long(), Metrics()", "returned int64 for float32"),
    ("return -advantages * ratio * view.batch.reference, Metrics()", "raised TypeError.*None unless needs names them"),
    ("return -advantages * ratios, Metrics()", r"raised NameError: name 'ratios' is not defined \(mine.py:\d+\)"),
    ("raise SystemExit(3)", "raised SystemExit"),
    ("raise type('Mine', (BaseException,), {})('no')", "raised Mine: no"),
    ("import os; os.fork(); return -advantages * ratio, Metrics()", r"raised SystemExit: os.fork\(\) in .*mine.py, line"),
    ("return (-advantages * ratio).to_sparse(), Metrics()", "returned a sparse_coo tensor on cpu"),
    ("return (-advantages * ratio).to('meta'), Metrics()", "returned a strided tensor on meta"),
    ("return advantages * ratio, Metrics()", "makes what has a high advantage rarer.*made smaller"),
    ("return advantages * ratio.clamp(0.8, 1.2), Metrics()", "makes what has a high advantage rarer"),
    ("return -ratio, Metrics()", "has the same gradient whatever the advantages"),
    ("return -advantages.abs() * ratio, Metrics()", "has the same gradient whatever the advantages"),
    ("view.batch.tokens.zero_(); return -advantages * ratio, Metrics()", "changed Batch.tokens in place"),
    ("view.batch.version.zero_(); return -advantages * ratio, Metrics()", "changed Batch.version in place"),
    ("return -advantages * ratio, Metrics.of({'mine/x': 1.0})", "measured mine/x as float.*measure with Mean"),
    ("return -advantages * ratio, Metrics.of({'mine/x': ratio.mean()})", "measured mine/x as Tensor"),
    ("return -advantages * ratio, Metrics.of({'loss/policy': Mean(1.0, 1)})", "measured loss/policy, which gnomon measures"),
    ("return -advantages * ratio, Metrics.of({'loss/entropy_nats': Max(1.0)})", "measured loss/entropy_nats, which"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "wrong"), LOSSES)
def test_a_loss_that_is_wrong_names_its_protocol(algorithm: Any, body: str, wrong: str):
    """Shape, type, gradient, finiteness, cuts, padding, changes in place and signatures: each before a model loads."""
    with pytest.raises(ConfigError, match=f"surrogate `.*mine.py:Mine` (?s:.*)(?:{wrong})") as caught:
        try_pieces(algorithm("surrogate", f"{SURROGATE}        {body}"))

    assert "a Surrogate is `__call__(view: LossInputs) -> (loss of each token Float[B T], Metrics)`" in str(
        caught.value
    )
    assert len(str(caught.value).splitlines()) == 1


OTHERS = [
    ("surrogate", "    def __call__(self, ratio, advantages): return ratio, Metrics()", "raised TypeError"),
    ("surrogate", "    calls: list = field(default_factory=list)\n    def __call__(self, view):\n"
     "        self.calls.append(1)\n        return -view.advantages * view.log_ratio * len(self.calls), Metrics()",
     "returned something else when it was called again"),
    ("advantage", f"{ADVANTAGE}        return a", r"returned a tensor of shape \(8, 5\).*\(advantages, None\)"),
    ("advantage", f"{ADVANTAGE}        return a[:, 0], None", r"returned shape \(8,\) for \[8, 5\]"),
    ("advantage", f"{ADVANTAGE}        return a.mean(), None", r"returned shape \(\) for"),
    ("advantage", f"{ADVANTAGE}        return a / 0, None", "returned (inf|-inf|nan) at row"),
    ("advantage", f"{ADVANTAGE}        return a / batch.rewards.std(), None", "where all rewards are equal, nan at row"),
    ("advantage", f"{ADVANTAGE}        batch.rewards.sub_(1); return a, None", "changed Batch.rewards in place"),
    ("advantage", f"{ADVANTAGE}        return a * torch.arange(len(a))[:, None], None", "depends on the order of rows"),
    ("advantage", f"{ADVANTAGE}        return a - batch.behavior.mean(), None", "depends on what is padded"),
    ("advantage", f"{ADVANTAGE}        return a + batch.values, None", "raised TypeError.*needs names them"),
    ("advantage", f"{ADVANTAGE}        return a.to(torch.int32), None", "returned int32"),
    ("advantage", f"{ADVANTAGE}        return 0 * a, None", "returned the same advantages for other rewards"),
    ("advantage", f"{ADVANTAGE}        return torch.ones_like(a), None", "returned the same advantages for other rewards"),
    ("advantage", f"{ADVANTAGE}        return -a, None", "returned lower advantages for higher rewards"),
    ("aggregate", "    def __call__(self, mask, group): return -1.0 * mask", "the weight -1, which turns the loss round"),
    ("correction", "    def __call__(self, view): return -view.log_ratio.detach().exp(), Metrics()", "turns the loss round"),
    ("correction", "    def __call__(self, view): return 0 * view.log_ratio.detach(), Metrics()", "factor 0 for every token"),
    ("regularizers", f"{TERM.replace('mine', 'policy')}        return view.entropy, Metrics()", "loss/policy is measured already"),
    ("regularizers", f"{TERM.replace('mine', 'a b/c')}        return view.entropy, Metrics()", "has the name 'a b/c'"),
    ("regularizers", f"{TERM.replace('default): return default', 'default): return default.sum()')}        return view.entropy, Metrics()",
     "regularizers.0 .* cannot be tried"),
    ("aggregate", "    def __call__(self, mask, group): return 1 / mask.sum()", r"returned shape \(\) for"),
    ("aggregate", "    def __call__(self, mask, group): return (1.0 * mask) / mask.sum()", "without a trained token returned nan"),
    ("aggregate", "    def __call__(self, mask): return 1.0 * mask", "raised TypeError"),
    ("aggregate", "    def __call__(self, mask, group): return 0.0 * mask", "weight 0 for every token"),
    ("aggregate", "    def __call__(self, mask, group): return mask.float() * torch.arange(len(mask))[:, None]", "order of rows"),
    ("aggregate", "    def __call__(self, mask, group): mask[0] = True; return 1.0 * mask", "in place"),
    ("correction", "    def __call__(self, view): return view.log_ratio.exp(), Metrics()", "returned a factor with a gradient"),
    ("correction", "    def __call__(self, view): return torch.tensor(1.0), Metrics()", r"returned shape \(\)"),
    ("correction", "    def __call__(self, view): return 1.0", "returned float"),
    ("regularizers", f"{TERM}        return view.current.mean(), Metrics()", r"returned shape \(\)"),
    ("regularizers", f"{TERM}        return view.current.detach(), Metrics()", "without a gradient"),
    ("regularizers", f"{TERM}        return view.current - view.batch.reference, Metrics()", "needs names them"),
    ("surrogate.trust", "    def __call__(self, ratio, statistics): return ratio.clamp(max=1).mean()", r"returned shape \(\)"),
    ("surrogate.trust", "    def __call__(self, ratio, statistics): return ratio / ratio.mean()", "how a batch is cut"),
    ("surrogate.trust", "    def __call__(self, ratio, statistics): return ratio.clamp_(max=1)", "in place"),
    ("surrogate.trust", "    def __call__(self, ratio): return ratio", "raised TypeError"),
    ("advantage.policy_lambda", "    def __call__(self, lengths): return 1.0 * lengths", r"numbers in \[0, 1\]"),
    ("advantage.policy_lambda", "    def __call__(self, lengths): return 0.5", "returned float"),
]  # fmt: skip


@pytest.mark.parametrize(("place", "body", "wrong"), OTHERS)
def test_every_other_piece_is_tried_as_well(algorithm: Any, place: str, body: str, wrong: str):
    """Advantages, aggregates, corrections, regularizers, trust regions and lambda rules."""
    with pytest.raises(ConfigError, match=wrong) as caught:
        try_pieces(algorithm(place, body))

    assert " is `__call__(" in str(caught.value)


LACKING = [
    ("advantage", "    def __call__(self, batch): return batch.rewards, None", "no needs and no minimum_generations and no center"),
    ("regularizers", "    def __call__(self, view): return view.current, Metrics()", "has no name and no needs and no weights"),
    ("surrogate", "    x: int = 1", "surrogate `.*mine.py:Mine` has no __call__; a Surrogate is"),
    ("aggregate", "    def forward(self, mask, group): return mask", "has no __call__; an Aggregate is"),
    ("sampler", "    x: int = 1", "sampler .* is none of Uniform, Prioritized, Greso"),
    ("ratio", "    level: str = 'token'\n    anchor: str = 'proximal'", "ratio .* is none of Ratio"),
    ("updates", "    total: int = 1", "updates .* is none of Updates"),
    ("keep", "    part: str = ''", "keep .* is none of Informative: this place takes no piece of your own"),
    ("surrogate", "    def __post_init__(self): raise ValueError('no')", "making it raised ValueError: no"),
]  # fmt: skip


@pytest.mark.parametrize(("place", "body", "wrong"), LACKING)
def test_what_cannot_stand_in_its_place_is_refused_when_it_is_read(algorithm: Any, place: str, body: str, wrong: str):
    """A sampler of one's own would otherwise be passed over in silence, and an estimator end in a traceback."""
    with pytest.raises(ConfigError, match=wrong):
        algorithm(place, body)


# Whole distributions are scored for the rows of a learner; a trial's batch has none. A reward model has no policy loss.
@pytest.mark.parametrize(
    "algorithm",
    [a for a in NAMED.values() if not isinstance(a.surrogate, Distillation) and not a.ranks_pairs],
    ids=lambda a: a.name,
)
def test_every_piece_of_gnomon_passes_its_own_trial(algorithm: Algorithm):
    """What is asked of a user's pieces is what the presets do."""
    try_pieces(algorithm, every=True)


@dataclass(frozen=True)
class Shaken:
    """An estimate that draws from the generator of the whole process, as reliability.md allows."""

    of: GroupRelative = GroupRelative()
    needs = frozenset[Any]()
    minimum_generations = 2

    def center(self, batch: Any) -> Any:
        """Return the inner one's."""
        return self.of.center(batch)

    def __call__(self, batch: Any) -> Any:
        """Return it with noise a token."""
        advantages, returns = self.of(batch)
        return advantages * (1 + torch.rand_like(advantages) + random.random()), returns


def test_a_piece_may_draw_and_the_trial_leaves_the_generators_alone():
    """Random numbers are no fault; what a run draws does not depend on whether its pieces were tried."""
    before = random.getstate(), torch.get_rng_state()

    try_pieces(replace(GRPO, advantage=Whitened(Shaken())))

    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_right_pieces_beside_gnomons_own_pass():
    """Pieces within pieces, lists of them, a critic, and an example of the documentation."""
    example = resolve("examples/own_piece.py:FADING")

    for algorithm in (example, replace(example, regularizers=(Entropy(0.01),)), replace(VAPO, regularizers=())):
        try_pieces(algorithm, every=True)


@dataclass(frozen=True)
class Squared:
    """A trust region within a loss."""

    def __call__(self, ratio: Any, statistics: Any) -> Any:
        """Return the square, summed over tokens."""
        return ratio.square().sum(1, keepdim=True)


def test_a_piece_within_a_piece_is_named_by_its_path():
    """The trust region of a loss that is gnomon's own."""
    with pytest.raises(
        ConfigError, match=r"algorithm.surrogate.trust `.*Squared` returned shape \(8, 1\) for \[8, 5\]"
    ):
        try_pieces(replace(GRPO, surrogate=PolicyGradient(Squared())))


IMPORTS = [
    ("import os; os.chdir('/')", "changed the working directory"),
    ("torch.set_default_dtype(torch.float64)", "changed torch's default type from torch.float32 to torch.float64"),
    ("torch.set_grad_enabled(False)", "changed torch's gradients"),
    ("torch.set_default_device('meta')", "changed torch's default device from cpu to meta"),
    ("torch.set_float32_matmul_precision('medium')", "changed torch's float32 products from highest to medium"),
    ("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)", "changed who handles SIGTERM"),
    ("raise GeneratorExit", "could not be imported: GeneratorExit"),
    ("import sys; sys.exit(0)", "could not be imported: SystemExit"),
    ("import not_there_at_all", "could not be imported: ModuleNotFoundError"),
]


@pytest.mark.parametrize(("line", "wrong"), IMPORTS)
def test_an_import_leaves_the_process_as_it_was(tmp_path: Path, line: str, wrong: str):
    """What a file changes for everybody when it is imported is refused and taken back."""
    path = tmp_path / "mine.py"
    path.write_text(f"import torch\nfrom gnomon.algorithms import GRPO\n{line}\nMINE = GRPO\n")
    before = {name: get() for name, (get, _) in _shared().items()}

    with pytest.raises(ConfigError, match=wrong):
        resolve(f"{path}:MINE")

    assert {name: get() for name, (get, _) in _shared().items()} == before


@pytest.mark.parametrize(("line", "wrong"), IMPORTS)
def test_a_call_leaves_the_process_as_it_was(algorithm: Any, line: str, wrong: str):
    """What a file may not do when it is imported, a piece may not do when it is called; it is named, and its line."""
    before = {name: get() for name, (get, _) in _shared().items()}

    with pytest.raises(ConfigError, match=wrong.replace("could not be imported:", "raised")) as caught:
        try_pieces(algorithm("surrogate", f"{SURROGATE}        {line}\n        return -advantages * ratio, Metrics()"))

    assert {name: get() for name, (get, _) in _shared().items()} == before
    assert "a Surrogate is `__call__(" in str(caught.value)


def test_what_a_piece_prints_is_no_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Prints of an import and of a trial go to standard error, so that --json is one object."""
    path = tmp_path / "mine.py"
    path.write_text("from gnomon.algorithms import GRPO\nprint('loading')\nMINE = GRPO\n")

    resolve(f"{path}:MINE")

    assert capsys.readouterr().out == ""


def _loop(seconds: float):
    with running_user_code("importing mine.py:OWN", seconds):
        while True:
            pass


def test_user_code_that_never_ends_is_an_error():
    """An import that loops, or a piece that waits, ends in words after a time."""
    with pytest.raises(ConfigError, match=r"importing mine.py:OWN took more than 0\.05 s"):
        _loop(0.05)


@pytest.mark.parametrize("value", ["lambda view: (view.current, Metrics())", "len"])
def test_what_cannot_be_written_down_is_no_piece(tmp_path: Path, value: str):
    """A function has no settings and no name to be found again by: a run with it could not be resumed."""
    path = tmp_path / "mine.py"
    path.write_text(f"{HEAD}    x: int = 1\nMINE = replace(GRPO, name='mine', surrogate={value})\n")

    said = r"is no dataclass, and a run could not write it down: put @dataclass"
    with pytest.raises(ConfigError, match=said if value == "len" else r"<lambda> is found under no name"):
        resolve(f"{path}:MINE")


FUNCTIONS = """
from gnomon.core.metrics import Last, Metrics
def loss(view): return -view.advantages * view.log_ratio.exp()
def measured(view): return loss(view), Metrics.of({"mine/one": Last(1.0)})
def rows(batch): return batch.rewards - 0.5
def tokens(batch): return (batch.rewards[:, None] - 0.5) * batch.mask, None
def weigh(mask, group): return mask.double() / mask.sum().clamp(min=1)
def bound(ratio, statistics): return ratio.clamp(max=3)
def factor(view): return (view.proximal - view.batch.behavior).detach().exp()
def push(view): return 0.1 * view.current
def by_length(lengths): return lengths.double() / (lengths.double() + 20)
def summed(view): return loss(view).sum()
"""


@pytest.mark.parametrize(("name", "place"), [
    ("loss", ""), ("measured", ""), ("rows", ""), ("tokens", ""), ("loss", "surrogate"), ("rows", "advantage"),
    ("weigh", "aggregate"), ("factor", "correction"), ("push", "regularizers"), ("bound", "surrogate.trust"),
    ("by_length", "advantage.policy_lambda"),
])  # fmt: skip
def test_a_function_is_a_piece(tmp_path: Path, name: str, place: str):
    """It is tried, has the numbers of a class with its formula, and is read again from what a run writes down."""
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    reference = f"{tmp_path}/mine.py:{name}"
    preset = {"surrogate.trust": "cispo", "advantage.policy_lambda": "ppo"}.get(place, "grpo")
    own: Any = [reference] if place == "regularizers" else reference
    if place == "advantage.policy_lambda":
        place, own = "advantage", {"piece": "Gae", "policy_lambda": reference}
    algorithm = resolve({"preset": preset, place: own} if place else reference)
    try_pieces(algorithm)

    assert resolve(to_table(algorithm)) == algorithm
    assert reference in str(to_table(algorithm))
    assert algorithm.name == (preset if place else name)


def test_a_function_has_the_loss_and_gradient_of_a_piece():
    """A policy gradient of three lines, and rewards less their mean, beside gnomon's pieces of the same formulas."""
    theirs = replace(GRPO, surrogate=PolicyGradient(Unbounded()), advantage=GroupRelative(scale="none"))
    ours = replace(
        GRPO,
        surrogate=lambda view: -view.advantages * view.log_ratio.detach().exp() * view.current,
        advantage=lambda batch: batch.rewards - batch.rewards.mean(),
    )
    batch = make_batch([1.0, 0.0, 0.25], [[1, 1], [1], [1, 0]])
    far = torch.tensor([[0.1, -0.2], [0.3, 0.0], [0.2, 0.0]], dtype=torch.float64)
    found, wanted = (loss_and_gradient(each, each.prepare(batch), batch.behavior + far) for each in (ours, theirs))

    assert found[0] == pytest.approx(wanted[0])
    assert torch.allclose(found[1], wanted[1])


@pytest.mark.parametrize(("spec", "wrong"), [
    ("weigh", r"'weigh' takes \(mask, group\), .* name another place: algorithm.aggregate=my.py:f"),
    ("summed", r"mine.py:summed` returned shape \(\) for .*return one number a token"),
    ({"preset": "grpo", "surrogate": {"piece": "loss", "width": 1}}, "surrogate has no key 'width'"),
])  # fmt: skip
def test_a_function_that_cannot_be_meant_is_refused(tmp_path: Path, spec: Any, wrong: str):
    """Its parameters name its place, it has no settings, and its numbers are tried."""
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    if isinstance(spec, str):
        spec = f"{tmp_path}/mine.py:{spec}"
    else:
        spec["surrogate"]["piece"] = f"{tmp_path}/mine.py:loss"
    with pytest.raises(ConfigError, match=wrong):
        try_pieces(resolve(spec))


def test_a_function_without_a_name_cannot_be_written_down():
    """It trains in this program, and a run's record would not find it."""
    with pytest.raises(ConfigError, match=r"found under no name.*gnomon\.train"):
        to_table(replace(GRPO, advantage=lambda batch: batch.rewards))

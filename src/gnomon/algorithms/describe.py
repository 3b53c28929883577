"""Algorithms and pieces in words, for `gnomon algorithms [NAME]`."""

import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from gnomon.algorithms.algorithm import Algorithm
from gnomon.algorithms.aliases import FORMER, piece_of
from gnomon.algorithms.build import to_table
from gnomon.algorithms.pieces import choices, members, slots
from gnomon.algorithms.presets import PRESETS
from gnomon.algorithms.user_pieces import spelled
from gnomon.core.errors import ConfigError, unknown
from gnomon.core.tables import canonical

# Where a preset differs from its paper, its published code or other libraries, and why.

_STATISTICS = (
    "The group's deviation is the sample's (ddof 1) plus 1e-6, in float64, as papers print neither and "
    "libraries use 1e-9 to 1e-4; a group of equal rewards gets exactly 0, which a computed deviation does "
    "not promise."
)
_SCOPE = (
    "Tokens are counted over the whole optimizer step, before it is cut; a mean of micro-batch means would "
    "change with the hardware."
)
_UPDATES = "The paper's number of updates a step is not known; one is made, and then no bound ever acts."

NOTES: Mapping[str, tuple[str, ...]] = {
    "reinforce": (
        "One response a prompt, one update, no baseline: advantage.baseline = 'batch' subtracts the "
        "batch's mean reward.",
        "The sum over trained tokens is divided by their number, where the derivation divides by "
        "responses: the same direction at another learning rate. aggregate = 'SequenceSum' is the derived "
        "form.",
        "With more than one update a step each token is weighted by its ratio, as the policy then is another one.",
    ),
    "rloo": (
        "The ratio is per token; TRL takes the product over the response: ratio.level = 'sequence_product'.",
        "The penalty of 0.05 a nat to the reference is part of the reward (TRL's default) and needs a "
        "reference model; advantage.kl = 0 does without.",
        "4 responses a prompt; the paper uses 2 and 4, TRL 2.",
    ),
    "reinforce-pp": (
        "Returns are whitened with the population's deviation over all trained tokens (OpenRLHF); verl "
        "takes the sample's: advantage.ddof = 1.",
        "The penalty of 0.01 a nat is OpenRLHF's default and needs a reference model; advantage.of.kl = 0 "
        "does without.",
    ),
    "reinforce-pp-baseline": (
        "Groups of equal rewards are left out of the whitening and stay at 0; in the published code the "
        "subtracted mean makes them push: advantage.skip_degenerate = false.",
        "The KL to the reference is a k2 loss with coefficient 0.01; regularizers = [] does without a reference model.",
    ),
    "opo": (
        "Exactly one update a step: the baseline is optimal on policy only, and nothing bounds the ratio.",
        "8 responses a prompt is from secondary sources.",
    ),
    "grpo": (
        "The mean is over responses, each divided by its own length, as the paper prints; TRL's and verl's "
        "'GRPO' default to a mean over tokens: aggregate = 'TokenMean'.",
        "No KL to the reference: the paper has 0.04, libraries today 0. The paper's is regularizers = "
        "[{piece = 'Kl', coefficient = 0.04, estimator = 'k3'}].",
        "8 responses a prompt; the paper samples 64.",
        _STATISTICS,
    ),
    "dr-grpo": (
        "aggregate.length is the paper's budget of 3000 tokens. Set it to your completion budget, or "
        "gradients are smaller by the quotient.",
    ),
    "dapo": (
        "Tokens are counted over the whole optimizer step as in verl and TRL; the printed formula counts "
        "them within a prompt's group: aggregate.scope = 'group'.",
        "Groups are informative when their shaped rewards differ; the paper looks at accuracy: keep.part = 'answer'.",
        "At most 10 times the step's prompts are asked to replace equal groups (verl's bound).",
        "The overlong penalty stops at -1 for every length; verl's does not.",
        "16 updates of 1/16 of the step's responses each; the paper's batch is 512 prompts of 16.",
        _STATISTICS,
    ),
    "lite-ppo": ("The deviation is of all rewards of the batch plus 1e-6 (TRL adds 1e-4).", _SCOPE),
    "gspo": (
        "The clip widths 3e-4 and 4e-4 belong to the mean log-ratio of long responses; responses of a few "
        "tokens leave them after one update.",
        "The mean is over responses; TRL's loss_type 'dapo' with a sequence ratio is another, "
        "length-weighted loss, and is refused here.",
        _STATISTICS,
    ),
    "gspo-token": (
        "With one advantage a response it equals gspo in value, clip and gradient.",
        _STATISTICS,
    ),
    "gmpo": (
        "The mean is over all responses of the optimizer step, without empty ones; verl's is over a micro-batch.",
        "Tokens are clipped on one side, by the sign of the advantage, and so counted; verl counts both sides.",
        _UPDATES,
    ),
    "sapo": (
        "The value at ratio 1 is 2 A / tau: losses cannot be compared with other algorithms'.",
        _UPDATES,
    ),
    "cispo": (
        "The cap is absolute, 5.0 (ScaleRL, TRL): the paper does not disclose its epsilon. There is no "
        "floor; verl and FeynRL bound on both sides by default, which raises the weight of tokens that "
        "became rare.",
        "Prompts are drawn uniformly; the paper adds DAPO's: keep = 'Informative'.",
        _SCOPE,
    ),
    "p3o": (
        "The effective sample size is of the whole optimizer step; the reference code takes each "
        "micro-batch's, which changes with the hardware and trusts a one-token micro-batch fully.",
        "The KL to behavior is estimated by rho log rho - rho + 1, unbiased for samples of behavior; the "
        "reference code's k3 estimates another divergence: regularizers = [{piece = 'EssKl', estimator = "
        "'k3'}].",
        "A step with a ratio that is not finite is no number here and must be skipped; the reference trusts it fully.",
        "Not the pairwise P3O.",
    ),
    "spo": (
        "The forgetting measures drift as the recipe's code does: mean absolute change of log-probability "
        "on the prompt's previous response, halved by 0.06; the paper says KL without an estimator. "
        "tracker.drift = 'accumulated' is ours and needs no extra pass.",
        "Success rates start with Jeffreys' half a success and half a failure (the code); the paper's "
        "plain mean sticks at exactly 0 and 1: tracker.prior = 0.",
        "sampler.gamma = 0 is the paper's weight; the other version divides by n_eff^gamma.",
        "No dual clip: the recipe's script has 10, the paper none: surrogate.dual = 10.",
        "Whitening uses the sample's deviation plus 1e-8 (the recipe).",
        "Prompts are drawn from the whole table by Gumbel-top-k without replacement; the recipe draws within chunks.",
        "Not the simple policy optimization of the same letters.",
    ),
    "a-star-po": (
        "The values V* are fixed for the run, from 8 samples of the initial policy (beta 0.5); a prompt whose "
        "samples were all wrong has V* = 0 and is still asked, where an option of other libraries drops it.",
        "The table ages as the policy moves; SPO's tracker, which follows it, is tracker = {piece = 'TrackerConfig'} "
        "with rewards of 0 and 1.",
        "One update a step. No ratio is clipped, and the log-ratio to the reference, a sum over tokens, has no bound.",
    ),
    "ppo": (
        "The critic is a network of its own with a linear head on every token, which starts at 0; clip = 0.5 in "
        "rewards and twice the policy's learning rate. The paper's shared network is critic.trunk = 'shared'.",
        "Advantages are whitened over all trained tokens with the population's variance; verl takes the sample's.",
        "lambda 0.95 and gamma 1, no penalty to the reference: advantage.of.kl adds one to the reward.",
        "Four updates a step of a quarter of the responses each; the paper's number of epochs belongs to other tasks.",
        "A response that ran out of budget ends in value 0, as verifiers call it a failure: advantage.of.truncation"
        " = 'value' asks the critic instead.",
    ),
    "vc-ppo": (
        "The critic begins as a copy of the policy with a head of 0; the paper's begins as a reward model: "
        "critic.initial = the folder of one.",
        "100 batches of value pre-training; the length is from a secondary source. "
        "critic.pretraining.explained_variance stops earlier.",
        "Advantages are not whitened, and the mean is over responses; the paper's code is not public.",
    ),
    "vapo": (
        "lambda = 1 - 1 / (0.05 length) is at most 0 up to 20 tokens and is kept at 0 there: one-step differences "
        "of values, in which the reward reaches the last token alone. For short answers raise "
        "advantage.policy_lambda.alpha; 1 gives 10 tokens lambda 0.9.",
        "The critic begins as a copy of the policy with a head of 0; the paper's begins as a reward model: "
        "critic.initial.",
        "Imitation is the negative log-likelihood of the batch's correct responses (coefficient 0.1), divided by "
        "their own tokens, as the paper has it; there is no replay.",
        "Advantages are not whitened: the paper does not say.",
        "16 responses a prompt and 16 updates a step; the paper's batch is 512 prompts.",
        "Tokens are counted over the optimizer step (the paper: the training batch).",
    ),
    "vapo-review": (
        "Not the paper's algorithm: lambda is a sigmoid of the length among the batch's lengths in [0.3, 0.95], the"
        " critic is taught a batch before its advantages are taken, it is a head on the policy's trunk, and the "
        "best responses are replayed. The paper's is vapo.",
        "Advantages of a critic that has seen the batch are biased towards 0: part of the outcome is in the baseline.",
        "The review's head reads the last token alone and has two layers and dropout; here it is linear and reads "
        "every token, as the advantages need.",
        "How often the critic is updated, how often and how much is replayed, and the buffer's size are not given: "
        "1 update, 64 of at most 256 responses every 4 steps, at the policy's learning rate.",
        "The value loss moves the shared trunk, at the policy's learning rate (none is given). A tiny model learned"
        " best at a third of it and hardly at twice it: critic.learning_rate_ratio.",
    ),
    "decoupled-ppo": (
        "The advantage is GRPO's with 16 responses, as in AReaL; any other will do.",
        "The proximal policy is the learner's when the step began (AReaL). Hilton's moving average of the weights "
        "is proximal = 'EmaProximal'.",
        "proximal / behavior is truncated at 5, where papers have no bound and implementations one of 2 to 5 or a "
        "mask (correction = {piece = 'MaskedIS', low = 0, high = 5}). Hilton's code bounds the whole ratio at 100: "
        "correction = 'Capped'.",
        "It differs from PPO's clip only if behavior and proximal differ: set max_staleness.",
        "Tokens that are cut off keep counting in the mean.",
    ),
    "p3o-two-anchor": (
        "The authors find it equal to one anchor or worse; p3o is theirs.",
        "With one update a step the proximal policy is the current one, and this is p3o; 4 updates are made.",
        "Each anchor is weighted by one minus its own effective sample size; when both are 1 the term is exactly 0.",
        "The KL to the mixture is estimated by rho k3, as in p3o; regularizers = [{piece = 'EssKl', anchor = "
        "'mixture', estimator = 'k3'}] is the reference code's.",
    ),
}


WIDTH = 100
_LABEL = 16


def summary() -> str:
    """Return a line for each preset: its name, and the paper."""
    widest = max(len(name) for name in PRESETS)
    return "\n".join(f"{name:<{widest}}  {preset.paper}" for name, preset in PRESETS.items())


def describe(algorithm: Algorithm) -> str:
    """Return composition, defaults, paper, and where a preset differs from its paper and why."""
    lines = [algorithm.name, *_wrap("paper", algorithm.paper)]
    for f in fields(algorithm):
        value = getattr(algorithm, f.name)
        is_unsaid = value is None or value == () or (isinstance(value, bool | str) and value == f.default)
        if f.name not in ("name", "paper") and not is_unsaid:
            shown = ", ".join(map(repr, value)) if isinstance(value, tuple) else repr(value)
            lines += _wrap(f.name, shown)
    notes = notes_on(algorithm)
    if notes:
        lines += ["", "  where it differs, and why"]
        for note in notes:
            lines += _fill(note, "  - ", "    ")
    return "\n".join(lines)


def notes_on(algorithm: Algorithm) -> tuple[str, ...]:
    """Return the notes of the preset that has the algorithm's name; none for a user's own.

    >>> notes_on(PRESETS["dr-grpo"])[0].startswith("aggregate.length is the paper's budget of 3000 tokens.")
    True
    """
    return NOTES.get(algorithm.name, ())


@dataclass(frozen=True)
class FieldText:
    """A field of a piece in words: what it may be, and what it is when nothing is said (TOML; None: must be said)."""

    type: str
    default: str | None


@dataclass(frozen=True)
class PieceText:
    """A piece in words: its name, the places below an algorithm where it fits, its docstring, and its fields."""

    name: str
    places: tuple[str, ...]
    text: str
    fields: dict[str, FieldText]

    def __str__(self) -> str:
        lines = [f"{self.name}, for algorithm.{' or algorithm.'.join(self.places)}", ""]
        lines += textwrap.indent(self.text, "  ").splitlines()
        if self.fields:
            lines += ["", "  fields"]
        for name, field in self.fields.items():
            lines += _wrap(f"  {name}", field.type + ("" if field.default is None else f" = {field.default}"))
        return "\n".join(lines)


def piece_text(cls: type) -> PieceText:
    """Return what there is to say about a piece.

    >>> print(piece_text(PRESETS["spo"].tracker.__class__).fields["drift"].default)
    "replayed"
    """
    hints = get_type_hints(cls)
    said = {}
    for f in fields(cls):
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        said[f.name] = FieldText(kind_of(hints[f.name]), None if default is MISSING else spelled(default))
    places = tuple(place for place, pieces in slots().items() if cls in pieces.values())
    return PieceText(cls.__name__, places, inspect.getdoc(cls) or "", said)


def find_piece(name: str) -> type | None:
    """Return the piece that ``name`` means, in whatever case or as others call it; None when it means an algorithm.

    Raises:
        ConfigError: ``name`` means neither; the message names the nearest algorithm or piece.

    >>> find_piece("truncated"), find_piece("IcePop"), find_piece("grpo")
    (<class 'gnomon.algorithms.corrections.TruncatedIS'>, <class 'gnomon.algorithms.corrections.MaskedIS'>, None)
    """
    pieces = {piece: cls for fitting in slots().values() for piece, cls in fitting.items()}
    theirs = piece_of(name)
    former = {canonical(piece): present for piece, present in FORMER.items()}
    wanted = canonical(former.get(canonical(name), name) if theirs is None else theirs["piece"])
    found = {canonical(piece): cls for piece, cls in pieces.items()}.get(wanted)
    if found is None and ":" not in name and wanted not in map(canonical, PRESETS):
        raise ConfigError(unknown("algorithm or piece", name.lower() if name.isupper() else name, [*PRESETS, *pieces]))
    return found


def as_row(algorithm: Algorithm) -> dict[str, Any]:
    """Return the algorithm's table and, as "notes", where it differs from its paper: one JSON object."""
    return {**to_table(algorithm), "notes": list(notes_on(algorithm))}


def pieces_summary() -> str:
    """Return the pieces that fit into each place of an algorithm, a line or more for each."""
    lines = []
    for place, pieces in slots().items():
        lines += _wrap(place, ", ".join(pieces), 26)
    return "\n".join(lines)


def kind_of(hint: Any) -> str:
    """Return what a field of a piece may be, as TOML: its pieces by name, its words, or its type."""
    wanted = members(hint)
    if wanted.sequence is not None:
        return f"list of {kind_of(wanted.sequence)}"
    names = list(choices(wanted))
    for member in wanted:
        if get_origin(member) is Literal:
            names += map(spelled, get_args(member))
        elif member is type(None):
            names.append('"none"')
        elif member in (bool, int, float, str):
            names.append(member.__name__)
    return " | ".join(names)


def _wrap(label: str, text: str, wide: int = _LABEL) -> list[str]:
    first = f"  {label:<{wide}}"
    return _fill(text, first, " " * len(first))


def _fill(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)

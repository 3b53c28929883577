"""What a run was and what became of it, as short tables: scores, time, waste, the experiment, the machine."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

from gnomon.algorithms.build import to_table as algorithm_table
from gnomon.algorithms.presets import GRPO, NAMED
from gnomon.config.experiment import Experiment
from gnomon.core.atomic_files import read_plain_text
from gnomon.core.tables import flat, packaged_toml, to_table, value_at
from gnomon.insight.report.plots import CAUSES, STAGES, Rows, color_of
from gnomon.records.console import duration
from gnomon.records.jsonl import waste_cause
from gnomon.records.reading import RunRecord, column
from gnomon.records.run_card import sessions_of
from gnomon.tasks.arithmetic import ArithmeticTask

_WORDS = packaged_toml("gnomon.insight", "words.toml")
_FORMER = ("idle", "failed", "refused", "surplus", "distrusted")


@dataclass(frozen=True)
class Share:
    """One part of a whole.

    Attributes:
        fraction: The part's share of the whole, in [0, 1].
        amount: What it is, in words a person reads.
        color: The number of its color, the same in every picture of a page.
    """

    name: str
    meaning: str
    fraction: float
    amount: str
    color: int = 0


@dataclass(frozen=True)
class SettingDifference:
    """A setting that is not what it would be by itself; None stands for a setting that is not there."""

    key: str
    here: str
    there: str


def total(rows: Rows, name: str) -> float:
    """Return the sum of a metric over the steps."""
    return sum(value for _, value in column(rows, name))


def worked_seconds(rows: Rows) -> float:
    """Return the wall-clock seconds that the run has worked, over all its sessions."""
    return max((value for _, value in column(rows, "seconds")), default=0.0)


def ends(values: Sequence[float]) -> tuple[float, float]:
    """Return the means of the first and of the last few values, at most ten and a quarter of all."""
    # At most a quarter, so that beginning and end do not overlap in a short run.
    few = max(1, min(10, len(values) // 4))
    return sum(values[:few]) / few, sum(values[-few:]) / few


def time_shares(rows: Rows) -> list[Share]:
    """Return where the time went: the stages of a step, the rest of it, and what was between steps."""
    stages = {name: total(rows, f"time/{name}_seconds") for name in _WORDS["stages"]}
    in_steps = total(rows, "time/step_seconds")
    # Seconds of work begin with the run, and steps may be counted a little apart from them.
    whole = max(worked_seconds(rows), in_steps)
    # Stages that overlap may add up to more than the step.
    stages["other"] = max(0.0, in_steps - sum(stages.values()))
    stages["between steps"] = max(0.0, whole - in_steps)
    meanings = {
        **_WORDS["stages"],
        "other": "bookkeeping within a step",
        "between steps": "loading, evaluations, checkpoints, records",
    }
    if whole <= 0:
        return []
    return [
        Share(n, meanings[n], s / whole, duration(s) if s >= 1 else f"{s:.2f}s", color_of(n, STAGES))
        for n, s in stages.items()
    ]


def waste_shares(rows: Rows) -> list[Share]:
    """Return what became of the generated tokens: trained on, or the cause for which they taught nothing."""
    generated = total(rows, "tokens/generated")
    if generated <= 0:
        return []
    # Tokens by cause. Two metrics may mean one cause: `waste_cause` knows the words of earlier versions.
    causes: dict[str, float] = {}
    for name in sorted({n for row in rows for n in row if waste_cause(n)}):
        causes[waste_cause(name)] = causes.get(waste_cause(name), 0.0) + _tokens(rows, name)
    # Runs recorded before causes were fractions have counts of tokens instead.
    causes = causes or {cause: total(rows, f"tokens/{cause}") for cause in _FORMER}
    # What no cause took had a gradient; rounded fractions may add up to a little more than 1.
    trained = max(0.0, generated - sum(causes.values()))
    largest = sorted(((n, t) for n, t in causes.items() if t > 0), key=lambda pair: -pair[1])
    shares = [("trained", "had a gradient", trained), *((n, _WORDS["causes"].get(n, ""), t) for n, t in largest)]
    return [
        Share(n.replace("_", " "), meaning, t / generated, f"{t:,.0f} tokens", color_of(n, CAUSES))
        for n, meaning, t in shares
    ]


def _tokens(rows: Rows, name: str) -> float:
    # A fraction of a step's tokens becomes tokens, since steps differ in length.
    generated = dict(column(rows, "tokens/generated"))
    return sum(value * generated.get(step, 0.0) for step, value in column(rows, name))


def differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[SettingDifference]:
    """Return the keys of two flat tables whose values differ, in order of the keys."""
    keys = [key for key in sorted({*here, *there}) if here.get(key, MISSING) != there.get(key, MISSING)]
    return [SettingDifference(key, shown(here.get(key)), shown(there.get(key))) for key in keys]


def shown(value: Any) -> str:
    """Return a setting as it is written.

    >>> shown(True), shown("text"), shown(None), shown([1, 2])
    ('true', 'text', '-', '[1, 2]')
    """
    if value is None:
        return "-"
    return str(value).lower() if isinstance(value, bool) else str(value)


def preset_differences(experiment: Mapping[str, Any]) -> tuple[str | None, list[SettingDifference]]:
    """Return the name of the preset that the algorithm is called after, and what differs from it; None without one."""
    name = value_at(experiment, "algorithm.name")
    if not isinstance(name, str) or name not in NAMED:
        return None, []
    there = flat(algorithm_table(NAMED[name]))
    return name, [d for d in differences(flat(experiment["algorithm"]), there) if d.key not in ("name", "paper")]


def default_differences(experiment: Mapping[str, Any]) -> list[SettingDifference]:
    """Return what the experiment sets to something else than gnomon does by itself, apart from task and algorithm."""
    # A setting without a default differs from nothing.
    required = {f.name for f in fields(Experiment) if f.default is MISSING and f.default_factory is MISSING}
    left_out = {*required, "name", "seed", "rewards"}
    # Any valid experiment has the defaults; what had to be given for it is left out.
    plain = to_table(Experiment(model="tiny", task=ArithmeticTask(), algorithm=GRPO))
    tables = [{k: v for k, v in table.items() if k not in left_out} for table in (experiment, plain)]
    return differences(flat(tables[0]), flat(tables[1]))


def card_rows(card: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the run card as label and text; the newest session's, with the former ones counted."""
    sessions = sessions_of(card)
    # A run that was resumed has a card for each session, and the newest tells how it is trained now.
    newest = sessions[-1] if isinstance(sessions[-1], Mapping) else card
    labels = {
        "reproducibility": "Reproducibility", "sandbox": "Sandbox", "device": "Device", "cpu": "Processor",
        "cpu_count": "Cores", "threads": "Threads", "precision": "Precision", "platform": "System", "seeds": "Seeds",
        "cluster": "Cluster", "started": "Started", "questions": "Stamp of the questions",
        "foreign_code": "Code of the user's", "trusted_models": "Models whose code may run",
    }  # fmt: skip
    rows = [(label, _said(newest[key])) for key, label in labels.items() if newest.get(key) not in (None, [], "", {})]
    versions, code = newest.get("versions"), newest.get("code")
    if isinstance(code, Mapping):
        rows += [(f"Commit of {name.replace('_', ' ')}", _commit(value)) for name, value in code.items() if value]
    if isinstance(versions, Mapping):
        rows.append(("Versions", _said(versions)))
    return [*rows, ("Sessions", str(len(sessions)))] if card else []


def _commit(value: Any) -> str:
    if not isinstance(value, Mapping):
        return str(value)
    return str(value.get("commit", "")) + (", with changes" if value.get("dirty") else "")


def _said(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {inner}" for key, inner in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def experiment_text(record: RunRecord, most: int = 40_000) -> str:
    """Return the resolved experiment as it was written, cut where it is very long."""
    try:
        text = read_plain_text(record.files.experiment, errors="replace")
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return text if len(text) <= most else text[:most] + f"\n... and {len(text) - most:,} more characters"


def asked_of(experiment: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many prompts a step asks, and how many answers to each; 1 where the experiment does not say."""
    each, count = value_at(experiment, "algorithm.num_generations"), experiment.get("rollouts_per_step")
    # Not isinstance: a bool is an int.
    if type(count) is not int or type(each) is not int or each < 1:
        return 1, 1
    return max(1, count // each), each

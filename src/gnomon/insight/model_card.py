"""A run's model for others: its files with a model card and the experiment, in a folder or on the Hugging Face hub."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

import gnomon
from gnomon.core.atomic_files import real_path
from gnomon.core.errors import ConfigError
from gnomon.core.metric_meanings import MEANINGS
from gnomon.core.redaction import without_secrets
from gnomon.core.sentences import template
from gnomon.core.tables import flat, reach_table, value_at
from gnomon.insight.report import facts
from gnomon.insight.report.run import verdict
from gnomon.models.hub import card_header, check_account, check_repository, hub_name, license_of, upload
from gnomon.records.console import duration
from gnomon.records.jsonl import task_name
from gnomon.records.reading import RunRecord, column
from gnomon.records.run_card import newest_session, rejudged
from gnomon.tasks.benchmarks import BENCHMARKS
from gnomon.tasks.published import PUBLISHED
from gnomon.tasks.readers import is_file_name
from gnomon.training.api import check_new, copy_model, new_folder
from gnomon.training.eval_spec import checkpoint_of
from gnomon.training.evaluate import Evaluation, read_evaluations

_LAST = (
    "rollout/reward_mean", "rollout/length_tokens_mean", "rollout/truncated_fraction",
    "rollout/degenerate_group_fraction", "loss/entropy_nats", "loss/kl_behavior_nats", "loss/clipped_fraction",
    "learner/gradient_norm", "mismatch/logprob_abs_mean_nats", "tokens/wasted_fraction",
)  # fmt: skip
_WAYS = {"data": "supervised fine-tuning", "pairs": "preference optimization", "labels": "preference optimization"}


@dataclass(frozen=True)
class Upload:
    """What was put on the hub, or would be.

    Attributes:
        repository: USER/NAME.
        url: Its address; "" where nothing was uploaded.
        private: Whether only its owner sees it.
        folder: Where the files are; None where they were removed after the upload.
        files: Their names.
    """

    repository: str
    url: str
    private: bool
    folder: Path | None
    files: tuple[str, ...]

    def as_row(self) -> dict[str, Any]:
        """Return one JSON object."""
        return {**vars(self), "folder": None if self.folder is None else str(self.folder), "files": list(self.files)}


def push_to_hub(
    run: str | Path, repository: str, private: bool = True, folder: str | Path | None = None, is_dry: bool = False
) -> Upload:
    """Put the model of a run's newest checkpoint on the Hugging Face hub, with a model card and the experiment.

    Args:
        run: A run's directory.
        repository: USER/NAME or ORGANIZATION/NAME; it is made where it is not there.
        private: Whether a new repository is private. One that exists with another visibility is refused.
        folder: A new folder that keeps what is uploaded; None for none.
        is_dry: Whether ``folder`` is written and nothing is uploaded; then the hub is not asked at all.

    Returns:
        What was uploaded.

    Raises:
        ConfigError: The name is none of a repository, or the hub would refuse; before anything is read of the run.
        RunDirectoryError: There is no run, no checkpoint, or ``folder`` holds something.
        RunError: The upload broke.
    """
    check_repository(repository)
    if is_dry and folder is None:
        raise ConfigError("a dry run writes what would be uploaded into a folder; name a new one")
    if folder is not None:
        check_new(folder)
    # The name is checked before, and the hub is asked below: both are cheap beside copying a model of gigabytes.
    record = RunRecord.of(run)
    source = checkpoint_of(record.path)
    if not is_dry:
        check_account(repository, private)
    # `new_folder` removes what it made when anything fails, so that no half model stays behind.
    with tempfile.TemporaryDirectory() as made, new_folder(made if folder is None else folder) as place:
        step = copy_model(record.path, source, place)
        card = model_card(record, repository, step, is_classifier(place))
        (place / "README.md").write_text(card, encoding="utf-8")
        (place / "experiment.toml").write_text(shared_experiment(record.experiment()), encoding="utf-8")
        names = tuple(sorted(path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()))
        url = "" if is_dry else upload(place, repository, private, f"{real_path(record.path).name}, step {step}")
    return Upload(repository, url, private, None if folder is None else Path(folder), names)


def model_card(record: RunRecord, repository: str, step: int, classifies: bool = False) -> str:
    """Return the README.md of a run's model after ``step`` steps: metadata that the hub reads, and text for people.

    Args:
        record: The run.
        repository: USER/NAME.
        step: How many steps the model was trained.
        classifies: Whether it is transformers' sequence classifier, as a reward model is where there is one.
    """
    experiment, name = record.experiment(), repository.rpartition("/")[2]
    # The card is about the checkpoint: what was measured after it belongs to weights that are not uploaded.
    rows = [row for row in record.metrics() if row["step"] <= step]
    found = [e for e in read_evaluations(record.files.evaluations) if e.step <= step]
    # The evaluation before training, if there was one, and the last one.
    ends = [found[0], found[-1]] if len(found) > 1 else found
    model, algorithm = str(experiment.get("model", "")), reach_table(experiment, "algorithm")
    preset = str(algorithm.get("name", "an algorithm"))
    # A reward model: the critic learned from pairs, and no policy was trained.
    ranks = value_at(algorithm, "critic.target") == "pairs"
    way = "reward modeling" if ranks else _WAYS.get(str(algorithm.get("samples")), "reinforcement learning")
    task_type = "text-classification" if ranks else "text-generation"
    header = card_header(
        name,
        [result for e in ends[-1:] for part in (e.parts or (e,)) for result in _results(part, task_type)],
        base_model=hub_name(model),
        datasets=datasets_of(experiment),
        **(license_of(model) if model else {}),
        # Without a sequence classifier of its architecture in transformers, a reward model is loaded by gnomon alone.
        library_name="gnomon" if ranks and not classifies else "transformers",
        pipeline_tag=task_type,
        tags=["gnomon", way.replace(" ", "-"), preset],
    )
    card, names = newest_session(record.card()), dict.fromkeys(n for e in ends for n in e.scores)
    columns = {metric: column(rows, metric) for metric in _LAST}
    body = template("insight/model_card.j2").render(
        name=name, model=model, repository=repository, step=step, way=way, preset=preset, ends=ends, rows=rows,
        experiment=experiment, ranks=ranks, classifies=classifies, named=_named, version=gnomon.__version__,
        task=task_name(experiment) or "its task", paper=str(algorithm.get("paper", "")),
        verdict=verdict(ends, rejudged(record.card())),
        heads=["score", *(f"after step {e.step}" if e.step else "before training" for e in ends)],
        scores=[[n, *(str(e.scores[n]) if n in e.scores else "-" for e in ends)] for n in names],
        settings=_settings(record, rows, step),
        curves=[(f"`{n}`", f"{c[0][1]:.4g}", f"{c[-1][1]:.4g}", MEANINGS[n]) for n, c in columns.items() if c],
        most=reach_table(experiment, "sampling").get("max_completion_length", 256),
        owned=", ".join(dict.fromkeys(f"`{_named(v)}`" for v in flat(experiment).values() if _is_place(v))),
        reproducibility=card.get("reproducibility", ""), commit=value_at(card, "code.gnomon.commit"),
    )  # fmt: skip
    # The card is public: whatever the environment has as a secret must not be in it.
    return header + without_secrets(body.strip()) + "\n"


def is_classifier(folder: Path) -> bool:
    """Return whether a model's folder is transformers' sequence classifier."""
    named = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures")
    return any(name.endswith("ForSequenceClassification") for name in named or ())


def datasets_of(experiment: Mapping[str, Any]) -> list[str]:
    """Return the names on the hub of the datasets that a run was trained on.

    >>> [datasets_of({"task": {"path": path}}) for path in ("openai/gsm8k:main", "rows.jsonl")]
    [['openai/gsm8k'], []]
    >>> datasets_of({"task": {"parts": [{"task": {"set": "gsm8k"}}, {"task": {"kind": "arithmetic"}}]}})
    ['openai/gsm8k']
    """
    task = reach_table(experiment, "task")
    if parts := task.get("parts"):
        return list(dict.fromkeys(name for part in parts for name in datasets_of(part)))
    # A published set or a benchmark names a dataset of the hub; otherwise the path may be one.
    known = PUBLISHED.get(str(task.get("set"))) or BENCHMARKS.get(str(task.get("benchmark")))
    path = str(task.get("path") or (known.hub if known else ""))
    name = path.partition(":")[0]
    # OWNER/NAME is a name on the hub, and folder/rows.jsonl has the same form.
    return [name] if name.count("/") == 1 and not is_file_name(path) and not path.startswith(("/", ".")) else []


def shared_experiment(experiment: Mapping[str, Any]) -> str:
    """Return an experiment as TOML without the folders of the machine that it ran on: of an absolute path the name.

    >>> print(shared_experiment({"model": "/data/base", "task": {"path": "/data/rows.jsonl"}}).strip())
    model = "base"
    <BLANKLINE>
    [task]
    path = "rows.jsonl"
    """
    return without_secrets(tomli_w.dumps(_relative(dict(experiment))))


def _relative(value: Any) -> Any:
    if isinstance(value, Mapping):
        # TOML has no null.
        return {key: _relative(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [_relative(inner) for inner in value]
    return _named(value) if _is_place(value) else value


def _is_place(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("/")


def _named(path: str) -> str:
    return Path(path).name if path.startswith("/") else path


def _results(found: Evaluation, task_type: str) -> list[dict[str, Any]]:
    shared = {"task_type": task_type, "dataset_type": _named(found.task), "dataset_name": _named(found.task)}
    # The first score is the headline; others are parts of it.
    score = next(iter(found.scores))
    measured = {score: found.headline.mean, **{f"pass@{k}": value for k, value in found.pass_at.items()}}
    return [{**shared, "metric_type": name, "metric_value": round(value, 4)} for name, value in measured.items()]


def _settings(record: RunRecord, rows: Sequence[Mapping[str, Any]], step: int) -> list[tuple[str, str]]:
    experiment, card = record.experiment(), newest_session(record.card())
    prompts, each = facts.asked_of(experiment)
    sampling = reach_table(experiment, "sampling")
    lora, versions = reach_table(experiment, "lora"), reach_table(card, "versions")
    used = ", ".join(f"{name} {versions[name]}" for name in ("gnomon", "torch", "transformers") if name in versions)
    said = {
        "steps": f"{step:,} of {record.steps():,}",
        "prompts a step": f"{prompts:,}, {each:,} answers each",
        "learning rate": facts.shown(value_at(experiment, "learner.optimizer.learning_rate")),
        "precision": facts.shown(card.get("precision")),
        "LoRA": f"rank {lora['rank']}, merged" if lora.get("rank") else "",
        "system message": json.dumps(system, ensure_ascii=False) if (system := experiment.get("system")) else "",
        "chat template": json.dumps(kwargs) if (kwargs := reach_table(experiment, "chat_template_kwargs")) else "",
        "longest answer": f"{sampling.get('max_completion_length')} tokens",
        "temperature": facts.shown(sampling.get("temperature")),
        "max_staleness": facts.shown(experiment.get("max_staleness")),
        "tokens generated": f"{facts.total(rows, 'tokens/generated'):,.0f}",
        "time": duration(facts.worked_seconds(rows)),
        "device": str(card.get("cpu") if card.get("device") == "cpu" else card.get("device", "")),
        "versions": used,
    }
    preset, changed = facts.preset_differences(experiment)
    own = [(f"`algorithm.{d.key}`", f"{d.here} (in {preset}: {d.there})") for d in changed]
    # Rows that the run cannot fill are left out.
    return [*((key, value) for key, value in said.items() if value and value != "-"), *own]

"""A run as a Python program sees it: its numbers, its rollouts, its model."""

import asyncio
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from gnomon.config.experiment import steps_of
from gnomon.core.errors import ConfigError, unknown
from gnomon.core.metric_meanings import MEANINGS, metric_of
from gnomon.core.optional import import_optional
from gnomon.core.sections import DATE
from gnomon.core.svg import Series, chart, write_svg
from gnomon.core.threads import run_alone
from gnomon.core.types import Message
from gnomon.engines.base import Sampling
from gnomon.engines.local import LocalEngine
from gnomon.engines.rng import sample_key
from gnomon.engines.stop_strings import check_stop_strings, cut_at_stop
from gnomon.models.load import ModelFolder, load_model, load_tokenizer
from gnomon.records.directory import RunDirectory
from gnomon.records.reading import RunRecord
from gnomon.records.rollouts import RecordedRollout
from gnomon.tasks.chat import ChatRenderer
from gnomon.training.eval_spec import checkpoint_of
from gnomon.training.evaluate import Evaluation, read_evaluations


@dataclass(frozen=True)
class StepMetrics(Mapping[str, list[float]]):
    """What the steps of a run measured: a mapping from the name of a metric to its value in each step.

    Attributes:
        rows: One row a step, as `RunRecord.metrics` reads them.
    """

    rows: Sequence[Mapping[str, Any]]

    @property
    def steps(self) -> list[int]:
        """The steps that were recorded, from 1."""
        return [row["step"] for row in self.rows]

    def __getitem__(self, name: str) -> list[float]:
        """Return the values of one metric in the order of `steps`; NaN where a step did not measure it.

        Raises:
            KeyError: No step measured that; the message has the nearest name.
        """
        if name not in self.names:
            raise KeyError(unknown("metric", name, self.names))
        return [math.nan if row.get(name) is None else row[name] for row in self.rows]

    def __iter__(self) -> Iterator[str]:
        """Return the names of the metrics."""
        return iter(self.names)

    def __len__(self) -> int:
        """Return how many metrics there are."""
        return len(self.names)

    @cached_property
    def names(self) -> list[str]:
        """The names of the metrics, in the order in which they were first recorded."""
        # Metrics have a slash in their names, and no other key of a row has one.
        return [name for name in dict.fromkeys(name for row in self.rows for name in row) if "/" in name]

    def meaning(self, name: str) -> str:
        """Return what a metric means, in one sentence; "" for a metric of a piece of your own.

        Raises:
            KeyError: No step measured that; the message has the nearest name.
        """
        if name not in self.names:
            raise KeyError(unknown("metric", name, self.names))
        return MEANINGS.get(metric_of(name) or "", "")

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame with a row a step.

        Raises:
            ConfigError: pandas is not installed.
        """
        pandas = import_optional("pandas", "notebook", "a DataFrame")
        return pandas.DataFrame(dict(self), index=pandas.Index(self.steps, name="step"))

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the last steps as a table, where pandas is installed."""
        try:
            return str(self.to_pandas().tail(10).to_html())
        except ConfigError:
            return f"<pre>{self!r}</pre>"


@dataclass(frozen=True)
class Picture:
    """A picture that a notebook shows.

    Attributes:
        svg: The picture as SVG.
    """

    svg: str

    def save(self, path: str | Path) -> Path:
        """Write the picture as an SVG file with colors for light and dark, and return its path.

        Raises:
            OSError: If the file cannot be written.
        """
        write_svg(Path(path), self.svg)
        return Path(path)

    def _repr_svg_(self) -> str:
        return self.svg


@dataclass(frozen=True)
class Result:
    """A run: its directory, and what its files say of it.

    Attributes:
        directory: The directory of the run.
        model: The newest checkpoint, a Hugging Face folder; ``run.model()`` loads it.
        steps: Steps that were trained in all.
        evaluations: The evaluations in order; the first and the last compare the weights before and after.
    """

    directory: Path
    model: ModelFolder
    steps: int
    evaluations: tuple[Evaluation, ...]

    @property
    def first_step(self) -> int:
        """Steps that were made by the run that this one continues; 0 for a run that continues none."""
        return steps_of(str(RunDirectory(self.directory).table().get("continue_from", "")))

    def __fspath__(self) -> str:
        return str(self.directory)

    @property
    def metrics(self) -> StepMetrics:
        """What each step measured; `StepMetrics.meaning` explains a name."""
        return StepMetrics(RunRecord(self.directory).metrics())

    def rollouts(self, step: int | None = None) -> list[RecordedRollout]:
        """Return the recorded rollouts of one step, or of all steps.

        Args:
            step: The step, from 1; None reads all recorded steps.

        Raises:
            ConfigError: ``step`` is no whole number.
        """
        if step is not None and (isinstance(step, bool) or not hasattr(step, "__index__")):
            raise ConfigError(f"step = {step!r}: should be a whole number, or None for all steps")
        record = RunRecord(self.directory)
        return [each for at in (record.rollout_steps() if step is None else [step]) for each in record.rollouts(at)]

    def generate(self, prompts: str | Sequence[str | Sequence[Message]], seed: int = 0, **sampling: Any) -> list[str]:
        """Answer prompts with the newest checkpoint, as the run renders them: its system message, its chat template.

        Args:
            prompts: One text, or a list of texts or of chat messages.
            seed: Seed of the draws; the same seed gives the same answers.
            **sampling: Settings of `gnomon.engines.base.Sampling` that replace the run's, such as ``temperature=0.6``.

        Returns:
            One answer a prompt.

        Raises:
            ConfigError: A setting is unknown or out of range, or a prompt is neither a text nor messages, or longer
                than the context.
        """
        table = RunDirectory(self.directory).table()
        asked = _prompts(prompts)
        is_trusted = bool(table.get("trust_remote_code"))
        switches, date = table.get("chat_template_kwargs", {}), table.get("template_date", DATE)
        tokenizer = replace(load_tokenizer(str(self.model), is_trusted), switches=switches, date=date)
        known = set(Sampling.__dataclass_fields__)
        wrong = next((name for name in sampling if name not in known), None)
        if wrong is not None:
            raise ConfigError(unknown("sampling setting", wrong, known))
        drawn = Sampling(**{**table.get("sampling", {}), **sampling})
        render = ChatRenderer(tokenizer, table.get("system") or None)
        engine = LocalEngine(load_model(str(self.model), torch.float32, trust_remote_code=is_trusted))
        check_stop_strings(drawn, tokenizer)
        settings = replace(
            drawn,
            stop_ids=tuple({*tokenizer.stop_ids, *drawn.stop_ids}),
            tokenizer=str(self.model),
            trust_remote_code=is_trusted,
        )

        async def answer(number: int, prompt: str | Sequence[Message]) -> str:
            key = sample_key(seed, 0, str(number), 0)
            (completion,) = await engine.generate(render(prompt), [key], settings)
            return cut_at_stop(tokenizer.decode(completion.tokens), completion, settings)

        async def answers() -> list[str]:
            try:
                return await asyncio.gather(*(answer(number, prompt) for number, prompt in enumerate(asked)))
            finally:
                await engine.close()

        return run_alone(answers())

    def plot(self, *names: str) -> Picture:
        """Draw metrics over the steps, with the held-out score where the reward is drawn.

        Args:
            *names: Names of metrics; without any, the mean reward of the rollouts, or the loss with the held-out loss
                where the dataset's answers were trained on.

        Returns:
            A picture that a notebook shows and that `Picture.save` writes.

        Raises:
            KeyError: No step measured one of the metrics.
        """
        metrics = self.metrics
        if not names and "loss/perplexity" in metrics:
            losses = [(e.step, e.loss_nats) for e in self.evaluations if e.loss_nats is not None]
            drawn = [Series("loss/policy", metrics.steps, metrics["loss/policy"])]
            steps, values = [step for step, _ in losses], [loss for _, loss in losses]
            drawn += [Series("held out", steps, values, style="points")] if losses else []
            return Picture(chart(drawn, "Loss", "step", "nats a token"))
        series = [Series(name, metrics.steps, metrics[name]) for name in names or ("rollout/reward_mean",)]
        scores = [(e.step, e.headline) for e in self.evaluations] if not names else []
        if scores:
            means, lows, highs = zip(*((h.mean, h.low, h.high) for _, h in scores), strict=True)
            series.append(Series("held out", [s for s, _ in scores], means, lows, highs, style="points"))
        return Picture(chart(series, ", ".join(names) or "Reward", "step", ""))

    def as_row(self) -> dict[str, Any]:
        """Return one JSON object."""
        return {
            "run": str(self.directory),
            "model": str(self.model),
            "steps": self.steps,
            "evaluations": [e.as_row() for e in self.evaluations],
        }


def _prompts(given: Any) -> list[str | Sequence[Message]]:
    """Return what is to be answered as a list.

    Raises:
        ConfigError: There is something else in it; a mapping would be read as its keys.
    """
    if not isinstance(given, Iterable) or isinstance(given, Mapping | bytes):
        raise ConfigError(f"prompts is {type(given).__name__}, and should be a text or a list of texts or chats")
    asked = [given] if isinstance(given, str) else list(given)
    for number, prompt in enumerate(asked, 1):
        if not isinstance(prompt, str | list | tuple):
            raise ConfigError(
                f"prompt {number} is {type(prompt).__name__}, and should be a text or a list of messages such as "
                "{'role': 'user', 'content': ...}"
            )
        if isinstance(prompt, str) and any("\ud800" <= each <= "\udfff" for each in prompt):
            raise ConfigError(f"prompt {number} has half of a surrogate pair, which no tokenizer reads: {prompt!a}")
    return asked


def load(run: str | Path) -> Result:
    """Return a run that is on disk, finished or not.

    Args:
        run: The directory of the run.

    Raises:
        RunDirectoryError: There is no run, or the run has no checkpoint.

    >>> load("runs/first").metrics["rollout/reward_mean"]  # doctest: +SKIP
    """
    directory = RunRecord.of(RunDirectory.named_by(run)).files
    model = ModelFolder(checkpoint_of(directory.path))
    return Result(directory.path, model, int(model.name.removeprefix("step-")), read_evaluations(directory.evaluations))

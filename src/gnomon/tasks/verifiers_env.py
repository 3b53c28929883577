"""Environments of the ``verifiers`` package (Prime Intellect), driven from their own rollout loop. No torch.

Its loop asks a model for messages; here it asks us instead, by a replaced ``get_model_response``: it waits there for
the policy's answer, so that stop conditions, tools, state and rubric are the package's own. Written for version 0.1.9
and its ``rollout(input, client, model)``; later versions have another interface. What an environment changes in
messages that were said already is not seen: a trajectory only grows (`rollouts/multi_turn.py`).
"""

import asyncio
import contextlib
import functools
import importlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from gnomon.core.atomic_files import write_durably
from gnomon.core.errors import ConfigError
from gnomon.tasks.environment import EnvironmentConfig, EnvReply, checked_reward, foreign_package
from gnomon.tasks.tools import find_calls


class VerifiersEnv:
    """One rollout with an environment of the package. Its reward is the rubric's, and comes at the end."""

    def __init__(self, plan: EnvironmentConfig) -> None:
        self._environment = _loaded(plan.use, json.dumps(plan.settings))
        # The one call of the package's loop that reaches a model. On
        # the instance, not the class: other environments keep theirs.
        self._environment.get_model_response = self._asked
        self.schemas = tuple(vars(self._environment).get("oai_tools") or ())
        self._questions: asyncio.Queue[Sequence[Any]] = asyncio.Queue()
        self._answers: asyncio.Queue[str] = asyncio.Queue()
        self._rollout: asyncio.Task[Any] | None = None
        self._state: Any = None
        self._seen = 0

    async def begin(self, prompt: str, columns: Mapping[str, Any]) -> EnvReply:
        """Start its rollout on the row that the columns are; what it shows beyond the question is an observation."""
        row = {"example_id": 0, "task": "default", "answer": "", **columns}
        row["prompt"] = columns.get("prompt") or [{"role": "user", "content": prompt}]
        # No client and no model is called.
        self._rollout = asyncio.ensure_future(self._environment.rollout(row, None, "policy"))
        self._seen = len(row["prompt"])
        return await self._next()

    async def reply(self, text: str) -> EnvReply:
        """Give it an answer, and wait until it asks for another or has ended."""
        self._seen += 1
        self._answers.put_nowait(text)
        return await self._next()

    async def end(self) -> float | None:
        """Return the rubric's reward of what was said; a rollout that our budgets ended is scored as it stands."""
        state = self._state
        if self._rollout is not None and not self._rollout.done():
            self._rollout.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._rollout
        if state is None:
            return None
        await self._environment.render_completion(state)
        state["timing"]["total_ms"] = (time.time() - state["timing"]["start_time"]) * 1000
        await self._environment.rubric.score_rollout(state, score_sem=nullcontext())
        return checked_reward(float(state["reward"]))

    async def _asked(self, state: Any, messages: Any, *_: Any, **__: Any) -> Any:
        self._state = state
        self._questions.put_nowait(messages)
        return _response(await self._answers.get())

    async def _next(self) -> EnvReply:
        assert self._rollout is not None, "begin comes first"
        question = asyncio.ensure_future(self._questions.get())
        # Either the loop asks for another answer, or it has ended.
        await asyncio.wait({question, self._rollout}, return_when=asyncio.FIRST_COMPLETED)
        if not question.done():
            question.cancel()
            self._state = self._rollout.result()
            if self._state["error"] is not None:
                raise self._state["error"]
            return EnvReply(is_done=True)
        messages = question.result()
        # The loop gives the whole conversation each time; only what follows the last answer is a reply.
        new, self._seen = messages[self._seen :], len(messages)
        return EnvReply(tuple(_spoken(new)))


def load(name: str, settings: Mapping[str, Any]) -> Any:
    """Return the environment.

    Raises:
        ConfigError: The message names what to install, or what the environment's loading raised.
    """
    package = foreign_package("verifiers")
    try:
        return package.load_environment(name, **settings)
    except Exception as error:
        raise ConfigError(f"verifiers cannot load the environment '{name}' with {dict(settings)}: {error}") from error


@functools.cache
def _loaded(name: str, settings: str) -> Any:
    # Once, before workers are forked: it brings a dataset. Rollouts share it, as in the package.
    return load(name, json.loads(settings))


def check_verifiers(plan: EnvironmentConfig) -> None:
    """Load the environment once.

    Raises:
        ConfigError: The environment cannot be loaded, or rewards rollouts by what the package knows of their group.
    """
    rubric = _loaded(plan.use, json.dumps(plan.settings)).rubric
    joint = [name for each in getattr(rubric, "rubrics", [rubric]) for name in each._get_group_reward_func_names()]
    if joint:
        raise ConfigError(
            f"'{plan.use}' pays by functions of a whole group ({', '.join(joint)}), which only the package's own loop "
            "asks: leave them out of its rubric, and name them here, with TRL's signature,\n"
            f'[[rewards]] kind = "function", function = "{plan.use}:{joint[0]}", beside kind = "environment"'
        )


def write_questions(name: str, path: Path, settings: Mapping[str, Any] | None = None, count: int = -1) -> int:
    """Write the environment's own questions as JSON lines, for ``task = {kind = "table", path = ...}``.

    Args:
        count: Number of questions to write; -1 writes all.

    Returns:
        The number of written questions.
    """
    rows = load(name, settings or {}).get_dataset(n=count)
    kept = [{key: row[key] for key in ("prompt", "answer", "info", "task") if key in row} for row in rows]
    write_durably(path, "".join(json.dumps(row, default=str) + "\n" for row in kept).encode())
    return len(kept)


def _spoken(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    for message in messages:
        content = message.get("content") or ""
        if not isinstance(content, str):
            content = "".join(part.get("text", "") for part in content)
        yield ("tool" if message["role"] == "tool" else "user"), content


def _response(text: str) -> Any:
    """Return the answer as the package's loop wants a model's: an OpenAI chat completion."""
    chat = importlib.import_module("openai.types.chat")
    calls = [call for call in find_calls(text) if call.flaw is None]
    listed = [
        {"id": str(n), "type": "function", "function": {"name": c.name, "arguments": json.dumps(c.arguments)}}
        for n, c in enumerate(calls)
    ]
    message = {"role": "assistant", "content": text, "tool_calls": listed or None}
    choice = {"index": 0, "finish_reason": "tool_calls" if listed else "stop", "message": message}
    return chat.ChatCompletion.model_validate(
        {"id": "0", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
    )

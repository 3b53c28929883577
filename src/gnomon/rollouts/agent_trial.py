"""An agent is run on made answers before a model loads."""

import asyncio
import contextlib
from collections.abc import Sequence
from functools import partial

from gnomon.core.errors import ConfigError
from gnomon.core.progress import show_progress
from gnomon.core.types import Grade, Task
from gnomon.engines.base import Sampling
from gnomon.engines.rng import sample_key
from gnomon.engines.scripted import ScriptedEngine
from gnomon.rewards.base import Sample
from gnomon.rollouts.agent import AgentEndpoint, AgentRollout, PolicyTemplates
from gnomon.rollouts.env_workers import EnvWorkers
from gnomon.rollouts.multi_turn import Trajectory
from gnomon.tasks.environment import EnvironmentConfig


async def try_agent(
    plan: EnvironmentConfig, questions: Sequence[Sequence[Sample]], templates: PolicyTemplates, sampling: Sampling
) -> tuple[str, ...]:
    """Run the agent once for each made answer to a few questions, which is then all that the policy says.

    Returns:
        What should be said, a sentence each.

    Raises:
        ConfigError: If no run of it has any answer of the policy; naming the cause.
    """
    samples = [sample for answers in questions for sample in answers]
    async with contextlib.AsyncExitStack() as stack:
        env_workers = None if plan.server else await stack.enter_async_context(EnvWorkers(plan))
        endpoint = await stack.enter_async_context(AgentEndpoint())

        async def tried(number: int, sample: Sample) -> Trajectory:
            # A scripted engine that always gives the made answer: no model is loaded yet.
            said = partial(_made, tuple(templates.tokenizer.encode_plain(sample.completion)))
            agent = AgentRollout(ScriptedEngine(said), endpoint, env_workers, templates, plan, _ungraded)
            task = Task(f"trial-{number}", (), sample.prompt, sample.columns, sample.messages)
            return await agent.run(task, partial(sample_key, 0, 0, task.id, 0), sampling)

        with show_progress(f"trying the agent {plan.names}"):
            played = await asyncio.gather(*(tried(number, sample) for number, sample in enumerate(samples)))
    silent = [path.error for path in played if path.error is not None]
    if len(silent) == len(played):
        columns = ", ".join(map(str, samples[0].columns)) or "none"
        raise ConfigError(
            f"{silent[0]}\nso it was in each of the {len(played)} rollouts of {plan.names} that were tried; the row's "
            f"columns are {columns}\nan agent calls the policy at OPENAI_BASE_URL with OPENAI_API_KEY, or at "
            "ANTHROPIC_BASE_URL with ANTHROPIC_API_KEY"
        )
    failed = [path.ending.cause for path in played if path.ending.by in ("fault", "timeout", "flood")]
    if not failed:
        return ()
    return (
        f"the agent {plan.names} fails in {len(failed)} of {len(played)} rollouts that were tried: {failed[0]}; a "
        "rollout is graded as it is then",
    )


def _ungraded(sample: Sample, why: str) -> Grade:
    return Grade(None, error=why)


def _made(said: Sequence[int], prompt: Sequence[int], key: int) -> Sequence[int]:
    return said

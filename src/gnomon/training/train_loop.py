"""The training loop: prompts, rollouts, advantages, loss, new weights, step after step."""

from gnomon.algorithms.metrics import measure_advantages
from gnomon.core.failpoints import failpoint
from gnomon.rollouts.metrics import measure_round, measure_waste
from gnomon.training.run import Run
from gnomon.training.run_logger import StepTimer


async def train(run: Run) -> None:
    """Train, from the step of the learner, until all steps are done or the budget is spent.

    A baseline is read before its tracker observes, so it never contains the reward that it is subtracted from.

    Raises:
        RunError: If the run cannot go on; Stopped after a checkpoint, when it was asked to stop.
    """
    parts, progress, timer = run.components, run.progress, StepTimer()
    algorithm, learner = parts.algorithm, parts.learner
    await parts.weight_sync.publish(parts.engine, learner)

    async with parts.stream as stream:
        await run.begin()
        for step in run.steps_left():
            timer.start()
            finished = await stream.next_batch()
            timer.lap("generate")

            batch = parts.collate(finished.groups, run.schedule.temperature, parts.tracking.baseline)
            seen, metrics = None, measure_round(finished, learner.version)
            with parts.guard.step(step + 1) as guarded:
                needs = algorithm.needs | parts.staleness_filter.needs
                batch = (await learner.score(batch, needs, run.first_rows(batch, step))).into(batch)
                batch = guarded.check_finite(batch)
                finished, batch, trusted = parts.staleness_filter.apply(finished, batch, learner.version)
                mismatch = await progress.mismatch.measure(batch, step)
                seen, looking = await progress.token_probe.probe(batch, step)
                batch, taught = await parts.critic_updates.before_policy(batch, step)
                timer.lap("score")

                learned = measure_round(finished, learner.version) + trusted + mismatch + looking + taught
                failpoint("advantages")
                batch = guarded.check_finite(algorithm.prepare(batch))
                learned += measure_advantages(algorithm, batch)

                updates = [
                    await learner.update(minibatch, algorithm, step)
                    for minibatch in algorithm.minibatches(batch, run.shuffle_seed(step))
                ]
                learned = sum(updates, learned) + await parts.critic_updates.after_policy(batch, step)
                learned += measure_waste(finished, batch, learned)
                metrics = sum(await parts.imitation.update(step + 1), learned)
            timer.lap("update")

            learner.advance()
            metrics += guarded.metrics + await parts.weight_sync.publish(parts.engine, learner)
            timer.lap("publish")

            if guarded.is_learned:
                metrics += parts.curriculum.observe(finished.generated) + parts.imitation.observe(finished.generated)
                metrics += await parts.tracking.observe(finished.groups, updates)
            timer.lap("track")

            metrics += timer.metrics(finished.watch)
            progress.logger.write(step + 1, metrics + progress.budget.count(metrics), finished, batch, seen)
            await run.finish_step(step + 1)

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
    # Also after a restore: an engine that was just started holds the weights of the model's files.
    await parts.weight_sync.publish(parts.engine, learner)

    async with parts.stream as stream:
        await run.begin()
        for step in run.steps_left():
            timer.start()
            finished = await stream.next_batch()
            timer.lap("generate")

            # Baselines are read here and updated at the end: none may contain the reward it is subtracted from.
            whole = parts.collate(finished.groups, run.schedule.temperature, parts.tracking.baseline)
            batch = finished.taught(whole)
            seen, metrics = None, measure_round(finished, learner.version)
            with parts.guard.step(step + 1) as guarded:
                # Each policy costs a forward pass, so only those are scored that a piece or the filter reads.
                needs = algorithm.needs | parts.staleness_filter.needs
                batch = (await learner.score(batch, needs, run.first_rows(batch, step))).into(batch)
                # Before anything is computed from it: a single NaN would reach every weight.
                batch = guarded.check_finite(batch)
                # After scoring, since the filter reads ratios; before advantages, since groups leave the batch here.
                finished, batch, trusted = parts.staleness_filter.apply(finished, batch, learner.version)
                # Before the first update: where staleness is 0, engine and learner have the same weights.
                mismatch = await progress.mismatch.measure(batch, step)
                seen, looking = await progress.token_probe.probe(batch, step)
                batch, taught = await parts.critic_updates.before_policy(batch, step)
                timer.lap("score")

                # The round is measured again, for the filter may have removed groups.
                learned = measure_round(finished, learner.version) + trusted + mismatch + looking + taught
                failpoint("advantages")
                # Only here are groups whole; minibatches and micro-batches cut through them.
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

            # First the version, then the weights, so that every completion of them carries their version.
            learner.advance()
            metrics += guarded.metrics + await parts.weight_sync.publish(parts.engine, learner)
            timer.lap("publish")

            # A step that the guard rolled back must leave no trace in the curriculum or in baselines either.
            if guarded.is_learned:
                metrics += parts.curriculum.observe(finished.generated) + parts.imitation.observe(finished.generated)
                metrics += await parts.tracking.observe(finished.generated, updates)
            timer.lap("track")

            metrics += timer.metrics(finished.watch)
            # Written before a checkpoint is: a resumed run cuts the logs at its checkpoint and loses no step.
            progress.logger.write(step + 1, metrics + progress.budget.count(metrics), finished, batch, seen)
            await run.finish_step(step + 1)

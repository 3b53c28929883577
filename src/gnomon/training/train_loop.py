"""The walk: prompts, rollouts, advantages, loss, weights, and round again."""

from gnomon.algorithms.metrics import measure_advantages
from gnomon.core.failpoints import reach
from gnomon.rollouts.collate import collate
from gnomon.rollouts.metrics import measure_round, measure_waste
from gnomon.training.run import Run
from gnomon.training.run_logger import StepTimer


async def train(run: Run) -> None:
    """Walk the data once per step until ``run.steps`` are done or the budget is spent, from where the learner stands.

    A baseline is read before its tracker observes, so it never contains the reward that it is subtracted from.
    Raises: RunError when the run cannot go on; Stopped after a checkpoint, when it was asked to stop.
    """
    algorithm, learner, timer = run.algorithm, run.learner, StepTimer()
    await run.weight_sync.deliver(run.engine, learner)

    async with run.stream as stream:
        await run.begin()
        for step in run.steps_left():
            timer.start()
            finished = await stream.take()
            timer.mark("generate")

            batch = collate(finished.groups, run.temperature, run.tracking.baseline)
            seen, metrics = None, measure_round(finished, learner.version)
            with run.guard.step(step + 1) as guarded:
                batch = (await learner.score(batch, algorithm.needs | run.admission.needs)).into(batch)
                batch = guarded.check_finite(batch)
                finished, batch, trusted = run.admission.admit(finished, batch, learner.version)
                mismatch = await run.mismatch.measure(batch, step)
                seen, looking = await run.token_probe.look(batch, step)
                batch, taught = await run.critic_updates.before(batch, step)
                timer.mark("score")

                learned = measure_round(finished, learner.version) + trusted + mismatch + looking + taught
                reach("advantages")
                batch = guarded.check_finite(algorithm.prepare(batch))
                learned += measure_advantages(algorithm, batch)

                updates = [
                    await learner.update(minibatch, algorithm, step)
                    for minibatch in algorithm.minibatches(batch, run.shuffle_seed(step))
                ]
                learned = sum(updates, learned) + await run.critic_updates.after(batch, step)
                learned += measure_waste(finished, batch, learned)
                metrics = sum(await run.imitation.practice(step + 1), learned)
            timer.mark("update")

            learner.advance()
            metrics += guarded.metrics + await run.weight_sync.deliver(run.engine, learner)
            timer.mark("publish")

            if guarded.is_learned:
                metrics += run.curriculum.observe(finished.generated) + run.imitation.observe(finished.generated)
                metrics += await run.tracking.observe(finished.groups, updates)
            timer.mark("track")

            metrics += timer.metrics(finished.watch)
            run.journal.write(step + 1, metrics + run.meter.count(metrics), finished, batch, seen)
            await run.maintain(step + 1)

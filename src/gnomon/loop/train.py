"""The walk: prompts, rollouts, advantages, loss, weights, and round again."""

from gnomon.algorithms.measure import measure_advantages
from gnomon.failpoints import reach
from gnomon.loop.laps import Laps
from gnomon.loop.run import Run
from gnomon.rollouts.collate import collate
from gnomon.rollouts.measure import measure_round
from gnomon.rollouts.waste import measure_waste


async def train(run: Run) -> None:
    """Walk the data once per step until ``run.steps`` are done or the budget is spent, from where the learner stands.

    A baseline is read before its tracker observes, so it never contains the reward that it is subtracted from.
    Raises: RunError when the run cannot go on; Stopped after a checkpoint, when it was asked to stop.
    """
    algorithm, learner, laps = run.algorithm, run.learner, Laps()
    await run.arrival.deliver(run.engine, learner)

    async with run.stream as stream:
        await run.begin()
        for step in run.steps_left():
            laps.start()
            finished = await stream.take()
            laps.mark("generate")

            batch = collate(finished.groups, run.temperature, run.tracking.baseline)
            seen, metrics = None, measure_round(finished, learner.version)
            with run.caution.learning(step + 1) as lesson:
                batch = (await learner.score(batch, algorithm.needs | run.admission.needs)).into(batch)
                batch = lesson.check(batch, finished.groups)
                finished, batch, trusted = run.admission.admit(finished, batch, learner.version)
                mismatch = await run.mismatch.measure(batch, step)
                seen, looking = await run.glimpse.look(batch, step)
                batch, taught = await run.valuing.before(batch, step)
                laps.mark("score")

                learned = measure_round(finished, learner.version) + trusted + mismatch + looking + taught
                reach("advantages")
                batch = lesson.check(algorithm.prepare(batch), finished.groups)
                learned += measure_advantages(algorithm, batch)

                updates = [
                    await learner.update(minibatch, algorithm, step)
                    for minibatch in algorithm.minibatches(batch, run.shuffle_seed(step))
                ]
                learned = sum(updates, learned) + await run.valuing.after(batch, step)
                learned += measure_waste(finished, batch, learned)
                metrics = sum(await run.imitation.practice(step + 1), learned)
            laps.mark("update")

            learner.advance()
            metrics += lesson.metrics + await run.arrival.deliver(run.engine, learner)
            laps.mark("publish")

            if lesson.is_learned:
                metrics += run.curriculum.observe(finished.generated) + run.imitation.observe(finished.generated)
                metrics += await run.tracking.observe(finished.groups, updates)
            laps.mark("track")

            metrics += laps.metrics(finished.watch)
            run.journal.write(step + 1, metrics + run.meter.count(metrics), finished, batch, seen)
            await run.maintain(step + 1)

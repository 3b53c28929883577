"""A fingerprint of what a run asks, so that a resumed run is asked the same."""

import hashlib
import json

from gnomon.progress import counted
from gnomon.tasks.base import TaskSet

MOST = 20_000


def stamp(tasks: TaskSet) -> str:
    """Return a digest of the number of tasks and of id, prompt tokens, text and columns of each.

    Of more than 20,000 tasks so many are read, evenly spaced: no more than seconds are spent. Another row, another
    order, another tokenizer or chat template, or a generator of another version gives another stamp.
    """
    digest = hashlib.blake2b(str(len(tasks)).encode(), digest_size=16)
    places = range(0, len(tasks), -(-len(tasks) // MOST) or 1)
    for index in counted(places, "stamping prompts", len(places)):
        task = tasks[index]
        content = [task.id, task.prompt, task.text, dict(task.columns)]
        digest.update(json.dumps(content, sort_keys=True, default=str).encode(errors="backslashreplace"))
    return digest.hexdigest()

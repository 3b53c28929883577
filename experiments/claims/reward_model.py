"""A tiny reward model, which a critic may begin as: it judges answers at their end and was never asked before it.

Published critics begin as reward models (VC-PPO, VAPO). What such a model says in the middle of an answer is an
accident of how it was taught: that is the bias which value pre-training is to take away.
"""

import json
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch
from experiments.claims.exact_rates import answer_of
from experiments.claims.pretrain import PretrainingTask

from gnomon.models.critic import ValueScorer, load_critic, write_critic
from gnomon.models.load import load_tokenizer
from gnomon.tasks.build import TaskConfig, build_split
from gnomon.tasks.chat import ChatRenderer
from gnomon.tasks.question import dataset_fingerprint, digest
from gnomon.tasks.split import HeldOut

RECORD = "taught.json"
_RATE = 0.5


@cache
def reward_model(policy: Path, task: TaskConfig, folder: Path, held_out: HeldOut, steps: int = 300) -> Path:
    """Return a folder with a reward model (sequence classification, one label) on the trunk of ``policy``.

    It is taught on answers to training questions, half of them right, to say 1 after a right one and 0 after a wrong
    one, end token included: squared error, 64 answers a step. Nothing is asked of it elsewhere. Made once: the folder
    is named by a digest of policy, questions and steps.
    """
    tokenizer = load_tokenizer(str(policy))
    questions = build_split(task, held_out, ChatRenderer(tokenizer)).train
    found = folder / f"reward-{digest(dataset_fingerprint(questions), {'policy': policy.name, 'steps': steps})}"
    if (found / RECORD).is_file():
        return found
    guarded = PretrainingTask.on(questions, tokenizer, _RATE, 0.0, 0.25)
    critic, random = load_critic(str(policy), "policy"), Random(0)
    head: Any = critic.score
    scorer = ValueScorer(critic, head)
    optimizer = torch.optim.AdamW(critic.parameters(), lr=1e-3, weight_decay=0.0)
    error = torch.zeros(())
    for _ in range(steps):
        tasks, answers = guarded.draw(64, random)
        right = [[*tokenizer.encode_plain(answer_of(task)), tokenizer.stop_ids[0]] for task in tasks]
        rewards = torch.tensor([float(said == wanted) for said, wanted in zip(answers, right, strict=True)])
        rows = [[*task.prompt, *said] for task, said in zip(tasks, answers, strict=True)]
        longest, width = max(map(len, rows)), max(map(len, answers))
        tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
        mask = torch.arange(width) < torch.tensor([len(said) for said in answers])[:, None]
        prompts, lengths = (torch.tensor(list(map(len, many))) for many in ((t.prompt for t in tasks), rows))
        error = (scorer(tokens, prompts, lengths, mask).bootstrap - rewards).square().mean()
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
    found.parent.mkdir(parents=True, exist_ok=True)
    whole = Path(tempfile.mkdtemp(dir=found.parent, prefix=".reward-"))
    write_critic(critic, whole)
    (whole / RECORD).write_text(json.dumps({"error": float(error.detach())}) + "\n")
    try:
        os.rename(whole, found)
    except OSError:
        # Another process made the same model meanwhile.
        shutil.rmtree(whole)
    return found

"""What the comparisons with other implementations share: random minibatches, and how each peer is called.

The peers live in an environment of their own, which `make test-full` makes. Where one of them is missing, nothing here
is collected; asking for this folder by name then ends with "no tests ran", which is a failure.
"""

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gnomon.algorithms import GRPO, Algorithm
from gnomon.core.metrics import Metrics
from gnomon.core.types import Batch
from gnomon.testing import loss_and_gradient, make_batch

MISSING = [name for name in ("verl", "trl") if importlib.util.find_spec(name) is None]
if MISSING:
    collect_ignore_glob = ["test_*.py"]
elif "PRIME_RL" not in os.environ:
    collect_ignore_glob = ["test_prime_rl.py"]


def pytest_report_header() -> str | None:
    """Say why nothing is compared."""
    return f"tests/peers is left out without {' and '.join(MISSING)}: make test-full" if MISSING else None


@dataclass(frozen=True)
class Problem:
    """A random optimizer step: a batch with advantages and all four policies, every number float64.

    16 responses to 4 prompts, with ragged lengths and tool output in the middle; the rewards of one group are equal.
    Log-ratios reach from -3 to 3, so that every bound is exceeded somewhere.
    """

    batch: Batch
    current: Tensor

    def ours(self, algorithm: Algorithm) -> tuple[float, Tensor]:
        """Return loss and d loss / d current, of this batch's advantages."""
        return loss_and_gradient(algorithm, self.batch, self.current)

    def metrics(self, algorithm: Algorithm) -> Metrics:
        """Return what gnomon measures of the same step."""
        weighed = algorithm.weigh(self.batch)
        statistics = algorithm.statistics(self.current, weighed)
        return algorithm.loss(self.current, -self.current, weighed, statistics).metrics

    def with_batch(self, **changes: Any) -> "Problem":
        """Return the same with other fields of the batch."""
        return replace(self, batch=self.batch.with_fields(**changes))


def draw(seed: int, prompts: int = 4, generations: int = 4, width: int = 12, holes: bool = True) -> Problem:
    """Return one `Problem`."""
    torch.manual_seed(seed)
    rows = prompts * generations

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(rows, width, dtype=torch.float64)

    lengths = torch.randint(2, width + 1, (rows,))
    lengths[-1] = width
    mask = torch.arange(width) < lengths[:, None]
    if holes:
        mask &= torch.rand(rows, width) > 0.2
        mask[:, 0] = mask[-1, -1] = True
    rewards = torch.rand(rows, dtype=torch.float64)
    rewards[:generations] = 1.0
    current = -torch.rand(rows, width, dtype=torch.float64) * 4 - 0.01
    proximal = current + (normal(0.6)).clamp(-3, 3)
    behavior = proximal + (normal(0.4)).clamp(-3, 3)
    sign = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(rows // 2)[:, None]
    batch = make_batch(
        rewards.tolist(),
        mask.tolist(),
        torch.arange(prompts).repeat_interleave(generations).tolist(),
        behavior=behavior.tolist(),
        proximal=proximal.tolist(),
        reference=(current + normal(0.5).clamp(-2, 2)).tolist(),
        values=normal(1.0).tolist(),
        advantages=(sign * (0.1 + torch.rand(rows, 1, dtype=torch.float64))).expand(rows, width).tolist(),
    )
    return Problem(batch, current)


@pytest.fixture(params=range(4), ids=lambda seed: f"seed{seed}")
def problem(request: pytest.FixtureRequest) -> Problem:
    """Return one of four random steps."""
    return draw(request.param)


@pytest.fixture
def drawn() -> Callable[..., Problem]:
    """Return `draw`, for tests that need another shape."""
    return draw


@pytest.fixture
def compose() -> Callable[..., Algorithm]:
    """Return how to build an algorithm of pieces that are given, for the rest GRPO's."""

    def make(**pieces: Any) -> Algorithm:
        return replace(GRPO, name="composed", **pieces)

    return make


@pytest.fixture
def same() -> Callable[..., None]:
    """Return how two results are compared: loss and gradient, or two tensors, to 1e-7 unless said otherwise.

    Everything is float64, but verl adds 1e-8 to some of its denominators, so that nothing tighter holds.
    """

    def compare(ours: Any, theirs: Any, tolerance: float = 1e-7) -> None:
        pairs = zip(ours, theirs, strict=True) if isinstance(ours, tuple) else [(ours, theirs)]
        for mine, other in pairs:
            left, right = (torch.as_tensor(x, dtype=torch.float64) for x in (mine, other))
            torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)

    return compare


@dataclass(frozen=True)
class Verl:
    """verl's functions, and a policy loss of it as loss and gradient."""

    core: Any
    corrections: Any
    actor: Any

    def config(self, **settings: Any) -> Any:
        """Return an actor's configuration."""
        return self.actor(strategy="fsdp", rollout_n=4, ppo_micro_batch_size_per_gpu=1, **settings)

    def loss(
        self,
        name: str,
        problem: Problem,
        mode: str = "token-mean",
        weights: Tensor | None = None,
        mask: Tensor | None = None,
        **settings: Any,
    ) -> tuple[float, Tensor, dict[str, float]]:
        """Return loss, d loss / d log-probabilities and metrics of a registered policy loss."""
        leaf, batch = problem.current.clone().requires_grad_(), problem.batch
        function = self.core.get_policy_loss_fn(name)
        total, metrics = function(
            old_log_prob=batch.proximal,
            log_prob=leaf,
            advantages=batch.advantages,
            response_mask=(batch.mask if mask is None else mask).double(),
            loss_agg_mode=mode,
            config=self.config(**settings),
            rollout_is_weights=weights,
        )
        (gradient,) = torch.autograd.grad(total, leaf)
        return float(total.detach()), gradient, metrics

    def rewards(self, batch: Batch) -> Tensor:
        """Return the rewards as verl wants them: on each response's last token."""
        last = batch.mask.shape[1] - 1 - batch.mask.int().flip(1).argmax(1)
        placed = torch.zeros_like(batch.behavior)
        placed[torch.arange(len(batch)), last] = batch.rewards
        return placed


@pytest.fixture(scope="session")
def verl() -> Verl:
    """Return verl, imported once."""
    from verl.trainer.ppo import core_algos, rollout_corr_helper
    from verl.workers.config import ActorConfig

    return Verl(core_algos, rollout_corr_helper, ActorConfig)


@dataclass
class Trl:
    """A real trainer of TRL on a tiny random model, whose log-probabilities are given and whose loss is asked for."""

    trainer: Any
    metrics: dict[str, list[float]] = field(default_factory=dict)

    def step(self, problem: Problem, **more: Any) -> dict[str, Any]:
        """Return a step as the trainer stores it between generation and loss."""
        batch = problem.batch
        mask = batch.mask.long()
        given = {
            "prompt_ids": torch.ones(len(batch), 1, dtype=torch.long),
            "prompt_mask": torch.ones(len(batch), 1, dtype=torch.long),
            "completion_ids": torch.ones_like(mask),
            "completion_mask": torch.ones_like(mask),
            "tool_mask": mask,
            "advantages": batch.advantages[:, 0],
            "num_items_in_batch": mask.sum(),
            "old_per_token_logps": batch.proximal,
            "ref_per_token_logps": batch.reference,
        }
        return given | more

    def loss(self, problem: Problem, **more: Any) -> tuple[float, Tensor]:
        """Return the trainer's loss and d loss / d log-probabilities."""
        leaf = problem.current.clone().requires_grad_()
        self.trainer._get_per_token_logps_and_entropies = lambda *_, **__: (leaf, -leaf / 2, None)
        self.trainer.current_gradient_accumulation_steps = self.trainer.args.gradient_accumulation_steps
        total = self.trainer._compute_loss(self.trainer.model, self.step(problem, **more))
        (gradient,) = torch.autograd.grad(total, leaf)
        return float(total.detach()), gradient

    def scored(self, problem: Problem, rewards: Tensor | None = None) -> dict[str, Any]:
        """Return what the trainer makes of these responses before the loss: advantages, weights.

        Args:
            rewards (Float[B C]): Each reward by itself; None for the batch's.
        """
        batch = problem.batch
        rows, mask = len(batch), batch.mask
        spans = [int(mask[i].nonzero().max()) + 1 for i in range(rows)]
        responses = [[2] * span for span in spans]
        tools = [mask[i, :span].long().tolist() for i, span in enumerate(spans)]
        behavior = [batch.behavior[i, :span].tolist() for i, span in enumerate(spans)]
        prompts = [[2]] * rows
        generated: tuple[Any, ...] = (prompts, responses, tools, ["w2"] * rows, behavior, {}, None, None)
        if "RLOO" in type(self.trainer).__name__:
            generated = (prompts, responses, ["w2"] * rows)
        self.trainer._generate = lambda prompts: generated
        policies = iter([batch.proximal, batch.reference])
        self.trainer._get_per_token_logps_and_entropies = lambda *_, **__: (next(policies), None, None)
        whole = torch.where(batch.is_graded, batch.rewards, torch.nan)[:, None]
        rewards = whole if rewards is None else rewards
        self.trainer._calculate_rewards = lambda *_: rewards
        return self.trainer._generate_and_score_completions([{"prompt": "w2"}] * rows)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a random model of 32 words, on disk because a trainer loads its reference itself."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, 32)}}
    plain = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(vocab_size=32, pad_token_id=0, eos_token_id=1, bos_token_id=1, **shape)
    ).save_pretrained(folder)
    return folder


@pytest.fixture
def trl(tmp_path: Path, tiny_model: Path) -> Callable[..., Trl]:
    """Return how to make a trainer of TRL: its class (its configuration is named alike), its reward and settings."""

    def make(trainer: str = "trl.GRPOTrainer", reward: Any = None, **settings: Any) -> Trl:
        from datasets import Dataset

        module, _, name = trainer.rpartition(".")
        room = importlib.import_module(module)
        grouped = {} if name == "A2POTrainer" else {"num_generations": 4, "max_completion_length": 12}
        defaults = grouped | {
            "output_dir": str(tmp_path),
            "use_cpu": True,
            "bf16": False,
            "report_to": [],
            "disable_tqdm": True,
            "per_device_train_batch_size": 16,
        }
        made = getattr(room, name)(
            model=str(tiny_model),
            reward_funcs=reward or (lambda completions, **_: [0.0] * len(completions)),
            train_dataset=Dataset.from_dict({"prompt": [f"w{2 + i}" for i in range(16)]}),
            args=getattr(room, name.replace("Trainer", "Config"))(**defaults | settings),
        )
        made.model.train()
        return Trl(made)

    return make

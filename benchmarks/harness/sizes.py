"""How large the cases are: the fixed work, and a small form of it for tests and a first look."""

from dataclasses import dataclass

from gnomon.core.errors import ConfigError, unknown


@dataclass(frozen=True)
class Size:
    """One size of all cases.

    experiment, overrides: the fixed work (case "c1") as `gnomon train` takes it. prompts, generations, budget: a step's
    prompts, answers to each, tokens of an answer at most. answer: tokens of an answer on average, where answers are
    made up (case "update"). prompt: tokens of a made-up prompt; shared_prompt: of a long one, which a group shares.
    layers, width: of the small model whose costs are watched as one number grows; then the numbers: rows of a batch,
    answer lengths, group sizes, vocabularies, prompts that the value tracker knows. beginning: tokens that all prompts
    of the case "learning" begin with; long_answer, long_prompt: tokens of its long rows. presets: beside which GRPO is
    measured; () for all.
    """

    name: str
    experiment: str
    overrides: tuple[str, ...]
    prompts: int
    generations: int
    budget: int
    answer: int
    prompt: int
    shared_prompt: int
    layers: int
    width: int
    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    groups: tuple[int, ...]
    vocabularies: tuple[int, ...]
    tracked: tuple[int, ...]
    vocabulary: int = 512
    repeats: int = 5
    beginning: int = 6
    long_answer: int = 24
    long_prompt: int = 64
    presets: tuple[str, ...] = ()


STANDARD = Size(
    name="standard",
    experiment="quickstart",
    overrides=(
        "device=cpu",
        'task.parameters.operators=["+"]',
        "held_out.size=20",
        "rollouts_per_step=64",
        "sampling.max_completion_length=64",
        "learner.optimizer.learning_rate=1e-5",
        "learner.optimizer.warmup_steps=0",
        "evaluation.before=false",
        "checkpoints.every=0",
    ),
    prompts=8,
    generations=8,
    budget=64,
    answer=30,
    prompt=50,
    shared_prompt=512,
    layers=4,
    width=256,
    rows=(16, 64, 256, 1024),
    lengths=(128, 512, 2048, 8192),
    groups=(2, 8, 32, 128),
    vocabularies=(1024, 8192, 65_536, 262_144),
    tracked=(10_000, 1_000_000, 10_000_000),
    vocabulary=4096,
    beginning=26,
    long_answer=1024,
    long_prompt=2048,
)
QUICK = Size(
    name="quick",
    experiment="tiny",
    overrides=(
        "device=cpu",
        "rollouts_per_step=16",
        "algorithm.num_generations=4",
        "task.size=60",
        "sampling.max_completion_length=8",
        "evaluation.before=false",
        "checkpoints.every=0",
    ),
    prompts=4,
    generations=4,
    budget=8,
    answer=5,
    prompt=12,
    shared_prompt=48,
    layers=2,
    width=64,
    rows=(4, 16),
    lengths=(16, 64),
    groups=(2, 4),
    vocabularies=(512, 4096),
    tracked=(1_000, 20_000),
    presets=("grpo", "spo", "ppo", "vapo-review", "opd", "sdft", "luffy", "pass-at-k", "dpo", "kto", "reward-model"),
    repeats=2,
)
SIZES = {size.name: size for size in (STANDARD, QUICK)}


def size_of(name: str) -> Size:
    """Return the size of that name. Raises: ConfigError for another."""
    if name not in SIZES:
        raise ConfigError(unknown("size", name, SIZES))
    return SIZES[name]

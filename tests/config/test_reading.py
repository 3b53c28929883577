"""Names are checked before torch is imported, and no right one is refused."""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.random_model import RANDOM

from gnomon.algorithms import NAMED
from gnomon.config.experiment import load, settings_of, to_toml
from gnomon.config.name_checks import check_cuda
from gnomon.config.reading import built_in, check_names
from gnomon.config.reference import as_names, settings
from gnomon.core.combinations import SettingsByKey, check_drawing, check_engines, check_learner
from gnomon.core.errors import ConfigError, UserError
from gnomon.training.eval_spec import EvalSpec

NAMES = Path(__file__).parents[2] / "src" / "gnomon" / "config" / "known_names.json"
PROGRAM = """
import sys
from gnomon.cli.main import main
code = main(sys.argv[1:])
print(code, *sorted({"torch", "transformers", "numpy"} & set(sys.modules)), file=sys.stdout)
"""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "quickstrat"], "did you mean 'quickstart'"),
        (["train", "tiny", "algorithm=grop"], "did you mean 'grpo'"),
        (["train", "steps=3", "tiny"], "'steps=3' is a setting, and an experiment comes first"),
        (["plan", "tiny", "--stpes", "3"], "did you mean 'steps'"),
        (["plan", "tiny", "learner.optimiser.learning_rate=1"], "did you mean 'optimizer'"),
        (["train", "tiny", "task=arithmetik"], "did you mean 'arithmetic'"),
        (["train", "tiny", "algorithm.aggregate=TokenMeen"], "did you mean 'TokenMean'"),
        (["train", "tiny", "rewards=gone_module:score"], "there is no module gone_module"),
        (["train", "tiny", "rewards=__main__:score"], "there is no module __main__"),
        (["evaluate", "tini", "--task", "arithmetic"], "did you mean 'tiny'"),
        (["train", "tiny", 'rewards=["numerik"]'], "did you mean 'numeric'"),
        (["train", "tiny", "rewards=numerik"], "did you mean 'numeric'"),
        (["train", "tiny", "task=gone.csv"], "gone.csv does not exist; nothing there is like it"),
        (["train", "tiny", "task={kind='table', path='gone/x.jsonl'}"], "nor does its folder gone"),
        (["evaluate", "gone", "--task", "gone.csv"], "gone.csv does not exist"),
        (["train", "tiny", "evaluation.task=gone.csv"], "gone.csv does not exist"),
        (["train", "tiny", "environment=gone.py:Own"], "environment = 'gone.py:Own': gone.py does not exist"),
        (["train", "tiny", "algorithm=gone.py:OWN", "engine=vlm"], "engine.kind = 'vlm': should be"),
        (["train", "tiny", "algorithm=gone.py:OWN", "engine=vlm"], "algorithm = 'gone.py:OWN': gone.py does not"),
        (["train", "tiny", "records.sinks=wandbb"], "records.sinks[0] = 'wandbb': should be 'tensorboard'"),
        (["plan", "tiny", "--hardware", "h1000"], "did you mean 'h100'"),
        (["train", "tiny", "learner.processes=2", "lora.base=nf4"], "lies whole in the learner's one process"),
        (["train", "tiny", "learner.offload=true", "device=cpu"], "this run computes on the CPU"),
        (["train", "tiny", "rollouts_per_step=30"], "is not a multiple of the 8 rollouts that grpo asks"),
        (["train", "tiny", "rollouts_per_step=1", "algorithm=flash-reinforce"], "the advantage would always be 0; set"),
        (["sft", "tiny", "max_staleness=2"], "supervised fine-tuning generates nothing that could be old"),
        (["train", "tiny", "engine.draws=vllm"], 'set engine.kind = "vllm", or leave it out'),
        (["train", "tiny", "doctor.rules=-all-rigth"], "did you mean 'all-right'?"),
        (["train", "tiny", "engine=vlm"], "should be 'local', 'vllm', or an engine of your own"),
        (["train", "tiny", "model=./gone"], "model folder './gone' does not exist"),
        (["train", "tiny", "fp16=true"], "names of another library"),
        (["compare", "tiny", "--algorithms", "grpo,grop", "--steps", "1"], "did you mean 'grpo'"),
        (["train", "tiny", "model="], "neither a folder, nor the name of a model"),
        (["plan", "tiny", "model=https://hub/org/name"], "neither a folder, nor the name of a model"),
        (["no-such-verb"], "unknown verb"),
        (["eval", "tiny"], "Did you mean: gnomon evaluate?"),
        (["report", "gone"], "there is no run gone"),
        (["report", "x" * 3000], "there is no run xxx"),
        (["resume", "x" * 3000], "there is no run xxx"),
        (["doctor", "runs/gone"], "there is no run runs/gone"),
        (["resume", "gone"], "there is no run gone"),
        (["export", "gone", "there"], "there is no run gone"),
        (["watch", "gone", "--once"], "there is no run gone"),
        (["evaluate", "runs/gone"], "there is no folder runs/gone"),
        (["rewards", "numerik"], "did you mean 'numeric'"),
        (["algorithms", "grop"], "did you mean 'grpo'"),
        (["algorithms", "Clp", "--latex"], "did you mean 'Clip'"),
        (["train", "tiny", "steps=-1"], "steps must be at least 0, got -1"),
        (["plan", "tiny", "evaluation.samples=-2"], "evaluation.samples must be at least 0, got -2"),
        (["train", "tiny", "rollouts_per_step=10000000"], "is more than 1000000, the most that can be meant here"),
        (["config", "learning_rat"], "did you mean 'learning_rate'"),
        (["config", "fp16"], "is another library's name"),
        (["tasks", "arithmetik"], "did you mean 'arithmetic'"),
        (["evaluate", "runs/gone", "steps=3"], "steps = 3 is of training, and changes nothing in an evaluation"),
        (
            ["train", "tiny", "model=tiny-moe", "lora.targets=up_proj"],
            "unknown module 'up_proj'; did you mean 'v_proj'",
        ),
        (["train", "tiny", "lora.targets=foo"], "lora.targets: unknown module 'foo'. Known: down_proj, gate_proj"),
        (
            ["train", "tiny", "report_to=trackio"],
            "1 package is not installed: trackio (records.sinks = trackio); run: pip install trackio",
        ),
        (
            ["train", "tiny", "rewards=rewards.py:score"],
            "reward 'rewards.py:score' (a, b='3 * 4', c=2): unknown param",
        ),
        (
            ["train", "own/run"],
            "It is a run: gnomon resume own/run goes on with it, gnomon train own/run/experiment.toml",
        ),
        (["train", "my.yaml"], "my.yaml does not exist"),
        (["train", "bare.toml"], 'missing algorithm; write algorithm = "grpo"'),
        (["train", "list.toml"], "rewards is a list: write [[rewards]] in a file"),
        (["train", "tiny", "rewards=os:nosuch"], "rewards = 'os:nosuch': unknown name 'nosuch'"),
        (["dissect", "gone.json", "--algorithms", "grpo"], "gone.json does not exist"),
        (["dissect", "gone.json", "--algorithms", "grop"], "did you mean 'grpo'"),
        (["reproduce", "clip_highr"], "did you mean 'clip_higher'"),
        (["train", "tiny", "num_generations=1"], "GroupRelative) compares responses to the same prompt and needs 2"),
        (["train", "bare.toml", "algorithm=grpo", "task=own/rows.jsonl"], "the task 'rows' has no reward of its own"),
        (["train", "tiny", "task=own/empty.jsonl", "rewards=exact"], "own/empty.jsonl is empty: it has 0 bytes"),
        (["train", "tiny", "task=own/rows.jsonl", "rewards=exact"], "own/rows.jsonl:1: answer: missing; the row has"),
        (["plan", "tiny", "evaluation.task=own/rows.jsonl"], "1 of 1 rows of own/rows.jsonl cannot be used"),
        (["train", "own/dpo.toml", "task=own/rows.jsonl"], "own/rows.jsonl:1: rejected: missing; the row has"),
        (["train", "tiny", "--run-dir", "own/files"], "own/files holds files already"),
        (["train", "tiny", "--run-dir", "own/run", "steps=5"], "another experiment (steps is 9 there and 5 here)"),
        (["train", "tiny", "task=[]"], "task = []: name a task or a file, or give a table with a kind"),
        (["train", "tiny", "evaluation.task=3"], "evaluation.task = 3: name a task or a file, or give a table"),
        (["train", "tiny", "rewards=[1]"], "rewards = [1]: give a kind, path.py:function or a table, not 1"),
        (["train", "tiny", "evaluation.tasks=[1]"], "evaluation.tasks = [1]: give a task or a table, not 1"),
        (["train", "tiny", "task=aime-24"], "'aime-24' is a test set: it is evaluated on and never trained on"),
        (["sft", "tiny", "algorithm=grpo"], "trains on the dataset's answers, and algorithm = 'grpo' does not"),
        (["reward-model", "tiny", "algorithm=sft"], "ranks pairs of the dataset's answers, and algorithm = 'sft' does"),
        (["train", "tiny", "algorithm=[3]"], "algorithm = [3]: should be a table"),
        (["train", "tiny", "algorithm.advantage=3"], "algorithm.advantage = 3: should be a piece, such as Accepted"),
        (["train", "tiny", "chat_template_kwargs=3"], "chat_template_kwargs = 3: should be a table, such as {name"),
        (["train", "tiny", "template_date=foo"], "template_date must be a day as YYYY-MM-DD"),
        (["train", "tiny", "evaluation.sampling.grammar.schema=gone.json"], "schema = 'gone.json' cannot be read"),
        (["train", "tiny", "lora.targets=[3]"], 'lora.targets = [3]: should be a list, such as ["a", "b"] or'),
        (["train", "tiny", "doctor.rules={a=1}"], "doctor.rules = {'a': 1}: should be a list, such as [{...}"),
        (["train", "tiny", "evaluation.tasks.name=a"], "evaluation.tasks = {'name': 'a'}: should be a list"),
        (["continue", "own/run"], "own/run is continued with something changed, such as more steps in all"),
    ],
)
def test_a_wrong_name_is_refused_without_torch(arguments: list[str], said: str, tmp_path: Path):
    """Exit code 2 and the nearest name, and neither torch, transformers nor numpy was imported."""
    (tmp_path / "own" / "run").mkdir(parents=True)
    (tmp_path / "own" / "run" / "experiment.toml").write_text("steps = 9\n")
    (tmp_path / "own" / "empty.jsonl").write_text("")
    (tmp_path / "own" / "rows.jsonl").write_text('{"prompt": "2+2=", "chosen": "4"}\n')
    (tmp_path / "own" / "files").mkdir()
    (tmp_path / "own" / "files" / "notes.txt").write_text("")
    (tmp_path / "own" / "dpo.toml").write_text('model = "tiny"\nalgorithm = "dpo"\n')
    (tmp_path / "bare.toml").write_text('model = "tiny"\ntask = "arithmetic"\n')
    (tmp_path / "list.toml").write_text('model = "tiny"\nalgorithm = "grpo"\n[rewards]\nkind = "exact"\n')
    (tmp_path / "rewards.py").write_text("import torch\n\n\ndef score(a: str, b=3 * 4, *, c: int = 2): ...\n")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, cwd=tmp_path, check=True
    )

    assert said in done.stderr
    assert done.stdout.split() == ["2"]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model=folder", "model folder 'folder' has no config.json; it holds: nothing"),
        ("model=own.py", "model 'own.py' is a file; give the folder"),
        (
            "model=org/gone",
            "'org/gone'. Known: smollm2-135m-instruct, tiny, tiny-moe, tiny-sums; it is not a local folder",
        ),
        ("task=folder", "task 'folder' is a folder; give the file of questions in it"),
        ("rewards=own.py:scor", "rewards = 'own.py:scor': unknown name 'scor'; did you mean 'score'?"),
        ("algorithm=own.py:OWNN", "algorithm = 'own.py:OWNN': unknown name 'OWNN'; did you mean 'OWN'?"),
        ("algorithm=own.py:later", ""),
        ("rewards=own.py:swapped", "reward 'own.py:swapped' (completions, completion): has both completions and"),
        ('rewards=[{kind="function", function="own.py:swapped"}]', "reward 'own.py:swapped' (completions, completion)"),
        ("rewards=own.py:wrapped", ""),
        ("algorithm.aggregate=TokenMeen", "algorithm.aggregate: unknown piece 'TokenMeen'; did you mean 'TokenMean'?"),
        ("algorithm.sampler={piece='Gresso'}", "algorithm.sampler: unknown piece 'Gresso'; did you mean 'Greso'?"),
        ("algorithm.regularizers=[{piece='Kll'}]", "regularizers: unknown piece 'Kll'; did you mean 'Kl'?"),
        ("algorithm.correction=Truncated", ""),
        ("algorithm.correction=none", ""),
        ("algorithm=gone_module:OWN", "algorithm = 'gone_module:OWN': there is no module gone_module; write path.py"),
        ("rewards=own:score", "rewards = 'own:score': there is no module own; write own.py:score"),
        ("rewards=fractions:Fractionn", "rewards = 'fractions:Fractionn': unknown name 'Fractionn'; did you mean"),
        ("engine=gone_module:Engine", "engine = 'gone_module:Engine': there is no module gone_module"),
        ("environment=gone_module:Env", "environment = 'gone_module:Env': there is no module gone_module"),
        ("algorithm=opd algorithm.reference.model=org/gone", "unknown model 'org/gone'"),
        ("task.kind=reasoning_gym task.generator=chain_summ", "unknown task 'chain_summ'; did you mean 'chain_sum'?"),
        (
            "learner.optimizer=adam",
            "learner.optimizer = adam: a section has settings of its own; set learner.optimizer.",
        ),
        ("device=gpu", "device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got 'gpu'; did you mean 'cuda'?"),
        ("packages=['numpi']", "unknown package 'numpi'; did you mean 'numpy'?"),
        ("continue_from=runs/gone", "there is no run runs/gone"),
        ("rollouts_from=runs/gone", "there is no run runs/gone"),
        ("lora.adapter=gone", "lora.adapter = 'gone' is no folder"),
        ("reward_funcs=accuracy_reward", "TRL's accuracy_reward is 'mathematics' here"),
        ("generation_kwargs.top_p=0.9", "generation_kwargs is another library's name; here: sampling.temperature"),
        ("model.path=tiny", ""),
        ("rewards=exact,format", """several are a list: 'rewards=["exact", "format"]'"""),
        ("report_to=wandb,mlflow", """several are a list: 'records.sinks=["wandb", "mlflow"]'"""),
        ('task={kind="mixture", parts=["own.csv", {task="arithmetik", weight=2}]}', "own.csv does not exist"),
        ('task.parts=["arithmetic", {task="arithmetik"}]', "unknown task 'arithmetik'; did you mean 'arithmetic'?"),
        ('task={parts=["arithmetic", {task="arithmetic", weight=2}]}', ""),
        ("algorithm=grpo,spo", "Several are compared: gnomon compare EXPERIMENT --algorithms grpo,spo"),
    ],
)
def test_what_is_not_where_a_setting_says_is_refused_by_the_names(
    override: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Models, questions and the user's own files are looked at before anything of them is run."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)

    overrides = override.split(" ") if override.count("=") > 1 and override[-1] not in "]}" else [override]
    assert said in refused(check_names, "tiny", overrides)
    assert bool(said) == bool(refused(check_names, "tiny", overrides))


def test_a_run_that_cannot_be_made_is_told_with_what_else_is_wrong(tmp_path: Path):
    """A file where a folder is needed, and a wrong name, in one message."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"unknown task 'arithmetik'.*; .*file is no folder; choose a directory"):
        check_names("tiny", ["task=arithmetik"], run_dir=tmp_path / "file" / "run")


OWN = """
def score(completion):
    return 1.0

async def swapped(completions, completion):
    return 1.0

@made_anew
def wrapped(a, b):
    return 1.0

OWN = 1
if OWN:
    later = 1
"""
WRONG = [
    (["steps=many"], "steps = 'many': should be a whole number"),
    (["steps=3.5"], "steps = 3.5: should be a whole number"),
    (["seed=true"], "seed = True: should be a whole number"),
    (["name=3"], "name = 3: should be text"),
    (["trust_remote_code=1"], "trust_remote_code = 1: should be true or false"),
    (["learner.optimizer.learning_rate=fast"], "learning_rate = 'fast': should be a number"),
    (["learner.precision=fp8"], "learner.precision = 'fp8': should be 'auto', 'fp32' or 'bf16'"),
    (["max_staleness=some"], "max_staleness = 'some': should be a whole number or 'measured'"),
    (["task.sizee=3"], "task: unknown key 'sizee'; did you mean 'size'?"),
    (["algorithm.num_generations=eight"], "algorithm.num_generations = 'eight': should be a whole number"),
    (["algorithm.updates.minibatches=two"], "algorithm.updates.minibatches = 'two': should be a whole number"),
    (["algorithm.scope=3"], "algorithm.scope = 3: should be 'step', 'micro_batch' or 'lagged'"),
    (["algorithm.surrogate.dual=wide"], "algorithm.surrogate.dual = 'wide': should be a number or 'none'"),
    (["algorithm.aggregate.length=wide"], "algorithm.aggregate.length = 'wide': should be a"),
    (["held_out=0.5"], "held_out = 0.5: a section has settings of its own; set held_out.fraction = ..."),
    (["lora=true"], "lora = true: a section has settings of its own; set lora."),
    (["environment=cards"], "environment = 'cards': name a class of your own as 'path.py:Class'"),
    (["rewards=own.py"], "rewards[0] = 'own.py': name the function in that file too, as own.py:FUNCTION"),
    (["task.size=big"], "task.size = 'big': should be a whole number"),
    (['task={kind="arithmetic", sise=3}'], "task: unknown key 'sise'; did you mean 'size'?"),
    (["rewards=[{kind='numeric', wieght=2.0}]"], "rewards.0: unknown key 'wieght'; did you mean 'weight'?"),
    (["rewards=[{kind='numeric', weight='2'}]"], "rewards.0.weight = '2': should be a number"),
    (["rewards=[{kind='numeric', which='largest'}]"], "should be 'last', 'first' or 'only'"),
    (["environment.max_turn=3"], "environment: unknown key 'max_turn'; did you mean 'max_turns'?"),
    (["evaluation.sampel=3"], "evaluation: unknown key 'sampel'; did you mean 'samples'?"),
    (
        ["evaluation.sampling.temprature=0"],
        "evaluation.sampling: unknown key 'temprature'; did you mean 'temperature'?",
    ),
    (["evaluation.task.sizee=3"], "evaluation.task: unknown key 'sizee'; did you mean 'size'?"),
    (["evaluation.tasks=[{task='gsm8k', sizes=3}]"], "unknown key 'sizes'; did you mean 'size'?"),
    (["algorithm.surogate.trust.high=0.3"], "algorithm: unknown key 'surogate'; did you mean 'surrogate'?"),
    (["algorithm.surrogate.trsut.high=0.3"], "algorithm.surrogate: unknown key 'trsut'; did you mean 'trust'?"),
    (["algorithm.surrogate.trust.hihg=0.3"], "algorithm.surrogate.trust: unknown key 'hihg'; did you mean 'high'?"),
    (
        ["algorithm.regularizers=[{piece='Kl', coeficient=0.1}]"],
        "unknown key 'coeficient'; did you mean 'coefficient'?",
    ),
]


@pytest.mark.parametrize(("overrides", "said"), WRONG, ids=lambda each: each[0])
def test_a_wrong_setting_is_refused_by_the_names_alone(overrides: list[str], said: str):
    """Keys below kinds and pieces, and values of another type; whoever builds the experiment refuses them too."""
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_names("tiny", overrides)
    with pytest.raises(ConfigError):
        load("tiny", overrides)


_OWN, _SERVER = {"use": "os:getcwd"}, {"kind": "agent", "server": "http://127.0.0.1:9/run"}
_POLICY = {"kind": "judge", "url": "policy", "criteria": ["a"]}
_JUDGE = {**_POLICY, "url": "http://127.0.0.1:9/v1", "judge": "m"}
UNREAD: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ("reference", {}, {"decay": 0.9}, {"model": "average"}),
    ("reference", {}, {"precision": "bf16"}, {"model": "a/b"}),
    ("reference", {}, {"trust_remote_code": True}, {"tasks": [{"task": "a", "model": "a/b"}]}),
    ("reference", {}, {"success": 0.5}, {"model": "average", "prompt": "{question} {sibling}"}),
    ("environment", _OWN, {"on_error": "reply"}, {"kind": "trl"}),
    ("environment", _OWN, {"max_calls": 2}, {"kind": "agent"}),
    ("environment", _OWN, {"max_prompt_tokens": 9}, {"kind": "agent"}),
    ("environment", {"kind": "tools", "tools": ["os:getcwd"]}, {"sandbox": "none"}, {"tools": ["python"]}),
    ("environment", {"kind": "tools", "tools": ["os:getcwd"]}, {"settings": {"a": 1}}, {"kind": "trl", **_OWN}),
    ("environment", _SERVER, {"memory_gib": 1.0}, {"server": "", **_OWN}),
    ("environment", _SERVER, {"variables": ["A"]}, {"server": "", **_OWN}),
    ("environment", _SERVER, {"max_concurrent": 2}, {"server": "", "command": ["a"]}),
    ("rewards", _POLICY, {"judge": "m"}, {"url": "http://127.0.0.1:9/v1"}),
    ("rewards", _POLICY, {"variable": "A"}, _JUDGE),
    ("rewards", _POLICY, {"timeout_seconds": 5.0}, _JUDGE),
    ("rewards", _POLICY, {"attempts": 2}, _JUDGE),
    ("rewards", {**_JUDGE, "attempts": 1}, {"pause_seconds": 2.0}, {"attempts": 2}),
    ("rewards", _JUDGE, {"max_disagreement": 0.2}, {"votes": 2}),
    ("rewards", _JUDGE, {"criterion_weights": [2.0]}, {"criteria": ["a", "b"], "criterion_weights": [2.0, 1.0]}),
]


@pytest.mark.parametrize(("place", "given", "unread", "needed"), UNREAD, ids=lambda each: str(each)[:20])
def test_what_nothing_would_read_is_refused(
    place: str, given: dict[str, Any], unread: dict[str, Any], needed: dict[str, Any]
):
    """By the names, without torch, as by the experiment, which says what to set for it; with that it is taken."""
    base = {"model": "tiny", "task": "arithmetic", "algorithm": {"preset": "rloo"}, "rewards": ["numeric"]}

    def said(table: dict[str, Any]) -> tuple[str, str]:
        placed = {place: [table] if place == "rewards" else table}
        source = {**base, **({"algorithm": {"preset": "rloo", **placed}} if place == "reference" else placed)}
        return refused(partial(check_names, is_here=False), source, ()), refused(load, source, ())

    [name] = unread
    for each in said({**given, **unread}):
        assert re.search(rf"{name} = .* is read only with .*; set that, or leave {name} out", each), each
    assert said({**given, **unread, **needed}) == ("", "")


BOUNDS = """
import json, sys
from gnomon.config.name_checks import known_names
from gnomon.config.reading import check_names, parse_override
from gnomon.core.errors import ConfigError, holds

passed, tried = [], 0
for key, kinds in known_names()["bounds"].items():
    for kind in kinds:
        bounds = {kinds[kind]} if kind and not key.startswith("algorithm.") else {*kinds.values()}
        at = key.replace(".N", ".0").rpartition(".")[0]
        of_kind = [f"{at}.kind={kind}"] if kind and not key.startswith("algorithm.") else []
        for value in ("-1", "-1e9", "nan", "-inf", "0", "2", "64", "1e300", "[0.9, 7.0]"):
            if any(not bound or holds(bound, parse_override(f"x={value}")[1]) for bound in bounds):
                continue
            tried += 1
            try:
                check_names({}, [*of_kind, f"{key.replace('.N', '.0')}={value}"])
                passed.append(f"{key} {kind} = {value}")
            except ConfigError:
                pass
print(json.dumps([tried, passed, sorted({"torch", "transformers", "numpy"} & set(sys.modules))]))
"""


def test_every_number_out_of_its_bounds_is_refused_without_torch():
    """All settings with a bound, each with every number of a list that is beyond it: over 500, and no torch."""
    done = subprocess.run([sys.executable, "-c", BOUNDS], capture_output=True, text=True, check=True)
    tried, passed, imported = json.loads(done.stdout)

    assert tried > 500
    assert passed == []
    assert imported == []


def test_every_number_that_an_experiment_refuses_is_refused_by_the_names():
    """What building the experiment says of one number alone, the check without torch says before."""
    missed = []
    for setting in settings():
        if not {"int", "float"} & set(setting.type.split(" | ")) or setting.kind or ".N." in setting.key:
            continue
        for value in ("-1", "nan"):
            try:
                load("tiny", [f"{setting.key}={value}"])
            except ConfigError as error:
                if " must be " not in str(error):
                    continue
                try:
                    check_names("tiny", [f"{setting.key}={value}"])
                    missed.append(f"{setting.key}={value}: {error}")
                except ConfigError:
                    pass

    assert missed == []


def test_no_setting_takes_more_than_any_clock_or_memory_has():
    """Seconds, GiB and prices of 1e300: some became a traceback where they are multiplied or waited for."""
    passed = []
    for setting in settings():
        if "float" not in setting.type.split(" | ") or setting.key.startswith("algorithm."):
            continue
        of_kind = [f"{setting.key.rpartition('.')[0].replace('.N', '.0')}.kind={setting.kind}"] if setting.kind else []
        try:
            check_names({"algorithm": "grpo"}, [*of_kind, f"{setting.key.replace('.N', '.0')}=1e300"])
            passed.append(setting.key)
        except ConfigError:
            pass

    assert passed == ["learner.optimizer.max_gradient_norm"]


SWEEP = """
import json, sys
from gnomon.config.experiment import load, to_toml
from gnomon.config.name_checks import known_names
from gnomon.config.reading import check_names
from gnomon.config.reference import settings
from gnomon.core.errors import UserError

tried, late, unforeseen, seen = 0, {}, [], set()
keys = [(s.key, [f"{s.key.rpartition('.')[0]}.kind={s.kind}"] * bool(s.kind)) for s in settings()]
places = known_names()["pieces"].items()
keys += [(f"algorithm.{place}.{name}".replace("..", "."), []) for place, fields in places for name in fields]
for key, of_kind in keys:
    for value in ("foo", "''", "-1", "nan", "1e300", "[3]", "{a=1}", "{}", "true"):
        given = [*of_kind, f"{key}={value}"]
        given = [each.replace(".N", ".0").replace("regularizers.", "regularizers.0.") for each in given]
        if str(given) in seen:
            continue
        seen.add(str(given))
        tried += 1
        try:
            said = ""
            check_names("tiny", given, (), "", False)
            said = "late"
            to_toml(load("tiny", given).experiment)
        except UserError as error:
            late |= {str(given): str(error)} if said else {}
        except Exception as error:
            unforeseen.append(f"{given}: {error!r}")
print(json.dumps([tried, late, unforeseen, sorted({"torch", "transformers"} & set(sys.modules))]))
"""


def test_no_wrong_value_loads_torch():
    """Nine wrong values of every setting and of every field of a piece, over 5,000: the experiment is made without.

    What the check of names leaves to it (a field that the preset's piece lacks, what pieces cannot be together) is
    refused in words, and nothing is a traceback.
    """
    done = subprocess.run([sys.executable, "-c", SWEEP], capture_output=True, text=True, check=True)
    tried, late, unforeseen, imported = json.loads(done.stdout)

    assert tried > 5000
    assert len(late) > 300
    assert any("unknown key" in said for said in late.values())
    assert any("the critic has no reader" in said for said in late.values())
    assert unforeseen == []
    assert imported == []


MADE = [
    (["train", "tiny", "algorithm.surrogate.of.trust=3"], "algorithm.surrogate: unknown key 'of'"),
    (["plan", "tiny", "algorithm.critic.clip=3"], "the critic has no reader"),
    (["plan", "tiny", "--hardware", "h100", "algorithm.critic.clip=3"], "the critic has no reader"),
    (["train", "tiny", "rewards.0.kind=model", "rewards.0.mean=3"], "rewards[0].verifier: missing model"),
    (["train", "tiny", "rewards.0.kind=format", "rewards.0.pattern=[]"], "Format.pattern is no regular expression"),
    (["sft", "tiny", "algorithm.advantage=Gae"], "algorithm 'sft'"),
    (["reward-model", "tiny", "algorithm.advantage=Gae"], "algorithm 'reward-model'"),
    (["continue", "own/run", "algorithm.critic.clip=3"], "the critic has no reader"),
]


@pytest.mark.parametrize(("arguments", "said"), MADE, ids=lambda each: " ".join(each) if isinstance(each, list) else "")
def test_a_wrong_composition_is_refused_without_torch(arguments: list[str], said: str, tmp_path: Path):
    """What is known when the experiment is made, and not by names alone: by every verb that begins or plans a run."""
    (tmp_path / "own" / "run").mkdir(parents=True)
    (tmp_path / "own" / "run" / "experiment.toml").write_text(to_toml(load("tiny").experiment))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, cwd=tmp_path, check=True
    )

    assert said in done.stderr
    assert done.stdout.split() in (["2"], ["2", "numpy"])


@pytest.mark.parametrize("key", ["algorithm=sft", "rollouts_per_step=8", "learner.optimizer.learning_rate=1e-3"])
def test_the_names_of_a_written_experiment_pass(key: str):
    """What a run writes down is read again, whatever its algorithm."""
    check_names(tomllib.loads(to_toml(load("tiny", [key]).experiment)), [])


@pytest.mark.parametrize(
    "overrides",
    [["steps=3"], ["epochs=2"], ["checkpoints.every=1"], ["learner.optimizer.learning_rate=1"], ["save_steps=5"],
     ["evaluation.every=3"], ["model=tiny"], ["stepz=3"], ["sampling.temperature=hot"], ["task.sise=3"]],
)  # fmt: skip
def test_an_evaluation_refuses_what_it_would_not_use(overrides: list[str]):
    """SettingsByKey of training, wrong names and wrong values, in the command and in Python alike."""
    with pytest.raises(ConfigError, match=r"changes nothing|unknown key|first argument|should be a number"):
        EvalSpec(overrides=tuple(overrides))


def test_the_names_are_those_of_the_code():
    """known_names.json is up to date: `gnomon config --names > src/gnomon/config/known_names.json` writes it."""
    assert json.loads(NAMES.read_text()) == json.loads(as_names())


@pytest.mark.parametrize("name", sorted(built_in()))
@pytest.mark.parametrize("preset", [*NAMED, "GRPO", "reinforce++", "A*-PO"])
def test_no_right_name_is_refused(name: str, preset: str):
    """Every recipe with every preset, however it is spelled, passes, or is refused by the experiment too."""
    overrides = [f"algorithm={preset}", "algorithm.num_generations=4"]
    said = refused(check_names, name, overrides, (), "", False)
    assert not said or refused(load, name, overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["engine=vllm", "engine.server=start", "engine.python=python3", "lora.rank=4"],
        ["cluster=ray", "lora.rank=4"],
        ["lora={}", "max_staleness=measured", "chat_template_kwargs.enable_thinking=false"],
        ["task=rows.jsonl", "rewards=['mine.py:f', 'numeric']"],
        ["task=org/name", "task.split=test", "rewards=numeric"],
        ["evaluation.task=AIME_24"],
        ["task.kind=table", "task.path=rows.jsonl", "rewards=exact"],
        ["task={kind='mixture', parts=['arithmetic', {task='rows.jsonl', weight=2.0}]}", "rewards=['numeric']"],
        ["evaluation.task=livecodebench@2024-08-01"],
        ["task=chain_sum", "task.parameters.max_terms=3"],
        ["evaluation.task=gsm8k", "evaluation.sampling.temperature=0.6"],
        ["algorithm=mine.py:ALGORITHM"],
        ["algorithm=mine.py:ALGORITHM", "algorithm.keep.most=3"],
        ["algorithm.keep={piece='mine.py:Keep', most=3}"],
        ["algorithm.surrogate.trust.high=0.3", "n=4", "trainer.save_freq=5"],
        ["records.sinks=['tensorboard']", "learner.optimizer={learning_rate=1e-3}"],
        ['rewards=[{kind="numeric", weight=2.0}]', 'environment={kind="class", use="mine.py:Own"}'],
        ["model=tiny-moe", "held_out.size=0"],
    ],
)
def test_what_may_be_right_passes(overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What is in files, code of the user's, datasets on the hub, pieces and kinds are judged by whoever reads them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "mine.py").write_text("f = ALGORITHM = Keep = Own = None\n")
    check_names("tiny", overrides)


TOGETHER = (
    "learner.processes=2", "lora.base=nf4", "lora={}", "learner.offload=true", "device=cpu", "engine=vllm", "epochs=2",
    "engine.count=3", "engine.count=50", 'engine.server="http://localhost:1"', 'engine.server="start"', "steps=0",
    "engine.sleeps=true", "engine.draws=vllm", "engine.rounding=fp8", "engine.tensor_parallel=2", "max_staleness=2",
    "max_staleness=measured", "staleness.slack=1", "rollouts_per_step=30", "rollouts_per_step=8", "num_generations=3",
    "algorithm=spo", "algorithm=sft", "algorithm=vapo", "algorithm=ppo", "algorithm.updates.minibatches=500",
    "sampling.temperature=0", "sampling.top_p=0.5", "cluster=ray", "cluster.transfer=nccl", "trust_remote_code=true",
    "system=hello", "environment=examples/own_environment.py:Hints", "rollouts_from=runs/first/rollouts",
    "max_length=5", "evaluation.samples=0", "budget.evaluations=2", "algorithm.routing=behavior",
    "algorithm.scope=micro_batch", "learner.temperature=1", "algorithm.demonstrated=true", "algorithm=p3o",
)  # fmt: skip


@pytest.mark.parametrize("part", range(4))
def test_what_cannot_be_meant_together_is_refused_by_the_names_too(
    part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of any two settings that an experiment or a run refuses, the names refuse them, and no others."""
    (tmp_path / "runs" / "first" / "rollouts").mkdir(parents=True)
    (tmp_path / "examples").symlink_to(NAMES.parents[3] / "examples")
    (tmp_path / "vllm.py").touch()  # stands in for an installed package, which is looked for and not imported
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    pairs = [pair for pair in combinations(TOGETHER, 2) if pair[0].partition("=")[0] != pair[1].partition("=")[0]]
    differ = []
    for pair in Random(part).sample(pairs, 60):
        early, late = refused(check_names, "tiny", pair), refused(told_late, pair)
        # What pieces of an algorithm cannot be together is known when they are made.
        if bool(early) != bool(late) and not late.startswith("algorithm: "):
            differ.append((pair, early, late))

    assert differ == []


def refused(check: Callable[..., None], *given: Any) -> str:
    """Return what a check says; "" where it refuses nothing."""
    try:
        check(*given)
    except UserError as error:
        return str(error)
    return ""


def told_late(overrides: Sequence[str]) -> None:
    """Make the experiment, and check what a run on a CPU would."""
    s = settings_of(load("tiny", overrides).experiment)
    for check in (check_drawing, check_engines, check_learner):
        check(SettingsByKey({**s, "device": "cpu"}))


def test_both_checks_say_the_same_of_a_misspelt_key():
    """Whichever is first, the message is the same."""
    said = []
    for check in (check_names, load):
        with pytest.raises(ConfigError) as error:
            check("tiny", ["algorithm=grop"])
        said.append(str(error.value))

    assert said[0] == said[1]


BELOW = {
    "learner.processes": 1, "steps": 0, "grading.workers": 1, "cluster.graders": 1, "engine.count": 1,
    "engine.max_concurrent": 1, "environment.max_concurrent": 1, "rollouts_per_step": 1, "evaluation.samples": 0,
    "checkpoints.keep_last": 1, "sampling.max_completion_length": 1, "engine.tensor_parallel": 1, "max_length": 2,
}  # fmt: skip


@pytest.mark.parametrize(("key", "least"), BELOW.items())
@pytest.mark.parametrize("below", [1, 2, 10**6])
def test_a_number_below_its_bound_is_refused_with_that_bound(key: str, least: int, below: int):
    """However far below it is: a message about another bound would be followed to the next refusal."""
    value = least - below
    with pytest.raises(ConfigError, match=rf"^{re.escape(key)} must be at least {least}\b.*, got {value}$"):
        check_names("tiny", [f"{key}={value}"])


def test_a_gpu_is_refused_by_the_version_of_a_pytorch_for_cpus(monkeypatch: pytest.MonkeyPatch):
    """A version that ends in +cpu cannot compute on a GPU; any other may, and no GPU is asked for by "auto"."""
    monkeypatch.setattr(metadata, "version", lambda name: "2.13.0+cpu")
    check_cuda("auto")
    with pytest.raises(ConfigError, match=r"this PyTorch \(2.13.0\+cpu\) is built without CUDA"):
        check_cuda("cuda:1")
    monkeypatch.setattr(metadata, "version", lambda name: "2.13.0")
    check_cuda("cuda:1")


ODD = ([{}], [[]], {"kind": {}}, {"parts": [[{}]]}, None, [True], "", object)


def loaded(source: str, given: Sequence[tuple[str, Any]]) -> None:
    """Load an experiment with settings that a TOML file or a command can hold."""
    load(source, [f"{key}={json.dumps(value)}" for key, value in given if value is not object])


@pytest.mark.parametrize("read_by", [check_names, loaded])
def test_a_value_of_any_type_is_refused_in_words(read_by: Callable[..., object]):
    """Every setting with lists of tables, tables of lists, bytes and classes: checks read them before their types."""
    raised = []
    for key in sorted({setting.key.partition(".N")[0] for setting in settings()}):
        for value in ODD:
            try:
                read_by("tiny", [(key, value)])
            except UserError:
                pass
            except Exception as error:
                raised.append(f"{key} = {value}: {type(error).__name__}: {error}")

    assert raised == []


@pytest.mark.parametrize("preset", NAMED)
def test_what_a_run_records_can_be_trained_from_again(preset: str, tmp_path: Path):
    """Every piece is named in it; `gnomon continue RUN` and `gnomon train RUN/experiment.toml` read that."""
    recorded = tmp_path / "experiment.toml"
    recorded.write_text(to_toml(load(RANDOM, [f"algorithm={preset}", "rollouts_per_step=16"]).experiment))

    check_names(str(recorded), ["steps=70"])

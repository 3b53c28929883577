"""The page of a run says what its files say, is one sound file, and no text in a run can change what it is."""

import json
import math
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from gnomon.config.experiment import load, to_toml
from gnomon.core.errors import ConfigError, RunDirectoryError
from gnomon.core.types import Grade, Group, Rollout, Task
from gnomon.insight.report.write import LARGEST, leave_page, run_page, write_report
from gnomon.insight.watch.watcher import Watcher
from gnomon.models.tiny import tiny_tokenizer
from gnomon.records.console import Console
from gnomon.records.directory import RunDirectory
from gnomon.records.reading import RunRecord
from gnomon.records.rollouts import RolloutLog
from gnomon.records.run_card import reward_digests
from gnomon.rollouts.collate import collate
from gnomon.training.evaluate import EvalScore, Evaluation

VOID = {"meta", "link", "br", "hr", "img", "input", "wbr"}
HOSTILE = (
    '</script><script>alert(1)</script>"><img src=x onerror=alert(1)>{{ 7*7 }}{% raw %}<!--script--><!--style-->'
    "\x00\x1b[2J\u202etxt\u200b\ud800 ]]></title></pre></details>&lt;\r\n"
)


class Page(HTMLParser):
    """A page as a browser would read it: which elements there are, what is said, what is asked for."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.faults: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        self.faults += [f"<{tag}> is not closed" for tag in self.open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}> closes nothing")

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def said(self) -> str:
        """Return all text, with single blanks."""
        return " ".join("".join(self.texts).split())

    @property
    def addresses(self) -> list[str]:
        """Return every address in an attribute that a browser follows by itself or when it is asked to."""
        names = ("src", "href", "srcset", "action", "data", "poster", "xlink:href")
        return [value for _, attributes in self.tags for name, value in attributes.items() if name in names]


def rollout(text: str, reward: float | None, task: str = "t0", logprob: float = -0.5) -> Rollout:
    """Return an answer in the tiny model's bytes."""
    tokens = tuple(text.encode(errors="replace"))
    numbers = tuple(logprob - 0.01 * n for n in range(len(tokens)))
    grade = Grade(reward, {"exact": reward} if reward is not None else {}, None if reward is not None else "no answer")
    return Rollout(task, (49, 43), tokens, (True,) * len(tokens), numbers, numbers, text, grade, 0, 0, "stop")


def write_step(run: Path, step: int, answers: list[tuple[str, float | None]], task: str, question: str) -> None:
    """Write the rollouts of a step as the journal does, with advantages and proximal log-probabilities."""
    rollouts = tuple(rollout(text, reward, task) for text, reward in answers)
    group = Group(Task(task, (49, 43), question), rollouts)
    batch = collate([group], 1.0)
    rewards = batch.rewards - batch.rewards[batch.is_graded].mean() if bool(batch.is_graded.any()) else batch.rewards
    advantages = torch.where(batch.mask, rewards[:, None], 0.0)
    proximal = batch.behavior + torch.linspace(-0.4, 0.4, batch.width)
    baseline = torch.full((len(batch),), 0.1 * step)
    RolloutLog(run / "rollouts").write(
        step, [group], batch=batch.with_fields(advantages=advantages, proximal=proximal, baseline=baseline)
    )


def make_run(run: Path, steps: int = 6) -> Path:
    """Write a run of a few steps, with all that a run has."""
    run.mkdir(parents=True)
    (run / "experiment.toml").write_text(to_toml(load("tiny", [f"steps={steps}", "algorithm=p3o"]).experiment))
    (run / "run.json").write_text(json.dumps({"reproducibility": "R0 exact", "sandbox": "none", "cpu": "made up"}))
    rows = [
        {
            "step": step, "seconds": 2.0 * step, "rollout/reward_mean": step / 10, "rollout/reward_std": 0.4,
            "tokens/generated": 100, "waste/degenerate_fraction": 0.25, "waste/clipped_fraction": 0.05,
            "tokens/wasted_fraction": 0.3, "time/step_seconds": 1.5, "time/generate_seconds": 1.0,
            "time/update_seconds": 0.25, "loss/entropy_nats": 1.0 / step, "rollout/error_fraction": 0.1,
        }
        for step in range(1, steps + 1)
    ]  # fmt: skip
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    scores = [{"exact": EvalScore(0.1, 0.05, 0.2)}, {"exact": EvalScore(0.6, 0.5, 0.7)}]
    evaluations = [
        Evaluation(step, "sums", 50, 1, score, {"1": 0.1}, {}, 2.0, 0.0, 0, 1.0)
        for step, score in zip((0, steps), scores, strict=True)
    ]
    (run / "evaluations.jsonl").write_text("".join(json.dumps(e.as_row()) + "\n" for e in evaluations))
    for step in range(1, steps + 1):
        answers = [(f"right {step}", 1.0), ("wrong", 0.0), ("broken", None)]
        write_step(run, step, answers, f"t{step % 2}", f"what is {step}?")
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps with a checkpoint's tokenizer."""
    made = make_run(tmp_path_factory.mktemp("reports") / "first")
    tiny_tokenizer().save(made / "checkpoints" / "step-6")
    return made


@pytest.fixture(scope="module")
def page(run: Path) -> Page:
    """Its page."""
    return Page(run_page(RunRecord(run)))


def blocks(page: Page, name: str) -> Iterator[dict[str, str]]:
    """Yield the attributes of the elements of a class."""
    return (attributes for _, attributes in page.tags if name in attributes.get("class", "").split())


def test_every_element_is_closed_and_nothing_is_fetched(run: Path):
    """One file below 2 MB, without an address but its own sections and an empty icon; all that is open is closed."""
    report = write_report([run])
    text = report.path.read_text()
    found = Page(text)

    assert report.path == run / "report.html"
    assert report.size == len(text.encode()) < LARGEST
    assert found.faults == []
    assert {address for address in found.addresses if not address.startswith("#")} == {"data:,"}
    assert "url(" not in text
    assert "@import" not in text


@pytest.mark.parametrize(
    "secret",
    [
        "figcaption",
        "aria-label",
        'class="n"',
        "scope=",
        "http-equiv",
        "histories",
        "<details",
        "data-shelf",
        "viewBox=",
    ],
)
def test_a_secret_that_is_a_mark_destroys_no_page(run: Path, page: Page, secret: str, monkeypatch: pytest.MonkeyPatch):
    """Elements and attributes stay what they are; only what is said can be replaced."""
    monkeypatch.setenv("DB_PASSWORD", secret)
    found = Page(run_page(RunRecord(run)))

    assert found.faults == []
    assert [(tag, list(names)) for tag, names in found.tags] == [(tag, list(names)) for tag, names in page.tags]
    assert [names.get("class") for _, names in found.tags] == [names.get("class") for _, names in page.tags]


@pytest.mark.parametrize("secret", ['pa\'ss "w" <o>&rd1', "held-out prompts", "made up and more"])
def test_a_secret_in_a_text_of_the_page_is_taken_out(tmp_path: Path, secret: str, monkeypatch: pytest.MonkeyPatch):
    """Between marks, with quotes and marks of its own, in what was written before it was a secret."""
    made = make_run(tmp_path / "run")
    (made / "run.json").write_text(json.dumps({"reproducibility": "R0 exact", "cpu": f"cpu {secret}"}))
    assert secret in Page(run_page(RunRecord(made))).said
    monkeypatch.setenv("DB_PASSWORD", secret)
    found = Page(run_page(RunRecord(made)))

    assert secret not in found.said
    assert "[DB_PASSWORD]" in found.said
    assert found.faults == []


def test_links_lead_somewhere(page: Page):
    """Each entry of the contents is the name of a section."""
    names = {attributes["id"] for _, attributes in page.tags if "id" in attributes}

    assert {address[1:] for address in page.addresses if address.startswith("#")} <= names


def test_the_policy_allows_the_page_its_own_script_alone(page: Page):
    """Whatever a text smuggles in, the browser runs nothing but the script whose digest is written at the top."""
    policies = [a["content"] for tag, a in page.tags if tag == "meta" and "Policy" in a.get("http-equiv", "")]

    assert len(policies) == 1
    assert "default-src 'none'" in policies[0]
    assert re.search(r"script-src 'sha256-[A-Za-z0-9+/=]{44}'", policies[0])
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]


def test_it_says_what_became_of_the_run(page: Page):
    """Score before and after with the interval, state, waste, time, machine and differences are words on the page."""
    assert "On 50 held-out prompts, exact went from 0.100 to 0.600: it rose beyond noise." in page.said
    assert "95%: 0.500 to 0.700" in page.said
    assert "6 of 6 steps" in page.said
    assert "R0 exact" in page.said
    assert "It is the preset p3o, unchanged." in page.said


def test_waste_adds_up(page: Page):
    """Of 600 tokens 25% were in degenerate groups and 5% were clipped, so 70% were trained on."""
    assert "trained had a gradient70.0%420 tokens" in page.said
    assert "degenerate" in page.said
    assert "25.0%150 tokens" in page.said
    assert "5.0%30 tokens" in page.said


def test_time_adds_up(page: Page):
    """Of 12 seconds 6 were generation and 1.5 updates; 1.5 of the steps' 9 are in no stage, 3 were between steps."""
    table = page.said.partition("stageshareamount")[2].partition("Waste")[0]
    parts = dict(re.findall(r"(generate|update|other|between steps)[^%]*?([0-9.]+)%", table))

    assert parts == {"generate": "50.0", "update": "12.5", "other": "12.5", "between steps": "25.0"}


def test_rollouts_can_be_read(page: Page):
    """The best, the worst, the surprising and the errors are there, with what each token was given."""
    shelves = [attributes["data-shelf"] for attributes in blocks(page, "shelf")]
    tokens = list(blocks(page, "tokens"))

    assert shelves == ["best", "worst", "surprising", "errors", "course"]
    assert "right 6" in page.said
    assert "no answer" in page.said
    assert tokens
    assert all({"data-surprise", "data-ratio"} <= set(attributes) for attributes in tokens)
    assert {"advantage", "surprise", "ratio", "trust"} == {
        a["value"] for tag, a in page.tags if tag == "input" and a["name"] == "color"
    }


def test_numbers_of_tokens_are_as_many_as_tokens(run: Path):
    """Each list beside a response has one entry a token, or one alone where all are the same."""
    text = run_page(RunRecord(run))
    for start in re.finditer(r'<div class="tokens"([^>]*)>(.*?)</div>', text, re.S):
        count = start[2].count("<i>")
        for name, value in re.findall(r'data-([a-z]+)="([^"]*)"', start[1]):
            listed = list(value) if name == "trust" else value.split(" ")
            assert len(listed) in (1, count), name


def test_prompts_have_a_history(page: Page):
    """Two prompts were asked three times each: there is a map of them, and the tracked values are said to be there."""
    assert "2 prompts were asked, 2 of them more than once" in page.said
    assert "Lines are the tracked value before each visit" in page.said
    assert len(list(blocks(page, "map"))) == 1


def test_hostile_text_is_text(tmp_path: Path):
    """Markup, control characters, marks of direction and template signs in every field add no element to the page."""
    plain, hostile = make_run(tmp_path / "plain"), make_run(tmp_path / "hostile")
    for made, text in ((plain, "harmless"), (hostile, HOSTILE)):
        write_step(made, 7, [(text, 1.0), (text, 0.0), (text, None)], f"task {text}", text)
        card = {"sandbox": text, "versions": {text: text}, "code": {"gnomon": {"commit": text}}}
        (made / "run.json").write_text(json.dumps(card))
        finding = {
            "rule": text, "severity": "severe", "first_step": 1, "step": 2, "summary": text, "evidence": {text: 1.0},
            "meaning": text, "advice": [text],
            "samples": [{"step": 1, "task_id": text, "question": text, "response": text, "reward": 0.0}],
        }  # fmt: skip
        (made / "findings.jsonl").write_text(json.dumps(finding) + "\n")
        with open(made / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": 7, f"reward/{text}_mean": 0.5, "reward/b_mean": 0.5, text: 1.0}) + "\n")
    texts = [run_page(RunRecord(made)) for made in (plain, hostile)]
    tags = [sorted({tag for tag, _ in Page(text).tags}) for text in texts]

    assert Page(texts[1]).faults == []
    assert tags[0] == tags[1]
    assert not set("\x00\x1b\u202e\u200b") & set(texts[1])
    assert "49" not in re.findall(r"onerror=alert\(1\)&gt;(.{0,6})", texts[1])
    assert texts[1].count("<script>") == 1


def test_responses_of_any_length_fit(tmp_path: Path):
    """100,000 tokens, a line of as many quotes, and the page is below 2 MB and says what it left out."""
    made = make_run(tmp_path / "run")
    tiny_tokenizer().save(made / "checkpoints" / "step-6")
    write_step(made, 7, [("<&" * 50_000, 5.0), ('"' * 100_000, -5.0)], "long", '"' * 100_000)
    text = run_page(RunRecord(made))

    assert len(text.encode()) <= LARGEST
    assert Page(text).faults == []
    assert re.search(r"99,\d\d\d tokens left out", text)


def test_damaged_files_are_passed_over(tmp_path: Path):
    """Torn, cut, foreign and nested lines in every file: what can be read is shown, and what was damaged is counted."""
    made = make_run(tmp_path / "run")
    for name in ("metrics.jsonl", "evaluations.jsonl", "findings.jsonl"):
        with open(made / name, "ab") as file:
            file.write(b'{"step": 99, "rollout/reward_mean": "high"}\n[1]\n{"step": null}\n\xff\xfe\n' + b"[" * 5000)
            file.write(b'\n{"step": 100, "x": 1e999, "seconds": 1e999, "rollout/reward_mean": NaN}\n')
            file.write(b'{"step": 102, "seconds": 1' + b"0" * 400 + b', "tokens/generated": -1e308}\n{"step": 101, "sc')
    (made / "run.json").write_text("[[[")
    with open(made / "rollouts" / "step-000003.jsonl", "ab") as file:
        file.write(b'{"step": 3, "group": []}\nnonsense\n')
    (made / "rollouts" / "step-000004.jsonl").write_bytes(b"\x00" * 100)
    (made / "rollouts" / "step-000005.jsonl").unlink()
    (made / "checkpoints" / "step-6").mkdir(parents=True)
    (made / "checkpoints" / "step-6" / "tokenizer.json").write_text("{}")
    found = Page(run_page(RunRecord(made)))

    assert found.faults == []
    assert "4 damaged lines in metrics.jsonl, 4 in evaluations.jsonl, 4 in findings.jsonl and 3 in" in found.said
    assert "There is no run card." in found.said


def test_an_experiment_that_names_code_runs_none(tmp_path: Path):
    """A run of somebody else's may name a file as its algorithm's piece: drawing its page does not load that file."""
    made = make_run(tmp_path / "run")
    (tmp_path / "piece.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    text = (made / "experiment.toml").read_text().replace('piece = "EssCap"', f'piece = "{tmp_path}/piece.py:Mine"')
    (made / "experiment.toml").write_text(text)
    run_page(RunRecord(made))

    assert f"{tmp_path}/piece.py:Mine" in text
    assert not (tmp_path / "ran").exists()


def test_a_run_that_has_just_begun_has_a_page(tmp_path: Path):
    """With an experiment alone the page says that nothing was made yet."""
    (tmp_path / "experiment.toml").write_text(to_toml(load("tiny").experiment))
    found = Page(run_page(RunRecord(tmp_path)))

    assert found.faults == []
    assert "No step was made yet." in found.said


def test_an_experiment_that_is_none_has_a_page(tmp_path: Path):
    """Keys of other types than they should have, and no TOML at all, end in a page all the same."""
    for text in (
        "steps = 'many'\nalgorithm = 3\ntask = [1]\nmodel = 1.5\n",
        "]]] not TOML",
        "[algorithm]\nname = []\n",
    ):
        (tmp_path / "experiment.toml").write_text(text)
        assert Page(run_page(RunRecord(tmp_path))).faults == []


def test_long_runs_are_thinned(tmp_path: Path):
    """The curves of 5,000 steps have few points, and the page is below 2 MB."""
    made = make_run(tmp_path / "run")
    names = [f"loss/metric_{n}" for n in range(60)]
    rows = [
        {"step": n, "seconds": n, "rollout/reward_mean": math.sin(n)} | dict.fromkeys(names, n) for n in range(5000)
    ]
    (made / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = run_page(RunRecord(made))

    assert len(text.encode()) < LARGEST / 2
    assert max(path.count("L") for path in re.findall(r'd="(M[^"]*)"', text)) < 800


def test_several_runs_lie_beside_each_other(run: Path, tmp_path: Path):
    """A table of final scores with intervals, curves with a name each, and the keys in which the experiments differ."""
    other = make_run(tmp_path / "second", steps=3)
    report = write_report([run, other], tmp_path / "both.html")
    text = report.path.read_text()
    found = Page(text)

    assert found.faults == []
    assert {"first", "second"} <= set(found.texts)
    assert "0.500 to 0.700" in found.said
    assert "All runs are tied at 0.600." in found.said
    assert "steps 6 3" in re.sub(r"(?<=[a-z0-9])(?=\d)", " ", found.said)
    assert text.count('class="curve"') > 4


def test_rewards_of_one_name_are_told_apart(run: Path, tmp_path: Path):
    """Two runs whose functions share name and place, and not their content: a digest at each, and no verdict."""
    digests = []
    for name, source in (("one", "a" * 64), ("two", "b" * 64), ("three", "a" * 64)):
        made = make_run(tmp_path / name)
        text = (made / "experiment.toml").read_text()
        named = 'rewards = [{function = "own.py:score", name = "exact"}]'
        (made / "experiment.toml").write_text(text.replace("rewards = []", named))
        card = json.loads((made / "run.json").read_text())
        (made / "run.json").write_text(json.dumps({**card, "sources": {"own.py": source}}))
        digests.append(reward_digests(RunRecord(made).experiment(), RunRecord(made).card())["exact"])
    report = write_report([tmp_path / "one", tmp_path / "two"], tmp_path / "both.html").path.read_text()
    alike = write_report([tmp_path / "one", tmp_path / "three"], tmp_path / "alike.html").path.read_text()

    assert digests[0] == digests[2] != digests[1]
    assert all(f"exact ({digest})" in report for digest in digests)
    assert "judged by different rewards" in report
    assert digests[0] not in alike


def test_what_is_zero_throughout_is_folded(tmp_path: Path):
    """Charts in which nothing moves lie below the others, under their titles; a stage has one color in all pictures."""
    run, zero = make_run(tmp_path / "run"), {"loss/clipped_fraction": 0.0, "loss/clipped_low_fraction": 0.0}
    rows = [json.loads(line) | zero for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = run_page(RunRecord(run))
    folded = re.findall(r'<details class="still">\s*<summary>Zero throughout: ([^<]+)</summary>', text)
    keys = re.findall(r'key c(\d)" aria-hidden="true"></i>(generate|update)', text)
    drawn = re.findall(r"series-(\d)[^<]*><title>(generate|update)</title>", text)

    assert folded == ["Clip fraction"]
    assert sorted(drawn) == sorted(keys) == [("1", "generate"), ("4", "update")]
    assert text.index('id="learning"') < text.index('id="findings"') < text.index('id="policy"')


def test_runs_of_other_questions_are_not_compared(run: Path, tmp_path: Path):
    """Where held-out prompts differ the page says so, and names no best run."""
    other = make_run(tmp_path / "second")
    path = other / "evaluations.jsonl"
    path.write_text(path.read_text().replace('"prompts": 50', '"prompts": 40'))
    text = write_report([run, other], tmp_path / "both.html").path.read_text()

    assert "evaluated on different questions" in text
    assert "ended highest" not in text


def test_what_cannot_be_is_said(run: Path, tmp_path: Path):
    """No run, too many runs and a folder that is not there are the user's to mend."""
    with pytest.raises(RunDirectoryError, match="there is no run"):
        write_report([tmp_path / "nothing"])
    with pytest.raises(ConfigError, match="a page shows 1 to 32 runs, got 33"):
        write_report([run] * 33)
    with pytest.raises(RunDirectoryError, match="--out FILE"):
        write_report([run], tmp_path / "no" / "where.html")


def test_a_page_that_cannot_be_written_ends_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """At the end of a run a report is tried; where its place is taken by a folder there is one warning."""
    made = make_run(tmp_path / "run")
    (made / "report.html").mkdir()
    with Console() as console:
        leave_page(RunDirectory(made), console)

    assert "warning: the report was not written" in capsys.readouterr().err


def test_the_page_of_a_run_that_just_ended_does_not_call_it_live(tmp_path: Path):
    """Its process still holds the lock; the page says finished, or stopped where steps are missing."""
    made = make_run(tmp_path / "run")
    with RunDirectory.reopen(made), Console() as console:
        leave_page(RunDirectory(made), console)
        said = Page((made / "report.html").read_text()).said
        live = Page(run_page(RunRecord(made))).said

    assert "still running" not in said
    assert "still running" in live


@pytest.mark.parametrize(
    ("settings", "checkpoint", "state"),
    [
        (["steps=6"], 6, "finished"),
        (["steps=6"], 4, "stopped"),
        (["steps=9"], 6, "stopped"),
        (["steps=9", "budget.tokens=600"], 6, "finished"),
    ],
)
def test_every_view_calls_the_same_runs_stopped(tmp_path: Path, settings: list[str], checkpoint: int, state: str):
    """All steps made but not saved, too few steps, and a budget that ended it early: report and live view agree."""
    made = make_run(tmp_path / "run")
    (made / "checkpoints" / f"step-{checkpoint}").mkdir(parents=True)
    (made / "experiment.toml").write_text(to_toml(load("tiny", [*settings, "algorithm=p3o"]).experiment))
    rows = [
        json.loads(line) | {"tokens/generated_total": 600} for line in (made / "metrics.jsonl").read_text().splitlines()
    ]
    (made / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    with RunDirectory.reopen(made):
        said = Page(run_page(RunRecord(made), is_over=True)).said

    assert (RunRecord(made).state(), Watcher(made).look().state) == (state, state)
    assert (", stopped" in said) is (state == "stopped")

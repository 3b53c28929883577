"""The page in a browser: it fits every width, complains of nothing, asks nobody, and works without a mouse."""

import json
import random
import shutil
from pathlib import Path

import pytest
from tests.insight.browsing import Browser
from tests.random_model import RANDOM

import gnomon
from gnomon.insight.report.write import write_report

pytestmark = pytest.mark.slow
WIDTHS = (320, 768, 1280)

TOO_WIDE = """
(() => {
  const inside = (e) => e.closest(".scroll, pre, .tokens") !== null && !e.matches(".scroll, pre, .tokens");
  const wide = [...document.querySelectorAll("body *")].filter((e) => !inside(e) && !e.closest("svg svg, svg > *") &&
    e.getClientRects().length && e.getBoundingClientRect().right > innerWidth + 0.5);
  return [document.documentElement.scrollWidth - innerWidth, wide.slice(0, 5).map((e) => e.outerHTML.slice(0, 120))];
})()
"""
CONTRAST = """
(() => {
  const parse = (text) => {
    const n = (text.match(/[\\d.]+/g) || []).map(Number);
    return n.length > 3 ? n : [...n, 1];
  };
  const over = (top, under) => top.slice(0, 3).map((c, i) => c * top[3] + under[i] * (1 - top[3]));
  const linear = (v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const light = (c) => c.slice(0, 3).reduce((sum, v, i) => sum + linear(v / 255) * [.2126, .7152, .0722][i], 0);
  const ground = (e) => {
    const layers = [];
    for (let at = e; at; at = at.parentElement) layers.push(parse(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((under, top) => over(top, under), [255, 255, 255]);
  };
  const found = [];
  for (const e of document.querySelectorAll("body *")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.getClientRects().length || e.closest("title, .skip")) continue;
    const style = getComputedStyle(e), under = ground(e);
    const color = over(parse(e.namespaceURI.endsWith("svg") ? style.fill : style.color), under);
    const [a, b] = [light(color), light(under)].sort((x, y) => y - x);
    const ratio = (a + .05) / (b + .05);
    if (ratio < 4.5) found.push([ratio.toFixed(2), e.outerHTML.slice(0, 120)]);
  }
  return found.slice(0, 5);
})()
"""
FOCUS = """
(() => {
  const e = document.activeElement;
  if (e === document.body) return "";
  if (!e.dataset.seen) e.dataset.seen = String(document.querySelectorAll("[data-seen]").length + 1);
  return e.dataset.seen + " " + e.tagName + "." + e.className + " " + (e.name || "");
})()
"""


def repeated(run: Path, target: Path, steps: int) -> Path:
    """Write a run of very many steps from the rows of a real one, which are varied a little."""
    noise = random.Random(0)
    target.mkdir()
    experiment = (run / "experiment.toml").read_text()
    (target / "experiment.toml").write_text(experiment.replace("steps = 5\n", f"steps = {steps}\n"))
    for name in ("run.json", "evaluations.jsonl"):
        shutil.copy(run / name, target / name)
    shutil.copytree(run / "checkpoints", target / "checkpoints")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    files = [path.read_text().splitlines() for path in sorted((run / "rollouts").iterdir())]
    (target / "rollouts").mkdir()
    with open(target / "metrics.jsonl", "w") as file:
        for step in range(1, steps + 1):
            row = rows[step % len(rows)]
            varied = {n: v * noise.uniform(0.9, 1.1) if isinstance(v, float) else v for n, v in row.items()}
            file.write(json.dumps({**varied, "step": step, "seconds": 1.5 * step}) + "\n")
            lines = [line.replace('"step": ', f'"step": {step}, "was": ', 1) for line in files[step % len(files)]]
            (target / "rollouts" / f"step-{step:06d}.jsonl").write_text("\n".join(lines) + "\n")
    return target


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The pages of a run of five steps, of one of 5,000, and of both beside each other."""
    folder = tmp_path_factory.mktemp("pages")
    short = folder / "short"
    gnomon.train(RANDOM, short, steps=5, algorithm="spo", rollouts_per_step=32)
    long = repeated(short, folder / "long", 5000)
    found = {"short": write_report([short]).path, "long": write_report([long]).path}
    return {**found, "both": write_report([short, long], folder / "both.html").path}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", ["short", "long", "both"])
def test_it_fits_and_is_quiet(browser: Browser, pages: dict[str, Path], name: str, width: int, is_dark: bool):
    """At every width, light and dark: no part is wider than the window, nothing is complained of, nothing is fetched,

    and every text that is seen has a contrast of at least 4.5 to what lies behind it.
    """
    browser.open(pages[name], width, is_dark)
    browser.ask("for (const e of document.querySelectorAll('details')) e.open = true")

    assert browser.ask(TOO_WIDE) == [0, []]
    assert browser.ask(CONTRAST) == []
    assert browser.troubles == []
    assert [url for url in browser.requests if not url.startswith(("file:", "data:"))] == []
    assert len([url for url in browser.requests if url.startswith("file:")]) == 1


def test_dark_is_dark(browser: Browser, pages: dict[str, Path]):
    """The background is light by day and dark by night."""
    grounds = []
    for is_dark in (False, True):
        browser.open(pages["short"], 768, is_dark)
        grounds.append(browser.ask("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"))

    assert min(grounds[0]) > 200
    assert max(grounds[1]) < 60


def test_every_control_is_reached_by_tab(browser: Browser, pages: dict[str, Path]):
    """Tab goes through links, groups of choices, pictures, responses and what can be opened, each once, to the end."""
    browser.open(pages["short"], 1280)
    wanted = browser.ask(
        "[...document.querySelectorAll('a[href], summary, [tabindex=\"0\"]')]"
        ".filter((e) => e.getClientRects().length && e.checkVisibility({visibilityProperty: true})).length"
        " + new Set([...document.querySelectorAll('input')].map((e) => e.name)).size"
    )
    reached = []
    for _ in range(wanted + 5):
        browser.press("Tab")
        at = browser.ask(FOCUS)
        if at == "" or at in reached:
            break
        reached.append(at)

    assert len(reached) == wanted
    assert {name.split(".")[0].split()[1] for name in reached} >= {"A", "INPUT", "DIV", "SUMMARY"}


def test_shelves_and_colors_are_chosen_with_arrows(browser: Browser, pages: dict[str, Path]):
    """An arrow on the choice of rollouts shows the next shelf and no other; one on that of colors repaints tokens."""
    browser.open(pages["short"], 1280)
    shown = "[...document.querySelectorAll('.shelf')].filter((e) => !e.hidden).map((e) => e.dataset.shelf)"
    painted = "[...document.querySelectorAll('.tokens i')].map((e) => e.className + e.style.cssText).join()"
    first = browser.ask(shown)
    browser.ask("document.querySelector('input[name=shelf]:checked').focus()")
    browser.press("ArrowRight")
    second = browser.ask(shown)
    browser.ask("document.querySelector('input[name=color]:checked').focus()")
    pictures, legends = [browser.ask(painted)], [browser.ask("document.querySelector('.legend').textContent")]
    for _ in range(browser.ask("document.querySelectorAll('input[name=color]').length") - 1):
        browser.press("ArrowRight")
        pictures.append(browser.ask(painted))
        legends.append(browser.ask("document.querySelector('.legend').textContent"))

    assert (first, second) == (["best"], ["worst"])
    assert len(set(legends)) == len(legends) >= 2
    assert len(set(pictures)) >= 2


def test_tokens_and_curves_are_read_with_arrows(browser: Browser, pages: dict[str, Path]):
    """A response and a curve say what is at the place that arrows, Home and End move to."""
    browser.open(pages["short"], 1280)
    for thing in (".tokens", ".picture"):
        said = []
        reading = f"document.querySelector('{thing}').closest('figure, details').querySelector('.reading').textContent"
        browser.ask(f"document.querySelector('{thing}').focus()")
        for key in ("Home", "ArrowRight", "End"):
            browser.press(key)
            said.append(browser.ask(reading))
        assert all(said)
        assert len(set(said)) >= 2
    assert browser.ask("document.querySelector('.picture .cursor') !== null") is True
    assert browser.troubles == []


def test_what_is_folded_is_opened_with_enter(browser: Browser, pages: dict[str, Path]):
    """Enter opens a rollout and closes it again."""
    browser.open(pages["short"], 320)
    browser.ask(
        "[...document.querySelectorAll('.rollout:not([open]) > summary')].find((e) => e.checkVisibility()).focus()"
    )
    states = []
    for _ in range(2):
        browser.press("Enter")
        states.append(browser.ask("document.activeElement.parentElement.open"))

    assert states == [True, False]


def test_readings_are_near_the_numbers(browser: Browser, pages: dict[str, Path]):
    """What a curve is said to be at its last step is what the file says, to a hundredth of the picture."""
    browser.open(pages["short"], 1280)
    rows = [json.loads(line) for line in (pages["short"].parent / "metrics.jsonl").read_text().splitlines()]
    browser.ask("document.querySelector('.picture').focus()")
    browser.press("End")
    said = browser.ask("document.querySelector('figure .reading').textContent")
    value = float(said.split("training reward ")[1].split(",")[0].replace("\N{MINUS SIGN}", "-"))

    assert said.startswith("step 5: ")
    assert value == pytest.approx(rows[-1]["rollout/reward_mean"], abs=0.02)


def test_paper_shows_everything(browser: Browser, pages: dict[str, Path]):
    """Printed, what was folded is open and every shelf is there; afterwards the screen is as it was."""
    browser.open(pages["short"], 1280)
    folded = browser.ask("document.querySelectorAll('details:not([open])').length")
    printed = browser("Page.printToPDF", printBackground=True)
    browser.ask("dispatchEvent(new Event('beforeprint'))")
    left = browser.ask("document.querySelectorAll('details:not([open]), .shelf[hidden]').length")
    browser.ask("dispatchEvent(new Event('afterprint'))")

    assert len(printed["data"]) > 50_000
    assert left == 0
    assert browser.ask("document.querySelectorAll('details:not([open])').length") == folded > 0

"""The site: it is built strictly, every link within it leads somewhere, and it asks no other host for anything."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[2]
needs_mkdocs = pytest.mark.skipif(find_spec("material") is None, reason="pip install 'gnomon[docs]'")
# What a browser fetches by itself, beside what a reader follows.
FETCHED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


class Links(HTMLParser):
    """What a page links, what it fetches, and its anchors."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.ids: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in FETCHED and FETCHED[tag] in values and values.get("rel") != "canonical":
            self.fetched.append(values[FETCHED[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{ran.stdout[-3000:]}\n{ran.stderr[-3000:]}"
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Links]:
    return {path: Links(path) for path in site.rglob("*.html")}


@needs_mkdocs
def test_the_site_has_its_four_parts(site: Path):
    """Tutorial, how-to, reference and explanation are there, the generated pages among them."""
    for page in ("index", "tutorial/own_reward", "python", "reference/metrics", "reference/commands", "walk"):
        assert (site / f"{page}.html").is_file()


@needs_mkdocs
def test_every_link_within_the_site_leads_somewhere(pages: dict[Path, Links]):
    """Files and anchors of all links and of all that pages fetch exist in the site."""
    broken = []
    for path, page in pages.items():
        for link in page.links + page.fetched:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or path.name == "404.html":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            is_there = target.is_file()
            if is_there and parts.fragment and target in pages and parts.fragment != "__comments":
                is_there = unquote(parts.fragment) in pages[target].ids
            if not is_there:
                broken.append(f"{path.name}: {link}")

    assert broken == []


@needs_mkdocs
def test_the_site_works_without_a_network(site: Path, pages: dict[Path, Links]):
    """No page and no style fetches anything from another host: no font, no script, no picture."""
    asked = [f"{path.name}: {link}" for path, page in pages.items() for link in page.fetched if urlsplit(link).netloc]
    styles = [p.name for p in site.rglob("*.css") if re.search(r"url\(['\"]?(?:https?:)?//", p.read_text())]

    assert asked == []
    assert styles == []


@needs_mkdocs
@pytest.mark.parametrize(
    ("words", "place"),
    [
        ("learning_rate", "configuration.html"),
        ("max_error_fraction", "configuration.html"),
        ("rollout/degenerate_group_fraction", "reference/metrics.html"),
        ("ClippedSurrogate", "reference/pieces.html"),
        ("--fail-on", "reference/commands.html"),
        ("gnomon.training.python_api.train", "reference/python.html"),
    ],
)
def test_the_search_knows_settings_metrics_pieces_and_commands(site: Path, words: str, place: str):
    """The index of the search has a name of each generated page on that page."""
    found = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    there = [entry for entry in found if entry["location"].startswith(place)]

    assert any(words in entry["text"] + entry["title"] + entry["location"] for entry in there)

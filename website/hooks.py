"""What mkdocs does for gnomon's site beyond its settings: pages made by code, notebooks, and files of the repository.

Pages of docs link to files of the repository, so that they can be read there. The site has a page for each such file,
and needs no other host.
"""

import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

# The pages describe this checkout, whatever is installed.
sys.path[:0] = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parents[1])]
from website.pages import NOTEBOOKS, PAGES, ROOT, notebook, repository_page  # noqa: E402

LINK = re.compile(r"(?P<open>\]\()(?P<target>(?!\w+:|#)[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
CODE = re.compile(r"(?ms)^(?P<fence>`{3,})[^\n]*\n.*?^(?P=fence)[ \t]*$|`[^`\n]+`")
FORMULA = re.compile(r"(?s)\$\$(?P<block>.+?)\$\$|(?<![\w$`])\$(?P<line>[^$`\n ][^$`\n]*)\$(?![\w$])")
CELL = re.compile(r"(?<=<td><code>)[^<]+(?=</code>)")
SETTINGS = "<table>\n<thead>\n<tr>\n<th>setting</th>"
PLACE = "repository"
# Where the sources of pages lie that are not in docs: links are relative to them.
ORIGINS = {f"{PLACE}/": "", "tutorial/": "examples/notebooks/"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that code writes, the notebooks, and every file of the repository that a page leads to."""
    made = {name: write() for name, write in PAGES.items()}
    made |= {f"tutorial/{path.stem}.md": notebook(path) for path in sorted(NOTEBOOKS.glob("*.ipynb"))}
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    waiting = [p for f in files.documentation_pages() for p in _outside(f.src_uri, f.content_string)]
    seen: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path in seen or files.get_file_from_path(_address(path)):
            continue
        seen.add(path)
        name = _address(path)
        if path.suffix in (".svg", ".png"):
            files.append(File.generated(config, name, abs_src_path=str(path)))
            continue
        files.append(File.generated(config, name, content=repository_page(path)))
        waiting += _outside(name, repository_page(path))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to files of the repository to their pages, and write formulas as MathML, which browsers know."""
    here = page.file.src_uri
    # Who searches a name wants its page of reference before those that mention it, and experiments last.
    if here == "configuration.md" or here.startswith("reference/"):
        page.meta.setdefault("search", {"boost": 5})
    elif here.startswith(f"{PLACE}/"):
        page.meta.setdefault("search", {"boost": 0.3})

    def lead(match: re.Match[str]) -> str:
        path = _meant(here, match["target"])
        if path is None:
            return match[0]
        relative = posixpath.relpath(_address(path), posixpath.dirname(here) or ".")
        return f"{match['open']}{relative}{match['anchor'] or ''})"

    return _outside_code(markdown, lambda text: FORMULA.sub(_mathml, LINK.sub(lead, text)))


def on_page_content(html: str, **_: Any) -> str:
    """Let names in cells break behind dots, slashes and underscores, and mark tables of settings for narrow screens."""
    marked = html.replace(SETTINGS, SETTINGS.replace("<table>", "<table data-settings>"))
    return CELL.sub(lambda cell: re.sub(r"([._/])(?=\w)", r"\1<wbr>", cell[0]), marked)


def _outside_code(markdown: str, change: Any) -> str:
    """Apply a change to what is neither a block of code nor code within a line."""
    parts, end = [], 0
    for match in CODE.finditer(markdown):
        parts += [change(markdown[end : match.start()]), match[0]]
        end = match.end()
    return "".join([*parts, change(markdown[end:])])


def _mathml(match: re.Match[str]) -> str:
    from latex2mathml.converter import convert

    return str(convert(match["block"] or match["line"], display="block" if match["block"] else "inline"))


def _outside(here: str, text: str) -> Iterator[Path]:
    """Yield the files and folders of the repository, outside of docs, that the text of a page leads to."""
    found: list[Path | None] = []
    _outside_code(text, lambda part: found.extend(_meant(here, m["target"]) for m in LINK.finditer(part)) or "")
    yield from (path for path in found if path is not None)


def _meant(here: str, target: str) -> Path | None:
    """Return the file or folder of the repository that a link means; None for one within docs or a generated page."""
    origin = f"docs/{here}"
    for prefix, folder in ORIGINS.items():
        if here.startswith(prefix):
            origin = folder + here.removeprefix(prefix)
    folder = origin.removesuffix("/index.md") if origin.endswith("/index.md") else posixpath.dirname(origin)
    name = posixpath.normpath(posixpath.join(folder, target))
    path = ROOT / name
    if name.startswith("..") or not path.exists() or (name.startswith("docs/") and origin == f"docs/{here}"):
        return None
    return path / "README.md" if (path / "README.md").is_file() else path


def _address(path: Path) -> str:
    """Return where the site has a file or folder of the repository; a page of docs has its place already."""
    name = path.relative_to(ROOT).as_posix()
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    if path == NOTEBOOKS:
        return "tutorial/first_run.md"
    if path.suffix == ".ipynb":
        return f"tutorial/{path.stem}.md"
    if path.is_dir():
        return f"{PLACE}/{name}/index.md"
    return f"{PLACE}/{name}" if path.suffix in (".md", ".svg", ".png") else f"{PLACE}/{name}.md"

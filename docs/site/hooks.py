"""Makes pages of the site that are not files in docs/, and turns links between files into links.

READMEs of folders become pages, each metric has a page, and the reference lists public names.
"""

import functools
import lzma
import posixpath
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(Path(__file__).parent))

from diagram import draw as diagram  # noqa: E402
from formulas import FORMULAS, FUNCTIONS  # noqa: E402

from geomon import METRICS, MORE_METRICS, read  # noqa: E402
from geomon.show import draw, save  # noqa: E402

# Files of the repository that become pages, by the page.
PAGES = {
    "index.md": "README.md",
    "benchmarks.md": "benchmarks/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    **{
        ("recipes/index.md" if path.parent.name == "recipes" else f"recipes/{path.parent.name}.md"):
            path.relative_to(ROOT).as_posix()
        for path in sorted(ROOT.glob("recipes/**/README.md"))
    },
}  # fmt: skip
_PAGE_OF = {source: page for page, source in PAGES.items()}
# Links of Markdown and their targets; pictures too.
_LINK = re.compile(r"(!?)\[([^\[\]]*(?:\[[^\]]*\][^\[\]]*)*)\]\(([^)\s]+)\)")
_MERMAID = re.compile(r"^```mermaid\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
_FENCE = re.compile(r"(^```.*?^```$)", flags=re.MULTILINE | re.DOTALL)
_KERNELS = sorted(
    path.stem for path in ROOT.glob("geomon/kernels/*.py") if not path.stem.startswith("_")
)
_REFERENCE = """# Reference

What `geomon` exports beside [its metrics](../metrics.md), and the callbacks.

{names}

## Lightning

::: geomon.lightning.GeometryMonitor
    options: {{heading_level: 3}}

## The Trainer of transformers

::: geomon.huggingface.GeometryMonitor
    options: {{heading_level: 3}}

## Checkpoints

::: geomon.sweep.lightning_checkpoints
::: geomon.sweep.trainer_checkpoints
::: geomon.sweep.hub_checkpoints
::: geomon.sweep.text_windows
"""


def on_config(config: Any) -> Any:
    """Fill in the pages that are listed by their kind."""
    lists = {
        "METRICS": [f"metrics/{name}.md" for name in METRICS | MORE_METRICS],
        "KERNELS": [f"reference/{name}.md" for name in _KERNELS],
        "RECIPES": sorted(page for page in PAGES if page.startswith("recipes/")),
    }
    for section in config.nav:
        for entries in section.values():
            for entry in entries if isinstance(entries, list) else ():
                if isinstance(entry, dict):
                    entry.update({title: lists.get(page, page) for title, page in entry.items()})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not files in docs/."""
    made = {page: (ROOT / source).read_text() for page, source in PAGES.items()}
    made["reference/index.md"] = _reference()
    for name in _KERNELS:
        made[f"reference/{name}.md"] = f"# {name}\n\n::: geomon.kernels.{name}\n"
    for name in METRICS | MORE_METRICS:
        made[f"metrics/{name}.md"] = _metric_page(name)
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    for name, picture in _pictures().items():
        files.append(File.generated(config, f"metrics/{name}.png", content=picture))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links between files into links between pages or into names, and draw flowcharts."""
    source = PAGES.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    drawn = _MERMAID.sub(lambda found: diagram(found[1]), markdown)
    parts = _FENCE.split(drawn)
    parts[::2] = [
        _LINK.sub(lambda found: _link(found, source, page.file.src_uri), part)
        for part in parts[::2]
    ]
    return "".join(parts)


def _link(found: re.Match[str], source: str, page: str) -> str:
    picture, words, target = found.groups()
    if re.match(r"[a-z]+:|#", target):
        return found[0]
    path, _, anchor = target.partition("#")
    place = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if (ROOT / place).is_dir() and (ROOT / place / "README.md").is_file():
        place = f"{place}/README.md"
    to = _PAGE_OF.get(place) or (place.removeprefix("docs/") if place.startswith("docs/") else "")
    if not to:
        return f"`{place}`" if words.strip("`") == posixpath.basename(place) else words
    link = posixpath.relpath(to, posixpath.dirname(page) or ".")
    return f"{picture}[{words}]({link}{'#' + anchor if anchor else ''})"


def _reference() -> str:
    import geomon

    names = [name for name in geomon.__all__ if not name.startswith("__") and not name.isupper()]
    return _REFERENCE.format(names="\n".join(f"::: geomon.{name}" for name in names))


# -- a page for each metric ------------------------------------------------------------------------


def _metric_page(name: str) -> str:
    metric = (METRICS | MORE_METRICS)[name]
    text = metric.text
    unit = f", in {text.unit}" if text.unit else ""
    asked = "" if name in METRICS else f' Asked for by `metrics=METRICS | select("{name}")`.'
    lines = [
        f"# {text.title}", "", f"`{name}`{unit}. {text.meaning}{asked}", "",
        convert(FORMULAS[name], display="block"), "",
        f"- **Null**: {text.null or 'none'}.",
        f"- **Missing**: {text.missing or 'what it reads was not seen'}.",
        f"- **Margin**: {'a 95 % interval over sequences' if metric.has_margin else 'none'}.",
        f"- **Reads** {', '.join(f'`{view}`' for view in metric.reads)} ([views](../views.md)).",
    ]  # fmt: skip
    if text.parts:
        lines += ["", "| part | meaning |", "|---|---|"]
        lines += [f"| `{name}/{part}` | {words} |" for part, words in text.parts.items()]
    if doubts := [each for each in _doubts() if f"`{name}`" in each]:
        lines += ["", "## What makes it lie", "", *doubts]
    if name in _pictures():
        lines += ["", "## Example", "", f"![{text.title} in a training]({name}.png)", "",
                  "From `make enwik8`."]  # fmt: skip
    if function := FUNCTIONS.get(name):
        lines += ["", "## Function", "", f"::: geomon.kernels.{function}"]
    return "\n".join(lines) + "\n"


@functools.cache
def _doubts() -> list[str]:
    """List the points of the page on metrics that say when not to trust a value."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    section = page.partition("## What to distrust\n")[2].partition("\n## ")[0]
    points = re.split(r"^- ", section, flags=re.MULTILINE)[1:]
    return [f"- {_LINK.sub(_from_below, point).rstrip()}" for point in points]


def _from_below(found: re.Match[str]) -> str:
    """Return a link of a page in docs/ as a page in a folder of docs/ has it."""
    picture, words, target = found.groups()
    if target.startswith("#"):
        target = f"metrics.md{target}"
    return f"{picture}[{words}](../{target})"


@functools.cache
def _pictures() -> dict[str, bytes]:
    """Draw each metric of a run of the recipe by layer and step."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        content = (Path(__file__).parent / "example.jsonl.xz").read_bytes()
        (place / "readings.jsonl").write_bytes(lzma.decompress(content))
        readings = read(place)
        figures = {
            name: ("map", name)
            for name in METRICS
            if any(reading.column(name).layers for reading in readings)
        }
        for name, figure in {"gride": ("dimension", None), **figures}.items():
            save(draw(figure[0], readings, figure[1]), place / f"{name}.png")
            found[name] = (place / f"{name}.png").read_bytes()
    return found

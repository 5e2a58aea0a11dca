"""Claims as a page of Markdown: for each paper what it asserts, and what was seen."""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mode

from recipes.enwik8.text import InputError
from recipes.study.claim import FILE_NAME, Claim, Results, Verdict, load_results
from recipes.study.markdown import table

# Papers in the order in which the page shows them.
PAPERS = {
    "2311.05928": "Razzhigaev et al., The Shape of Learning",
    "2401.12143": "Godey et al., Anisotropy Is Inherent to Self-Attention in Transformers",
    "2409.11253": "Yamagiwa and Shimodaira, Norm of Mean Contextualized Embeddings",
    "2506.01034": "Ruppik et al., Less is More",
    "2509.23024": "Li et al., Tracing the Representation Geometry of Language Models",
}

_VERDICTS: tuple[Verdict, ...] = ("agrees", "disagrees", "undecided")
_HEAD = """# What papers assert, and what was seen here

Each line is what a paper asserts, measured as the paper measures it. We chose the limits and
windows marked *ours*, because the paper gives none. *Seen* is the mean over seeds, layers and heads
at the end of training, unless the line says otherwise, with its 95 % interval (Student's t; Clopper
and Pearson for a share). A line *agrees* if the whole interval is within the limits in brackets,
*disagrees* if it is outside, and is *undecided* otherwise.

`make claims` writes this page from what the [experiments](../recipes/README.md) leave in `runs/`.
Their pages say what other estimators and models answer.
"""

# A claim with the results that it belongs to.
_Line = tuple[Claim, Results]


def write_page(runs: Path, experiments: Iterable[str], page: Path) -> int:
    """Write the page of the claims that experiments left.

    Returns:
        Number of claims on the page.

    Raises:
        InputError: There are no claims, or some that cannot be read.
    """
    names = sorted(experiments)
    found = [name for name in names if (runs / name / FILE_NAME).exists()]
    if not found:
        raise InputError(f"{runs} holds no claims: run an experiment first, make decoder")
    results = [load_results(runs / name) for name in found]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(render(results, [name for name in names if name not in found]))
    return sum(not claim.ours for each in results for claim in each.claims)


def render(results: Sequence[Results], missing: Sequence[str]) -> str:
    """Write the claims as a page; experiments that were not run are left out."""
    every = [(claim, each) for each in results for claim in each.claims if not claim.ours]
    papers = {paper: [line for line in every if line[0].paper == paper] for paper in PAPERS}
    papers = {paper: lines for paper, lines in papers.items() if lines}
    rows = [_counts(_link(paper), lines) for paper, lines in papers.items()]
    head = ["paper", "assertions", "agree", "disagree", "undecided"]
    commands = ", ".join(f"`make {name}`" for name in missing)
    parts = [_HEAD, *table(head, [*rows, _counts("**all**", every)])]
    parts += ["", f"Not run: {commands}."] if missing else []
    for paper, lines in papers.items():
        parts += ["", f"## {PAPERS[paper]} ({paper})", ""]
        parts += table(["asserted", "seen"], _rows(lines), words=2)
    parts += ["", "## The experiments\n", *map(_experiment, results), ""]
    return "\n".join(parts)


def _counts(name: str, lines: Sequence[_Line]) -> list[str]:
    theirs = Counter(claim.verdict for claim, _ in lines)
    numbers = [theirs.total(), *(theirs[verdict] for verdict in _VERDICTS)]
    return [name, *map(str, numbers)]


def _rows(lines: Sequence[_Line]) -> list[list[str]]:
    """One row for each experiment, and one for all variants of an assertion."""
    rows = []
    for _, own in itertools.groupby(lines, lambda line: line[1].experiment):
        asked: dict[str, list[_Line]] = {}
        for claim, results in own:
            chosen = f"; {claim.chosen} ours" if claim.chosen else ""
            measured = f"{claim.quantity} ({claim.limits}{chosen})"
            question = f"{claim.asserts.rstrip('.')} ({claim.place})<br>{measured}"
            asked.setdefault(question, []).append((claim, results))
        rows.append([f"`make {results.experiment}`", ""])
        rows += [[question, "<br>".join(map(_seen, found))] for question, found in asked.items()]
    return rows


def _seen(line: _Line) -> str:
    """A claim's variant, mean and verdict."""
    claim, results = line
    variant = f"{claim.variant}: " if claim.variant else ""
    return f"{variant}{claim.mean_words}{_over(claim, results)} **{claim.verdict}**"


def _over(claim: Claim, results: Results) -> str:
    """Say what a mean is taken over, unless it is the seeds of the experiment."""
    count = len(claim.values)
    if claim.repeated == "seed" and count == _seeds(results):
        return ""
    return f" ({count} {claim.repeated}{'s' * (count != 1)})"


def _seeds(results: Results) -> int:
    """Number of seeds that most claims of an experiment are means over."""
    counts = [len(claim.values) for claim in results.claims if claim.repeated == "seed"]
    return mode(counts) if counts else 0


def _experiment(results: Results) -> str:
    """One line of an experiment: its command, its number of lines, what differs."""
    theirs = sum(not claim.ours for claim in results.claims)
    words = [
        f"- `make {results.experiment}`: {theirs} line{'s' * (theirs != 1)}",
        f"{_seeds(results)} seeds",
        f"[page](../recipes/{results.experiment}/README.md)",
    ]
    return f"{'; '.join(words)}. Differs: {results.differs.rstrip('.')}."


def _link(paper: str) -> str:
    authors = PAPERS[paper].partition(",")[0]
    return f"{authors} ([{paper}](https://arxiv.org/abs/{paper}))"

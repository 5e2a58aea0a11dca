"""Claims as a page of Markdown: for each paper what it asserts, and what we added to that."""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

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
    "2501.10573": "Viswanathan et al., The Geometry of Tokens",
}

_VERDICTS: tuple[Verdict, ...] = ("agrees", "disagrees", "undecided")
_HEAD = """# What papers assert, and what was seen here

Each paper has a table of its assertions, as far as an experiment of this repository decides them,
and a table of what we added: other estimators, other models, controls. Only assertions of papers
are counted.

*Seen* is the mean at the end of training, over the seeds of the experiment or over what is named,
with its 95 % interval (Student's t; for a share Clopper and Pearson). An assertion *agrees* if the
whole interval is within the limits in brackets, *disagrees* if it is outside, and is *undecided*
otherwise. Limits are 0, 1, chance, a number of the paper, or ours. Of many intervals of 95 % a few
miss.

`make claims` writes this page from what the [experiments](../recipes/README.md) leave in `runs/`.
"""

# A claim with the results that it belongs to.
_Line = tuple[Claim, Results]


def write_page(runs: Path, experiments: Iterable[str], page: Path) -> int:
    """Write the page of the claims that experiments left.

    Returns:
        Number of claims.

    Raises:
        InputError: There are no claims, or some that cannot be read.
    """
    names = sorted(experiments)
    found = [name for name in names if (runs / name / FILE_NAME).exists()]
    if not found:
        raise InputError(f"{runs} holds no claims: run an experiment first, make decoder")
    results = [load_results(runs / name) for name in found]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(render(results, [name for name in names if name not in found], page))
    return sum(len(each.claims) for each in results)


def render(results: Sequence[Results], missing: Sequence[str], page: Path) -> str:
    """Write the text of the page."""
    papers: dict[str, list[_Line]] = {number: [] for number in PAPERS}
    for each in results:
        for claim in each.claims:
            papers[claim.source.partition(",")[0]].append((claim, each))
    papers = {number: lines for number, lines in papers.items() if lines}
    parts = [_HEAD, _summary(papers, missing)]
    parts += [_section(paper, lines) for paper, lines in papers.items()]
    parts += ["## The experiments\n", *(_experiment(each, page) for each in results), ""]
    return "\n".join(parts)


def _summary(papers: dict[str, list[_Line]], missing: Sequence[str]) -> str:
    everything = [line for found in papers.values() for line in found]
    rows = [_counts(_link(paper), found) for paper, found in papers.items()]
    head = ["paper", "assertions", "agree", "disagree", "undecided", "ours"]
    commands = ", ".join(f"`make {name}`" for name in missing)
    end = ["", f"Not run: {commands}."] if missing else []
    return "\n".join([*table(head, [*rows, _counts("**all**", everything)]), *end, ""])


def _counts(name: str, lines: Sequence[_Line]) -> list[str]:
    theirs = [claim for claim, _ in lines if not claim.ours]
    counts: Counter[str] = Counter(claim.verdict for claim in theirs)
    numbers = [len(theirs), *(counts[verdict] for verdict in _VERDICTS), len(lines) - len(theirs)]
    return [name, *map(str, numbers)]


def _section(paper: str, lines: Sequence[_Line]) -> str:
    text = [f"## {PAPERS[paper]} ({paper})", ""]
    for ours, lead, asked in ((False, [], "asserted"), (True, ["What we added:", ""], "asked")):
        rows: dict[tuple[str, ...], list[_Line]] = {}
        for line in lines:
            if line[0].ours == ours:
                rows.setdefault(_asked(*line), []).append(line)
        if rows:
            head = [asked, "measured", "seen", "verdict", "experiment"]
            cells = [[*question, *_answers(found)] for question, found in rows.items()]
            text += [*lead, *table(head, cells, words=5), ""]
    return "\n".join(text)


def _asked(claim: Claim, results: Results) -> tuple[str, str]:
    """What is asserted, where, and what decides it: the same for all variants."""
    place = claim.source.partition(", ")[2].removeprefix("section ")
    words = f" ({place})" if place not in ("", "abstract") and not claim.ours else ""
    return claim.asserts.rstrip(".") + words, f"{claim.quantity} ({claim.limits})"


def _answers(lines: Sequence[_Line]) -> list[str]:
    """The values of all variants, their verdicts, and what they are means over."""
    seen = [f"{claim.variant}: " * bool(claim.variant) + claim.mean_words for claim, _ in lines]
    verdicts = (f"**{claim.verdict}**" for claim, _ in lines)
    names = dict.fromkeys(results.experiment + _count(claim, results) for claim, results in lines)
    return ["<br>".join(cells) for cells in (seen, verdicts, names)]


def _count(claim: Claim, results: Results) -> str:
    """What a mean is over, where that is not the seeds of the experiment."""
    count = len(claim.values)
    if claim.repeated == "seed" and count == _seeds(results):
        return ""
    return f", {count} {claim.repeated}{'s' * (count != 1)}"


def _seeds(results: Results) -> int:
    """Number of seeds that most claims of an experiment are means over."""
    counts = Counter(len(claim.values) for claim in results.claims if claim.repeated == "seed")
    return counts.most_common(1)[0][0] if counts else 0


def _experiment(results: Results, page: Path) -> str:
    """One line of an experiment: its command, its number of lines, its time, what differs."""
    count = sum(not claim.ours for claim in results.claims)
    added = len(results.claims) - count
    minutes = results.seconds / 60
    time = f"{results.seconds:.0f} s" if results.seconds < 100 else f"{minutes:.0f} minutes"
    words = [f"- `make {results.experiment}`: {count} line{'s' * (count != 1)}"]
    words += [f"{added} of ours"] * (added > 0)
    words += [f"{_seeds(results)} seeds; {time} on two cores"]
    pictures = sorted((page.parent / "pictures").glob(f"{results.experiment}*.png"))
    words += [f"[{path.stem}]({os.path.join('pictures', path.name)})" for path in pictures]
    return f"{'; '.join(words)}. Differs from the paper: {results.differs.rstrip('.')}."


def _link(paper: str) -> str:
    authors = PAPERS[paper].partition(",")[0]
    return f"{authors} ([{paper}](https://arxiv.org/abs/{paper}))"

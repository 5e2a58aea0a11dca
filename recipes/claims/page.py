"""Claims as a page of Markdown: one table for each paper."""

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from recipes.claims.collect import Collection, experiment_of
from recipes.study import Claim, Share
from recipes.study.claim import Verdict

# Papers in the order in which the page shows them; others follow, by their number.
PAPERS = {
    "2311.05928": "Razzhigaev et al., The Shape of Learning",
    "2401.12143": "Godey et al., Anisotropy Is Inherent to Self-Attention in Transformers",
    "2409.11253": "Yamagiwa and Shimodaira, Norm of Mean Contextualized Embeddings",
    "2506.01034": "Ruppik et al., Less is More",
    "2509.23024": "Li et al., Tracing the Representation Geometry of Language Models",
    "2501.10573": "Viswanathan et al., The Geometry of Tokens",
}
_NUMBER = re.compile(r"\d{4}\.\d{4,5}")
_OTHERS = "Without a paper"

_VERDICTS: tuple[Verdict, ...] = ("agrees", "disagrees", "undecided")
_HEAD = """# The claims, and what was measured here

Every assertion of a paper that an experiment of this repository decides, one line for each: a
sentence that asserts several things is several lines. The mean is over independent repetitions,
with its 95 % interval by Student's t; a share of the repetitions stands before its exact interval,
that of Clopper and Pearson. A claim *agrees* where the whole interval lies within the limits in
square brackets, *disagrees* where the whole interval lies outside, and is *undecided* otherwise.
Limits that a paper does not give are ours. Intervals miss 5 times in 100, so of many lines a few
are wrong. What was published is a shape, or a number of the prose: the papers carry no tables.

`python -m recipes.claims` writes this page from the files `claims.json` that the experiments leave
in `runs/`.
"""


def render(collection: Collection, *, page: Path, top: Path) -> str:
    """Write the page.

    Args:
        collection: Claims, and experiments that were not run.
        page: Path of the page, to which links are relative.
        top: Top of the repository, to which the paths of pictures are relative.
    """
    papers = _by_paper(collection.claims)
    parts = [_HEAD, _summary(collection, papers)]
    for paper, claims in papers.items():
        parts.append(_section(paper, claims, page=page, top=top))
    return "\n".join(parts)


def paper_of(claim: Claim) -> str:
    """Return the number of the paper of a claim at arXiv; "" where its source names none.

    Args:
        claim: A claim.
    """
    match = _NUMBER.search(claim.source)
    return match[0] if match else ""


def _by_paper(claims: Iterable[Claim]) -> dict[str, list[Claim]]:
    papers: dict[str, list[Claim]] = {}
    for claim in claims:
        papers.setdefault(paper_of(claim), []).append(claim)
    known = list(PAPERS)

    def place(paper: str) -> tuple[int, str]:
        return (len(known) + (not paper) if paper not in PAPERS else known.index(paper), paper)

    return {paper: papers[paper] for paper in sorted(papers, key=place)}


def _summary(collection: Collection, papers: dict[str, list[Claim]]) -> str:
    lines = ["| paper | claims | agree | disagree | undecided |", "|---|---:|---:|---:|---:|"]
    lines += [_counts(_link(paper), claims) for paper, claims in papers.items()]
    lines.append(_counts("**all**", collection.claims))
    if collection.missing:
        commands = ", ".join(f"`make {name}`" for name in collection.missing)
        lines += ["", f"Not run: {commands}."]
    return "\n".join([*lines, ""])


def _counts(name: str, claims: Sequence[Claim]) -> str:
    counts: Counter[str] = Counter(claim.verdict for claim in claims)
    return _row([name, str(len(claims)), *(str(counts[verdict]) for verdict in _VERDICTS)])


def _section(paper: str, claims: Sequence[Claim], *, page: Path, top: Path) -> str:
    notes = list(dict.fromkeys(claim.differs for claim in claims if claim.differs))
    lines = [
        f"## {_title(paper)}",
        "",
        "| asserted | published | measured here | mean | verdict | differs |",
        "|---|---|---|---:|---|---|",
    ]
    for claim in claims:
        differs = _letter(notes.index(claim.differs)) if claim.differs else ""
        lines.append(
            _row(
                [
                    claim.asserts,
                    f"{claim.published} ({_place(claim)})",
                    f"{claim.quantity} [{limits(claim)}]",
                    f"{mean_words(claim)}<br>{_repetitions(claim)}",
                    f"**{claim.verdict}**",
                    differs,
                ]
            )
        )
    lines += ["", *_experiments(claims, page=page, top=top)]
    lines += [f"- **{_letter(number)}**: {note.rstrip('.')}." for number, note in enumerate(notes)]
    return "\n".join([*lines, ""])


def _experiments(claims: Sequence[Claim], *, page: Path, top: Path) -> list[str]:
    """One line for each command: its time and its pictures."""
    lines = []
    for command in dict.fromkeys(claim.command for claim in claims):
        own = [claim for claim in claims if claim.command == command]
        times = sorted({claim.seconds for claim in own if math.isfinite(claim.seconds)})
        time = _time(times[-1]) if times else "time not taken"
        names = dict.fromkeys(claim.picture for claim in own if claim.picture)
        pictures = [
            f"[{Path(name).name}]({_relative(top / name, page)})"
            for name in names
            if (top / name).is_file()
        ]
        count = f"{len(own)} line{'s' * (len(own) != 1)}"
        subject = f" ({experiment_of(own[0])})" if experiment_of(own[0]) not in command else ""
        lines.append("; ".join([f"- `{command}`{subject}: {count}", time, *pictures]) + ".")
    return lines


def limits(claim: Claim) -> str:
    """Write where a claim puts the number.

    Args:
        claim: A claim.

    Example:
        >>> words = dict.fromkeys(("asserts", "published", "source", "command", "quantity"), "")
        >>> limits(Claim("a", **words, values=(1.0,), above=0.0, below=2.5))
        '> 0 and < 2.5'
    """
    ends = [
        f"{sign} {end:.3g}"
        for sign, end in ((">", claim.above), ("<", claim.below))
        if end is not None
    ]
    return " and ".join(ends)


def mean_words(claim: Claim) -> str:
    """Write the mean of a claim with its margin, to the digits that the margin leaves.

    Args:
        claim: A claim.

    Example:
        >>> words = dict.fromkeys(("asserts", "published", "source", "command", "quantity"), "")
        >>> mean_words(Claim("a", **words, values=(1.0, 2.0, 3.0), above=0.0))
        '2.0 ± 2.5'
    """
    measured = claim.measured
    if isinstance(measured, Share):
        return f"{measured.mean:.2f} ({measured.low:.2f} to {measured.high:.2f})"
    if not math.isfinite(measured.margin):
        return f"{measured.mean:.3g}, one value"
    if measured.margin == 0:
        return f"{measured.mean:.3g} ± 0"
    digits = 1 - math.floor(math.log10(measured.margin))
    if not 0 <= digits <= 4:
        return f"{measured.mean:.3g} ± {measured.margin:.2g}"
    return f"{measured.mean:.{digits}f} ± {measured.margin:.{digits}f}"


def _repetitions(claim: Claim) -> str:
    count = claim.measured.count
    return f"{count} {claim.repeated}{'s' * (count != 1 and ' ' not in claim.repeated)}"


def _time(seconds: float) -> str:
    minutes = seconds / 60
    words = f"{seconds:.0f} s" if seconds < 100 else f"{minutes:.0f} minutes"
    return f"{words} on two cores"


def _place(claim: Claim) -> str:
    """Section or figure of the paper; the whole source where it names no paper."""
    number = paper_of(claim)
    return claim.source.replace(number, "", 1).strip(" ,:") if number else claim.source


def _title(paper: str) -> str:
    if not paper:
        return _OTHERS
    return f"{PAPERS[paper]} ({paper})" if paper in PAPERS else paper


def _link(paper: str) -> str:
    if not paper:
        return _OTHERS
    name = PAPERS[paper].partition(",")[0] if paper in PAPERS else "arXiv"
    return f"{name} ([{paper}](https://arxiv.org/abs/{paper}))"


def _letter(number: int) -> str:
    return (
        chr(ord("a") + number)
        if number < 26
        else f"{_letter(number // 26 - 1)}{_letter(number % 26)}"
    )


def _relative(path: Path, page: Path) -> str:
    return Path(os.path.relpath(path.resolve(), page.resolve().parent)).as_posix()


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in cells)} |"

"""Article prose from the enwik8 XML dump, with the wiki markup removed.

The cleaning is our own because mwparserfromhell, the library for this job, needs more than eight
seconds for 80 kB of unclosed ``{{a|`` (found by trial) and a prefix of the dump may end inside
anything, while here every step is a single pass over a page.

Vocabulary: a *page* is the wikitext of one article, already freed from the XML escapes; it is
*cut* if the dump ends inside it; a *region* is a stretch of a page from an opening to the closing
that belongs to it, such as ``{{ ... }}``.
"""

import html
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple
from xml.sax.saxutils import unescape

_TITLE_OR_TEXT = re.compile(rb"<title>([^<]*)</title>|<text\b([^<>]*)>")
_NOT_ARTICLES = (
    "category:",
    "help:",
    "image:",
    "media:",
    "mediawiki:",
    "portal:",
    "special:",
    "talk:",
    "template:",
    "user:",
    "wikipedia:",
)
_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)
_CUT_OFF = re.compile(r"(?:<|\[+)[^\[\]<>]*\Z|&[#\w]*\Z|\{+\Z")
_CUT_OFF_REACH = 200
_DROPPED_TAG = re.compile(
    r"<(/?)(ref|math|nowiki|pre|code|source|gallery|timeline|hiero|score|imagemap)\b[^<>]*>",
    re.IGNORECASE,
)
_TEMPLATE = re.compile(r"(?P<open>\{\{)|\}\}")
_TABLE = re.compile(r"(?P<open>\{\|)|^[ \t:]*\|\}", re.MULTILINE)
_HTML_TABLE = re.compile(r"(?P<open><table\b[^<>]*>)|</table\s*>", re.IGNORECASE)
_EXTERNAL_LINK = re.compile(
    r"\[(?:(?:https?|ftp|irc|news|gopher)://|mailto:)[^\s\[\]]*((?:[^\S\n][^\[\]\n]*)?)\]",
    re.IGNORECASE,
)
_INTERNAL_LINK = re.compile(r"\[\[(?!\[)((?:[^\[\]]|\[[^\[\]]*\]|\[(?!\[)|\](?!\]))*+)\]\]")
_LINK_DEPTH = 5
_DROPPED_NAMESPACES = frozenset({"image", "file", "media", "category"})
_LANGUAGE = re.compile(r"(?:[a-z]{2,3}(?:-[a-z]+)*|simple|tokipona)")
_BLOCK_TAG = re.compile(r"</?(?:br|p|div|li|ul|ol|dl|dt|dd|tr|hr|blockquote)\b[^<>]*>", re.I)
_TAG = re.compile(r"</?[a-z][^<>]*>", re.IGNORECASE)
_LEFTOVER = re.compile(
    r"'{2,}|\[\[|\]\]|\{\{|\}\}|\{\|[^\n]*|__[A-Z]+__|~~~+|https?://[^\s<>\[\]]+|&#[0-9]{9,};?"
)
_LOOSE_MARK = re.compile(r"(?<=\() | (?=\)|[,.;:](?:\s|\Z))")
_SPACES = re.compile(r"[^\S\n]+")
_EMPTY_BRACKETS = re.compile(r" (?:\([ ,;:]*\)|\[[ ,;:]*\])")


class _Page(NamedTuple):
    text: str
    cut: bool


def clean(raw: bytes) -> bytes:
    r"""Return the prose of all articles in a prefix of enwik8, as UTF-8.

    Redirects, pages that are no articles, tables, templates, media, code, formulas, references
    and the links to categories and other languages are removed with their content; other links,
    headings, lists and HTML tags leave their text. Articles are separated by one blank line. The
    time taken grows in proportion to the size of ``raw``, which may end anywhere.

    Example:
        >>> clean(b"<title>A</title><text>'''A''' is a [[letter (alphabet)|letter]].</text>")
        b'A is a letter.\n'
    """
    articles = (_clean_page(page) for page in _pages(raw))
    return "\n".join(f"{article}\n" for article in articles if article).encode()


def _pages(raw: bytes) -> Iterator[_Page]:
    """Yield the articles; decoded one by one, since a whole dump as ``str`` takes 4 B a letter."""
    wanted = True
    position = 0
    while match := _TITLE_OR_TEXT.search(raw, position):
        position = match.end()
        if match[1] is not None:
            wanted = not match[1].decode(errors="ignore").lower().startswith(_NOT_ARTICLES)
        elif not match[2].endswith(b"/"):
            end = raw.find(b"</text>", position)
            body = raw[position:] if end < 0 else raw[position:end]
            position += len(body)
            text = unescape(body.decode(errors="ignore"), {"&quot;": '"'})
            if wanted and not text.lstrip().lower().startswith("#redirect"):
                yield _Page(text, cut=end < 0)


def _clean_page(page: _Page) -> str:
    text = _without_broken_end(page.text) if page.cut else page.text
    text = _drop_elements(_COMMENT.sub("", text), cut=page.cut)
    for delimiters in (_TEMPLATE, _TABLE, _HTML_TABLE):
        text = _drop_regions(text, delimiters, cut=page.cut)
    text = _resolve_links(text)
    if page.cut:
        text = text.partition("[[")[0]
    text = _TAG.sub("", _BLOCK_TAG.sub("\n", text))
    text = html.unescape(_LEFTOVER.sub("", text))
    text = _EMPTY_BRACKETS.sub("", _SPACES.sub(" ", text))
    text = _LOOSE_MARK.sub("", text)
    return "\n".join(_tidy(text.splitlines()))


def _without_broken_end(text: str) -> str:
    """Remove half a tag, link or entity at the end; no farther back, to stay linear."""
    return text[:-_CUT_OFF_REACH] + _CUT_OFF.sub("", text[-_CUT_OFF_REACH:])


def _drop_elements(text: str, *, cut: bool) -> str:
    """Remove the elements that hold no prose; of one never closed only the tag goes, later."""
    end_of_cut = len(text) if cut else None
    tags = list(_DROPPED_TAG.finditer(text))
    closing: dict[str, int] = {}
    ends: list[int | None] = []
    for tag in reversed(tags):
        name = tag[2].lower()
        if tag[1]:
            closing[name] = tag.end()
        self_closing = tag[1] or tag[0].endswith("/>")
        ends.append(tag.end() if self_closing else closing.get(name, end_of_cut))
    regions: list[tuple[int, int]] = []
    for tag, end in zip(tags, reversed(ends), strict=True):
        if end is not None and (not regions or tag.start() >= regions[-1][1]):
            regions.append((tag.start(), end))
    return _without(text, regions)


def _drop_regions(text: str, delimiters: re.Pattern[str], *, cut: bool) -> str:
    """Remove nested regions; in a cut page also all that follows an opening without closing."""
    opened: list[int] = []
    regions: list[tuple[int, int]] = []
    for match in delimiters.finditer(text):
        if match["open"]:
            opened.append(match.start())
        elif opened:
            start = opened.pop()
            while regions and regions[-1][0] > start:
                regions.pop()
            regions.append((start, match.end()))
    if cut and opened:
        regions = [region for region in regions if region[0] < opened[0]]
        regions.append((opened[0], len(text)))
    return _without(text, regions)


def _without(text: str, regions: Iterable[tuple[int, int]]) -> str:
    kept = []
    position = 0
    for start, end in regions:
        kept.append(text[position:start])
        position = end
    return "".join([*kept, text[position:]])


def _resolve_links(text: str) -> str:
    """Replace links from the inside out, because the caption of an image may hold links."""
    for _ in range(_LINK_DEPTH):
        text = _EXTERNAL_LINK.sub(lambda match: match[1].strip(), text)
        text, replaced = _INTERNAL_LINK.subn(_link_text, text)
        if not replaced:
            break
    return text


def _link_text(match: re.Match[str]) -> str:
    target, _, label = match[1].partition("|")
    target = target.strip()
    namespace, colon, _ = target.partition(":")
    namespace = namespace.strip()
    if colon and (namespace.lower() in _DROPPED_NAMESPACES or _LANGUAGE.fullmatch(namespace)):
        return ""
    return label or target.lstrip(":#")


def _tidy(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines without markers, no two blank in a row, and no heading without text."""
    headings: list[tuple[int, str]] = []
    blank = False
    started = False
    for raw_line in lines:
        line = raw_line.strip()
        level = _heading_level(line)
        if level:
            headings = [heading for heading in headings if heading[0] < level]
            headings.append((level, line.strip("= ")))
            continue
        line = _without_markers(line)
        if not line:
            blank = True
            continue
        if started and (blank or headings):
            yield ""
        for _, heading in headings:
            yield from (heading, "")
        yield line
        headings, blank, started = [], False, True


def _heading_level(line: str) -> int:
    """Return how many equals signs open the heading, 0 if the line is none."""
    if not (line.startswith("=") and line.endswith("=") and line.strip("= ")):
        return 0
    return len(line) - len(line.lstrip("="))


def _without_markers(line: str) -> str:
    """Strip list markers; empty a row left from a broken table and a line without any letter."""
    row = line.startswith("|") or (line.startswith("!") and "|" in line)
    if row or not any(map(str.isalnum, line)):
        return ""
    return line.lstrip("*#:;= ").strip()

import os
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.enwik8.clean import clean
from recipes.enwik8.data import load

needs_enwik8 = pytest.mark.skipif(
    not os.environ.get("ENWIK8"), reason="ENWIK8 does not name a prefix of enwik8"
)


def _page(wikitext: str, title: str = "Title") -> bytes:
    escaped = wikitext.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    escaped = escaped.replace('"', "&quot;")
    return (
        f"  <page>\n    <title>{title}</title>\n    <id>1</id>\n    <revision>\n"
        f"      <comment>not prose</comment>\n"
        f'      <text xml:space="preserve">{escaped}</text>\n    </revision>\n  </page>\n'
    ).encode()


def _cleaned(wikitext: str) -> str:
    return clean(_page(wikitext)).decode()


@pytest.mark.parametrize(
    ("wikitext", "prose"),
    [
        ("a [[letter]].", "a letter."),
        ("a [[letter (alphabet)|letter]].", "a letter."),
        ("[[bus]]es and [[:Category:Birds]]", "buses and Category:Birds"),
        ("see [http://example.org the site] or [http://example.org]!", "see the site or !"),
        ("at http://example.org/a?b=c today", "at today"),
        ("'''''Both''''', '''bold''' and ''italic''", "Both, bold and italic"),
        ("== History ==\nLong ago.", "History\n\nLong ago."),
        ("* one\n** two\n# three\n: four\n;five", "one\ntwo\nthree\nfour\nfive"),
        ("before<!-- a [[comment]] {{ -->after", "beforeafter"),
        ('fact<ref name="a">a [[source]]</ref>.<ref name=a /> End', "fact. End"),
        ("so <math>{{x}^{2}}</math> holds", "so holds"),
        ("use <nowiki>[[raw]]</nowiki><code>x = 1</code> here", "use here"),
        ("kept <pre> never closed", "kept never closed"),
        ("a {{cite|b {{c|d}} e}} f", "a f"),
        ("a {{lost b {{c}} d", "a lost b d"),
        ("top\n{| class=x\n|-\n| a || {|\n| b\n|}\n|}\nend", "top\n\nend"),
        ("top\n<table><tr><td><table>a</table></td></tr></table>end", "top\nend"),
        ("top\n{| class=x\n| row\n|-\n! a | b\nend", "top\n\nend"),
        ("[[Image:a.jpg|thumb|A [[cat]], by [[Me|me]] [http://x here] [sic]]]text", "text"),
        ("text\n[[Category:Birds]]\n[[de:Vogel]]\n[[zh-min-nan:Chiau]]", "text"),
        ("[[2001: A Space Odyssey]]", "2001: A Space Odyssey"),
        ('H<sub>2</sub>O is <font color="red">wet</font>,<br/>very', "H2O is wet,\nvery"),
        ("1&nbsp;km &ndash; caf&eacute; &#8211; &lt;b&gt; &amp;", "1 km – café – <b> &"),
        ("&#" + "9" * 5000 + ";x", "x"),
        ("Rome ({{lang|la}}) is old , very old ( really )", "Rome is old, very old (really)"),
        ("a  \t b\n\n\n\nc\n----\nd __NOTOC__", "a b\n\nc\n\nd"),
    ],
)
def test_markup_becomes_prose(wikitext: str, prose: str) -> None:
    assert _cleaned(wikitext) == f"{prose}\n"


def test_a_dump_that_ends_anywhere_leaves_no_broken_markup() -> None:
    page = _page(
        "Start é [[a|b]] {{t|{{u}}}} x\n{|\n| c\n|}\n[[Image:a|b [[c]] d]] <ref>r</ref> "
        "y &ndash; z <math>m</math> [http://example.org e] <b>f</b> <!-- g -->\n== H ==\nend"
    )
    for length in range(len(page)):
        text = clean(page[:length]).decode()
        assert not re.search(r"\[|\]|[{}|<>&=#]|Image|ndash", text), text
        assert "Start".startswith(text[:5].strip())


@given(st.binary() | st.text("[]{}|<>/!-='*:#&;ab \n").map(_page))
@settings(max_examples=300, deadline=None)
def test_any_input_gives_utf8(raw: bytes) -> None:
    for dump in (raw, raw[: len(raw) // 2], b"<title>T</title><text>" + raw):
        text = clean(dump).decode()
        assert "\n\n\n" not in text


@pytest.mark.parametrize(
    "fragment",
    [
        "[[", "[[a|", "]]", "{{", "{{a|", "}}", "{|\n", "\n|}", "<ref>", "<ref", "</ref><ref>",
        "<table>", "<!--", "<!-- -->", "[http://a", "[http://a ", "'''''", "''a ", "==a\n", "==",
        "& ", "&#1", "(", " ( ,", "{{{", "__A", "[", "a[b", "<", "<br ", " \t", "\n*", "https://",
        "{{a|[[b|''c<ref>{|\n|-\n| ", "[[" + "[x] " * 50,
    ],
)  # fmt: skip
def test_time_grows_linearly(fragment: str) -> None:
    page = _page(fragment * (400_000 // len(fragment)))
    cut = page[: page.index(b"</text>")]
    start = time.process_time()
    clean(page)
    clean(cut)
    assert time.process_time() - start < 5  # about 0.5 s at most; quadratic takes minutes


@needs_enwik8
def test_enwik8_becomes_prose() -> None:
    corpus = load(text="clean")
    text = corpus.decode(corpus.train)
    share = 1_000_000 / len(text)
    assert "bytes of prose after cleaning" in corpus.source
    for markup in ("[[", "]]", "{{", "}}", "''", "&nbsp;", "&quot;", "http://", "</", "|-"):
        assert text.count(markup) * share < 3, markup
    letters = sum(character.isalpha() or character == " " for character in text)
    assert letters / len(text) > 0.9
    assert 5 < len(text) / len(re.findall(r"\w+", text)) < 7  # a word, a space, some commas
    assert " the Academy" in text

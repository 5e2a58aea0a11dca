"""Texts that recipes train on: files, the download, Python's own text, and their forms."""

import bz2
import gzip
import html
import io
import json
import lzma
import re
import sysconfig
import zipfile
from email.message import Message
from pathlib import Path

import numpy as np
import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

from recipes.enwik8 import subwords
from recipes.enwik8 import text as module
from recipes.enwik8.subwords import encode, free_licence, installed_text, load_tokens
from recipes.enwik8.text import InputError, carried_text, characters, load, prose_of

CARRIED = b"text that Python carries\n" * 10_000
# Bytes that no compression shortens.
RAW = np.random.default_rng(0).integers(32, 127, 300_000, dtype=np.uint8).tobytes()


def zip_of(**files: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


ZIPPED = zip_of(enwik8=RAW)


@pytest.fixture(autouse=True)
def _no_other_text(tmp_path, monkeypatch):
    monkeypatch.delenv("ENWIK8", raising=False)
    monkeypatch.setenv("GEOMON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def joined(text):
    return np.concatenate([text.train, text.validation])


# -- characters ------------------------------------------------------------------------------------


@given(st.binary(min_size=1, max_size=300))
def test_ids_number_the_bytes_in_ascending_order(raw):
    text = characters(raw, "somewhere")
    symbols = bytes(sorted(set(raw)))
    ids = joined(text).tolist()
    assert bytes(symbols[index] for index in ids) == raw[: len(raw) * 95 // 100]
    assert text.vocabulary == len(symbols)
    assert len(text.train) == len(raw) * 90 // 100


@pytest.mark.parametrize(
    "pack",
    [bytes, gzip.compress, bz2.compress, lzma.compress, lambda raw: zip_of(anything=raw)],
    ids=["plain", "gzip", "bzip2", "xz", "zip"],
)
def test_a_file_is_read_however_packed_and_named(pack, tmp_path, monkeypatch):
    path = tmp_path / "misleading.zip"
    path.write_bytes(pack(RAW))
    text = load(path)
    assert text.sha256() == characters(RAW, "").sha256()
    assert text.source == f"text, 300,000 bytes, from {path}"
    monkeypatch.setenv("ENWIK8", str(path))
    assert load().sha256() == text.sha256()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "too short: text, 0 bytes"),
        (RAW[:199_999], "too short: .*give a text of at least 200,000 bytes"),
        (gzip.compress(RAW)[:-1000], "cannot be read"),
        (bz2.compress(RAW)[:-1000], "cannot be read"),
        (lzma.compress(RAW)[:-1000], "cannot be read"),
        (ZIPPED[:-1000], "cannot be read"),
        (ZIPPED[:9000] + b"\0" + ZIPPED[9001:], "cannot be read"),
        (zip_of(enwik8=RAW, readme=b"text"), "cannot be read"),
        (zip_of(), "cannot be read"),
        (None, "cannot be read"),
    ],
    ids=lambda value: "file" if isinstance(value, bytes) else value,
)
def test_a_file_that_cannot_be_used_is_an_error(content, message, tmp_path):
    path = tmp_path / "enwik8"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_enwik8_is_known_by_its_hash(tmp_path, monkeypatch):
    path = tmp_path / "enwik8"
    path.write_bytes(RAW)
    monkeypatch.setattr(module, "SHA1", module.hashlib.sha1(RAW).hexdigest())
    assert load(path).source.startswith("enwik8, all 300,000 bytes, from ")


# -- the download ----------------------------------------------------------------------------------


@pytest.fixture
def answers(monkeypatch):
    """Answers of the server, one after another: a file, or an error."""
    given = []

    def download(url, file, pooch):
        answer = given.pop(0)
        if isinstance(answer, Exception):
            raise answer
        Path(file).write_bytes(answer)

    monkeypatch.setattr(module, "SHA1", module.hashlib.sha1(RAW).hexdigest())
    monkeypatch.setattr(module, "carried_text", lambda: CARRIED)
    monkeypatch.setattr("pooch.HTTPDownloader", lambda **options: download)
    return given


DAMAGED = r"what http.* gave is not enwik8 .*: try again, or set ENWIK8 to a copy of it"
CARRIES = r"text that Python .*, 250,000 bytes; not enwik8, since .* \({}\)".format


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (ZIPPED, "enwik8, all 300,000 bytes"),
        (b"<html>Sign in</html>", DAMAGED),
        (zip_of(enwik8=RAW[:-1] + b"\0"), DAMAGED),
        (zip_of(a=RAW, b=RAW), DAMAGED),
        (requests.HTTPError(), CARRIES("HTTPError")),
        (requests.ConnectionError(), CARRIES("ConnectionError")),
    ],
    ids=["enwik8", "page", "other", "two files", "server", "network"],
)
def test_enwik8_alone_is_kept_of_what_the_server_gives(answers, answer, words, tmp_path):
    answers += [answer, ZIPPED]
    try:
        said = load().source
    except InputError as error:
        said = str(error)
    assert re.fullmatch(words, said)
    assert load().sha256() == characters(RAW, "").sha256()
    assert len(answers) == (answer is ZIPPED)  # what is kept is not asked for again
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["enwik8.zip"]


# -- what Python carries ---------------------------------------------------------------------------


def write(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def test_docstrings_come_once_in_a_fixed_order_and_nothing_is_imported(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(tmp_path)}.__getitem__)
    monkeypatch.setitem(module.sys.modules, "pydoc_data.topics", None)  # cannot be imported
    files = {
        "b.py": '"""Module b."""\nraise RuntimeError("imported")\n',
        "a.py": '"""Module a.\n\n    Indented.\n    """\ndef f():\n    "In f."\n',
        "c.py": '"""Module b."""\n',
        "broken.py": "def def\n",
        "escape.py": '"""Other \\d."""\n',
        "package/c.py": 'class C:\n    """In C."""\n    def g(self):\n        1\n',
        **dict.fromkeys(
            ("test/d.py", "x/tests/d.py", "site-packages/d.py", "idlelib/idle_test/d.py"),
            '"""Skipped."""\n',
        ),
    }
    for name, content in files.items():
        write(tmp_path / name, content)
    alone = b"Module a.\n\nIndented.\n\n\nIn f.\n\n\nModule b.\n\n\nOther \\d.\n\n\nIn C."
    assert carried_text() == alone
    monkeypatch.delitem(module.sys.modules, "pydoc_data.topics")
    assert carried_text().endswith(b"\n\n\n" + alone)


# -- prose -----------------------------------------------------------------------------------------


def page(wikitext: str, title: str = "Title") -> bytes:
    return (
        f"  <page>\n    <title>{title}</title>\n    <id>1</id>\n    <revision>\n"
        f"      <comment>not prose</comment>\n"
        f'      <text xml:space="preserve">{html.escape(wikitext, quote=True)}</text>\n'
        "    </revision>\n  </page>\n"
    ).encode()


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
        ("Text.\n== A ==\n=== B ===\n== C ==\nLong ago.\n== End ==", "Text.\n\nC\n\nLong ago."),
        ("* one\n** two\n# three\n: four\n;five", "one\ntwo\nthree\nfour\nfive"),
        ("before<!-- a [[comment]] {{ -->after", "beforeafter"),
        ('fact<ref name="a">a [[source]]</ref>.<ref name=a /> End', "fact. End"),
        ("so <math>{{x}^{2}}</math> holds", "so holds"),
        ("use <nowiki>[[raw]]</nowiki><code>x = 1</code> here", "use here"),
        ("kept <pre> never closed", "kept never closed"),
        ("a {{cite|b {{c|d}} e}} f", "a f"),
        ("top\n{| class=x\n|-\n| a || {|\n| b\n|}\n|}\nend", "top\n\nend"),
        ("top\n<table><tr><td><table>a</table></td></tr></table>end", "top\nend"),
        ("top\n{| class=x\n| row\n|-\n! a | b\nend", "top\n\nend"),
        ("[[Image:a.jpg|thumb|A [[cat]], by [[Me|me]] [http://x here] [sic]]]text", "text"),
        ("text\n[[Category:Birds]]\n[[de:Vogel]]\n[[zh-min-nan:Chiau]]", "text"),
        ("[[2001: A Space Odyssey]]", "2001: A Space Odyssey"),
        ('H<sub>2</sub>O is <font color="red">wet</font>,<br/>very', "H2O is wet,\nvery"),
        ("1&nbsp;km &ndash; caf&eacute; &#8211; &lt;b&gt; &amp;", "1 km – café – <b> &"),
        ("Rome ({{lang|la}}) is old , very old ( really )", "Rome is old, very old (really)"),
        ("a  \t b\n\n\n\nc\n----\nd __NOTOC__", "a b\n\nc\n\nd"),
    ],
)
def test_markup_becomes_prose(wikitext, prose):
    assert prose_of(page(wikitext)).decode() == f"{prose}\n"


def test_whole_articles_alone_are_taken(tmp_path):
    dump = b"<mediawiki>" + b"".join(
        [page("One. " * 50_000), page("#REDIRECT [[a]]"), page("no", "Talk:One"), page("cut")[:-60]]
    )
    assert prose_of(dump) == b"One. " * 49_999 + b"One.\n"
    (tmp_path / "dump").write_bytes(dump)
    text = load(tmp_path / "dump", clean=True)
    assert text.source.endswith("; 250,000 bytes of prose after cleaning")


# -- subwords --------------------------------------------------------------------------------------

WORDS = "geometry moné dimension 日本 of the a training\n"
# The first line is longer than the pieces into which a text is cut.
TEXT = ("y" * 90_000 + "".join(f"{WORDS}{number} " for number in range(4000))).encode()


def loaded(folder, data, *, keeps=False):
    return load_tokens(data, vocabulary=300, clean=False, folder=folder / "text", keeps=keeps)


def test_subwords_give_the_text_back_and_are_kept(tmp_path):
    (tmp_path / "data").write_bytes(TEXT)
    text = loaded(tmp_path, tmp_path / "data")
    tokenizer = subwords.Tokenizer.from_file(str(tmp_path / "text" / "tokenizer.json"))
    found = [tokenizer.decode(part.tolist()).encode() for part in (text.train, text.validation)]
    assert TEXT.startswith(b"".join(found))
    lengths = [len(part) / len(TEXT) for part in found]
    assert lengths == pytest.approx([0.9, 0.05], abs=1e-5)
    assert (text.vocabulary, text.train.dtype) == (300, np.uint16)
    assert text.bytes_per_token == pytest.approx(len(found[1]) / len(text.validation))
    kept = loaded(tmp_path, None, keeps=True)
    assert (kept.source, kept.sha256(), kept.bytes_per_token) == (
        text.source, text.sha256(), text.bytes_per_token,
    )  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return subwords.train_tokenizer(TEXT[:10_000], 280)


@given(text=st.text())
def test_text_that_the_vocabulary_has_not_seen_comes_back(tokenizer, text):
    assert tokenizer.decode(encode(tokenizer, text.encode()).tolist()) == text


def install(folder: Path, name: str, licence: str, **files: bytes) -> None:
    """Lay down a distribution as an installer does; `__` in a name stands for a dot."""
    about = f"{name}-1.0.dist-info"
    metadata = f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.0\n{licence}\n"
    laid = {f"{about}/METADATA": metadata, f"{about}/LICENSE.txt": b"the licence itself"}
    laid |= {f"{name}/{file.replace('__', '.')}": content for file, content in files.items()}
    laid[f"{about}/RECORD"] = "".join(f"{path},,\n" for path in laid)
    for path, content in laid.items():
        write(folder / path, content)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A library and packages of the test's own."""
    write(tmp_path / "library" / "abc.py", "of the standard library")
    write(tmp_path / "library" / "site-packages" / "other.py", "of no package")
    folder = tmp_path / "site"
    install(folder, "first", "License-Expression: MIT", a__py=b"a = 1\n", b__md=b"\n# B\n\n")
    install(
        folder, "second", "License: BSD", same__py=b"a = 1\n", c__rst=b"C\n=", d__pyi=b"d: int",
        e__txt="é".encode(), blank__py=b" \n", binary__txt=b"a\0b", latin__txt=b"\xe9",
        large__txt=b"7 " * 500_001, f__json=b"{}", g__so=b"code",
    )  # fmt: skip
    install(folder, "third", "License-Expression: LicenseRef-Proprietary", h__py=b"closed")
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(tmp_path / "library")}.__getitem__)
    monkeypatch.setattr(subwords.sys, "path", [str(folder)])
    return folder


def test_text_of_packages_with_a_free_licence_is_taken_once(site, tmp_path, monkeypatch):
    raw, licences = installed_text()
    assert sorted(raw.split(b"\n\n\n")) == sorted(
        [b"of the standard library", b"a = 1", b"# B", b"C\n=", b"d: int", "é".encode()]
    )
    assert {name.split(" ")[0]: licence for name, licence in licences.items()} == {
        "Python": "PSF-2.0", "first": "MIT", "second": "BSD", "third": None,
    }  # fmt: skip
    monkeypatch.setattr(subwords, "LIMIT", 30)
    short, _ = installed_text()
    assert len(short) <= 30
    assert raw.startswith(short)
    monkeypatch.setattr(subwords, "LIMIT", 10**6)
    write(site / "first" / "a.py", TEXT)
    text, listed = loaded(tmp_path, None), tmp_path / "text" / "licences.json"
    assert json.loads(listed.read_text()) == licences
    assert text.source.endswith(f"from 3 packages whose licences {listed} names")


@pytest.mark.parametrize(
    ("fields", "licence"),
    [
        ({"License-Expression": "MIT"}, "MIT"),
        ({"License-Expression": "BSD-2-Clause AND (MIT OR X11)"}, "BSD-2-Clause AND (MIT OR X11)"),
        ({"License-Expression": "MIT WITH LLVM-exception"}, "MIT WITH LLVM-exception"),
        ({"License-Expression": "MIT AND LicenseRef-Proprietary"}, None),
        ({"License-Expression": "LicenseRef-Limited"}, None),
        ({"License-Expression": "BUSL-1.1"}, None),
        ({"Classifier": "License :: OSI Approved :: MIT License"}, "MIT License"),
        ({"Classifier": "License :: Other/Proprietary License", "License": "MIT"}, None),
        ({"Classifier": "Programming Language :: Python"}, None),
        ({"License": "Apache 2.0 License"}, "Apache 2.0 License"),
        ({"License": "MIT License\n\nPermission is hereby granted, and so on"}, "MIT License"),
        ({"License": "Copyright of somebody: he permits what the MIT licence permits, " * 4}, None),
        ({"License": "NVIDIA Proprietary Software"}, None),
        ({"License": "UNKNOWN"}, None),
        ({}, None),
    ],
)
def test_free_licences_are_known_by_their_names(fields, licence):
    metadata = Message()
    for name, value in fields.items():
        metadata[name] = value
    assert free_licence(metadata) == licence

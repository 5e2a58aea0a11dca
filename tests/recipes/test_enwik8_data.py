import bz2
import functools
import gzip
import hashlib
import io
import lzma
import multiprocessing
import os
import re
import socket
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.enwik8 import data as module
from recipes.enwik8.data import Corpus, DataError, Published, load

needs_enwik8 = pytest.mark.skipif(
    not os.environ.get("ENWIK8"), reason="ENWIK8 does not name a prefix of enwik8"
)
ENWIK8_FILE = os.environ.get("ENWIK8", "")
MIB = 1 << 20
CARRIED = b"text that Python carries\n" * 10_000


def _published(raw: bytes) -> Published:
    return Published(
        size=len(raw),
        sha1=hashlib.sha1(raw).hexdigest(),
        mebibyte_sha256=hashlib.sha256(raw[:MIB]).hexdigest(),
    )


def _zip(**files: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


# The published file of these tests: bytes that no compression shortens, with two MiB to check.
RAW = np.random.default_rng(0).integers(32, 127, 2 * MIB, dtype=np.uint8).tobytes()
SHORT = RAW[: MIB // 4]  # packed while tests are collected, by every process
PUBLISHED = _published(RAW)
ZIPPED = _zip(enwik8=RAW)
load_small = functools.partial(load, published=PUBLISHED)


class Server(ThreadingHTTPServer):
    """Serves one body, and keeps what it was asked for and how much it sent."""

    bodies: list[bytes]  # one for each request, the last for all that follow
    ranges: list[str | None]
    sent: int = 0
    status: int = 0
    honours_ranges: bool = True
    breaks_after: int | None = None
    delay: float = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/enwik8.zip"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        server = self.server
        wanted = self.headers["Range"]
        server.ranges.append(wanted)
        body = server.bodies.pop(0) if len(server.bodies) > 1 else server.bodies[0]
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
        if server.status:
            self._answer(server.status, b"")
        elif not wanted or not server.honours_ranges:
            self._answer(200, body)
        elif start >= len(body):
            self._answer(416, b"")
        else:
            self._answer(206, body[start:], f"bytes {start}-{len(body) - 1}/{len(body)}")

    def _answer(self, status: int, body: bytes, content_range: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if content_range:
            self.send_header("Content-Range", content_range)
        self.end_headers()
        time.sleep(self.server.delay)
        body = body[: self.server.breaks_after]
        self.server.sent += len(body)
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with Server(("127.0.0.1", 0), Handler) as made:
        made.bodies, made.ranges = [ZIPPED], []
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def _no_other_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ENWIK8", raising=False)
    monkeypatch.setenv("GEOMON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "builtin_text", lambda: CARRIED)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def refusing_url() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    return f"http://127.0.0.1:{port}/enwik8.zip"


def _bytes(corpus: Corpus) -> bytes:
    ids = np.concatenate([corpus.train, corpus.validation, corpus.test])
    return bytes(corpus.symbols[index] for index in ids.tolist())


def _error(action: Callable[[], object]) -> str:
    """Return the message of the DataError, which has to be one line."""
    with pytest.raises(DataError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@given(st.binary(min_size=1, max_size=300))
def test_ids_and_symbols_give_the_bytes_back(raw: bytes) -> None:
    corpus = module._corpus(raw, "somewhere")
    assert _bytes(corpus) == raw
    assert corpus.symbols == bytes(sorted(set(raw)))
    assert corpus.vocabulary_size == len(set(raw))
    assert len(corpus.train) == len(raw) * 90 // 100
    assert abs(len(corpus.validation) - len(corpus.test)) <= 1


def test_ids_are_writable_vectors_of_bytes() -> None:
    corpus = module._corpus(RAW, "somewhere")
    for part in (corpus.train, corpus.validation, corpus.test):
        assert part.dtype == np.uint8
        assert part.ndim == 1
        assert part.flags.writeable  # torch.from_numpy warns of an array that is not


def test_decode_shows_broken_utf8_as_replacement() -> None:
    corpus = module._corpus("aé".encode(), "somewhere")
    assert corpus.decode([0, 2, 1]) == "aé"
    assert corpus.decode(np.array([0, 2], np.uint8)) == "a\N{REPLACEMENT CHARACTER}"
    assert corpus.decode([]) == ""


def test_split_of_clean_text_is_that_of_the_cleaned_bytes(tmp_path: Path) -> None:
    dump = b"<mediawiki><page><title>A</title><text>'''A''' is {{so}} a [[letter]].</text></page>"
    path = tmp_path / "dump"
    path.write_bytes(dump)
    corpus = load(path, text="clean", minimum=1, published=_published(dump))
    assert _bytes(corpus) == b"A is a letter.\n"
    assert len(corpus.train) == 13
    assert f"all {len(dump)} bytes" in corpus.source
    assert "15 bytes of prose" in corpus.source


@pytest.mark.parametrize(
    "pack",
    [bytes, gzip.compress, bz2.compress, lzma.compress, lambda raw: _zip(anything=raw)],
    ids=["plain", "gzip", "bzip2", "xz", "zip"],
)
@pytest.mark.parametrize("size", [300_000, MIB + 10, 2 * MIB])
def test_file_is_read_however_packed_and_named(
    pack: Callable[[bytes], bytes], size: int, tmp_path: Path
) -> None:
    path = tmp_path / "misleading.zip"
    path.write_bytes(pack(RAW[:size]))
    corpus = load_small(path)
    assert _bytes(corpus) == RAW[:size]
    known = {300_000: "text,", len(RAW): "enwik8, all"}.get(size, "enwik8, the first")
    assert corpus.source.startswith(f"{known} {size:,} bytes, from ")
    assert str(path) in corpus.source


def test_environment_names_the_file_unless_the_argument_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for size in (300_000, 400_000):
        (tmp_path / str(size)).write_bytes(RAW[:size])
    monkeypatch.setenv("ENWIK8", str(tmp_path / "300000"))
    assert "300,000 bytes, from ENWIK8=" in load_small().source
    assert "400,000 bytes" in load_small(str(tmp_path / "400000")).source


def test_bad_environment_is_an_error_and_an_empty_one_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, refusing_url: str
) -> None:
    monkeypatch.setenv("ENWIK8", str(tmp_path / "missing"))
    assert re.search(r"ENWIK8=.*missing does not exist", _error(load_small))
    monkeypatch.setenv("ENWIK8", "")
    assert _bytes(load_small(url=refusing_url)) == CARRIED


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "too short: text, 0 bytes"),
        (gzip.compress(SHORT)[:-1000], "cannot read .* as gzip data"),
        (bz2.compress(SHORT)[:-1000], "cannot read .* as bzip2 data"),
        (lzma.compress(SHORT)[:-1000], "cannot read .* as xz data"),
        (ZIPPED[:-1000], "cannot read .* as zip data"),
        (ZIPPED[:9000] + b"\0" + ZIPPED[9001:], "cannot read .* as zip data"),
        (_zip(enwik8=RAW, readme=b"text"), "is a zip of 2 files; expected exactly one"),
        (_zip(), "is a zip of 0 files"),
        (RAW[:199_999], "too short: .* expected at least 200,000 bytes"),
    ],
    # Not the content, which gzip dates: all processes must name the tests alike.
    ids=lambda value: "file" if isinstance(value, bytes) else value,
)
def test_unusable_file_is_an_error(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "enwik8"
    path.write_bytes(content)
    error = _error(lambda: load_small(path))
    assert re.search(message, error)
    assert str(path) in error


def test_folder_missing_file_and_unknown_text_are_errors(tmp_path: Path) -> None:
    assert "is a folder; give a file" in _error(lambda: load_small(tmp_path))
    assert "does not exist" in _error(lambda: load_small(tmp_path / "none"))
    assert "text='words' is unknown" in _error(lambda: load(text="words"))  # type: ignore[arg-type]


def test_file_without_permission_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    path = tmp_path / "enwik8"
    path.write_bytes(RAW)
    monkeypatch.setattr(Path, "open", refuse)  # root may read every file
    error = _error(lambda: load_small(path))
    assert re.search("cannot read .*Permission denied", error)


def test_nothing_left_after_cleaning_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "enwik8"
    path.write_bytes(b"<mediawiki>" + RAW)
    assert "too short" in _error(lambda: load_small(path, text="clean", minimum=0))


def test_downloads_once_and_then_reads_the_cache(server: Server, cache: Path) -> None:
    first = load_small(url=server.url)
    second = load_small(url=server.url)
    assert _bytes(first) == _bytes(second) == RAW
    assert server.ranges == [None]
    assert server.sent == len(ZIPPED)
    assert first.source == f"enwik8, all {len(RAW):,} bytes, from {cache / 'enwik8'}"
    assert {path.name for path in cache.iterdir()} <= {"enwik8", "enwik8.lock"}


def test_argument_names_another_cache(server: Server, cache: Path, tmp_path: Path) -> None:
    load_small(url=server.url, cache=tmp_path / "other" / "folder")
    assert (tmp_path / "other" / "folder" / "enwik8").read_bytes() == RAW
    assert not cache.exists()


def test_damaged_cache_is_downloaded_again(server: Server, cache: Path) -> None:
    cache.mkdir()
    (cache / "enwik8").write_bytes(RAW[:-1] + b"\0")
    assert _bytes(load_small(url=server.url)) == RAW
    assert (cache / "enwik8").read_bytes() == RAW


def test_partial_download_is_resumed(server: Server, cache: Path) -> None:
    cache.mkdir()
    (cache / "enwik8.zip.part").write_bytes(ZIPPED[:MIB])
    assert _bytes(load_small(url=server.url)) == RAW
    assert server.ranges == [f"bytes={MIB}-"]
    assert server.sent == len(ZIPPED) - MIB


def test_download_that_broke_off_is_resumed_by_the_next(server: Server, cache: Path) -> None:
    server.breaks_after = MIB
    broken = load_small(url=server.url)
    assert _bytes(broken) == CARRIED
    assert "the connection broke off" in broken.source
    received = (cache / "enwik8.zip.part").stat().st_size
    assert 0 < received <= MIB
    server.breaks_after = None
    assert _bytes(load_small(url=server.url)) == RAW
    assert server.ranges == [None, f"bytes={received}-"]


def test_server_that_ignores_ranges_starts_again(server: Server, cache: Path) -> None:
    body = gzip.compress(RAW)  # a zip bears the partial file in front of it
    server.bodies = [body]
    server.honours_ranges = False
    cache.mkdir()
    (cache / "enwik8.zip.part").write_bytes(body[:MIB])
    assert _bytes(load_small(url=server.url)) == RAW
    assert server.ranges == [f"bytes={MIB}-", None]
    assert server.sent == 2 * len(body)


@pytest.mark.parametrize(("part", "sent"), [(ZIPPED, 0), (b"x" * len(ZIPPED), len(ZIPPED))])
def test_range_beyond_the_end(server: Server, cache: Path, part: bytes, sent: int) -> None:
    cache.mkdir()
    (cache / "enwik8.zip.part").write_bytes(part)
    assert _bytes(load_small(url=server.url)) == RAW
    assert server.ranges[0] == f"bytes={len(ZIPPED)}-"
    assert server.sent == sent


@pytest.mark.parametrize(
    "damaged",
    [b"<html>Sign in</html>", _zip(enwik8=RAW[:-1] + b"\0"), _zip(a=RAW, b=RAW)],
    ids=["page", "content", "files"],
)
def test_damaged_download_is_fetched_once_more(server: Server, cache: Path, damaged: bytes) -> None:
    server.bodies = [damaged, ZIPPED]
    assert _bytes(load_small(url=server.url)) == RAW
    assert server.ranges == [None, None]
    assert (cache / "enwik8").read_bytes() == RAW


def test_download_damaged_twice_is_an_error(server: Server, cache: Path) -> None:
    server.bodies = [_zip(enwik8=RAW[:-1] + b"\0")]
    error = _error(lambda: load_small(url=server.url))
    assert re.search(r"downloaded twice: .*not the sha1 \w{40} of .*; or .* ENWIK8", error)
    assert PUBLISHED.sha1 in error
    assert server.ranges == [None, None]
    assert {path.name for path in cache.iterdir()} <= {"enwik8.lock"}


def test_two_processes_download_once(server: Server) -> None:
    server.delay = 1.5  # longer than the other process needs to arrive
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(1) as one, spawn.Pool(1) as other:
        pending = [
            pool.apply_async(load, kwds={"url": server.url, "published": PUBLISHED})
            for pool in (one, other)
        ]
        corpora = [result.get(timeout=200) for result in pending]
    assert [_bytes(corpus) for corpus in corpora] == [RAW, RAW]
    assert server.ranges == [None]
    assert server.sent == len(ZIPPED)


@pytest.mark.parametrize("status", [404, 500, 503])
def test_error_of_the_server_leads_to_the_fallback(server: Server, status: int) -> None:
    server.status = status
    corpus = load_small(url=server.url)
    assert _bytes(corpus) == CARRIED
    assert corpus.source.endswith(f"could not be downloaded: the server answered {status}")


@pytest.mark.parametrize("text", ["bytes", "clean"])
def test_refused_connection_leads_quickly_to_the_fallback(
    refusing_url: str, text: module.Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    connect = socket.socket.connect
    monkeypatch.setattr(socket.socket, "connect", lambda s, to: (asked.append(to), connect(s, to)))
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"waits for {seconds} s"))
    corpus = load_small(url=refusing_url, text=text)
    assert len(asked) == 1  # it is asked once, and nothing waits for another answer
    assert _bytes(corpus) == CARRIED
    assert corpus.source.startswith("text that Python")
    assert f"{len(CARRIED):,} bytes; not enwik8, since {refusing_url}" in corpus.source
    assert corpus.source.endswith("no connection")


def test_short_fallback_is_an_error(refusing_url: str) -> None:
    error = _error(lambda: load_small(url=refusing_url, minimum=len(CARRIED) + 1))
    assert "too short: text that Python" in error


def test_cache_that_cannot_be_written_is_an_error(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    error = _error(lambda: load_small(url=server.url, cache=tmp_path / "file" / "cache"))
    assert re.search(r"cannot keep enwik8 in .*file.cache .*; set GEOMON_CACHE", error)


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_shows_on_a_terminal_only(
    server: Server, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr(stderr, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(sys, "stderr", stderr)
    load_small(url=server.url)
    assert ("100%" in stderr.getvalue()) == terminal


@needs_enwik8
def test_enwik8_is_recognised() -> None:
    corpus = load(ENWIK8_FILE)
    assert corpus.source.startswith("enwik8, ")
    assert corpus.decode(corpus.train[:10]) == "<mediawiki"
    size = len(_bytes(corpus))
    assert corpus.vocabulary_size <= 205
    assert corpus.vocabulary_size == 205 or size < module.ENWIK8.size


@pytest.mark.parametrize("text", ["bytes", "clean"])
def test_any_text_is_taken_and_called_what_it_is(text: module.Text, tmp_path: Path) -> None:
    path = tmp_path / "shakespeare.txt"
    path.write_bytes(b"To be, or not to be, that is the question.\n" * 5_000)
    corpus = load(path, text=text)
    assert _bytes(corpus)[:9] == b"To be, or"
    assert corpus.source.startswith(f"text, {43 * 5_000:,} bytes, from {path}")


def test_of_a_longer_text_the_beginning_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "long"
    path.write_bytes(RAW[::-1] + b"the rest")
    assert _bytes(load_small(path)) == RAW[::-1]


@needs_enwik8
def test_a_changed_enwik8_is_not_called_by_its_name(tmp_path: Path) -> None:
    raw = _bytes(load(ENWIK8_FILE))[: MIB + 9]
    path = tmp_path / "prefix"
    path.write_bytes(b"<" + raw[:-1])
    assert load(path).source.startswith("text, ")

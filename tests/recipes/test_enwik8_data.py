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
    corpus = module.corpus_of(raw, "somewhere")
    assert _bytes(corpus) == raw
    assert corpus.symbols == bytes(sorted(set(raw)))
    assert corpus.vocabulary_size == len(set(raw))
    assert len(corpus.train) == len(raw) * 90 // 100
    assert abs(len(corpus.validation) - len(corpus.test)) <= 1


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


def test_downloads_once_and_then_reads_the_cache(server: Server, cache: Path) -> None:
    first = load_small(url=server.url)
    second = load_small(url=server.url)
    assert _bytes(first) == _bytes(second) == RAW
    assert server.ranges == [None]
    assert server.sent == len(ZIPPED)
    assert first.source == f"enwik8, all {len(RAW):,} bytes, from {cache / 'enwik8'}"
    assert {path.name for path in cache.iterdir()} <= {"enwik8", "enwik8.lock"}


def test_damaged_cache_is_downloaded_again(server: Server, cache: Path) -> None:
    cache.mkdir()
    (cache / "enwik8").write_bytes(RAW[:-1] + b"\0")
    assert _bytes(load_small(url=server.url)) == RAW
    assert (cache / "enwik8").read_bytes() == RAW


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


def test_cache_that_cannot_be_written_is_an_error(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    error = _error(lambda: load_small(url=server.url, cache=tmp_path / "file" / "cache"))
    assert re.search(r"cannot keep enwik8 in .*file.cache .*; set GEOMON_CACHE", error)


@needs_enwik8
def test_enwik8_is_recognised() -> None:
    corpus = load(ENWIK8_FILE)
    assert corpus.source.startswith("enwik8, ")
    assert corpus.decode(corpus.train[:10]) == "<mediawiki"
    size = len(_bytes(corpus))
    assert corpus.vocabulary_size <= 205
    assert corpus.vocabulary_size == 205 or size < module.ENWIK8.size

"""Text as subwords: a vocabulary trained on the text itself, and ids that are kept with a run.

Vocabulary: a *subword* is a token of byte-level BPE, so every text can be encoded and decoded; a
*piece* is a stretch of text that is encoded by itself; it ends with a line unless that is long.
"""

import contextlib
import hashlib
import io
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from recipes.enwik8.data import DataError, Text, find_text, is_named
from recipes.enwik8.installed_text import installed_text

FOLDER = "text"  # of what is kept, in the folder of the run
FEWEST, MOST = 257, 1 << 16  # tokens: more than the bytes, and what uint16 holds

_LIMIT = 400_000_000  # bytes of text
_SAMPLE = 32 << 20  # bytes that the vocabulary is trained on
_PIECE = 1 << 14  # bytes
_BATCH = 512  # pieces encoded at once; they take about 100 B for each token meanwhile
_PARALLELISM = "TOKENIZERS_PARALLELISM"
_VOCABULARY, _IDS, _DESCRIPTION = "vocabulary.json", "ids.npy", "corpus.json"
_LICENCES = "licences.json"

Ids = NDArray[np.uint16]


@dataclass(frozen=True, eq=False)
class SubwordCorpus:
    """A text split into training, validation and test data, as subwords.

    Attributes:
        source: One line that says what text this is.
        tokenizer: Encodes and decodes.
        train: Ids of the first 90 % of the bytes, 1-D, uint16.
        validation: Ids of the next 5 %.
        test: Ids of the last 5 %.
        sizes: Bytes of the three parts, as UTF-8.
        text_sha256: Checksum of the text's bytes.
    """

    source: str
    tokenizer: Tokenizer
    train: Ids
    validation: Ids
    test: Ids
    sizes: tuple[int, int, int]
    text_sha256: str

    @property
    def vocabulary_size(self) -> int:
        """The number of subwords: fewer than asked for if the text is too short for them."""
        return self.tokenizer.get_vocab_size()

    @property
    def tokens(self) -> int:
        """The number of tokens of the whole text."""
        return sum(map(len, self.parts))

    @property
    def parts(self) -> tuple[Ids, Ids, Ids]:
        """Training, validation and test ids."""
        return self.train, self.validation, self.test

    @property
    def tokens_per_byte(self) -> tuple[float, float]:
        """Of the training and of the validation text."""
        train, validation, _ = self.sizes
        return len(self.train) / train, len(self.validation) / validation

    def sha256(self) -> str:
        """Return the checksum of the whole text, as the model reads it."""
        digest = hashlib.sha256(self.tokenizer.to_str().encode())
        for part in self.parts:
            digest.update(part.data)
        return digest.hexdigest()

    def decode(self, ids: ArrayLike) -> str:
        """Return the text that ``ids`` stand for."""
        return self.tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False)


def prepare(
    data: str | Path | None, *, text: Text, vocabulary: int, folder: Path, reuse: bool,
    minimum: int,
) -> SubwordCorpus:  # fmt: skip
    """Return the text of a run as subwords; make them, and keep them in the run's folder.

    The text is ``data`` or what ``$ENWIK8`` names, else that of the installed packages.

    Args:
        data: A file with text.
        text: All bytes, or prose without markup.
        vocabulary: Number of subwords.
        folder: Of the run.
        reuse: Whether to take what the folder holds. A file that is named is then only compared.
        minimum: The fewest tokens to accept.

    Raises:
        DataError: A named file cannot be used, is too short, or is not what the folder holds.
    """
    place = folder / FOLDER
    kept = load_kept(place) if reuse else None
    if kept is not None and not is_named(data):
        return kept
    if is_named(data):
        raw, source = find_text(data, text=text, limit=_LIMIT)
    else:
        raw, source = _installed(place)
    sha256 = hashlib.sha256(raw).hexdigest()
    if kept is not None:
        if kept.text_sha256 != sha256:
            raise DataError(
                f"--resume in {folder} needs the text of the earlier run: this is {source}, and "
                f"that was {kept.source}; leave --data out, the run has kept its text"
            )
        return kept
    corpus = subwords_of(raw, source, vocabulary)
    if corpus.tokens < minimum:
        raise DataError(
            f"too short: {source}, {corpus.tokens:,} tokens; expected at least {minimum:,}: give a "
            "longer text or a shorter --context"
        )
    keep(corpus, place)
    return corpus


def subwords_of(raw: bytes, source: str, vocabulary: int) -> SubwordCorpus:
    """Train a vocabulary on the first 90 % of a text, and encode all of it.

    Args:
        raw: The text; bytes that are no UTF-8 become U+FFFD.
        source: One line that says what text this is.
        vocabulary: Number of subwords.
    """
    sha256 = hashlib.sha256(raw).hexdigest()
    text = _as_utf8(raw)
    ends = [_character_start(text, len(text) * share // 100) for share in (90, 95)]
    parts = [text[: ends[0]], text[ends[0] : ends[1]], text[ends[1] :]]
    tokenizer = train_vocabulary(parts[0], vocabulary)
    train, validation, test = (encode(tokenizer, part) for part in parts)
    sizes = (len(parts[0]), len(parts[1]), len(parts[2]))
    return SubwordCorpus(source, tokenizer, train, validation, test, sizes, sha256)


def train_vocabulary(text: bytes, size: int, *, sample: int = _SAMPLE) -> Tokenizer:
    """Train byte-level BPE, without special tokens.

    Args:
        text: UTF-8.
        size: Number of subwords.
        sample: The most bytes to look at; of more text, pieces from all over it are taken.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=[],
    )  # fmt: skip
    every = math.ceil(len(text) / sample) or 1
    with _all_cores():
        tokenizer.train_from_iterator(islice(pieces_of(text), 0, None, every), trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, text: bytes) -> Ids:
    """Return the ids of a UTF-8 text; pieces are encoded side by side on all cores."""
    pieces = pieces_of(text)
    found = [np.empty(0, np.uint16)]
    with _all_cores():
        while batch := list(islice(pieces, _BATCH)):
            encoded = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
            found += [np.array(piece.ids, np.uint16) for piece in encoded]
    return np.concatenate(found)


def pieces_of(text: bytes, size: int = _PIECE) -> Iterator[str]:
    """Yield a UTF-8 text in pieces of about `size` bytes, whole lines if they are not long."""
    start = 0
    while start < len(text):
        end = text.find(b"\n", start + size - 1, start + 4 * size) + 1
        end = end or _character_start(text, start + size)
        yield text[start:end].decode()
        start = end


def keep(corpus: SubwordCorpus, place: Path) -> None:
    """Write vocabulary and ids; the description comes last, and says that all is there."""
    place.mkdir(parents=True, exist_ok=True)
    ids = io.BytesIO()
    np.save(ids, np.concatenate(corpus.parts))
    description = {
        "source": corpus.source,
        "tokens": [len(part) for part in corpus.parts],
        "bytes": corpus.sizes,
        "text_sha256": corpus.text_sha256,
    }
    _replace(place / _VOCABULARY, corpus.tokenizer.to_str().encode())
    _replace(place / _IDS, ids.getbuffer())
    _replace(place / _DESCRIPTION, _json(description))


def load_kept(place: Path) -> SubwordCorpus | None:
    """Return what `keep` has written, None if it is not whole."""
    try:
        description = json.loads((place / _DESCRIPTION).read_text())
        tokenizer = Tokenizer.from_str((place / _VOCABULARY).read_text())
        ids = np.load(place / _IDS)
        lengths, sizes = description["tokens"], description["bytes"]
        if len(ids) != sum(lengths) or ids.dtype != np.uint16:
            return None
        train, validation, test = np.split(ids, np.cumsum(lengths)[:-1])
        return SubwordCorpus(
            description["source"], tokenizer, train, validation, test, tuple(sizes),
            description["text_sha256"],
        )  # fmt: skip
    except Exception:  # of the tokenizer, plain ones; half a file, or none
        return None


def _installed(place: Path) -> tuple[bytes, str]:
    """The text of the installed packages; their licences are written down beside the ids."""
    found = installed_text(limit=_LIMIT)
    place.mkdir(parents=True, exist_ok=True)
    _replace(
        place / _LICENCES,
        _json({name: _listed(getattr(found, name)) for name in ("taken", "left_out")}),
    )
    return found.raw, f"{found.source}, listed in {place / _LICENCES}"


def _listed(packages: Sequence[Any]) -> list[dict[str, Any]]:
    return [asdict(package) for package in packages]


def _json(content: Any) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def _replace(path: Path, content: bytes | memoryview) -> None:
    """Write a file so that another process sees all of it or none."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_bytes(content)
    temporary.replace(path)


def _as_utf8(raw: bytes) -> bytes:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return raw.decode(errors="replace").encode()
    return raw


def _character_start(text: bytes, place: int) -> int:
    """The first place from the given one at which no character is cut."""
    while place < len(text) and text[place] & 0xC0 == 0x80:
        place += 1
    return min(place, len(text))


@contextlib.contextmanager
def _all_cores() -> Iterator[None]:
    """Let the tokenizer use all cores, whatever the environment says for the time after."""
    before = os.environ.get(_PARALLELISM)
    os.environ[_PARALLELISM] = "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_PARALLELISM]
        else:
            os.environ[_PARALLELISM] = before

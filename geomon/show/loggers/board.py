"""Pages of TensorBoard: headline values, the layout of their charts, pictures and text."""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geomon.advice import to_install
from geomon.analysis import FactLog
from geomon.record import (
    HEADLINE,
    Detail,
    LoggerSink,
    RaisedAlert,
    Reading,
    Readings,
    Sink,
    texts_of,
)
from geomon.show.loggers.parts import Page, Pages, Part, Pictures, RunDrawer
from geomon.show.settings import setting_words
from geomon.show.tables import run_words

log = logging.getLogger("geomon")

Writers = Callable[[], Iterable[Any]]
# End of the names of event files that hold nothing but what geomon writes.
_SUFFIX = ".geomon"

# TensorBoard sorts groups by name, and "~" sorts our group after those of the training.
PREFIX = "~"
_GROUP = f"{PREFIX}geomon"
# A single line, because TensorBoard keeps line breaks.
_GUIDE = (
    "**Where to look.** *Custom Scalars* opens on the intrinsic dimension with its 95 % interval; "
    "*Images* shows it over training, next to maps of layers, steps and heads; *Time Series* has "
    f"both, in the last group, `{_GROUP}`. It is smoothed unless its "
    "*Smoothing* is set to 0: a peak then looks lower and comes later. *Custom Scalars* is not."
)


class BoardPages(Pages):
    """Sink that fills the pages of TensorBoard through the `SummaryWriter`s of a logger.

    Args:
        name: Name of the logger, for messages.
        log: Function that passes charted values, by name, and their step to the logger.
        writers: Function that returns the logger's `SummaryWriter`s.
        detail: "headline", "layers", or names of metrics whose means become headline values too.
            Defaults to "headline".
        pictures: Whether to draw pictures, which requires matplotlib. Defaults to True.
        save: Function that flushes the logger. Defaults to one that does nothing.

    Raises:
        ValueError: If the detail is none of them.
    """

    def __init__(
        self,
        name: str,
        log: Callable[[dict[str, float], int], object],
        writers: Writers,
        *,
        detail: Detail = HEADLINE,
        pictures: bool = True,
        save: Callable[[], object] = lambda: None,
    ) -> None:
        def post(title: str, image: NDArray[np.uint8], step: int) -> None:
            for writer in writers():
                writer.add_image(f"{_GROUP}/{title}", image, step, dataformats="HWC")

        values = LoggerSink(name, log, detail=detail, save=save, writers=writers, prefix=PREFIX)
        # Parts are closed in reverse, so that the values flush the logger after all other pages.
        parts: list[Sink] = [values, BoardText(writers, name=name)]
        if pictures:
            parts.append(Pictures(post, name=name, metrics=values.named))
        super().__init__(name, parts)


class TensorBoard(BoardPages):
    """Sink that writes TensorBoard event files, for training loops without a logger.

    It fills the same pages as the callbacks: headline values and the layout of their charts,
    pictures, and text (docs/tensorboard.md). If the folder holds the files of an earlier run, and a
    run begins at step 0, its files go into a folder of their own in it, such as `run_2`.

    Args:
        directory: Folder for the event files.
        detail: "headline" for about a dozen values in the group `~geomon`, "layers" for all charted
            values, or names of metrics whose means become headline values too. Defaults to
            "headline".
        pictures: Whether to draw pictures each time the step has doubled and at the end, which
            requires matplotlib. Defaults to True.

    Raises:
        ValueError: If the detail is none of them.
        ImportError: If tensorboard is missing.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        detail: Detail = HEADLINE,
        pictures: bool = True,
    ) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                f"TensorBoard's files need tensorboard ({error}): {to_install('tensorboard')}"
            ) from error
        self._files = _EventFiles(Path(directory), SummaryWriter)
        super().__init__(
            "TensorBoard", self._log, lambda: [self._files.writer], detail=detail, pictures=pictures
        )
        self._parts = [self._files, *self._parts]

    def _log(self, values: Mapping[str, float], step: int) -> None:
        writer = self._files.writer
        for tag, value in values.items():
            # As float32, because TensorBoard's own data server cannot show doubles.
            writer.add_scalar(tag, value, step, new_style=True)
        writer.flush()  # with tensorflow installed, it would wait two minutes


class _EventFiles(Page):
    """Sink that opens the event files of a run when it begins, apart from earlier runs.

    TensorBoard joins all files of a folder to one run.
    """

    def __init__(self, directory: Path, make: Callable[..., Any]) -> None:
        super().__init__("opening files for TensorBoard")
        self._directory, self._make = directory, make
        self._writer: Any = None
        self._begins = False  # whether a run begins at step 0, with the next file

    @property
    def writer(self) -> Any:
        """The writer of the present run."""
        if self._writer is None:
            self._writer = self._make(self._folder(), filename_suffix=_SUFFIX)
            self._begins = False
        return self._writer

    def describe(self, description: Mapping[str, Any]) -> None:
        """Learn whether a run begins or goes on."""
        self._begins = description.get("from_step") == 0

    def close(self) -> None:
        """Close the files; a later reading opens another one."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _folder(self) -> Path:
        """Choose the folder of the last run if it goes on, or else one without a run."""
        folders = [self._directory]
        while any(folders[-1].glob(f"*{_SUFFIX}")):
            folders.append(self._directory / f"run_{len(folders) + 1}")
        if not self._begins:
            return folders[max(0, len(folders) - 2)]
        if len(folders) > 1:
            log.warning(
                "TensorBoard: %s holds an earlier run, so the files of this one are in %s",
                self._directory, folders[-1],
            )  # fmt: skip
        return folders[-1]


class BoardText(RunDrawer):
    """Sink that writes text to TensorBoard: alerts, the run in words, healthy ranges and notes."""

    def __init__(self, writers: Writers, *, name: str) -> None:
        super().__init__(f"writing text for {name}")
        self._writers = writers
        self._described: Mapping[str, Any] | None = None
        self._facts = FactLog()
        self._noted: set[str] = set()

    def describe(self, description: Mapping[str, Any]) -> None:
        """Keep the description of the run until the first reading."""
        super().describe(description)
        self._described, self._facts = description, FactLog([description])

    def write(self, reading: Reading) -> None:
        """Write new notes, and write the run in words each time its step has doubled."""
        if self._described is not None:
            settings = [(name, setting_words(name, x)) for name, x in self._described.items()]
            self._post("4 model and options", _table([("", ""), *settings]), reading.step)
            texts = texts_of(self._described).values()
            if healthy := [f"{text.title}: {text.healthy}" for text in texts if text.healthy]:
                self._post("2 what is healthy", _bullets(healthy), reading.step)
            self._described = None
        kinds = {note.key: note for note in reading.notes if not note.is_alert}
        if new := [str(note) for kind, note in kinds.items() if kind not in self._noted]:
            self._post("3 notes", _bullets(new), reading.step)
        self._noted |= kinds.keys()
        self._facts.add([reading])
        super().write(reading)

    def alert(self, alert: RaisedAlert) -> None:
        """Write an alert at the top of the text page, and flush the writers."""
        super().alert(alert)
        self._post("0 alerts", _bullets([alert.words()]), alert.step)
        for writer in self._writers():
            writer.flush()

    def _draw(self, readings: Readings, step: int) -> Iterator[Part]:
        table, others = run_words(readings, self._facts.facts())
        words = f"{_table(table)}\n\n{_bullets(others)}\n\n{_GUIDE}"
        yield partial(self._post, "1 the run in words", words, step)

    def _post(self, name: str, text: str, step: int) -> None:
        for writer in self._writers():
            writer.add_text(f"{_GROUP}/{name}", text, step)


def _bullets(sentences: Iterable[str]) -> str:
    return "\n".join(f"- {_escape(sentence)}" for sentence in sentences)


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows, the first one as the head, as a Markdown table."""
    lines = [f"| {' | '.join(map(_escape, row))} |\n" for row in rows]
    return "".join([*lines[:1], f"|{'---|' * len(rows[0])}\n", *lines[1:]])


def _escape(text: str) -> str:
    """Escape characters that Markdown would interpret, such as underscores in names."""
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", text.replace("\n", " "))

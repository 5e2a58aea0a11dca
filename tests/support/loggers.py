"""Every sink that shows a run: how it is made and what it has shown, for contract tests."""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from geomon import Logger, Memory, MLflow, Sink, TensorBoard, Trackio, WandB
from support.wandb_file import Run


class Shown(NamedTuple):
    """Values with their steps, alerts, their number, and pictures that a logger has."""

    rows: list[tuple[int, dict[str, float]]]
    alerts: list[tuple[int, str]]
    pictures: list[tuple[str, int]]
    counts: list[tuple[int, float]]


def shown_of(rows, alerts, pictures) -> Shown:
    """Numbers of alerts apart from the values of readings."""
    counts = [(step, row["geomon/alerts"]) for step, row in rows if "geomon/alerts" in row]
    others = [(n, row) for n, row in rows if row.keys() - {"geomon/alerts", "geomon/step"}]
    return Shown(others, alerts, pictures, counts)


def plain(title, text) -> str:
    """Return the text of an alert whose title names its kind, as the text does."""
    assert title == f"geomon: {text.partition(' (')[0]}"
    return text


# Takes a folder for files, a MonkeyPatch and options; returns the sink, and a function that tells
# what it has shown.
Make = Callable[..., tuple[Sink, Callable[[], Shown]]]


def memory(folder, patch, **options):
    sink = Memory(**options)

    def shown():
        rows = [(each.step, {"geomon/twonn": each.column("twonn").mean}) for each in sink.readings]
        return shown_of(rows, [(each.step, each.words()) for each in sink.alerts], [])

    return sink, shown


def logger(folder, patch, *, pictures=True, **options):
    rows, alerts, drawn = [], [], []
    sink = Logger(
        lambda values, step: rows.append((step, values)),
        picture=(lambda name, image, step: drawn.append((name, step))) if pictures else None,
        alert=lambda title, text, step: alerts.append((step, plain(title, text))),
        name="Aim", **options,
    )  # fmt: skip
    return sink, lambda: shown_of(rows, alerts, drawn)


def events_of(folder, *, of_lightning=False):
    """All that event files of TensorBoard hold, by tag: pairs of a step and a number or a text.

    The logger of Lightning writes values in a form of its own.
    """
    events = EventAccumulator(str(folder), {"images": 0, "tensors": 0}).Reload()
    tags = events.Tags()
    found = {tag: [(x.step, None) for x in events.Images(tag)] for tag in tags["images"]}
    for tag in tags["scalars"] if of_lightning else ():
        found[tag] = [(x.step, x.value) for x in events.Scalars(tag)]
    for tag in tags["tensors"]:
        values = [(x.step, make_ndarray(x.tensor_proto)) for x in events.Tensors(tag)]
        found[tag.removesuffix("/text_summary")] = [
            (step, value.item() if value.dtype.kind == "f" else value.ravel()[0])
            for step, value in values
        ]
    return found


def tensorboard(folder, patch, **options):
    def shown():
        found, rows = events_of(folder) if folder.exists() else {}, {}
        for tag, values in found.items():
            for step, value in values if isinstance(values[0][1], float) else ():
                rows.setdefault(step, {})[tag.removeprefix("~")] = value
        alerts = [(n, words.decode()[2:]) for n, words in found.get("~geomon/0 alerts", ())]
        images = [(tag, step) for tag, each in found.items() for step, x in each if x is None]
        pictures = [(tag.removeprefix("~geomon/"), step) for tag, step in images]
        return shown_of(sorted(rows.items()), alerts, sorted(pictures, key=lambda each: each[1]))

    return TensorBoard(folder, **options), shown


def wandb(folder, patch, **options):
    run = Run()

    def shown():
        run.end_row()
        rows = [(row["geomon/step"], row) for row in run.rows]
        alerts = [each["text"].removeprefix("Step ").split(": ", 1) for each in run.alerts]
        names = [(n, step) for step, row in rows for n in row if n.startswith("geomon_charts/")]
        pictures = [(name.split("/")[1].replace("_", " "), step) for name, step in names]
        numbers = [(n, row) for n, row in rows if {"geomon/twonn", "geomon/alerts"} & row.keys()]
        return shown_of(numbers, [(int(step), words) for step, words in alerts], pictures)

    return WandB(run, by_step=True, **options), shown


def mlflow(folder, patch, **options):
    """By a stand-in for mlflow, which few machines have."""
    rows, images, tags = {}, [], []

    def log_batch(run_id, metrics):
        assert (run_id, len(metrics) <= 1000) == ("active", True)
        assert all(1e12 < time < 1e13 for _, _, time, _ in metrics)  # milliseconds
        for name, value, _, step in metrics:
            rows.setdefault(step, {})[name] = value

    def log_image(run_id, image, key, step):
        assert (run_id, image.ndim) == ("active", 3)
        images.append((key.removeprefix("geomon/"), step))

    def set_tag(run_id, title, text):
        step, words = text.removeprefix("Step ").split(": ", 1)
        assert run_id == "active"
        tags.append((int(step), plain(title, words)))

    client = SimpleNamespace(log_batch=log_batch, log_image=log_image, set_tag=set_tag)
    active = SimpleNamespace(info=SimpleNamespace(run_id=options.pop("active", "active")))
    stand_in = SimpleNamespace(active_run=lambda: active, MlflowClient=lambda: client)
    entities = SimpleNamespace(Metric=lambda *given: given)
    patch.setitem(sys.modules, "mlflow", stand_in)
    patch.setitem(sys.modules, "mlflow.entities", entities)

    def shown():
        return shown_of([*rows.items()], tags, images)

    return MLflow(**options), shown


def trackio(folder, patch, **options):
    """By a stand-in for trackio, which few machines have."""
    rows, alerts = [], []
    patch.setitem(sys.modules, "trackio", SimpleNamespace(Image=lambda image: image.ndim))
    run = SimpleNamespace(
        log=lambda values, step: rows.append((step, values)),
        alert=lambda title, text, step: alerts.append((step, plain(title, text))),
    )

    def shown():
        drawn = [(n.split("/")[1], step) for step, row in rows for n in row if n[7:8].isdigit()]
        numbers = [row for row in rows if {"geomon/twonn", "geomon/alerts"} & row[1].keys()]
        return shown_of(numbers, alerts, drawn)

    return Trackio(run, **options), shown


LOGGERS: dict[str, Make] = {
    "Aim": logger, "TensorBoard": tensorboard, "W&B": wandb, "MLflow": mlflow, "trackio": trackio,
}  # fmt: skip
SINKS: dict[str, Any] = {"Memory": memory, **LOGGERS}

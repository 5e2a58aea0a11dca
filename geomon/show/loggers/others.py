"""Pages of MLflow, of trackio, and of any other logger through functions."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geomon.record import HEADLINE, Detail, LoggerSink, RaisedAlert, Sink
from geomon.show.loggers.parts import Page, Pages, Pictures, Post

# Number of values that MLflow accepts at once.
_MOST_AT_ONCE = 1000


class Logger(Pages):
    """Sink that passes readings to functions, for any logger without a sink of its own.

    For example: `Logger(lambda values, step: run.track(values, step=step))`.

    Args:
        log: Function of the charted values, by name, and their step.
        picture: Function of a name, an image (uint8 [height, width, 3]) and a step, called with
            pictures of layers and heads, which require matplotlib. Defaults to None, for no
            pictures.
        alert: Function of a title, a text and a step, called with each alert. Defaults to None, for
            no alerts.
        name: Name of the logger, for messages. Defaults to "the logger".
        detail: "headline", "layers", or names of metrics whose means become headline values too.
            Defaults to "headline".
        save: Function that flushes the logger. Defaults to one that does nothing.

    Raises:
        ValueError: If the detail is none of them.
    """

    def __init__(
        self,
        log: Callable[[dict[str, float], int], object],
        *,
        picture: Post | None = None,
        alert: Callable[[str, str, int], object] | None = None,
        name: str = "the logger",
        detail: Detail = HEADLINE,
        save: Callable[[], object] = lambda: None,
    ) -> None:
        values = LoggerSink(name, log, detail=detail, save=save)
        parts: list[Sink] = [values]
        if alert is not None:
            parts.append(Alerts(alert, name=name))
        if picture is not None:
            parts.append(Pictures(picture, name=name, metrics=values.named))
        super().__init__(name, parts)


class MLflow(Logger):
    """Sink that logs values to an MLflow run, pictures as its images, and alerts as its tags.

    Args:
        run_id: Id of the run. Defaults to None, the active run of this thread.
        detail: "headline", "layers", or names of metrics whose means become headline values too.
            Defaults to "headline".
        pictures: Whether to draw pictures of layers and heads, which requires matplotlib. Defaults
            to True.

    Raises:
        ValueError: If no run is given and none is active, or if the detail is none of them.
        ImportError: If mlflow is missing.
    """

    def __init__(
        self, run_id: str | None = None, *, detail: Detail = HEADLINE, pictures: bool = True
    ) -> None:
        try:
            import mlflow
        except ImportError as error:
            raise ImportError("MLflow's runs need mlflow: pip install mlflow") from error
        if run_id is None and (active := mlflow.active_run()) is not None:
            run_id = active.info.run_id
        if run_id is None:
            raise ValueError("no MLflow run is active: call mlflow.start_run(), or pass run_id")
        self._run_id = run_id
        self._client = client = mlflow.MlflowClient()  # mlflow's functions use one run per thread

        def draw(name: str, image: NDArray[np.uint8], step: int) -> None:
            client.log_image(run_id, image, key=f"geomon/{name}", step=step)

        super().__init__(
            self._log, picture=draw if pictures else None,
            alert=lambda title, text, step: client.set_tag(run_id, title, f"Step {step}: {text}"),
            name="MLflow", detail=detail,
        )  # fmt: skip

    def _log(self, values: dict[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in values.items()]
        for some in range(0, len(metrics), _MOST_AT_ONCE):
            self._client.log_batch(self._run_id, metrics[some : some + _MOST_AT_ONCE])


class Trackio(Logger):
    """Sink that logs values, pictures and alerts to a trackio run.

    Readings are logged with their step. trackio counts on from the largest step that it was given,
    so pass `step=` in your own logs too.

    Args:
        run: trackio run, as `trackio.init()` returns it.
        detail: "headline", "layers", or names of metrics whose means become headline values too.
            Defaults to "headline".
        pictures: Whether to draw pictures of layers and heads, which requires matplotlib. Defaults
            to True.

    Raises:
        ValueError: If the detail is none of them.
    """

    def __init__(self, run: Any, *, detail: Detail = HEADLINE, pictures: bool = True) -> None:
        self._run = run
        super().__init__(
            lambda values, step: run.log(values, step=step),
            picture=self._log_picture if pictures else None,
            alert=lambda title, text, step: run.alert(title, text=text, step=step),
            name="trackio", detail=detail,
        )  # fmt: skip

    def _log_picture(self, name: str, image: NDArray[np.uint8], step: int) -> None:
        import trackio

        self._run.log({f"geomon/{name}": trackio.Image(image)}, step=step)


class Alerts(Page):
    """Sink that passes each alert to a function as soon as it is raised.

    Args:
        send: Function of a title, a text and a step.
        name: Name of the logger, for messages.
    """

    def __init__(self, send: Callable[[str, str, int], object], *, name: str) -> None:
        super().__init__(f"sending alerts to {name}")
        self._send = send

    def alert(self, alert: RaisedAlert) -> None:
        """Send an alert."""
        self._send(f"geomon: {alert.kind}", "\n".join(filter(None, alert.note.lines())), alert.step)

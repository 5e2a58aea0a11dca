"""Options of a monitor, each declared once with its type, default, check and description.

`Monitor` and both callbacks take them as keywords, `**options: Unpack[MonitorOptions]`. Type
checkers, editors and command-line parsers read the types, and `help` shows the descriptions.
"""

import difflib
import functools
import inspect
import math
import operator
import os
import re
import reprlib
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, SupportsIndex, TypedDict, TypeVar, get_type_hints

from torch import nn

from geomon.analysis import RULES, Alert, Phase, check_alerts
from geomon.capture import check_extra_layers
from geomon.metrics import METRICS, Evaluator, check_metrics
from geomon.monitor.device import check_device
from geomon.monitor.held_out import HeldOut, is_loader
from geomon.monitor.probe_loss import LossFunction
from geomon.monitor.schedule import Schedule, check_schedule
from geomon.record import HEADLINE, Detail, Sink, check_detail, training_tag

# Fewest rows for estimating a dimension.
_FEWEST_QUERIES = 3
# Value of `budget` for the default share of the time, and of `checks` for a share of that.
AUTO = "auto"
# Value of a callback's `probe` for the trainer's own validation batches.
VALIDATION = "validation"
# Values of `background` that choose where it measures.
THREAD, PROCESS = _WAYS = "thread", "process"

_Class = TypeVar("_Class", bound=type)


@dataclass(frozen=True, eq=False)  # command-line parsers hash it
class Option:
    """Declares an option; the field gives its name and type.

    Attributes:
        default: Value if the user passes none.
        words: Description of the option, for help.
        check: Returns the value to use, or raises an error that says what is wrong with it.
        group: Heading in help above this option and the options after it.
    """

    default: Any
    words: str
    check: Callable[[Any], Any] = lambda value: value
    group: str = ""


def check_count(name: str, value: int | None, at_least: int = 1, *, or_none: bool = False) -> None:
    """Raise a `ValueError` unless the value is a large enough whole number.

    Args:
        name: Name of the argument, for the message.
        value: Value of the argument.
        at_least: Smallest sensible number. Defaults to 1.
        or_none: Whether None is allowed, meaning all there are. Defaults to False.

    Raises:
        ValueError: If it is not a whole number, or too small.
    """
    if or_none and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        none = ", or None" if or_none else ""
        raise ValueError(
            f"{name} must be a whole number of at least {at_least}{none}, got {value!r}"
        )


def check_step(step: SupportsIndex) -> int:
    """Return a step as a plain int; numpy integers and one-element integer tensors are accepted."""
    expected = "a step is the number of optimizer updates already in the weights, a whole number"
    is_flag = isinstance(step, bool) or str(getattr(step, "dtype", "")).endswith("bool")
    try:
        number = None if is_flag else operator.index(step)
    except (TypeError, RuntimeError):  # a float, or a tensor with several elements
        number = None
    if number is None:
        raise TypeError(f"{expected}, got {reprlib.repr(step)}")
    if not 0 <= number < 2**63:
        raise ValueError(f"{expected} from 0, got {reprlib.repr(number)}")
    return number


def _count(name: str, at_least: int = 1, *, or_none: bool = False) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        check_count(name, value, at_least, or_none=or_none)
        return value

    return check


def _seconds(name: str) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ValueError(f"{name} must be a number of seconds above 0, got {value!r}")
        return value

    return check


def _flag(name: str) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, got {value!r}")
        return value

    return check


def _check_background(background: Any) -> Any:
    if not any(background is one for one in (None, True, False)) and background not in _WAYS:
        raise ValueError(
            f"background must be True, False, None, {' or '.join(map(repr, _WAYS))}, got "
            f"{background!r}"
        )
    return background


def _hook(name: str) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if value is not None and not callable(value):
            raise TypeError(f"{name} must be a function of one argument, or None, got {value!r}")
        return value

    return check


def _check_probe(probe: Any) -> Any:
    """Return the inputs of the probe, or held-out batches if it is a loader."""
    if isinstance(probe, str) and probe != VALIDATION:
        raise ValueError(
            f"probe must be inputs of the model, a loader of batches, or (in the callbacks) "
            f"'{VALIDATION}', got {probe!r}"
        )
    return HeldOut(probe) if is_loader(probe) else probe


def _check_probe_loss(function: Any) -> Any:
    if function is not None and not callable(function):
        raise TypeError(
            "probe_loss must be a function of the model's output and inputs, such as "
            f"lambda outputs, batch: outputs.loss, or None, got {function!r}"
        )
    return function


def _check_sinks(sinks: Any) -> Any:
    """Return the sinks if they are a sequence of sinks; callbacks find the trainer's loggers."""
    named = isinstance(sinks, str) or not isinstance(sinks, Iterable)
    wrong = (
        [sinks]
        if named
        else [sink for sink in sinks if isinstance(sink, type) or not isinstance(sink, Sink)]
    )
    if wrong:
        raise TypeError(
            "sinks must be a list of objects with write(reading) and close(), such as "
            f"[TensorBoard('runs/a')], got {reprlib.repr(wrong[0])}; the callbacks write to the "
            "trainer's loggers without it"
        )
    return sinks


def _check_names(names: Any) -> tuple[str, ...]:
    """Return the names of logged values; a single name is accepted too."""
    if isinstance(names, str):
        names = (names,)
    if not isinstance(names, Iterable):
        raise ValueError(f"log must be a tuple of names, such as ('val_loss',), got {names!r}")
    checked = tuple(dict.fromkeys(names))
    for name in checked:
        training_tag(name)
    return checked


def _check_settings(settings: Any) -> Any:
    if not isinstance(settings, Mapping):
        raise TypeError(
            f"settings must be a dict, such as {{'learning_rate': 3e-4}}, got "
            f"{type(settings).__name__}"
        )
    return settings


def _check_checks(checks: Any) -> Any:
    if checks is None or checks == AUTO:
        return checks
    try:
        return check_schedule(checks)
    except ValueError as error:
        raise ValueError(str(error).replace("schedule", "checks", 1)) from None


# A number, optionally followed by a sign or word for "per cent".
_SHARE = re.compile(r"\s*(?P<number>[^\s%]+?)\s*(?P<percent>%|per\s?cent)?\s*", re.IGNORECASE)


def _check_budget(share: Any) -> float | str | None:
    """Return the budget as a share of the time between 0 and 1, None for no limit, or "auto"."""
    if share is None or (isinstance(share, str) and share == AUTO):
        return share
    number, divisor = share, 1
    if isinstance(share, str):
        found = _SHARE.fullmatch(share)
        number = found["number"] if found else share
        divisor = 100 if found and found["percent"] else 1
    try:
        value = math.nan if isinstance(share, bool) else float(number) / divisor
    except (TypeError, ValueError, RuntimeError):  # not a number, or a tensor of several
        value = math.nan
    if not 0 < value < 1:
        raise ValueError(
            "budget must be a share of the training time between 0 and 1 (0.01 or '1%' for one per "
            f"cent), 'auto', or None for no limit, got {reprlib.repr(share)}"
        )
    return value


def _check_megabytes(most: Any) -> Any:
    if most is not None and not 0 < most <= math.inf:
        raise ValueError(f"max_capture_mb must be a number above 0, or None, got {most!r}")
    return most


def _check_alerts(names: Any) -> Any:
    check_alerts(names)
    return names


class MonitorOptions(TypedDict, total=False):
    """Keyword arguments of a monitor."""

    metrics: Annotated[
        Sequence[str] | Mapping[str, Callable[..., Any]],
        Option(
            METRICS,
            "Metrics to measure: a dict from a name to a function of views, or a list of names, "
            '["twonn", "anisotropy"]. `METRICS` are those measured by default; `select` makes a '
            "dict of some by name.",
            check_metrics,
            group="What is measured",
        ),
    ]
    tokens: Annotated[
        int, Option(4096, "Number of rows of hidden states in one split.", _count("tokens"))
    ]
    splits: Annotated[
        int,
        Option(
            1,
            "Largest number of splits, over which the mean is taken. With two or more, their "
            "deviation is recorded too, as the papers give it; margins need none.",
            _count("splits"),
        ),
    ]
    queries: Annotated[
        int | None,
        Option(
            Evaluator.queries,
            "Number of rows of a split from which distances to all its rows are measured: 1,024 "
            "halve the cost of the intrinsic dimension for 10 to 50 % more scatter. None for all "
            "rows, as in the papers.",
            _count("queries", _FEWEST_QUERIES, or_none=True),
        ),
    ]
    blocks: Annotated[
        str | Sequence[nn.Module] | None,
        Option(
            None,
            "The blocks of the model, if the search does not find them: a regular expression that "
            "matches their whole names, or the modules.",
        ),
    ]
    extra_layers: Annotated[
        Sequence[str],
        Option(
            (),
            "Layers to measure in addition to the blocks, each as costly as one of them: "
            '"final_norm" (the last block\'s output after the final norm), "embedding" and '
            '"unembedding" (rows of the two matrices).',
            check_extra_layers,
        ),
    ]
    seed: Annotated[
        int,
        Option(
            0,
            "Seed of the private generator that samples rows, together with the step and the rank.",
        ),
    ]
    schedule: Annotated[
        int | Schedule | None,
        Option(
            None,
            "Function from a step to whether a reading is due, or a number of steps, 100 for "
            "`every(100)`. Step 0 is always due; if training jumps over a due step, the next step "
            "is read. By default readings fill the budget: what is left of it is spread over the "
            "steps that remain, densely at first.",
            check_schedule,
            group="When and on which inputs",
        ),
    ]
    checks: Annotated[
        int | str | Schedule | None,
        Option(
            AUTO,
            "When the few cheap values that alerts watch are looked at between readings, in the "
            'training forward of the first rank: "auto" as 1 to 3 % of the time affords, a '
            "function or number of steps as for `schedule`, or None for never. An alert of a check "
            "is recorded and shown at once, and the next step is read. With a probe, without "
            "alerts and if the model is compiled there are none.",
            _check_checks,
        ),
    ]
    budget: Annotated[
        float | str | None,
        Option(
            AUTO,
            'Largest share of the time that geomon may take, 0.01 or "1%". "auto" is 5 % if no '
            "`schedule` is given, and no limit otherwise; None is no limit, with readings as "
            "`log_spaced()` has them if no `schedule` is given. The budget decides whether a "
            "reading is made, never how much of it: a due reading that does not fit is put off "
            "until it does, and what is left out is counted. The share is of the time that the "
            "whole run is expected to take. The first two readings, the last one and explicit "
            "calls of `probe` are always made, so a short run may take more, and says so.",
            _check_budget,
        ),
    ]
    probe: Annotated[
        Any,
        Option(
            None,
            "Fixed inputs for an extra pass in eval mode at due steps, instead of watching the "
            "training forward. A tensor, a dict of keyword arguments, a tuple of arguments, or a "
            "function of the model; or a data loader or another iterable of batches, which is "
            "drawn from: give one of its own. The first batches of a loader are taken once: enough "
            "for the sampled rows and 16 sequences, at most 64. The model gets what its `forward` "
            "takes of a batch, without labels; with several ranks each reads its share. "
            '"validation", in the callbacks, keeps the batches that the trainer\'s own validation '
            "draws. None watches the training forward.",
            _check_probe,
        ),
    ]
    probe_loss: Annotated[
        LossFunction | None,
        Option(
            None,
            "Function of what the model returned for the inputs of the probe, and of these inputs "
            "(a batch with its labels), that returns the loss as a number or a tensor with one "
            "element. It is recorded as `training/probe_loss` and charted as `geomon/probe_loss`: "
            "a validation at every reading. The model's time in that pass is then not counted as "
            "geomon's. Several batches are weighted by their sequences. None for no loss.",
            _check_probe_loss,
        ),
    ]
    directory: Annotated[
        str | os.PathLike[str] | None,
        Option(
            "runs/geomon",
            "Folder in which the first rank writes `readings.jsonl`. None for no record; in the "
            "callbacks, which have None by default, the folder of the run's logger or checkpoints.",
            group="What is written where",
        ),
    ]
    arrays: Annotated[
        bool,
        Option(
            True,
            "Whether to write the arrays that figures need to files next to the record, in "
            "`arrays/`: mean queries and keys, a few single ones, eigenvalues, moments of token "
            "types. At most about a megabyte a reading; of readings less than 5 % apart only some "
            "have them.",
            _flag("arrays"),
        ),
    ]
    sinks: Annotated[
        Sequence[Sink],
        Option(
            (),
            "Objects with `write(reading)` and `close()` that get every reading after the record, "
            "on the first rank, in a thread for which training waits; with `alert(alert)` they get "
            "alerts too, at once. A sink that fails at five readings in a row is left out.",
            _check_sinks,
        ),
    ]
    log: Annotated[
        Sequence[str],
        Option(
            (),
            "Names of values to record in every reading with the metrics, as `training/<name>`. "
            "Each reading of a `Monitor` waits for `Monitor.log` to give them, until the next "
            "step. The callbacks take the loss by themselves (`loss`), and values of these names "
            'from what the trainer logs: `log=("val_loss",)`.',
            _check_names,
        ),
    ]
    settings: Annotated[
        Mapping[str, Any],
        Option(
            {},
            "Settings of the training that tell runs apart, as numbers and texts, in dicts if need "
            'be: `{"learning_rate": 3e-4, "trial": 7}`. They are recorded as '
            "`training/learning_rate`, and pages say in which of them runs differ. Nothing else of "
            "the training's settings is recorded.",
            _check_settings,
        ),
    ]
    alerts: Annotated[
        Sequence[str],
        Option(
            tuple(RULES),
            "Names of the alerts to look for, as in `geomon.analysis.RULES`; () for none. "
            "An alert is a line of the record and a warning, and goes to every logger, at once.",
            _check_alerts,
            group="Alerts",
        ),
    ]
    on_alert: Annotated[
        Callable[[Alert], object] | None,
        Option(
            None, "Function of an `Alert`, called like `on_phase`, once for each alert.",
            _hook("on_alert"),
        ),
    ]  # fmt: skip
    on_phase: Annotated[
        Callable[[Phase], object] | None,
        Option(
            None,
            "Function of a `Phase`, called in the training's own thread on the first rank after a "
            "reading is recorded, when the phase of the mean intrinsic dimension has another name "
            'than before ("expanding", "level", "compressing", ...). An exception in it becomes a '
            "warning.",
            _hook("on_phase"),
        ),
    ]
    on_peak: Annotated[
        Callable[[Phase], object] | None,
        Option(
            None,
            "Function of a `Phase`, called like `on_phase`, after each reading whose mean "
            "intrinsic dimension is the highest so far: it can save the weights of the peak, over "
            "those that it saved before.",
            _hook("on_peak"),
        ),
    ]
    gather: Annotated[
        bool,
        Option(
            True,
            "With several ranks, whether a reading measures the rows of all ranks: each keeps "
            "its share of the rows, the ranks share the layers out for measuring, and the first "
            "rank records. Build the monitor on every rank after `torch.distributed` is "
            "initialised, and call it with the same steps and options. If False, the first rank "
            "measures its own rows and the ranks exchange nothing.",
            group="Ranks and devices",
        ),
    ]
    rank_timeout: Annotated[
        float,
        Option(
            60.0,
            "Seconds that a rank waits for the others in one reading, but at most half of the "
            "timeout of the training's own process group. A rank that does not answer in time ends "
            "the gathering, never the run: the first rank continues with its own rows.",
            _seconds("rank_timeout"),
        ),
    ]
    background: Annotated[
        bool | str | None,
        Option(
            None,
            "Whether to measure rows while training goes on, on an accelerator on a stream of its "
            "own; None does so if the model is on an accelerator. Rows on the host are measured in "
            "a thread, and once threads have measured for as long as a process takes to start (3 "
            "s), in a process of its own, which leaves Python's lock to the training. "
            '"thread" never starts a process, "process" does so at the first reading. Gathered '
            "rows are measured immediately, and so are all rows if a metric is your own, which may "
            "draw random numbers of the training.",
            _check_background,
        ),
    ]
    device: Annotated[
        str,
        Option(
            "cpu",
            'Where rows are measured: "cpu" on the host; "auto" on the device of the model, if '
            'training leaves enough memory there; or the name of an accelerator, "cuda:1". With '
            "several ranks each measures its share of the layers on its own device. A reading for "
            "which the device has no memory is measured on the host, and says so.",
            check_device,
        ),
    ]
    max_capture_mb: Annotated[
        float | None,
        Option(
            None,
            "Largest memory of what one reading keeps of a pass, in millions of bytes. If need be, "
            "fewer rows, queries and keys are kept, and the reading says so. None for no limit.",
            _check_megabytes,
        ),
    ]
    strict: Annotated[
        bool,
        Option(
            False,
            "Whether to raise what goes wrong in a reading, instead of a warning and a missing "
            "value.",
            group="What goes wrong",
        ),
    ]
    sink_timeout: Annotated[
        float,
        Option(
            30.0,
            "Seconds that one call of a sink may take. A sink that takes longer is left out from "
            "then on, with a warning. The loggers of a trainer have no limit.",
            _seconds("sink_timeout"),
        ),
    ]


class CallbackOptions(MonitorOptions, total=False):
    """Keyword arguments of a callback."""

    pictures: Annotated[
        bool,
        Option(
            True,
            "Whether loggers that show pictures get them: the intrinsic dimension over training, "
            "anisotropy over depth, maps of layers and steps, and matrices of layers and heads, "
            "each time the step has doubled and at the end.",
            group="What loggers show",
        ),
    ]
    detail: Annotated[
        str | Sequence[str],
        Option(
            HEADLINE,
            'How much loggers show: "headline" for about a dozen values in the group `geomon/`; '
            '"layers" for every layer of every metric too, in groups of their own; or names of '
            "metrics whose means are headline values too. The record holds everything. Sinks given "
            "with `sinks` have a `detail` of their own.",
            check_detail,
        ),
    ]


@functools.cache
def declared(options: type) -> dict[str, Option]:
    """Return the declaration of each option by name."""
    hints = get_type_hints(options, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items()}


def check_options(options: Mapping[str, Any], owner: str) -> MonitorOptions:
    """Return all options of a monitor, checked, with defaults for those not given."""
    checked: MonitorOptions = _check(options, MonitorOptions, owner)
    if isinstance(checked["probe"], str):
        raise ValueError(
            f"probe='{VALIDATION}' is for the callbacks: {owner} has no trainer, so pass inputs or "
            "a loader"
        )
    return checked


def check_callback_options(options: Mapping[str, Any], owner: str) -> CallbackOptions:
    """Return all options of a callback, checked, with defaults for those not given."""
    checked: CallbackOptions = _check({"directory": None, **options}, CallbackOptions, owner)
    _check_measured(checked["detail"], checked["metrics"])
    if checked["probe_loss"] is not None and checked["probe"] is None:
        raise ValueError(  # a Monitor may get inputs with each probe instead
            f"probe_loss is the loss on the inputs of a probe, but there is none: pass "
            f"probe='{VALIDATION}', or inputs of the model"
        )
    return checked


def _check(options: Mapping[str, Any], declaration: type, owner: str) -> Any:
    known = declared(declaration)
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known)
            advice = f" (did you mean '{close[0]}'?)" if close else ""
            raise TypeError(
                f"{owner}() has no argument '{name}'{advice}; there are {', '.join(known)}"
            )
    return {name: one.check(options.get(name, one.default)) for name, one in known.items()}


def _check_measured(detail: Detail, metrics: Collection[str]) -> None:
    """Raise an error if the detail of charts names metrics that are not measured."""
    unknown = [] if isinstance(detail, str) else [name for name in detail if name not in metrics]
    if unknown:
        raise ValueError(
            f"detail names '{unknown[0]}', which is not measured; metrics has {', '.join(metrics)}"
        )


def documented(options: type) -> Callable[[_Class], _Class]:
    """Insert the descriptions of all options into a class's docstring, at `{options}`.

    Args:
        options: `MonitorOptions` or `CallbackOptions`, whose options the class takes.

    Returns:
        The decorator.
    """
    lines = []
    for name, one in declared(options).items():
        lines += [f"\n{one.group}:"] if one.group else []
        default = "METRICS" if one.default is METRICS else repr(one.default)
        words = f"{name} (default {default}): {one.words}"
        lines.append(textwrap.fill(words, 96, initial_indent="    ", subsequent_indent=" " * 8))

    def document(cls: _Class) -> _Class:
        if cls.__doc__ is not None:  # python -OO removes docstrings
            cls.__doc__ = inspect.cleandoc(cls.__doc__).replace("{options}", "\n".join(lines))
        return cls

    return document


__all__ = [
    "AUTO",
    "VALIDATION",
    "CallbackOptions",
    "MonitorOptions",
    "Option",
    "check_callback_options",
    "check_count",
    "check_options",
    "check_step",
    "declared",
    "documented",
]

"""Options of a monitor: declared, documented and checked here, for `Monitor` and both callbacks."""

import difflib
import inspect
import math
import operator
import os
import re
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, SupportsIndex, TypedDict, TypeVar, cast, get_type_hints

from torch import nn

from geomon.analysis import Phase
from geomon.analysis.alerts import RULES, Alert, check_alerts
from geomon.capture.snapshot import check_extra_layers
from geomon.metrics import METRICS, Evaluator, check_metrics
from geomon.monitor.held_out import HeldOut, is_loader
from geomon.monitor.measuring.device import check_device
from geomon.monitor.planning.schedule import Schedule, check_schedule, log_spaced
from geomon.monitor.probe_loss import LossFunction
from geomon.record import Sink
from geomon.record.headline import HEADLINE, Detail, check_detail
from geomon.record.tags import training_tag

# Fewest rows of which a dimension can be estimated.
_FEWEST_QUERIES = 3

# What stands for the default share, as `budget`, and that share.
AUTO_BUDGET, DEFAULT_SHARE = "auto", 0.05
# What stands for as many checks as little time affords.
AUTO_CHECKS = "auto"

# In which help shows the options.
_GROUPS = {
    "What is measured": "metrics tokens batches queries blocks extra_layers seed",
    "When and on which inputs": "schedule checks budget probe probe_loss",
    "What is written where": "directory arrays sinks pictures detail log settings",
    "Alerts": "alerts on_alert on_phase",
    "Ranks and devices": "gather rank_timeout background device max_capture_mb",
    "What goes wrong": "strict sink_timeout",
}

# What stands for a trainer's own validation loader, as `probe` of a callback.
VALIDATION = "validation"

_Class = TypeVar("_Class", bound=type)


class MonitorOptions(TypedDict, total=False):
    """The keyword arguments of a monitor.

    Args:
        metrics: Metrics to measure: a dict from a name to a function of views, or a list of names,
            ["twonn", "anisotropy"]. `METRICS` are those measured by default; `select` makes a dict
            of some by name.
        schedule: Function from a step to whether a reading is due, or a number of steps, 100 for
            `every(100)`; None for `log_spaced()`. Step 0 is always due. If training jumps over a
            due step, the next step is read.
        checks: When the few cheap values that alerts watch are looked at between readings, in the
            training forward of the first rank: "auto" as often as 1 % of the time affords, a
            function or number of steps as for `schedule`, or None for never. A check records
            nothing; if it raises an alert, the next step is read, and `on_alert` is called. With a
            probe, without alerts and where the model is compiled there are none.
        tokens: Number of rows of hidden states in one split.
        batches: Largest number of splits, over which the mean is taken. With two or more, their
            deviation is recorded too, as the papers give it; margins need none.
        queries: Number of rows of a split from which distances to all its rows are measured: 1,024
            halve the cost of the intrinsic dimension for 10 to 50 % more scatter. None for all
            rows, as in the papers.
        probe: Fixed inputs for an extra pass in eval mode at due steps, instead of watching the
            training forward. A tensor, a dict of keyword arguments, a tuple of arguments, or a
            function of the model; or a data loader or another iterable of batches. The first
            batches of a loader are taken once: enough for the sampled rows and 16 sequences, at
            most 64. The model gets what its `forward` takes of a batch, without labels; with
            several ranks each reads its share. "validation", in the callbacks, is the trainer's
            validation loader. None watches the training forward.
        probe_loss: Function of what the model returned for the inputs of the probe, and of these
            inputs (a batch with its labels), that returns the loss as a number or a tensor with one
            element. It is recorded as `training/probe_loss` and charted as `geomon/probe_loss`: a
            validation at every reading. The model's time in that pass is then not counted as
            geomon's. Several batches are weighted by their sequences. None for no loss.
        log: Names of values to record in every reading beside the metrics, as `training/<name>`.
            Each reading of a `Monitor` waits for `Monitor.log` to give them, until the next step.
            The callbacks take the loss by themselves (`loss`), and values of these names from what
            the trainer logs: `log=("val_loss",)`.
        settings: Settings of the training that tell runs apart, as numbers and texts, in dicts if
            need be: `{"learning_rate": 3e-4, "trial": 7}`. They are recorded as
            `training/learning_rate`, and pages say in which of them runs differ. The callbacks add
            the hyper-parameters of the module or the usual arguments of the Trainer. Texts whose
            names are those of secrets are left out.
        directory: Folder in which the first rank writes `readings.jsonl`. None for no record; in
            the callbacks for the folder of the run's logger or checkpoints.
        arrays: Whether to write the arrays that figures need to files beside the record, in
            `arrays/`: mean queries and keys, a few single ones, eigenvalues, moments of token
            types. At most about a megabyte a reading; of readings less than 5 % apart only some
            have them.
        sinks: Objects with `write(reading)` and `close()` that get every reading after the record,
            on the first rank, in a thread for which training waits. A sink that fails at five
            readings in a row is left out.
        budget: Largest share of the time that geomon may take, 0.01 or "1%"; None follows the
            schedule whatever it costs. The budget decides whether a reading is made, never how much
            of it: a due reading that does not fit is put off until it does. In the callbacks the
            share is of the time that the whole run is expected to take, of which three quarters may
            be used early; where the length is not known, as in a loop of your own, it is of the
            time since the first step. The first eight readings, a callback's last one and explicit
            calls of `probe` are always made. "auto" is "5%" in the callbacks, and in a loop of your
            own where several ranks are gathered and wait for one another; else None.
        gather: With several ranks, whether a reading is that of the rows of all ranks: each keeps
            its share of the rows, the ranks share the layers out for measuring, and the first rank
            records. Build the monitor on every rank after `torch.distributed` is initialised, and
            call it with the same steps and options. If False, the first rank measures its own rows
            and the ranks exchange nothing.
        rank_timeout: Seconds that a rank waits for the others in one reading, but at most half of
            the timeout of the training's own process group. A rank that does not answer in time
            ends the gathering, never the run: the first rank continues with its own rows.
        background: Whether to measure rows in a thread while training goes on, on an accelerator on
            a stream of its own; None does so where the model is on an accelerator. Gathered rows
            are measured immediately, and so are all rows where a metric is your own, which may draw
            random numbers of the training.
        device: Where rows are measured: "cpu" on the host; "auto" on the device of the model, if
            training leaves enough memory there; or the name of an accelerator, "cuda:1". With
            several ranks each measures its share of the layers on its own device. A reading for
            which the device has no memory is measured on the host, and says so.
        max_capture_mb: Largest memory of what one reading keeps of a pass, in millions of bytes. If
            need be, fewer rows, queries and keys are kept, and the reading says so. None for no
            limit.
        seed: Seed of the private generator that samples rows, together with the step and the rank.
        sink_timeout: Seconds that one call of a sink may take. A sink that takes longer is left out
            from then on, with a warning. The loggers of a trainer have no limit.
        strict: Whether to raise what goes wrong in a reading, instead of a warning and a missing
            value.
        blocks: The blocks of the model, where the search does not find them: a regular expression
            that matches their whole names, or the modules.
        extra_layers: Layers to measure beside the blocks, each as costly as one of them:
            "final_norm" (the last block's output after the final norm), "embedding" and
            "unembedding" (rows of the two matrices).
        on_phase: Function of a `Phase`, called in the training's own thread on the first rank after
            a reading is recorded, when the phase of the mean intrinsic dimension has another name
            than before ("expanding", "level", "compressing", ...). An exception in it becomes a
            warning.
        on_alert: Function of an `Alert`, called like `on_phase`, once for each alert.
        alerts: Names of the alerts to look for, as in `geomon.analysis.alerts.RULES`; () for none.
            An alert is a note of its reading and a warning.

    Raises:
        TypeError: An argument has a name that does not exist. A hook is not callable.
        ValueError: The model has no blocks, a metric reads an unknown view, the schedule never
            fires, no alert has such a name, a number is out of range, or the directory cannot be
            written.
    """

    metrics: Mapping[str, Callable[..., Any]] | Sequence[str]
    schedule: Schedule | int | None
    checks: Schedule | int | str | None
    tokens: int
    batches: int
    queries: int | None
    probe: Any
    probe_loss: LossFunction | None
    log: Sequence[str]
    settings: Mapping[str, Any]
    directory: str | os.PathLike[str] | None
    arrays: bool
    sinks: Sequence[Sink]
    budget: float | str | None
    gather: bool
    rank_timeout: float
    background: bool | None
    device: str
    max_capture_mb: float | None
    seed: int
    sink_timeout: float
    strict: bool
    blocks: str | Sequence[nn.Module] | None
    extra_layers: Sequence[str]
    on_phase: Callable[[Phase], object] | None
    on_alert: Callable[[Alert], object] | None
    alerts: Sequence[str]


class CallbackOptions(MonitorOptions, total=False):
    """The keyword arguments of a callback.

    Args:
        pictures: Whether loggers that show pictures get them: the intrinsic dimension over
            training, anisotropy over depth, maps of layers and steps, and matrices of layers and
            heads, each time the step has doubled and at the end.
        detail: How much loggers show: "headline" for about a dozen values in the group `geomon/`;
            "layers" for every layer of every metric too, in groups of their own; or names of
            metrics whose means are headline values too. The record holds everything. Sinks given
            with `sinks` have a `detail` of their own.

    Raises:
        TypeError: An argument has a name that does not exist. A hook is not callable.
        ValueError: A metric reads an unknown view, the schedule never fires, no alert has such a
            name, a number is out of range, or the detail names no metric. When training starts: no
            blocks in the model, a directory that cannot be written.
    """

    pictures: bool
    detail: Detail


DEFAULTS: MonitorOptions = {
    "metrics": METRICS,
    "schedule": None,
    "checks": AUTO_CHECKS,
    "tokens": 4096,
    "batches": 1,
    "queries": Evaluator.queries,
    "probe": None,
    "probe_loss": None,
    "log": (),
    "settings": {},
    "directory": "runs/geomon",
    "arrays": True,
    "sinks": (),
    "budget": AUTO_BUDGET,
    "gather": True,
    "rank_timeout": 60.0,
    "background": None,
    "device": "cpu",
    "max_capture_mb": None,
    "seed": 0,
    "sink_timeout": 30.0,
    "strict": False,
    "blocks": None,
    "extra_layers": (),
    "on_phase": None,
    "on_alert": None,
    "alerts": tuple(RULES),
}

CALLBACK_DEFAULTS: CallbackOptions = {
    **DEFAULTS,
    "directory": None,
    "pictures": True,
    "detail": HEADLINE,
}


def check_options(options: MonitorOptions, owner: str) -> MonitorOptions:
    """Return all options of a monitor, checked: those given, and the defaults of the others.

    Args:
        options: The options that were given.
        owner: Name of the class that was called, for messages.

    Raises:
        TypeError: An option has a name that does not exist, metrics are no mapping, a sink is none,
            or a hook is no function.
        ValueError: A number is out of range, a metric reads an unknown view, no alert has such a
            name, or the schedule never fires.
    """
    return _check(cast("MonitorOptions", {**DEFAULTS, **options}), DEFAULTS, owner)


def check_callback_options(options: CallbackOptions, owner: str) -> CallbackOptions:
    """Return all options of a callback, checked: those given, and the defaults of the others.

    Args:
        options: The options that were given.
        owner: Name of the class that was called, for messages.

    Raises:
        TypeError: As `check_options`.
        ValueError: As `check_options`.
    """
    given = cast("CallbackOptions", {**CALLBACK_DEFAULTS, **options})
    checked = _check(given, CALLBACK_DEFAULTS, owner)
    checked["detail"] = _check_detail(checked["detail"], checked["metrics"])
    return checked


_Options = TypeVar("_Options", bound=MonitorOptions)


def _check(options: _Options, defaults: MonitorOptions, owner: str) -> _Options:
    for name in options:
        if name not in defaults:
            close = difflib.get_close_matches(name, defaults)
            advice = f" (did you mean '{close[0]}'?)" if close else ""
            raise TypeError(
                f"{owner}() has no argument '{name}'{advice}; there are {', '.join(defaults)}"
            )
    check_count("tokens", options["tokens"])
    check_count("batches", options["batches"])
    check_count("queries", options["queries"], at_least=_FEWEST_QUERIES, or_none=True)
    options["metrics"] = check_metrics(options["metrics"])
    options["extra_layers"] = check_extra_layers(options["extra_layers"])
    options["probe"] = _check_probe(options["probe"], owner, callback="pictures" in defaults)
    _check_probe_loss(options, callback="pictures" in defaults)
    options["log"] = _check_names(options["log"])
    _check_sinks(options["sinks"])
    if not isinstance(options["settings"], Mapping):
        raise TypeError(
            f"settings is a dict, {{'learning_rate': 3e-4}} for instance, got "
            f"{type(options['settings']).__name__}"
        )
    schedule = options["schedule"]
    options["schedule"] = check_schedule(log_spaced() if schedule is None else schedule)
    checks = options["checks"]
    if checks is not None and checks != AUTO_CHECKS:
        try:
            options["checks"] = check_schedule(checks)  # type: ignore[arg-type]
        except ValueError as error:
            raise ValueError(str(error).replace("schedule", "checks", 1)) from None
    options["budget"] = check_budget(options["budget"])
    options["device"] = check_device(options["device"])
    most = options["max_capture_mb"]
    if most is not None and not 0 < most <= math.inf:
        raise ValueError(f"max_capture_mb is a number above 0, or None, got {most!r}")
    for name, seconds in (
        ("rank_timeout", options["rank_timeout"]),
        ("sink_timeout", options["sink_timeout"]),
    ):
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
            raise ValueError(f"{name} is a number of seconds above 0, got {seconds!r}")
    if not isinstance(options["arrays"], bool):
        raise ValueError(f"arrays is True or False, got {options['arrays']!r}")
    check_alerts(options["alerts"])
    for name, hook in (("on_phase", options["on_phase"]), ("on_alert", options["on_alert"])):
        if hook is not None and not callable(hook):
            raise TypeError(f"{name} is a function of one argument, or None, got {hook!r}")
    return options


def _check_probe(probe: Any, owner: str, *, callback: bool) -> Any:
    """The inputs of the probe; of a loader its held-out batches."""
    if isinstance(probe, str) and not (callback and probe == VALIDATION):
        known = f"'{VALIDATION}', " if callback else ""
        why = "" if callback else f" ({owner} knows no trainer: give the loader itself)"
        raise ValueError(
            f"probe is {known}inputs of the model or a loader of batches, got {probe!r}{why}"
        )
    return HeldOut(probe) if is_loader(probe) else probe


def _check_probe_loss(options: MonitorOptions, *, callback: bool) -> None:
    """Raise an error for a loss that is no function, or that no pass will be made for."""
    function = options["probe_loss"]
    if function is None:
        return
    if not callable(function):
        raise TypeError(
            "probe_loss is a function of what the model returns and of its inputs, "
            f"lambda outputs, batch: outputs.loss for instance, or None, got {function!r}"
        )
    if callback and options["probe"] is None:  # a Monitor may be given inputs with each probe
        raise ValueError(
            f"probe_loss is the loss on the inputs of a probe, and there is none: give "
            f"probe='{VALIDATION}', or inputs of the model"
        )


def _check_sinks(sinks: Any) -> None:
    """Raise an error for what is no sequence of sinks; the callbacks find the trainer's loggers."""
    named = isinstance(sinks, str) or not isinstance(sinks, Iterable)
    wrong = (
        [sinks]
        if named
        else [sink for sink in sinks if isinstance(sink, type) or not isinstance(sink, Sink)]
    )
    if wrong:
        raise TypeError(
            "sinks is a list of objects with write(reading) and close(), "
            f"[TensorBoard('runs/a')] for instance, got {reprlib.repr(wrong[0])}; the callbacks "
            "write to the loggers of the trainer without it"
        )


def _check_names(names: Sequence[str]) -> tuple[str, ...]:
    """The names of logged values, checked; a single name may stand for itself."""
    if isinstance(names, str):
        names = (names,)
    if not isinstance(names, Iterable):
        raise ValueError(f"log is a tuple of names, ('val_loss',) for instance, got {names!r}")
    checked = tuple(dict.fromkeys(names))
    for name in checked:
        training_tag(name)
    return checked


# A number, and what people write for "per cent".
_SHARE = re.compile(r"\s*(?P<number>[^\s%]+?)\s*(?P<percent>%|per\s?cent)?\s*", re.IGNORECASE)


def check_budget(share: Any) -> float | str | None:
    """Return the budget as a share of the time between 0 and 1; None for no limit, or "auto".

    Args:
        share: A number, or text such as "0.01", "1%", "0.5 %" or "1 percent"; or "auto".

    Raises:
        ValueError: It is no number between 0 and 1, or no text of one.

    Example:
        >>> check_budget("1%"), check_budget("0.5 percent"), check_budget(0.01)
        (0.01, 0.005, 0.01)
    """
    if share is None or (isinstance(share, str) and share == AUTO_BUDGET):
        return share
    number, divisor = share, 1
    if isinstance(share, str):
        found = _SHARE.fullmatch(share)
        number = found["number"] if found else share
        divisor = 100 if found and found["percent"] else 1
    try:
        value = math.nan if isinstance(share, bool) else float(number) / divisor
    except (TypeError, ValueError, RuntimeError):  # no number; a tensor of several
        value = math.nan
    if not 0 < value < 1:
        raise ValueError(
            "budget is a share of the training time between 0 and 1, 0.01 or '1%' for one per "
            f"cent, 'auto', or None for no limit, got {reprlib.repr(share)}"
        )
    return value


def _check_detail(detail: Detail, metrics: Collection[str]) -> Detail:
    """The detail of charts, checked: the metrics that it names are measured."""
    detail = check_detail(detail)
    unknown = [] if isinstance(detail, str) else [name for name in detail if name not in metrics]
    if unknown:
        raise ValueError(
            f"detail names '{unknown[0]}', which is not measured; metrics has {', '.join(metrics)}"
        )
    return detail


def check_count(name: str, value: int | None, at_least: int = 1, *, or_none: bool = False) -> None:
    """Raise a `ValueError` unless the value is a whole number of at least so many.

    Args:
        name: Name of the argument, for the message.
        value: Value of the argument.
        at_least: Smallest number that makes sense.
        or_none: Whether None stands for all there are.
    """
    if or_none and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        none = ", or None" if or_none else ""
        raise ValueError(f"{name} is a whole number of at least {at_least}{none}, got {value!r}")


def check_step(step: SupportsIndex) -> int:
    """Return a step as a plain int: whole numbers of numpy and tensors of one are taken too.

    Args:
        step: Number of optimizer updates already in the weights.

    Raises:
        TypeError: The step is no whole number.
        ValueError: The step is below 0, or no 64 bits hold it.
    """
    expected = "a step is the number of optimizer updates already in the weights, a whole number"
    is_flag = isinstance(step, bool) or str(getattr(step, "dtype", "")).endswith("bool")
    try:
        number = None if is_flag else operator.index(step)
    except (TypeError, RuntimeError):  # a float; a tensor of several
        number = None
    if number is None:
        raise TypeError(f"{expected}, got {reprlib.repr(step)}")
    if not 0 <= number < 2**63:
        raise ValueError(f"{expected} from 0, got {reprlib.repr(number)}")
    return number


class _Shown:
    """A default whose own form would fill a page: signatures show it by its name.

    Args:
        name: Name under which people know the value.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


def _show_options(defaults: MonitorOptions, *declarations: type) -> Callable[[_Class], _Class]:
    """Show the options of a class in its signature, and in its docstring in place of `{options}`.

    `inspect.signature`, `help()` and editors then show every keyword with its default, though the
    class takes `**options`.

    Args:
        defaults: Default of every option.
        declarations: The TypedDicts that declare the options and document them.
    """
    hints = {name: hint for one in declarations for name, hint in get_type_hints(one).items()}
    values: dict[str, object] = {**defaults, "metrics": _Shown("METRICS")}
    shown = {n: values[n] for names in _GROUPS.values() for n in names.split() if n in values}
    keywords = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[name]
        )
        for name, default in shown.items()
    ]

    def show(cls: _Class) -> _Class:
        init = cls.__init__  # type: ignore[misc]
        own = inspect.signature(init)
        plain = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        init.__signature__ = own.replace(parameters=[*plain, *keywords])
        cls.__signature__ = own.replace(  # type: ignore[attr-defined]
            parameters=[*plain[1:], *keywords], return_annotation=inspect.Signature.empty
        )
        if cls.__doc__ is not None:  # python -OO removes docstrings
            # From Python 3.13 on, docstrings have no indentation of the code around them.
            words = inspect.cleandoc(cls.__doc__)
            cls.__doc__ = words.replace("{options}", _sections(declarations))
        return cls

    return show


def _sections(declarations: Sequence[type]) -> str:
    """The "Args" of several TypedDicts in groups, and the "Raises" of the last one."""
    texts: dict[str, str] = {}
    raised = ""
    for declaration in declarations:
        words = inspect.cleandoc(declaration.__doc__ or "").partition("Args:\n")[2]
        section, _, raised = words.partition("Raises:\n")
        for entry in re.split(r"\n(?= {4}\w)", section.rstrip()):
            texts[entry.partition(":")[0].strip()] = entry
    groups = [
        "\n".join([f"{title}:", *(texts[name] for name in names.split() if name in texts)])
        for title, names in _GROUPS.items()
    ]
    return "\n\n".join(["", *groups, f"Raises:\n{raised}"])


show_monitor_options = _show_options(DEFAULTS, MonitorOptions)
show_callback_options = _show_options(CALLBACK_DEFAULTS, MonitorOptions, CallbackOptions)


__all__ = [
    "CallbackOptions",
    "MonitorOptions",
    "check_budget",
    "check_callback_options",
    "check_count",
    "check_options",
    "check_step",
    "show_callback_options",
    "show_monitor_options",
]

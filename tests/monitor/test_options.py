"""Options are declared once: signatures, help and errors of all that take them agree."""

import ast
import inspect
import re
from fractions import Fraction
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch

from geomon import Memory, Monitor
from geomon.huggingface import GeometryMonitor as OfTrainer
from geomon.lightning import GeometryMonitor as OfLightning
from geomon.monitor import CallbackOptions, CallbackSession
from support.models import PlainDecoder

CALLBACKS = (OfLightning, OfTrainer)


def options_of(**given):
    """All options, checked."""
    return CallbackSession(given, "GeometryMonitor").options


# Options that are wrong, and the words of the error.
WRONG = [
    ({"tokens": 0}, "tokens must be a whole number of at least 1, got 0"),
    ({"tokens": True}, "tokens must be a whole number of at least 1, got True"),
    ({"splits": 1.5}, "splits must be a whole number of at least 1, got 1.5"),
    ({"queries": 2}, "queries must be a whole number of at least 3, or None, got 2"),
    ({"extra_layers": ["final"]}, "final"),
    ({"alerts": ["rank"]}, "no alert is called 'rank'"),
    *(({"log": (name,)}, "cannot name a value") for name in ("", "/", "a/", " a", "a\nb", "a//b")),
    *(
        ({"background": way}, f"None, 'thread' or 'process', got {way!r}$")
        for way in ("threads", 1, 0, "")
    ),
    *(({"budget": share}, "between 0 and 1") for share in (0, 0.0, "0%", -0.01, 1.0, "100%")),
    ({"probe": "validate"}, r"probe must be inputs of the .* 'validation', got 'validate'$"),
    ({"probe_loss": 3}, "probe_loss must be a function .* or None, got 3$"),
    ({"sink_timeout": True}, "sink_timeout must be a number of seconds above 0, got True"),
    ({"settings": 3}, r"settings must be a dict, such as {'learning_rate': 3e-4}, got int$"),
    ({"checks": 0}, "^checks is 0: expected a function"),
    ({"budget": 1}, "budget must be a share of the training time between 0 and 1"),
    ({"budget": float("nan")}, "budget must be a share of the training time between 0 and 1"),
    ({"budget": True}, "budget must be a share of the training time between 0 and 1"),
    ({"budget": "100 %"}, "'auto', or None for no limit, got '100 %'"),
    ({"budget": "0,5 %"}, "or None for no limit, got '0,5 %'"),
    ({"budget": [0.01]}, r"or None for no limit, got \[0.01\]"),
    ({"max_capture_mb": 0}, "max_capture_mb must be a number above 0, or None, got 0"),
    ({"max_capture_mb": float("nan")}, "max_capture_mb must be a number above 0, or None, got nan"),
    ({"arrays": "yes"}, "arrays must be True or False, got 'yes'"),
    ({"sink_timeout": 0}, "sink_timeout must be a number of seconds above 0, got 0"),
    ({"rank_timeout": "1"}, "rank_timeout must be a number of seconds above 0, got '1'"),
    ({"schedule": lambda step: False}, "fires at none of the steps"),
    ({"log": 3}, r"log must be a tuple of names, such as \('val_loss',\), got 3"),
    ({"metrics": {}}, "metrics is empty"),
    ({"metrics": {"m": lambda hiden: 0}}, "asks for 'hiden', which is not a view"),
    ({"metrics": {"m": lambda: 0}}, "reads no view"),
    ({"metrics": {"a/b": lambda hidden: 0}}, "cannot name a metric"),
    ({"metrics": {"training": lambda hidden: 0}}, "cannot name a metric"),
    ({"metrics": ["twon"]}, r"called 'twon' \(did you mean 'twonn'\?\)"),
    ({"metrics": 3}, "metrics must be a dict"),
    ({"on_phase": 3}, "on_phase must be a function of one argument, or None, got 3"),
    ({"on_alert": "x"}, "on_alert must be a function of one argument, or None, got 'x'"),
    ({"alerts": "rank_collapse"}, "a sequence of names"),
    *(
        ({"sinks": sinks}, r"sinks must be a list of objects with write\(reading\) and")
        for sinks in ("tensorboard", Memory(), [Memory], [Memory(), "wandb"])
    ),
]
MODULE = "expected a torch.nn.Module, got"
# Arguments that only a monitor is given, and the words of the error.
REFUSED = [
    (lambda: Monitor(PlainDecoder(), directory=None).probe(0), "no inputs to probe"),
    (lambda: Monitor(torch.nn.Linear(3, 3), directory=None), "no transformer blocks"),
    (lambda: Monitor(PlainDecoder(), directory=Path(__file__) / "x"), "cannot be written"),
    (lambda: Monitor("gpt2", directory=None), f"{MODULE} str"),
    (lambda: Monitor([], directory=None), f"{MODULE} list"),
    (lambda: Monitor([PlainDecoder()] * 2, directory=None), f"{MODULE} list"),
    (lambda: Monitor(object(), directory=None), f"{MODULE} object"),
    *(
        (lambda cls=cls: cls(metrics=["twonn"], detail=["twonn", "gride"]),
         "detail names 'gride', which is not measured; metrics ha")
        for cls in CALLBACKS
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("typed", "share"),
    [
        (0.01, 0.01), ("0.01", 0.01), ("1%", 0.01), ("0.5 %", 0.005), (" 1e-1 % ", 0.001),
        ("1 percent", 0.01), ("1 per cent", 0.01), ("2Percent", 0.02), (".5", 0.5), (None, None),
        (Fraction(1, 8), 0.125), (torch.tensor(0.25), 0.25),
    ],
)  # fmt: skip
def test_a_budget_is_understood_as_people_type_it(typed, share):
    checked = options_of(budget=typed)["budget"]
    assert checked == share
    assert checked is None or type(checked) is float


def test_every_option_has_a_default_that_its_own_check_lets_pass():
    checked = options_of()
    assert checked.keys() == get_type_hints(CallbackOptions).keys()
    assert options_of(**checked) == checked
    assert checked["directory"] is None
    assert options_of(log="val_loss")["log"] == ("val_loss",)
    small = {"max_capture_mb": 0.5, "rank_timeout": 0.5, "sink_timeout": 0.5, "queries": None}
    assert options_of(**small).items() >= small.items()
    for name, ways in (
        ("background", (None, True, False, "thread", "process")),
        ("checks", (None, "auto")), ("budget", (None, "auto", 0.999)),
        ("max_capture_mb", (None, float("inf"))), ("sink_timeout", (float("inf"),)),
    ):  # fmt: skip
        for way in ways:
            assert options_of(**{name: way})[name] == way


def test_the_pages_state_the_defaults():
    docs, stated = Path(__file__).parents[2] / "docs", {}
    table = (docs / "options.md").read_text().partition("\n## ")[0]
    for names, defaults in re.findall(r"^\| (`.*?) \| (.*?) \|", table, re.MULTILINE):
        texts = defaults.partition(";")[0].replace("`", "").split(", ")
        stated |= zip(re.findall(r"`(\w+)`", names), texts, strict=True)
    found = options_of() | {"directory": "runs/geomon"}  # of a monitor: a trainer has its own
    for name in stated.keys() - {"metrics", "schedule", "alerts"}:  # which are shown by name
        assert ast.literal_eval(stated[name]) == found[name], name


@pytest.mark.parametrize("cls", [Monitor, *CALLBACKS], ids=["Monitor", "Lightning", "Trainer"])
def test_help_shows_every_option_with_its_default_and_type_checkers_see_its_type(cls):
    text = inspect.getdoc(cls)
    assert "{options}" not in text
    assert max(map(len, text.splitlines())) <= 100
    indents = {len(line) - len(line.lstrip()) for line in text.splitlines()}
    assert indents == {0, 4, 8}
    arguments, _, raised = text.partition("Raises:")
    assert "TypeError: If an argument does not exist, or a hook is not callable." in raised
    parameters = inspect.signature(cls).parameters.values()
    (given,) = [each for each in parameters if each.kind is inspect.Parameter.VAR_KEYWORD]
    (options,) = get_args(given.annotation)
    assert (options is CallbackOptions) == (cls is not Monitor)
    named = re.findall(r"^ {4}(\w+) \(default |^(Ranks and devices):$", arguments, re.MULTILINE)
    assert [name for name, _ in named if name] == list(get_type_hints(options))
    assert ("", "Ranks and devices") in named


@pytest.mark.parametrize("callback", CALLBACKS)
def test_a_callback_shows_its_main_options_on_a_line(callback):
    shown = repr(callback(metrics=["twonn"], schedule=100, tokens=512, probe=torch.zeros(9, 99)))
    assert shown == "GeometryMonitor(1 metric, schedule=every(steps=100), 512 tokens, probe=Tensor)"

    class Probe:
        __call__ = __repr__ = lambda *given: "a\nb"

    shown = repr(callback(metrics=["twonn", "cosine"], schedule=100, probe=Probe()))
    assert shown == "GeometryMonitor(2 metrics, schedule=every(steps=100), 4,096 tokens, probe=a b)"


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_all_refuse_the_same_in_the_same_words(wrong, message):
    said = []
    for build in (
        lambda: Monitor(PlainDecoder(), directory=None, **wrong),
        *(lambda callback=callback: callback(**wrong) for callback in CALLBACKS),
    ):
        with pytest.raises((ValueError, TypeError), match=message) as error:
            build()
        said.append(str(error.value))
    assert len(set(said)) == 1
    assert "\n" not in said[0]


@pytest.mark.parametrize(
    "build",
    [lambda **o: Monitor(PlainDecoder(), **o), *CALLBACKS],
    ids=["Monitor", "Lightning", "Trainer"],
)
def test_a_name_that_does_not_exist_is_answered_with_a_close_one(build):
    with pytest.raises(
        TypeError, match=r"has no argument 'token' \(did you mean 'tokens'\?\); there"
    ):
        build(token=3)
    with pytest.raises(TypeError, match="has no argument 'zzz'; there are metrics, tokens"):
        build(zzz=3)


@pytest.mark.parametrize(("build", "words"), REFUSED)
def test_arguments_that_a_monitor_cannot_use_are_refused_in_one_line(build, words):
    with pytest.raises((ValueError, TypeError), match=words) as error:
        build()
    assert "\n" not in str(error.value)


def test_a_step_may_be_as_large_as_a_record_holds():
    monitor = Monitor(PlainDecoder(), directory=None, schedule=1, checks=None)
    for step in (126, 2**62, 2**63 - 1):
        monitor.advance(step)
        assert monitor.is_due(step)

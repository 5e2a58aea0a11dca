"""Neutrality and every way out, in every loop; the same readings from all of them."""

import copy
import functools
import itertools
import math
import re
import signal
import threading

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from torch.utils.data import IterableDataset

from geomon import Memory, Monitor, every, read, select
from geomon.monitor import moves
from support.fingerprint import fingerprint, random_state, weights
from support.loggers import events_of
from support.loops import LOOPS, ROWS, Learner
from support.models import batch, transformer
from support.readings import charts_of
from support.wandb_file import wandb_rows, work_offline

METRICS = select("variance", "attention_entropy", "qk_cosine")


def failing(at):
    """A metric that raises at one of its calls."""
    calls = itertools.count()

    def unreliable(hidden):
        if next(calls) == at:
            raise ArithmeticError("in a metric")
        return hidden.norm()

    return METRICS | {"unreliable": unreliable}


# Options of the learner and the loop in each case, and the loops that have it.
CASES = {
    "end": {},
    "exception in the model": {"error": RuntimeError},
    "ctrl-c": {"error": KeyboardInterrupt},
    "exception in a metric": {"metrics": lambda: failing(at=45)},
    # 4 layers, each measured once and 8 times for its margin: the third reading.
    "exception in a metric, strict": {"metrics": lambda: failing(at=72), "strict": True},
    "probe": {"probe": batch(seed=77)},
    "accumulation": {"loop": {"accumulate": 4}},
    "lbfgs": {"loop": {"kind": "lbfgs"}, "loops": ("lightning", "plain")},
    "two optimizers": {"loop": {"kind": "two"}, "loops": ("lightning", "plain")},
    "skipped by -1": {"loop": {"skip": "-1"}, "loops": ("lightning",)},
    "skipped by None": {"loop": {"skip": "None"}, "loops": ("lightning",)},
}
CELLS = [(loop, case) for case, of in CASES.items() for loop in of.get("loops", LOOPS)]


def expected_steps(loop, case):
    """Every second step, and a forced last one if the loop knows its last step."""
    if CASES[case].get("error") or case.endswith("strict"):
        return [0, 2]
    if loop == "plain":
        return [0, 2, 4]
    if case == "probe":
        return [0, 2, 4, 6]
    if case == "two optimizers":  # 12 steps, two in each batch
        return [0, 2, 4, 6, 8, 10]
    return [0, 2, 4, 5]


def train(loop, learner, options, folder, error, **told):
    """Train until the end, or until `error` comes out of it."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        if error is None:
            LOOPS[loop](learner, options, folder, **told)
        else:
            # Lightning turns Ctrl-C into an exit.
            with pytest.raises((error, SystemExit) if error is KeyboardInterrupt else error):
                LOOPS[loop](learner, options, folder, **told)
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning ignores it after the first
    return fingerprint(learner.inside[0]), random_state(), weights(learner)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Trains without geomon; the same training is made once."""

    @functools.cache
    def trained(loop, error, **told):
        folder = tmp_path_factory.mktemp("plain")
        return train(loop, Learner(error=error), None, folder, error, **told)

    return trained


@pytest.mark.parametrize(("loop", "case"), CELLS)
def test_training_is_as_if_nobody_watched(plain, tmp_path, loop, case):
    of = CASES[case]
    told, error, strict = of.get("loop", {}), of.get("error"), of.get("strict", False)
    # A strict metric ends the run where the plain one is ended by the model.
    alone = plain(loop, RuntimeError if strict else error, **told)

    memory = Memory()
    options = {
        "metrics": of.get("metrics", lambda: METRICS)(), "schedule": every(2), "tokens": 64,
        "splits": 1, "sinks": [memory], "strict": strict, "probe": of.get("probe"),
    }  # fmt: skip
    ends = ArithmeticError if strict else error
    watched = train(loop, Learner(error=error), options, tmp_path / "run", ends, **told)

    for name, value in alone[0].items():
        assert watched[0][name] == value, name
    assert not any(map(sum, watched[0]["hooks"]))
    assert watched[1] == alone[1]
    for one, other in zip(watched[2], alone[2], strict=True):
        assert torch.equal(one, other)
    steps = [reading.step for reading in read(tmp_path / "run")]
    assert steps == expected_steps(loop, case)
    assert steps == [reading.step for reading in memory.readings]
    assert all(reading.tokens == 64 for reading in memory.readings)


@pytest.mark.parametrize("net", ["gpt2", "plain"])
def test_all_loops_give_the_same_readings(tmp_path, net):
    options = {"schedule": every(2), "tokens": 64}
    seen, trained = {}, {}
    for loop, run in LOOPS.items():
        learner = Learner(transformer("gpt2") if net == "gpt2" else None)
        run(learner, options, tmp_path / loop, steps=5)
        trained[loop] = weights(learner)
        seen[loop] = {
            reading.step: {
                tag: value.hex()
                for tag, value in reading.values.items()
                if tag not in ("geomon/seconds", "geomon/overhead")
            }
            for reading in read(tmp_path / loop)
        }
    for loop in ("lightning", "huggingface"):
        assert all(map(torch.equal, trained[loop], trained["plain"]))
        assert seen[loop] == seen["plain"]
    assert list(seen["plain"]) == [0, 2, 4]
    assert len(seen["plain"][4]) > 300
    assert all("training/loss" in values for values in seen["plain"].values())


# -- what callbacks of Lightning and of the Trainer do alike ---------------------------------------

MEAN_OF_IDS = {"ids": lambda token_ids: token_ids.double().mean()}
HELD_OUT = batch(21, 32, seed=99)  # in batches of 8, 8 and 5


class Stream(IterableDataset):
    """A stream that continues after its last item, and never ends."""

    at = 0

    def __iter__(self):
        while True:
            yield HELD_OUT[self.at % len(HELD_OUT)]
            self.at += 1


# Loop, validation data, arguments; how many of the batches of 8 are probed, and at which steps.
EVALUATED = {
    "sanity check": ("lightning", HELD_OUT, {"val_check_interval": 2}, 2, (0, 3, 6)),
    "validation": (
        "lightning", HELD_OUT, {"val_check_interval": 2, "num_sanity_val_steps": 0}, 3, (3, 6)
    ),
    "a stream": (
        "lightning", Stream(),
        {"val_check_interval": 2, "num_sanity_val_steps": 0, "limit_val_batches": 2}, 2, (3, 6),
    ),
    "trainer": ("huggingface", HELD_OUT, {"eval_strategy": "steps", "eval_steps": 2}, 3, (3, 6)),
    "only at the end": ("huggingface", HELD_OUT, {"eval_strategy": "epoch"}, 3, (6,)),
    "named": (
        "huggingface",
        {name: [{"ids": row} for row in HELD_OUT] for name in "ab"},
        {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True}, 3, (0, 3, 6),
    ),
}  # fmt: skip


def losses_of(trainer):
    """The losses of the evaluations; in Lightning of their batches, and of the last whole one."""
    if hasattr(trainer, "callback_metrics"):
        last = float(trainer.callback_metrics["val/loss"])
        return [*trainer.lightning_module.validated, last]
    history = trainer.state.log_history
    return [x for entry in history for name, x in entry.items() if re.match("eval_.*loss", name)]


@pytest.mark.parametrize("probe", [None, "validation"])
@pytest.mark.parametrize("case", EVALUATED)
def test_evaluations_are_left_alone_and_their_data_can_be_probed(tmp_path, case, probe):
    loop, held_out, told, batches, steps = EVALUATED[case]
    plain, watched, memory = Learner(), Learner(), Memory()
    data = [copy.deepcopy(held_out) for _ in range(2)]  # a stream goes on
    without = LOOPS[loop](plain, None, tmp_path / "plain", held_out=data[0], **told)
    options = {
        "metrics": MEAN_OF_IDS | METRICS, "tokens": 10_000, "splits": 1, "schedule": every(3),
        "strict": True, "sinks": [memory], "probe": probe,
    }  # fmt: skip
    if probe:
        options["probe_loss"] = lambda outputs, inputs: outputs["loss"]
    trainer = LOOPS[loop](watched, options, tmp_path / "run", held_out=data[1], **told)
    assert losses_of(trainer) == losses_of(without)
    assert all(map(torch.equal, weights(watched), weights(plain)))
    if not probe:
        assert [(r.step, r.mode, r.tokens) for r in memory.readings] == [
            (step, "train", 8 * 32) for step in (0, 3, 5)
        ]
        return
    kept = HELD_OUT[: 8 * batches]
    assert [(r.step, r.source, r.mode, r.tokens) for r in memory.readings] == [
        (step, "probe", "eval", kept.numel()) for step in steps
    ]
    for reading in memory.readings:
        mean = kept.double().mean().item()
        assert reading.values["ids/layer_01"] == pytest.approx(mean, rel=1e-12)
    assert len({r.values["variance/layer_01"] for r in memory.readings}) == len(steps)
    if len(kept) == len(HELD_OUT):
        last = memory.readings[-1].values["training/probe_loss"]
        assert last == pytest.approx(losses_of(trainer)[-1], rel=1e-5)


callbacks = pytest.mark.parametrize("loop", ["lightning", "huggingface"])


NAMED = {
    "lightning": ("val/loss", {"val_check_interval": 3, "num_sanity_val_steps": 0}),
    "huggingface": ("eval_loss", {"eval_strategy": "steps", "eval_steps": 3}),
}


@callbacks
@pytest.mark.parametrize("probe", [None, batch(8, 32, seed=77)], ids=["inline", "probe"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_the_loss_of_the_step_and_named_values_stand_in_its_reading(
    tmp_path, loop, probe, accumulate
):
    (name, told), learner = NAMED[loop], Learner()
    if loop == "lightning":  # which counts batches
        told = told | {"val_check_interval": 3 * accumulate}
    options = {
        "metrics": METRICS, "tokens": 64, "schedule": every(2), "probe": probe, "log": (name,),
        "strict": True,
    }  # fmt: skip
    trainer = LOOPS[loop](
        learner, options, tmp_path, accumulate=accumulate, held_out=HELD_OUT[:8], **told
    )
    evaluated = losses_of(trainer)
    readings = {reading.step: reading.values for reading in read(tmp_path)}
    steps = [0, 2, 4] + ([5] if probe is None else [])
    assert list(readings) == steps + ([6] if probe is not None else [])
    for step in steps:
        parts = learner.losses[accumulate * step : accumulate * (step + 1)]
        if loop == "lightning" or probe is None:  # the loss of the batch that was read
            assert readings[step]["training/loss"] == pytest.approx(parts[0], rel=1e-6)
        else:  # the Trainer logs no loss here
            assert math.isnan(readings[step]["training/loss"])
        value = readings[step][f"training/{name}"]
        assert math.isnan(value) if step < 3 else value == evaluated[0]
    if probe is not None:  # no batch is trained on with the last weights
        assert math.isnan(readings[6]["training/loss"])
        last = evaluated[-1] if loop == "lightning" else evaluated[0]  # not evaluated yet
        assert readings[6][f"training/{name}"] == last


@callbacks
def test_without_validation_data_there_is_one_line(tmp_path, loop):
    with pytest.raises(ValueError, match=r"validation, but it makes none: .*probe=loader") as error:
        LOOPS[loop](Learner(), {"probe": "validation"}, tmp_path)
    assert "\n" not in str(error.value)


@callbacks
def test_no_option_is_needed(tmp_path, monkeypatch, loop):
    told, expect = [], Monitor.expect_end
    monkeypatch.setattr(
        Monitor, "expect_end", lambda monitor, step: told.append(step) or expect(monitor, step)
    )
    LOOPS[loop](Learner(), {"directory": None}, tmp_path, steps=34)
    assert [(r.step, r.source, r.mode) for r in read(tmp_path)] == [
        (step, "inline", "train") for step in (0, 16, 33)
    ]
    assert told == [34]  # a share is of the time of the whole run


@pytest.mark.parametrize("probe", [None, batch(8, 32, seed=77)], ids=["inline", "probe"])
@callbacks
def test_of_accumulated_batches_the_first_is_read_by_what_it_holds(tmp_path, loop, probe):
    options = {
        "metrics": MEAN_OF_IDS, "tokens": 256, "splits": 1, "schedule": every(1), "probe": probe,
    }  # fmt: skip
    LOOPS[loop](Learner(), options, tmp_path, steps=4, accumulate=3)
    seen = [probe] * 5 if probe is not None else ROWS.split(8)[:12:3]
    means = [ids.double().mean().item() for ids in seen]
    readings = read(tmp_path)
    assert [reading.step for reading in readings] == list(range(len(means)))
    assert [r.values["ids/layer_01"] for r in readings] == pytest.approx(means, rel=1e-12)


def on_board(loop, folder):
    """Return options that show a loop's values on TensorBoard, and a function that reads them."""
    of_lightning = loop == "lightning"
    logger = {"logger": TensorBoardLogger(folder, name="runs", version="x")}

    def shown():
        (run,) = (folder / "runs").iterdir()
        return events_of(run if of_lightning else run / "geomon", of_lightning=of_lightning)

    return logger if of_lightning else {"report_to": "tensorboard"}, shown


@callbacks
@pytest.mark.usefixtures("own_metrics_in_background")
def test_a_reading_that_comes_late_is_shown_at_its_own_step(tmp_path, loop):
    go = threading.Event()
    go.set()

    class Holding(Learner):
        """Keeps the metric waiting from step 2 to step 4."""

        def forward(self, ids, return_loss=True):
            if len(self.losses) in (2, 4):
                go.clear() if len(self.losses) == 2 else go.set()
            return super().forward(ids, return_loss)

    def slow(hidden):
        assert go.wait(120)
        return hidden.norm()

    told, shown = on_board(loop, tmp_path)
    options = {
        "metrics": METRICS | {"slow": slow}, "schedule": lambda step: step == 2, "tokens": 64,
        "background": True, "sink_timeout": 600.0,
    }  # fmt: skip
    LOOPS[loop](Holding(), options, tmp_path, **told)
    values = {reading.step: reading.values["slow/mean"] for reading in read(tmp_path)}
    assert list(values) == [0, 2, 5]
    assert dict(shown()["~geomon/slow"]) == pytest.approx(values, rel=1e-6)


@callbacks
@pytest.mark.parametrize(("detail", "probe"), [("headline", None), ("layers", batch(seed=77))])
def test_tensorboard_shows_what_the_record_holds(tmp_path, monkeypatch, loop, detail, probe):
    for share in ("FIRST_SHARE", "SHARE"):  # the run takes a second
        monkeypatch.setattr(f"geomon.show.loggers.parts.{share}", math.inf)
    told, shown_by = on_board(loop, tmp_path)
    options = {
        "metrics": METRICS, "tokens": 64, "schedule": every(1), "detail": detail, "probe": probe,
        "sink_timeout": 600.0, "budget": None,
    }  # fmt: skip
    LOOPS[loop](Learner(), options, tmp_path, **told)
    found, record, expected = shown_by(), read(tmp_path), {}
    charts = charts_of(record, detail)
    for reading in record:
        for tag, value in charts.select(reading).items():
            shown = torch.tensor(value, dtype=torch.float32).item()
            expected.setdefault(f"~{tag}", []).append((reading.step, shown))
    of_values = {tag: x for tag, x in found.items() if isinstance(x[0][1], float) and "/" in tag}
    assert of_values == expected
    assert (len(expected) > 15) == (detail == "layers")
    steps = [*range(6 if probe is None else 7)]
    assert [step for step, _ in expected["~geomon/variance"]] == steps
    for number, metric in ((6, "qk_cosine"), (7, "attention_entropy")):
        name = f"~geomon/{number} {record.text_of(metric).title} by head"
        assert found[name] == [(0, None), (steps[-1], None)]
    assert {"~geomon/1 the run in words", "~geomon/4 model and options"} <= found.keys()
    ((_, layout),) = found["custom_scalars__config__"]
    assert b"~geomon/variance" in layout
    assert (b"~variance/layer_[0-9]+$" in layout) == (detail == "layers")


@callbacks
def test_wandb_offline_holds_what_the_record_holds(tmp_path, monkeypatch, loop):
    import wandb

    work_offline(monkeypatch, tmp_path)
    told = {"report_to": "wandb"}
    if loop == "lightning":
        told = {"logger": WandbLogger(save_dir=tmp_path, project="test")}
    options = {"metrics": METRICS, "tokens": 64, "schedule": every(2), "sink_timeout": 600.0}
    LOOPS[loop](Learner(), options, tmp_path, **told)
    wandb.finish()
    rows, record = wandb_rows(tmp_path), read(tmp_path)
    shown = {int(row["geomon/step"]): row for row in rows if "geomon/variance" in row}
    assert sorted(shown) == [r.step for r in record] == [0, 2, 4, 5]
    charts = charts_of(record)
    for reading in record:
        for tag, value in charts.select(reading).items():
            assert float(shown[reading.step][tag]) == value
    title = re.sub(r"\W+", "_", record.text_of("qk_cosine").title)
    assert any(f"geomon_charts/6_{title}_by_head" in row for row in rows)


class Lost(Learner):
    """A learner whose loss is NaN from the fourth batch on."""

    def forward(self, ids, return_loss=True):
        found = super().forward(ids)
        return {"loss": found["loss"] * math.nan} if len(self.losses) > 3 else found


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loss_that_becomes_nan_is_an_alert_at_its_step_though_the_step_is_not_read(
    loop, tmp_path
):
    logs = {"logging_strategy": "steps", "logging_steps": 1, "logging_nan_inf_filter": False}
    arguments = logs if loop == "huggingface" else {}
    options = {"schedule": lambda step: step == 0, "checks": None, "budget": None}
    options |= {"metrics": METRICS, "alerts": ["loss_not_finite"]}
    LOOPS[loop](Lost(), options, tmp_path, **arguments)
    assert [alert.step for alert in read(tmp_path).alerts] == [3]


@pytest.mark.parametrize("loop", ["lightning", "huggingface"])
def test_callbacks_know_the_learning_rate_over_which_updates_are_watched(
    loop, tmp_path, monkeypatch
):
    monkeypatch.setattr(moves, "_STEADY", 1)
    options = {"schedule": every(1), "checks": None, "budget": None}
    LOOPS[loop](Learner(), options | {"metrics": select("update_size")}, tmp_path)
    readings = [*read(tmp_path)]
    sizes = [reading.column("update_size").at(1) for reading in readings[1:]]
    rates = [
        size / reading.column("update_size", "over_rate").at(1)
        for size, reading in zip(sizes, readings[1:], strict=True)
    ]
    assert rates == pytest.approx([1e-3] * len(rates))

import copy
import functools
import logging
import math
import os
import sys
import types
from typing import NamedTuple

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from geomon import every, lightning, read, select
from geomon.huggingface import GeometryMonitor
from support.fingerprint import fingerprint, is_watched
from support.loggers import LOGGERS, shown_of
from support.models import batch, transformer
from support.readings import charts_of

FEW = {
    "metrics": select("variance", "attention_entropy", "qk_cosine"),
    "tokens": 64,
    "splits": 1,
    "strict": True,
    "sink_timeout": 600.0,  # how long drawing takes says how busy the machine is
    "budget": None,  # tests of it give one
}
ROWS = [{"input_ids": row, "labels": row} for row in torch.cat([batch(seed=i) for i in range(8)])]


def trainer_of(folder, callbacks, *, kind=Trainer, model=None, steps=6, **arguments):
    arguments = {
        "max_steps": steps, "use_cpu": True, "dataloader_pin_memory": False, "disable_tqdm": True,
        "report_to": "none", "save_strategy": "no", "lr_scheduler_type": "constant",
    } | arguments  # fmt: skip
    model = transformer("gpt2") if model is None else model
    return kind(
        model, TrainingArguments(str(folder), **arguments), train_dataset=ROWS,
        eval_dataset=ROWS[:16], callbacks=callbacks,
    )  # fmt: skip


def fit(folder, callbacks, *, resume=None, **told):
    trainer = trainer_of(folder, callbacks, **told)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize(
    ("name", "folders"), [(None, ["run-0", "run-1"]), (lambda trial: "wide", ["wide"])]
)
def test_each_trial_of_a_search_has_a_folder_of_its_own(tmp_path, monkeypatch, name, folders):
    trainer = trainer_of(tmp_path, [GeometryMonitor(**FEW, settings={"width": 32})], steps=1)
    begin = trainer.callback_handler.on_train_begin

    def begins(args, state, control):  # as a search leaves it to the events
        state.is_hyper_param_search = True
        state.trial_name = name and name(None)
        return begin(args, state, control)

    monkeypatch.setattr(trainer.callback_handler, "on_train_begin", begins)
    for _ in folders:
        trainer.train()
    for folder in folders:
        (run,) = read(tmp_path / folder).runs
        # No argument of the Trainer is taken: they may hold what is nobody's business.
        assert {n: x for n, x in run.items() if "training/" in n} == {"training/width": 32}


class Reporter(TrainerCallback):
    """Keeps what it is told, and stops the training at its fifth log."""

    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.append((state.global_step, logs["loss"] if "loss" in logs else sorted(logs)))
        control.should_training_stop = control.should_training_stop or len(self.seen) == 5


def test_other_callbacks_and_the_history_get_nothing(tmp_path, capsys):
    found = {}
    for name, ours in (("plain", []), ("read", [GeometryMonitor(schedule=every(1), **FEW)])):
        before, after = Reporter(), Reporter()
        folder = tmp_path / name
        trainer = fit(
            folder, [before, *ours, after], steps=8, logging_steps=1, report_to="tensorboard"
        )
        assert before.seen == after.seen
        history = [sorted(entry) for entry in trainer.state.log_history]
        found[name] = before.seen, history, trainer.state.global_step
        assert "training_step" not in vars(trainer)
    assert found["read"] == found["plain"]
    assert found["read"][2] == 5
    assert "geomon" not in str(found["read"])
    assert [r.step for r in read(tmp_path / "read")] == [*range(5)]
    assert "variance" not in capsys.readouterr().out


def test_a_copy_of_the_callback_is_as_before_a_training(tmp_path):
    monitor = GeometryMonitor(**FEW)
    assert math.isnan(monitor.overhead)
    fit(tmp_path, [monitor], steps=2)
    assert 0 < monitor.overhead < 1
    copied = copy.deepcopy(monitor)
    assert math.isnan(copied.overhead)
    assert vars(copied) == vars(monitor) | {
        "_session": copied._session, "_loss": None, "_hook": None,
    }  # fmt: skip


def test_a_callback_that_is_given_twice_is_refused_and_two_folders_are_not(tmp_path):
    with pytest.raises(ValueError, match=r"two monitors .* at once: .* its callback once"):
        fit(tmp_path, [GeometryMonitor(**FEW), GeometryMonitor(**FEW)], steps=2)
    two = [GeometryMonitor(**FEW, directory=tmp_path / name) for name in "ab"]
    fit(tmp_path, two, steps=1)
    assert [len(read(tmp_path / name)) for name in "ab"] == [1, 1]


def test_the_callback_of_lightning_says_which_class_to_take(tmp_path):
    wrong = lightning.GeometryMonitor(**FEW)
    with pytest.raises(AttributeError, match=r"from geomon\.huggingface import"):
        fit(tmp_path, [wrong], steps=1)
    with pytest.raises(AttributeError, match=r"Monitor has no attribute .steps.$"):
        wrong.steps  # noqa: B018


def function_of(service, name):
    """A service whose values are those that one function of its module is given."""

    def make(folder, patch):
        def take(values, step=None):
            rows.append((step if step is not None else values["train/global_step"], values))

        rows, module = [], types.SimpleNamespace(**{name: take})
        module.get_running_experiment = lambda: module
        patch.setitem(sys.modules, service, module)
        return None, lambda: shown_of(rows, [], [])

    return make


SERVICES = {
    "swanlab": function_of("swanlab", "log"), "trackio": function_of("trackio", "log"),
    "comet_ml": function_of("comet_ml", "log_metrics"), "mlflow": LOGGERS["MLflow"],
    "dagshub": LOGGERS["MLflow"], "clearml": None,
}  # fmt: skip


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_gets_the_values_by_its_own_functions_or_is_named(
    tmp_path, monkeypatch, caplog, service
):
    make = SERVICES[service]
    _, shown = make(tmp_path, monkeypatch) if make else (None, lambda: shown_of([], [], []))
    monitor = GeometryMonitor(schedule=every(2), pictures=False, **FEW)
    trainer = trainer_of(tmp_path, [monitor], steps=4)
    trainer.args.report_to = [service]
    trainer.train()
    assert ("geomon cannot write to" in caplog.text) == (make is None)
    record, rows = read(tmp_path), shown().rows
    assert [step for step, _ in rows] == ([r.step for r in record] if make else [])
    charts = charts_of(record)
    for reading, (_, values) in zip(record, rows, strict=False):
        assert charts.select(reading).items() <= values.items()


@pytest.mark.parametrize("named", ["", "board"])
def test_event_files_lie_inside_the_folder_of_the_trainers_own_ones(tmp_path, monkeypatch, named):
    """Files of an earlier training of this process do not count, nor files of geomon."""
    root = tmp_path / (named or "run/runs")
    if named:
        monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(root))
    name = f"events.out.tfevents.1.host.{os.getpid()}.0"
    for folder, written in (("old", 1.0), ("later/geomon", 4e9)):
        (root / folder).mkdir(parents=True)
        (root / folder / name).touch()
        os.utime(root / folder / name, (written, written))
    fit(tmp_path / "run", [GeometryMonitor(**FEW)], steps=1, report_to="tensorboard")
    made = {file.parent for file in tmp_path.rglob("events.out.tfevents.*")}
    own = made - {root / "old", root / "later" / "geomon"}
    (of_trainer,) = (folder for folder in own if folder.name != "geomon")
    assert own == {of_trainer, of_trainer / "geomon"}
    assert of_trainer.is_relative_to(root)


class Stop(TrainerCallback):
    """Ends the training at an event of a step."""

    def __init__(self, event, at):
        setattr(self, event, self.stop)
        self.at = at

    def stop(self, args, state, control, **event):
        control.should_training_stop = control.should_training_stop or state.global_step == self.at


@pytest.mark.parametrize(
    ("event", "at", "best", "steps"),
    [
        ("on_init_end", 0, True, [0, 3, 6, 8]),  # as long as was planned
        ("on_evaluate", 4, True, [0, 3, 4]),
        ("on_step_end", 5, True, [0, 3]),  # nothing tells of the end while the weights are the last
        ("on_step_end", 5, False, [0, 3, 5]),
    ],
)
def test_probe_reads_the_last_weights_and_not_the_best(tmp_path, event, at, best, steps):
    seen = []

    class Keeping(Trainer):
        def _load_best_model(self):
            seen.append(len(read(tmp_path)))
            super()._load_best_model()

    monitor = GeometryMonitor(probe={"input_ids": batch(seed=77)}, schedule=every(3), **FEW)
    arguments = {
        "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2,
        "load_best_model_at_end": best, "metric_for_best_model": "loss",
        "greater_is_better": True,  # the first is the best
    }  # fmt: skip
    trainer = fit(tmp_path, [monitor, Stop(event, at)], kind=Keeping, steps=8, **arguments)
    assert trainer.state.best_global_step == 2
    assert [r.step for r in read(tmp_path)] == steps
    assert seen == [len(steps)] * best


# -- what a Trainer may do, and with it a monitor changes nothing --------------------------------


class Watching(Trainer):
    """A window is shut before the backward pass, whatever the loss is made of."""

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        assert not is_watched()
        return loss


class OfPart(Trainer):
    """Some trainers call a part of the model and take its loss."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        hidden = self.model.transformer(inputs["input_ids"]).last_hidden_state
        assert not is_watched()
        return hidden.square().mean()


class Apart(Trainer):
    """The loss of the first of each three batches does not call the model."""

    calls = -1

    def compute_loss(self, model, *args, **kwargs):
        self.calls += 1
        if self.calls % 3 == 0:
            return next(model.parameters()).square().sum()
        assert self.args.gradient_accumulation_steps == 1 or not is_watched()
        return super().compute_loss(model, *args, **kwargs)


class Scoring(Watching):
    """Generates, and scores what it has, before the forward pass that it trains on."""

    def training_step(self, model, inputs, *args, **kwargs):
        with torch.no_grad():
            model.eval()
            model.generate(inputs["input_ids"][:2, :4], max_new_tokens=3, do_sample=True)
            model.train()
            model(input_ids=inputs["input_ids"][:1, :7])
        return super().training_step(model, inputs, *args, **kwargs)


class Blind(Trainer):
    """Steps without gradients, as evolution strategies make them."""

    def training_step(self, model, inputs, *args, **kwargs):
        with torch.no_grad():
            return self.compute_loss(model, inputs)


class Breaking(Watching):
    """Breaks before a forward pass, which nobody is told of; or in one of an evaluation."""

    where, error, at = "", RuntimeError, 1
    evaluated = 0

    def _prepare_inputs(self, inputs):
        if self.where == "inputs":
            raise self.error("on purpose")
        return super()._prepare_inputs(inputs)

    def compute_loss(self, *args, **kwargs):
        if self.where == "loss":
            raise self.error("on purpose")
        return super().compute_loss(*args, **kwargs)

    def prediction_step(self, model, inputs, *args, **kwargs):
        done = super().prediction_step(model, inputs, *args, **kwargs)
        assert not any(map(sum, fingerprint(model)["hooks"]))  # after each call
        self.evaluated += 1
        if self.where == "evaluation" and self.evaluated == self.at:
            raise self.error("on purpose")
        return done


class Calls(TrainerCallback):
    """Does something at an event of a step."""

    def __init__(self, event, act):
        self.trainer = None
        setattr(self, event, self.call)
        self.act = act

    def call(self, args, state, control, **given):
        self.act(self.trainer, state)


def predict(trainer, state):
    """Not a validation of the training."""
    if state.global_step == 1:
        trainer.predict([{"input_ids": row * 0} for row in batch(8)])


def look(trainer, state):
    assert not is_watched()


def break_it(trainer, state):
    raise RuntimeError("on purpose")


def breaking(where, error=RuntimeError, at=1):
    return type("Broken", (Breaking,), {"where": where, "error": error, "at": at})


IDS = {"ids": lambda token_ids: token_ids.double().mean()}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
VALIDATED = {"metrics": IDS, "tokens": 10_000, "probe": "validation"}
COMPILED = {"torch_compile": True, "torch_compile_backend": "eager"}
WHOLE = {"tokens": 4096}  # of a whole batch of eight, and not of one or two short ones
ROWS_OF_EIGHT = 8 * batch().shape[1]
# The Trainer, options, arguments; steps of the readings, tokens of each; an event of a callback.
ODD = {
    "bf16": (Watching, {}, {"bf16": True}, [0, 1, 2], 64, None),
    "recomputes": (Watching, {}, {"activation_checkpointing": True}, [0, 1, 2], 64, None),
    "compiles": (Watching, {}, COMPILED, [0, 1, 2], 64, None),
    "calls a part": (OfPart, {}, {}, [0, 1, 2], 64, None),
    "does not call the model in each third step": (
        Apart, {"strict": False}, {}, [1, 2], 64, ("on_optimizer_step", look)
    ),
    "does not call the model in the first batch": (
        Apart, {"strict": False}, {"gradient_accumulation_steps": 3}, [], 64,
        ("on_optimizer_step", look),
    ),
    "scores": (Scoring, WHOLE, {}, [0, 1, 2], ROWS_OF_EIGHT, None),
    "scores each of several": (
        Scoring, WHOLE, {"gradient_accumulation_steps": 2}, [0, 1, 2], ROWS_OF_EIGHT, None
    ),
    "has no gradients": (Blind, WHOLE, {}, [0, 1, 2], ROWS_OF_EIGHT, None),
    "evaluates": (Breaking, VALIDATED, EVALUATED, [2, 3], 512, None),
    "predicts as a step begins": (
        Trainer, VALIDATED, EVALUATED, [2, 3], 512, ("on_step_begin", predict)
    ),
    "predicts as a step ends": (
        Trainer, VALIDATED, EVALUATED, [2, 3], 512, ("on_step_end", predict)
    ),
    "breaks in an evaluation": (breaking("evaluation"), VALIDATED, EVALUATED, None, 512, None),
    "breaks in a later batch": (
        breaking("evaluation", at=2), VALIDATED, EVALUATED, None, 512, None
    ),
    "breaks before the inputs": (breaking("inputs", KeyboardInterrupt), {}, {}, None, 64, None),
    "breaks before the loss": (breaking("loss"), {}, {}, None, 64, None),
    "breaks in a callback": (Trainer, {}, {}, None, 64, ("on_step_begin", break_it)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo to itself
@pytest.mark.parametrize("name", ODD)
def test_whatever_a_trainer_does_a_monitor_changes_nothing_and_reads_its_passes(tmp_path, name):
    kind, options, arguments, steps, tokens, event = ODD[name]
    found, marks = {}, {}
    monitor = GeometryMonitor(**{**FEW, "schedule": every(1), **options})
    for watched in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model, calls = transformer("gpt2"), [Calls(*event)] if event else []
        del model.transformer.h[1:]  # for the compiler's time
        told = {"callbacks": [*[monitor] * watched, *calls], "kind": kind, "model": model}
        trainer = trainer_of(tmp_path / str(watched), steps=3, **told, **arguments)
        for each in calls:
            each.trainer = trainer
        if steps is None:
            with pytest.raises((RuntimeError, KeyboardInterrupt), match="on purpose"):
                trainer.train()
            with torch.no_grad():
                model(batch())  # another use of the model; then another training
            assert not watched or not read(tmp_path / "True")
            again = tmp_path / f"again {watched}"
            fit(again, [monitor] * watched, model=model, steps=2, **arguments)
        else:
            trainer.train()
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert (graphs > 0) == (arguments is COMPILED)
        found[watched] = [*model.parameters(), torch.get_rng_state(), torch.tensor(graphs)]
        marks[watched] = fingerprint(model.train())
    assert all(map(torch.equal, *found.values()))
    assert marks[True] == marks[False]
    record = read(tmp_path / ("again True" if steps is None else "True"))
    expected = ([2] if options is VALIDATED else [0, 1]) if steps is None else steps
    assert [reading.step for reading in record] == expected
    for reading in record:
        assert (reading.tokens, reading.dtype) == (tokens, "float32")
    assert options is not VALIDATED or all(each.values["ids/layer_01"] > 1 for each in record)


@pytest.mark.parametrize(
    ("devices", "options", "steps"),
    [(0, {}, [0]), (1, {}, [0]), (2, {}, []), (3, {}, []), (2, {"probe": batch()}, [0])],
)
def test_another_loop_may_send_the_events_but_with_no_copies_of_the_model_in_threads(
    tmp_path, caplog, devices, options, steps
):
    """Several GPUs in one process: a stand-in for `forward` would run the wrong copy."""
    trainer = trainer_of(tmp_path, [GeometryMonitor(**FEW | options)], steps=2)
    trainer.args._n_gpu = devices
    send, told = trainer.callback_handler, (trainer.args, trainer.state, trainer.control)
    with caplog.at_level(logging.WARNING):
        send.on_train_begin(*told)
        send.on_step_begin(*told)
    assert ("DataParallel" in caplog.text) == (not steps)
    trainer.model(batch())
    assert not any(map(sum, fingerprint(trainer.model)["hooks"]))
    for event in (send.on_pre_optimizer_step, send.on_step_end, send.on_train_end):
        event(*told)
    assert [reading.step for reading in read(tmp_path)] == steps


class Bare(NamedTuple):
    """Outputs without keys."""

    loss: torch.Tensor


@pytest.mark.parametrize(
    ("per_token", "outputs"),
    [(True, lambda made: made), (False, lambda made: made), (True, lambda made: Bare(made.loss))],
)  # fmt: skip
def test_the_loss_is_the_mean_over_the_batch_that_was_read_however_many_are_accumulated(
    tmp_path, per_token, outputs
):
    """The Trainer has the model divide by the tokens of all batches of a step, if it can."""
    found = []
    for accumulate in (1, 4):
        model = transformer("gpt2")
        run, model.accepts_loss_kwargs = model.forward, per_token
        model.forward = functools.wraps(run)(lambda run=run, **given: outputs(run(**given)))
        trainer = fit(
            tmp_path / str(accumulate), [GeometryMonitor(**FEW)], model=model, steps=1,
            gradient_accumulation_steps=accumulate, logging_steps=1,
        )  # fmt: skip
        (reading,) = read(tmp_path / str(accumulate))
        found.append(reading.values["training/loss"])
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    assert found[1] == pytest.approx(trainer.state.log_history[0]["loss"], rel=0.05)


def test_a_loss_that_the_model_does_not_return_is_the_last_that_was_logged(tmp_path):
    trainer = fit(
        tmp_path, [GeometryMonitor(**FEW, schedule=every(1))], kind=OfPart, steps=4, logging_steps=2
    )
    logged = {
        entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry
    }
    losses = [reading.values["training/loss"] for reading in read(tmp_path)]
    assert all(map(math.isnan, losses[:2]))
    assert losses[2:] == [logged[2]] * 2

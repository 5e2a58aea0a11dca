"""Compares every training with its unwatched twin, in every loop, ended in every way.

python -m benchmarks.neutrality

Each cell of the matrix (loop x way out x setting) is trained twice, with and without geomon. The
comparison covers weights, losses, the optimizer's state, the random states of torch, NumPy and
Python, copies made on the way, and remains: hooks, attributes, patches, flags, threads.
"""

import copy
import hashlib
import io
import itertools
import logging
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import lightning as L
import numpy as np
import torch
import transformers
import typer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from benchmarks.timing import print_table
from geomon import Memory, Monitor, every, huggingface, lightning, select

WAYS_OUT = (
    "normal", "exception in forward", "exception in backward", "exception in loader",
    "exception in validation", "ctrl-c", "sigterm",
)  # fmt: skip
SETTINGS = (
    "nothing else", "EMA copy", "checkpoint in the window", "compile with dropout",
    "extra columns", "bf16 default dtype", "default device", "generate in the window",
    "two monitors", "activation checkpointing", "autocast around all steps",
)  # fmt: skip

_STEPS, _ENDS_AT, _BATCH, _LENGTH, _VOCABULARY = 4, 3, 4, 12, 40
_METRICS = select("variance", "attention_entropy", "qk_cosine", "query_cosine")
_OPTIONS: dict[str, Any] = {"metrics": _METRICS, "tokens": 32, "schedule": every(1)}


class TrainingEndsError(Exception):
    """Raised to end a training on purpose."""


# -- the model that is trained ---------------------------------------------------------------------


class _FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise TrainingEndsError("in backward")


class _Drawing:
    """Backend that draws random numbers of its own, as inductor's dropout does."""

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            torch.rand(1)
            return graph.forward(*args)

        return run


class Net(nn.Module):
    """A small Llama with dropout that computes its loss, and ends the training as requested."""

    def __init__(self, way_out: str, setting: str, backend: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=_VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=2, max_position_embeddings=32, attention_dropout=0.2,
            bos_token_id=None, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        self.inner = LlamaForCausalLM(config).float()
        if setting == "activation checkpointing":
            enable = getattr(self.inner, "activation_checkpointing_enable", None)
            (enable or self.inner.gradient_checkpointing_enable)()
        if setting == "compile with dropout":
            self.inner.compile(backend=_Drawing() if backend == "drawing" else backend)
        self.way_out, self.setting = way_out, setting
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.losses: list[float] = []

    def forward(self, input_ids: Tensor, **columns: Tensor) -> dict[str, Tensor]:
        """Compute the loss, and count training steps to end the training on time."""
        ends = self.training and int(self.steps) == _ENDS_AT
        if self.training:
            if int(self.steps) == 0:
                _seed(1)  # loops differ in their draws before the first step
            self.steps += 1
            if self.setting == "generate in the window":
                self.inner.generate(input_ids[:1, :4], max_new_tokens=3, do_sample=True)
        elif self.way_out == "exception in validation":
            raise TrainingEndsError("in validation")
        if ends and self.way_out == "ctrl-c":
            raise KeyboardInterrupt
        if ends and self.way_out == "sigterm":
            os.kill(os.getpid(), signal.SIGTERM)
        with ExitStack() as stack:
            if self.setting == "default device":
                stack.enter_context(torch.device("meta"))
            output = self.inner(input_ids=input_ids, labels=input_ids, use_cache=False, **columns)
        if ends and self.way_out == "exception in forward":
            raise TrainingEndsError("in forward")
        loss = output.loss
        if self.training:
            self.losses.append(loss.item())
        if ends and self.way_out == "exception in backward":
            loss = _FailsBackward.apply(loss)
        return {"loss": loss}


class Rows(Dataset[dict[str, Tensor]]):
    """Token ids, and other columns if the setting asks for them."""

    def __init__(self, way_out: str, setting: str) -> None:
        generator = torch.Generator("cpu").manual_seed(2)
        self.rows = torch.randint(1, _VOCABULARY, (8 * _BATCH, _LENGTH), generator=generator)
        self.fails_at = _ENDS_AT * _BATCH if way_out == "exception in loader" else -1
        self.columns = ("mask", "route", "step") if setting == "extra columns" else ()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == self.fails_at:
            raise TrainingEndsError("in the loader")
        return {"input_ids": self.rows[index]} | dict.fromkeys(self.columns, torch.tensor(index))


class Copies:
    """Copies and checkpoints of the model, made while a window is open or about to be."""

    def __init__(self, setting: str) -> None:
        self._setting = setting
        self.made: list[nn.Module] = []

    def take(self, model: nn.Module) -> None:
        """Make a copy if the setting asks for one."""
        if self._setting == "EMA copy":
            self.made.append(copy.deepcopy(model))
        elif self._setting == "checkpoint in the window":
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            self.made.append(torch.load(file, weights_only=False))


# -- the loops -------------------------------------------------------------------------------------


def _plain(net: Net, rows: Rows, copies: Copies, options: list[dict[str, Any]], folder: str) -> Any:
    monitors = [Monitor(net, directory=None, **given) for given in options]
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    _keep(optimizer)
    try:
        batches = iter(DataLoader(rows, batch_size=_BATCH))
        for step in range(_STEPS):
            batch = next(batches)
            with ExitStack() as stack:
                for monitor in monitors:
                    stack.enter_context(monitor(step))
                copies.take(net)
                loss = net(**batch)["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        net.eval()
        with torch.no_grad():
            net(**batch)
        net.train()
    finally:
        for monitor in monitors:
            monitor.close()


class _Module(L.LightningModule):
    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss: Tensor = self.net(**batch)["loss"]
        return loss

    def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
        self.net(**batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        _keep(optimizer)
        return optimizer


class _LightningCopies(L.Callback):
    def __init__(self, copies: Copies) -> None:
        self._copies = copies

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *event: Any) -> None:
        self._copies.take(pl_module.net)


def _lightning(
    net: Net, rows: Rows, copies: Copies, options: list[dict[str, Any]], folder: str
) -> Any:
    watch = [lightning.GeometryMonitor(directory=f"{folder}/{i}", **given)
             for i, given in enumerate(options)]  # fmt: skip
    trainer = L.Trainer(
        max_steps=_STEPS, callbacks=[*watch, _LightningCopies(copies)], default_root_dir=folder,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu",
        enable_model_summary=False, num_sanity_val_steps=0, val_check_interval=_STEPS,
    )  # fmt: skip
    loader = DataLoader(rows, batch_size=_BATCH)
    trainer.fit(_Module(net), loader, DataLoader(Rows("", net.setting), batch_size=_BATCH))


class _TrainerCopies(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    def __init__(self, copies: Copies) -> None:
        self._copies = copies

    def on_step_begin(self, *event: Any, model: Any = None, **more: Any) -> None:
        self._copies.take(model)


def _trainer(
    net: Net, rows: Rows, copies: Copies, options: list[dict[str, Any]], folder: str
) -> Any:
    watch = [huggingface.GeometryMonitor(directory=f"{folder}/{i}", **given)
             for i, given in enumerate(options)]  # fmt: skip
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    _keep(optimizer)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    arguments = TrainingArguments(
        folder, max_steps=_STEPS, per_device_train_batch_size=_BATCH, max_grad_norm=0.0,
        train_sampling_strategy="sequential", use_cpu=True, dataloader_pin_memory=False,
        disable_tqdm=True, report_to="none", logging_strategy="no", save_strategy="no",
        eval_strategy="steps", eval_steps=_STEPS, remove_unused_columns=False,
    )  # fmt: skip
    Trainer(
        net, arguments, train_dataset=rows, eval_dataset=Rows("", net.setting),
        optimizers=(optimizer, constant), callbacks=[*watch, _TrainerCopies(copies)],
    ).train()  # fmt: skip


LOOPS = {"plain": _plain, "Lightning": _lightning, "Trainer": _trainer}

CELLS = tuple(itertools.product(LOOPS, WAYS_OUT, SETTINGS))

_optimizers: list[torch.optim.Optimizer] = []


def _keep(optimizer: torch.optim.Optimizer) -> None:
    _optimizers.append(optimizer)


# -- what is compared ------------------------------------------------------------------------------


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def _digest(value: Any) -> Any:
    """Replace tensors, at any depth, by a hash of their bytes."""
    if isinstance(value, Tensor):
        plain = value.detach().contiguous().flatten().view(torch.uint8)
        return hashlib.sha256(plain.numpy().tobytes()).hexdigest(), str(value.dtype)
    if isinstance(value, dict):
        return {str(name): _digest(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_digest(inner) for inner in value]
    return value


_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called",
    "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_backward_hooks",
    "_backward_pre_hooks", "_state_dict_hooks",
)  # fmt: skip


def _outside(model: nn.Module) -> dict[str, Any]:
    """Describe a model and the process from outside: hooks, attributes, patches, flags, threads."""
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    return {
        "hooks": [[len(getattr(m, kind)) for kind in _HOOKS] for m in model.modules()],
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "training": [m.training for m in model.modules()],
        "patches": [
            nn.Module.__call__, torch.nn.functional.scaled_dot_product_attention,
            vars(nn.Module)["_compiled_call_impl"], torch._C._len_torch_dispatch_stack(),
        ],
        "flags": [
            torch.backends.mha.get_fastpath_enabled(), torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled(),
            torch.get_default_dtype(), torch.get_num_threads(),
            dynamo._stance.stance if dynamo else "default",
        ],
        "threads": sorted(t.name for t in threading.enumerate() if t.name.startswith("geomon")),
    }  # fmt: skip


def _copy_of(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    """Describe a copy: its weights, its output, and its hooks and attributes."""
    state = torch.get_rng_state()
    model.eval()
    with torch.no_grad(), suppress(TrainingEndsError):
        model.way_out, model.setting = "", ""  # type: ignore[assignment]
        answer = _digest(model(**batch)["loss"])
    torch.set_rng_state(state)
    outside = _outside(model)
    return [_digest(model.state_dict()), answer, outside["hooks"], outside["attributes"]]


def train(loop: str, way_out: str, setting: str, *, watched: bool, backend: str) -> dict[str, Any]:
    """Run one training.

    Args:
        loop: One of `LOOPS`.
        way_out: One of `WAYS_OUT`.
        setting: One of `SETTINGS`.
        watched: Whether geomon watches it.
        backend: Compiler of the compiled trainings; "drawing" runs graphs as they are.

    Returns:
        Everything to compare, by name, and the steps of the readings.
    """
    torch.compiler.reset()
    net, copies, memories = Net(way_out, setting, backend), Copies(setting), [Memory(), Memory()]
    options = [_OPTIONS | {"sinks": [memory]} for memory in memories[: 1 + ("two" in setting)]]
    _optimizers.clear()
    ended = ""
    with _surroundings(setting), TemporaryDirectory() as folder:
        try:
            LOOPS[loop](net, Rows(way_out, setting), copies, options if watched else [], folder)
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            ended = f"{type(error).__name__}: {error}"
        states = {
            "random": [torch.get_rng_state(), np.random.get_state(legacy=False)["state"]["key"],
                       random.getstate()],
        }  # fmt: skip
        states["random"][1] = states["random"][1].tobytes()
    batch = {name: value[None] for name, value in Rows("", "")[0].items()}
    return {
        "weights": _digest(net.state_dict()),
        "losses": [value.hex() for value in net.losses],
        "gradients": [_digest(parameter.grad) for parameter in net.parameters()],
        "optimizer": [_digest(optimizer.state_dict()) for optimizer in _optimizers],
        "random states": _digest(states["random"]),
        "ended by": ended,
        "copies": [_copy_of(one, batch) for one in copies.made],
        **_outside(net),
        "readings": [[reading.step for reading in memory.readings] for memory in memories],
    }


@contextmanager
def _surroundings(setting: str) -> Iterator[None]:
    """Set up the process for a setting; signals only end a training."""

    def ends(*call: Any) -> None:
        raise SystemExit("terminated")

    handlers = {kind: signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)}
    before = torch.get_default_dtype()
    try:
        signal.signal(signal.SIGTERM, ends)
        if setting == "bf16 default dtype":
            torch.set_default_dtype(torch.bfloat16)
        # Casts are cached from step to step, for all threads of the process.
        with torch.autocast("cpu", torch.bfloat16, enabled=setting == "autocast around all steps"):
            yield
    finally:
        torch.set_default_dtype(before)
        for kind, handler in handlers.items():
            signal.signal(kind, handler)


def differences(loop: str, way_out: str, setting: str, *, backend: str = "drawing") -> list[str]:
    """Train with and without geomon, and name the differences.

    Args:
        loop: One of `LOOPS`.
        way_out: One of `WAYS_OUT`.
        setting: One of `SETTINGS`.
        backend: Compiler of the compiled trainings. Defaults to "drawing".
    """
    plain, watched = (
        train(loop, way_out, setting, watched=watched, backend=backend) for watched in (False, True)
    )
    found = [name for name in plain if name != "readings" and plain[name] != watched[name]]
    expected_end = way_out == "normal"
    if (plain["ended by"] == "") != expected_end and (loop, way_out) != ("Lightning", "sigterm"):
        found.append(f"ended by {plain['ended by'] or 'nothing'}")
    readings = [steps for steps in watched["readings"] if steps]
    if len(readings) != 1 + ("two" in setting) or any(steps[:2] != [0, 1] for steps in readings):
        found.append(f"readings {watched['readings']}")
    if setting in ("EMA copy", "checkpoint in the window") and len(watched["copies"]) < 2:
        found.append("too few copies")
    return found


def main(
    backend: Annotated[str, typer.Option(help="Compiler, e.g. inductor.")] = "drawing",
    only: Annotated[str, typer.Option(help="A word that cells have to contain.")] = "",
) -> None:
    """Run every cell, and print the differences from the unwatched twin."""
    quieten()
    failed: list[bool] = []

    def rows() -> Iterator[list[str]]:
        for loop, setting in itertools.product(LOOPS, SETTINGS):
            row = [loop, setting]
            for way_out in WAYS_OUT:
                if only in f"{loop} {setting} {way_out}":
                    found = differences(loop, way_out, setting, backend=backend)
                    failed.append(bool(found))
                    row.append(", ".join(found) or "equal")
                else:
                    row.append("")
            yield row

    columns = ("loop", "what else goes on", *WAYS_OUT)
    print_table("Watched trainings beside unwatched ones", columns, rows())
    print(f"{len(failed)} trainings, {sum(failed)} differ")
    raise typer.Exit(any(failed))


def quieten() -> None:
    """Silence the advice of frameworks on their configuration."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "geomon"):
        logging.getLogger(name).setLevel(logging.ERROR)


if __name__ == "__main__":
    typer.run(main)

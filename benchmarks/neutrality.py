"""Compares every training with its unwatched twin, in every loop, ended in every way.

PYTHONPATH=tests python -m benchmarks.neutrality

Each cell of the matrix (loop x way out x setting) is trained twice, with and without geomon. The
comparison covers weights, losses, the optimizer's state, the random states of torch, NumPy and
Python, copies made while a window is open, and remains: hooks, attributes, patches, flags, threads.
"""

import copy
import io
import itertools
import logging
import os
import signal
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import lightning as L
import torch
import transformers
import typer
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from benchmarks.timing import print_table
from geomon import Memory, Monitor, every, huggingface, lightning, select
from support.fingerprint import fingerprint, random_state

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


def _drawing(graph: Any, inputs: Any) -> Any:
    """A compiler that draws random numbers of its own, as inductor's dropout does."""

    def run(*args: Any) -> Any:
        torch.rand(1)
        return graph.forward(*args)

    return run


class Net(nn.Module):
    """A small Llama with dropout that computes its loss, and ends the training as requested."""

    def __init__(self, way_out: str, setting: str) -> None:
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
            self.inner.compile(backend=_drawing)
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        self.way_out, self.setting = way_out, setting
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.losses: list[float] = []
        self.copies: list[nn.Module] = []

    def forward(self, input_ids: Tensor, **columns: Tensor) -> dict[str, Tensor]:
        """Compute the loss, and count training steps to end the training on time."""
        ends = self.training and int(self.steps) == _ENDS_AT
        if self.training:
            if int(self.steps) == 0:
                transformers.set_seed(1)  # loops differ in their draws before the first step
            self.steps += 1
            self._set_up(input_ids)
        elif self.way_out == "exception in validation":
            raise TrainingEndsError("in validation")
        if ends and self.way_out == "ctrl-c":
            raise KeyboardInterrupt
        if ends and self.way_out == "sigterm":
            os.kill(os.getpid(), signal.SIGTERM)
        with torch.device("meta") if self.setting == "default device" else nullcontext():
            output = self.inner(input_ids=input_ids, labels=input_ids, use_cache=False, **columns)
        if ends and self.way_out == "exception in forward":
            raise TrainingEndsError("in forward")
        loss = output.loss
        if self.training:
            self.losses.append(loss.item())
        if ends and self.way_out == "exception in backward":
            loss = _FailsBackward.apply(loss)
        return {"loss": loss}

    def _set_up(self, input_ids: Tensor) -> None:
        """Do what else the setting does while a window is open."""
        if self.setting == "generate in the window":
            self.inner.generate(input_ids[:1, :4], max_new_tokens=3, do_sample=True)
        elif self.setting == "EMA copy":
            self.copies.append(copy.deepcopy(self.inner))
        elif self.setting == "checkpoint in the window":
            file = io.BytesIO()
            torch.save(self.inner, file)
            file.seek(0)
            self.copies.append(torch.load(file, weights_only=False))


class Rows(Dataset[dict[str, Tensor]]):
    """Token ids, and other columns if the setting asks for them."""

    def __init__(self, way_out: str = "", setting: str = "") -> None:
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


# -- the loops -------------------------------------------------------------------------------------


def _plain(net: Net, options: list[dict[str, Any]], folder: str) -> None:
    with ExitStack() as closing:
        monitors = [closing.enter_context(Monitor(net, **given)) for given in options]
        batches = iter(DataLoader(Rows(net.way_out, net.setting), batch_size=_BATCH))
        for step in range(_STEPS):
            batch = next(batches)
            with ExitStack() as stack:
                for monitor in monitors:
                    stack.enter_context(monitor(step))
                loss = net(**batch)["loss"]
            loss.backward()
            net.optimizer.step()
            net.optimizer.zero_grad()
        net.eval()
        with torch.no_grad():
            net(**batch)
        net.train()


class _Module(L.LightningModule):
    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        return self.net(**batch)["loss"]

    def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
        self.net(**batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.net.optimizer


def _lightning(net: Net, options: list[dict[str, Any]], folder: str) -> None:
    trainer = L.Trainer(
        max_steps=_STEPS, callbacks=[lightning.GeometryMonitor(**given) for given in options],
        default_root_dir=folder, logger=False, enable_checkpointing=False, accelerator="cpu",
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        val_check_interval=_STEPS,
    )  # fmt: skip
    rows = (Rows(net.way_out, net.setting), Rows("", net.setting))
    trainer.fit(_Module(net), *(DataLoader(each, batch_size=_BATCH) for each in rows))


def _trainer(net: Net, options: list[dict[str, Any]], folder: str) -> None:
    constant = torch.optim.lr_scheduler.LambdaLR(net.optimizer, lambda step: 1.0)
    arguments = TrainingArguments(
        folder, max_steps=_STEPS, per_device_train_batch_size=_BATCH, max_grad_norm=0.0,
        train_sampling_strategy="sequential", use_cpu=True, dataloader_pin_memory=False,
        disable_tqdm=True, report_to="none", logging_strategy="no", save_strategy="no",
        eval_strategy="steps", eval_steps=_STEPS, remove_unused_columns=False,
    )  # fmt: skip
    Trainer(
        net, arguments, train_dataset=Rows(net.way_out, net.setting),
        eval_dataset=Rows("", net.setting), optimizers=(net.optimizer, constant),
        callbacks=[huggingface.GeometryMonitor(**given) for given in options],
    ).train()  # fmt: skip


LOOPS = {"plain": _plain, "Lightning": _lightning, "Trainer": _trainer}

CELLS = tuple(itertools.product(LOOPS, WAYS_OUT, SETTINGS))


# -- what is compared ------------------------------------------------------------------------------


def _digest(value: Any) -> Any:
    """Replace tensors, at any depth, by their bytes."""

    def content(tensor: Tensor) -> tuple[bytes, str]:
        plain = tensor.detach().contiguous().flatten().view(torch.uint8)
        return plain.numpy().tobytes(), str(tensor.dtype)

    return tree_map_only(Tensor, content, value)


def _copy_of(model: nn.Module) -> Any:
    """Describe a copy: its weights, its output, and its hooks and attributes."""
    ids = Rows().rows[:1]
    with torch.no_grad(), torch.random.fork_rng():
        answer = model.eval()(input_ids=ids, labels=ids, use_cache=False).loss
    outside = fingerprint(model)
    return [_digest([model.state_dict(), answer]), outside["hooks"], outside["attributes"]]


def train(loop: str, way_out: str, setting: str, *, watched: bool) -> dict[str, Any]:
    """Run one training.

    Args:
        loop: One of `LOOPS`.
        way_out: One of `WAYS_OUT`.
        setting: One of `SETTINGS`.
        watched: Whether geomon watches it.

    Returns:
        Everything to compare, by name, and the steps of the readings.
    """
    torch.compiler.reset()
    net, memories = Net(way_out, setting), [Memory() for _ in range(1 + ("two" in setting))]
    ended = ""
    with _surroundings(setting), TemporaryDirectory() as folder:
        options = [
            {"metrics": _METRICS, "tokens": 32, "schedule": every(1), "sinks": [memory],
             "directory": f"{folder}/{number}"}
            for number, memory in enumerate(memories if watched else ())
        ]  # fmt: skip
        try:
            LOOPS[loop](net, options, folder)
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            ended = f"{type(error).__name__}: {error}"
        random = random_state()
    return {
        "weights": _digest(net.state_dict()),
        "losses": [value.hex() for value in net.losses],
        "gradients": _digest([parameter.grad for parameter in net.parameters()]),
        "optimizer": _digest(net.optimizer.state_dict()),
        "random states": random,
        "ended by": ended,
        "copies": [_copy_of(one) for one in net.copies],
        **fingerprint(net),
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


def differences(loop: str, way_out: str, setting: str) -> list[str]:
    """Train with and without geomon, and name the differences.

    Args:
        loop: One of `LOOPS`.
        way_out: One of `WAYS_OUT`.
        setting: One of `SETTINGS`.
    """
    plain, watched = (train(loop, way_out, setting, watched=each) for each in (False, True))
    found = [name for name in plain if name != "readings" and plain[name] != watched[name]]
    expected_end = way_out == "normal"
    if (plain["ended by"] == "") != expected_end and (loop, way_out) != ("Lightning", "sigterm"):
        found.append(f"ended by {plain['ended by'] or 'nothing'}")
    if any(steps[:2] != [0, 1] for steps in watched["readings"]):
        found.append(f"readings {watched['readings']}")
    if setting in ("EMA copy", "checkpoint in the window") and len(watched["copies"]) < 2:
        found.append("too few copies")
    return found


def main(
    only: Annotated[str, typer.Option(help="A word that cells have to contain.")] = "",
) -> None:
    """Run every cell, and print the differences from the unwatched twin."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "geomon"):
        logging.getLogger(name).setLevel(logging.ERROR)
    failed: list[bool] = []

    def cell(loop: str, way_out: str, setting: str) -> str:
        if only not in f"{loop} {setting} {way_out}":
            return ""
        found = differences(loop, way_out, setting)
        failed.append(bool(found))
        return ", ".join(found) or "equal"

    print_table(
        "Watched trainings beside unwatched ones",
        ("loop", "what else goes on", *WAYS_OUT),
        (
            [loop, setting, *(cell(loop, way_out, setting) for way_out in WAYS_OUT)]
            for loop, setting in itertools.product(LOOPS, SETTINGS)
        ),
    )
    print(f"{len(failed)} trainings, {sum(failed)} differ")
    raise typer.Exit(any(failed))


if __name__ == "__main__":
    typer.run(main)

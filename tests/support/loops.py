"""One learner and three training loops around it, watched by geomon or not."""

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from geomon import Monitor, huggingface, lightning
from support.models import VOCABULARY, PlainDecoder, batch

ROWS = torch.cat([batch(8, 32, seed=i) for i in range(24)])


class Fuse(nn.Linear):
    """A head that raises at one of its calls: in the middle of a forward pass."""

    def __init__(self, width: int, error: type[BaseException] | None, at: int) -> None:
        super().__init__(width, VOCABULARY)
        self.error, self.at, self.calls = error, at, 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        if self.error is not None and self.calls == self.at + 1:
            raise self.error("in the model")
        return super().forward(hidden)


class Learner(nn.Module):
    """A network (dropout on) with its loss, begun anew with the same seed in every loop."""

    def __init__(
        self, net: nn.Module | None = None, error: type[BaseException] | None = None, at: int = 4
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = PlainDecoder(dropout=0.2) if net is None else net
        if net is None:
            self.net.head = Fuse(32, error, at)
        self.begun = False
        self.losses: list[float] = []  # of the batches that were trained on
        self.inside: list[nn.Module] = [self]  # the outermost module that a loop trains

    def forward(self, ids: Tensor, return_loss: bool = True) -> dict[str, Tensor]:
        """The second argument tells the Trainer that evaluations have a loss too."""
        if not self.begun and self.training:
            torch.manual_seed(1)  # what loops draw before their first step differs
            self.begun = True
        logits = self.net(ids)
        logits = getattr(logits, "logits", logits)[:, :-1].flatten(0, 1)
        loss = F.cross_entropy(logits, ids[:, 1:].flatten())
        if self.training:
            self.losses.append(loss.item())
        return {"loss": loss}

    def optimizers(self, kind: str) -> list[torch.optim.Optimizer]:
        if kind == "lbfgs":
            return [torch.optim.LBFGS(self.parameters(), lr=0.01, max_iter=3)]
        if kind == "two":
            parts = self.net.blocks, self.net.head
            return [torch.optim.AdamW(part.parameters(), lr=1e-3) for part in parts]
        return [torch.optim.AdamW(self.parameters(), lr=1e-3)]


def in_plain_loop(
    learner: Learner, options: dict[str, Any] | None, folder: Any, *, steps: int = 6,
    kind: str = "adamw", accumulate: int = 1, states: Any = None, resume: int = 0,
) -> None:  # fmt: skip
    """Train by hand; states of model and optimizers are kept by step, and taken up again."""
    monitor = None if options is None else Monitor(learner, directory=folder, **options)
    optimizers = learner.optimizers(kind)
    kept = [learner, *optimizers]
    for each, state in zip(kept, states[resume] if resume else (), strict=False):
        each.load_state_dict(state)
    batches = iter(ROWS.split(8))

    def loss_of(step: int, ids: Tensor) -> Tensor:
        with monitor(step) if monitor else nullcontext():
            loss = learner(ids)["loss"]
            if monitor:
                monitor.log(loss=loss)
            loss = loss / accumulate
        for optimizer in optimizers:
            optimizer.zero_grad() if accumulate == 1 else None
        loss.backward()
        return loss

    for step in range(resume, steps):
        if states is not None:
            states[step] = copy.deepcopy([each.state_dict() for each in kept])
        if kind == "lbfgs":
            ids = next(batches)
            optimizers[0].step(lambda step=step, ids=ids: loss_of(step, ids))
            continue
        for _ in range(accumulate):
            loss_of(step, next(batches))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


class Module(L.LightningModule):
    """Logs its loss on the progress bar; with two optimizers each batch makes two steps."""

    def __init__(self, learner: Learner, kind: str = "adamw", skip: str = "") -> None:
        super().__init__()
        self.learner, self.kind, self.skip = learner, kind, skip
        self.automatic_optimization = kind != "two"
        self.validated: list[float] = []

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        return self.learner(ids)

    def on_train_batch_start(self, ids: Tensor, index: int) -> int | None:
        return -1 if self.skip == "-1" and index == 2 else None

    def training_step(self, ids: Tensor, index: int) -> Tensor | None:
        loss = self.learner(ids)["loss"]
        self.log("loss", loss, prog_bar=True)
        if self.skip == "None" and index == 2:
            return None
        if self.kind == "two":
            optimizers = self.optimizers()
            for optimizer in optimizers:
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in optimizers:
                optimizer.step()
        return loss

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return self.learner.optimizers(self.kind)


class Validated(Module):
    def validation_step(self, ids: Tensor, index: int) -> None:
        loss = self.learner(ids)["loss"]
        self.validated.append(loss.item())
        self.log("val/loss", loss)


def in_lightning(
    learner: Learner, options: dict[str, Any] | None, folder: Any, *, steps: int = 6,
    kind: str = "adamw", accumulate: int = 1, skip: str = "", held_out: Tensor | None = None,
    module: L.LightningModule | None = None, callbacks: Sequence[L.Callback] = (),
    resume: Any = None, **arguments: Any,
) -> L.Trainer:  # fmt: skip
    options = options and {"directory": folder} | options
    trainer = L.Trainer(
        accumulate_grad_batches=accumulate, default_root_dir=folder, enable_progress_bar=False,
        callbacks=[*([lightning.GeometryMonitor(**options)] if options else []), *callbacks],
        enable_model_summary=False, accelerator="cpu",
        **{
            "logger": False, "enable_checkpointing": bool(callbacks),
            "max_steps": steps * (2 if kind == "two" else 1),
        } | arguments,
    )  # fmt: skip
    if module is None:
        module = (Module if held_out is None else Validated)(learner, kind, skip)
    learner.inside = [module]
    evaluated = None if held_out is None else DataLoader(held_out, batch_size=8)
    data = DataLoader(ROWS, batch_size=8)
    trainer.fit(module, data, evaluated, ckpt_path=resume, weights_only=resume and True)
    return trainer


def in_huggingface(
    learner: Learner, options: dict[str, Any] | None, folder: Any, *, steps: int = 6,
    accumulate: int = 1, held_out: Any = None, resume: Any = None, **arguments: Any,
) -> Trainer:  # fmt: skip
    options = options and {"directory": folder} | options
    if isinstance(held_out, Tensor):
        held_out = [{"ids": row} for row in held_out]
    (optimizer,) = learner.optimizers("adamw")
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    trainer = Trainer(
        learner,
        TrainingArguments(
            str(folder), max_steps=steps, gradient_accumulation_steps=accumulate,
            max_grad_norm=0.0, train_sampling_strategy="sequential", use_cpu=True,
            dataloader_pin_memory=False, disable_tqdm=True,
            **{"report_to": "none", "logging_strategy": "no", "save_strategy": "no"} | arguments,
        ),
        train_dataset=[{"ids": row} for row in ROWS],
        eval_dataset=held_out,
        optimizers=(optimizer, constant),
        callbacks=[huggingface.GeometryMonitor(**options)] if options else [],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer


LOOPS = {"lightning": in_lightning, "huggingface": in_huggingface, "plain": in_plain_loop}

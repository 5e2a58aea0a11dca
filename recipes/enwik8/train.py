"""Pretrain a decoder on enwik8 or another text, and watch its geometry.

From top to bottom: sizes, model, batches, checkpoints, options, the run.
"""

import argparse
import logging
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from geomon import Phase, log_spaced, read
from geomon.lightning import GeometryMonitor
from geomon.show import Printer, geometry_figure, run_table, save
from recipes.enwik8.optimizer import adamw, cosine_rate
from recipes.enwik8.subwords import load_tokens
from recipes.enwik8.text import Ids, InputError, Text, spread, windows

# Sizes of models and runs. A vocabulary of 0 means characters; others are trained.
PRESETS: dict[str, dict[str, Any]] = {
    # Two cores, a few minutes: the smallest run that shows the expansion and the compression.
    "cpu": {
        "layers": 4, "width": 128, "heads": 4, "context": 64, "vocabulary": 0, "dropout": 0.0,
        "batch": 32, "steps": 1_500, "warmup": 100, "learning_rate": 2e-3, "precision": "32-true",
    },
    # One small GPU, well under an hour.
    "small": {
        "layers": 6, "width": 384, "heads": 6, "context": 256, "vocabulary": 0, "dropout": 0.1,
        "batch": 64, "steps": 5_000, "warmup": 200, "learning_rate": 1e-3,
        "precision": "bf16-mixed",
    },
    # One large GPU, 131 million subwords: the size of the smallest GPT-2.
    "base": {
        "layers": 12, "width": 768, "heads": 12, "context": 1024, "vocabulary": 16_384,
        "dropout": 0.0, "batch": 16, "steps": 8_000, "warmup": 400, "learning_rate": 6e-4,
        "precision": "bf16-mixed",
    },
}  # fmt: skip
# Tokens that a reading looks at. It measures 4,096 rows of them, the paper's least batch: rows of
# more windows are less alike. All rows of half as many windows would save a fifth of a reading, but
# their dimension is 8 % lower, and margins are up to a quarter wider (5 % in the median).
PROBE_TOKENS = 8192
# The smallest run reads the same steps on every machine, so that runs compare. Larger runs are read
# as often as 5 % of their time allows.
SCHEDULES = {"cpu": log_spaced(per_octave=3, at_most=150)}
CHECKPOINT, PEAK = "checkpoints/last.ckpt", "peak.pt"
LOGGERS: dict[str, Callable[[Path], Logger]] = {
    "tensorboard": lambda folder: TensorBoardLogger(folder, name="", version="tensorboard"),
    "wandb": lambda folder: WandbLogger(folder.name, project="geomon-enwik8", save_dir=folder),
    "csv": lambda folder: CSVLogger(folder, name="", version="csv"),
}


# -- model -----------------------------------------------------------------------------------------


def configuration(arch: str, tokens: int, sizes: dict[str, Any]) -> PretrainedConfig:
    """Configure a decoder of the transformers library; each ignores the names of the other."""
    width, dropout = sizes["width"], sizes["dropout"]
    return AutoConfig.for_model(
        arch, vocab_size=tokens, max_position_embeddings=sizes["context"], hidden_size=width,
        num_hidden_layers=sizes["layers"], num_attention_heads=sizes["heads"],
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
        intermediate_size=8 * width // 3, attention_dropout=dropout,  # of Llama
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,  # of GPT-2
        activation_function="gelu_pytorch_tanh",  # GPT-2's own function, in one kernel
    )  # fmt: skip


def bits(logits: Tensor, tokens: Tensor, bytes_per_token: float = 1.0) -> Tensor:
    """Compute the bits that a model needs for each byte of windows, their first tokens left out."""
    logits = logits[:, : tokens.shape[1] - 1]  # a last one would predict what follows the window
    nats = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
    return nats / (math.log(2) * bytes_per_token)


class Decoder(L.LightningModule):
    """Next-token prediction, from settings that its checkpoints hold (for `geomon scan`)."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.save_hyperparameters(settings, logger=False)
        config = configuration(settings["arch"], settings["tokens"], settings)
        self.network = AutoModelForCausalLM.from_config(config)

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute the logits of the next token, [sequences, length, vocabulary]."""
        logits: Tensor = self.network(input_ids=tokens, use_cache=False).logits
        return logits

    def training_step(self, windows: Tensor, index: int) -> Tensor:
        """Compute the loss of windows that are one token longer than the context."""
        loss = bits(self(windows[:, :-1]), windows, self.hparams["bytes_per_token"])
        unit = "bits_per_byte" if self.hparams["vocabulary"] else "bits_per_character"
        self.log(f"train/{unit}", loss.detach(), prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        """Make AdamW; the rate changes at every step."""
        optimizer = adamw(self, self.hparams["learning_rate"])
        rate = cosine_rate(self.hparams["warmup"], self.hparams["steps"])
        return [optimizer], [{"scheduler": LambdaLR(optimizer, rate), "interval": "step"}]


class Batches:
    """Random windows of the text: every rank draws its own, and a resumed run goes on drawing."""

    def __init__(self, ids: Ids, model: Decoder) -> None:
        self._ids, self._model, self._run = ids, model, model.hparams

    def __len__(self) -> int:
        return int(self._run["steps"])

    def __iter__(self) -> Iterator[Tensor]:
        run, length = self._run, self._run["context"] + 1
        generator = torch.Generator().manual_seed(run["seed"] + 1_000_003 * self._model.global_rank)
        places = len(self._ids) - length + 1
        starts = torch.randint(places, (run["steps"], run["batch"]), generator=generator)
        for chosen in starts.numpy()[self._model.global_step :]:
            yield windows(self._ids, chosen, length)


class Slice(L.Callback):
    """Save a checkpoint ten times, at the last step, and when the time is over; then stop."""

    # Lightning's own checkpoint at the end says that the epoch is over: no step would follow.

    def __init__(self, path: Path, deadline: float) -> None:
        self._path, self._deadline = path, deadline

    def on_train_batch_end(self, trainer: L.Trainer, *event: Any, **more: Any) -> None:
        """Save and stop if it is time."""
        over = time.monotonic() >= self._deadline
        if self._deadline < math.inf:  # all ranks stop together
            over = trainer.strategy.reduce_boolean_decision(over, all=False)
        step, steps = trainer.global_step, trainer.max_steps
        if over or step == steps or step % max(1, steps // 10) == 0:
            trainer.save_checkpoint(self._path)
        trainer.should_stop |= over


# -- options ---------------------------------------------------------------------------------------


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line; settings that were not given are None."""
    parser = argparse.ArgumentParser("python -m recipes.enwik8", description=__doc__)
    option = parser.add_argument
    option("--data", help="file with any text; default: ENWIK8, else a download or, for subwords, "
                          "the installed packages")  # fmt: skip
    option("--text", choices=["bytes", "clean"], help="clean: without the markup of Wikipedia")
    option("--arch", choices=["gpt2", "llama"], help="decoder; default: gpt2")
    option("--seed", type=int, help="of weights, batches and sampled rows; default: 0")
    option("--preset", choices=PRESETS, help="sizes; default: by the hardware")
    for name, value in PRESETS["base"].items():
        sizes = ", ".join(f"{preset} {own[name]}" for preset, own in PRESETS.items())
        option(f"--{name.replace('_', '-')}", type=type(value), help=sizes)
    option("--out", type=Path, default=Path("runs/enwik8"), help="folder; default: runs/enwik8")
    option("--resume", action="store_true", help="go on from the checkpoint in --out")
    option("--minutes", type=float, default=math.inf, help="stop after so long, to be resumed")
    option("--logger", choices=LOGGERS, default="tensorboard")
    option("--budget", help="largest share of the time for geomon; default: 5%%, and with preset "
                            "cpu the same 25 steps everywhere")  # fmt: skip
    for name in ("accelerator", "devices", "strategy"):
        option(f"--{name}", default="auto", help="as Lightning names it")
    return parser.parse_args(arguments)


def choose(args: argparse.Namespace) -> tuple[dict[str, Any], Text]:
    """Choose the settings that make the run what it is, and load its text."""
    last = args.out / CHECKPOINT
    preset = args.preset or ("small" if torch.cuda.is_available() else "cpu")
    settings = PRESETS[preset] | {
        "data": None, "text": "bytes", "arch": "gpt2", "seed": 0, "preset": preset
    }  # fmt: skip
    given = {name: getattr(args, name) for name in settings if getattr(args, name) is not None}
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"  # Lightning starts the other ranks later
    if args.resume:
        if not last.is_file():
            raise InputError(f"--resume: there is no {last}; give the --out of a run")
        settings = torch.load(last, weights_only=True, map_location="cpu")["hyper_parameters"]
        other = [f"{name} was {settings[name]}" for name in given if given[name] != settings[name]]
        if other:
            raise InputError(f"--resume needs the settings of the run: {', '.join(other)}")
    elif is_first and (args.out / "readings.jsonl").exists():
        raise InputError(f"{args.out} holds a run: --resume it, or give another --out")
    settings |= given
    text = load_tokens(
        settings["data"], vocabulary=settings["vocabulary"], clean=settings["text"] == "clean",
        folder=args.out / "text", keeps=args.resume or not is_first,
    )  # fmt: skip
    if settings.setdefault("sha256", text.sha256()) != text.sha256():
        raise InputError(f"--resume needs the text of the run, and this is {text.source}")
    settings |= {"tokens": text.vocabulary, "bytes_per_token": text.bytes_per_token}
    return settings, text


# -- the run ---------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> None:
    """Train a model, watch it, and show the results."""
    began, args = time.monotonic(), parse(arguments)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    for advice in ("does not have many workers", "LeafSpec", "before the epoch ended"):
        warnings.filterwarnings("ignore", f".*{advice}.*")
    last = args.out / CHECKPOINT
    try:
        settings, text = choose(args)
        context, steps = settings["context"], settings["steps"]
        L.seed_everything(settings["seed"], verbose=False)
        model = Decoder(**settings)
        schedule = SCHEDULES.get(settings["preset"]) if args.budget is None else None

        def keep(phase: Phase) -> None:
            """Keep the weights of the highest intrinsic dimension so far."""
            torch.save(model.network.state_dict(), args.out / PEAK)

        monitor = GeometryMonitor(
            # Held-out windows, the same at every reading, so that readings compare; their loss
            # makes each a validation as well.
            probe=spread(text.validation, context, PROBE_TOKENS // context),
            probe_loss=partial(bits, bytes_per_token=text.bytes_per_token),
            settings={"loss_unit": "bits/byte" if settings["vocabulary"] else "bits/char"},
            splits=1,  # intervals come from groups of the windows and need no second batch
            schedule=schedule, budget=None if schedule else args.budget or "auto",
            on_peak=keep if args.strategy == "auto" else None,  # others share out the weights
            directory=args.out, sinks=[Printer()], seed=settings["seed"],
        )  # fmt: skip
        trainer = L.Trainer(
            accelerator=args.accelerator, devices=args.devices, strategy=args.strategy,
            precision=settings["precision"], max_steps=steps, max_epochs=1,
            gradient_clip_val=1 / (math.log(2) * text.bytes_per_token),  # a norm of 1 in nats
            log_every_n_steps=10, logger=LOGGERS[args.logger](args.out),
            callbacks=[monitor, Slice(last, began + 60 * args.minutes)],
            enable_progress_bar=sys.stdout.isatty(), enable_checkpointing=False,
            enable_model_summary=False, default_root_dir=args.out,
        )  # fmt: skip
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    if settings["preset"] == "base" and torch.cuda.is_available():
        decoder: Any = model.network.base_model
        for block in decoder.h if hasattr(decoder, "h") else decoder.layers:
            block.compile(dynamic=False)  # alike: the code of the first serves all
    if trainer.is_global_zero:
        print(
            f"text: {text.source}; {text.vocabulary:,} distinct tokens\n"
            f"model: {settings['arch']}, {settings['layers']} layers of width {settings['width']}, "
            f"{model.network.num_parameters():,} parameters; {steps:,} steps of "
            f"{settings['batch']} x {context} tokens; logs in {args.out}",
            flush=True,
        )
    trainer.fit(model, Batches(text.train, model), ckpt_path=last if args.resume else None)
    if not trainer.is_global_zero:
        return
    readings, figure = read(args.out), args.out / "geometry.png"
    save(geometry_figure(readings), figure)
    done = trainer.global_step
    tokens = done * settings["batch"] * context * trainer.world_size
    print("", run_table(readings), f"figure: {figure}", sep="\n")
    if (args.out / PEAK).exists():
        print(f"weights of the highest intrinsic dimension: {args.out / PEAK}")
    print(f"{done:,} of {steps:,} steps, {tokens:,} tokens", "; --resume goes on" * (done < steps))


if __name__ == "__main__":
    main()

"""What a training on an accelerator pays for its readings, measured on the host and on the device.

    python -m benchmarks.training_on_device --layers 12 --width 768

The same training is run bare, with readings on the host, and with readings on the device, in turn.
Without an accelerator it runs on the processor, small, and that is said.
"""

import itertools
import statistics
import time
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config

from geomon import Memory, Monitor

HEAD_WIDTH, VOCABULARY = 64, 50_304


class Run(NamedTuple):
    """What one training took.

    Attributes:
        seconds: Of the whole training, with the readings that are finished behind it.
        steps: Seconds of each step, waits for the device included.
        readings: Number of readings.
        reading: Median seconds of a reading as geomon gives them; nan without readings.
        overhead: Share of the time that geomon says it took; nan without readings.
        weights: The weights at the end.
        memory: Most memory of the device in megabytes; nan on the processor.
        notes: What the readings say.
    """

    seconds: float
    steps: list[float]
    readings: int
    reading: float
    overhead: float
    weights: Tensor
    memory: float
    notes: set[str]


def main(
    layers: Annotated[int, typer.Option(help="Blocks of the decoder.")] = 12,
    width: Annotated[int, typer.Option(help="Width of the hidden states.")] = 768,
    context: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 1024,
    batch: Annotated[int, typer.Option(help="Sequences of a step.")] = 16,
    steps: Annotated[int, typer.Option(help="Steps of a training.")] = 120,
    every: Annotated[int, typer.Option(help="Steps from one reading to the next.")] = 20,
    runs: Annotated[int, typer.Option(help="Runs of each, in turn.")] = 2,
    compiled: Annotated[bool, typer.Option("--compiled", help="Compile the model.")] = False,
) -> None:
    """Train with and without readings, and print what the readings add."""
    on_device = torch.accelerator.is_available()
    device = torch.accelerator.current_accelerator() if on_device else torch.device("cpu")
    assert device is not None
    arms: dict[str, dict[str, Any] | None] = {
        "bare": None,
        "host, beside": {"device": "cpu"},
        "device, beside": {"device": "auto"},
        "host, in the step": {"device": "cpu", "background": False},
        "device, in the step": {"device": "auto", "background": False},
    }
    found: dict[str, list[Run]] = {name: [] for name in arms}
    sizes = (layers, width, context)
    _train(sizes, device, batch, 5, every, arms["device, beside"], compiled)  # warms up
    for _, (name, options) in itertools.product(range(runs), arms.items()):
        found[name].append(_train(sizes, device, batch, steps, every, options, compiled))
    table = Table(
        title=f"{layers} layers of width {width}, {batch} x {context} tokens a step, {steps} "
        f"steps, a reading every {every}"
    )
    for column in (
        "readings", "run, s", "median step, ms", "added by a reading, ms", "in steps",
        "reading, s", "geomon's own share", "memory, MB", "weights as bare",
    ):  # fmt: skip
        table.add_column(column, justify="left" if column == "readings" else "right")
    bare = found["bare"]
    step = statistics.median(itertools.chain.from_iterable(run.steps for run in bare))
    base = min(run.seconds for run in bare)
    for name, runs in found.items():
        best = min(runs, key=lambda run: run.seconds)
        added = (best.seconds - base) / max(1, best.readings)
        same = [torch.equal(run.weights, bare[0].weights) for run in runs]
        table.add_row(
            name, f"{best.seconds:.2f}", f"{1000 * statistics.median(best.steps):.1f}",
            f"{1000 * added:.0f}", f"{added / step:.2f}", f"{best.reading:.2f}",
            f"{best.overhead:.1%}", f"{best.memory:,.0f}", "yes" if all(same) else f"{same}",
        )  # fmt: skip
    console = Console(width=140)
    console.print(table)
    console.print(
        f"the fastest of {runs} runs each, in turn; bare "
        f"{', '.join(f'{run.seconds:.2f}' for run in bare)} s; torch {torch.__version__}, "
        f"{_name_of(device)}"
    )
    for name, runs in found.items():
        for note in sorted(runs[0].notes):
            console.print(f"{name}: {note}")


def _train(
    sizes: tuple[int, int, int],
    device: torch.device,
    batch: int,
    steps: int,
    every: int,
    options: dict[str, Any] | None,
    compiled: bool,
) -> Run:
    layers, width, context = sizes
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=context, n_embd=width, n_layer=layers,
        n_head=width // HEAD_WIDTH, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        activation_function="gelu_pytorch_tanh", bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).to(device)
    if compiled:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    generator = torch.Generator().manual_seed(0)
    # Half of the characters repeat the one before: something to learn in a few steps.
    texts = torch.randint(VOCABULARY // 50, (8, batch, context), generator=generator)
    texts[:, :, 1::2] = texts[:, :, ::2]
    texts = texts.to(device)
    memory = Memory()
    monitor = None
    if options is not None:
        monitor = Monitor(
            model, directory=None, sinks=[memory], strict=True,
            schedule=lambda step: step % every == every // 2, **options,
        )  # fmt: skip
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    taken = []
    _wait_for(device)
    began = time.perf_counter()
    for step in range(steps):
        before = time.perf_counter()
        ids = texts[step % len(texts)]
        with torch.autocast(device.type, torch.bfloat16):
            if monitor is None:
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            else:
                with monitor(step):
                    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        _wait_for(device)
        taken.append(time.perf_counter() - before)
    if monitor is not None:
        monitor.close()
    seconds = time.perf_counter() - began
    weights = torch.cat([p.detach().flatten().cpu() for p in model.parameters()])
    peak = torch.cuda.max_memory_allocated(device) / 1e6 if device.type == "cuda" else float("nan")
    read = memory.readings
    return Run(
        seconds, taken, len(read),
        statistics.median([one.seconds for one in read]) if read else float("nan"),
        float("nan") if monitor is None else monitor.overhead,
        weights, peak, {note for one in read for note in one.words()},
    )  # fmt: skip


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _name_of(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"no accelerator here: {torch.get_num_threads()} threads of the processor"


if __name__ == "__main__":
    typer.run(main)

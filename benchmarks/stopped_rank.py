"""One of two ranks misses a reading, is slow, or is stopped: does training go on, and who waits?

    python -m benchmarks.stopped_rank [--seconds 20]

Two gloo ranks train a small decoder with DDP, 40 steps and a reading at every fourth. In each case
something happens to the second rank at step 12: its window is left out, it sleeps, it has another
schedule, it gets SIGSTOP and after some seconds SIGCONT. Printed are the steps that both made, the
longest step of each rank, whether their weights are equal, and what was read.
"""

import argparse
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

from geomon import Memory, Monitor, every

STEPS, EVENT = 40, 12
CASES = ("nothing", "misses a window", "is slow", "has another schedule", "is stopped")


def train(rank: int, case: str, folder: Path, seconds: float) -> dict[str, object]:
    """Train as one of two ranks."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    torch.manual_seed(0)
    sizes = {"n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    config = GPT2Config(vocab_size=64, bos_token_id=None, eos_token_id=None, **sizes)
    model = DistributedDataParallel(GPT2LMHeadModel(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    odd = rank == 1
    sink = Memory()
    schedule = every(5 if odd and case == "has another schedule" else 4)
    monitor = Monitor(
        model, schedule=schedule, tokens=256, directory=None, sinks=[sink],
        rank_timeout=seconds / 4,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(rank)
    longest, event_took = 0.0, 0.0
    for step in range(STEPS):
        ids = torch.randint(0, 64, (16, 32), generator=generator)
        if odd and step == EVENT and case == "is slow":
            time.sleep(1.5)
        if odd and step == EVENT and case == "is stopped":
            (folder / "stop me").touch()
            time.sleep(0.5)  # the signal comes here
        left_out = odd and step == EVENT and case == "misses a window"
        began = time.perf_counter()
        with contextlib.nullcontext() if left_out else monitor(step):
            logits = model(ids, use_cache=False).logits
        event_took += (time.perf_counter() - began) * (step == EVENT)
        F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        longest = max(longest, time.perf_counter() - began)
    monitor.close()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {
        "steps": STEPS, "longest": longest, "window": event_took,
        "weights": weights.double().sum().item(), "read": [r.step for r in sink.readings],
    }  # fmt: skip


def run(case: str, seconds: float) -> list[dict[str, object]]:
    """Run both ranks, and stop the second one where the case is that."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.stopped_rank"]
        more = ["--case", case, "--folder", name, "--seconds", str(seconds)]
        ranks = [
            subprocess.Popen(
                [*command, *more, "--rank", str(rank)], stdout=subprocess.PIPE, text=True,
                env={**os.environ, "MASTER_ADDR": socket.gethostname()},
            )
            for rank in range(2)
        ]  # fmt: skip
        if case == "is stopped":
            while not (folder / "stop me").exists() and ranks[1].poll() is None:
                time.sleep(0.02)
            ranks[1].send_signal(signal.SIGSTOP)
            time.sleep(seconds)
            ranks[1].send_signal(signal.SIGCONT)
        return [json.loads(rank.communicate(timeout=600)[0].splitlines()[-1]) for rank in ranks]


def main() -> None:
    """Run every case, or be one rank of one case."""
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--seconds", type=float, default=20, help="for which a rank is stopped")
    options.add_argument("--case", choices=CASES)
    options.add_argument("--rank", type=int)
    options.add_argument("--folder", type=Path)
    given = options.parse_args()
    if given.rank is not None:
        logging.getLogger("geomon").addHandler(logging.StreamHandler())
        print(json.dumps(train(given.rank, given.case, given.folder, given.seconds)))
        return
    for case in [given.case] if given.case else CASES:
        first, second = run(case, given.seconds)
        same = first["weights"] == second["weights"]
        print(f"\n{case}: both made {STEPS} steps, weights {'equal' if same else 'DIFFER'}")
        for name, rank in (("first", first), ("second", second)):
            print(
                f"  {name} rank: in the window of step {EVENT} {rank['window']:.2f} s, longest "
                f"step {rank['longest']:.2f} s, read {rank['read']}"
            )


if __name__ == "__main__":
    main()

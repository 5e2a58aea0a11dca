"""The description of a run, which its record begins with."""

import platform
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import nn

from geomon.capture import ModelParts
from geomon.distributed import RankGroup
from geomon.metrics import Metric, searched_by
from geomon.monitor.device import MeasuringDevice
from geomon.monitor.held_out import describe_probe
from geomon.monitor.options import MonitorOptions
from geomon.record import text_of
from geomon.version import __version__

# Longest text of a setting.
_LONGEST = 200


def describe_run(
    options: MonitorOptions,
    model: ModelParts,
    block_names: Sequence[str],
    metrics: Mapping[str, Metric],
    group: RankGroup,
    device: MeasuringDevice,
) -> dict[str, Any]:
    """Describe a run: versions, model, blocks, metrics, rows, ranks, device and settings."""
    return {
        "geomon": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "model": model.name,
        "parameters": sum(
            parameter.numel()
            for parameter in model.root.parameters()
            if not nn.parameter.is_lazy(parameter)
        ),
        "layers": block_names,
        "metrics": {name: msgspec.to_builtins(metric.text) for name, metric in metrics.items()},
        "schedule": text_of(options["schedule"] or "within the budget"),
        "probe": describe_probe(options["probe"]),
        "tokens": options["tokens"],
        "splits": options["splits"],
        "queries": options["queries"],
        "seed": options["seed"],
        "world_size": group.size,
        "gather": group.connected,
        "mesh": group.mesh.words(),
        "device": str(device.device),
        "search": searched_by(device.device),
        **_settings(options["settings"], "training"),
    }


def _settings(settings: Mapping[str, Any], before: str) -> dict[str, bool | int | float | str]:
    """Flatten settings for the description of a run; everything but numbers becomes text."""
    found: dict[str, bool | int | float | str] = {}
    for name, value in settings.items():
        path = f"{before}/{name}"
        if isinstance(value, Mapping):
            found |= _settings(value, path)
        elif isinstance(value, bool | int | float) and abs(value) < 2**63:
            found[path] = value  # the record writes NaN and infinity as text, which JSON lacks
        else:
            found[path] = text_of(value)[:_LONGEST]
    return found


__all__ = ["describe_run"]

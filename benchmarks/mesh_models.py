"""Decoders for training on any mesh, and a single process on hidden states gathered by hand.

One decoder is like GPT (LayerNorm, learned positions, one projection for queries, keys and values
of each head), the other like Llama (RMSNorm, rotations, grouped queries). They are distributed as
usual: `parallelize_module`, with or without sequence parallelism, FSDP2 or DDP, and the schedules
of `torch.distributed.pipelining`.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

FAMILIES = ("GPT", "Llama")
MICRO_BATCHES = 4


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model, and of the batches on each data rank."""

    width: int = 32
    heads: int = 8
    key_heads: int = 4
    inner: int = 64
    vocabulary: int = 60
    length: int = 16
    batch: int = 8
    layers: int = 0  # 0 for the fewest that the mesh needs

    @property
    def head_width(self) -> int:
        """Width of a head."""
        return self.width // self.heads


SMALL = Sizes()


# -- models ----------------------------------------------------------------------------------------


class Attention(nn.Module):
    """One projection to [query | key | value] per head in turn (GPT-NeoX), or Llama's three.

    A Llama has fewer key heads, and rotates queries and keys.
    """

    def __init__(self, family: str, sizes: Sizes, dropout: float) -> None:
        super().__init__()
        self.head_width, self.dropout = sizes.head_width, dropout
        width, few = sizes.width, sizes.key_heads * sizes.head_width
        self.is_fused = family == "GPT"
        if self.is_fused:
            self.qkv = nn.Linear(width, 3 * width)
        else:
            self.wq, self.wk, self.wv = (nn.Linear(width, made) for made in (width, few, few))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend to all earlier tokens."""
        if self.is_fused:
            heads = self.qkv(x).unflatten(-1, (-1, 3 * self.head_width)).transpose(1, 2)
            q, k, v = heads.chunk(3, dim=-1)
        else:
            q, k, v = (
                made.unflatten(-1, (-1, self.head_width)).transpose(1, 2)
                for made in (self.wq(x), self.wk(x), self.wv(x))
            )
            q, k = _rotated(q), _rotated(k)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=dropout, enable_gqa=not self.is_fused
        )
        return self.out(y.transpose(1, 2).flatten(2))


def _rotated(x: Tensor) -> Tensor:
    turns = 100.0 ** -torch.linspace(0, 1, x.shape[-1] // 2)
    angles = torch.outer(torch.arange(x.shape[-2]).float(), turns)
    left, right = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)


class Block(nn.Module):
    """Pre-norm block; the activation of a Llama is gated."""

    def __init__(self, family: str, sizes: Sizes, dropout: float) -> None:
        super().__init__()
        norm = nn.LayerNorm if family == "GPT" else nn.RMSNorm
        width, inner = sizes.width, sizes.inner
        self.norm_1, self.norm_2 = norm(width), norm(width)
        self.attention = Attention(family, sizes, dropout)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.gate = nn.Linear(width, inner) if family == "Llama" else None
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Add the outputs of attention and of the two matrices."""
        x = x + self.dropout(self.attention(self.norm_1(x)))
        given = self.norm_2(x)
        inner = F.gelu(self.up(given))
        inner = inner if self.gate is None else inner * self.gate(given)
        return x + self.dropout(self.down(inner))


class Decoder(nn.Module):
    """The whole model, or one pipeline stage; blocks keep their numbers as names."""

    def __init__(
        self, family: str, layers: int, dropout: float = 0.0, stage: int = 0, stages: int = 1,
        sizes: Sizes = SMALL,
    ) -> None:  # fmt: skip
        super().__init__()
        torch.manual_seed(0)
        self.length, width = sizes.length, sizes.width
        self.tokens: nn.Module | None = nn.Embedding(sizes.vocabulary, width)
        self.places = nn.Embedding(sizes.length, width) if family == "GPT" else None
        blocks = {str(number): Block(family, sizes, dropout) for number in range(layers)}
        self.norm: nn.Module | None = (nn.LayerNorm if family == "GPT" else nn.RMSNorm)(width)
        self.head: nn.Module | None = nn.Linear(width, sizes.vocabulary)
        with torch.no_grad():  # so that tokens differ
            for parameter in self.parameters():
                parameter.mul_(2.0)
        each = layers // stages
        own = range(stage * each, (stage + 1) * each)
        self.blocks = nn.ModuleDict({n: b for n, b in blocks.items() if int(n) in own})
        if stage:
            self.tokens = self.places = None
        if stage < stages - 1:
            self.norm = self.head = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of token ids, or the output of a stage for the next one."""
        if self.tokens is not None:
            x = self.tokens(x)
        if self.places is not None:
            x = x + self.places(torch.arange(self.length))
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    """Mean cross-entropy of predicting each token from itself.

    Args:
        logits: [sequences, length, vocabulary].
        ids: Token ids, [sequences, length].
    """
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def batch_of(data: int, step: int, sizes: Sizes = SMALL) -> Tensor:
    """Draw the batch of a data rank; each sequence begins with a unique token.

    Args:
        data: Number of the data rank.
        step: Number of the step.
        sizes: Sizes of the batch. Defaults to `SMALL`.
    """
    generator = torch.Generator().manual_seed(100 * step + data)
    shape = sizes.batch, sizes.length
    ids = torch.randint(0, sizes.vocabulary, shape, generator=generator)
    ids[:, 0] = torch.arange(sizes.batch) + data * sizes.batch
    return ids


# -- meshes ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeshSpec:
    """A mesh, and the way a model is distributed on it.

    Attributes:
        data: Number of ranks along the data dimension.
        pipeline: Number of ranks along the pipeline dimension.
        tensor: Number of ranks along the tensor dimension.
        wrap: "FSDP2", "DDP", or "" for whole weights on each data rank.
        schedule: "GPipe", "1F1B", or "interleaved" with two stages per rank; "" without a pipeline.
        hidden: Layout of hidden states between blocks: "whole", "sequence" for plain tensors that
            are split along the sequence, or "DTensor" for DTensors with that split.
    """

    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    wrap: str = ""
    schedule: str = ""
    hidden: str = "whole"

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.data * self.pipeline * self.tensor

    @property
    def stages(self) -> int:
        """Number of stages."""
        return self.pipeline * (2 if self.schedule == "interleaved" else 1)

    @property
    def layers(self) -> int:
        """Number of blocks of the whole model."""
        return max(2, self.stages)

    def __str__(self) -> str:
        """Name the dimensions."""
        hidden = {"sequence": "sequence", "DTensor": "sequence, DTensors"}.get(self.hidden, "")
        parts = [
            (self.data, "data", self.wrap),
            (self.pipeline, "pipeline", self.schedule),
            (self.tensor, "tensor", hidden),
        ]
        named = (
            f"{count} {name}{f' ({more})' if more else ''}"
            for count, name, more in parts
            if count > 1
        )
        return " x ".join(named) or "1 rank"


MESHES = (
    MeshSpec(tensor=2),
    MeshSpec(tensor=2, hidden="sequence"),
    MeshSpec(tensor=2, hidden="DTensor"),
    MeshSpec(pipeline=2, schedule="GPipe"),
    MeshSpec(pipeline=2, schedule="1F1B"),
    MeshSpec(pipeline=2, schedule="interleaved"),
    MeshSpec(data=2, tensor=2, wrap="DDP"),
    MeshSpec(data=2, tensor=2, wrap="FSDP2"),
    MeshSpec(data=2, tensor=2, wrap="FSDP2", hidden="sequence"),
    MeshSpec(data=2, pipeline=2, wrap="DDP", schedule="1F1B"),
    MeshSpec(data=2, pipeline=2, wrap="FSDP2", schedule="interleaved"),
    MeshSpec(pipeline=2, tensor=2, schedule="GPipe"),
    MeshSpec(pipeline=2, tensor=2, schedule="1F1B", hidden="sequence"),
    MeshSpec(pipeline=2, tensor=2, schedule="interleaved", hidden="DTensor"),
    MeshSpec(tensor=4, hidden="sequence"),
    MeshSpec(pipeline=4, schedule="interleaved"),
    MeshSpec(data=2, pipeline=2, tensor=2, wrap="DDP", schedule="1F1B"),
    MeshSpec(data=2, pipeline=2, tensor=2, wrap="FSDP2", schedule="1F1B", hidden="sequence"),
    MeshSpec(data=2, pipeline=2, tensor=2, wrap="FSDP2", schedule="interleaved"),
    MeshSpec(data=4, tensor=2, wrap="FSDP2", hidden="DTensor"),
)


def _share_out(model: Decoder, mesh: DeviceMesh, hidden: str) -> None:
    """Distribute the weights of a decoder and, along the sequence, its hidden states."""
    along = hidden != "whole"
    local: dict[str, Any] = {"use_local_output": hidden != "DTensor"}
    given: dict[str, Any] = {"input_layouts": Shard(1)} if along else {}
    summed: dict[str, Any] = {"output_layouts": Shard(1), **local} if along else {}
    plan: dict[str, Any] = {
        "attention.out": RowwiseParallel(**summed),
        "up": ColwiseParallel(**given),
        "gate": ColwiseParallel(**given),
        "down": RowwiseParallel(**summed),
        **{f"attention.{name}": ColwiseParallel() for name in ("qkv", "wq", "wk", "wv")},
    }
    if along:
        whole = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        plan |= {"norm_1": SequenceParallel(), "norm_2": SequenceParallel(), "attention": whole}
        ends: dict[str, Any] = {
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        table = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), **local)
        places = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0), **local)
        ends |= {"tokens": table, "places": places}
        _parallelize(model, mesh, ends)
    for block in model.blocks.values():
        _parallelize(block, mesh, plan)


def _parallelize(module: nn.Module, mesh: DeviceMesh, plan: dict[str, Any]) -> None:
    names = {name for name, _ in module.named_modules()}
    parallelize_module(module, mesh, {n: style for n, style in plan.items() if n in names})


class Training:
    """One rank of a training.

    Args:
        spec: The mesh.
        family: "GPT" or "Llama".
        dropout: Probability of dropout.
        prepare: Changes each part of the model before it is distributed.
        sizes: Sizes of the model and of its batches.

    Attributes:
        parts: The decoder, or the stages of this rank.
        watched: Argument for a monitor: the module, or the schedule.
        data_rank: Number of the tokens of this rank.
        optimizer: Optimizer of this rank.
    """

    def __init__(
        self,
        spec: MeshSpec,
        family: str,
        dropout: float,
        prepare: Callable[[Decoder], None] = lambda part: None,
        sizes: Sizes = SMALL,
    ) -> None:
        self.spec, self._sizes = spec, sizes
        ranks = spec.pipeline, spec.data, spec.tensor
        self.mesh = init_device_mesh("cpu", ranks, mesh_dim_names=("pp", "dp", "tp"))
        self.data_rank = self.mesh.get_local_rank("dp")
        self._runs = self.mesh.get_local_rank("pp")
        numbers = range(self._runs, spec.stages, spec.pipeline)
        layers = sizes.layers or spec.layers
        self.parts = [
            Decoder(family, layers, dropout, number, spec.stages, sizes) for number in numbers
        ]
        for part in self.parts:
            prepare(part)
            if spec.tensor > 1:
                _share_out(part, self.mesh["tp"], spec.hidden)
        modules = [self._wrapped(part) for part in self.parts]
        self._schedule: Any = None
        self._stages: list[PipelineStage] = []
        if spec.schedule:
            group = self.mesh.get_group("pp")
            self._stages = [
                PipelineStage(
                    module, number, spec.stages, torch.device("cpu"), group=group,
                    get_mesh=lambda *asked: self.mesh["tp"],
                )
                for module, number in zip(modules, numbers, strict=True)
            ]  # fmt: skip
            self._schedule = _SCHEDULES[spec.schedule](self._stages)
        self._model = modules[0]
        self.watched: Any = self._schedule or self._model
        parameters = [p for module in modules for p in module.parameters()]
        self.optimizer = torch.optim.SGD(parameters, lr=0.05, foreach=False)

    def _wrapped(self, part: Decoder) -> nn.Module:
        if self.spec.wrap == "FSDP2":
            for block in part.blocks.values():
                fully_shard(block, mesh=self.mesh["dp"])
            return fully_shard(part, mesh=self.mesh["dp"])
        if self.spec.wrap == "DDP" and self.spec.tensor > 1:
            return nn.parallel.DistributedDataParallel(part, device_mesh=self.mesh["dp"])
        if self.spec.wrap == "DDP":
            group = self.mesh.get_group("dp")
            return nn.parallel.DistributedDataParallel(part, process_group=group)
        return part

    def seed(self) -> None:
        """Seed dropout; ranks that share weights get equal seeds if hidden states are whole."""
        along = self.mesh.get_local_rank("tp") if self.spec.hidden != "whole" else 0
        torch.manual_seed(1 + self.data_rank + 10 * self._runs + 100 * along)

    def step(
        self, number: int, around: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> list[float]:
        """Train on one batch; returns the losses that this rank knows.

        Args:
            number: Number of the step.
            around: Makes the context manager around the forward pass or the whole schedule.
        """
        ids = batch_of(self.data_rank, number, self._sizes)
        losses: list[Tensor] = []
        if self._schedule is None:
            with around():
                logits = self._model(ids)
            whole = logits.full_tensor() if isinstance(logits, DTensor) else logits
            losses.append(loss_of(whole, ids))
            losses[0].backward()
        else:
            with around():
                self.run(ids, losses=losses)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [float(loss) for loss in losses]

    def run(self, ids: Tensor, way: str = "step", **more: Any) -> Any:
        """Run the schedule on a batch.

        Args:
            ids: Token ids.
            way: "step", or "eval" for no backward pass. Defaults to "step".
            more: Further arguments.
        """
        first = any(stage.is_first for stage in self._stages)
        last = any(stage.is_last for stage in self._stages)
        given = {"target": ids} if last else {}
        return getattr(self._schedule, way)(*[ids] * first, **given, **more)

    def state(self) -> list[Tensor]:
        """Copy the weights of this rank."""
        return [
            _whole_or_local(parameter).clone()
            for group in self.optimizer.param_groups
            for parameter in group["params"]
        ]


_SCHEDULES: dict[str, Callable[[list[PipelineStage]], Any]] = {
    "GPipe": lambda stages: ScheduleGPipe(stages[0], MICRO_BATCHES, loss_of),
    "1F1B": lambda stages: Schedule1F1B(stages[0], MICRO_BATCHES, loss_of),
    "interleaved": lambda stages: ScheduleInterleaved1F1B(stages, MICRO_BATCHES, loss_of),
}


def _whole_or_local(values: Tensor) -> Tensor:
    return (values.to_local() if isinstance(values, DTensor) else values).detach()


# -- gathered by hand ------------------------------------------------------------------------------

# Outputs of each micro-batch, by the module's path in the whole model.
Outputs = dict[str, list[Tensor]]

_PROJECTIONS = ("qkv", "wq", "wk")


@contextmanager
def recorded(parts: Sequence[Decoder], into: Outputs) -> Iterator[None]:
    """Record the outputs of blocks and projections, and the first block's input, with plain hooks.

    Args:
        parts: The parts of this rank.
        into: Dict for the outputs.
    """

    def keep(path: str, module: nn.Module, args: Any, output: Any) -> None:
        into.setdefault(path, []).append(_whole_or_local(output).clone())
        if path == "0":
            into.setdefault("entered", []).append(_whole_or_local(args[0]).clone())

    with ExitStack() as stack:
        for part in parts:
            for number, block in part.blocks.items():
                for path, module in _made_in(number, block):
                    handle = module.register_forward_hook(functools.partial(keep, path))
                    stack.callback(handle.remove)
        yield


def _made_in(number: str, block: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    yield number, block
    attention: Any = block.get_submodule("attention")
    for name in _PROJECTIONS:
        if hasattr(attention, name):
            yield f"{number}.{name}", getattr(attention, name)


def gathered_by_hand(training: Training, outputs: Outputs) -> list[Outputs] | None:
    """Gather the records of all ranks for each data rank; only the first rank returns them.

    Args:
        training: The training of this rank.
        outputs: Record of this rank.
    """
    spec = training.spec
    place = training.data_rank, training.mesh.get_local_rank("tp")
    everything: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, (place, outputs))
    if dist.get_rank():
        return None
    found: list[Outputs] = []
    for data in range(spec.data):
        own = [(shard, given) for (number, shard), given in everything if number == data]
        whole: Outputs = {}
        for path in {path for _, given in own for path in given}:
            shards = [given[path] for _, given in sorted(own, key=lambda x: x[0]) if path in given]
            # Between training and evaluation a stage runs once more, to infer shapes.
            shards = [made[-MICRO_BATCHES:] if spec.schedule else made for made in shards]
            features = "." in path
            along = -1 if features else 1 if spec.hidden != "whole" else None
            whole[path] = [
                torch.cat(made, dim=along) if along is not None else made[0]
                for made in zip(*shards, strict=True)
            ]
        found.append(whole)
    return found


@contextmanager
def replayed(model: Decoder, outputs: Outputs, micro_batch: int) -> Iterator[None]:
    """Make the modules of a whole decoder return recorded outputs.

    Args:
        model: A decoder that is not distributed.
        outputs: Outputs gathered by hand.
        micro_batch: Number of the micro-batch.
    """

    def give(path: str, *call: Any) -> Tensor:
        return outputs[path][micro_batch].clone()

    def enter(*call: Any) -> tuple[Tensor]:
        return (give("entered"),)

    with ExitStack() as stack:
        stack.callback(model.blocks["0"].register_forward_pre_hook(enter).remove)
        for number, block in model.blocks.items():
            for path, module in _made_in(number, block):
                handle = module.register_forward_hook(functools.partial(give, path))
                stack.callback(handle.remove)
        yield

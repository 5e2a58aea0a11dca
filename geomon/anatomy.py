"""Anatomy: where the blocks, the token embedding and the projections of a model are.

Found by structure, never by a table of class names: those change from release to release and under
sharding. Only the projections of queries and keys are known by the names that the field gives them.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

_CONTAINERS = nn.ModuleList | nn.Sequential | nn.ModuleDict

# What wrappers put into module names; people know the names without.
_WRAPPERS = re.compile(
    r"(^|\.)(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)(?=\.|$)"
)

# Siblings that project to queries and to keys.
_SEPARATE = (
    ("q_proj", "k_proj"),  # Llama, OPT, Gemma, Whisper, ViT
    ("query", "key"),  # BERT, RoBERTa, ALBERT
    ("q_lin", "k_lin"),  # DistilBERT
    ("query_proj", "key_proj"),  # DeBERTa
    ("q", "k"),  # T5
    ("wq", "wk"),  # Llama's own code, torchtitan
    ("to_q", "to_k"),  # x-transformers, diffusers
)
# One projection to [q | k | v], each as wide as its input.
_FUSED_THIRDS = ("c_attn", "qkv")


@dataclass(frozen=True)
class Projections:
    """The modules that make queries and keys: two, or one whose output is [q | k | v]."""

    query: nn.Module
    key: nn.Module

    @property
    def fused(self) -> bool:
        """Whether one module makes queries, keys and values."""
        return self.query is self.key


@dataclass(frozen=True)
class Block:
    """One transformer block: its name as shown to people, and what was found in it."""

    name: str
    module: nn.Module
    projections: Projections | None


@dataclass(frozen=True)
class Anatomy:
    """What is watched in a model.

    Attributes:
        blocks: In order of depth; what leaves block l (counted from 1) is layer l.
        above: Modules that contain the blocks, outermost first: their calls carry padding masks.
        embeddings: Embedding tables outside the blocks: the input of one is the token ids.
    """

    blocks: tuple[Block, ...]
    above: tuple[nn.Module, ...]
    embeddings: tuple[nn.Embedding, ...]


def find_anatomy(model: nn.Module, blocks: str | Sequence[nn.Module] | None = None) -> Anatomy:
    """Find the blocks of a model and what stands around them.

    The blocks are the children, all of one class and not leaves, of the `ModuleList`, `Sequential`
    or `ModuleDict` that holds most parameters; lists inside blocks (experts, say) do not count.

    Args:
        model: Any module that contains a transformer.
        blocks: Overrides the search: a regular expression that matches the whole names of the
            blocks, or the blocks themselves.

    Raises:
        ValueError: No blocks, or none that the pattern matches.
        TypeError: `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"expected a torch.nn.Module, got {type(model).__name__}: pass the model itself"
        )
    names = {module: name for name, module in model.named_modules()}
    found = _chosen(model, blocks, names) if blocks is not None else _largest_stack(model)
    if not found:
        children = ", ".join(name for name, _ in model.named_children()) or "none"
        raise ValueError(
            f"no transformer blocks in {type(model).__name__} (its children: {children}): expected "
            "a ModuleList, ModuleDict or Sequential of blocks of one class; give them with "
            r'blocks="regular expression of their names", such as r"encoder\.layer\.\d+", or as a '
            "list of modules"
        )
    inside = {module for block in found for module in block.modules()}
    return Anatomy(
        blocks=tuple(
            Block(shown_name(names[block]) or type(block).__name__, block, _find_projections(block))
            for block in found
        ),
        above=tuple(
            module
            for module in model.modules()
            if module not in inside and any(child is found[0] for child in module.modules())
        ),
        embeddings=tuple(
            module
            for module in model.modules()
            if isinstance(module, nn.Embedding) and module not in inside
        ),
    )


def shown_name(name: str) -> str:
    """A module's name without what wrappers put into it.

    Example:
        >>> shown_name("_orig_mod.transformer.h.0._checkpoint_wrapped_module")
        'transformer.h.0'
    """
    return _WRAPPERS.sub("", name).removeprefix(".")


def _chosen(
    model: nn.Module, blocks: str | Sequence[nn.Module], names: dict[nn.Module, str]
) -> list[nn.Module]:
    if isinstance(blocks, str):
        pattern = re.compile(blocks)
        found = [m for m, name in names.items() if pattern.fullmatch(shown_name(name))]
        if not found:
            raise ValueError(
                f"no module's name matches blocks={blocks!r} as a whole; names are such as "
                f"{', '.join(shown_name(n) for n in list(names.values())[1:9])}"
            )
        return found
    outside = [type(block).__name__ for block in blocks if block not in names]
    if outside:
        raise ValueError(
            f"blocks holds modules that are not part of {type(model).__name__}: {outside}"
        )
    return list(blocks)


def _largest_stack(model: nn.Module) -> list[nn.Module]:
    """Blocks of the outermost stack that holds most parameters."""
    stacks: list[list[nn.Module]] = []
    covered: set[nn.Module] = set()
    for module in model.modules():  # outermost first
        if module in covered or not isinstance(
            module, nn.ModuleList | nn.Sequential | nn.ModuleDict
        ):
            continue
        children = list(module.children())
        if _are_blocks(children):
            stacks.append(children)
            covered |= {inner for child in children for inner in child.modules()}
    return max(stacks, key=lambda stack: sum(map(_size, stack)), default=[])


def _are_blocks(children: list[nn.Module]) -> bool:
    """Whether the modules are of one class, can be called, have parameters and are no leaves."""
    return (
        len({type(child) for child in children}) == 1
        and not isinstance(children[0], nn.ModuleList | nn.ModuleDict)
        and all(any(True for _ in child.children()) for child in children)
        and all(any(True for _ in child.parameters()) for child in children)
    )


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _find_projections(block: nn.Module) -> Projections | None:
    """The projections of the first attention in the block, or None where none is known by name."""
    for module in block.modules():
        children = dict(module.named_children())
        for query, key in _SEPARATE:
            if query in children and key in children:
                return Projections(children[query], children[key])
        for name in _FUSED_THIRDS:
            if name in children and _makes_thirds(children[name]):
                return Projections(children[name], children[name])
    return None


def _makes_thirds(module: nn.Module) -> bool:
    """Whether the module's output is three times as wide as its input."""
    weight = getattr(module, "weight", None)
    if weight is None or weight.ndim != 2:
        return False
    narrow, wide = sorted(weight.shape)
    return bool(wide == 3 * narrow)

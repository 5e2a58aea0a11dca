"""A vision transformer, an MLP-mixer and a convolutional network of the same depth."""

import torch.nn.functional as F
from torch import Tensor, nn

from recipes.digits.data import CLASSES, SIDE

# Names of the compared networks.
TRANSFORMER, MIXER, CONVOLUTIONAL = "transformer", "mixer", "convolutional"

_PATCH = 2  # height and width of a patch
_PATCHES = (SIDE // _PATCH) ** 2


class Patches(nn.Module):
    """Embedding of the patches of an image, with a learned position each.

    Args:
        width: Width of the hidden states.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.patches = nn.Linear(_PATCH**2, width)
        self.positions = nn.Embedding(_PATCHES, width)

    def forward(self, pixels: Tensor) -> Tensor:
        """Embed images [images, 8, 8] as [images, 16, width]."""
        squares = pixels.unfold(1, _PATCH, _PATCH).unfold(2, _PATCH, _PATCH)
        return self.patches(squares.flatten(3).flatten(1, 2)) + self.positions.weight


class Attention(nn.Module):
    """Multi-head attention in which every patch sees all.

    Args:
        width: Width of the hidden states.
        heads: Number of heads.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, hidden: Tensor) -> Tensor:
        """Mix the values of all patches, [images, patches, width] to the same."""
        query, key, value = (
            projection(hidden).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Transposed(nn.Module):
    """Perceptron over the patches in place of the width.

    Args:
        inner: Width of its hidden layer.
    """

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.mlp = _perceptron(_PATCHES, inner)

    def forward(self, hidden: Tensor) -> Tensor:
        """Mix the patches by fixed weights, [images, patches, width] to the same."""
        return self.mlp(hidden.transpose(1, 2)).transpose(1, 2)


class TokenBlock(nn.Module):
    """A layer that mixes the patches and a perceptron, each on what its norm makes of its input.

    Args:
        mixing: Layer that mixes the patches: what a transformer and a mixer differ in.
        width: Width of the hidden states.
    """

    def __init__(self, mixing: nn.Module, width: int) -> None:
        super().__init__()
        self.mixing_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixing, self.mlp = mixing, _perceptron(width, 4 * width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute the next layer, [images, patches, width] to the same."""
        hidden = hidden + self.mixing(self.mixing_norm(hidden))
        return hidden + self.mlp(self.mlp_norm(hidden))


class ConvolutionalBlock(nn.Module):
    """Two convolutions, each on what batch normalisation and a ReLU make of its input.

    Args:
        channels: Number of channels.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1),
            nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1),
        )  # fmt: skip

    def forward(self, maps: Tensor) -> Tensor:
        """Compute the next layer, [images, channels, 8, 8] to the same."""
        return maps + self.branch(maps)


class Classifier(nn.Module):
    """Blocks between an embedding of the image and the mean over its places.

    Args:
        embedding: Embedding of the image.
        blocks: The blocks.
        norm: Norm after the last block.
        width: Width of the hidden states, or number of channels.
        places: Dimensions of the hidden states over which the mean is taken.
    """

    def __init__(
        self,
        embedding: nn.Module,
        blocks: list[nn.Module],
        norm: nn.Module,
        width: int,
        places: tuple[int, ...],
    ) -> None:
        super().__init__()
        self.embedding, self.blocks, self.norm = embedding, nn.ModuleList(blocks), norm
        self.head = nn.Linear(width, CLASSES)
        self.places = places

    def forward(self, pixels: Tensor) -> Tensor:
        """Logits of the digits, [images, 10]."""
        hidden = self.embedding(pixels)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden).mean(self.places))


class OneVectorPerImage(nn.Module):
    """The same convolutional network, whose layers are one vector for each image.

    Godey et al. flatten convolutional maps so; as it stands, each place of a map is a row.

    Args:
        network: Network, whose modules are shared.
    """

    def __init__(self, network: Classifier) -> None:
        super().__init__()
        self.embedding = network.embedding
        self.blocks = nn.ModuleList(_Flattened(block) for block in network.blocks)

    def forward(self, pixels: Tensor) -> Tensor:
        """Compute the last layer, [images, 1, channels x 64]."""
        hidden = self.embedding(pixels).flatten(1)[:, None]
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class _Flattened(nn.Module):
    """A block whose input and output are flattened maps, [images, 1, channels x 64]."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, rows: Tensor) -> Tensor:
        return self.block(rows.view(len(rows), -1, SIDE, SIDE)).flatten(1)[:, None]


def build(kind: str, *, layers: int, width: int, heads: int) -> Classifier:
    """Build a network from nothing.

    Args:
        kind: "transformer", "mixer" or "convolutional".
        layers: Number of blocks.
        width: Width of the hidden states; maps have half as many channels.
        heads: Number of heads of an attention.

    Raises:
        ValueError: A network that the recipe does not know.
    """
    if kind == CONVOLUTIONAL:
        channels = width // 2
        first = nn.Sequential(
            nn.Unflatten(1, (1, SIDE)), nn.Conv2d(1, channels, 3, padding=1)
        )  # the pixels have no dimension of channels
        blocks: list[nn.Module] = [ConvolutionalBlock(channels) for _ in range(layers)]
        norm = nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU())
        return Classifier(first, blocks, norm, channels, places=(2, 3))
    if kind == TRANSFORMER:
        blocks = [TokenBlock(Attention(width, heads), width) for _ in range(layers)]
    elif kind == MIXER:
        blocks = [TokenBlock(Transposed(4 * _PATCHES), width) for _ in range(layers)]
    else:
        known = ", ".join((TRANSFORMER, MIXER, CONVOLUTIONAL))
        raise ValueError(f"no network is called {kind!r}: expected one of {known}")
    return Classifier(Patches(width), blocks, nn.LayerNorm(width), width, places=(1,))


def _perceptron(width: int, inner: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width, inner), nn.GELU(approximate="tanh"), nn.Linear(inner, width)
    )

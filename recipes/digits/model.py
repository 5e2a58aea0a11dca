"""A patch embedding, and a convolutional network to compare with transformers."""

import torch.nn.functional as F
from torch import Tensor, nn

from recipes.digits.data import CLASSES, SIDE

_PATCH = 2  # height and width of a patch
PATCHES = (SIDE // _PATCH) ** 2


class Patches(nn.Module):
    """Embedding of image patches.

    Args:
        width: Width of the hidden states.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.patches = nn.Linear(_PATCH**2, width)

    def forward(self, pixels: Tensor) -> Tensor:
        """Embed images [images, 8, 8] as [images, 16, width]."""
        squares = pixels.unfold(1, _PATCH, _PATCH).unfold(2, _PATCH, _PATCH)
        return self.patches(squares.flatten(3).flatten(1, 2))


class ConvolutionalBlock(nn.Module):
    """Residual block of two convolutions, each after batch normalisation and a ReLU.

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
        """Compute the next layer; input and output are [images, channels, 8, 8]."""
        return maps + self.branch(maps)


class ConvolutionalNetwork(nn.Module):
    """Convolutional blocks with logits at every place, as in a transformer.

    Args:
        layers: Number of blocks.
        channels: Number of channels.
    """

    def __init__(self, layers: int, channels: int) -> None:
        super().__init__()
        self.embedding = nn.Conv2d(1, channels, 3, padding=1)
        self.blocks = nn.ModuleList(ConvolutionalBlock(channels) for _ in range(layers))
        self.norm = nn.BatchNorm2d(channels)
        self.head = nn.Linear(channels, CLASSES)

    def forward(self, pixels: Tensor) -> Tensor:
        """Compute the logits of the digits at every place, [images, 64, 10]."""
        maps = self.embedding(pixels[:, None])
        for block in self.blocks:
            maps = block(maps)
        return self.head(F.relu(self.norm(maps)).flatten(2).transpose(1, 2))


class OneVectorPerImage(nn.Module):
    """View of a convolutional network whose layers are one vector per image.

    Godey et al. flatten convolutional maps in this way. Without this view, each place of a map is a
    row.

    Args:
        network: Network, whose modules are shared.
    """

    def __init__(self, network: ConvolutionalNetwork) -> None:
        super().__init__()
        self.embedding = network.embedding
        maps = nn.Unflatten(1, (network.embedding.out_channels, SIDE, SIDE))
        flat = nn.Flatten(1), nn.Unflatten(1, (1, -1))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Flatten(1), maps, block, *flat) for block in network.blocks
        )

    def forward(self, pixels: Tensor) -> Tensor:
        """Compute the last layer, [images, 1, channels x 64]."""
        hidden = self.embedding(pixels[:, None]).flatten(1)[:, None]
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

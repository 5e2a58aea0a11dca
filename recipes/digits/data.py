"""The 1,797 images of handwritten digits in scikit-learn."""

from typing import NamedTuple

import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import Tensor

# Height and width of an image.
SIDE = 8
CLASSES = 10

_LARGEST = 16.0  # of a pixel
_HELD_OUT = 360  # a fifth of the images


class Images(NamedTuple):
    """Images with their digits.

    Attributes:
        pixels: Pixels between 0 and 1, float32 [images, 8, 8].
        digits: Digits, int64 [images].
    """

    pixels: Tensor
    digits: Tensor


def load(seed: int) -> tuple[Images, Images]:
    """Load the training images and the held-out fifth, split by the seed."""
    found = load_digits()
    pixels = torch.tensor(found.images, dtype=torch.float32) / _LARGEST
    digits = torch.tensor(found.target, dtype=torch.int64)
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(seed))
    held_out, train = order[:_HELD_OUT], order[_HELD_OUT:]
    return Images(pixels[train], digits[train]), Images(pixels[held_out], digits[held_out])

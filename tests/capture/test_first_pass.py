import pytest
import torch
from models import transformer
from torch import nn

from geomon.capture import find_anatomy, padding_arguments
from geomon.capture.first_pass import find_padding_masks


@pytest.mark.parametrize(
    ("mask", "inverted", "valid"),
    [
        (torch.tensor([[1, 1, 0]]), False, [True, True, False]),
        (torch.tensor([[1.0, 1.0, 0.0]]), False, [True, True, False]),
        (torch.tensor([[0.0, 0.0, -1e4]]), False, [True, True, False]),
        (torch.tensor([[0.0, 0.0, 0.0]]), False, [True, True, True]),
        (torch.tensor([[3e4, 0.0, -3e4]]), False, [True, True, False]),  # a global token
        (torch.tensor([[False, False, True]]), True, [True, True, False]),
        (torch.tensor([[0.0, 0.0, -torch.inf]]), True, [True, True, False]),
    ],
)
def test_masks_say_where_tokens_are_in_several_ways(mask, inverted, valid):
    module = nn.Module()
    name = "src_key_padding_mask" if inverted else "attention_mask"
    assert find_padding_masks(module, (), {name: mask, "mask": mask})[name].tolist() == [valid]
    assert find_padding_masks(module, (), {name: mask[0]}) == {}


def test_padding_arguments_are_those_of_the_modules_around_the_blocks():
    both = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
    assert padding_arguments(find_anatomy(transformer("gpt2"))) == ["attention_mask"]
    assert padding_arguments(find_anatomy(both)) == [
        "src_key_padding_mask", "tgt_key_padding_mask", "memory_key_padding_mask",
    ]  # fmt: skip
    assert padding_arguments(find_anatomy(both.encoder)) == ["src_key_padding_mask"]

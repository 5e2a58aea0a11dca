"""Outputs of heads, read where they enter the output projection, whatever comes before it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from geomon import measure, select
from geomon.capture.attending.outputs import OutputSizes, sums_of_squares
from geomon.capture.tap import HeadColumns
from support.models import transformer
from support.watched import attend_by_hand, look

HEADS, SIZE = 4, 6
WIDTH = HEADS * SIZE
SEQUENCES, LENGTH = 5, 7


def by_head(m, mixed, x):
    """As nearly all models do."""
    m.outputs = mixed
    return m.out(mixed.transpose(1, 2).flatten(2))


def interleaved(m, mixed, x):
    """The numbers of a head are not side by side."""
    m.outputs = mixed
    return m.out(mixed.permute(0, 2, 3, 1).flatten(2))


def length_first(m, mixed, x):
    m.outputs = mixed
    return m.out(mixed.permute(2, 0, 1, 3).flatten(2)).transpose(0, 1)


def gated(m, mixed, x):
    m.outputs = mixed * m.gate(x).sigmoid().unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
    return m.out(m.outputs.transpose(1, 2).flatten(2))


def head_of_zero(m, mixed, x):
    joined = mixed.transpose(1, 2).flatten(2).clone()
    joined[..., SIZE : 2 * SIZE] = 0
    m.outputs = joined.unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
    return m.out(joined)


def convolved(m, mixed, x):
    m.outputs = mixed
    joined = mixed.transpose(2, 3).flatten(1, 2)
    return F.conv1d(joined, m.out.weight[:, :, None], m.out.bias).mT


def weights_first(m, mixed, x):
    m.outputs = mixed
    return (m.out.weight @ mixed.transpose(2, 3).flatten(1, 2)).mT


def beside_others(m, mixed, x):
    """One matrix for attention and the feed-forward part."""
    m.outputs = mixed
    both = torch.cat([F.gelu(m.gate(x)), mixed.transpose(1, 2).flatten(2)], dim=-1)
    return m.both(both)


def by_einsum(m, mixed, x):
    m.outputs = mixed
    return torch.einsum("bhqd,hdw->bqw", mixed, m.out.weight.unflatten(0, (HEADS, SIZE)))


def not_projected(m, mixed, x):
    return mixed.transpose(1, 2).flatten(2)


def multiplied_with_tokens(m, mixed, x):
    joined = mixed.transpose(1, 2).flatten(2)
    return joined @ x.mT @ x


def of_difference(m, mixed, x):
    """Project differences of heads: no output belongs to a single head."""
    return m.out((mixed - mixed.flip(1)).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, project, attend):
        super().__init__()
        self.attention = Attention(project, attend)
        self.mlp = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.mlp(x)


class Attention(nn.Module):
    def __init__(self, project, attend):
        super().__init__()
        self.project, self.attend = project, attend
        self.q_proj, self.k_proj, self.v_proj, self.out, self.gate = (
            nn.Linear(WIDTH, WIDTH) for _ in range(5)
        )
        self.both = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        heads = (
            made(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
            for made in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.project(self, self.attend(*heads), x)


def seen(project, attend, **options):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(project, attend) for _ in range(2)))
    window = look(model, torch.randn(SEQUENCES, LENGTH, WIDTH), **options)
    return model, window.snapshot().layers[1:]


ATTEND = {"fused": F.scaled_dot_product_attention, "by hand": attend_by_hand}


@pytest.mark.parametrize("attend", ATTEND)
@pytest.mark.parametrize(
    "project",
    [by_head, interleaved, length_first, gated, head_of_zero, convolved, weights_first,
     beside_others, by_einsum],
)  # fmt: skip
def test_the_outputs_are_those_that_enter_the_projection(project, attend):
    model, layers = seen(project, ATTEND[attend])
    for block, layer in zip(model, layers, strict=True):
        squares = block.attention.outputs.double().square().sum(dim=(0, 2, 3))
        counts = torch.full_like(squares, SEQUENCES * LENGTH)
        expected = torch.stack([squares, counts], dim=1)
        torch.testing.assert_close(layer.captured["head_outputs"], expected)


@pytest.mark.parametrize("attend", ATTEND)
@pytest.mark.parametrize("project", [not_projected, multiplied_with_tokens, of_difference])
def test_outputs_that_no_weights_take_head_by_head_are_missing_with_a_reason(project, attend):
    _, layers = seen(project, ATTEND[attend])
    for layer in layers:
        assert "head_outputs" not in layer.captured
        assert "were not traced to an output projection" in layer.missing["head_outputs"]
        assert "query" in layer.captured


def test_sampled_queries_count_if_there_are_many():
    model, layers = seen(by_head, attend_by_hand, rows=16)
    for block, layer in zip(model, layers, strict=True):
        found, every = layer.captured["head_outputs"], block.attention.outputs
        assert 0 < found[0, 1] < SEQUENCES * LENGTH
        assert (found[:, 0] / found[:, 1]).tolist() == pytest.approx(
            every.double().square().sum(3).mean(dim=(0, 2)).tolist(), rel=0.5
        )


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_padding_does_not_count_and_a_head_that_a_hook_zeroes_is_0(name, attention):
    torch.manual_seed(0)
    model = transformer(name, attention).eval()
    path, kept = {"llama": "o_proj", "gpt2": "attn.c_proj"}[name], []
    projections = [m for place, m in model.named_modules() if place.endswith(path)]

    def zero(module, args):
        x = args[0].clone()
        x[..., : x.shape[-1] // model.config.num_attention_heads] = 0
        kept.append(x)
        return (x,)

    projections[1].register_forward_pre_hook(zero)
    ids, mask = torch.randint(0, 16, (4, 12)), torch.ones(4, 12, dtype=torch.long)
    mask[2:, 8:] = 0
    values = measure(
        model, {"input_ids": ids, "attention_mask": mask}, metrics=select("head_output_norm")
    )
    heads = kept[0].unflatten(-1, (model.config.num_attention_heads, -1))[mask.bool()]
    wanted = heads.double().square().sum(-1).mean(0).sqrt().tolist()
    found = [values[f"head_output_norm/layer_02/head_{head}"] for head in range(len(wanted))]
    assert found == pytest.approx(wanted, rel=1e-5)
    assert found[0] == 0


COLUMNS = torch.tensor([5, 0, 3, 1, 4, 2])


@pytest.mark.parametrize("columns", [slice(1, 7), COLUMNS])
@pytest.mark.parametrize("queries", [None, torch.tensor([0, 2, 3, 7])])
@pytest.mark.parametrize("rows", [None, torch.tensor([4, -1, 5, 0, -1, 7, 2, 6])])
def test_sizes_are_of_the_columns_of_a_head_in_the_rows_of_sampled_queries(columns, queries, rows):
    """Queries may be at other rows than their own, or at none."""
    entered = torch.randn(2, 4, 8, requires_grad=True)
    sizes = OutputSizes((2, 3, 4), queries)
    sizes.take(entered, HeadColumns(columns, rows))
    flat, wanted = entered.detach().double().flatten(0, 1), range(8) if queries is None else queries
    found = [int(n) if rows is None else int(rows[n]) for n in wanted]
    heads = flat[[row for row in found if row >= 0]][:, columns].unflatten(1, (3, 2))
    torch.testing.assert_close(sizes.norms.double(), heads.square().sum(2).sqrt())
    assert (sizes.norms.dtype, sizes.norms.requires_grad) == (torch.float32, False)
    if rows is None:
        assert sizes.known is None
    else:
        assert sizes.known.tolist() == [place for place, row in enumerate(found) if row >= 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_sizes_are_computed_in_float32_at_least(dtype):
    entered = 1 + torch.rand(1, 6, 2, dtype=torch.float64) / 64
    entered = (entered * 2.0**100 if dtype == torch.float64 else entered).to(dtype)
    sizes = OutputSizes((1, 1, 6), None)
    sizes.take(entered, HeadColumns(slice(None), None))
    expected = entered.double().square().sum(2).sqrt().flatten()
    torch.testing.assert_close(sizes.norms.flatten().double(), expected, rtol=1e-7, atol=0)


def test_sums_of_squares_count_each_attention_alone():
    norms = [torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), torch.full((3, 2), 2.0)]
    first, second = sums_of_squares(norms, None)
    assert first.tolist() == [[35, 3], [56, 3]]
    assert second.tolist() == [[12, 3], [12, 3]]
    assert first.dtype == torch.float64
    first, second = sums_of_squares(norms, torch.tensor([True, False, True]))
    assert first.tolist() == [[26, 2], [40, 2]]
    assert second.tolist() == [[8, 2], [8, 2]]

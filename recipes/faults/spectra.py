"""Numbers of weights and of single layers that others have proposed as warnings."""

import itertools

import torch
from torch import Tensor, nn

from recipes.faults.subject import Parts

# Distance from the unit circle within which a mode counts as near it.
_NEAR_UNIT = 0.1
# Share of the largest variance below which a direction is left out of a whitening.
_LEAST_VARIANCE = 1e-6


class UpdateEntropy:
    """Spectral entropy of what an update does to W_q W_k^T, to first order (2606.28116).

    Of each head: the entropy of the normalised singular values of dW_q W_k^T + W_q dW_k^T. The
    weights of the update before are kept.

    Args:
        model: A decoder.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parts = Parts(model)
        self._before: tuple[Tensor, Tensor] | None = None

    def __call__(self) -> dict[str, float]:
        """Compute it since the last call, for each head in nats; nothing at the first call."""
        query, key = self._heads()
        before, self._before = self._before, (query, key)
        if before is None:
            return {}
        left = torch.cat([query - before[0], query], dim=-1)
        right = torch.cat([key, key - before[1]], dim=-1)
        # The product of two thin matrices has the singular values of that of their triangles.
        triangles = (torch.linalg.qr(side).R for side in (left, right))
        first, second = triangles
        values = torch.linalg.svdvals(first @ second.mT)
        share = values / values.sum(dim=-1, keepdim=True)
        entropy = torch.special.entr(share).sum(dim=-1)
        return {
            f"update_entropy/{block + 1}/{head}": float(entropy[block, head])
            for block in range(entropy.shape[0])
            for head in range(entropy.shape[1])
        }

    def _heads(self) -> tuple[Tensor, Tensor]:
        """Weights of queries and keys of each head, [blocks, heads, width, head width]."""
        parts, blocks = self._parts, range(len(self._parts.blocks))
        found = [
            torch.stack([each.unflatten(1, (parts.heads, -1)).transpose(0, 1) for each in weights])
            for weights in (map(parts.query, blocks), map(parts.key, blocks))
        ]
        return found[0].clone(), found[1].clone()


def stable_ranks(model: nn.Module) -> dict[str, float]:
    """Compute squared Frobenius norm over squared spectral norm of each block's matrices."""
    parts, found = Parts(model), {}
    for block in range(len(parts.blocks)):
        matrices = {
            "query": parts.query(block), "key": parts.key(block), "value": parts.value(block),
            "attention_output": parts.attention_output(block).detach(),
            "mlp_output": parts.mlp_output(block).detach(),
        }  # fmt: skip
        for name, weights in matrices.items():
            values = torch.linalg.svdvals(weights)
            rank = values.square().sum(dim=-1) / values.amax(dim=-1).square()
            found[f"stable_rank/{block + 1}/{name}"] = float(rank.mean())
    return found


@torch.no_grad()
def near_unit_modes(model: nn.Module, windows: Tensor) -> dict[str, float]:
    """Compute the share of modes near the unit circle between neighbouring layers (2602.22988).

    The rows of a layer are whitened, and the linear map that takes them to those of the next layer
    in the same coordinates is fitted by least squares; a mode is an eigenvalue of that map.

    Args:
        model: A decoder.
        windows: Characters, int64 [sequences, context].
    """
    outputs = model(input_ids=windows, use_cache=False, output_hidden_states=True)
    layers = [rows.flatten(0, 1).double() for rows in outputs.hidden_states]
    found = {}
    for number, (here, following) in enumerate(itertools.pairwise(layers), 1):
        centred, after = here - here.mean(dim=0), following - following.mean(dim=0)
        variances, directions = torch.linalg.eigh(centred.T @ centred / len(here))
        kept = variances > _LEAST_VARIANCE * variances[-1]
        whiten = directions[:, kept] / variances[kept].sqrt()
        white = centred @ whiten
        fitted = white.T @ (after @ whiten) / len(here)
        if not fitted.isfinite().all():
            continue
        sizes = torch.linalg.eigvals(fitted).abs()
        near = ((sizes - 1).abs() < _NEAR_UNIT).double().mean()
        found[f"near_unit_modes/{number}"] = float(near)
    return found

"""A training script that knows nothing of geomon but one callback."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from geomon.lightning import GeometryMonitor


class Copier(L.LightningModule):
    """A small causal transformer that learns to repeat the first half of its input."""

    def __init__(self, symbols: int = 32, length: int = 64, width: int = 64) -> None:
        super().__init__()
        self.symbols, self.length = symbols, length
        self.embed = nn.Embedding(symbols, width)
        self.place = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, batch_first=True)
        self.decoder = nn.TransformerEncoder(layer, 3)
        self.head = nn.Linear(width, symbols)

    def training_step(self, half: Tensor, index: int) -> Tensor:
        ids = torch.cat([half, half], dim=1)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], ids.device)
        hidden = self.decoder(self.embed(ids) + self.place, mask=mask, is_causal=True)
        logits = self.head(hidden)[:, self.length // 2 - 1 : -1]
        return F.cross_entropy(logits.flatten(0, 1), half.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(steps: int = 200, folder: str = "runs/copier") -> None:
    """Train for a number of steps; curves: tensorboard --logdir FOLDER."""
    L.seed_everything(0)
    halves = torch.randint(0, 32, (64 * steps, 32))
    trainer = L.Trainer(max_steps=steps, default_root_dir=folder, callbacks=[GeometryMonitor()])
    trainer.fit(Copier(), DataLoader(halves, batch_size=64))


if __name__ == "__main__":
    main()

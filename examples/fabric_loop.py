"""Lightning Fabric: the same `with` around the forward pass as in any loop of one's own."""

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader

from geomon import Monitor, TensorBoard


class Copier(nn.Module):
    """A small causal transformer that learns to repeat the first half of its input."""

    def __init__(self, symbols: int = 32, length: int = 64, width: int = 64) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(symbols, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, batch_first=True)
        self.decoder = nn.TransformerEncoder(layer, 3)
        self.head = nn.Linear(width, symbols)

    def forward(self, half: torch.Tensor) -> torch.Tensor:
        ids = torch.cat([half, half], dim=1)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], ids.device)
        hidden = self.decoder(self.embed(ids) + self.place.weight, mask=mask, is_causal=True)
        return self.head(hidden)[:, half.shape[1] - 1 : -1]


def main(steps: int = 200, folder: str = "runs/fabric") -> None:
    """Train for a number of steps; curves: tensorboard --logdir FOLDER."""
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.seed_everything(0)
    model = Copier()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    halves = torch.randint(0, 32, (64 * steps, 32))
    monitor = Monitor(model, directory=folder, sinks=[TensorBoard(folder)])
    for step, half in enumerate(fabric.setup_dataloaders(DataLoader(halves, batch_size=64))):
        with monitor(step):
            logits = model(half)
        optimizer.zero_grad()
        fabric.backward(F.cross_entropy(logits.flatten(0, 1), half.flatten()))
        optimizer.step()
    monitor.close()


if __name__ == "__main__":
    main()

"""A training loop of one's own: geomon is one `with` around the forward pass."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from geomon import Monitor, TensorBoard

TEXT = torch.tensor(list((nn.MultiheadAttention.__doc__ or "").encode()))


class Reader(nn.Module):
    """A small causal transformer that predicts the next byte."""

    def __init__(self, length: int = 64, width: int = 64) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, batch_first=True)
        self.decoder = nn.TransformerEncoder(layer, 3)
        self.head = nn.Linear(width, 256)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        hidden = self.embed(ids) + self.place.weight[: ids.shape[1]]
        return self.head(self.decoder(hidden, mask=mask, is_causal=True))


def main(steps: int = 200, folder: str = "runs/plain") -> None:
    """Train for a number of steps; curves: tensorboard --logdir FOLDER."""
    torch.manual_seed(0)
    model = Reader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = Monitor(model, directory=folder, sinks=[TensorBoard(folder)])
    monitor.expect_end(steps - 1)  # so that readings are spread over the whole run
    for step in range(steps):
        places = torch.randint(len(TEXT) - 64, (64, 1)) + torch.arange(65)
        ids = TEXT[places]
        with monitor(step):
            logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    monitor.close()


if __name__ == "__main__":
    main()

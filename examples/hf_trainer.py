"""A Hugging Face training script that knows nothing of geomon but one callback."""

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from geomon.huggingface import GeometryMonitor


def main(steps: int = 200, folder: str = "runs/gpt2") -> None:
    """Train for a number of steps; curves: tensorboard --logdir FOLDER."""
    text = torch.tensor(list((nn.MultiheadAttention.__doc__ or "").encode()))
    rows = text.unfold(0, 64, 1)  # every piece of 64 bytes
    config = GPT2Config(
        vocab_size=256, n_positions=64, n_embd=64, n_layer=3, n_head=4,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    trainer = Trainer(
        GPT2LMHeadModel(config),
        TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=64, learning_rate=1e-3,
            report_to="tensorboard", disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=[GeometryMonitor()],
    )  # fmt: skip
    trainer.train()


if __name__ == "__main__":
    main()

"""A plain training loop: automatic mixed precision, gradient accumulation, clipping, a schedule, evaluation.

python examples/training_loop.py                     # CPU, bfloat16
python examples/training_loop.py --device cuda --dtype float16
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from tqdm import tqdm

import sigkernels as sk
from sigkernels import datasets
from sigkernels.metrics import RankingMetrics


class Classifier(nn.Module):
    """An encoder and a head. Everything up to the head is yours."""

    def __init__(self, num_features: int, num_labels: int, k: int, slack: int) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(num_features, 128, mode="mean")
        self.hidden = nn.Linear(128, 256)
        self.head = sk.DFTHead(256, num_labels, k=k, slack=slack)

    def encode(self, bags: sk.LabelSets) -> torch.Tensor:
        return torch.relu(self.hidden(torch.relu(4 * self.embedding(bags.indices, bags.offsets[:-1]))))

    def forward(self, bags: sk.LabelSets, labels: sk.LabelSets | None = None) -> torch.Tensor:
        """Logits; with labels the loss per row. Computed here, DDP and FSDP see it: wrap this model and go on."""
        h = self.encode(bags)
        return self.head(h) if labels is None else self.head(h, labels, sk.BCE(), reduction="sum") / len(h)


def recall_at(model: Classifier, data: datasets.SparseDataset, m: int, device: str) -> float:
    """Mean share of a row's labels that are among its m highest; no ``[B, n]`` array here either."""
    ranking = RankingMetrics(data.labels.num_labels, m=(m,))
    with torch.no_grad():
        for batch in data.batches(512):
            _, best = model.head.topk(model.encode(batch.features.to(device)), m)
            ranking.update(best.cpu(), batch.labels)
    return ranking.compute()[f"R@{m}"]


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Returns the recall before and after training."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--labels", type=int, default=5000)
    parser.add_argument("--k", type=int, default=20)
    parser.add_argument("--slack", type=int, default=32)
    parser.add_argument("--examples", type=int, default=20_000)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--accumulate", type=int, default=2, help="batches per optimizer step")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    args = parser.parse_args(argv)
    torch.manual_seed(0)

    data = datasets.synthetic(args.labels, args.k, args.examples, num_features=8192, mean_active=4).load()
    train, test = data.split(test=args.examples // 10)
    model = Classifier(8192, args.labels, args.k, args.slack).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = len(train) // args.batch_size
    steps = args.epochs * (batches // args.accumulate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=max(steps, 1))
    # float16 gradients underflow without a loss scale; bfloat16 and float32 need none.
    scaler = torch.amp.GradScaler(args.device, enabled=args.dtype == "float16")
    dtype = getattr(torch, args.dtype)

    before = recall_at(model, test, 10, args.device)
    for epoch in range(args.epochs):
        bar = tqdm(train.batches(args.batch_size, seed=epoch, drop_last=True), total=batches, disable=None)
        for index, batch in enumerate(bar):
            with torch.autocast(args.device, dtype=dtype, enabled=args.dtype != "float32"):
                loss = model(batch.features.to(args.device), batch.labels.to(args.device))
            scaler.scale(loss / args.accumulate).backward()
            if (index + 1) % args.accumulate == 0:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 10.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)
                schedule.step()
        optimizer.zero_grad(set_to_none=True)  # what is left of a step that was not full
    after = recall_at(model, test, 10, args.device)
    print(f"recall@10: {before:.3f} → {after:.3f}")
    return {"before": before, "after": after}


if __name__ == "__main__":
    main()

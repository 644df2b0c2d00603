"""Every loss of the three papers on debian_deps, with the same encoder and the same head: which one gives which metric.

    python bench/reference_losses.py                          # all losses, three seeds; about half an hour on two cores
    python bench/reference_losses.py BCE Focal --seeds 0      # some; the others stay as they are in the file

Writes docs/results/reference_losses.json, from which docs/pictures.py makes the table of docs/losses.md.

All start from the frequencies of the labels: as log-odds, or, for unboundedF1, whose scores are the logits themselves,
as they are. The best threshold is the one with the highest micro-F1 on validation packages that no step has seen;
test packages are only ever scored.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import sigkernels as sk
from sigkernels import datasets, env
from sigkernels.datasets import SparseDataset
from sigkernels.demo.models import HIDDEN, Encoder
from sigkernels.demo.run import TEST_EXAMPLES
from sigkernels.demo.train import BATCH, LEARNING_RATE
from sigkernels.metrics import F1Metrics, MeanAveragePrecision, RankingMetrics

OUTPUT = Path(__file__).resolve().parent.parent / "docs" / "results" / "reference_losses.json"
VALIDATION = 5000  # training packages that choose the threshold
DEPTH = 100  # labels of each row that the ranking metrics see
SLACK, CODES = 95, 256  # with the 161 columns of the DFT as many as the encoder has features

LOSSES: dict[str, sk.Loss] = {
    "BCE": sk.BCE(),
    "Poly1BCE": sk.Poly1BCE(),
    "Focal": sk.Focal(),
    "Asymmetric": sk.Asymmetric(),
    "SigmoidF1": sk.SigmoidF1(),
    "SigmoidF1, pooled": sk.SigmoidF1(average="pooled"),
    "UnboundedF1": sk.UnboundedF1(),
    "LMLNLL": sk.LMLNLL(k=5),
    "TruncatedTopKEntropy": sk.TruncatedTopKEntropy(k=5),
    "SmoothTopKSVM": sk.SmoothTopKSVM(k=5),
}


class Split(NamedTuple):
    train: SparseDataset
    validation: SparseDataset
    test: SparseDataset


def load() -> Split:
    rest, test = datasets.debian_deps().split(TEST_EXAMPLES)
    train, validation = rest.split(VALIDATION)
    return Split(train, validation, test)


class Model(torch.nn.Module):
    """The demo's encoder with a DFT head that has codes and a label bias."""

    def __init__(self, data: SparseDataset, loss: sk.Loss) -> None:
        super().__init__()
        labels = data.labels
        self.encoder = Encoder(data.features.num_labels)
        self.head = sk.DFTHead(HIDDEN, labels.num_labels, labels.max_active, SLACK, codes=CODES, bias=True)
        self.head.init_prior(labels)
        if isinstance(loss, sk.UnboundedF1):
            with torch.no_grad():
                self.head.bias.sigmoid_()
        self.objective = loss

    def forward(self, batch: SparseDataset) -> Tensor:
        """Losses over single labels are summed over them: their mean over 11,732 labels would be a smaller step."""
        hidden = self.encoder(batch.features)
        if isinstance(self.objective, sk.ElementwiseLoss):
            return self.head(hidden, batch.labels, self.objective, "sum") / len(batch)
        return self.head(hidden, batch.labels, self.objective)


def train(model: Model, data: SparseDataset, epochs: int, seed: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, fused=True)
    for epoch in range(epochs):
        for batch in data.batches(BATCH, seed=seed * 1000 + epoch, drop_last=True):
            optimizer.zero_grad()
            model(batch).backward()
            optimizer.step()


@torch.no_grad()
def hidden_batches(model: Model, data: SparseDataset) -> Iterator[tuple[Tensor, SparseDataset]]:
    for batch in data.batches(1000):
        yield model.encoder(batch.features), batch


@torch.no_grad()
def best_threshold(model: Model, data: SparseDataset) -> float:
    """The logit above which predicting gives the highest micro-F1, among the scores of the DEPTH best of each row."""
    scores, hits, true = [], [], 0
    for hidden, batch in hidden_batches(model, data):
        values, top = model.head.topk(hidden, DEPTH)
        keys = batch.labels.rows() * batch.labels.num_labels + batch.labels.indices
        mine = torch.arange(len(batch))[:, None] * batch.labels.num_labels + top
        scores.append(values.flatten())
        hits.append(torch.isin(mine, keys).flatten())
        true += keys.numel()
    order = torch.argsort(torch.cat(scores), descending=True)
    ranked = torch.cat(scores)[order].double()
    found = torch.cat(hits)[order].cumsum(0)
    f1 = 2 * found / (torch.arange(1, len(ranked) + 1) + true)
    best = int(f1.argmax())
    return float(ranked[best : best + 2].mean())


@torch.no_grad()
def score(model: Model, data: SparseDataset, threshold: float) -> dict[str, float]:
    """P@5, mAP, and F1 at probability 0.5 and at the logit ``threshold``."""
    n = data.labels.num_labels
    ranking, precision = RankingMetrics(n, m=(5,)), MeanAveragePrecision(n)
    # A probability cannot tell logits beyond 36 from infinity: such a threshold is taken off the bias instead.
    cuts = {"at 0.5": 0.0, "at best": threshold}
    f1 = {name: F1Metrics(n) for name in cuts}
    bias = model.head.bias
    assert bias is not None
    trained = bias.clone()
    for hidden, batch in hidden_batches(model, data):
        values, top = model.head.topk(hidden, DEPTH)
        ranking.update(top, batch.labels)
        precision.update(values, top, batch.labels)
        for name, cut in cuts.items():
            bias.copy_(trained - cut)
            f1[name].update(model.head.predict(hidden), batch.labels)
        bias.copy_(trained)
    result = {"P@5": ranking.compute()["P@5"], "mAP": precision.compute()["mAP"]}
    for name, metric in f1.items():
        computed = metric.compute()
        result |= {f"{average}_f1 {name}": computed[f"{average}_f1"] for average in ("micro", "macro", "weighted")}
    return result


def run(loss: sk.Loss, data: Split, epochs: int, seed: int) -> dict[str, float]:
    torch.manual_seed(seed)
    model = Model(data.train, loss)
    train(model, data.train, epochs, seed)
    threshold = best_threshold(model, data.validation)
    return {"threshold": threshold, **score(model, data.test, threshold)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("losses", nargs="*", default=list(LOSSES), help=f"of {'; '.join(LOSSES)}")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    unknown = [name for name in args.losses if name not in LOSSES]
    if unknown:
        parser.error(f"losses must be of {'; '.join(LOSSES)}, got {'; '.join(unknown)}")
    saved: dict[str, Any] = json.loads(args.output.read_text()) if args.output.exists() else {"losses": {}}
    data = load()
    for name in args.losses:
        by_seed = saved["losses"].setdefault(name, {})
        for seed in args.seeds:
            by_seed[str(seed)] = {"epochs": args.epochs, **run(LOSSES[name], data, args.epochs, seed)}
            saved |= {"command": "python bench/reference_losses.py", "environment": env.summary(env.collect())}
            args.output.write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")
            shown = {key: round(value, 4) for key, value in by_seed[str(seed)].items()}
            print(f"{name} seed {seed}: {shown}", flush=True)


if __name__ == "__main__":
    main()

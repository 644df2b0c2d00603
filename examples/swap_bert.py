"""Swap the output layer of a Hugging Face model: one line, and the training loop calls ``head.loss``.

    pip install transformers
    python examples/swap_bert.py --labels 2000 --steps 50

The BERT here is small and randomly initialised, so that the example downloads nothing; with
``BertForSequenceClassification.from_pretrained(...)`` the rest stays as it is.
"""

from __future__ import annotations

import argparse

import torch
from tqdm import tqdm

import sigkernels as sk
from sigkernels import datasets


def build_model(vocabulary: int, num_labels: int, hidden: int):
    """Any model whose last layer is an ``nn.Linear`` will do."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=2 * hidden,
        max_position_embeddings=64,
        num_labels=num_labels,
        problem_type="multi_label_classification",
    )
    return BertForSequenceClassification(config)


def pad(bags: sk.LabelSets, length: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Token sets → ``input_ids`` and ``attention_mask``, ``[B, length]``; 0 is the padding token."""
    ids = torch.zeros(len(bags), length, dtype=torch.int64)
    for row, tokens in enumerate(bags):
        ids[row, : min(len(tokens), length)] = tokens[:length] + 1
    return ids, (ids > 0).long()


def main(argv: list[str] | None = None) -> list[float]:
    """Returns the loss of every step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--labels", type=int, default=2000)
    parser.add_argument("--k", type=int, default=10, help="most labels of an example")
    parser.add_argument("--slack", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=64)
    args = parser.parse_args(argv)
    torch.manual_seed(0)

    stream = datasets.synthetic(args.labels, args.k, args.steps * args.batch_size, num_features=4096)
    model = build_model(4097, args.labels, args.hidden)
    head = sk.swap_output_layer(model, "classifier", k=args.k, slack=args.slack)  # was nn.Linear
    print(head)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in tqdm(stream.batches(args.batch_size), total=args.steps, unit="step", disable=None):
        ids, mask = pad(batch.features)
        pooled = model.dropout(model.bert(ids, attention_mask=mask).pooler_output)
        loss = head.loss(pooled, batch.labels, reduction="sum") / len(batch)  # no [B, n] array
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))

    model.eval()
    with torch.no_grad():  # the model as a whole still returns logits, as before the swap
        logits = model(ids, attention_mask=mask).logits
    print(f"loss {losses[0]:.1f} → {losses[-1]:.1f}; logits {tuple(logits.shape)}")
    return losses


if __name__ == "__main__":
    main()

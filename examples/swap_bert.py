"""A Hugging Face model with a head: a model class that computes the fused loss, trained, saved and loaded.

    pip install transformers
    python examples/swap_bert.py --labels 2000 --steps 50

The BERT of this example is small and randomly initialised, so that nothing is downloaded; with
``BertForManyLabels.from_pretrained("bert-base-uncased", config=config)`` the rest stays as it is.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from tqdm import tqdm
from transformers import BertConfig, BertModel, BertPreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

import sigkernels as sk
from sigkernels import datasets
from sigkernels.hf import HeadMixin


class BertForManyLabels(HeadMixin, BertPreTrainedModel):
    """``BertForSequenceClassification`` with a DFTHead in the place of its ``nn.Linear``."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(config)
        self.dropout = torch.nn.Dropout(config.hidden_dropout_prob)
        self.head = self.build_head(config.hidden_size)  # config.head, over config.num_labels labels
        self.post_init()

    def forward(self, input_ids, attention_mask=None, labels=None) -> SequenceClassifierOutput:
        h = self.dropout(self.bert(input_ids, attention_mask=attention_mask).pooler_output)
        if labels is None:
            return SequenceClassifierOutput(logits=self.head(h))
        return SequenceClassifierOutput(loss=self.head(h, labels, reduction="sum") / len(h))  # no [B, n] array


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
    config = BertConfig(
        vocab_size=4097,
        hidden_size=args.hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=2 * args.hidden,
        max_position_embeddings=64,
        num_labels=args.labels,
        head={"k": args.k, "slack": args.slack},
    )
    model = BertForManyLabels(config)
    print(model.head)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in tqdm(stream.batches(args.batch_size), total=args.steps, unit="step", disable=None):
        ids, mask = pad(batch.features)
        loss = model(ids, attention_mask=mask, labels=batch.labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))

    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model.save_pretrained(folder)
        loaded = BertForManyLabels.from_pretrained(folder)  # k and slack come from the config
        logits = loaded(ids, attention_mask=mask).logits
        if not torch.equal(logits, model.eval()(ids, attention_mask=mask).logits):
            raise RuntimeError("the loaded model gives other logits")
    print(f"loss {losses[0]:.1f} → {losses[-1]:.1f}; logits {tuple(logits.shape)}")
    return losses


if __name__ == "__main__":
    main()

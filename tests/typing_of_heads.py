# mypy: warn-unused-ignores
"""What a type checker knows of heads: mypy reads this file, nothing runs it."""

import torch
from torch import Tensor
from typing_extensions import assert_type

import sigkernels as sk

head = sk.DFTHead(8, 20, k=2)
h = torch.randn(4, 8)
labels = sk.LabelSets.from_lists([[1], [], [2], [3]], 20)

assert_type(head(h), Tensor)
assert_type(head(h, labels), Tensor)
assert_type(head(h, labels, sk.Focal(), reduction="none"), Tensor)
assert_type(head.loss(h, labels), Tensor)
assert_type(head.topk(h, 3), tuple[Tensor, Tensor])
assert_type(head.predict(h), sk.LabelSets)
assert_type(labels[0], Tensor)
assert_type(labels[1:], sk.LabelSets)
assert_type(labels[torch.tensor([0, 2])], sk.LabelSets)
assert_type(sk.verify(head, labels), sk.Report)

head.loss(h, labels, reduction="batchmean")  # type: ignore[arg-type]
head(h, labels, reduction="batchmean")  # type: ignore[call-overload]
sk.SigmoidF1(average="macro")  # type: ignore[arg-type]
sk.verify(head, labels, rule="top-k")  # type: ignore[arg-type]
head(h, loss=sk.BCE())  # type: ignore[call-overload]

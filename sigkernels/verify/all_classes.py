"""``verify_classes``: every class of a softmax, block by block."""

from __future__ import annotations

from concurrent.futures import Executor
from typing import Any

import torch

from ..labels import LabelSets
from .estimators import names_of
from .input_ball import BallName
from .inputs import as_question
from .label_names import Names, check_names
from .pipeline import check_resources, decide
from .progress import Asked, Progress
from .report import Report
from .report_blocks import ReportBlocks
from .rules import DecisionRule, Domain

BLOCK = 4096  # classes that are decided together


def verify_classes(
    head_or_matrix: Any,
    bias: Any = None,
    tol: float = 1e-8,
    box: float | None = None,
    device: str = "cpu",
    executor: Executor | None = None,
    progress: Asked = None,
    *,
    radius: bool = False,
    domain: Domain = "all",
    ball: BallName = "box",
    names: Names | None = None,
) -> Report:
    """Decide for every class of a softmax whether it can ever win, with a proof for each: tokens no input produces.

    The same as ``verify`` with ``rule="argmax"`` and one set for each label; line i of the report is class i. Classes are
    decided in blocks, and proofs go to a temporary file once they are many (``TMPDIR`` says where): beside W,
    memory holds one block. ``report.save`` writes them for good.

    Args:
        head_or_matrix, bias, tol, box, device, executor, progress, radius, domain, ball, names: as for
            :func:`verify`. A bias is added to the logits of a matrix.

    Example:
        >>> W = np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0], [0.1, 0.1]])  # the last lies inside the hull of the others
        >>> sk.verify_classes(W).verdicts
        array([ARGMAXABLE, ARGMAXABLE, ARGMAXABLE, UNARGMAXABLE], dtype=object)
    """
    device = check_resources(device, executor, radius)
    question, notes = as_question(head_or_matrix, bias, tol, box, DecisionRule.of("argmax", None), domain, ball)
    checked_names = check_names(names_of(head_or_matrix, names), question.labels)
    blocks = ReportBlocks(question)
    with Progress(progress, question.labels) as bar:
        for first in range(0, question.labels, BLOCK):
            classes = torch.arange(first, min(first + BLOCK, question.labels))
            sets = LabelSets(classes, torch.arange(len(classes) + 1), question.labels)
            part = decide(question, sets, [], radius=radius, device=device, executor=executor, progress=bar.part())
            blocks.add(part)
    report = blocks.report()
    report.names, report.notes = checked_names, [*notes, *report.notes]
    return report

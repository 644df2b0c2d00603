"""What the tests of GPU paths share: shapes, times that are made up, and a table that the environment names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sigkernels.backends import gpu_paths
from sigkernels.backends.gpu_paths import LossShape, ShapeClass, Times
from sigkernels.layer import LayerMeta

GPU = torch.device("cuda", 0)
MIDDLE = ShapeClass("16-bit", 64, 256, 100_000)


def shape(rows=256, slack=64, labels=100_000, dtype=torch.bfloat16, tf32=True) -> LossShape:
    x, weight = torch.empty(rows, slack, dtype=dtype, device="meta"), torch.empty(labels, slack, device="meta")
    made = LossShape.of(x, weight, LayerMeta(labels, -1))._replace(device=GPU)
    return made._replace(product="tf32") if dtype == torch.float32 and tf32 else made


def all_times(**microseconds) -> Times:
    return Times("made up", {named: dict(microseconds) for named in gpu_paths.all_classes()})


@contextlib.contextmanager
def named_tables(folder: Path) -> Iterator[SimpleNamespace]:
    """Makes a table the one that the environment names, and every device an A100."""
    file = folder / "paths.json"

    def use(table: gpu_paths.Table) -> None:
        use_text(gpu_paths.as_json(table))

    def use_text(text: str) -> None:
        file.write_text(text)
        patch.setenv(gpu_paths.VARIABLE, str(file))
        forget()

    def forget() -> None:
        gpu_paths.table.cache_clear()
        gpu_paths.choose_path.cache_clear()
        gpu_paths.choose_for_class.cache_clear()
        gpu_paths.architecture.cache_clear()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        forget()
        yield SimpleNamespace(use=use, use_text=use_text, file=file)
    forget()

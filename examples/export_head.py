"""Export a trained head for inference: ``torch.export`` with and without sigkernels, and ONNX.

python examples/export_head.py --output exported/
pip install onnx onnxscript        # for the ONNX file
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import torch

import sigkernels as sk


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Returns the largest difference of each exported form from the head's own logits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--labels", type=int, default=2000)
    parser.add_argument("--output", type=Path, default=Path("exported"))
    args = parser.parse_args(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)

    head = sk.DFTHead(in_features=128, num_labels=args.labels, k=20, slack=32)  # imagine it trained
    head.eval().requires_grad_(False)
    example = torch.randn(4, 128)
    other = torch.randn(7, 128)  # another batch size than the one that was traced
    wanted = head(other)
    dynamic = ({0: torch.export.Dim.AUTO},)
    errors = {}

    # 1. The head itself: one operator in the graph, no stored DFT; needs `import sigkernels` to run.
    torch.export.save(torch.export.export(head, (example,), dynamic_shapes=dynamic), args.output / "head.pt2")
    loaded = torch.export.load(args.output / "head.pt2").module()
    errors["torch.export"] = float((loaded(other) - wanted).abs().max())

    # 2. Plain nn.Linear layers, which store the DFT columns: any torch runs it.
    plain = head.to_linear().requires_grad_(False)
    torch.export.save(torch.export.export(plain, (example,), dynamic_shapes=dynamic), args.output / "plain.pt2")
    loaded = torch.export.load(args.output / "plain.pt2").module()
    errors["torch.export, plain layers"] = float((loaded(other) - wanted).abs().max())

    # 3. ONNX, which also stores the DFT columns.
    if importlib.util.find_spec("onnx") and importlib.util.find_spec("onnxscript"):
        path = args.output / "head.onnx"
        torch.onnx.export(head, (example,), path, dynamo=True, dynamic_shapes=dynamic, verbose=False)
        errors["onnx"] = float((run_onnx(path, other) - wanted).abs().max())
    else:
        print("ONNX: skipped; pip install onnx onnxscript")

    for form, error in errors.items():
        print(f"{form}: largest difference {error:.1e}")
    return errors


def run_onnx(path: Path, x: torch.Tensor) -> torch.Tensor:
    """With onnx's own reference interpreter; in production this is onnxruntime."""
    import onnx
    from onnx.reference import ReferenceEvaluator

    session = ReferenceEvaluator(onnx.load(path))
    (logits,) = session.run(None, {session.input_names[0]: x.numpy()})
    return torch.from_numpy(logits)


if __name__ == "__main__":
    main()

"""Tries an installed sigkernels, as a user would have it: run it outside of the source tree, in a clean environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

import sigkernels as sk


def main() -> None:
    compiled = "--pure" not in sys.argv[1:]
    where = Path(sk.__file__).resolve()
    assert "site-packages" in where.parts, f"sigkernels was imported from {where}: run this outside of the source tree"
    assert (sk.backend_status()["cpu"] is None) == compiled, sk.backend_status()["cpu"]
    head = sk.DFTHead(64, 1000, k=5, slack=8, codes=16, bias=True, prior=3.0)
    hidden, targets = torch.randn(16, 64), [[i, 7 * i, 999] for i in range(16)]
    losses = []
    for name in ("auto", "torch"):
        with sk.backend(name):
            losses.append(head(hidden, targets))
    torch.testing.assert_close(*losses)
    losses[0].backward()
    assert sk.verify(head, targets).check()
    assert len(sk.datasets.debian_deps()) == 53_422
    maps = Path("/proc/self/maps")
    if maps.exists():  # torch's OpenMP runtime, and no second one
        lines = maps.read_text().splitlines()
        runtimes = {Path(line.split()[-1]).resolve() for line in lines if "libgomp" in line or "libomp" in line}
        assert len(runtimes) <= 1, runtimes
    for command in (["env"], ["verify", "--help"]):
        subprocess.run([sys.executable, "-m", "sigkernels", *command], check=True, stdout=subprocess.DEVNULL)
    print(f"sigkernels {sk.__version__} works: {', '.join(sk.available_backends())}; Python {sys.version.split()[0]}")


if __name__ == "__main__":
    main()

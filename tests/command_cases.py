"""What the tests of the verifier's commands share: a call, and files of every kind."""

import argparse

import numpy as np
import torch

import sigkernels as sk
from sigkernels.verify.command import add_parser, run

W = np.random.default_rng(0).standard_normal((12, 3))
YES = [np.flatnonzero(W @ x > 0).tolist() for x in np.random.default_rng(1).standard_normal((4, 3))]
NO = [[i for i in range(12) if i not in YES[0]][:2] + YES[0][:2]]
SPARSE = {"format": b"csr", "shape": np.array([1, 12]), "data": np.ones(1)}  # the beginnings of a scipy file
AFFINE, SHIFT = np.array([[1.0], [-1.0]]), np.array([1.0, 1.0])  # both labels together: only with the bias


def call(*arguments):
    parser = argparse.ArgumentParser(prog="sigkernels")
    add_parser(parser.add_subparsers())
    args = parser.parse_args(["verify", *map(str, arguments)])
    assert args.run is run
    return args.run(args)


def write_files(tmp_path):
    """Classifiers and label sets in files of every kind."""
    np.save(tmp_path / "w.npy", W)
    np.savez(tmp_path / "w.npz", weight=W, other=np.ones(3))
    torch.save(torch.from_numpy(W), tmp_path / "tensor.pt")
    state = {"body.weight": torch.ones(3, 3), "classifier.weight": torch.from_numpy(W)}
    torch.save(state, tmp_path / "state.pt")
    (tmp_path / "yes.txt").write_text("".join(",".join(map(str, s)) + "\n" for s in YES))
    (tmp_path / "no.txt").write_text("".join(" ".join(map(str, s)) + " 3:0.5 9:1 # note\n" for s in NO))
    sets = sk.LabelSets.from_lists(YES, 12)
    np.savez(tmp_path / "csr.npz", indices=sets.indices.numpy(), offsets=sets.offsets.numpy())
    np.savez(tmp_path / "dense.npz", y=sets.to_dense().numpy())
    torch.save(sets, tmp_path / "sets.pt")
    (tmp_path / "marked.txt").write_text((tmp_path / "yes.txt").read_text(), encoding="utf-8-sig")
    return tmp_path

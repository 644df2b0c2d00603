"""What happens when a rank dies, hangs or is killed while it writes a checkpoint; and the torchrun example."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases import join, random_sets

import sigkernels as sk

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "train_sharded.py"
N, WIDTH, TIMEOUT = 10, 8, 4.0


def _worker(rank: int, folder: Path, fault: str) -> None:
    join(folder, rank, 2, TIMEOUT)
    head = sk.LinearHead(WIDTH, N, process_group=dist.group.WORLD)
    x, sets = torch.ones(3, WIDTH), random_sets(3, N)
    head.loss(x, sets).backward()
    dcp.save(head.state_dict(), checkpoint_id=folder / "whole")
    if rank == 1:
        if fault == "hangs":
            time.sleep(60)
        os.kill(os.getpid(), signal.SIGKILL)
    verbs = [lambda: head.loss(x, sets).backward()]
    if fault == "dies":
        verbs.insert(0, lambda: dcp.save(head.state_dict(), checkpoint_id=folder / "partial"))
    begin = time.monotonic()
    for verb in verbs:
        try:
            verb()
        except BaseException as e:  # DCP's own derives from BaseException
            with (folder / "found").open("a") as found:
                found.write(f"{type(e).__name__} {time.monotonic() - begin}\n")
    os._exit(0)


@pytest.mark.parametrize("fault", ["dies", "hangs"])
def test_the_other_ranks_raise_within_the_timeout(tmp_path, fault):
    context = torch.multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_worker, args=(rank, tmp_path, fault)) for rank in range(2)]
    for process in ranks:
        process.start()
    ranks[0].join(90)
    ranks[1].kill()
    ranks[1].join()
    found = (tmp_path / "found").read_text().splitlines()
    assert len(found) == (2 if fault == "dies" else 1)
    assert float(found[-1].split()[1]) < 3 * TIMEOUT  # room for a busy machine
    head = sk.LinearHead(WIDTH, N)
    dcp.load(head.state_dict(), checkpoint_id=tmp_path / "whole", no_dist=True)
    if fault == "dies":  # what was not finished is not loaded
        with pytest.raises(BaseException, match="metadata"):
            dcp.load(head.state_dict(), checkpoint_id=tmp_path / "partial", no_dist=True)


def torchrun(ranks: int, folder: Path, *options: str) -> tuple[int, dict[int, float]]:
    """The exit code and the loss of each step."""
    small = ["--labels", "103", "--width", "64", "--batch-size", "8", "--steps", "9", "--save-every", "3"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(EXAMPLE), *small, "--checkpoints", str(folder), "--timeout", "30", *options]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    losses = {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss (\S+)", run.stdout)}
    assert losses or run.returncode, run.stderr
    return run.returncode, losses


@pytest.mark.skipif(not EXAMPLE.exists(), reason="needs the source tree")
def test_the_example_goes_on_with_another_number_of_ranks(tmp_path):
    code, want = torchrun(1, tmp_path / "one")
    assert code == 0 and list(want) == list(range(9)) and want[8] < want[0]
    code, before = torchrun(2, tmp_path / "moved", "--die-at", "7")
    assert code != 0 and max(before) <= 7
    (tmp_path / "moved" / "unfinished-9").mkdir()  # as a rank leaves it that was killed in the middle
    code, after = torchrun(3, tmp_path / "moved")
    assert code == 0 and list(after) == [6, 7, 8]  # from the checkpoint of step 6
    for losses in (before, after):
        assert losses == pytest.approx({step: want[step] for step in losses}, rel=1e-6)
    assert sorted(path.name for path in (tmp_path / "moved").iterdir()) == ["step-3", "step-6", "step-9"]

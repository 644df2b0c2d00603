"""The data that ships, its builder, and the synthetic stream."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from sigkernels import LabelSets, datasets

BUILDER = Path(__file__).resolve().parent.parent / "bench" / "data" / "build_debian_deps.py"

AVAIL = """\
Package: editor
Architecture: amd64
Depends: libc6 (>= 2.34), libgui | libgui-legacy, perl:any
Pre-Depends: dpkg (>= 1.15)
Description: A Text-Editor
Section: editors

Package: player
Architecture: all
Depends: libc6, rare-lib
Description: plays music
 and more of it
Section: sound

Package: editor
Depends: something-else
Description: a second record of a name that is already there

Package: lonely
Description: depends on nothing
"""


@pytest.fixture(scope="module")
def builder():
    if not BUILDER.exists():
        pytest.skip("needs the source tree")
    spec = importlib.util.spec_from_file_location("build_debian_deps", BUILDER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def debian():
    return datasets.debian_deps()


def bucket(token: str) -> int:
    return zlib.crc32(token.encode()) % 32_768


# --- debian_deps -------------------------------------------------------------------------------------


def test_debian_deps_is_what_it_says(debian):
    assert len(debian) == 53_422
    assert debian.labels.num_labels == 11_732 == len(debian.label_names)
    assert debian.features.num_labels == 32_768
    assert debian.labels.max_active == 80
    assert int(debian.labels.sizes.min()) == 1
    assert debian.labels.indices.numel() == 244_834
    counts = torch.bincount(debian.labels.indices, minlength=11_732)
    assert (counts >= 3).double().mean() > 0.98  # rare labels went before the largest examples did
    assert list(debian.label_names) == sorted(debian.label_names)


def test_debian_deps_knows_its_names(debian):
    at = int(np.flatnonzero(debian.names == "0ad")[0])
    depends = set(debian.label_names[debian.labels[at].numpy()])
    assert {"libc6", "libsdl2-2.0-0", "zlib1g"} <= depends
    assert bucket("0ad") in debian.features[at].tolist()


def test_split_is_a_partition_and_repeats(debian):
    train, test = debian.split(5000)
    assert (len(train), len(test)) == (48_422, 5000)
    expected = np.random.default_rng(0).permutation(len(debian))[:5000]
    assert list(test.names) == list(debian.names[expected])
    assert not set(train.names) & set(test.names)
    with pytest.raises(ValueError, match="test must be between 0 and the 53422"):
        debian.split(60_000)


def test_batches_cover_every_example_once(debian):
    part = debian[:1000]
    seen = np.concatenate([batch.names for batch in part.batches(64, seed=3)])
    assert sorted(seen) == sorted(part.names) and list(seen) != list(part.names)
    again = np.concatenate([batch.names for batch in part.batches(64, seed=3)])
    assert list(seen) == list(again)
    assert [len(b) for b in part.batches(300)] == [300, 300, 300, 100]
    assert [len(b) for b in part.batches(300, drop_last=True)] == [300, 300, 300]
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        next(part.batches(0))


def test_an_index_of_one_example_is_refused(debian):
    with pytest.raises(TypeError, match=r"data\[i:i\+1\]"):
        debian[3]


def test_features_and_labels_must_have_the_same_rows(debian):
    with pytest.raises(ValueError, match="features have 3 rows and labels 2"):
        datasets.SparseDataset(debian.features[:3], debian.labels[:2])


def test_a_foreign_file_is_refused(tmp_path):
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    with pytest.raises(ValueError, match="was not written by"):
        datasets.debian_deps(tmp_path / "other.npz")


# --- its builder -------------------------------------------------------------------------------------


def test_builder_on_a_few_records(builder):
    data = builder.build(AVAIL.splitlines(), min_count=1)
    assert list(data["names"]) == ["editor", "player"]
    assert list(data["label_names"]) == ["dpkg", "libc6", "libgui", "perl", "rare-lib"]
    assert data["label_indices"].tolist() == [0, 1, 2, 3, 1, 4]
    assert data["label_offsets"].tolist() == [0, 4, 6]
    words = ["editor", "a", "text", "section", "editors", "arch", "amd64", "n:editor"]
    start, stop = data["feature_offsets"][:2]
    assert data["feature_indices"][start:stop].tolist() == sorted({bucket(word) for word in words})
    start, stop = data["feature_offsets"][1:3]
    assert bucket("more") in data["feature_indices"][start:stop]


def test_builder_drops_rare_labels_then_examples(builder):
    data = builder.build(AVAIL.splitlines(), min_count=2)
    assert list(data["label_names"]) == ["libc6"]
    assert data["label_offsets"].tolist() == [0, 1, 2]
    assert list(builder.build(AVAIL.splitlines(), min_count=1, max_active=2)["names"]) == ["player"]
    with pytest.raises(ValueError, match="no package is left"):
        builder.build([])


def test_builder_writes_what_the_loader_reads(builder, tmp_path):
    (tmp_path / "avail.txt").write_text(AVAIL)
    command = [sys.executable, str(BUILDER), str(tmp_path / "avail.txt"), "-o", str(tmp_path / "out.npz")]
    subprocess.run([*command, "--min-count", "1"], check=True, capture_output=True)
    data = datasets.debian_deps(tmp_path / "out.npz")
    assert len(data) == 2 and data.labels.to_lists() == [[0, 1, 2, 3], [1, 4]]


# --- synthetic ---------------------------------------------------------------------------------------


def test_synthetic_is_seeded_and_does_not_depend_on_the_batch_size():
    stream = datasets.synthetic(500, 10, num_examples=2500, seed=7)
    whole = stream.load()
    pieces = list(stream.batches(333))
    assert [len(p) for p in pieces] == [333] * 7 + [169]
    for part in ("labels", "features"):
        streamed = [row for piece in pieces for row in getattr(piece, part).to_lists()]
        assert streamed == getattr(whole, part).to_lists()
    other = datasets.synthetic(500, 10, num_examples=2500, seed=8).load()
    assert other.labels != whole.labels


def test_synthetic_sizes_and_tail():
    data = datasets.synthetic(2000, 20, num_examples=20_000, mean_active=5).load()
    assert len(data) == 20_000 and data.labels.num_labels == 2000
    assert int(data.labels.sizes.min()) >= 1 and data.labels.max_active <= 20
    assert 3.5 < data.labels.sizes.double().mean() <= 5
    counts = np.sort(torch.bincount(data.labels.indices, minlength=2000).numpy())[::-1]
    assert (counts > 0).sum() > 1900  # the tail is there
    assert counts[:20].sum() > 0.1 * counts.sum()  # and so is the head
    assert counts[1000:].sum() < 0.25 * counts.sum()


def test_synthetic_can_be_learnt_from_its_features():
    """The tokens say which labels are active: counting co-occurrences beats the most frequent labels."""
    stream = datasets.synthetic(200, 4, num_examples=6000, num_features=4096, mean_active=2)
    train, test = stream.load().split(1000)
    x, y = train.features.to_scipy(), train.labels.to_scipy()
    score = (x.T @ y).toarray() / (1 + np.asarray(x.sum(0)).T)
    hits = (np.asarray(test.features.to_scipy() @ score)).argmax(1)
    popular = int(torch.bincount(train.labels.indices).argmax())
    truth = test.labels.to_scipy().toarray()
    assert truth[np.arange(1000), hits].mean() > 2 * truth[:, popular].mean()


def test_synthetic_at_a_size_that_no_table_would_survive():
    data = datasets.synthetic(10**12, 50, num_examples=10).load()
    assert data.labels.num_labels == 10**12 and len(data) == 10


def test_synthetic_smallest():
    data = datasets.synthetic(1, 1, num_examples=3, num_features=1).load()
    assert data.labels.to_lists() == [[0]] * 3
    assert len(datasets.synthetic(5, 2, num_examples=0).load()) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 0, "k": 1}, "n must be at least 1, got 0"),
        ({"n": 5, "k": 0}, "k must be at least 1, got 0"),
        ({"n": 5, "k": 6}, "k must be at most n = 5, got 6"),
        ({"n": 5, "k": 2, "num_examples": -1}, "num_examples must be at least 0, got -1"),
        ({"n": 5, "k": 2, "topics": 6}, "topics must be between 1 and n = 5, got 6"),
        ({"n": 5, "k": 2, "mean_active": 3}, "mean_active must be between 1 and k = 2, got 3"),
        ({"n": 5, "k": 2, "zipf": 0.0}, "zipf must be positive, got 0.0"),
        ({"n": 5, "k": 2, "noise_tokens": -1}, "noise_tokens must be at least 0, got -1"),
    ],
)
def test_synthetic_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        datasets.synthetic(**arguments)


def two_rows(**names) -> datasets.SparseDataset:
    sets = LabelSets.from_lists([[0], [1]], 3)
    return datasets.SparseDataset(sets, sets, **names)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: datasets.synthetic(50.0, 3), TypeError, "n must be a whole number, got 50.0"),
        (lambda: datasets.synthetic(50, "3"), TypeError, "k must be a whole number, got '3'"),
        (lambda: datasets.synthetic(50, 3, zipf=None), TypeError, "zipf must be a number, got None"),
        (lambda: two_rows().split(1.5), ValueError, "test must be a share between 0.0 and 1.0.*got 1.5"),
        (lambda: two_rows().split("1"), TypeError, "test must be a whole number, got '1'"),
        (lambda: two_rows(names=np.array(["a"])), ValueError, r"names must have shape \[2\].*got \[1\]"),
        (lambda: two_rows(label_names=np.array(["a"])), ValueError, r"label_names must have shape \[3\]"),
        (lambda: datasets.SparseDataset([[0]], [[0]]), TypeError, "features must be LabelSets, got list"),
        (lambda: datasets.debian_deps(__file__), ValueError, r"test_datasets.py is no .npz file.*build_debian_deps"),
    ],
)
def test_bad_input(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_split_by_a_share():
    data = two_rows(names=np.array(["a", "b"]))
    assert [len(part) for part in data.split(0.2)] == [1, 1]
    assert data.split(0.5)[1].names.tolist() == data.split(1)[1].names.tolist()

"""Every class of a softmax: blocks, balls and domains, and proofs that lie in a temporary file."""

import copy
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from verify_oracle import is_top

import sigkernels as sk
from sigkernels.verify import Report, all_classes, certificate_store, verify


@pytest.fixture
def matrix():
    W = np.random.default_rng(0).standard_normal((40, 3))
    W[7] = W[3]
    return W


@pytest.mark.parametrize("domain", ("all", "nonnegative"))
@pytest.mark.parametrize("ball", ("box", "l2"))
def test_blocks_give_the_answers_of_verify(matrix, monkeypatch, ball, domain):
    monkeypatch.setattr(all_classes, "BLOCK", 7)
    seen = []
    report = sk.verify_classes(
        matrix, ball=ball, domain=domain, progress=lambda done, total: seen.append((done, total))
    )
    whole = verify(matrix, [[i] for i in range(40)], rule="argmax", ball=ball, domain=domain)
    assert report.verdicts.tolist() == whole.verdicts.tolist()
    nonnegative = domain == "nonnegative"
    assert [v in ("ARGMAXABLE", "THIN") for v in report.verdicts] == [
        is_top(matrix, [i], None, nonnegative) for i in range(40)
    ]
    assert [s.tolist() for s in report.sets] == [[i] for i in range(40)] and report.check()
    assert report.question.ball.name == ball and report.question.domain == domain
    assert seen[-1] == (40, 40) and seen == sorted(seen)
    for i in np.flatnonzero(report.verdicts == "ARGMAXABLE"):
        x = report.witness(i)
        assert np.argmax(matrix @ x) == i and (not nonnegative or x.min() >= 0)
        assert np.linalg.norm(x, 2 if ball == "l2" else np.inf) <= report.question.box * (1 + 1e-12)


def test_margins_of_classes_on_the_l2_ball(matrix):
    report = sk.verify_classes(matrix, ball="l2", radius=True)
    possible = report.verdicts == "ARGMAXABLE"
    lo, hi = report.radius_lo[possible], report.radius_hi[possible]
    assert possible.sum() > 5 and np.all(hi - lo <= 1e-6 * hi) and np.all((lo > 0) & (hi <= 1)) and report.check()


def test_a_bad_ball_domain_or_executor_is_refused(matrix):
    for function in (sk.verify_classes, lambda *a, **k: sk.verify_all(*a, 1, **k)):
        with pytest.raises(ValueError, match="ball='sphere': use one of 'box', 'l2'"):
            function(matrix, ball="sphere")
        with pytest.raises(ValueError, match="domain='positive'"):
            function(matrix, domain="positive")
        with pytest.raises(TypeError, match=r"executor must be a concurrent\.futures\.Executor, got int"):
            function(matrix, executor=2)


def test_proofs_beyond_the_memory_limit_lie_in_a_file_and_are_checked_from_there(matrix, monkeypatch, tmp_path):
    monkeypatch.setattr(all_classes, "BLOCK", 7)
    monkeypatch.setattr(certificate_store, "IN_MEMORY", 100)
    report = sk.verify_classes(matrix)
    store = report.certificates
    assert isinstance(store, certificate_store.CertificateStore) and store._file._rolled and len(store) == 40
    assert (
        report.check() and store[39].kind in ("witness", "gordan") and len(store._read[1]) == 5
    )  # one block is in memory
    assert [c.kind for c in store[5:9]] == [report.certificate(i).kind for i in range(5, 9)]
    for other in (copy.copy(report), copy.deepcopy(report), pickle.loads(pickle.dumps(report))):
        assert other.check() and other.verdicts.tolist() == report.verdicts.tolist()
    report.save(tmp_path / "classes.npz")
    again = Report.load(tmp_path / "classes.npz")
    assert again.check() and again.verdicts.tolist() == report.verdicts.tolist()
    with pytest.raises(IndexError):
        store[40]


def test_threads_read_the_certificates_that_they_ask_for(monkeypatch):
    monkeypatch.setattr(certificate_store, "IN_MEMORY", 100)
    store = certificate_store.CertificateStore()
    for start in range(0, 40, 8):
        store.add(
            [certificate_store.Certificate("witness", witness=np.full(3, float(i))) for i in range(start, start + 8)]
        )

    def read(seed):
        numbers = np.random.default_rng(seed).integers(0, 40, 300).tolist()
        return [(i, store[i].witness.tolist()) for i in numbers]

    interval = sys.getswitchinterval()
    try:
        sys.setswitchinterval(1e-6)
        with ThreadPoolExecutor(4) as threads:
            found = [pair for pairs in threads.map(read, range(4)) for pair in pairs]
    finally:
        sys.setswitchinterval(interval)
    assert all(witness == [float(i)] * 3 for i, witness in found)


def test_exact_certificates_and_bounds_survive_the_store(matrix):
    W = np.array([[1.0, 2.0**-40], [1.0, -(2.0**-40)], [-1.0, 0.0]])
    report = verify(W, [[0], [1], [0, 1], [2]], radius=True)
    store = certificate_store.CertificateStore()
    store.add(report.certificates[:2])
    store.add([])
    store.add(report.certificates[2:])
    report.certificates = store
    assert len(store) == 4 and report.check() and list(store)[3].kind == store[-1].kind


def test_a_forged_proof_in_the_store_is_rejected(matrix):
    report = sk.verify_classes(matrix)
    forged = copy.deepcopy(report)
    i = int(np.flatnonzero(report.verdicts == "ARGMAXABLE")[0])
    forged.certificates[i].witness[:] *= -1
    assert not forged.check().ok[i] and report.check()


def test_a_report_that_goes_closes_its_file():
    report = sk.verify_classes(np.eye(4))
    file = report.certificates._file
    del report
    assert file.closed

"""Where results are written: whole or not at all, never in the place of a device, and errors that name the file."""

import errno
import os
import threading

import numpy as np
import pytest
from command_cases import call, write_files

import sigkernels as sk
from sigkernels.cli import main
from sigkernels.verify import explore_command
from sigkernels.verify import files as verify_files
from sigkernels.verify.files import whole_file


@pytest.fixture
def files(tmp_path):
    return write_files(tmp_path)


@pytest.fixture
def report():
    return sk.verify(np.eye(3), [[0], [1, 2]])


def full_disk(*_args, **_arrays):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_pipe_or_a_device_is_not_replaced(files, report, capsys):
    """``--out /dev/null`` of a root user must not leave a file in the place of the device."""
    os.mkfifo(files / "pipe")
    with pytest.raises(ValueError, match="pipe: is no regular file"):
        report.save(files / "pipe")
    for option in ("--out", "--repair"):
        assert call(files / "w.npy", files / "yes.txt", option, files / "pipe") == 2
        assert "is no regular file" in capsys.readouterr().err
    assert (files / "pipe").is_fifo()
    with pytest.raises(ValueError, match="no regular file"):
        report.save(os.devnull)


def test_a_link_keeps_pointing_where_it_did(tmp_path, report):
    (tmp_path / "runs").mkdir()
    (tmp_path / "latest.npz").symlink_to("runs/today.npz")
    report.save(tmp_path / "latest.npz")
    assert (tmp_path / "latest.npz").is_symlink()
    assert sk.Report.load(tmp_path / "runs" / "today.npz").check()
    assert [file.name for file in (tmp_path / "runs").iterdir()] == ["today.npz"]


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path, report, monkeypatch):
    report.save(tmp_path / "r.npz")
    before = (tmp_path / "r.npz").read_bytes()
    monkeypatch.setattr(verify_files.np, "savez_compressed", full_disk)
    with pytest.raises(OSError, match=r"No space left on device: .*r\.npz") as caught:
        report.save(tmp_path / "r.npz")
    assert caught.value.errno == errno.ENOSPC
    assert (tmp_path / "r.npz").read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_the_answer_is_told_before_a_file_that_cannot_be_written(files, capsys, monkeypatch):
    monkeypatch.setattr(verify_files.np, "savez_compressed", full_disk)
    assert call(files / "w.npy", files / "yes.txt", "--out", files / "r.npz") == 2
    output = capsys.readouterr()
    assert "ARGMAXABLE" in output.out and "PASSED" not in output.out
    assert "No space left on device" in output.err and "r.npz" in output.err


def test_a_page_is_written_whole(files, report, monkeypatch):
    report.save(files / "r.npz")
    (files / "r.html").write_text("before")
    monkeypatch.setattr(explore_command, "explore_page", lambda *_: "\ud800")  # no UTF-8: fails while it is written
    assert main(["explore", str(files / "r.npz")]) == 2
    assert (files / "r.html").read_text() == "before"


def test_threads_write_one_file_at_a_time(tmp_path):
    def write(letter):
        for _ in range(20):
            with whole_file(tmp_path / "out") as file:
                file.write(letter * 100_000)

    threads = [threading.Thread(target=write, args=(letter,)) for letter in (b"a", b"b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set((tmp_path / "out").read_bytes()) in ({ord("a")}, {ord("b")})
    assert [file.name for file in tmp_path.iterdir()] == ["out"]

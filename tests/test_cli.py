"""The command line: help, JSON, exit codes, and one clear line on bad input."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import sigkernels as sk
from sigkernels import cli, env


def run_cli(*args: str, **kwargs) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "sigkernels", *args], capture_output=True, text=True, **kwargs)


@pytest.mark.parametrize("command", list(cli.COMMANDS))
def test_every_command_has_help_and_json(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main([command, "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert f"usage: sigkernels {command}" in text and "--json" in text


def test_module_and_version():
    done = run_cli("--version")
    assert (done.returncode, done.stdout.strip()) == (0, f"sigkernels {sk.__version__}")


BAD_ARGUMENTS = {
    "sigkernels": [[], ["train"]],
    "sigkernels env": [["env", "--yaml"]],
    "sigkernels verify": [["verify"], ["verify", "w.npy", "l.txt", "--workers", "2"]],
    "sigkernels demo": [["demo", "--epochs", "many"]],
}


@pytest.mark.parametrize(("prog", "args"), [(prog, args) for prog, each in BAD_ARGUMENTS.items() for args in each])
def test_bad_arguments_exit_with_2_and_one_line(prog, args, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(args)
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"{prog}: error: ") and captured.err.endswith(f"; see {prog} --help\n")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_backend_that_is_missing_is_one_line(monkeypatch, tmp_path, capsys):
    missing = next((name for name, why_not in sk.backend_status().items() if why_not), None)
    if missing is None:
        pytest.skip("every backend can be used here")
    monkeypatch.setattr(sk.backends, "_ENVIRONMENT", missing)
    assert cli.main(["demo", "--quick", "--output", str(tmp_path / "r.html")]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"sigkernels demo: error: backend '{missing}' was asked for") and err.count("\n") == 1


def test_a_seed_that_no_generator_takes(tmp_path, capsys):
    assert cli.main(["demo", "--quick", "--seed", "9" * 20, "--output", str(tmp_path / "r.html")]) == 2
    assert "--seed must be below 2**32" in capsys.readouterr().err


def test_a_refused_input_is_one_line(monkeypatch, capsys):
    def refuse(args):
        raise ValueError("epochs must be at least 1,\n got 0")

    monkeypatch.setattr(env, "run", refuse)
    assert cli.main(["env"]) == 2
    assert capsys.readouterr().err == "sigkernels env: error: epochs must be at least 1, got 0\n"
    monkeypatch.setenv("SIGKERNELS_DEBUG", "1")
    with pytest.raises(ValueError, match="epochs"):
        cli.main(["env"])


def test_a_bug_is_not_dressed_up_as_bad_input(monkeypatch):
    def fail(args):
        raise RuntimeError("a bug")

    monkeypatch.setattr(env, "run", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["env"])


def test_interrupted(monkeypatch, capsys):
    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(env, "run", interrupt)
    assert cli.main(["env"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_env_json(capsys):
    assert cli.main(["env", "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert info["sigkernels"] == sk.__version__
    assert info["packages"]["torch"] == torch.__version__
    assert info["backends"] == sk.backend_status()
    assert info["backends"]["torch"] is None
    assert info["threads"]["torch"] == torch.get_num_threads()
    assert set(info["extensions"]) == {"sigkernels._C", "sigkernels._cuda"}


def test_env_text_names_every_backend_and_why(capsys):
    assert cli.main(["env"]) == 0
    text = capsys.readouterr().out
    for name, why_not in sk.backend_status().items():
        (line,) = [line for line in text.splitlines() if line.split()[:1] == [name]]
        assert (why_not or "available") in line


def test_the_sample_in_the_readme_is_what_env_prints(capsys):
    """Without a GPU and with the CPU kernels, as the sample was taken; numbers and versions may differ."""
    status = sk.backend_status()
    if status["cpu"] or not status["cuda"] or torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        pytest.skip("another machine than that of the sample")
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    sample = readme.split("## Reading `sigkernels env`")[1].split("```")[1].splitlines()[1:]
    assert cli.main(["env"]) == 0
    printed = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in printed if line.split()[0] != "forced"]
    assert [line.split()[0] for line in sample] == names
    at = sample.index("backends")
    assert sample[at : at + 5] == printed[printed.index("backends") :][:5]
    assert "SIGKERNELS_CUDA=1 pip install ." in status["cuda"]


def test_env_says_when_the_extension_was_not_built():
    """A package without a compiled core still starts, and says what to do."""
    block = (
        "import sys; sys.modules['sigkernels._C'] = None\n"  # the import system's way to say: not there
        "from sigkernels import env; print(env.render(env.collect()))"
    )
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "not built" in done.stdout and "SIGKERNELS_REQUIRE_EXT=1" in done.stdout
    assert "pip install . in the source tree" in done.stdout and "reinstall sigkernels" not in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.split()[:1] == ["cpu"] and "available" in line]
    assert "not available" in line


@pytest.mark.parametrize(("forced", "count"), [("", 1), ("torch", 0)])
def test_missing_kernels_are_warned_about_once_and_where_nobody_chose_torch(forced, count):
    block = (
        "import sys, warnings; sys.modules['sigkernels._C'] = None\n"
        "import torch, sigkernels as sk\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always')\n"
        "    for _ in range(3):\n"
        "        sk.functional.linear_loss(torch.randn(2, 3), torch.randn(5, 3), [[0], [1]])\n"
        "print(*[str(w.message) for w in seen if 'plain torch' in str(w.message)], sep='\\n')"
    )
    environment = os.environ | {"SIGKERNELS_BACKEND": forced}
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.strip().splitlines()
    assert len(lines) == count and all("pip install . in the source tree" in line for line in lines)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (None, "OMP_WAIT_POLICY is not set: waiting threads spin"),
        ("active", "OMP_WAIT_POLICY=active: waiting threads spin"),
        ("PASSIVE", "OMP_WAIT_POLICY=passive: waiting threads sleep"),
    ],
)
def test_env_says_how_threads_wait(policy, expected, monkeypatch, capsys):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if policy:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    assert cli.main(["env"]) == 0
    assert expected in capsys.readouterr().out
    assert env.collect()["threads"]["OMP_WAIT_POLICY"] == policy


def test_env_shows_a_forced_backend(monkeypatch, capsys):
    monkeypatch.setenv("SIGKERNELS_BACKEND", "torch")
    assert cli.main(["env"]) == 0
    assert "SIGKERNELS_BACKEND=torch" in capsys.readouterr().out
    monkeypatch.setenv("SIGKERNELS_BACKEND", "opencl")
    assert cli.main(["env"]) == 0
    assert "SIGKERNELS_BACKEND=opencl is unsupported: every call will fail; use one of auto" in capsys.readouterr().out


def test_env_shows_a_forced_instruction_set(monkeypatch, capsys):
    for name, note in (("portable", "SIGKERNELS_ISA=portable\n"), ("neon", "SIGKERNELS_ISA=neon is not usable here")):
        monkeypatch.setenv("SIGKERNELS_ISA", name)
        if name == "neon" and sk.backend_status()["cpu"]:
            continue  # without the compiled kernels nothing is forced
        assert cli.main(["env"]) == 0
        assert note in capsys.readouterr().out


@pytest.mark.parametrize(("unbuffered", "args"), [((), ("--json",)), (("-u",), ())])
def test_a_reader_that_leaves_does_not_change_the_exit_code(tmp_path, unbuffered, args):
    """``sigkernels verify … | grep -q …`` under ``pipefail``: a gate that fails must go on failing."""
    np.save(tmp_path / "w.npy", np.array([[1.0], [-1.0]]))
    (tmp_path / "sets.txt").write_text("0 1\n")
    command = [sys.executable, *unbuffered, "-m", "sigkernels", "verify", "w.npy", "sets.txt", *args]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 1


def test_output_that_nobody_gets(tmp_path):
    assert subprocess.run([sys.executable, "-m", "sigkernels", "env"], preexec_fn=lambda: os.close(1)).returncode == 0
    if not Path("/dev/full").is_char_device():
        pytest.skip("there is no device that is full")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "sigkernels", "env"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 2 and done.stderr.startswith("sigkernels env: error: ") and done.stderr.count("\n") == 1

"""Named arrays from files of every kind that holds them, and into one; no file runs code."""

from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from ..labels import LabelSets

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
WRAPPERS = ("state_dict", "model_state_dict", "model", "module")  # of a checkpoint: where its weights are


class BadFile(ValueError):
    """A file that cannot be used, with one line that says why."""


def read_utf8(file: Path) -> str:
    """The text of a file, without the mark that some editors put before it."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadFile(
            f"{file}: is not text in UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8"
        ) from None


def existing_file(path: str) -> Path:
    """The path, if it is a file, or a pipe: ``<(…)`` of a shell."""
    if not path:
        raise BadFile("a file must be named, got an empty name")
    file = Path(path)
    if file.is_dir():
        inside = sorted(p.name for p in file.iterdir() if p.suffix in (".safetensors", ".npz", *TORCH_SUFFIXES))
        hint = f", for example {file / inside[0]}" if inside else ""
        raise BadFile(f"{path}: is a directory; name the file in it{hint}")
    if not file.is_file() and not file.is_fifo():
        raise BadFile(f"{path}: is no regular file" if file.exists() else f"{path}: no such file")
    return file


def writable_file(option: str, path: str, inputs: tuple[str, ...]) -> Path:
    """Where a result goes, if it can go there: found out before any proving."""
    if not path:
        raise BadFile(f"{option}: a file must be named, got an empty name")
    out = Path(path)
    if out.is_dir():
        raise BadFile(f"{option} {path}: is a directory; name a file in it")
    if not out.absolute().parent.is_dir():
        raise BadFile(f"{option} {path}: there is no directory {out.parent}")
    refuse_device(f"{option} {path}", out)
    if out.exists() and not os.access(out, os.W_OK):
        raise BadFile(f"{option} {path}: may not be written")
    try:  # the result is made in a file beside it
        with tempfile.TemporaryFile(dir=out.resolve().parent):
            pass
    except OSError as error:
        raise BadFile(f"{option} {path}: nothing can be written to {out.resolve().parent}: {error.strerror}") from None
    for name in inputs:
        if out.exists() and Path(name).exists() and out.samefile(name):
            raise BadFile(f"{option} {path}: is an input of this command and would be overwritten; choose another name")
    return out


@contextlib.contextmanager
def whole_file(path: str | Path) -> Iterator[BinaryIO]:
    """A file to write, which gets its name when it is complete: a full disk does not cost what was there before."""
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path}: is a directory; name a file in it")
    refuse_device(str(path), path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no folder {path.parent}; make it first")
    target = path.resolve()  # a link goes on pointing where it did
    part = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        with open(part, "wb") as file:
            yield file
        os.replace(part, target)
    except OSError as error:
        if error.filename is None and error.errno is not None:  # write() does not know where it writes
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from None
        raise
    finally:
        part.unlink(missing_ok=True)


def refuse_device(name: str, path: Path) -> None:
    """Refuses a device or a pipe: the finished file takes the place of what has its name."""
    if path.exists() and not path.is_file():
        raise BadFile(f"{name}: is no regular file, and the result would take its place; name another one")


def write_arrays(path: str | Path, arrays: Mapping[str, Any]) -> None:
    """Write named arrays as ``.npz``, whole or not at all."""
    with whole_file(path) as file:
        np.savez_compressed(file, **arrays)


def read_arrays(file: Path) -> dict[str, Any]:
    """The named arrays in a file; a file with one array has the name ''."""
    if file.suffix in (".npy", ".npz"):
        return _numpy_arrays(file)
    if file.suffix in TORCH_SUFFIXES:
        return _torch_arrays(file)
    if file.suffix == ".safetensors":
        return _safetensors_arrays(file)
    raise BadFile(f"{file}: unknown kind of file; use .npz, .npy, .pt, .ckpt or .safetensors")


def _numpy_arrays(file: Path) -> dict[str, Any]:
    try:
        data = np.load(file, allow_pickle=False)
        if isinstance(data, np.lib.npyio.NpzFile):
            with data:
                arrays: dict[str, Any] = {name: data[name] for name in data.files}
        else:
            arrays = {"": data}
    except Exception:  # whatever numpy stumbles over
        raise BadFile(f"{file}: cannot be read: damaged, or not a numpy file of plain numbers") from None
    if ("" in arrays) != (file.suffix == ".npy"):
        kind = ".npy array" if "" in arrays else ".npz archive"
        raise BadFile(f"{file}: is an {kind} by its content: rename it")
    return arrays


def _torch_arrays(file: Path) -> dict[str, Any]:
    try:
        data = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise BadFile(
            f"{file}: holds pickled Python objects (a whole module, perhaps), which are not loaded; "
            "save model.state_dict() instead"
        ) from None
    except Exception as error:
        why = (str(error).splitlines() or ["empty"])[0]
        raise BadFile(
            f"{file}: cannot be read: damaged, or not a file of torch.save ({type(error).__name__}: {why})"
        ) from None
    if isinstance(data, torch.Tensor):
        return {"": data}
    if isinstance(data, LabelSets):
        return {"indices": data.indices, "offsets": data.offsets, "num_labels": torch.tensor(data.num_labels)}
    if isinstance(data, Mapping):
        return _tensors(data)
    raise BadFile(f"{file}: holds a {type(data).__name__}; save a tensor or a state dict")


def _tensors(data: Mapping[Any, Any]) -> dict[str, Any]:
    """The tensors of a state dict, or of the one that a checkpoint wraps, and those beside it."""
    own = {str(name): value for name, value in data.items() if isinstance(value, torch.Tensor)}
    for wrapper in WRAPPERS:
        inner = data.get(wrapper)
        if isinstance(inner, Mapping) and any(isinstance(v, torch.Tensor) for v in inner.values()):
            return {**own, **{str(name): v for name, v in inner.items() if isinstance(v, torch.Tensor)}}
    return own


def _safetensors_arrays(file: Path) -> dict[str, Any]:
    try:
        from safetensors.torch import load_file
    except ImportError:
        raise BadFile(f"{file}: reading .safetensors needs: pip install safetensors") from None
    try:
        return dict(load_file(file))
    except Exception as error:
        raise BadFile(f"{file}: cannot be read ({type(error).__name__}: {str(error).splitlines()[0]})") from None

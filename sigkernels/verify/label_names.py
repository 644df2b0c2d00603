"""The names of labels, and label sets in words."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .files import BadFile

SHOWN = 8  # labels of a set


def check_names(names: Any, num_labels: int) -> tuple[str, ...] | None:
    """One name for each label, or None."""
    if names is None:
        return None
    if isinstance(names, (str, bytes)) or not isinstance(names, Iterable):
        raise TypeError(f"names must hold one name for each label, got {names!r}; use a list of names")
    out = tuple(str(name) for name in names)
    if len(out) != num_labels:
        raise ValueError(f"names must hold one name for each of the {num_labels} labels, got {len(out)}")
    return out


def read_names(file: Path, num_labels: int) -> list[str]:
    """The names of all labels, in order."""
    try:
        text = file.read_text(encoding="utf-8")
        names = json.loads(text) if text.lstrip().startswith(("[", "{")) else text.splitlines()
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise BadFile(f"{file}: is neither a line of text for each label nor a JSON list: {error}") from None
    if not isinstance(names, list):
        raise BadFile(f"{file}: is JSON, but no list; give the names of all labels in order")
    if len(names) != num_labels:
        raise BadFile(f"{file}: holds {len(names)} names for {num_labels} labels; give one text for each label")
    other = next((name for name in names if not isinstance(name, str)), None)
    if other is not None:
        raise BadFile(f"{file}: holds {other!r} among the names of the labels; give one text for each label")
    return names


def in_words(labels: Iterable[int], names: tuple[str, ...] | None) -> str:
    """``{cat, dog}``; the numbers of the labels where they have no names."""
    shown = [str(label) if names is None else names[label] for label in labels]
    more = [f"… {len(shown) - SHOWN} more"] if len(shown) > SHOWN else []
    return "{" + ", ".join(shown[:SHOWN] + more) + "}"

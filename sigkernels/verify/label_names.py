"""The names of labels, and label sets in words."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .files import BadFile, read_utf8

Names = Sequence[str] | Mapping[str, int] | Mapping[int, str]  # of all labels in order, or with their numbers
SHOWN = 8  # labels of a set


def check_names(names: Any, num_labels: int) -> tuple[str, ...] | None:
    """One name for each label, or None."""
    if names is None:
        return None
    if isinstance(names, (str, bytes, set, frozenset)) or not isinstance(names, Iterable):
        raise TypeError(f"names must hold one name for each label in order, got {names!r}; use a list of names")
    if isinstance(names, Mapping):
        return _in_order(names, num_labels)
    out = tuple(str(name) for name in names)
    if len(out) != num_labels:
        raise ValueError(f"names must hold one name for each of the {num_labels} labels, got {len(out)}")
    return out


def _in_order(names: Mapping[Any, Any], num_labels: int) -> tuple[str, ...]:
    """From names to numbers, as the vocabulary of a tokenizer, or from numbers to names, as ``id2label``.

    A label without a name is called by its number: output layers are often padded beyond the vocabulary.
    """
    numbered = dict(names)
    if all(isinstance(value, int) for value in names.values()):
        numbered = {number: name for name, number in names.items()}
        if len(numbered) < len(names):
            raise ValueError("names gives one number to two names")
    out = [str(label) for label in range(num_labels)]
    for number, name in numbered.items():
        label = int(number) if isinstance(number, int) or (isinstance(number, str) and number.isdecimal()) else -1
        if isinstance(number, bool) or not isinstance(name, str) or not 0 <= label < num_labels:
            raise ValueError(
                f"names maps {number!r} to {name!r}; use a list of names, or a mapping between names and the numbers of "
                f"labels, 0 … {num_labels - 1}"
            )
        out[label] = name
    return tuple(out)


def read_names(file: Path, num_labels: int) -> list[str]:
    """The names of all labels, in order."""
    text = read_utf8(file)
    names: Any = text.removesuffix("\n").split("\n") if text else []  # names may hold what else str calls a line break
    if file.suffix == ".json" or text.lstrip().startswith(("[", "{")):
        try:
            names = json.loads(text)
        except json.JSONDecodeError as error:
            if file.suffix == ".json":  # else the first name may begin like this: [PAD]
                raise BadFile(f"{file}: is not JSON: {error}") from None
    if isinstance(names, dict):
        try:
            return list(_in_order(names, num_labels))
        except ValueError as error:
            raise BadFile(f"{file}: {error}") from None
    if not isinstance(names, list):
        raise BadFile(f"{file}: is JSON, but neither a list of names nor a mapping between names and numbers of labels")
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

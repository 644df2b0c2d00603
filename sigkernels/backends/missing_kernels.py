"""What to do where the compiled CPU kernels are missing, and the warning that says so once per process."""

from __future__ import annotations

import functools
import warnings

REMEDY = (
    "install a C++17 compiler and the Python headers (g++, python3-dev), then run pip install . in the source tree; "
    "SIGKERNELS_REQUIRE_EXT=1 pip install . shows why a build fails"
)


@functools.cache
def warn_once(reason: str) -> None:
    """Says that CPU tensors are computed by plain torch because of ``reason`` (which ends with the remedy)."""
    warnings.warn(
        f"sigkernels computes CPU tensors with plain torch, which is several times slower: {reason}. "
        "SIGKERNELS_BACKEND=torch chooses plain torch and silences this warning",
        RuntimeWarning,
        stacklevel=2,
    )

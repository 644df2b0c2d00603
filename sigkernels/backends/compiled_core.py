"""The compiled core ``sigkernels._C``, or why it is not there."""

from __future__ import annotations

from typing import Any

import torch  # before _C: the extension then shares torch's OpenMP runtime

from . import missing_kernels

core: Any  # the module, or None
why: str | None

try:
    from .. import _C  # type: ignore[attr-defined]

    _C.use_torch(torch)
except ImportError as _error:
    core, why = None, f"its compiled core could not be loaded ({_error}); {missing_kernels.REMEDY}"
else:
    core, why = _C, None

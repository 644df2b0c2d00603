"""``python -m sigkernels``: the same as the ``sigkernels`` command."""

import sys

from sigkernels.cli import main

if __name__ == "__main__":
    sys.exit(main())

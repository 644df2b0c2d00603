"""Asks pyright how much of the public interface has a known type, and fails below the share that is given."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def main() -> int:
    wanted = float(sys.argv[1])
    # This environment and this tree: pyright looks for a python on the PATH, and does not follow an editable install.
    root = Path(__file__).resolve().parent.parent
    first = {"PATH": Path(sys.executable).parent, "PYTHONPATH": root}
    environment = os.environ | {name: f"{path}{os.pathsep}{os.environ.get(name, '')}" for name, path in first.items()}
    command = [sys.executable, "-m", "pyright", "--verifytypes", "sigkernels", "--ignoreexternal", "--outputjson"]
    answer = json.loads(subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment).stdout)
    completeness = answer["typeCompleteness"]
    for symbol in completeness["symbols"]:
        if symbol["isExported"] and not symbol["isTypeKnown"]:
            print(symbol["name"], *(problem["message"] for problem in symbol.get("diagnostics", [])), sep=": ")
    share = completeness["completenessScore"]
    print(f"{100 * share:.1f} % of the public types are known; {100 * wanted:.0f} % are wanted")
    return 0 if share >= wanted else 1


if __name__ == "__main__":
    sys.exit(main())

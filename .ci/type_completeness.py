"""Asks pyright how much of the public interface has a known type, and fails below the share that is given."""

from __future__ import annotations

import json
import subprocess
import sys


def main() -> int:
    wanted = float(sys.argv[1])
    command = [sys.executable, "-m", "pyright", "--verifytypes", "sigkernels", "--ignoreexternal", "--outputjson"]
    answer = json.loads(subprocess.run(command, capture_output=True, text=True).stdout)
    completeness = answer["typeCompleteness"]
    for symbol in completeness["symbols"]:
        if symbol["isExported"] and not symbol["isTypeKnown"]:
            print(symbol["name"], *(problem["message"] for problem in symbol.get("diagnostics", [])), sep=": ")
    share = completeness["completenessScore"]
    print(f"{100 * share:.1f} % of the public types are known; {100 * wanted:.0f} % are wanted")
    return 0 if share >= wanted else 1


if __name__ == "__main__":
    sys.exit(main())

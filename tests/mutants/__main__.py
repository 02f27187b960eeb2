"""``python -m tests.mutants [FOLDER] [--only NAME…]``: break the code on purpose; see run.py."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.mutants.run import HERE, MutantError, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=HERE, help="a folder of .diff files")
    parser.add_argument("--only", nargs="*", default=[], help="mutants whose names contain one of these")
    options = parser.parse_args()
    try:
        return 1 if run(options.folder.resolve(), options.only) else 0
    except MutantError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

"""``python -m tests.mutants [FOLDER] [--only NAME…]``: break the code on purpose; see run.py."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.mutants.run import FOLDERS, MutantError, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("folder", nargs="*", type=Path, default=FOLDERS, help="folders of .diff files")
    parser.add_argument("--only", nargs="*", default=[], help="mutants whose names contain one of these")
    options = parser.parse_args()
    try:
        return 1 if sum([run(folder.resolve(), options.only) for folder in options.folder]) else 0
    except MutantError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

"""Break the code on purpose: ``python -m tests.mutants [--jobs N] [NAME…]``; see run.py.

All: ``make mutants``. One: ``make mutants ONLY=rule05_seal_before_payload``. A family: ``make mutants ONLY=journal/``.
Exit code 0 if every mutant was killed, 1 if one was not, 2 if a mutant says nothing (it does not apply, or its test
fails without it).
"""

from __future__ import annotations

import argparse
import sys

from tests.mutants.run import MutantError, page_rows, run


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="mutants whose FAMILY/NAME contains one of these (default: all)")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (default: 2)")
    parser.add_argument("--rows", action="store_true", help="only print the table of docs/protocol.md")
    options = parser.parse_args()
    if options.rows:
        print("\n".join(page_rows()))
        return 0
    try:
        return 1 if run(options.names, options.jobs) else 0
    except MutantError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

"""``python -m tests.simulation SEED…`` replays seeds; ``--count N --from K`` runs many and shows what they hit.

``--plain`` leaves out the further draws of ``disturb`` and ``outage``, ``--disturbed`` runs only seeds that have one.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import time
import traceback
from collections import Counter

from tests.simulation.draw import draw
from tests.simulation.limit import cpu_bound
from tests.simulation.run import run_seed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seeds", nargs="*", type=int)
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--keep-going", action="store_true", help="report every failing seed, not only the first")
    parser.add_argument("--log", action="store_true", help="show the engine's own log")
    parser.add_argument("--plain", action="store_true", help="crashes and scripted troubles alone")
    parser.add_argument("--disturbed", action="store_true", help="of --count, only seeds with a further disturbance")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO if options.log else logging.CRITICAL + 1)
    total: Counter[str] = Counter()
    events: Counter[str] = Counter()
    failed, lives, began = [], 0, time.process_time()
    seeds = options.seeds or range(options.first, options.first + options.count)
    if options.disturbed:
        seeds = [seed for seed in seeds if draw(seed).disturbed]
    for seed in seeds:
        try:
            with cpu_bound():
                report = run_seed(seed, plain=options.plain)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            failed.append(seed)
            print(
                f"FAILED: python -m tests.simulation {seed}{' --plain' * options.plain}\n"
                f"  {type(error).__name__}: {str(error)[:600]}",
                flush=True,
            )
            if len(seeds) <= 3:
                traceback.print_exc()
            if not options.keep_going:
                break
            continue
        total.update(report.coverage)
        events.update(report.events)
        lives += report.lives
    seconds = time.process_time() - began
    print(
        f"{len(seeds)} seeds, {len(failed)} failed, {total['crashes']} crashes in {lives} lives, {seconds:.1f} CPU s: "
    )
    print(f"{60 * total['crashes'] / max(seconds, 1e-9):.0f} crash-restore cycles a minute of CPU")
    for title, counts in (("hit", total), ("events in the journals", events)):
        print(f"\n{title}:")
        for name, count in sorted(counts.items()):
            print(f"  {count:8d}  {name}")
    return 1 if failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # whoever reads may have seen enough, as with any filter
    sys.exit(main())

"""Ends what a killed driver leaves behind. Run as a file by engine/cluster.py; imports nothing of ours.

Ray's workers notice that their raylet is gone after a second or two, its agents after much longer, and until then they
hold locks and cores. Every process of a run carries a mark in its environment. This one waits for the end of its
standard input, which comes when the driver is gone however it went, and kills whatever carries the mark.

    python -I -S ray_reaper.py MARK DIRECTORY   # DIRECTORY: the Ray session's files, removed at the end
"""

import contextlib
import os
import shutil
import signal
import sys
import time

PATIENCE_S = 10.0


def carriers(mark: bytes) -> list[int]:
    """Ids of the living processes whose environment holds the mark."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as environ:
                if mark in environ.read():
                    found.append(int(name))
        except OSError:  # ended meanwhile, or another user's
            continue
    return found


def main() -> None:
    """Wait for the driver's end, then clean up."""
    mark, directory = sys.argv[1].encode(), sys.argv[2]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    limit = time.monotonic() + PATIENCE_S
    while (left := carriers(mark)) and time.monotonic() < limit:
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()

"""Ends what a killed driver leaves behind. Run as a file by engine/cluster.py; imports nothing of ours.

Ray's workers notice that their raylet is gone after a second or two, its agents after much longer, and until then they
hold locks and cores. This process waits for the end of its standard input, which comes when the driver is gone however
it went, and kills every process of the cluster. It knows them by the cluster's directory, which is new for each: they
have log files open in it, or name it on their command line. (A mark in the environment does not do: processes that
change their title overwrite it.)

    python -I -S ray_reaper.py DIRECTORY DRIVER   # the directory is removed at the end; the driver's id is spared
"""

import contextlib
import os
import shutil
import signal
import sys
import time

PATIENCE_S = 10.0


def processes_of(directory: str, spared: frozenset[int]) -> list[int]:
    """Ids of the living processes that have a file of the directory open, or its name on their command line."""
    ids = {int(name) for name in os.listdir("/proc") if name.isdigit()} - spared
    return sorted(pid for pid in ids if _belongs(f"/proc/{pid}", directory))


def _belongs(process: str, directory: str) -> bool:
    try:
        with open(f"{process}/cmdline", "rb") as command:
            if directory.encode() in command.read():
                return True
        for descriptor in os.listdir(f"{process}/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                if os.readlink(f"{process}/fd/{descriptor}").startswith(directory):
                    return True
    except OSError:  # ended meanwhile, or another user's
        pass
    return False


def main() -> None:
    """Wait for the driver's end, then clean up."""
    directory = os.path.join(sys.argv[1], "")
    spared = frozenset({os.getpid(), int(sys.argv[2])})
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    limit = time.monotonic() + PATIENCE_S
    while (left := processes_of(directory, spared)) and time.monotonic() < limit:
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()

"""One function in a fresh process, with its peak of resident memory: ``python -m benchmarks.child M:FUNCTION ARGS``.

The peak is VmHWM of the child itself. ``getrusage`` would do as well, but keeps what the parent had when it forked.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from typing import Any, NamedTuple

TIMEOUT_S = 900


class Done(NamedTuple):
    """What the function returned (through JSON), its seconds, CPU seconds of the process, peak memory in MB."""

    value: Any
    seconds: float
    cpu_s: float
    peak_mb: float


def start(function: str, *arguments: Any) -> subprocess.Popen[str]:
    """Begin; hand the process to ``finish``."""
    command = [sys.executable, "-m", "benchmarks.child", function, json.dumps(arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> Done:
    """Wait. Raises RuntimeError if the child failed."""
    try:
        out, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    if process.returncode:
        raise RuntimeError(f"{process.args} failed")
    return Done(**json.loads(out.splitlines()[-1]))


def run(function: str, *arguments: Any) -> Done:
    """Start and finish."""
    return finish(start(function, *arguments))


def peak_mb() -> float:
    """VmHWM of this process."""
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024 / 1e6
    return 0.0


def main() -> None:
    """See the module docstring."""
    module, _, name = sys.argv[1].partition(":")
    function = getattr(importlib.import_module(module), name)
    began, used = time.perf_counter(), time.process_time()
    value = function(*json.loads(sys.argv[2]))
    seconds, cpu = time.perf_counter() - began, time.process_time() - used
    print(json.dumps({"value": value, "seconds": seconds, "cpu_s": cpu, "peak_mb": peak_mb()}))


if __name__ == "__main__":
    main()

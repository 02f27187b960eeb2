"""``python -m benchmarks.run [NAME ...]``: run benchmarks, keep their results, write docs/benchmarks.md.

Without names, all of them, one after another, each in a process of its own (so that none inherits another's heap or
threads). ``--quick`` runs small sizes, to see that everything works: its figures mean nothing and are not kept.
"""

from __future__ import annotations

import argparse
import datetime as dt
import gc
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from .machine import describe
from .page import RESULTS, show, write_page
from .result import FORMAT, Result, Saved

MODULES = {
    "append": "the caller's cost of an append at several rates, beside other writers",
    "flatout": "appending flat out: caller, durable events a second, CPU",
    "journal": "durable lag, bytes per event, recovery, verify, reading",
    "payload": "payload appends: caller's time, bytes per token, MB/s",
    "slow_sync": "a storage whose syncs take 0.2, 10 and 60 s",
    "ten_million": "a journal of 10 million events: create, verify, iterate, follow, restart",
    "ledger": "whole ledger transitions at 100 to 10,000 live groups, images",
    "fold": "events folded a second",
    "checkpoint_sim": "what a running checkpoint adds, simulated data plane",
    "checkpoint_tq": "what a running checkpoint adds, and restore, with TransferQueue",
    "cpu_share": "the journal's share of CPU time in a real training",
    "postmortem": "DuckDB views over a long journal",
    "thrown_away": "tokens thrown away per crash, beside snapshot designs",
}
TIMEOUT_S = 1200


def main() -> int:
    """See the module docstring."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--list", action="store_true", help="name the benchmarks")
    parser.add_argument("--quick", action="store_true", help="small sizes; nothing is kept")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the JSON files go")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{name:16}{what}" for name, what in MODULES.items()))
        return 0
    if unknown := [name for name in options.names if name not in MODULES]:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(MODULES)}")
    if options.inside:
        return _inside(options.names[0], options.out, quick=options.quick)
    out = Path(tempfile.mkdtemp(prefix="unlost-bench-")) if options.quick else options.out
    out.mkdir(parents=True, exist_ok=True)
    try:
        failed = [name for name in _wanted(options.names) if not _outside(name, out, quick=options.quick)]
    finally:
        if options.quick:
            shutil.rmtree(out, ignore_errors=True)
    if not options.quick and options.out == RESULTS:
        write_page()
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _wanted(names: list[str]) -> list[str]:
    if names:
        return names
    return [name for name in MODULES if importlib.util.find_spec(f"benchmarks.{name}") is not None]


def _outside(name: str, out: Path, *, quick: bool) -> bool:
    """One benchmark in a fresh process; whether it succeeded."""
    print(f"== {name}", flush=True)
    command = [sys.executable, "-m", "benchmarks.run", name, "--inside", "--out", str(out)]
    try:
        done = subprocess.run([*command, *(["--quick"] if quick else [])], check=False, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        print(f"{name}: no result within {TIMEOUT_S} s", file=sys.stderr)
        return False
    return done.returncode == 0


def _inside(name: str, out: Path, *, quick: bool) -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    module = importlib.import_module(f"benchmarks.{name}")
    machine = describe(Path(tempfile.gettempdir()))
    began = time.perf_counter()
    gc.collect()
    result: Result = module.run(quick)
    assert result.name == name, "a result is named after its module"
    saved = Saved(
        format=FORMAT,
        command=f"python -m benchmarks.run {name}" + (" --quick" if quick else ""),
        date=dt.datetime.now(tz=dt.UTC).date().isoformat(),
        seconds=round(time.perf_counter() - began, 1),
        machine=machine,
        result=result,
    )
    (out / f"{name}.json").write_bytes(msgspec.json.format(msgspec.json.encode(saved), indent=1) + b"\n")
    print(show(saved), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

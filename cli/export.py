"""``unlost export``: a run in other formats."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from .target import Overwrite, check_target, whole_file


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.", show_default=False)],
    trace: Annotated[bool, typer.Option("--trace", help="As rollout_trace.jsonl.")] = False,
    parquet: Annotated[
        bool, typer.Option("--parquet", help="Every table as a Parquet file; -o names a folder.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Every event as a line of JSON.")] = False,
    perfetto: Annotated[
        bool, typer.Option("--perfetto", help="The timeline, for https://ui.perfetto.dev (or chrome://tracing).")
    ] = False,
    events: Annotated[bool, typer.Option("--events", help="With --parquet: the events as JSON too.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="PATH", help="Where to; default: standard output.")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Write a run as a trace, Parquet files, JSON lines or a timeline. The run itself is only read."""
    if sum((trace, parquet, json, perfetto)) != 1:
        from .errors import UsageFault

        raise UsageFault("give one of --trace, --parquet, --json and --perfetto")
    from ..replay import export as exports

    if parquet:
        if output is None:
            from .errors import UsageFault

            raise UsageFault("--parquet needs --output FOLDER")
        counts = exports.write_parquet(run, output, events=events)
        _say(f"{len(counts)} tables, {sum(counts.values())} rows in {output}")
        return
    if output is not None:
        check_target(output, [run], overwrite=overwrite)
    if perfetto:
        if output is None:
            exports.write_perfetto(run, sys.stdout.buffer)
            return
        with whole_file(output) as part, part.open("wb") as file:
            counts = exports.write_perfetto(run, file)
        left = f" ({counts['groups_left_out']} more left out)" if counts["groups_left_out"] else ""
        _say(
            f"{counts['slices']} slices, {counts['groups']} groups{left} in {output}; open it at https://ui.perfetto.dev"
        )
    else:
        _write(exports.trace_of(run) if trace else exports.json_of(run), output)


def _write(lines: Iterator[bytes], output: Path | None) -> None:
    if output is None:
        for line in lines:
            sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
        return
    count = 0
    with whole_file(output) as part, part.open("wb") as file:
        for line in lines:
            file.write(line)
            count += 1
    _say(f"{count} lines in {output}")


def _say(text: str) -> None:
    print(text, file=sys.stderr)

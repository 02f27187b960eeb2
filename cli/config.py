"""``unlost config``: what a configuration comes to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .output import Format, print_json, show_warnings


def config(
    path: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file.", show_default=False)],
    override: Annotated[
        list[str] | None, typer.Option("-o", "--override", metavar="KEY=VALUE", help="Set a key: -o grpo.max_steps=50")
    ] = None,
    format: Annotated[Format, typer.Option(help="YAML as a table of keys, or JSON.")] = Format.table,
) -> None:
    """Check a configuration and print it resolved: every key, defaults filled in, paths absolute."""
    show_warnings()
    from ..engine.config import dump_config, load_config

    resolved = load_config(path, override or ())
    if format is Format.json:
        print_json(resolved)
    else:
        print(dump_config(resolved), end="")

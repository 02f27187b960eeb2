"""Simulated runs as real run folders, for tests of commands; and back, to go on with them in virtual time.

Locks stay behind: they name the machine that held them, and the simulated one is not this one.
"""

from __future__ import annotations

import os
from pathlib import Path

import yaml

from tests.simulation.world import World, write_files
from unlost.engine.config import Config, dump_config
from unlost.journal.lock import LOCK_NAME


def to_disk(world: World, folder: Path) -> Path:
    """Write everything under ``run/`` of the simulated storage below ``folder``, with a config.yaml. Returns it."""
    for directory in world.storage.directories:
        below = os.path.relpath(directory.lstrip("/"), "run")  # checkpoint folders have absolute names
        if below.startswith(".."):
            continue
        target = folder / below
        target.mkdir(parents=True, exist_ok=True)
        for name in set(world.storage.list_names(directory)) - {LOCK_NAME}:
            (target / name).write_bytes(world.storage.content(f"{directory}/{name}"))
    tree = yaml.safe_load(dump_config(world.config))
    tree["run"]["dir"] = str(folder)
    tree["checkpointing"]["checkpoint_dir"] = str(folder / "checkpoints")
    (folder / "config.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    return folder


def from_disk(folder: Path, config: Config, run_id: str = "sim") -> World:
    """A world whose storage holds what the run folder holds."""
    world = World(config, run_id=run_id)
    for path in [folder, *sorted(p for p in folder.rglob("*") if p.is_dir())]:
        below = path.relative_to(folder)
        root = "/run" if below.parts[:1] == ("checkpoints",) else "run"
        directory = os.path.normpath(os.path.join(root, below))
        write_files(
            world.storage,
            directory,
            {f.name: f.read_bytes() for f in path.iterdir() if f.is_file() and f.name != LOCK_NAME},
        )
    return world

"""A case of the matrix: build the buffer, save, end the life, restore in a fresh one, compare, probe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.scenarios.buffers import Life, Place, rebuild, sampler_of
from unlost.replay.state import COMMITTED, SEALED, UNFINISHED

DATA = Path(__file__).parent / "data"
MATRIX = json.loads((DATA / "matrix.json").read_text())
SCENARIOS = {s["key"]: s for s in MATRIX["scenarios"]}
ADDITIONAL = {s["key"]: s for s in json.loads((DATA / "additional.json").read_text())}
CASES = [(c["scenario"], c["sampler"]) for c in MATRIX["cases"]]
EXPECTED = {(c["scenario"], c["sampler"]): c["expect"] for c in MATRIX["cases"]}


def names_of(ids: dict[str, int], groups: list[int]) -> list[str]:
    back = {number: name for name, number in ids.items()}
    return [back[g] for g in groups]


async def next_life(place: Place, life: Life) -> Life:
    """Everything of the old life dies, the data plane with it."""
    life.die()
    place.plane = await place.fresh_plane()
    return Life(place)


async def run_case(place: Place, scenario_key: str, sampler_name: str) -> None:
    scenario, expect = SCENARIOS[scenario_key], EXPECTED[scenario_key, sampler_name]
    probe = expect["probes"][0]
    before, ids = await rebuild(place, scenario, probe["trainer_version"])
    await before.save()
    rows_before = await place.plane.inventory()
    life = await next_life(place, before)
    sampler = sampler_of(sampler_name, scenario["lag"])
    restored = await life.restore(sampler)
    state = life.state

    for name in expect["must_come_back"]:
        assert ids[name] in state.groups, name
        assert state.groups[ids[name]].status in (UNFINISHED, COMMITTED), name
    for name in expect["must_not_come_back"]:
        group = state.groups.get(ids[name])
        assert group is None or group.trained_step >= 0, name
    assert {n: restored.counters[n] for n in expect["counters"]} == expect["counters"]
    ready = sorted(state.committed, key=lambda g: state.groups[g].slot)
    assert names_of(ids, ready) == expect["restored_ready"]
    unfinished = {
        name: {
            "sealed": [i for i, s in enumerate(group.siblings) if s.status == SEALED],
            "redispatch": [i for i, s in enumerate(group.siblings) if s.status != SEALED],
        }
        for name, number in ids.items()
        if (group := state.groups.get(number)) is not None and group.status == UNFINISHED
    }
    assert unfinished == expect["restored_unfinished"]
    stamps = {n: [state.groups[ids[n]].target_step, state.groups[ids[n]].start_weight] for n in expect["stamps"]}
    assert stamps == expect["stamps"]
    if expect["rows_unchanged"]:
        owned = {key for g in state.groups.values() if g.trained_step < 0 for key in g.sealed_row_keys()}
        assert await place.plane.inventory() == {k: v for k, v in rows_before.items() if k in owned}

    weights = {g["id"]: g["start_weight"] for g in scenario["groups"]}
    for name in expect["restored_unfinished"]:
        await life.finish(ids[name], weights[name])
    evicted = sampler.evictable(state)
    assert names_of(ids, evicted) == probe["evicted"]
    from unlost.replay import events as ev

    for group in evicted:
        life.ledger.record(ev.GroupEvicted(life.now(), group, ev.ABANDON_STALE))
    assert names_of(ids, sampler.select(state, probe["min_groups"], probe["max_groups"])) == probe["selected"]
    life.die()


__all__ = ["ADDITIONAL", "CASES", "SCENARIOS", "Any", "next_life", "run_case"]

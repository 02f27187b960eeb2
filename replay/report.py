"""What happened in a run and what it cost: the data of ``unlost report``, in the terminal and as a page.

One call asks the SQL tables everything; ``replay.report_page`` and ``cli.report`` only arrange the answers. The size of
the result is bounded whatever the run's size: time is cut into ``BINS``, lists into their worst, and single attempts
are listed only as far as ``ATTEMPTS_LISTED_MAX`` goes, those that a kill or a failure hit first.
"""

from __future__ import annotations

from typing import Any, Final

from ..journal.errors import UnlostError
from .database import Database
from .fold import fold_run
from .queries import named

BINS: Final = 400
ATTEMPTS_LISTED_MAX: Final = 20_000
STEPS_LISTED_MAX: Final = 5_000
CHECKPOINTS_LISTED_MAX: Final = 2_000


def gather(database: Database, run: str) -> dict[str, Any]:
    """Everything that a report shows about the source named ``run``; JSON-able. Raises SqlError."""
    reading = _Reader(database, run)
    about = reading.one("SELECT * FROM runs WHERE run = $run")
    data: dict[str, Any] = {
        "run": about,
        "notes": list(database.notes),
        "incarnations": reading.all("SELECT * FROM incarnations WHERE run = $run ORDER BY life"),
        "restores": reading.named("restores"),
        "outages": reading.all("SELECT * FROM outages WHERE run = $run ORDER BY life"),
        "reuse": reading.named("reuse"),
        "reconcile": reading.named("reconcile"),
        "losses": reading.named("thrown-away"),
        "waste": reading.named("waste"),
        "checkpoints": reading.named("checkpoints"),
        "statuses": reading.all(
            "SELECT status, reason, count(*) AS groups, sum(tokens) AS tokens FROM groups WHERE run = $run "
            "GROUP BY ALL ORDER BY ALL"
        ),
        "lengths": reading.named("loss-by-length"),
        "twice": reading.named("prompts-trained-twice"),
        "forked": bool(
            reading.all(
                "SELECT 1 AS one FROM event_index WHERE run = $run AND event_offset = 0 AND event = 'StateImage'"
            )
        ),
        "unread": reading.all("SELECT * FROM unread WHERE run = $run ORDER BY first_offset"),
    }
    data["end"] = _end(database, run) if data["unread"] else None
    data["series"] = _series(reading, about)
    data["steps"] = _steps(reading)
    data["timeline"] = _timeline(reading, about)
    data["attempts"] = _attempts(reading)
    data["summary"] = summary(data)
    return data


def _end(database: Database, run: str) -> dict[str, Any] | None:
    """How a journal ends that could not be read whole: its newest state image and what follows may be intact."""
    source = next((s for s in database.sources if s.run == run and s.kind == "run"), None)
    if source is None:
        return None
    try:
        state = fold_run(source.path)
    except UnlostError:
        return None
    return {
        "offset": state.offset,
        "incarnations": state.incarnation,
        "ended": state.ended,
        "trainer_version": state.trainer_version,
        "handed_out": state.next_group,
        "trained": state.retired_trained + len(state.trained_groups()),
    }


class _Reader:
    """Questions about one run."""

    def __init__(self, database: Database, run: str) -> None:
        self._database = database
        self.run = run

    def all(self, sql: str, **parameters: Any) -> list[dict[str, Any]]:
        text = sql.replace("$run", "'" + self.run.replace("'", "''") + "'")
        for name, value in parameters.items():
            text = text.replace(f"${name}", repr(float(value)))
        return self._database.query(text).dicts()

    def one(self, sql: str, **parameters: Any) -> dict[str, Any]:
        rows = self.all(sql, **parameters)
        return rows[0] if rows else {}

    def named(self, name: str) -> list[dict[str, Any]]:
        return self.all(f"SELECT * FROM ({named(name).sql}) WHERE run = $run")


# --- over time ------------------------------------------------------------------------------------------------------


def _span(about: dict[str, Any]) -> tuple[float, float]:
    """Begin of the run's time and width of a bin, seconds."""
    begin, end = about.get("started_s") or 0.0, about.get("last_event_s") or 0.0
    return begin, max((end - begin) / BINS, 1e-6)


def _binned(rows: list[dict[str, Any]], *columns: str) -> dict[str, list[float]]:
    """Sparse rows with ``bin`` to full columns of BINS + 1 values."""
    out = {column: [0.0] * (BINS + 1) for column in columns}
    for row in rows:
        place = min(max(int(row["bin"]), 0), BINS)
        for column in columns:
            out[column][place] += float(row[column] or 0)
    return out


def _running(values: list[float]) -> list[float]:
    total, out = 0.0, []
    for value in values:
        total += value
        out.append(total)
    return out


_LEVELS: Final = """
SELECT floor((t - $begin) / $width) AS bin, sum(flying) AS in_flight, sum(buffered) AS buffered FROM (
    SELECT dispatched_s AS t, 1 AS flying, 0 AS buffered FROM attempts WHERE run = $run
    UNION ALL SELECT ended_s, -1, 0 FROM attempts WHERE run = $run AND outcome <> 'open'
    UNION ALL SELECT t / 1e6, 0, 1 FROM raw.group_committed WHERE run = $run
    UNION ALL SELECT claimed_s, 0, -1 FROM step_groups WHERE run = $run
    UNION ALL SELECT r.t / 1e6, 0, 1 FROM raw.trainer_rolled_back_groups g
        JOIN raw.trainer_rolled_back r ON r.run = g.run AND r.event_offset = g.event_offset WHERE g.run = $run
    UNION ALL SELECT gone_s, 0, -1 FROM groups
        WHERE run = $run AND committed_s IS NOT NULL AND status IN ('evicted', 'discarded')
) GROUP BY bin ORDER BY bin"""

_FLOWS: Final = """
SELECT floor((ended_s - $begin) / $width) AS bin, sum(new_tokens) AS generated,
       sum(thrown_tokens) + coalesce(sum(kept_tokens) FILTER (fate IN ('evicted', 'discarded')), 0) AS lost
FROM attempts WHERE run = $run AND outcome <> 'open' GROUP BY bin ORDER BY bin"""


def _series(reading: _Reader, about: dict[str, Any]) -> dict[str, Any]:
    """Attempts in flight, groups in the buffer (at each bin's end), tokens per second (over each bin)."""
    begin, width = _span(about)
    levels = _binned(reading.all(_LEVELS, begin=begin, width=width), "in_flight", "buffered")
    flows = _binned(reading.all(_FLOWS, begin=begin, width=width), "generated", "lost")
    trained = _binned(
        reading.all(
            "SELECT floor((applied_s - $begin) / $width) AS bin, sum(tokens) AS trained FROM steps "
            "WHERE run = $run AND NOT rolled_back GROUP BY bin",
            begin=begin,
            width=width,
        ),
        "trained",
    )
    return {
        "t": [round(begin + (i + 1) * width, 6) for i in range(BINS + 1)],
        "in_flight": _running(levels["in_flight"]),
        "buffered": _running(levels["buffered"]),
        "generated_per_s": [round(v / width, 3) for v in flows["generated"]],
        "lost_per_s": [round(v / width, 3) for v in flows["lost"]],
        "trained_per_s": [round(v / width, 3) for v in trained["trained"]],
    }


def _steps(reading: _Reader) -> list[dict[str, Any]]:
    """Steps with their batch age; every n-th of a long run."""
    rows = reading.all(
        "SELECT s.step, s.branch, s.applied_s, s.train_seconds, s.tokens, s.loss, s.reward_mean, s.rolled_back, "
        "b.age_mean, b.age_min, b.age_max, b.weights FROM steps s LEFT JOIN batch_age b USING (run, applied_offset) "
        "WHERE s.run = $run ORDER BY s.applied_s"
    )
    every = -(-len(rows) // STEPS_LISTED_MAX) or 1
    return rows[::every]


# --- timeline -------------------------------------------------------------------------------------------------------

_WORKER_LEVELS: Final = """
SELECT worker, floor((t - $begin) / $width) AS bin, sum(delta) AS step,
       sum(delta * (1 - ((t - $begin) / $width - floor((t - $begin) / $width)))) AS part, sum(cut) AS cut FROM (
    SELECT worker, dispatched_s AS t, 1 AS delta, 0 AS cut FROM attempts WHERE run = $run
    UNION ALL SELECT worker, ended_s, -1, (killed OR coalesce(reason = 'worker_lost', FALSE))::INT
        FROM attempts WHERE run = $run AND outcome <> 'open'
) GROUP BY ALL ORDER BY worker, bin"""


def _timeline(reading: _Reader, about: dict[str, Any]) -> dict[str, Any]:
    """Workers on lanes and the marks across them. ``cells``: (bin, mean attempts running from it on, cut off in it)."""
    begin, width = _span(about)
    workers = reading.all(
        "SELECT worker, incarnation, started_s, stopped_s, stopped, first_s, last_s, attempts, new_tokens FROM workers "
        "WHERE run = $run ORDER BY coalesce(started_s, first_s), worker"
    )
    lives = {row["incarnation"]: row for row in reading.all("SELECT * FROM incarnations WHERE run = $run")}
    lanes: list[float] = []
    for worker in workers:
        start = worker["started_s"] if worker["started_s"] is not None else worker["first_s"] or begin
        life = lives.get(worker["incarnation"])
        end = worker["stopped_s"] or (life["last_event_s"] if life else worker["last_s"]) or start
        lane = next((i for i, free in enumerate(lanes) if free <= start), len(lanes))
        if lane == len(lanes):
            lanes.append(0.0)
        lanes[lane] = end
        worker.update(lane=lane, begin_s=start, end_s=end)
    cells: dict[int, list[list[float]]] = {}
    level: dict[int, float] = {}
    for row in reading.all(_WORKER_LEVELS, begin=begin, width=width):
        number, place = row["worker"], int(row["bin"])
        mine, before = cells.setdefault(number, []), level.get(number, 0.0)
        if mine and mine[-1][0] + 1 < place:  # it changed within its bin, and stays at its level until this one
            mine.append([mine[-1][0] + 1, round(before, 2), 0])
        mine.append([place, round(before + float(row["part"]), 2), int(row["cut"])])
        level[number] = before + float(row["step"])
    checkpoints = reading.all(
        "SELECT checkpoint, kind, cut_s, ended_s, outcome, cut, trainer_version, reason FROM checkpoints "
        "WHERE run = $run ORDER BY cut_s"
    )
    every = -(-len(checkpoints) // CHECKPOINTS_LISTED_MAX) or 1
    return {
        "begin_s": begin,
        "width_s": width,
        "lanes": len(lanes),
        "workers": workers,
        "cells": cells,
        "checkpoints": checkpoints[::every],
        "checkpoints_left_out": len(checkpoints) - len(checkpoints[::every]),
    }


_LISTED: Final = (
    "group_id", "sibling", "attempt", "worker", "incarnation", "dispatched_s", "ended_s", "ended_max_s", "outcome",
    "reason", "fate", "prefix", "tokens", "thrown_tokens", "branch", "version", "killed", "adopted", "lost_reason",
)  # fmt: skip


def _attempts(reading: _Reader) -> dict[str, Any]:
    """Attempts column by column, whole groups, the most interesting groups first if not all fit."""
    total = reading.one("SELECT count(*) AS n FROM attempts WHERE run = $run")["n"]
    rows = reading.all(
        "WITH worth AS (SELECT group_id, count(*) AS n, "
        "max(CASE WHEN killed OR lost_reason IS NOT NULL THEN 3 "
        "WHEN outcome = 'failed' OR reason = 'worker_lost' THEN 2 "
        "WHEN outcome = 'abandoned' THEN 1 ELSE 0 END) AS rank FROM attempts WHERE run = $run GROUP BY group_id), "
        "chosen AS (SELECT group_id, sum(n) OVER (ORDER BY rank DESC, n DESC, group_id) AS upto FROM worth) "
        f"SELECT {', '.join('a.' + name for name in _LISTED)} FROM attempts a JOIN chosen c USING (group_id) "
        f"WHERE a.run = $run AND c.upto <= {ATTEMPTS_LISTED_MAX} ORDER BY a.group_id, a.sibling, a.attempt"
    )
    columns = {name: [row[name] for row in rows] for name in _LISTED}
    groups = reading.all(
        "SELECT group_id, sample_id, epoch, task, status, reason, target_step, trained_step, reserved_s, admitted_s, "
        "committed_s, claimed_s, applied_s, gone_s, tokens, reward_mean FROM groups WHERE run = $run "
        f"AND group_id IN ({','.join(map(str, sorted(set(columns['group_id'])))) or '-1'}) ORDER BY group_id"
    )
    return {"total": total, "listed": len(rows), "columns": columns, "groups": groups}


# --- in words -------------------------------------------------------------------------------------------------------


def summary(data: dict[str, Any]) -> list[str]:
    """The first paragraph, a sentence each: what does not add up first, then what happened and what it cost."""
    about = data["run"]
    said = [
        f"This does not add up: {row['rule']} (residue {_number(row['residue'])})."
        for row in data["reconcile"]
        if not row["ok"]
    ]
    if data["twice"]:
        said.append(f"{len(data['twice'])} prompt(s) were trained twice in an epoch: promise P1 is broken.")
    said += _pruned(about) + _forked(data) + _unread(data)
    if not about.get("events"):
        return said if data["unread"] else [*said, "There are no events to report on."]
    openings, kills = about["incarnations"] or 0, about["kills"] or 0
    if about["status"] == "ended":
        state = f"the last ended ({about['ended']})"
    elif data["unread"]:
        state = "how the last of these ended is not among them"
    else:
        state = "the last has no end: it runs, or was killed and not restarted"
    said.append(
        f"{_count(about['events'], 'event')} in {_duration((about['last_event_s'] or 0) - (about['started_s'] or 0))}; "
        f"{_count(openings, 'incarnation')}, {_count(kills, 'kill')}; {state}."
    )
    vain = sum(row["starts"] - (row["next_life"] is not None) for row in data["outages"])
    if vain:
        said.append(
            f"{_count(vain, 'start')} ended before {'its restore was' if vain == 1 else 'their restores were'} "
            f"complete: what was cut off before is counted with the restore that took it over."
        )
    undone = about["steps_rolled_back"] or 0
    said.append(
        f"{_count(about['steps'] or 0, 'step')} stand, {undone} {'was' if undone == 1 else 'were'} undone by restores; "
        f"{_count(about['groups_trained'] or 0, 'prompt')} trained, none twice."
        if not data["twice"]
        else f"{_count(about['steps'] or 0, 'step')} stand."
    )
    said += _costs(data)
    if data["reconcile"] and all(row["ok"] for row in data["reconcile"]):
        of = "In what is kept, everything" if about.get("first_offset") else "Everything"
        of = "In what could be read, everything" if data["unread"] else of
        said.append(f"{of} adds up: attempts, tokens and seconds.")
    return said


def _pruned(about: dict[str, Any]) -> list[str]:
    """What the figures are of, in a journal whose beginning is gone."""
    if not about.get("first_offset"):
        return []
    first = about["first_offset"]
    if about["source"] == "segment":
        return [f"This segment begins at event {first:,}: the figures are of what is in it."]
    return [
        f"The events before {first:,} were pruned: the figures are of the others and of what was alive before them."
    ]


def _forked(data: dict[str, Any]) -> list[str]:
    if not data["forked"]:
        return []
    return ["This run is a fork: what was alive in the other one counts here, what had ended there does not."]


def _unread(data: dict[str, Any]) -> list[str]:
    """What the figures lack, and what is known of the run's end all the same."""
    if not data["unread"]:
        return []
    stretches = ", ".join(
        f"{row['first_offset']:,} to {row['last_offset']:,}" if row["last_offset"] is not None
        else f"from {row['first_offset']:,} on"
        for row in data["unread"]
    )  # fmt: skip
    said = [f"Not all of it could be read: events {stretches} are left out, and every figure below lacks them."]
    if end := data["end"]:
        how = f"ended ({end['ended']})" if end["ended"] else "has no end"
        said.append(
            f"Its newest state image and the events after it are intact: {_count(end['offset'], 'event')} in all, "
            f"{_count(end['incarnations'], 'incarnation')}, the last {how}; the trainer at version "
            f"{end['trainer_version']}, {_count(end['handed_out'], 'prompt')} handed out, {end['trained']:,} trained."
        )
    else:
        said.append("How it ended is not known either: what follows the damage can't be read from a state image.")
    return said


def _costs(data: dict[str, Any]) -> list[str]:
    said = []
    crash = {row["resource"]: row for row in data["waste"] if row["waste"] == "crash"}
    if "generation" in crash:
        row = crash["generation"]
        said.append(
            f"Kills and stops threw away {_bounds(row, 'seconds', ' s')} of generation"
            + (f" and {_bounds(row, 'tokens', ' tokens')}." if row["tokens"] is not None else ".")
        )
    unseen = max((o["died_max_s"] - o["died_min_s"] for o in data["outages"] if o["status"] == "killed"), default=0.0)
    if "generation" in crash and unseen >= 0.05:
        longest = "up to " if sum(o["status"] == "killed" for o in data["outages"]) > 1 else ""
        said.append(
            f"When a process died is not in the journal; nothing is known of it for {longest}{_number(unseen)} s, "
            f"until the next start: the upper bounds of seconds count that in."
        )
    more = []
    if "trainer" in crash:
        more.append(f"{_number(crash['trainer']['seconds'])} s of training done again")
    if "wall" in crash:
        more.append(f"{_bounds(crash['wall'], 'seconds', ' s')} until generation went on")
    if more:
        said.append("Besides: " + ", ".join(more) + ".")
    others = [
        row for row in data["waste"] if row["resource"] == "generation" and row["waste"] != "crash" and row["seconds"]
    ]
    if others:
        listed = ", ".join(
            f"{row['waste']} {_number(row['seconds'])} s" for row in sorted(others, key=lambda r: -r["seconds"])
        )
        said.append(f"Other waste of generation: {listed}.")
    return said


def _bounds(row: dict[str, Any], name: str, unit: str) -> str:
    low, high = row[name] or 0, row[f"{name}_at_most"]
    if high is None:
        return f"at least {_number(low)}{unit}"
    return f"{_number(low)}{unit}" if high - low < 0.05 else f"between {_number(low)} and {_number(high)}{unit}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:,.1f}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"

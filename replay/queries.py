"""Questions with names: what one asks after a crash, ready to run (``unlost sql RUN --query NAME``).

Each is one SQL statement over the documented tables; ``docs/sql.md`` lists them. Every row begins with the run, so that
several runs can be compared in one call.
"""

from __future__ import annotations

import difflib
from typing import Final, NamedTuple

from ..journal.errors import EXIT_USAGE, UnlostError


class UnknownQuery(UnlostError):
    """No question of that name; the message names the nearest."""

    exit_code = EXIT_USAGE


class Query(NamedTuple):
    """A canned question. ``title``: the question in words. ``note``: how to read the answer."""

    name: str
    title: str
    sql: str
    note: str = ""


QUERIES: Final = (
    Query(
        "thrown-away",
        "What was thrown away, by cause?",
        """SELECT run, resource, class, count(*) AS losses,
       sum(seconds) AS seconds, CASE WHEN count(seconds_max) = count(*) THEN sum(seconds_max) END AS seconds_at_most,
       sum(seconds_before_cut) AS before_cut, sum(seconds_after_cut) AS after_cut,
       sum(tokens) AS tokens, CASE WHEN count(tokens_max) = count(*) THEN sum(tokens_max) END AS tokens_at_most
FROM losses GROUP BY ALL ORDER BY run, resource, seconds DESC""",
        "Seconds of different resources don't add up. before_cut and after_cut split what ran when the controller died.",
    ),
    Query(
        "loss-by-length",
        "Do losses hit long rollouts more?",
        """WITH siblings AS (
    SELECT run, group_id, sibling, max(coalesce(tokens, 0)) AS length, bool_or(outcome = 'sealed') AS finished
    FROM attempts GROUP BY ALL
), lost AS (
    SELECT run, group_id, sibling, sum(seconds) AS seconds, sum(tokens) AS tokens
    FROM losses WHERE resource = 'generation' GROUP BY ALL
), ranked AS (
    SELECT s.*, l.seconds, l.tokens, ntile(10) OVER (PARTITION BY s.run ORDER BY s.length, s.group_id, s.sibling) AS tile
    FROM siblings s LEFT JOIN lost l USING (run, group_id, sibling)
), merged AS (
    SELECT *, max(tile) OVER (PARTITION BY run, length) AS decile FROM ranked
)
SELECT run, decile, min(length) AS shortest, max(length) AS longest, count(*) AS siblings,
       count(seconds) AS with_losses, count(seconds) / count(*) AS share_with_losses,
       coalesce(sum(seconds), 0) AS seconds, coalesce(sum(tokens), 0) AS tokens,
       count(*) FILTER (NOT finished) AS unfinished
FROM merged GROUP BY ALL ORDER BY run, decile""",
        "Length: the longest attempt of the sibling; a lower bound where it never finished. Siblings of one length are in "
        "one tenth, the last that they reach into: where many reach the limit there are fewer than ten rows.",
    ),
    Query(
        "prompts-skipped",
        "Which prompts were given up?",
        """SELECT run, sample_id, epoch, task, group_id, status, reason, gone_s, sealed, tokens, attempts
FROM groups WHERE status IN ('discarded', 'evicted') AND requeued_as IS NULL ORDER BY run, gone_offset""",
    ),
    Query(
        "prompts-trained-twice",
        "Was any prompt trained twice in an epoch?",
        """SELECT run, sample_id, epoch, sum(times_trained) AS times_trained, list(group_id ORDER BY group_id) AS groups
FROM groups GROUP BY run, sample_id, epoch HAVING sum(times_trained) > 1 ORDER BY ALL""",
        "Empty, or promise P1 is broken. A step undone by a rollback does not count.",
    ),
    Query(
        "prompts-regenerated",
        "Which siblings were generated more than once, and why?",
        """WITH again AS (
    SELECT run, group_id, sibling, count(*) AS attempts,
           list(coalesce(lost_reason, reason, outcome) ORDER BY attempt) FILTER (next_prefix IS NOT NULL) AS ended_by,
           sum(coalesce(next_prefix, 0)) AS tokens_reused, sum(thrown_tokens) AS tokens_thrown
    FROM attempts GROUP BY ALL HAVING count(*) > 1
)
SELECT a.run, g.sample_id, g.epoch, a.group_id, a.sibling, a.attempts, a.ended_by, a.tokens_reused, a.tokens_thrown
FROM again a LEFT JOIN groups g USING (run, group_id) ORDER BY a.run, a.attempts DESC, a.group_id, a.sibling""",
    ),
    Query(
        "version-spans",
        "How many trained groups mix weights?",
        """WITH mixed AS (
    SELECT g.run, g.group_id, count(DISTINCT (p.branch, p.version)) AS weights, max(p.version) - min(p.version) AS width
    FROM groups g
    JOIN attempts a ON a.run = g.run AND a.group_id = g.group_id AND a.outcome = 'sealed' AND a.lost_offset IS NULL
    JOIN spans p ON p.run = a.run AND p.sealed_offset = a.ended_offset
    WHERE g.status = 'trained' GROUP BY ALL
)
SELECT run, weights, width, count(*) AS groups FROM mixed GROUP BY ALL ORDER BY ALL""",
    ),
    Query(
        "staleness",
        "How old were the weights of what was trained?",
        """SELECT g.run, g.trained_step - g.version_min AS age_of_oldest, count(*) AS groups, sum(g.tokens) AS tokens
FROM groups g WHERE g.status = 'trained' GROUP BY ALL ORDER BY ALL""",
        "Versions between the oldest weights in a group and the step that trained it.",
    ),
    Query(
        "batch-age",
        "Batch age of each step, weighted by tokens",
        "SELECT * FROM batch_age ORDER BY run, applied_offset",
        "Weight updates between generating a token and training on it (step - version); a call is split where new weights "
        "paused it. A sampler's limit counts versions at admission: tokens made while new weights were on their way to "
        "the worker are one older, and those of versions that a restore undid count as the version gone back to.",
    ),
    Query(
        "checkpoints",
        "How did checkpoints end?",
        """SELECT run, kind, outcome, reason, count(*) AS checkpoints, avg(seconds) AS seconds_mean,
       max(seconds) AS seconds_max, sum(bytes) AS bytes, sum(clears_deferred) AS clears_deferred
FROM checkpoints GROUP BY ALL ORDER BY run, kind, outcome, reason""",
    ),
    Query(
        "checkpoint-stalls",
        "Did generation stall while a checkpoint was written?",
        """WITH seals AS (
    SELECT run, ended_s, ended_s - lag(ended_s) OVER (PARTITION BY run, incarnation ORDER BY ended_s) AS gap
    FROM attempts WHERE outcome = 'sealed' AND NOT adopted
), usual AS (
    SELECT run, quantile_cont(gap, 0.5) AS gap_median, quantile_cont(gap, 0.99) AS gap_p99 FROM seals GROUP BY run
), during AS (
    SELECT c.run, c.checkpoint, c.kind, c.cut_s, c.ended_s, count(s.ended_s) AS seals, max(s.gap) AS gap_longest
    FROM checkpoints c
    LEFT JOIN seals s ON s.run = c.run AND s.ended_s > c.cut_s AND s.ended_s <= c.ended_s
    WHERE c.checkpoint IS NOT NULL AND c.ended_s IS NOT NULL GROUP BY ALL
)
SELECT d.run, d.checkpoint, d.kind, d.cut_s, d.ended_s - d.cut_s AS seconds, d.seals, d.gap_longest, u.gap_median, u.gap_p99
FROM during d JOIN usual u USING (run) ORDER BY d.gap_longest DESC NULLS LAST, d.run, d.checkpoint""",
        "gap: seconds without a seal. Compare the longest one during a checkpoint with the run's usual ones.",
    ),
    Query(
        "durable-lag",
        "How long did events wait to be written?",
        """WITH waits AS (
    SELECT f.run, f.incarnation, f.events, f.wall_ns / 1e6 - (i.started_wall_s + (f.first_t / 1e6 - i.started_s)) * 1e3 AS ms
    FROM raw.frames f JOIN incarnations i ON i.run = f.run AND i.incarnation = f.incarnation
    WHERE f.segment <> 'trace'
)
SELECT run, incarnation, count(*) AS frames, sum(events) AS events, quantile_cont(ms, 0.5) AS ms_median,
       quantile_cont(ms, 0.99) AS ms_p99, max(ms) AS ms_max
FROM waits GROUP BY ALL ORDER BY ALL""",
        "From a frame's oldest event to the moment the frame was written; the sync comes on top.",
    ),
    Query(
        "reuse",
        "What did each restart keep?",
        """WITH ran AS (
    SELECT o.run, o.restarted_as, count(a.attempt) AS running, count(a.attempt) FILTER (a.adopted) AS adopted,
           count(a.attempt) FILTER (a.next_prefix > 0) AS resumed, coalesce(sum(a.next_prefix), 0) AS prefix_tokens_reused,
           coalesce(sum(a.thrown_tokens), 0) AS tokens_thrown
    FROM outages o LEFT JOIN attempts a ON a.run = o.run AND a.incarnation = o.incarnation
        AND (a.reason = 'stopped' OR coalesce(a.ended_offset >= o.next_offset, TRUE))
    GROUP BY ALL
)
SELECT r.run, r.incarnation AS restarted_as, ran.running AS running_at_death, ran.adopted, ran.resumed,
       ran.prefix_tokens_reused, ran.tokens_thrown,
       f.groups_complete_restored, f.groups_unfinished_found, f.siblings_reused, f.siblings_rerun,
       (r.counters->>'$.groups_rolled_back')::BIGINT AS groups_rolled_back
FROM restores r
LEFT JOIN restore_finds f ON f.run = r.run AND f.incarnation = r.incarnation
LEFT JOIN ran ON ran.run = r.run AND ran.restarted_as = r.incarnation
WHERE r.completed_offset IS NOT NULL ORDER BY r.run, r.started_offset""",
        "running_at_death: cut off by a kill or an orderly stop. A start that ended before its restore was complete hands "
        "them on to the next one.",
    ),
    Query(
        "snapshot-intervals",
        "What would snapshots alone have lost, by interval, beside what was lost?",
        """WITH intervals AS (
    SELECT unnest([10, 30, 60, 120, 300, 600]) AS interval_s
), cuts AS (
    SELECT i.run, i.incarnation, i.died_min_s, v.interval_s,
           i.started_s + floor((i.died_min_s - i.started_s) / v.interval_s) * v.interval_s AS cut_s
    FROM incarnations i, intervals v WHERE i.status = 'killed'
), would AS (
    SELECT c.run, c.interval_s, count(a.attempt) AS attempts, coalesce(sum(a.seconds), 0) AS seconds,
           coalesce(sum(a.new_tokens), 0) AS tokens
    FROM cuts c LEFT JOIN attempts a ON a.run = c.run AND a.incarnation = c.incarnation AND a.ended_s > c.cut_s
        AND (a.outcome = 'sealed' OR a.killed)
    GROUP BY ALL
), was AS (
    SELECT run, sum(seconds) AS seconds, sum(tokens) AS tokens FROM losses
    WHERE class IN ('in_flight', 'sealed_not_durable') GROUP BY ALL
)
SELECT w.run, w.interval_s, w.attempts, w.seconds AS seconds_with_snapshots_alone, w.tokens AS tokens_with_snapshots_alone,
       coalesce(was.seconds, 0) AS seconds_lost, coalesce(was.tokens, 0) AS tokens_lost
FROM would w LEFT JOIN was USING (run) ORDER BY w.run, w.interval_s""",
        "Snapshots alone lose every attempt that was not sealed at the last cut. Cuts are counted from each start.",
    ),
    Query(
        "slowest-groups",
        "Which groups took longest?",
        """SELECT run, group_id, sample_id, task, status, complete_s - dispatched_s AS seconds, attempts, generations, tokens
FROM groups WHERE complete_s IS NOT NULL AND dispatched_s IS NOT NULL ORDER BY seconds DESC, run, group_id LIMIT 20""",
    ),
    Query(
        "stuck-groups",
        "Which groups have waited longest and are not finished?",
        """SELECT g.run, g.group_id, g.sample_id, g.status, g.target_step, g.sealed, g.generations, g.attempts,
       r.last_event_s - coalesce(g.dispatched_s, g.admitted_s, g.reserved_s) AS waiting_s
FROM groups g JOIN runs r USING (run)
WHERE g.status IN ('reserved', 'unfinished', 'complete', 'claimed') ORDER BY waiting_s DESC, g.run, g.group_id LIMIT 20""",
    ),
    Query(
        "worker-throughput",
        "Tokens by worker",
        """SELECT run, worker, incarnation, attempts, sealed, failed, abandoned, new_tokens, busy_s,
       new_tokens / nullif(busy_s, 0) AS tokens_per_attempt_second, new_tokens / nullif(last_s - first_s, 0) AS tokens_per_s
FROM workers ORDER BY run, worker""",
    ),
    Query(
        "task-throughput",
        "Tokens, rewards and losses by task",
        """WITH a AS (
    SELECT g.run, g.task, count(*) AS attempts, sum(a.new_tokens) AS tokens, sum(a.seconds) AS seconds,
           count(*) FILTER (a.outcome = 'failed') AS failed,
           sum(a.thrown_tokens) + coalesce(sum(a.kept_tokens) FILTER (a.fate IN ('discarded', 'evicted')), 0) AS lost_tokens
    FROM attempts a JOIN groups g USING (run, group_id) GROUP BY ALL
), g AS (
    SELECT run, task, count(*) AS groups, count(*) FILTER (status = 'trained') AS trained, avg(reward_mean) AS reward_mean
    FROM groups GROUP BY ALL
)
SELECT g.run, g.task, g.groups, g.trained, g.reward_mean, a.attempts, a.failed, a.tokens, a.lost_tokens, a.seconds,
       a.tokens / nullif(a.seconds, 0) AS tokens_per_attempt_second
FROM g LEFT JOIN a USING (run, task) ORDER BY g.run, g.task""",
    ),
    Query(
        "waste",
        "Crash waste beside staleness waste and weight-sync waste",
        """SELECT run, resource,
       CASE WHEN class IN ('in_flight', 'sealed_not_durable', 'granularity', 'rolled_back_training', 'restart_idle', 'stopped')
                THEN 'crash'
            WHEN class IN ('stale_aborted', 'stale_evicted', 'stale_at_restore') THEN 'staleness'
            WHEN class IN ('weight_sync', 'weight_sync_pause') THEN 'weight sync'
            ELSE 'failures' END AS waste,
       sum(seconds) AS seconds, CASE WHEN count(seconds_max) = count(*) THEN sum(seconds_max) END AS seconds_at_most,
       sum(tokens) AS tokens, CASE WHEN count(tokens_max) = count(*) THEN sum(tokens_max) END AS tokens_at_most
FROM losses GROUP BY ALL ORDER BY run, resource, waste""",
    ),
    Query("restores", "What did each restore do?", "SELECT * FROM restores ORDER BY run, started_offset"),
    Query("reconcile", "Does everything add up?", "SELECT * FROM reconcile ORDER BY run, ok, what"),
)

_BY_NAME: Final = {query.name: query for query in QUERIES}


def named(name: str) -> Query:
    """The question of that name. Raises UnknownQuery."""
    wanted = name.lower().replace("_", "-")
    if wanted not in _BY_NAME:
        best = max(_BY_NAME, key=lambda known: difflib.SequenceMatcher(None, wanted, known).ratio())
        raise UnknownQuery(f"no query is named {name}; did you mean {best}? `unlost sql --queries` lists all")
    return _BY_NAME[wanted]

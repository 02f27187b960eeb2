-- Tables and views over the raw event tables (raw.<event>, one row per event). Documented in docs/sql.md, whose columns
-- come from tables.py. Sections are separated by lines "-- @name: title"; tables are built once at loading, in this order.
-- Times ending in _s are seconds on the run's clock (raw.*.t: microseconds).

-- @attempt_rows: the loader has put in what it could pair; here come the others
CREATE TEMP TABLE next_try AS
SELECT run, group_id, sibling, attempt - 1 AS attempt, prefix AS next_prefix, prefix_from AS next_prefix_from
FROM attempt_rows WHERE attempt > 0
UNION ALL
SELECT run, group_id, sibling, attempt - 1, prefix, prefix_from FROM single_dispatched WHERE attempt > 0;

CREATE TEMP TABLE reused_from AS  -- whose records a later attempt went on from, where that is written down
SELECT run, group_id, sibling, next_prefix_from AS attempt, max(next_prefix) AS reused
FROM next_try WHERE next_prefix_from >= 0 GROUP BY ALL;

INSERT INTO attempt_rows BY NAME
SELECT d.run, d.event_offset AS dispatched_event_offset, d.t AS dispatched_t, d.* EXCLUDE (run, event_offset, t),
       s.event_offset AS sealed_event_offset, s.t AS sealed_t,
       s.* EXCLUDE (run, event_offset, t, group_id, sibling, attempt),
       f.event_offset AS failed_offset, f.t AS failed_t, f.tokens AS failed_tokens, f.kind AS failed_kind, f.cause,
       a.event_offset AS abandoned_offset, a.t AS abandoned_t, a.tokens AS abandoned_tokens, a.durable, a.reason,
       n.next_prefix, n.next_prefix_from, r.reused
FROM single_dispatched d
LEFT JOIN single_sealed s USING (run, group_id, sibling, attempt)
LEFT JOIN raw.attempt_failed f USING (run, group_id, sibling, attempt)
LEFT JOIN raw.attempt_abandoned a USING (run, group_id, sibling, attempt)
LEFT JOIN next_try n USING (run, group_id, sibling, attempt)
LEFT JOIN reused_from r USING (run, group_id, sibling, attempt);

-- Sealed and then lost: rare, so it is put in afterwards and not joined with millions of rows.
UPDATE attempt_rows SET abandoned_offset = g.event_offset, abandoned_t = g.t, abandoned_tokens = g.tokens,
    durable = g.durable, reason = g.reason, next_prefix = g.next_prefix, next_prefix_from = g.next_prefix_from,
    reused = g.reused
FROM (
    SELECT a.*, n.next_prefix, n.next_prefix_from, r.reused
    FROM raw.attempt_abandoned a
    LEFT JOIN next_try n USING (run, group_id, sibling, attempt)
    LEFT JOIN reused_from r USING (run, group_id, sibling, attempt)
    WHERE a.reason IN ('payload_lost', 'prompt_group')
) g
WHERE attempt_rows.run = g.run AND attempt_rows.group_id = g.group_id AND attempt_rows.sibling = g.sibling
    AND attempt_rows.attempt = g.attempt AND attempt_rows.sealed_event_offset IS NOT NULL;

DROP TABLE next_try;
DROP TABLE reused_from;

-- @reach: from which event to which a run is here
CREATE TABLE reach AS
SELECT run, min(event_offset) FILTER (event_offset >= 0) AS first_offset, max(event_offset) AS last_offset
FROM event_index GROUP BY run;

-- @incarnations
CREATE TABLE incarnations AS
WITH started AS (
    SELECT run, incarnation, run_id, event_offset AS first_offset, t, wall_us, host, pid,
           lead(event_offset) OVER w AS next_offset, lead(t) OVER w AS next_t,
           row_number() OVER w AS life
    FROM raw.run_started WINDOW w AS (PARTITION BY run ORDER BY event_offset)
), bounded AS (
    SELECT s.*, coalesce(s.next_offset - 1, r.last_offset) AS last_offset FROM started s JOIN reach r USING (run)
), last_events AS (
    SELECT run, event_offset, t FROM event_index
    WHERE event_offset IN (SELECT last_offset FROM bounded)
), trace_ends AS (  -- a trace's last line counts, whether it was understood or not
    SELECT run, incarnation, max(last_t) AS t FROM raw.frames WHERE segment = 'trace' GROUP BY ALL
), ending AS (
    SELECT b.*, greatest(coalesce(l.t, b.t), x.t) AS last_t
    FROM bounded b
    LEFT JOIN last_events l ON l.run = b.run AND l.event_offset = b.last_offset
    LEFT JOIN trace_ends x ON x.run = b.run AND x.incarnation = b.incarnation
)
SELECT b.run, b.life, b.incarnation, b.run_id, b.host, b.pid, b.first_offset, b.last_offset, b.next_offset,
       b.t / 1e6 AS started_s, b.last_t / 1e6 AS last_event_s, b.next_t / 1e6 AS next_started_s,
       b.wall_us / 1e6 AS started_wall_s,
       e.reason AS ended,
       CASE WHEN e.reason IS NOT NULL THEN 'ended' WHEN b.next_offset IS NOT NULL THEN 'killed' ELSE 'open' END AS status,
       b.last_t / 1e6 AS died_min_s,
       CASE WHEN e.reason IS NOT NULL THEN b.last_t ELSE b.next_t END / 1e6 AS died_max_s
FROM ending b
LEFT JOIN raw.run_ended e ON e.run = b.run AND e.event_offset BETWEEN b.first_offset AND b.last_offset;

-- @checkpoints
CREATE TABLE checkpoints AS
WITH ends AS (
    SELECT run, checkpoint, event_offset, t, 'committed' AS outcome, NULL AS reason, seconds, name, bytes, rows,
           rows_missing, clears_deferred, floor
    FROM raw.checkpoint_committed
    UNION ALL
    SELECT run, checkpoint, event_offset, t, 'failed', reason, seconds, NULL, NULL, NULL, NULL, NULL, NULL
    FROM raw.checkpoint_failed
)
SELECT s.run, s.checkpoint, s.kind, s.trainer_version, s.event_offset AS cut, s.t / 1e6 AS cut_s,
       coalesce(e.outcome, 'unfinished') AS outcome, e.reason, e.event_offset AS ended_offset, e.t / 1e6 AS ended_s,
       e.seconds, e.name, e.bytes, e.rows, e.rows_missing, e.clears_deferred, e.floor
FROM raw.checkpoint_started s LEFT JOIN ends e ON e.run = s.run AND e.checkpoint = s.checkpoint
    AND e.event_offset > s.event_offset
UNION ALL
SELECT run, NULL, kind, NULL, event_offset, t / 1e6, 'skipped', reason, event_offset, t / 1e6,
       NULL, NULL, NULL, NULL, NULL, NULL, NULL
FROM raw.checkpoint_skipped;

-- @deaths: one row per incarnation that did not end in order, with the last cut published before it
CREATE TABLE deaths AS
SELECT i.run, i.incarnation, i.next_offset, i.died_min_s, i.died_max_s, max(c.cut_s) AS cut_s
FROM incarnations i
LEFT JOIN checkpoints c ON c.run = i.run AND c.outcome = 'committed' AND c.ended_offset < i.next_offset
WHERE i.status = 'killed'
GROUP BY ALL;

-- @steps
CREATE TABLE steps AS
WITH claims AS (
    SELECT c.run, c.event_offset, c.t, c.step,
           (SELECT min(r.event_offset) FROM raw.trainer_rolled_back r
            WHERE r.run = c.run AND r.event_offset > c.event_offset AND r.to_version <= c.step) AS back_offset
    FROM raw.step_claimed c
), applied AS (
    SELECT a.*,
           (SELECT min(r.event_offset) FROM raw.trainer_rolled_back r
            WHERE r.run = a.run AND r.event_offset > a.event_offset AND r.to_version <= a.step) AS back_offset,
           (SELECT max(r.branch) FROM raw.trainer_rolled_back r
            WHERE r.run = a.run AND r.event_offset < a.event_offset) AS branch
    FROM raw.step_applied a
)
SELECT a.run, a.step, coalesce(a.branch, 0) AS branch, a.trainer_version, a.event_offset AS applied_offset,
       min(c.t) / 1e6 AS claimed_s, a.t / 1e6 AS applied_s, a.seconds AS train_seconds, a.loss, a.reward_mean,
       a.tokens, a.metrics, a.back_offset AS rolled_back_offset, a.back_offset IS NOT NULL AS rolled_back
FROM (FROM applied WHERE event_offset >= 0) a
LEFT JOIN claims c ON c.run = a.run AND c.step = a.step AND c.event_offset < a.event_offset
    AND (c.back_offset IS NULL OR c.back_offset > a.event_offset)
GROUP BY ALL;

-- @step_groups: which groups each step trained on; applied_offset is NULL for a claim that no step came of
CREATE TABLE step_groups AS
WITH claims AS (
    SELECT c.run, c.event_offset, c.t, c.step,
           (SELECT min(r.event_offset) FROM raw.trainer_rolled_back r
            WHERE r.run = c.run AND r.event_offset > c.event_offset AND r.to_version <= c.step) AS back_offset,
           (SELECT min(a.event_offset) FROM raw.step_applied a
            WHERE a.run = c.run AND a.event_offset > c.event_offset AND a.step = c.step) AS applied_offset
    FROM raw.step_claimed c
)
SELECT g.run, c.step, g.value AS group_id, c.event_offset AS claim_offset, c.t / 1e6 AS claimed_s,
       CASE WHEN c.back_offset < c.applied_offset THEN NULL ELSE c.applied_offset END AS applied_offset,
       c.back_offset AS rolled_back_offset
FROM raw.step_claimed_groups g JOIN claims c ON c.run = g.run AND c.event_offset = g.event_offset;

-- @groups
CREATE TABLE groups AS
WITH RECURSIVE gone AS (
    SELECT run, group_id, event_offset, t, 'discarded' AS how, reason, requeued_as FROM raw.group_discarded
    UNION ALL
    SELECT run, group_id, event_offset, t, 'evicted', reason, requeued_as FROM raw.group_evicted
    UNION ALL
    SELECT run, group_id, event_offset, t, 'discarded', reason, -1 FROM raw.prompt_replaced
    UNION ALL
    SELECT run, group_id, event_offset, t, 'discarded', reason, -1 FROM raw.step_shortened
), first_hand AS (
    SELECT b.run, b.first_group + p.position AS group_id, b.event_offset AS reserved_offset, b.t, b.admission_id,
           b.generations, b.kind, p.sample_id, p.epoch, p.index AS prompt_index, p.task, -1 AS requeued_from
    FROM raw.batch_reserved b
    JOIN raw.batch_reserved_prompts p ON p.run = b.run AND p.event_offset = b.event_offset
), served AS (
    SELECT * FROM first_hand
    UNION ALL
    SELECT s.run, g.requeued_as, g.event_offset, g.t, s.admission_id, s.generations, 'requeued', s.sample_id, s.epoch,
           s.prompt_index, s.task, s.group_id
    FROM served s JOIN gone g ON g.run = s.run AND g.group_id = s.group_id AND g.requeued_as >= 0
), admitted AS (
    SELECT s.run, s.group_id, a.t, a.event_offset, a.target_step, a.dispatch_index
    FROM served s JOIN raw.batch_admitted a ON a.run = s.run AND a.admission_id = s.admission_id
    WHERE s.kind NOT IN ('spare', 'requeued')
    UNION ALL
    SELECT b.run, p.value, a.t, a.event_offset, a.target_step, a.dispatch_index
    FROM raw.batch_reserved_pool_groups p
    JOIN raw.batch_reserved b ON b.run = p.run AND b.event_offset = p.event_offset
    JOIN raw.batch_admitted a ON a.run = b.run AND a.admission_id = b.admission_id
    UNION ALL
    SELECT run, spare, t, event_offset, spare_target, NULL FROM raw.prompt_replaced
), admission AS (
    SELECT run, group_id, arg_min(t, event_offset) AS t, arg_max(target_step, event_offset) AS target_step,
           arg_min(dispatch_index, event_offset) AS dispatch_index
    FROM admitted GROUP BY ALL
), pooled AS (
    SELECT DISTINCT run, value AS group_id FROM raw.batch_reserved_pool_groups
), lent AS (
    SELECT run, borrowed AS group_id, arg_max(target_step, event_offset) AS target_step
    FROM raw.prompt_replaced WHERE borrowed >= 0 GROUP BY ALL
), training AS (
    SELECT run, group_id,
           count(applied_offset) AS times_applied,
           count(*) FILTER (applied_offset IS NOT NULL AND rolled_back_offset IS NULL) AS times_trained,
           max(step) FILTER (applied_offset IS NOT NULL AND rolled_back_offset IS NULL) AS trained_step,
           max(applied_offset) FILTER (rolled_back_offset IS NULL) AS applied_offset,
           bool_or(applied_offset IS NULL AND rolled_back_offset IS NULL) AS claimed,
           max(claimed_s) AS claimed_s
    FROM step_groups GROUP BY ALL
), undone AS (
    SELECT run, group_id, max(event_offset) AS event_offset FROM raw.attempt_abandoned
    WHERE reason IN ('payload_lost', 'prompt_group') GROUP BY ALL
), tried AS (
    SELECT run, group_id, min(dispatched_t) AS first_t, count(*) AS dispatched, count(*) FILTER (stands) AS sealed,
           sum(nullif(tokens, -1)) FILTER (stands) AS tokens, avg(reward) FILTER (stands) AS reward_mean,
           max(sealed_t) FILTER (stands) AS last_seal_t, min(version_min) FILTER (stands) AS version_min,
           max(version_max) FILTER (stands) AS version_max
    FROM (SELECT *, sealed_event_offset IS NOT NULL AND abandoned_offset IS NULL AS stands FROM attempt_rows)
    GROUP BY ALL
), committed AS (
    SELECT run, group_id, max(event_offset) AS event_offset, arg_max(t, event_offset) AS t
    FROM raw.group_committed GROUP BY ALL
)
SELECT s.run, s.group_id, s.sample_id, s.epoch, s.prompt_index, s.task, s.kind,
       CASE WHEN s.admission_id >= 0 THEN s.admission_id END AS admission_id, nullif(s.generations, -1) AS generations,
       CASE
           WHEN t.times_trained > 0 THEN 'trained'
           WHEN g.how IS NOT NULL THEN g.how
           WHEN t.claimed THEN 'claimed'
           WHEN u.event_offset IS NULL AND c.event_offset IS NOT NULL OR c.event_offset > u.event_offset THEN 'committed'
           WHEN coalesce(d.sealed, 0) = s.generations THEN 'complete'
           WHEN a.t IS NOT NULL THEN 'unfinished'
           WHEN s.kind IN ('spare', 'requeued') AND p.group_id IS NULL THEN 'pool'
           ELSE 'reserved'
       END AS status,
       g.reason, g.event_offset AS gone_offset, g.t / 1e6 AS gone_s,
       nullif(g.requeued_as, -1) AS requeued_as, nullif(s.requeued_from, -1) AS requeued_from,
       s.reserved_offset, s.t / 1e6 AS reserved_s, a.t / 1e6 AS admitted_s, d.first_t / 1e6 AS dispatched_s,
       CASE WHEN coalesce(d.sealed, 0) = s.generations THEN d.last_seal_t / 1e6 END AS complete_s,
       c.t / 1e6 AS committed_s, t.claimed_s, st.applied_s,
       nullif(coalesce(lent.target_step, a.target_step), -1) AS target_step, a.dispatch_index,
       t.trained_step, coalesce(t.times_trained, 0) AS times_trained, coalesce(t.times_applied, 0) AS times_applied,
       coalesce(d.dispatched, 0) AS attempts, coalesce(d.sealed, 0) AS sealed, d.tokens, d.reward_mean,
       d.version_min, d.version_max
FROM served s
LEFT JOIN gone g USING (run, group_id)
LEFT JOIN admission a USING (run, group_id)
LEFT JOIN pooled p USING (run, group_id)
LEFT JOIN lent USING (run, group_id)
LEFT JOIN training t USING (run, group_id)
LEFT JOIN steps st ON st.run = s.run AND st.applied_offset = t.applied_offset
LEFT JOIN undone u USING (run, group_id)
LEFT JOIN tried d USING (run, group_id)
LEFT JOIN committed c USING (run, group_id);

-- @worker_ends: what shows how much of a worker was heard after its end; workers that neither is known of are left out
CREATE TABLE worker_ends AS
WITH read_back AS (  -- its payload journal was read back, and not empty
    SELECT DISTINCT run, worker FROM attempt_rows
    WHERE adopted <> 0 OR (abandoned_offset IS NOT NULL AND reason IN ('restart', 'worker_lost') AND durable > prefix)
), died AS (
    SELECT run, worker, min(event_offset) AS died_offset FROM raw.worker_stopped WHERE reason = 'worker_lost' GROUP BY ALL
)
SELECT coalesce(r.run, d.run) AS run, coalesce(r.worker, d.worker) AS worker, r.worker IS NOT NULL AS read_back, d.died_offset
FROM read_back r FULL JOIN died d ON d.run = r.run AND d.worker = r.worker;

-- @attempts
CREATE VIEW attempts AS
SELECT *, ended_s - dispatched_s AS seconds FROM (
WITH placed AS (
    SELECT j.* EXCLUDE (tokens), j.tokens AS sealed_tokens, j.dispatched_event_offset AS dispatched_offset,
           j.sealed_event_offset AS sealed_offset,
           -- the next attempt's prefix may be an earlier attempt's: then only what both had reused goes on from here
           CASE WHEN j.next_prefix_from IN (-1, j.attempt) THEN j.next_prefix END AS from_here,
           coalesce(i.incarnation, incarnation_before(j.run, j.dispatched_event_offset)) AS incarnation,
           i.next_offset, i.status AS life, i.died_min_s, i.died_max_s, i.last_event_s,
           coalesce(j.sealed_event_offset, j.failed_offset, j.abandoned_offset) AS ended_offset,
           coalesce(j.sealed_t, j.failed_t, j.abandoned_t) AS ended_t
    FROM attempt_rows j LEFT JOIN incarnations i ON i.run = j.run AND i.life = life_of(j.run, j.dispatched_event_offset)
), judged AS (
    SELECT *,
           -- ended in a later incarnation: the process that ran it had died before
           coalesce(ended_offset >= next_offset, next_offset IS NOT NULL) AS outlived,
           -- tokens at its end as far as known, reused prefix included; what goes on in the next attempt was there
           -- (a trace does not say: -1)
           CASE WHEN coalesce(sealed_tokens, failed_tokens, abandoned_tokens) = -1 THEN NULL
                ELSE greatest(coalesce(sealed_tokens, failed_tokens, abandoned_tokens, 0), prefix, from_here, reused) END
               AS held
    FROM placed
), held_and_kept AS (
    SELECT *,
           CASE WHEN held IS NULL THEN NULL
                WHEN sealed_offset IS NOT NULL AND abandoned_offset IS NULL THEN held
                WHEN next_prefix IS NOT NULL THEN greatest(coalesce(from_here, least(next_prefix, prefix)), reused)
                WHEN coalesce(sealed_offset, failed_offset, abandoned_offset) IS NULL THEN held
                WHEN sealed_offset IS NULL AND abandoned_offset IS NOT NULL THEN least(durable, held)
                ELSE 0 END AS kept,
           -- its worker told how it ended: not if that was dead by then
           sealed_offset IS NOT NULL OR failed_offset IS NOT NULL
               OR (abandoned_offset IS NOT NULL AND NOT outlived AND reason NOT IN ('restart', 'worker_lost')
                   AND coalesce(died_offset > abandoned_offset, TRUE)) AS heard,
           -- its durable tokens were looked up, in a payload journal that was there. Nobody looks for those of a group
           -- that is given up; and where a worker's journal has nothing of all that ran on it, it may be lost
           abandoned_offset IS NOT NULL AND reason IN ('restart', 'worker_lost') AND coalesce(read_back, FALSE) AS looked_up
    FROM judged LEFT JOIN worker_ends USING (run, worker)
)
SELECT j.run, j.group_id, j.sibling, j.attempt, j.incarnation, j.worker, j.branch, j.version, j.prefix,
       j.dispatched_offset, j.dispatched_t / 1e6 AS dispatched_s, j.ended_offset,
       CASE WHEN outlived THEN greatest(died_min_s, dispatched_t / 1e6)
            WHEN ended_t IS NOT NULL THEN ended_t / 1e6
            ELSE last_event_s END AS ended_s,
       CASE WHEN outlived THEN greatest(died_max_s, dispatched_t / 1e6)
            WHEN ended_t IS NOT NULL THEN ended_t / 1e6 END AS ended_max_s,
       CASE WHEN sealed_offset IS NOT NULL THEN 'sealed' WHEN failed_offset IS NOT NULL THEN 'failed'
            WHEN abandoned_offset IS NOT NULL THEN 'abandoned' ELSE 'open' END AS outcome,
       CASE WHEN sealed_offset IS NOT NULL THEN NULL
            WHEN failed_offset IS NOT NULL THEN failed_kind ELSE j.reason END AS reason,
       cause,
       outlived AND life = 'killed' AS killed,
       coalesce(adopted, 0) <> 0 AS adopted,
       CASE WHEN sealed_offset IS NOT NULL THEN abandoned_offset END AS lost_offset,
       CASE WHEN sealed_offset IS NOT NULL THEN j.reason END AS lost_reason,
       held AS tokens,
       held - prefix AS new_tokens,
       kept AS kept_tokens,
       held - kept AS thrown_tokens,
       -- one chunk being gathered and one being written, and never more than a response may have (bounds.py)
       CASE WHEN heard THEN 0
            WHEN b.response IS NULL THEN CASE WHEN looked_up THEN b.chunks END
            WHEN NOT looked_up OR b.chunks IS NULL THEN greatest(b.response - held, 0)
            ELSE least(b.chunks, greatest(b.response - held, 0)) END AS hidden_max,
       CASE WHEN sealed_offset IS NOT NULL AND abandoned_offset IS NULL
                 THEN CASE WHEN g.status IN ('claimed', 'committed', 'complete') THEN 'buffered'
                           WHEN g.status IN ('trained', 'discarded', 'evicted') THEN g.status ELSE 'partial' END
            WHEN next_prefix IS NOT NULL THEN 'continued'
            WHEN g.status IN ('discarded', 'evicted') THEN g.status
            WHEN coalesce(sealed_offset, failed_offset, abandoned_offset) IS NULL THEN 'in_flight'
            ELSE 'prefix' END AS fate,
       next_prefix, reward, j.truncated <> 0 AS truncated, j.prompt_tokens, j.version_min, j.version_max
FROM held_and_kept j LEFT JOIN groups g USING (run, group_id) LEFT JOIN bounds b USING (run)
);

-- @carried: seconds that a continued attempt took over from the ones before it, in proportion to the tokens kept
CREATE TABLE carried AS
WITH RECURSIVE again AS (
    SELECT * FROM attempts WHERE attempt > 0
), begin AS (  -- where the beginning of a run is not here, a sibling's first attempt may be any
    SELECT * FROM attempts WHERE attempt = 0 AND next_prefix IS NOT NULL
    UNION ALL
    SELECT a.* FROM again a WHERE a.next_prefix IS NOT NULL AND NOT EXISTS (
        SELECT 1 FROM attempts b
        WHERE b.run = a.run AND b.group_id = a.group_id AND b.sibling = a.sibling AND b.attempt = a.attempt - 1)
), chains AS (
    SELECT run, group_id, sibling, attempt, 0.0::DOUBLE AS carried_s, ended_s - dispatched_s AS seconds,
           coalesce(kept_tokens / nullif(tokens, 0), 0) AS kept_share
    FROM begin
    UNION ALL
    SELECT n.run, n.group_id, n.sibling, n.attempt, (c.carried_s + c.seconds) * c.kept_share, n.ended_s - n.dispatched_s,
           coalesce(n.kept_tokens / nullif(n.tokens, 0), 0)
    FROM chains c JOIN again n
        ON n.run = c.run AND n.group_id = c.group_id AND n.sibling = c.sibling AND n.attempt = c.attempt + 1
)
SELECT run, group_id, sibling, attempt, carried_s FROM chains WHERE carried_s > 0;

-- @outages: from the end of an opening that worked to the next one that did; starts that came to nothing lie inside
CREATE TABLE outages AS
WITH first_dispatch AS (
    SELECT run, life_of(run, dispatched_event_offset) AS life, min(dispatched_t) AS t FROM attempt_rows GROUP BY ALL
), first_claim AS (
    SELECT run, life_of(run, event_offset) AS life, min(t) AS t FROM raw.step_claimed GROUP BY ALL
), completed AS (
    SELECT run, life_of(run, event_offset) AS life, min(event_offset) AS event_offset FROM raw.restore_completed GROUP BY ALL
), begun AS (
    SELECT i.*, d.t / 1e6 AS first_dispatch_s, k.t / 1e6 AS first_claim_s,
           coalesce(c.event_offset, d.t, k.t) IS NOT NULL OR i.life = 1 AS worked
    FROM incarnations i
    LEFT JOIN first_dispatch d USING (run, life)
    LEFT JOIN first_claim k USING (run, life)
    LEFT JOIN completed c USING (run, life)
), worked AS (
    SELECT *, lead(life) OVER (PARTITION BY run ORDER BY life) AS next_life FROM begun WHERE worked
), between_them AS (
    SELECT w.run, w.life, count(*) FILTER (b.life > w.life) AS starts,
           count(*) FILTER (b.status = 'killed' AND b.life < coalesce(w.next_life, 9e18)) AS kills, max(b.last_event_s) AS last_s
    FROM worked w JOIN begun b ON b.run = w.run AND b.life BETWEEN w.life AND coalesce(w.next_life, 9e18)
    GROUP BY ALL
)
SELECT w.run, w.life, w.incarnation, w.status, w.ended, w.next_offset, w.died_min_s, w.died_max_s,
       n.life AS next_life, n.incarnation AS restarted_as, x.starts, x.kills, n.first_dispatch_s,
       CASE WHEN n.life IS NULL THEN x.last_s ELSE coalesce(n.first_dispatch_s, n.first_claim_s, n.last_event_s) END AS until_s
FROM worked w
JOIN between_them x USING (run, life)
LEFT JOIN begun n ON n.run = w.run AND n.life = w.next_life
LEFT JOIN sources s ON s.run = w.run
WHERE w.next_offset IS NOT NULL AND (s.kind <> 'trace' OR EXISTS (  -- a trace may hold runs that are strangers
    SELECT 1 FROM raw.restore_started r WHERE r.run = w.run
        AND life_of(r.run, r.event_offset) BETWEEN w.life + 1 AND coalesce(w.next_life, 9e18)));

-- @restores
CREATE TABLE restores AS
WITH done AS (
    SELECT r.run, r.event_offset AS started_offset, r.t, r.checkpoint, r.name, r.from_version, r.to_version,
           life_of(r.run, r.event_offset) AS life,
           (SELECT min(c.event_offset) FROM raw.restore_completed c
            WHERE c.run = r.run AND c.event_offset > r.event_offset) AS next_completed,
           lead(r.event_offset) OVER (PARTITION BY r.run ORDER BY r.event_offset) AS next_started
    FROM raw.restore_started r
), completed AS (
    SELECT d.*, CASE WHEN d.next_completed < coalesce(d.next_started, 9e18) THEN d.next_completed END AS completed_offset,
           coalesce(life_of(d.run, d.next_started) > d.life, TRUE) AS last_of_life
    FROM done d
)
SELECT d.run, i.incarnation, d.started_offset, d.completed_offset, d.t / 1e6 AS started_s, c.t / 1e6 AS completed_s,
       c.seconds, d.checkpoint, d.name, d.from_version, d.to_version,
       o.incarnation AS after, o.status AS before, o.ended AS before_ended, o.died_min_s, o.died_max_s,
       CASE WHEN d.last_of_life AND d.life = o.next_life THEN o.starts END AS starts,
       CASE WHEN d.last_of_life AND d.life = o.next_life THEN o.kills END AS kills,
       CASE WHEN d.last_of_life AND d.life = o.next_life THEN o.first_dispatch_s END AS first_dispatch_s,
       (SELECT min(a.event_offset) FROM raw.step_claimed a
        WHERE a.run = d.run AND a.event_offset > d.completed_offset) AS first_claim_offset,
       i.first_offset, c.counters, c.timings
FROM completed d
LEFT JOIN incarnations i ON i.run = d.run AND i.life = d.life
LEFT JOIN outages o ON o.run = d.run AND d.life > o.life AND d.life <= coalesce(o.next_life, 9e18)
LEFT JOIN raw.restore_completed c ON c.run = d.run AND c.event_offset = d.completed_offset;

-- @restore_finds: what each restore found, by the events before it, beside what it told itself
CREATE VIEW restore_finds AS
WITH trained AS (
    SELECT r.run, r.incarnation, s.group_id
    FROM restores r JOIN step_groups s ON s.run = r.run AND s.applied_offset < r.completed_offset
        AND (s.rolled_back_offset IS NULL OR s.rolled_back_offset > r.completed_offset)
), taken AS (  -- spares and requeued prompts wait in the pool until one of these takes them out
    SELECT run, group_id, min(event_offset) AS event_offset
    FROM (SELECT run, value AS group_id, event_offset FROM raw.batch_reserved_pool_groups
          UNION ALL SELECT run, spare, event_offset FROM raw.prompt_replaced)
    GROUP BY ALL
), alive AS (
    SELECT r.run, r.incarnation, r.completed_offset, g.group_id, g.generations
    FROM restores r
    JOIN groups g ON g.run = r.run AND g.reserved_offset < r.completed_offset
        AND (g.gone_offset IS NULL OR g.gone_offset > r.completed_offset)
    LEFT JOIN taken x ON x.run = g.run AND x.group_id = g.group_id
    ANTI JOIN trained t ON t.run = r.run AND t.incarnation = r.incarnation AND t.group_id = g.group_id
    WHERE g.kind NOT IN ('spare', 'requeued') OR x.event_offset < r.completed_offset
), sealed AS (
    SELECT l.run, l.incarnation, l.group_id, count(*) AS siblings
    FROM alive l JOIN attempt_rows a ON a.run = l.run AND a.group_id = l.group_id
    WHERE a.sealed_event_offset < l.completed_offset
        AND (a.abandoned_offset IS NULL OR a.abandoned_offset > l.completed_offset)
    GROUP BY ALL
), judged AS (
    SELECT l.*, coalesce(s.siblings, 0) AS siblings, coalesce(s.siblings, 0) = l.generations AS complete
    FROM alive l LEFT JOIN sealed s USING (run, incarnation, group_id)
)
SELECT run, incarnation, count(*) FILTER (complete) AS groups_complete_restored,
       count(*) FILTER (NOT complete) AS groups_unfinished_found,
       coalesce(sum(siblings) FILTER (NOT complete), 0) AS siblings_reused,
       coalesce(sum(generations - siblings) FILTER (NOT complete), 0) AS siblings_rerun
FROM judged GROUP BY run, incarnation;

-- @losses
CREATE TABLE losses AS
WITH gone AS (
    SELECT g.run, g.group_id, g.reason, g.gone_offset, g.gone_s,
           CASE WHEN g.reason IN ('stale', 'stale_in_flight') AND EXISTS (
                    SELECT 1 FROM restores r
                    WHERE r.run = g.run AND g.gone_offset > r.completed_offset AND g.reserved_offset < r.first_offset
                        AND g.gone_offset < coalesce(r.first_claim_offset, 9e18)) THEN 'stale_at_restore'
                WHEN g.status = 'evicted' AND g.reason = 'stale' THEN 'stale_evicted'
                WHEN g.reason = 'stale_in_flight' THEN 'stale_aborted'
                ELSE g.reason END AS class
    FROM groups g
    WHERE g.status IN ('discarded', 'evicted')
), wasted AS (
    SELECT a.*, coalesce(c.carried_s, 0) + a.seconds AS invested_s,
           CASE WHEN a.tokens > 0 THEN a.thrown_tokens / a.tokens
                WHEN a.outcome IN ('failed', 'abandoned') OR a.lost_offset IS NOT NULL THEN 1 ELSE 0 END AS thrown_share,
           d.cut_s, gone.class AS gone_class, gone.gone_offset, gone.gone_s
    FROM attempts a
    LEFT JOIN carried c USING (run, group_id, sibling, attempt)
    LEFT JOIN deaths d ON a.killed AND d.run = a.run AND d.incarnation = a.incarnation
    LEFT JOIN gone ON gone.run = a.run AND gone.group_id = a.group_id
    WHERE a.thrown_tokens > 0 OR a.thrown_tokens IS NULL OR a.outcome IN ('failed', 'abandoned')
       OR a.lost_offset IS NOT NULL OR gone.class IS NOT NULL
), own AS (
    SELECT *, invested_s * thrown_share AS thrown_s FROM wasted WHERE outcome IN ('failed', 'abandoned') OR lost_offset IS NOT NULL
)
SELECT run,
       CASE WHEN lost_reason = 'payload_lost' THEN 'sealed_not_durable'
            WHEN lost_reason = 'prompt_group' THEN 'granularity'
            WHEN outcome = 'failed' THEN 'failed'
            WHEN reason = 'restart' THEN 'in_flight'
            WHEN reason = 'stale' THEN 'stale_aborted'
            WHEN reason = 'group_discarded' THEN coalesce(gone_class, reason)
            ELSE reason END AS class,
       'generation' AS resource, group_id, sibling, attempt, incarnation, worker,
       coalesce(lost_offset, ended_offset) AS event_offset, ended_s AS at_s,
       thrown_s AS seconds,
       -- what a kill hid: when it died, and how much of the time since the last durable token was the lost tail's
       CASE WHEN outcome <> 'abandoned' THEN thrown_s
            WHEN coalesce(kept_tokens, 0) = 0 THEN thrown_s + coalesce(ended_max_s - ended_s, 0)
            WHEN hidden_max IS NULL THEN thrown_s + (ended_max_s - dispatched_s)
            ELSE thrown_s + coalesce(ended_max_s - ended_s, 0) + coalesce((ended_s - dispatched_s) * hidden_max
                     / nullif(greatest(tokens - prefix, 0) + hidden_max, 0), 0) END AS seconds_max,
       CASE WHEN NOT killed THEN 0 WHEN coalesce(cut_s, -1) <= dispatched_s THEN 0
            ELSE thrown_s - least(thrown_s, greatest(ended_s - cut_s, 0)) END AS seconds_before_cut,
       CASE WHEN NOT killed THEN 0 WHEN coalesce(cut_s, -1) <= dispatched_s THEN thrown_s
            ELSE least(thrown_s, greatest(ended_s - cut_s, 0)) END AS seconds_after_cut,
       thrown_tokens AS tokens,
       thrown_tokens + hidden_max AS tokens_max,
       cause AS detail
FROM own
UNION ALL
SELECT run, gone_class, 'generation', group_id, sibling, attempt, incarnation, worker, gone_offset, gone_s,
       invested_s * (1 - thrown_share), invested_s * (1 - thrown_share), 0, 0, kept_tokens,
       kept_tokens + CASE WHEN outcome = 'open' THEN hidden_max ELSE 0 END, NULL
FROM wasted WHERE fate IN ('discarded', 'evicted')
    AND ((outcome = 'sealed' AND lost_offset IS NULL) OR kept_tokens > 0 OR outcome = 'open')
UNION ALL
SELECT run, 'rolled_back_training', 'trainer', NULL, NULL, NULL, NULL, NULL, rolled_back_offset, applied_s,
       train_seconds, train_seconds, 0, 0, 0, 0, 'step ' || step
FROM steps WHERE rolled_back
UNION ALL
SELECT run, 'restart_idle', 'wall', NULL, NULL, NULL, restarted_as, NULL, next_offset, died_max_s,
       greatest(until_s - died_max_s, 0), until_s - died_min_s, 0, 0, 0, 0, 'after incarnation ' || incarnation
FROM outages
UNION ALL
SELECT run, 'weight_sync_pause', 'wall', NULL, NULL, NULL, NULL, NULL, event_offset, t / 1e6,
       seconds, seconds, 0, 0, 0, 0, 'version ' || version
FROM raw.weights_synced WHERE seconds > 0;

-- @workers
CREATE VIEW workers AS
WITH counts AS (
    SELECT run, worker, tokens FROM raw.step_applied_generated
    UNION ALL SELECT run, worker, tokens FROM raw.run_ended_generated
    UNION ALL SELECT run, worker, generated FROM raw.worker_stopped WHERE generated >= 0
), counted AS (
    SELECT run, worker, max(tokens) AS counted_tokens FROM counts GROUP BY ALL
), stops AS (
    SELECT run, worker, arg_max(reason, event_offset) AS stopped, max(t) AS t, arg_max(generated, event_offset) AS generated
    FROM raw.worker_stopped GROUP BY ALL
), ends AS (
    SELECT run, worker FROM raw.run_ended_generated GROUP BY ALL
), work AS (
    SELECT run, worker, count(*) AS attempts, count(*) FILTER (outcome = 'sealed') AS sealed,
           count(*) FILTER (outcome = 'failed') AS failed, count(*) FILTER (outcome = 'abandoned') AS abandoned,
           count(*) FILTER (outcome = 'open') AS open, sum(new_tokens) AS new_tokens,
           sum(ended_s - dispatched_s) AS busy_s, min(dispatched_s) AS first_s, max(ended_s) AS last_s,
           CASE WHEN count(hidden_max) = count(*) THEN sum(hidden_max) END AS hidden_max
    FROM attempts GROUP BY ALL
)
SELECT coalesce(w.run, work.run) AS run, coalesce(w.worker, work.worker) AS worker, i.incarnation, w.journal, w.host,
       w.t / 1e6 AS started_s, st.t / 1e6 AS stopped_s, st.stopped,
       coalesce(st.generated >= 0, FALSE) OR ends.worker IS NOT NULL AS heard_last,
       work.* EXCLUDE (run, worker, hidden_max),
       CASE WHEN work.worker IS NULL AND heard_last THEN 0 ELSE work.hidden_max END AS hidden_max, counted.counted_tokens
FROM raw.worker_started w
FULL JOIN work ON work.run = w.run AND work.worker = w.worker
LEFT JOIN stops st ON st.run = w.run AND st.worker = w.worker
LEFT JOIN ends ON ends.run = w.run AND ends.worker = w.worker
LEFT JOIN counted ON counted.run = w.run AND counted.worker = w.worker
ASOF LEFT JOIN incarnations i ON i.run = w.run AND i.first_offset <= w.event_offset;

-- @spans
CREATE VIEW spans AS
SELECT run, group_id, sibling, attempt, 0 AS span, 0 AS first_token, tokens, span_branch AS branch,
       span_version AS version, sealed_event_offset AS sealed_offset
FROM attempt_rows WHERE span_version >= 0
UNION ALL
SELECT w.run, s.group_id, s.sibling, s.attempt, w.position, w.first_token,
       coalesce(lead(w.first_token) OVER (PARTITION BY w.run, w.event_offset ORDER BY w.position), s.tokens)
           - w.first_token,
       w.branch, w.version, w.event_offset
FROM raw.attempt_sealed_weight_spans w
JOIN attempt_rows s ON s.run = w.run AND s.sealed_event_offset = w.event_offset;

-- @batch_age
CREATE VIEW batch_age AS
WITH caps AS (  -- what a weight of an earlier branch counts as: a rollback capped it
    SELECT s.run, s.applied_offset, b.branch, min(r.to_version) AS cap
    FROM steps s
    JOIN (SELECT DISTINCT run, branch FROM raw.trainer_rolled_back UNION SELECT DISTINCT run, 0 FROM raw.run_started) b
        ON b.run = s.run AND b.branch < s.branch
    JOIN raw.trainer_rolled_back r ON r.run = s.run AND r.branch > b.branch AND r.branch <= s.branch
    GROUP BY ALL
), used AS (
    SELECT sg.run, sg.applied_offset, sg.step, p.tokens, p.branch, p.version
    FROM step_groups sg
    JOIN attempts a ON a.run = sg.run AND a.group_id = sg.group_id AND a.outcome = 'sealed' AND a.lost_offset IS NULL
    JOIN spans p ON p.run = a.run AND p.sealed_offset = a.ended_offset
    WHERE sg.applied_offset IS NOT NULL
)
SELECT u.run, u.step, s.branch, s.rolled_back, u.applied_offset,
       sum(u.tokens) AS tokens,
       sum(u.tokens * (u.step - least(u.version, coalesce(c.cap, u.version)))) / nullif(sum(u.tokens), 0) AS age_mean,
       min(u.step - least(u.version, coalesce(c.cap, u.version))) AS age_min,
       max(u.step - least(u.version, coalesce(c.cap, u.version))) AS age_max,
       count(DISTINCT (u.branch, u.version)) AS weights
FROM used u
JOIN steps s ON s.run = u.run AND s.applied_offset = u.applied_offset
LEFT JOIN caps c ON c.run = u.run AND c.applied_offset = u.applied_offset AND c.branch = u.branch
GROUP BY ALL;

-- @throughput
CREATE VIEW throughput AS
WITH width AS (
    SELECT run, greatest(1, 10 ** floor(log10(greatest(max(last_event_s) - min(started_s), 1) / 100))) AS width_s
    FROM incarnations GROUP BY run
), bins AS (
    SELECT a.run, floor(a.ended_s / w.width_s) * w.width_s AS bin_s,
           sum(a.new_tokens) FILTER (a.outcome = 'sealed') AS sealed_tokens,
           count(*) FILTER (a.outcome = 'sealed') AS sealed, count(*) FILTER (a.outcome = 'failed') AS failed,
           count(*) FILTER (a.outcome = 'abandoned') AS abandoned
    FROM attempts a JOIN width w USING (run) WHERE a.outcome <> 'open' AND a.ended_offset >= 0 GROUP BY ALL
), trained AS (
    SELECT s.run, floor(s.applied_s / w.width_s) * w.width_s AS bin_s, count(*) AS steps, sum(s.tokens) AS trained_tokens
    FROM steps s JOIN width w USING (run) GROUP BY ALL
)
SELECT run, bin_s, w.width_s, coalesce(b.sealed_tokens, 0) AS sealed_tokens, coalesce(b.sealed, 0) AS sealed,
       coalesce(b.failed, 0) AS failed, coalesce(b.abandoned, 0) AS abandoned,
       coalesce(t.steps, 0) AS steps, coalesce(t.trained_tokens, 0) AS trained_tokens,
       coalesce(b.sealed_tokens, 0) / w.width_s AS sealed_tokens_per_s
FROM bins b FULL JOIN trained t USING (run, bin_s) JOIN width w USING (run);

-- @trace_lines
CREATE VIEW trace_lines AS
SELECT run, line, t_s, trace_run, event, nullif(prompt_id, '') AS prompt_id,
       nullif(generation_index, -1) AS generation_index, nullif(attempt, -1) AS attempt, understood <> 0 AS understood,
       fields
FROM raw.trace_lines;

-- @runs
CREATE VIEW runs AS
WITH lives AS (
    SELECT run, any_value(run_id) AS run_id, count(*) AS incarnations, count(*) FILTER (status = 'killed') AS kills,
           arg_max(status, incarnation) AS status, arg_max(ended, incarnation) AS ended, min(started_s) AS started_s,
           max(last_event_s) AS last_event_s, min(started_wall_s) AS started_wall_s
    FROM incarnations GROUP BY run
), g AS (
    SELECT run, count(*) AS groups, count(*) FILTER (status = 'trained') AS groups_trained,
           count(DISTINCT (sample_id, epoch)) AS prompts FROM groups GROUP BY run
), a AS (
    SELECT run, count(*) AS attempts, sum(new_tokens) AS new_tokens,
           sum(kept_tokens) FILTER (fate = 'trained') AS trained_tokens FROM attempts GROUP BY run
), s AS (
    SELECT run, count(*) FILTER (NOT rolled_back) AS steps, count(*) FILTER (rolled_back) AS steps_rolled_back
    FROM steps GROUP BY run
)
SELECT sources.run, sources.path, sources.kind AS source, lives.* EXCLUDE (run),
       reach.first_offset, coalesce(reach.last_offset + 1 - reach.first_offset, 0) AS events, g.* EXCLUDE (run), a.* EXCLUDE (run),
       s.* EXCLUDE (run)
FROM sources LEFT JOIN lives USING (run) LEFT JOIN reach USING (run) LEFT JOIN g USING (run) LEFT JOIN a USING (run) LEFT JOIN s USING (run);

-- @reconcile
CREATE VIEW reconcile AS
WITH a AS (
    SELECT run, count(*) AS dispatched, count(*) FILTER (outcome = 'sealed') AS sealed,
           count(*) FILTER (outcome = 'failed') AS failed, count(*) FILTER (outcome = 'abandoned') AS abandoned,
           count(*) FILTER (outcome = 'open') AS open,
           sum(new_tokens) AS new_tokens, sum(thrown_tokens) AS thrown, count(*) FILTER (tokens IS NULL) AS untold,
           sum(kept_tokens) FILTER (fate = 'trained') AS trained,
           sum(kept_tokens) FILTER (fate = 'buffered') AS buffered,
           sum(kept_tokens) FILTER (fate IN ('partial', 'in_flight', 'prefix')) AS in_flight,
           sum(kept_tokens) FILTER (fate = 'evicted') AS evicted,
           sum(kept_tokens) FILTER (fate = 'discarded') AS discarded,
           sum(ended_s - dispatched_s) AS seconds,
           sum(ended_s - dispatched_s) FILTER (outcome = 'open') AS open_seconds
    FROM attempts GROUP BY run
), ends AS (
    SELECT e.run FROM (
        SELECT run, group_id, sibling, attempt FROM raw.attempt_failed
        UNION ALL SELECT run, group_id, sibling, attempt FROM raw.attempt_abandoned
        UNION ALL SELECT run, group_id, sibling, attempt FROM single_sealed
    ) e ANTI JOIN attempt_rows USING (run, group_id, sibling, attempt)
), r AS (
    SELECT run, (SELECT count(*) FROM raw.attempt_dispatched d WHERE d.run = runs.run) AS dispatched,
           (SELECT count(*) FROM raw.attempt_sealed d WHERE d.run = runs.run) AS sealed,
           (SELECT count(*) FROM raw.attempt_failed d WHERE d.run = runs.run) AS failed,
           (SELECT count(*) FROM raw.attempt_abandoned d WHERE d.run = runs.run) AS abandoned,
           (SELECT count(*) FROM attempts d WHERE d.run = runs.run AND d.lost_offset IS NOT NULL) AS lost,
           -- where not all of a run is here, what began in the part that is not
           CASE WHEN runs.source = 'segment' OR runs.first_offset > 0 OR EXISTS (FROM unread u WHERE u.run = runs.run)
                THEN (SELECT count(*) FROM ends d WHERE d.run = runs.run) ELSE 0 END AS begun_before
    FROM runs
), w AS (
    SELECT run, count(counted) AS counting,
           sum(attributed - counted) FILTER (heard_last AND counted < attributed) AS missing,
           sum(greatest(counted - attributed - hidden_max, 0)) FILTER (heard_last) AS told_beyond,
           sum(greatest(counted - attributed - hidden_max, 0)) FILTER (NOT heard_last) AS beyond,
           sum(greatest(counted - attributed, 0)) FILTER (heard_last) AS told_min,
           CASE WHEN bool_or(hidden_max IS NULL AND heard_last) THEN NULL
                ELSE coalesce(sum(hidden_max) FILTER (heard_last), 0) END AS told_max,
           sum(greatest(counted - attributed, 0)) FILTER (NOT heard_last) AS unknown_min,
           CASE WHEN bool_or(hidden_max IS NULL AND attempts > 0) THEN NULL ELSE sum(hidden_max) END AS unknown_max
    -- of a worker whose start is not in what was loaded, earlier attempts are not either: its count can't be compared
    FROM (SELECT run, worker, heard_last, hidden_max, attempts, counted_tokens AS counted, coalesce(new_tokens, 0) AS attributed
          FROM workers WHERE started_s IS NOT NULL)
    GROUP BY run
), l AS (
    SELECT run, sum(tokens) AS tokens, sum(seconds) FILTER (resource = 'generation') AS seconds,
           sum(seconds_max) FILTER (resource = 'generation') AS seconds_max
    FROM losses GROUP BY run
), useful AS (
    SELECT a.run, sum((coalesce(c.carried_s, 0) + a.ended_s - a.dispatched_s)) AS seconds
    FROM attempts a LEFT JOIN carried c USING (run, group_id, sibling, attempt)
    WHERE a.outcome = 'sealed' AND a.lost_offset IS NULL AND a.fate IN ('trained', 'buffered', 'partial')
    GROUP BY a.run
), inherited AS (  -- of siblings whose first attempts are not here: tokens of those that later ones went on from
    SELECT run, sum(prefix) - coalesce(sum(kept_tokens) FILTER (next_prefix IS NOT NULL), 0) AS tokens
    FROM (SELECT * FROM attempts WHERE attempt > 0) a
    ANTI JOIN (SELECT * FROM attempt_rows WHERE attempt = 0) z USING (run, group_id, sibling)
    GROUP BY run
), waiting AS (
    SELECT a.run, sum((coalesce(c.carried_s, 0) + a.ended_s - a.dispatched_s)
               * CASE WHEN a.outcome = 'open' THEN 1 ELSE coalesce(a.kept_tokens / nullif(a.tokens, 0), 0) END) AS seconds
    FROM attempts a LEFT JOIN carried c USING (run, group_id, sibling, attempt)
    WHERE a.fate IN ('prefix', 'in_flight')
    GROUP BY a.run
)
SELECT a.run, 'attempts' AS what, 'dispatched = sealed + failed + abandoned + open' AS rule,
       r.dispatched::DOUBLE AS expected, (r.sealed + r.failed + r.abandoned - r.lost - r.begun_before + a.open)::DOUBLE AS found,
       expected - found AS residue, 0::DOUBLE AS unknown_min, 0::DOUBLE AS unknown_max, expected = found AS ok
FROM a JOIN r USING (run)
UNION ALL
SELECT a.run, 'token fates', 'tokens in events = trained + buffered + in flight + evicted + discarded + thrown away',
       a.new_tokens + coalesce(i.tokens, 0), coalesce(a.trained, 0) + coalesce(a.buffered, 0) + coalesce(a.in_flight, 0) + coalesce(a.evicted, 0)
           + coalesce(a.discarded, 0) + coalesce(a.thrown, 0) AS found,
       a.new_tokens + coalesce(i.tokens, 0) - found, 0, 0, a.new_tokens + coalesce(i.tokens, 0) = found
FROM a LEFT JOIN inherited i USING (run) WHERE a.untold = 0
UNION ALL
SELECT a.run, 'token losses', 'lost tokens, listed singly = evicted + discarded + thrown away',
       coalesce(l.tokens, 0), coalesce(a.evicted, 0) + coalesce(a.discarded, 0) + coalesce(a.thrown, 0) AS found,
       coalesce(l.tokens, 0) - found, 0, 0, coalesce(l.tokens, 0) = found
FROM a LEFT JOIN l USING (run) WHERE a.untold = 0
UNION ALL
SELECT w.run, 'worker counts',
       'tokens as workers told last = tokens in events, and in what was still running, for workers heard to the end',
       NULL, NULL, coalesce(w.told_beyond, 0) + coalesce(w.missing, 0) AS residue,
       coalesce(w.told_min, 0), w.told_max, residue = 0
FROM w WHERE w.counting > 0
UNION ALL
SELECT w.run, 'worker counts after a kill', 'tokens that workers had counted and no event tells of, within what a kill hides',
       NULL, NULL, coalesce(w.beyond, 0), coalesce(w.unknown_min, 0), w.unknown_max, coalesce(w.beyond, 0) = 0
FROM w WHERE w.counting > 0
UNION ALL
SELECT f.run, 'restore counters', 'what restores told = what the events before them show (groups and siblings)',
       sum(told) AS expected, sum(seen) AS found, sum(abs(told - seen)), 0, 0, sum(abs(told - seen)) = 0
FROM (
    SELECT f.run, unnest([f.groups_complete_restored, f.groups_unfinished_found, f.siblings_reused, f.siblings_rerun]) AS seen,
           unnest([(r.counters->>'$.groups_complete_restored')::BIGINT, (r.counters->>'$.groups_unfinished_found')::BIGINT,
                   (r.counters->>'$.siblings_reused')::BIGINT, (r.counters->>'$.siblings_rerun')::BIGINT]) AS told
    FROM restore_finds f JOIN restores r USING (run, incarnation)
    WHERE r.completed_offset IS NOT NULL
) f WHERE f.told IS NOT NULL GROUP BY f.run
UNION ALL
SELECT a.run, 'seconds', 'seconds of all attempts = of useful ones + lost + still in flight',
       a.seconds, coalesce(l.seconds, 0) + coalesce(u.seconds, 0) + coalesce(x.seconds, 0) AS found,
       a.seconds - found, 0, coalesce(l.seconds_max - l.seconds, 0), abs(a.seconds - found) <= 1e-6 * a.seconds + 1e-6
FROM a LEFT JOIN l USING (run) LEFT JOIN useful u USING (run) LEFT JOIN waiting x USING (run);


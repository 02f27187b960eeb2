"""What the SQL tables and their columns mean: the text of docs/sql.md, and of ``.tables`` and ``.schema`` at the prompt.

A test compares it with the database, both ways: no column without a word, no word without a column.
"""

from __future__ import annotations

from typing import Final

_TEXT: Final = """
runs: One row per source.
  run: name of the source, as in every other table: the run folder's or file's name
  path: where it was read from
  source: run, segment or trace
  run_id: the run's own id
  incarnations: openings of the run for writing
  kills: openings that did not end in order
  status: of the last opening: ended, open (running, or killed and not restarted)
  ended: reason of the orderly end, NULL if there was none
  started_s: first event
  last_event_s: last event
  started_wall_s: Unix time of the first opening
  first_offset: first event; more than 0 if what was before was pruned
  events: events from there on
  groups: prompts handed out; a requeued prompt counts again
  groups_trained: groups whose training stands
  prompts: different prompts, epoch by epoch
  attempts: attempts dispatched
  new_tokens: tokens that the attempts' own events tell of
  trained_tokens: tokens of groups whose training stands
  steps: steps that stand
  steps_rolled_back: steps undone by a restore

incarnations: One row per opening of a run for writing. A killed one died between two known moments.
  life: 1, 2, … in the order of opening
  incarnation: the number that the opening carries
  run_id: the run's own id
  host: machine of the controller
  pid: process of the controller
  first_offset: its first event; below 0 if that was pruned
  last_offset: its last event
  next_offset: first event of the next opening, NULL for the last
  started_s: RunStarted
  last_event_s: its last event
  next_started_s: RunStarted of the next opening
  started_wall_s: RunStarted as Unix time
  ended: reason of the orderly end
  status: ended, killed, or open (the last one, without an end)
  died_min_s: it still lived: its last durable event
  died_max_s: it was dead: the next RunStarted; NULL if there is none

groups: One row per group (a prompt and its siblings), from reservation to training.
  group_id: id, never reused in a run
  sample_id: the dataset's id of the prompt
  epoch: pass over the dataset
  prompt_index: row in the dataset's order
  task: task of the prompt
  kind: ordinary, spare, pool, or requeued
  admission_id: batch that it was reserved in; NULL if that was pruned
  generations: siblings
  status: pool, reserved, unfinished, complete, committed, claimed, trained, discarded or evicted
  reason: why it was discarded or evicted
  gone_offset: event that discarded or evicted it
  gone_s: when
  requeued_as: group under which its prompt lives on
  requeued_from: group whose prompt it took over
  reserved_offset: event that made it
  reserved_s: taken from the loader
  admitted_s: admitted by the sampler
  dispatched_s: first attempt
  complete_s: last seal, once all siblings are sealed
  committed_s: rows in the data plane
  claimed_s: last claimed by the trainer
  applied_s: end of the step that trained it, if that stands
  target_step: step that it was stamped for
  dispatch_index: the sampler's cursor at its admission
  trained_step: step that trained it, if that stands
  times_trained: steps that trained it and stand: 0 or 1, or promise P1 is broken
  times_applied: steps that trained it, undone ones included
  attempts: attempts at its siblings
  sealed: siblings that are sealed
  tokens: tokens of the sealed siblings
  reward_mean: of the sealed siblings
  version_min: oldest weights in it
  version_max: newest weights in it

attempts: One row per attempt at a sibling. Tokens include the reused prefix unless they are new.
  group_id: group
  sibling: 0, 1, …
  attempt: 0, 1, …
  incarnation: opening that dispatched it
  worker: worker that ran it
  branch: branch of the weights at dispatch
  version: version of the weights at dispatch
  prefix: tokens reused from the sibling's attempt before
  dispatched_offset: event
  dispatched_s: when
  ended_offset: seal, failure or abandonment; may lie in a later opening
  ended_s: when it stopped running; after a kill, the last moment at which it may be known to have run
  ended_max_s: the same, upper bound; NULL while it may still run
  outcome: sealed, failed, abandoned or open
  reason: why it was abandoned, or the kind of its failure
  cause: text of its failure
  killed: its controller died while it ran
  adopted: its seal was taken over by a restore
  lost_offset: event that gave it up after its seal
  lost_reason: why: payload_lost, or prompt_group
  tokens: tokens at its end, as far as known
  new_tokens: of these, made by this attempt
  kept_tokens: of these, sealed, continued by the next attempt, or durable and waiting for it
  thrown_tokens: of these, thrown away when it ended
  hidden_max: tokens beyond these that it had made and no event tells of, at most: of a cut-off one, and of one without an end all that is left of a response; NULL if the settings are not known
  fate: what became of the kept ones: trained, buffered, partial (sealed, siblings are not), continued, prefix (durable, waiting), in_flight, discarded, evicted
  next_prefix: tokens that the next attempt reused
  reward: of a sealed one
  truncated: it reached the length limit
  prompt_tokens: length of the prompt
  version_min: oldest weights in it
  version_max: newest weights in it
  seconds: ended_s - dispatched_s

steps: One row per applied training step, undone ones included.
  step: trainer version that it started from
  branch: branch of the weights; a rollback starts a new one
  trainer_version: version that it made
  applied_offset: event; identifies the step, since a number may be applied again after a rollback
  claimed_s: first claim
  applied_s: end
  train_seconds: as the trainer measured
  loss: loss
  reward_mean: mean reward
  tokens: tokens trained
  metrics: JSON
  rolled_back_offset: event that undid it
  rolled_back: whether it was undone

step_groups: Which groups the trainer took, for which step.
  step: step
  group_id: group
  claim_offset: event of the claim
  claimed_s: when
  applied_offset: the step's end; NULL if no step came of the claim
  rolled_back_offset: event that undid claim or step

checkpoints: One row per checkpoint that was begun or skipped.
  checkpoint: id; NULL for a skipped one
  kind: trainer or rollout
  trainer_version: version that it saves
  cut: offset that it names
  cut_s: when
  outcome: committed, failed, skipped, or unfinished
  reason: of a failure or a skip
  ended_offset: event that ended it
  ended_s: when
  seconds: as measured
  name: folder
  bytes: size
  rows: rows in its snapshot
  rows_missing: rows that the fold owned and the snapshot lacked
  clears_deferred: clears that waited for it
  floor: oldest version that a restore may still fall back to

restores: One row per restore that was begun.
  incarnation: opening that restored
  started_offset: event
  completed_offset: event; NULL if it was interrupted
  started_s: when
  completed_s: when
  seconds: as measured
  checkpoint: checkpoint that it went back to, -1: step 0
  name: folder of it
  from_version: trainer version in the journal
  to_version: trainer version restored
  after: opening that worked last, whose attempts it takes over; starts that came to nothing lie between
  before: status of that opening: killed or ended
  before_ended: reason of its orderly end
  died_min_s: that opening still lived
  died_max_s: that opening was dead
  starts: openings since then, this one included; NULL if this restore was not the one that led to work
  kills: of that opening and of those between, how many were killed; NULL likewise
  first_dispatch_s: first attempt after the restore, in its opening
  first_claim_offset: first claim after the restore
  first_offset: first event of the opening
  counters: JSON, all restore counters
  timings: JSON, seconds by phase

outages: One row per time without work: from the end of an opening that worked to the next one that did. Starts that ended before their restore was complete lie inside.
  life: number of the opening that ended, in the order of opening
  incarnation: the number that it carries
  status: killed or ended
  ended: reason of its orderly end
  next_offset: first event of the next start
  died_min_s: it still lived: its last durable event
  died_max_s: it was dead
  next_life: number of the opening that worked next; NULL if there is none yet
  restarted_as: the number that it carries
  starts: openings since then, up to that one
  kills: how many of them, and of the one that ended, were killed
  first_dispatch_s: first attempt of the opening that worked next
  until_s: end of the outage: that attempt, else that opening's first claim or end; the last event if there is no such opening

restore_finds: What each completed restore found, counted from the events before it.
  incarnation: opening that restored
  groups_complete_restored: complete groups, in the buffer or about to be
  groups_unfinished_found: groups with siblings missing, also those never dispatched
  siblings_reused: sealed siblings of the unfinished groups, adopted ones included
  siblings_rerun: the others

losses: One row per loss. Add seconds up within one resource only: a second of an attempt, of the trainer and of the wall differ.
  class: in_flight (ran when the controller died), sealed_not_durable (payload lost), granularity (sealed, given up with its group), failed, worker_lost, weight_sync, stopped, stale_aborted, stale_evicted, stale_at_restore, dropped, filtered, poisoned, rolled_back_training, restart_idle, weight_sync_pause, or another reason from the journal
  resource: generation (attempt-seconds), trainer (training seconds), wall (seconds of the whole run)
  group_id: group
  sibling: sibling
  attempt: attempt
  incarnation: opening that it ran in
  worker: worker
  event_offset: event that tells of it
  at_s: when
  seconds: thrown away for certain
  seconds_max: upper bound: what a kill hid included; NULL if there is none
  seconds_before_cut: of the seconds of a kill, those before the last published cut (TRACE rule: cut - dispatch)
  seconds_after_cut: of the seconds of a kill, those after it, never saved
  tokens: thrown away for certain
  tokens_max: upper bound; NULL if there is none
  detail: cause, step or checkpoint

workers: One row per rollout worker, with its own token count beside what events tell.
  worker: id, never reused
  incarnation: opening that started it
  journal: its payload journal
  host: machine
  started_s: ready
  stopped_s: gone; NULL if no event says so
  stopped: reason
  heard_last: it told its count when it stopped
  attempts: attempts that it ran
  sealed: of these
  failed: of these
  abandoned: of these
  open: of these
  new_tokens: tokens of its attempts, by their events
  busy_s: seconds of its attempts, added up
  first_s: first dispatch
  last_s: last end
  hidden_max: tokens of its cut-off and open attempts (those whose dispatch is in the journal) that no event tells of, at most; NULL if there are none or the settings are not known
  counted_tokens: its own count, last told with a step, a stop or the run's end

spans: Which weights made which tokens of a sealed attempt.
  group_id: group
  sibling: sibling
  attempt: attempt
  span: 0, 1, … within the attempt
  first_token: index of the first
  tokens: how many
  branch: branch of the weights
  version: version of the weights
  sealed_offset: event of the seal

batch_age: One row per applied step: weight updates between generating a token and training on it, weighted by tokens.
  step: step
  branch: branch of the step
  rolled_back: whether it was undone
  applied_offset: event of the step
  tokens: tokens trained
  age_mean: mean age
  age_min: youngest
  age_max: oldest
  weights: different weights in the batch

throughput: One row per bin of time in which an attempt ended or a step was applied. The bin's width is a power of ten, at most 1000 bins a run.
  bin_s: start
  width_s: width
  sealed_tokens: new tokens of attempts sealed in it
  sealed: attempts
  failed: attempts
  abandoned: attempts
  steps: steps applied
  trained_tokens: tokens of these
  sealed_tokens_per_s: sealed_tokens / width_s

events: One row per event, as in the journal. raw.<event> has each kind's own columns.
  event_offset: offset
  t_s: when
  event: kind
  group_id: group, where the event names one
  sibling: sibling, likewise
  attempt: attempt, likewise
  fields: JSON; lists are in raw.<event>_<field>

trace_lines: One row per line of a rollout trace, recognised or not.
  line: number in the file, from 1
  t_s: time of the line
  trace_run: the line's run: a new one per process
  event: name
  prompt_id: prompt
  generation_index: sibling
  attempt: attempt
  understood: whether it became an event of the other tables
  fields: JSON, the whole line

reconcile: One row per run and sum that must come out. The report leads with any that does not.
  what: name
  rule: in words
  expected: one side
  found: the other side
  residue: what is left over; 0 if all is well
  unknown_min: lower bound of what a kill hid or attempts without an end hold, where that enters
  unknown_max: upper bound; NULL if the settings are not known
  ok: whether the residue is 0: what nobody could tell of is not counted as one

sources: What was loaded.
  path: path
  kind: run, segment or trace

unread: Stretches of a source that could not be read. The other tables know nothing of them, and sums over the run lack them.
  first_offset: first event left out
  last_offset: last event left out; NULL in a single segment: the rest of the file
  problem: what is wrong, and what can be done

notes: What could not be read, and was left out.
  position: order
  note: text
"""

INTERNAL: Final = frozenset(
    {
        "attempt_rows",
        "bounds",
        "carried",
        "deaths",
        "event_index",
        "reach",
        "single_sealed",
        "seconds_by_attempt",
        "worker_ends",
    }
)
"""Parts that the views are made of; they may change with any release."""


def documented() -> dict[str, tuple[str, dict[str, str]]]:
    """Table → (what it is, column → what it is). Every table but ``notes`` has ``run`` first."""
    found: dict[str, tuple[str, dict[str, str]]] = {}
    for block in _TEXT.strip().split("\n\n"):
        head, *lines = block.split("\n")
        name, _, text = head.partition(": ")
        columns = {} if name in ("runs", "notes") else {"run": "name of the source"}
        for line in lines:
            column, _, doc = line.strip().partition(": ")
            columns[column] = doc
        found[name] = (text, columns)
    return found

"use strict";
// Draws the charts of the report from the JSON in the page. uPlot gives axes, zoom, cursor and lines; the two timelines
// are painted on its canvas. No chart needs the mouse: buttons and keys do the same, and the tables say it in numbers.
(() => {
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const clamp = (v, a, b) => Math.min(Math.max(v, a), b);

// --- words and numbers ---------------------------------------------------------------------------------------------
function clock(s) {
  if (s == null) return "";
  const sign = s < 0 ? "-" : "", a = Math.abs(s), h = Math.floor(a / 3600), m = Math.floor(a % 3600 / 60), r = a % 60;
  const pad = (v) => String(v).padStart(2, "0");
  const sec = Number.isInteger(+r.toFixed(3)) ? pad(Math.round(r)) : r.toFixed(2).padStart(5, "0");
  return sign + (h ? h + ":" + pad(m) : m) + ":" + sec;
}
const number = (v) => v == null ? "" : v.toLocaleString("en", {maximumFractionDigits: 2, signDisplay: "negative"});  // no "-0"

// --- attempts, unpacked --------------------------------------------------------------------------------------------
const column = (c) => Array.isArray(c) ? c : c.at.map((i) => i == null ? null : c.words[i]);
const columns = Object.fromEntries(Object.entries(data.attempts.columns).map(([k, c]) => [k, column(c)]));
const attempts = (columns.group_id || []).map((_, i) => Object.fromEntries(Object.keys(columns).map((k) => [k, columns[k][i]])));
const workers = new Map(data.timeline.workers.map((w) => [w.worker, w]));
const exact = data.attempts.listed === data.attempts.total;
const KINDS = {
  trained: {name: "trained", colour: "trained"}, buffered: {name: "kept (buffered, waiting, continued)", colour: "buffered"},
  flight: {name: "in flight", colour: "flight"}, thrown: {name: "cut off by a kill, stop or lost worker", colour: "thrown", hatch: true},
  failed: {name: "failed", colour: "failed", hatch: true}, stale: {name: "stale, dropped or evicted", colour: "stale"},
};
const shown = new Set(Object.keys(KINDS));
function kind(a) {
  if (a.outcome === "open") return "flight";
  if (a.outcome === "failed") return "failed";
  if (a.outcome === "abandoned") return a.reason === "group_discarded" || a.reason === "stale" ? "stale" : "thrown";
  if (a.lost_reason) return "thrown";
  if (a.fate === "trained") return "trained";
  return a.fate === "evicted" || a.fate === "discarded" ? "stale" : "buffered";
}
for (const a of attempts) a.kind = kind(a);
// A writing direction that text sets ends with it.
const apart = (text) => (/[\u202a-\u202e\u2066-\u2069]/.test(text) ? "\u2068" + text + "\u2069" : text);
function tell(a) {
  const end = a.outcome === "sealed" ? "sealed" + (a.adopted ? " (adopted by the restore)" : "") + (a.lost_reason ? ", then lost: " + a.lost_reason : "") + ", " + a.fate
    : a.outcome === "open" ? "still open" : a.outcome + ": " + apart(a.reason) + (a.killed ? " (killed)" : "");
  const tokens = a.tokens == null ? "tokens unknown" : number(a.tokens) + " tokens" + (a.prefix ? ", " + number(a.prefix) + " of them reused" : "") +
    (a.thrown_tokens ? ", " + number(a.thrown_tokens) + " thrown away" : "");
  const until = a.killed && a.ended_max_s != null && a.ended_max_s > a.ended_s ? clock(a.ended_s) + " to " + clock(a.ended_max_s) : clock(a.ended_s);
  return `group ${a.group_id}, sibling ${a.sibling}, attempt ${a.attempt}: ${end}\n${tokens}\n${clock(a.dispatched_s)} – ${until} (${number(a.ended_s - a.dispatched_s)} s)\n` +
    `worker ${a.worker}, weights ${a.branch}.${a.version}, incarnation ${a.incarnation}`;
}

// --- sub-slots: attempts of a worker that overlap lie beside each other ---------------------------------------------
const byWorker = new Map();
for (const a of attempts) { if (!byWorker.has(a.worker)) byWorker.set(a.worker, []); byWorker.get(a.worker).push(a); }
for (const list of byWorker.values()) {
  list.sort((x, y) => x.dispatched_s - y.dispatched_s);
  const ends = [];
  for (const a of list) {
    let slot = ends.findIndex((e) => e <= a.dispatched_s);
    if (slot < 0) { slot = ends.length; ends.push(0); }
    ends[slot] = a.ended_s; a.slot = slot;
  }
  list.slots = ends.length; list.longest = list.reduce((m, a) => Math.max(m, a.ended_s - a.dispatched_s), 0);
}
const slotsMost = Math.max(1, ...[...byWorker.values()].map((l) => l.slots));
const cellMost = Math.max(1, ...Object.values(data.timeline.cells).flat().map((c) => c[1]));

// --- shared by all charts ------------------------------------------------------------------------------------------
const begin = data.timeline.begin_s, end = begin + data.timeline.width_s * (data.series.t.length - 1 || 1);
const charts = [];
const axis = (more) => Object.assign({stroke: css("dim"), grid: {stroke: css("line"), width: 1}, ticks: {stroke: css("line")}}, more);
const spacings = [...[1e-3, 1e-2, .1].flatMap((v) => [v, 2 * v, 5 * v]), 1, 2, 5, 10, 15, 30, ...[60, 120, 300, 600, 900, 1800], ...[1, 2, 3, 6, 12].map((h) => 3600 * h), ...[1, 2, 5, 10, 20, 50, 100].map((d) => 86400 * d)];
const timeAxis = () => axis({values: (u, ticks) => clocks(ticks), incrs: spacings, space: 70, label: "run clock, " + (end >= 3600 ? "h:mm:ss" : "m:ss"), labelSize: 20});
function clocks(ticks) {  // all in one form: as many decimals as the finest needs, hours if the run has any
  const digits = [0, 1, 2, 3].find((d) => ticks.every((t) => Math.abs(+t.toFixed(d) - t) < 1e-6)) ?? 3, pad = (v, n = 2) => String(v).padStart(n, "0");
  return ticks.map((t) => {
    const unit = 10 ** digits, all = Math.round(Math.abs(t) * unit), sec = Math.floor(all / unit), h = Math.floor(sec / 3600), m = Math.floor(sec % 3600 / 60);
    return (t < 0 ? "-" : "") + (end >= 3600 ? h + ":" + pad(m) : m) + ":" + pad(sec % 60) + (digits ? "." + pad(all % unit, digits) : "");
  });
}
const tip = $("tip");
function showTip(text, event) {
  if (!text) { tip.hidden = true; return; }
  tip.textContent = text; tip.hidden = false;
  const x = clamp(event.clientX + 14, 4, innerWidth - tip.offsetWidth - 4), y = event.clientY + 16;
  tip.style.left = x + "px"; tip.style.top = (y + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 10 : y) + "px";
}
function bar(ctx, x0, y0, x1, y1, colour, hatch) {
  const w = Math.max(x1 - x0, 1), h = Math.max(y1 - y0, 1);
  ctx.fillStyle = colour;
  if (!hatch || w < 4 || h < 3) { ctx.fillRect(x0, y0, w, h); return; }
  ctx.globalAlpha = .35; ctx.fillRect(x0, y0, w, h); ctx.globalAlpha = 1;
  ctx.save(); ctx.beginPath(); ctx.rect(x0, y0, w, h); ctx.clip(); ctx.strokeStyle = colour; ctx.lineWidth = 1.5; ctx.beginPath();
  const reach = Math.min(x1, ctx.canvas.width) + h;
  for (let x = Math.max(x0, -h) - h; x < reach; x += 6) { ctx.moveTo(x, y0 + h); ctx.lineTo(x + h, y0); }
  ctx.stroke(); ctx.strokeRect(x0 + .5, y0 + .5, w - 1, h - 1); ctx.restore();
}

// --- marks: cuts, kills, restores ----------------------------------------------------------------------------------
const marks = [];
for (const c of data.timeline.checkpoints) if (c.outcome === "committed")
  marks.push({from: c.cut_s, to: c.cut_s, what: "cut", text: `cut of ${c.kind} checkpoint ${c.checkpoint} (offset ${c.cut}, version ${c.trainer_version})\n${clock(c.cut_s)}, published ${clock(c.ended_s)}`});
for (const i of data.incarnations) {
  if (i.status === "killed") marks.push({from: i.died_min_s, to: i.died_max_s == null ? i.died_min_s : i.died_max_s, what: "kill", label: "killed", text: `incarnation ${i.incarnation} died between ${clock(i.died_min_s)} and ${clock(i.died_max_s)}`});
  if (i.status === "ended" && i.next_started_s != null) marks.push({from: i.last_event_s, to: i.next_started_s, what: "stop", label: "stopped", text: `incarnation ${i.incarnation} ended in order (${i.ended}) at ${clock(i.last_event_s)}; the next start was at ${clock(i.next_started_s)}`});
}
for (const r of data.restores) if (r.first_dispatch_s != null)
  marks.push({from: r.first_dispatch_s, to: r.first_dispatch_s, what: "restore", text: `incarnation ${r.incarnation} generates again after its restore from version ${r.to_version}\n${clock(r.first_dispatch_s)}`});
function paintMarks(u) {
  const {ctx, bbox} = u, bottom = bbox.top + bbox.height, x = (v) => u.valToPos(v, "x", true), px = devicePixelRatio;
  const seen = marks.filter((m) => m.to >= u.scales.x.min && m.from <= u.scales.x.max), cuts = seen.filter((m) => m.what === "cut").length;
  for (const m of seen) {
    if (m.what === "cut" && cuts > 150) continue;
    const a = x(m.from), b = x(m.to), off = m.what === "kill" || m.what === "stop";
    ctx.lineWidth = (off ? 2 : 1) * px; ctx.strokeStyle = css(m.what === "cut" ? "dim" : "mark");
    ctx.setLineDash({cut: [2 * px, 4 * px], restore: [8 * px, 3 * px], stop: [3 * px, 2 * px], kill: []}[m.what]);
    if (off) { ctx.globalAlpha = m.what === "kill" ? .16 : .05; ctx.fillStyle = css("mark"); ctx.fillRect(a, bbox.top, Math.max(b - a, 2 * px), bbox.height); ctx.globalAlpha = 1; }
    if (m.what === "cut") ctx.globalAlpha = .5;
    ctx.beginPath(); ctx.moveTo(a, bbox.top); ctx.lineTo(a, bottom); ctx.stroke(); ctx.globalAlpha = 1;
  }
  ctx.setLineDash([]);
  labels(u, seen.filter((m) => m.label).map((m) => [m.label, x(m.from)]), bbox.top + 2 * px, 1);
}
// Words beside vertical lines: inside the chart, on a ground of their own, one below (or above) another where they would overlap.
function placed(u, words) {
  const {ctx, bbox} = u, px = devicePixelRatio, rows = [];
  ctx.font = `${11 * px}px system-ui, sans-serif`;
  return words.filter(([, x]) => x >= bbox.left - px && x <= bbox.left + bbox.width + px).sort((v, w) => v[1] - w[1]).map(([text, x]) => {
    const width = ctx.measureText(text).width + 6 * px, right = x + width <= bbox.left + bbox.width, from = right ? x + 2 * px : x - width - 2 * px;
    let row = rows.findIndex((end) => end <= from);
    if (row < 0) row = rows.push(0) - 1;
    rows[row] = from + width + 4 * px;
    return {text, from, width, row};
  });
}
function labels(u, words, y, down) {
  const {ctx} = u, px = devicePixelRatio;
  ctx.textBaseline = "top"; ctx.textAlign = "left";
  for (const l of placed(u, words)) {
    const top = y + down * l.row * 14 * px;
    ctx.globalAlpha = .8; ctx.fillStyle = css("bg"); ctx.fillRect(l.from, top, l.width, 13 * px); ctx.globalAlpha = 1;
    ctx.fillStyle = css("fg"); ctx.fillText(l.text, l.from + 3 * px, top + px);
  }
}
function markAt(u, left) {
  const near = (m) => left >= u.valToPos(m.from, "x") - 4 && left <= u.valToPos(m.to, "x") + 4;
  const seen = marks.filter((m) => m.to >= u.scales.x.min && m.from <= u.scales.x.max);
  const cuts = seen.filter((m) => m.what === "cut").length;
  return seen.find((m) => near(m) && (m.what !== "cut" || cuts <= 150));
}

// --- a uPlot whose inside is painted by hand -------------------------------------------------------------------------
function wideAs(host, names) {  // pixels for the longest name, ticks and gap
  const ctx = document.createElement("canvas").getContext("2d");
  ctx.font = "12px system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'Noto Sans', sans-serif";
  return Math.ceil(Math.max(...names.map((n) => ctx.measureText(n).width), 10)) + 24;
}
function canvasChart(id, height, from, to, lanes, laneName, paint, at) {
  const host = $(id), pad = Math.max((to - from) * .01, 1e-3);
  const options = {
    width: host.clientWidth, height, legend: {show: false}, padding: [10, 8, 0, 0],
    scales: {x: {time: false}, y: {range: () => [0, lanes], dir: -1}},
    series: [{}, {paths: () => null, points: {show: false}}],
    axes: [timeAxis(), axis({size: wideAs(host, Array.from({length: Math.floor(lanes)}, (_, i) => laneName(i))), space: 1, grid: {show: false}, splits: () => Array.from({length: Math.floor(lanes)}, (_, i) => i + .5).filter((_, i) => laneName(i)).filter((_, i) => lanes <= 24 || i % Math.ceil(lanes / 24) === 0), values: (u, ticks) => ticks.map((v) => laneName(Math.floor(v)))})],
    cursor: {drag: {x: true, y: false}, points: {show: false}},
    hooks: {draw: [(u) => { const {ctx, bbox} = u; ctx.save(); ctx.beginPath(); ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height); ctx.clip(); paint(u); paintMarks(u); ctx.restore(); }]},
  };
  const u = new uPlot(options, [[from - pad, to + pad], [null, null]], host);
  u.over.addEventListener("mousemove", (e) => {
    const m = markAt(u, u.cursor.left), hit = at(u, u.posToVal(u.cursor.left, "x"), u.posToVal(u.cursor.top, "y"));
    showTip([hit && hit.text, m && m.text].filter(Boolean).join("\n\n"), e);
  });
  u.over.addEventListener("mouseleave", () => showTip(""));
  u.whole = [from - pad, to + pad];
  charts.push({u, host, height});
  return u;
}
function zoom(u, how) {
  const {min, max} = u.scales.x, size = max - min, [a, b] = u.whole;
  let range = {in: [min + size / 4, max - size / 4], out: [min - size / 2, max + size / 2], left: [min - size / 4, max - size / 4], right: [min + size / 4, max + size / 4], all: [a, b]}[how];
  const width = Math.min(range[1] - range[0], b - a), start = clamp(range[0], a, b - width);
  u.setScale("x", {min: start, max: start + width});
}
function keys(host, u, step) {
  host.onkeydown = (e) => {
    const how = {ArrowLeft: "left", ArrowRight: "right", "+": "in", "=": "in", "-": "out", Home: "all"}[e.key];
    if (how) { zoom(u, how); e.preventDefault(); } else if (step && (e.key === "n" || e.key === "p")) { step(e.key === "n" ? 1 : -1); e.preventDefault(); }
  };
}

// --- workers over time ---------------------------------------------------------------------------------------------
const DRAWN_MOST = 25000;
function inView(list, min, max) {
  let lo = 0, hi = list.length;
  const first = min - list.longest;
  while (lo < hi) { const mid = (lo + hi) >> 1; if (list[mid].dispatched_s < first) lo = mid + 1; else hi = mid; }
  const found = [];
  for (; lo < list.length && list[lo].dispatched_s <= max; lo++) if (list[lo].ended_s >= min) found.push(list[lo]);
  return found;
}
let timeline, focused = -1;
function rectOf(u, a) {
  const w = workers.get(a.worker), lane = w ? w.lane : 0, part = .9 / slotsMost, y = lane + .05 + a.slot * part;
  return [u.valToPos(a.dispatched_s, "x", true), u.valToPos(y, "y", true), u.valToPos(a.ended_s, "x", true), u.valToPos(y + part * .85, "y", true)];
}
function paintTimeline(u) {
  const {min, max} = u.scales.x, visible = [...byWorker.values()].flatMap((list) => inView(list, min, max)), ctx = u.ctx;
  const showAttempts = visible.length <= DRAWN_MOST && (exact || (max - min) < (end - begin) / 4);
  if (!showAttempts || !exact) for (const w of data.timeline.workers) {
    const cells = data.timeline.cells[w.worker] || [], y0 = u.valToPos(w.lane + .05, "y", true), y1 = u.valToPos(w.lane + .95, "y", true);
    cells.forEach(([bin, running, cut], i) => {
      const from = begin + bin * data.timeline.width_s, to = Math.min(i + 1 < cells.length ? begin + cells[i + 1][0] * data.timeline.width_s : from + data.timeline.width_s, Math.max(w.end_s, from));
      if (to < min || from > max) return;
      const x0 = u.valToPos(from, "x", true), x1 = u.valToPos(to, "x", true);
      if (running > 0.005) { ctx.globalAlpha = (showAttempts ? .25 : 1) * (.15 + .85 * Math.min(running / cellMost, 1)); bar(ctx, x0, y0, x1, y1, css("trained")); ctx.globalAlpha = 1; }
      if (cut > 0 && shown.has("thrown")) bar(ctx, Math.max(x1 - 4, x0), y0, x1, y1, css("thrown"));
    });
  }
  if (showAttempts) for (const a of visible) if (shown.has(a.kind)) bar(ctx, ...rectOf(u, a), css(KINDS[a.kind].colour), KINDS[a.kind].hatch);
  if (focused >= 0) { const [x0, y0, x1, y1] = rectOf(u, attempts[focused]); ctx.lineWidth = 2; ctx.strokeStyle = css("fg"); ctx.strokeRect(x0 - 2, y0 - 2, x1 - x0 + 4, y1 - y0 + 4); }
  u.drawn = {attempts: showAttempts ? visible.filter((a) => shown.has(a.kind)).length : 0};
}
function timelineAt(u, x, y) {
  const lane = Math.floor(y), slot = Math.floor((y - lane - .05) / (.9 / slotsMost));
  const here = data.timeline.workers.filter((w) => w.lane === lane && w.begin_s <= x && w.end_s >= x)[0];
  if (!here) return null;
  const a = inView(byWorker.get(here.worker) || Object.assign([], {longest: 0}), x, x).find((v) => v.slot === slot && shown.has(v.kind));
  if (a) return {text: tell(a), attempt: a};
  const cell = (data.timeline.cells[here.worker] || []).filter((c) => begin + c[0] * data.timeline.width_s <= x).pop();
  return {text: `worker ${here.worker}, incarnation ${here.incarnation}\n${clock(x)}: ${cell ? number(cell[1]) : 0} attempts running on average\n${number(here.attempts)} attempts, ${number(here.new_tokens)} tokens in all`};
}
function stepAttempt(by) {
  const order = attempts.map((_, i) => i).filter((i) => shown.has(attempts[i].kind)).sort((x, y) => attempts[x].dispatched_s - attempts[y].dispatched_s);
  if (!order.length) return;
  const at = order.indexOf(focused), {min, max} = timeline.scales.x;
  let next = at < 0 ? order.findIndex((i) => attempts[i].dispatched_s >= min) : at + by;
  focused = order[clamp(next, 0, order.length - 1)];
  const a = attempts[focused];
  if (a.dispatched_s < min || a.ended_s > max) { const half = (max - min) / 2; timeline.setScale("x", {min: a.dispatched_s - half, max: a.dispatched_s + half}); } else timeline.redraw(false);
  $("timeline-text").textContent = tell(a).replaceAll("\n", "; ");
}
function makeTimeline() {
  const lanes = Math.max(data.timeline.lanes, 1), height = clamp(lanes * (exact ? Math.max(slotsMost * 5, 22) : 16), 120, 640) + 60;
  timeline = canvasChart("timeline", height, begin, Math.max(end, begin + 1e-3), lanes, (l) => { const w = data.timeline.workers.filter((v) => v.lane === l); return w.length ? `${innerWidth < 700 ? "w" : "worker "}${w.slice(0, 2).map((v) => v.worker).join(", ")}${w.length > 2 ? ", …" : ""}` : ""; }, paintTimeline, timelineAt);
  timeline.over.addEventListener("click", () => { const hit = timelineAt(timeline, timeline.posToVal(timeline.cursor.left, "x"), timeline.posToVal(timeline.cursor.top, "y")); if (hit && hit.attempt) pick(hit.attempt.group_id); });
  keys($("timeline"), timeline, stepAttempt);
  window.unlostTimeline = timeline;  // for tests, as the two below
}
$("timeline-hint").textContent = (exact ? `Every attempt is a bar (${number(data.attempts.total)}).`
  : `${number(data.attempts.total)} attempts: the darker, the more run on a worker; orange ends: cut off. Zoomed in, ${number(data.attempts.listed)} of them are drawn singly: whole groups, those that a kill or failure hit first.`) +
  " Dotted: cuts of checkpoints. Solid line and grey band: killed, between the process's last sign of life and the next start. Short dashes: stopped in order. Long dashes: generation goes on. Drag to zoom, double-click for all, click an attempt to see its group.";
for (const [name, k] of Object.entries(KINDS)) {
  const label = document.createElement("label"), box = document.createElement("input"), swatch = document.createElement("span");
  box.type = "checkbox"; box.checked = true; box.dataset.kind = name; swatch.className = "swatch";
  swatch.style.background = k.hatch ? `repeating-linear-gradient(45deg, var(--${k.colour}) 0 2px, transparent 2px 5px)` : `var(--${k.colour})`;
  swatch.style.outline = `1px solid var(--${k.colour})`;
  label.append(box, " ", swatch, k.name, " "); $("filters").append(label);
  box.addEventListener("change", () => { box.checked ? shown.add(name) : shown.delete(name); timeline.redraw(false); });
}
for (const button of document.querySelectorAll("[data-zoom]")) button.addEventListener("click", () => zoom(timeline, button.dataset.zoom));

// --- one prompt through it all -------------------------------------------------------------------------------------
const groups = new Map(data.groups.map((g) => [g.group_id, g])), byGroup = new Map();
for (const a of attempts) { if (!byGroup.has(a.group_id)) byGroup.set(a.group_id, []); byGroup.get(a.group_id).push(a); }
const isHit = (g) => (byGroup.get(g) || []).some((a) => a.kind === "thrown" || a.kind === "failed" || a.killed);
const wasKilled = (g) => byGroup.get(g).some((a) => a.killed);
const hitGroups = [...byGroup.keys()].filter(isHit).sort((x, y) => wasKilled(y) - wasKilled(x) || x - y);
let picked = null, life = null;
const choices = () => $("group-hit").checked && hitGroups.length ? hitGroups : [...byGroup.keys()];
function fillChoices() { $("groups").replaceChildren(...choices().slice(0, 500).map((g) => { const o = document.createElement("option"); o.value = g; o.label = (groups.get(g) || {}).sample_id || ""; return o; })); }
function pick(g) {
  if (!byGroup.has(g)) { $("group-hint").textContent = `Group ${g} is not among the ${byGroup.size} groups in this page; unlost replay RUN --group ${g} tells its life.`; return; }
  picked = g; $("group").value = g; drawLife();
}
function drawLife() {
  if (picked == null) return;
  const mine = byGroup.get(picked), g = groups.get(picked) || {}, siblings = 1 + Math.max(...mine.map((a) => a.sibling));
  const stages = [["admitted", g.admitted_s], ["committed", g.committed_s], ["claimed", g.claimed_s], ["trained", g.applied_s], [g.status === "evicted" ? "evicted" : "discarded", g.gone_s]].filter((s) => s[1] != null);
  const from = Math.min(...mine.map((a) => a.dispatched_s), ...stages.map((s) => s[1])), to = Math.max(...mine.map((a) => Math.max(a.ended_s, a.ended_max_s || 0)), ...stages.map((s) => s[1]));
  const old = charts.findIndex((c) => c.host.id === "life");
  if (old >= 0) { charts[old].u.destroy(); charts.splice(old, 1); }
  const names = .3 + .42 * stages.length;  // room below the bars for the names of the stages
  life = canvasChart("life", (siblings + names) * 34 + 60, from, Math.max(to, from + 1e-3), siblings + names, (s) => s < siblings ? `sibling ${s}` : "", (u) => {
    const X = (v) => u.valToPos(v, "x", true), Y = (v) => u.valToPos(v, "y", true), {ctx, bbox} = u, px = devicePixelRatio;
    for (const a of mine) {
      const y0 = Y(a.sibling + .15), y1 = Y(a.sibling + .85), colour = css(KINDS[a.kind].colour);
      bar(ctx, X(a.dispatched_s), y0, X(a.ended_s), y1, colour, KINDS[a.kind].hatch);
      if (a.killed && a.ended_max_s > a.ended_s) { ctx.globalAlpha = .2; ctx.fillStyle = colour; ctx.fillRect(X(a.ended_s), y0, X(a.ended_max_s) - X(a.ended_s), y1 - y0); ctx.globalAlpha = 1; }
      ctx.fillStyle = css("fg"); ctx.font = `${11 * px}px system-ui, sans-serif`; ctx.textBaseline = "middle"; ctx.textAlign = "left";
      const wide = X(a.ended_s) - X(a.dispatched_s), fits = (text) => ctx.measureText(text).width + 14 * px < wide;
      const label = [`try ${a.attempt}` + (a.prefix ? `, ${a.prefix} tokens reused` : ""), `try ${a.attempt}`].find(fits);
      if (label) { const tw = ctx.measureText(label).width; ctx.fillStyle = css("bg"); ctx.globalAlpha = .75; ctx.fillRect(X(a.dispatched_s) + 3 * px, (y0 + y1) / 2 - 8 * px, Math.min(tw + 6 * px, wide - 6 * px), 16 * px); ctx.globalAlpha = 1; ctx.fillStyle = css("fg"); ctx.fillText(label, X(a.dispatched_s) + 6 * px, (y0 + y1) / 2, wide - 12 * px); }
    }
    for (const [, t] of stages) { const x = X(t); ctx.strokeStyle = css("flight"); ctx.lineWidth = px; ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke(); }
    labels(u, stages.map(([name, t]) => [name, X(t)]), Y(siblings + .1), 1);
  }, (u, x, y) => { const a = mine.find((v) => v.sibling === Math.floor(y) && v.dispatched_s <= x && Math.max(v.ended_s, v.killed ? v.ended_max_s || 0 : 0) >= x); return a && {text: tell(a), attempt: a}; });
  keys($("life"), life, (by) => { life.at = clamp((life.at == null ? (by > 0 ? -1 : 1) : life.at) + by, 0, mine.length - 1); $("life-text").textContent = tell(mine[life.at]).replaceAll("\n", "; "); });
  $("group-hint").textContent = `Group ${picked}, prompt ${apart(g.sample_id || "?")}, epoch ${g.epoch == null ? "?" : g.epoch}: ${g.status || "?"}${g.reason ? " (" + apart(g.reason) + ")" : ""}${g.trained_step != null ? ", step " + g.trained_step : ""}. Hatched: cut off. Pale: may still have run.`;
  const head = ["sibling", "attempt", "worker", "from", "to", "seconds", "outcome", "reason", "kept as", "tokens", "reused", "thrown away"];
  const rows = mine.map((a) => [a.sibling, a.attempt, a.worker, clock(a.dispatched_s), clock(a.ended_s), number(a.ended_s - a.dispatched_s), a.outcome + (a.adopted ? ", adopted" : ""), a.lost_reason || a.reason || "", a.fate, number(a.tokens), number(a.prefix), number(a.thrown_tokens)]);
  const cell = (tag, v) => { const c = document.createElement(tag); c.textContent = v; return c; };
  const numeric = [0, 1, 2, 3, 4, 5, 9, 10, 11];
  const line = (tag, values) => { const r = document.createElement("tr"); r.append(...values.map((v, i) => { const c = cell(tag, v); if (numeric.includes(i)) c.className = "n"; if (tag === "th") c.scope = "col"; return c; })); return r; };
  $("life-table").replaceChildren(line("th", head), ...rows.map((r) => line("td", r)));
  hints();
}
function movePick(by) { const list = choices(), at = list.indexOf(picked); if (list.length) pick(list[clamp(at < 0 ? 0 : at + by, 0, list.length - 1)]); }
$("group").addEventListener("change", () => { const text = $("group").value.trim(), named = data.groups.find((g) => g.sample_id === text); pick(/^\d+$/.test(text) ? +text : named ? named.group_id : text); });
$("group-back").addEventListener("click", () => movePick(-1)); $("group-next").addEventListener("click", () => movePick(1));
$("group-hit").addEventListener("change", fillChoices);

// --- lines ---------------------------------------------------------------------------------------------------------
function lines(id, table, series, more) {
  const host = $(id);
  if (!table[0].length) { host.textContent = "Nothing to show."; return; }
  const latest = (u, i) => { for (let at = u.data[i].length - 1; at >= 0; at--) if (u.data[i][at] != null) return u.data[i][at]; return null; };
  const told = (show) => (u, v, i, at) => { const w = at == null ? latest(u, i) : v; return w == null ? "–" : show(w); };  // no cursor: the latest
  const u = new uPlot(Object.assign({
    width: host.clientWidth, height: 220, scales: {x: {time: false}}, cursor: {sync: {key: "time"}, drag: {x: true, y: false}},
    series: [{label: "run clock", value: told(clock)}, ...series.map((s) => Object.assign({width: 1.5, points: {show: false}, value: told(number)}, s, {stroke: css(s.stroke), fill: s.fill && css(s.stroke) + "33"}))],
    axes: [timeAxis(), axis({size: 64})],
    hooks: {drawClear: [(v) => { v.ctx.save(); v.ctx.beginPath(); v.ctx.rect(v.bbox.left, v.bbox.top, v.bbox.width, v.bbox.height); v.ctx.clip(); paintMarks(v); v.ctx.restore(); }]},
  }, more), table, host);
  u.whole = [begin, end];
  u.setScale("x", {min: begin, max: end});
  host.tabIndex = 0; host.setAttribute("aria-label", "Chart; arrow keys, plus and minus"); keys(host, u);
  charts.push({u, host, height: 220});
}
function makeLines() {
  const s = data.series, steps = data.steps;
  lines("levels", [s.t, s.in_flight, s.buffered], [{label: "attempts in flight", stroke: "flight"}, {label: "groups in the buffer", stroke: "trained", dash: [6, 3]}]);
  lines("flows", [s.t, s.generated_per_s, s.lost_per_s, s.trained_per_s], [{label: "generated, by end of attempt", stroke: "flight"}, {label: "of these lost, then or later", stroke: "thrown", fill: true}, {label: "trained", stroke: "trained", dash: [6, 3]}]);
  const nothing = data.outages.map((o) => ({applied_s: (o.died_min_s + Math.max(o.until_s, o.died_min_s)) / 2}));  // lines break there
  const points = [...steps, ...nothing].sort((v, w) => v.applied_s - w.applied_s);
  const at = points.map((v) => v.applied_s), band = (name) => points.map((v) => v[name] ?? null);
  lines("age", [at, band("age_mean"), band("age_min"), band("age_max")], [{label: "mean age", stroke: "trained", width: 2, points: {show: at.length < 200}}, {label: "youngest", stroke: "buffered", dash: [3, 3], points: {show: at.length < 200, size: 4}}, {label: "oldest", stroke: "stale", dash: [6, 3], points: {show: at.length < 200, size: 4}}],
    {scales: {x: {time: false}, y: {range: (u, lo, hi) => [Math.min(lo ?? 0, 0), Math.max((hi ?? 0) * 1.1, 1)]}}, bands: [{series: [3, 2], fill: css("buffered") + "22"}]});
  window.unlostAges = {times: at, ages: band("age_mean")};
  window.unlostClocks = clocks; window.unlostTicks = spacings;
  const saves = data.timeline.checkpoints.filter((c) => c.checkpoint != null && c.ended_s != null), dots = {paths: () => null, points: {show: true, size: 7}};
  const only = (f) => saves.map((c) => f(c) ? c.ended_s - c.cut_s : null);
  lines("saves", [saves.map((c) => c.cut_s), only((c) => c.outcome === "committed" && c.kind === "trainer"), only((c) => c.outcome === "committed" && c.kind !== "trainer"), only((c) => c.outcome === "failed")],
    [{label: "trainer, s", stroke: "trained", ...dots}, {label: "rollout, s", stroke: "buffered", ...dots}, {label: "failed, s", stroke: "thrown", ...dots, points: {show: true, size: 11}}],
    {scales: {x: {time: false}, y: {range: (u, lo, hi) => [0, Math.max((hi ?? 0) * 1.1, 1e-3)]}}});
}

// --- page ----------------------------------------------------------------------------------------------------------
$("resource").addEventListener("change", () => { for (const row of document.querySelectorAll("#losses tbody tr")) row.hidden = $("resource").value !== "" && row.dataset.resource !== $("resource").value; });
function draw() {  // again in other colours, at the same zoom
  const before = new Map(charts.map((c) => [c.host.id, c.u.scales.x]));
  for (const c of charts) c.u.destroy();
  charts.length = 0; makeTimeline(); makeLines(); drawLife();
  for (const c of charts) { const x = before.get(c.host.id); if (x) c.u.setScale("x", {min: x.min, max: x.max}); }
}
$("theme").addEventListener("click", () => {
  const root = document.documentElement, dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark"; draw();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
let resizing; addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(() => { for (const c of charts) c.u.setSize({width: c.host.clientWidth, height: c.height}); hints(); }, 100); });
function hints() { for (const box of document.querySelectorAll(".scroll")) box.classList.toggle("more", box.scrollWidth > box.clientWidth + 1); }
fillChoices(); draw(); movePick(0); hints();
document.documentElement.dataset.ready = "yes";
})();

"""The report: its words, its numbers, and its page in a real browser."""

import html.parser
import itertools
import json
import re

import pytest

from tests.simulation.on_disk import to_disk
from tests.simulation.world import World, sim_config
from tests.synthetic_run import Shape, SyntheticRun, write_journal
from unlost.cli.report import _cell
from unlost.replay import report as reports
from unlost.replay.database import open_database
from unlost.replay.report import gather
from unlost.replay.report_page import _number, page

from .browser import MISSING, Browser
from .postmortem_stories import TRACE_FILE, everything, trace_example, write


def data_of(*paths):
    with open_database(paths) as database:
        return gather(database, database.sources[0].run)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("simulated")
    run = SyntheticRun(Shape(seed=21, events=4_000, crashes=3))
    write_journal(run, folder)
    return folder, run, data_of(folder)


def test_the_summary_says_what_happened_and_what_it_cost(tmp_path):
    """Sentences of the story that was computed by hand."""
    said = data_of(write(tmp_path / "told", everything()))["summary"]
    text = " ".join(said)
    assert "2 incarnations, 1 kill; the last ended (finished)" in text
    assert "1 step stand, 1 was undone by restores; 1 prompt trained, none twice" in text
    assert "between 10 and 38.5 s of generation and between 0 and 128 tokens" in text
    assert "14 s of training done again, between 5 and 15 s until generation went on" in text
    assert "nothing is known of it for 10 s, until the next start: the upper bounds of seconds count that in" in text
    assert "staleness 39 s, failures 8 s" in text
    assert said[-1] == "Everything adds up: attempts, tokens and seconds."


def test_a_residue_leads(tmp_path):
    """Workers that counted more than their events tell, to the end: the first sentence says so."""
    told = everything()
    told[-2] = type(told[-2])(told[-2].t, 2, "stopped", 50)
    told[-1] = type(told[-1])(told[-1].t, "finished", "", ((2, 50),))
    said = data_of(write(tmp_path / "told", told))["summary"]
    assert said[0].startswith("This does not add up: tokens as workers told last")
    assert "residue 9" in said[0]
    assert not any(sentence.startswith("Everything adds up") for sentence in said)


@pytest.mark.parametrize("dust", [-1e-9, -0.0, 0.0, 1e-9, -0.004])
def test_nothing_is_written_as_minus_nothing(dust):
    """Sums of floats leave dust, in the terminal and in the page."""
    assert _cell(dust) == "0.0"
    assert _number(dust) == "0"


def test_levels_over_time_end_where_the_fold_ends(simulated):
    """Attempts in flight and groups in the buffer at the last bin are those of the folded state."""
    _, run, data = simulated
    assert data["series"]["in_flight"][-1] == run.state.open_attempts
    assert data["series"]["buffered"][-1] == len(run.state.committed)
    assert max(data["series"]["in_flight"]) > 10
    lanes = data["timeline"]["cells"]
    assert max(cell[1] for cells in lanes.values() for cell in cells) <= run.shape.slots + 0.01


def test_tokens_per_second_add_up(simulated):
    """Over all bins: what attempts made, and what was lost of it."""
    _, _, data = simulated
    width, series = data["timeline"]["width_s"], data["series"]
    made = next(r["expected"] for r in data["reconcile"] if r["what"] == "token fates")
    assert sum(series["generated_per_s"]) * width == pytest.approx(made, rel=1e-3)
    lost = next(r["expected"] for r in data["reconcile"] if r["what"] == "token losses")
    assert sum(series["lost_per_s"]) * width == pytest.approx(lost, rel=1e-3)


@pytest.mark.slow
def test_of_many_attempts_the_interesting_groups_are_listed_whole(simulated, monkeypatch):
    """With room for few, groups that a kill hit come first, with all their siblings; the total is told."""
    folder, _, whole = simulated
    monkeypatch.setattr(reports, "ATTEMPTS_LISTED_MAX", 300)
    few = data_of(folder)["attempts"]
    assert few["total"] == whole["attempts"]["total"] > 300
    assert 0 < few["listed"] <= 300
    killed = {
        g
        for g, k in zip(whole["attempts"]["columns"]["group_id"], whole["attempts"]["columns"]["killed"], strict=True)
        if k
    }
    listed = set(few["columns"]["group_id"])
    assert listed <= killed or killed <= listed
    for group in listed:
        assert few["columns"]["group_id"].count(group) == whole["attempts"]["columns"]["group_id"].count(group)


@pytest.mark.parametrize("damaged", ["the first segment", "every segment"])
def test_of_a_damaged_run_it_is_said_what_is_known(tmp_path, damaged):
    """A finished run is not said to run: what could not be read leads, and the end is told if it is intact."""
    world = World(sim_config(), seed=3)
    world.live(kill_at_s=2.5)
    world.live()
    run = to_disk(world, tmp_path / "run")
    events, state = len(world.events()), world.fold()
    segments = sorted((run / "events").glob("*.zst"))
    for segment in segments[: 1 if damaged == "the first segment" else None]:
        content = bytearray(segment.read_bytes())
        content[len(content) // 2] ^= 1
        segment.write_bytes(content)
    data = data_of(run)
    said = data["summary"]

    first = data["unread"][0]["first_offset"]
    assert 0 < first < int(segments[1].name.split(".")[0])
    assert said[0] == (
        f"Not all of it could be read: events {first} to {events - 1} are left out, and every figure below lacks them."
    )
    if damaged == "the first segment":
        assert f"{events} events in all, 2 incarnations, the last ended (finished)" in said[1]
        trained = state.retired_trained + len(state.trained_groups())
        assert f"version 6, {state.next_group} prompts handed out, {trained} trained" in said[1]
    else:
        assert "How it ended is not known either" in said[1]
    assert "how the last of these ended is not among them" in said[2]
    assert said[-1].startswith("In what could be read, everything adds up")
    assert not any("it runs, or was killed" in sentence for sentence in said)


def test_an_empty_journal_and_a_trace_can_be_reported(tmp_path):
    """No division by nothing; a trace without tokens says unknown, not zero."""
    from unlost.journal import JournalWriter
    from unlost.replay import events as ev

    JournalWriter.open(tmp_path / "events", ev.EVENT_TYPES, journal_id="empty").close()
    empty = data_of(tmp_path)
    assert "There are no events to report on." in empty["summary"]
    page(empty)
    trace = tmp_path / "t.jsonl"
    trace.write_text(TRACE_FILE)
    data = data_of(trace)
    assert any("between 40 and 48 s of generation." in sentence for sentence in data["summary"])
    assert "unknown" in page(data)


class _Page(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.outside = []
        self.headings = []
        self._heading = False

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name in ("src", "href") and not (value or "").startswith(("data:", "#")):
                self.outside.append(value)
        self._heading = tag == "h2"

    def handle_data(self, data):
        if self._heading:
            self.headings.append(data)
            self._heading = False


def test_the_page_is_one_file_without_network(simulated, tmp_path):
    """No reference leads out of it, hostile names stay text, and its data reads back."""
    _, _, data = simulated
    parsed = _Page()
    text = page(data)
    parsed.feed(text)
    assert parsed.outside == []
    assert "One prompt through it all" in parsed.headings
    embedded = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])
    assert embedded["attempts"]["total"] == data["attempts"]["total"]

    evil = dict(data, run=dict(data["run"], run="</script><script>alert(1)</script>"))
    evil["groups"] = []
    evil["notes"] = ["<img src=x onerror=alert(1)>"]
    assert "<script>alert(1)" not in page(evil)
    assert "<img src=x" not in page(evil)


def test_a_reason_that_turns_the_writing_around_turns_only_itself(simulated):
    """U+202E in a reason, a note and the run's name: each stands in an element where that ends."""
    _, _, data = simulated
    turned = "aborted\u202eyllufesoprup"
    row = {"status": "discarded", "reason": turned, "groups": 1, "tokens": 0}
    text = page(dict(data, statuses=[row], notes=[turned], run=dict(data["run"], run=turned)))
    text = re.sub(r"<(title|script)\b.*?</\1>", "", text, flags=re.DOTALL)
    assert text.count(turned) == text.count(f"<bdi>{turned}</bdi>") == 3


# --- in Chromium ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def opened(simulated, tmp_path_factory):
    if MISSING:
        pytest.skip(MISSING)
    file = tmp_path_factory.mktemp("page") / "report.html"
    file.write_text(page(simulated[2]), encoding="utf-8")
    with Browser() as browser:
        browser.open(file)
        assert browser.run("return document.documentElement.dataset.ready") == "yes"
        yield browser


def box(browser, selector):
    return browser.run(
        "const e = document.querySelector(arguments[0]); e.scrollIntoView({block: 'center'});"
        "const r = e.getBoundingClientRect(); return [r.left, r.top, r.width, r.height]",
        selector,
    )


@pytest.mark.slow
def test_it_renders_without_complaints(opened):
    """Every chart has a canvas with something painted on it; the console is silent."""
    painted = opened.run(
        "return [...document.querySelectorAll('.chart')].map((c) => {"
        "const v = c.querySelector('canvas'); if (!v) return [c.id, 0];"
        "const d = v.getContext('2d').getImageData(0, 0, v.width, v.height).data; let n = 0;"
        "for (let i = 3; i < d.length; i += 4) if (d[i]) n++; return [c.id, n]; })"
    )
    assert {name for name, _ in painted} == {"timeline", "life", "levels", "flows", "age", "saves"}
    assert all(count > 500 for _, count in painted), painted
    assert opened.complaints() == []


@pytest.mark.slow
def test_hover_tells_the_attempt_under_the_mouse(simulated, opened):
    """The tooltip names group, sibling and attempt of a bar whose place is computed from the data."""
    columns = simulated[2]["attempts"]["columns"]
    longest = max(range(len(columns["group_id"])), key=lambda i: columns["ended_s"][i] - columns["dispatched_s"][i])
    opened.run("document.querySelector('[data-zoom=all]').click()")
    left, top, _, _ = box(opened, "#timeline .u-over")
    middle = (columns["dispatched_s"][longest] + columns["ended_s"][longest]) / 2
    x, height = opened.run(
        "const u = window.unlostTimeline; return [u.valToPos(arguments[0], 'x'), u.over.clientHeight]", middle
    )
    wanted = f"group {columns['group_id'][longest]}, sibling {columns['sibling'][longest]}, attempt"
    for step in range(1, int(height), 2):
        opened.move(left + x, top + step)
        if wanted in (opened.run("const t = document.getElementById('tip'); return t.hidden ? '' : t.textContent")):
            break
    else:
        pytest.fail(f"no tooltip said {wanted!r}")
    opened.move(2, 2)
    assert opened.run("return document.getElementById('tip').hidden") is True


@pytest.mark.slow
def test_filters_and_zoom_change_what_is_drawn(simulated, opened):
    """Unticking all kinds but the failed leaves just those; zooming in shows fewer."""
    columns = simulated[2]["attempts"]["columns"]
    drawn = "return window.unlostTimeline.drawn.attempts"
    settle = "return new Promise((done) => requestAnimationFrame(() => setTimeout(done, 50)))"
    opened.run("document.querySelector('[data-zoom=all]').click()")
    opened.run(settle)
    assert opened.run(drawn) == len(columns["group_id"])
    opened.run(
        "for (const b of document.querySelectorAll('#filters input')) if (b.dataset.kind !== 'failed') b.click()"
    )
    opened.run(settle)
    assert opened.run(drawn) == columns["outcome"].count("failed") > 0
    opened.run("for (const b of document.querySelectorAll('#filters input')) if (!b.checked) b.click()")
    for _ in range(4):
        opened.run("document.querySelector('[data-zoom=in]').click()")
        opened.run(settle)
    assert 0 < opened.run(drawn) < len(columns["group_id"]) / 4
    opened.run("document.querySelector('[data-zoom=all]').click()")

    opened.run(
        "const s = document.getElementById('resource'); s.value = 'trainer'; s.dispatchEvent(new Event('change'))"
    )
    rows = opened.run(
        "return [...document.querySelectorAll('#losses tbody tr')].filter((r) => !r.hidden)"
        ".map((r) => r.dataset.resource)"
    )
    assert set(rows) == {"trainer"}
    opened.run("const s = document.getElementById('resource'); s.value = ''; s.dispatchEvent(new Event('change'))")


@pytest.mark.slow
def test_the_keyboard_reaches_what_the_mouse_reaches(opened):
    """With the timeline focused, n tells the next attempt aloud and + zooms; the prompt's box takes a number."""
    opened.run("document.getElementById('timeline').focus()")
    opened.keys("n")
    first = opened.run("return document.getElementById('timeline-text').textContent")
    opened.keys("n")
    second = opened.run("return document.getElementById('timeline-text').textContent")
    assert re.match(r"group \d+, sibling \d+, attempt \d+: ", first)
    assert second != first
    before = opened.run("const s = window.unlostTimeline.scales.x; return s.max - s.min")
    opened.keys("+")
    assert opened.run("const s = window.unlostTimeline.scales.x; return s.max - s.min") == pytest.approx(before / 2)
    assert opened.run(
        "return [...document.querySelectorAll('button, select, input, .chart, .scroll')].every((e) => e.tabIndex >= 0)"
    )


@pytest.mark.slow
def test_one_prompt_through_a_stop_and_a_restore(simulated, opened):
    """A group that was running at a kill: its attempts in the table, told as cut off, then continued."""
    columns = simulated[2]["attempts"]["columns"]
    at = next(i for i, killed in enumerate(columns["killed"]) if killed and columns["outcome"][i] == "abandoned")
    group = columns["group_id"][at]
    opened.run(
        "const g = document.getElementById('group'); g.value = arguments[0]; g.dispatchEvent(new Event('change'))",
        str(group),
    )
    rows = opened.run("return [...document.querySelectorAll('#life-table tr')].map((r) => r.textContent)")
    assert len(rows) == 1 + columns["group_id"].count(group)
    assert any("restart" in row for row in rows)
    assert f"Group {group}, prompt p{group}" in opened.run("return document.getElementById('group-hint').textContent")


@pytest.mark.slow
def test_dark_and_light(opened):
    """The button turns the page's colours round; the preference of the system does it alone; no complaints."""
    background = "return getComputedStyle(document.body).backgroundColor"
    opened.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    dark = opened.run(background)
    opened.run("document.getElementById('theme').click()")
    light = opened.run(background)
    assert dark != light
    assert light == "rgb(255, 255, 255)"
    opened.run("document.getElementById('theme').click()")
    assert opened.run(background) == dark
    assert opened.complaints() == []


@pytest.mark.slow
def test_a_small_story_renders_too(tmp_path):
    """One killed attempt, no steps: the picture of the worked example, without complaints."""
    if MISSING:
        pytest.skip(MISSING)
    file = tmp_path / "small.html"
    file.write_text(page(data_of(write(tmp_path / "told", trace_example()))), encoding="utf-8")
    with Browser() as browser:
        browser.open(file)
        assert browser.run("return document.documentElement.dataset.ready") == "yes"
        assert "28" in browser.run("return document.querySelector('#losses').textContent")
        assert browser.complaints() == []


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory):
    """Killed, stopped before anything was restored, stopped in the middle, finished: in a browser window of 520 px."""
    if MISSING:
        pytest.skip(MISSING)
    folder = tmp_path_factory.mktemp("disturbed")
    world = World(sim_config(), seed=3)
    for more in ({"kill_at_s": 2.5}, {"stop_at_s": 0.0001}, {"stop_at_s": 3.0}, {}):
        world.live(**more)
        world.now_us += 3_000_000
    data = data_of(to_disk(world, folder / "run"))
    file = folder / "report.html"
    file.write_text(page(data), encoding="utf-8")
    with Browser() as browser:
        yield browser, data, file


WRITTEN = """
const said = [], write = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, x, y, most) {
  const m = this.getTransform(), w = this.measureText(text).width;
  const from = {left: 0, start: 0, center: w / 2, right: w, end: w}[this.textAlign];
  said.push([String(text), m.a ? x - from : NaN, y, w, this.textBaseline]); return write.apply(this, arguments); };
document.getElementById("theme").click(); document.getElementById("theme").click();
return new Promise((done) => setTimeout(() => {
  CanvasRenderingContext2D.prototype.fillText = write; done(said); }, 200));
"""


@pytest.mark.slow
@pytest.mark.parametrize("width", [520, 1400])
def test_words_in_charts_are_whole(disturbed, width):
    """No label begins left of its canvas; the clocks of an axis have one form; kills and stops are named."""
    browser, _, file = disturbed
    browser.devtools("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    browser.open(file)
    written = browser.run(WRITTEN)
    words = {text for text, *_ in written}
    assert {"killed", "stopped", "admitted", "committed", "claimed", "trained"} <= words
    assert any(re.fullmatch(r"(worker |w)\d+, \d+, …", text) for text in words)
    assert [text for text, left, *_ in written if left is not None and left < 0] == []
    marks = [left for text, left, *_ in written if text in ("killed", "stopped", "admitted")]
    assert min(marks) >= 60  # inside the charts, whose axes take up more than that
    stages = [row for row in written if row[0] in ("admitted", "committed", "claimed", "trained")]
    assert len(stages) >= 4
    for text, left, top, wide, _ in stages:
        for other, start, height, far, _ in stages:
            if text != other and abs(top - height) < 12:
                assert left + wide <= start or start + far <= left, (text, other)
    clocks = browser.run("return [[57.5, 60, 62.5, 65], [60, 65], [0, 1800]].map(window.unlostClocks)")
    assert clocks == [["0:57.5", "1:00.0", "1:02.5", "1:05.0"], ["1:00", "1:05"], ["0:00", "30:00"]]
    steps = browser.run("return window.unlostTicks")
    assert steps == sorted(steps)
    assert all(step % 60 == 0 for step in steps if step >= 60)  # a tick every 2,000 s would read 33:20
    assert all(step % 3600 == 0 for step in steps if step >= 3600)
    assert all(after <= 3 * step for step, after in itertools.pairwise(steps))
    assert browser.complaints() == []


@pytest.mark.slow
def test_legends_tell_the_latest_values_and_lines_break_at_outages(disturbed):
    """Without the mouse: what the series ended with; and the line of ages has a hole for each outage."""
    browser, data, file = disturbed
    browser.open(file)
    legend = browser.run("return document.querySelector('#levels .u-legend').textContent")
    assert legend.endswith("attempts in flight0groups in the buffer0")
    assert browser.run("return document.querySelector('#age .u-legend').textContent").count("\u2013") == 0
    assert len(data["outages"]) == 2
    holes = browser.run(
        "const {times, ages} = window.unlostAges; return times.filter((_, i) => ages[i] == null).sort((a, b) => a - b)"
    )
    assert len(holes) == 2
    for at, outage in zip(holes, data["outages"], strict=True):
        assert outage["died_min_s"] <= at <= outage["until_s"]


@pytest.mark.slow
def test_wide_tables_say_that_they_go_on(disturbed):
    """At 520 px a table that is cut off has a hint; at full width none has. Heads stand over their numbers."""
    browser, _, file = disturbed
    for width, cut in ((520, True), (1400, False)):
        browser.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
        )
        browser.open(file)
        assert (browser.run("return document.querySelectorAll('.scroll.more').length") > 0) is cut
        hidden = (
            "return [...document.querySelectorAll('.scroll')].filter((e) => e.scrollWidth > e.clientWidth + 1).length"
        )
        assert (browser.run(hidden) > 0) is cut
    uneven = browser.run(
        "return [...document.querySelectorAll('table')].flatMap((t) => [...t.querySelectorAll('tbody tr, tr')].flatMap("
        "(r) => [...r.children].map((c, i) => [c, t.querySelectorAll('th')[i]]).filter(([c, h]) => "
        "c.tagName === 'TD' && c.classList.contains('n') && !h.classList.contains('n'))"
        ".map(([c, h]) => h.textContent)))"
    )
    assert uneven == []

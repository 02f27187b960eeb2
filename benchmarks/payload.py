"""Payloads of a group of siblings into a payload journal: the caller's time, bytes per token, MB/s.

Beside it, the usual sidecar file: one blocking write and fsync per file and group (int32 tokens, half-precision
log-probabilities, uint8 masks).
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, process_time, sleep

import numpy as np

from unlost.journal import JournalOptions, JournalWriter
from unlost.replay.events import AttemptKey, PayloadRecord
from unlost.replay.payload_records import Payload, Unsealed, progress_later, sealed_record, with_checksum

from .result import Result, Table, Target, median, percentile

SIBLINGS = 8
CHUNK = 64
PROMPT_TOKENS = 128
PACE_S = 0.01
"""Between groups of 8 x 1,024 tokens: 800,000 tokens a second on one journal, more than a worker makes."""
VOCABULARY = 152_000
SPANS = ((0, 0, 3),)


@dataclass(frozen=True)
class Sample:
    """One sibling's arrays as a worker gathers them: raw int32 and float32 bytes."""

    prompt: bytes
    ids: bytearray
    logprobs: bytearray


def logprobs(rng: np.random.Generator, count: int) -> np.ndarray:
    """Log-probabilities of sampled tokens, float32: drawn from soft-maxes of many sharpnesses, at temperature 1."""
    found = np.empty(count, dtype=np.float32)
    for start in range(0, count, 1 << 14):
        rows = min(1 << 14, count - start)
        sharpness = rng.gamma(2.0, 2.5, size=(rows, 1)).astype(np.float32)
        logits = sharpness * rng.standard_normal((rows, 64), dtype=np.float32)
        logits -= logits.max(axis=1, keepdims=True)
        log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        noise = np.maximum(rng.standard_exponential(log_p.shape, dtype=np.float32), 1e-30)
        chosen = (log_p - np.log(noise)).argmax(axis=1)
        found[start : start + rows] = log_p[np.arange(rows), chosen]
    return found


def token_ids(rng: np.random.Generator, count: int, kind: str) -> np.ndarray:
    """``zipf``: as words are spread, ids in no order of frequency; ``uniform``: the worst case for a compressor."""
    if kind == "uniform":
        return rng.integers(0, VOCABULARY, count, dtype=np.int32)
    ranks = np.minimum(rng.zipf(1.2, count), VOCABULARY) - 1
    return np.random.default_rng(7).permutation(VOCABULARY).astype(np.int32)[ranks]


def make_groups(count: int, tokens: int, kind: str) -> list[list[Sample]]:
    """``count`` groups of siblings with ``tokens`` generated tokens each, no two alike."""
    rng = np.random.default_rng(11)
    ids = token_ids(rng, count * SIBLINGS * tokens, kind).tobytes()
    probabilities = logprobs(rng, count * SIBLINGS * tokens).tobytes()
    prompts = token_ids(rng, count * PROMPT_TOKENS, kind).tobytes()
    size = 4 * tokens

    def sample(group: int, sibling: int) -> Sample:
        at = (group * SIBLINGS + sibling) * size
        prompt = prompts[4 * PROMPT_TOKENS * group : 4 * PROMPT_TOKENS * (group + 1)]
        return Sample(prompt, bytearray(ids[at : at + size]), bytearray(probabilities[at : at + size]))

    return [[sample(group, sibling) for sibling in range(SIBLINGS)] for group in range(count)]


@dataclass
class Cost:
    """Of several groups: the caller's seconds for each, bytes on disk, seconds until all was durable, CPU seconds."""

    caller_s: list[float] = field(default_factory=list)
    disk_bytes: int = 0
    total_s: float = 0.0
    cpu_s: float = 0.0


Append = Callable[[int], None]
"""Appends the payloads of group ``number``."""
Way = Callable[[JournalWriter[PayloadRecord], list[list[Sample]]], Append]


def whole(writer: JournalWriter[PayloadRecord], groups: list[list[Sample]]) -> Append:
    """Each sibling as one record: what a short response, or a long progress interval, gives."""

    def append(number: int) -> None:
        for index, sample in enumerate(groups[number]):
            sealing = Unsealed(number, _payload(number, index, sample), 0, ())
            writer.append_later(sealing.record, sealing.bytes_max)

    return append


def chunked(writer: JournalWriter[PayloadRecord], groups: list[list[Sample]]) -> Append:
    """As a worker does while it generates: a progress record every 64 tokens, then the seal with the rest."""

    def append(number: int) -> None:
        for index, sample in enumerate(groups[number]):
            payload = _payload(number, index, sample)
            chunks: list[int] = []
            last = max(0, payload.tokens - 1) // CHUNK * CHUNK
            for first in range(0, last, CHUNK):
                part = slice(4 * first, 4 * (first + CHUNK))
                ids, logprobs = bytes(sample.ids[part]), bytes(sample.logprobs[part])
                chunks.append(writer.append_later(*progress_later(number, payload.key, first, ids, logprobs, SPANS)))
            sealing = Unsealed(number, payload, last, chunks)
            writer.append_later(sealing.record, sealing.bytes_max)

    return append


def built_by_the_caller(writer: JournalWriter[PayloadRecord], groups: list[list[Sample]]) -> Append:
    """One record a sibling, summed, shuffled and encoded before it is queued: what the flush thread saves."""

    def append(number: int) -> None:
        for index, sample in enumerate(groups[number]):
            writer.append(sealed_record(number, with_checksum(_payload(number, index, sample)), 0, ()))

    return append


def _payload(group: int, index: int, sample: Sample) -> Payload:
    """As a worker's ``_payload``: the buffers are copied, the checksum is still to be made."""
    return Payload(
        key=AttemptKey(1, group, index, 0), prompt_ids=sample.prompt, token_ids=bytes(sample.ids),
        logprobs=bytes(sample.logprobs), weight_spans=SPANS, reward=0.5, checksum=0, truncated=False, metrics={},
    )  # fmt: skip


def journal_cost(way: Way, groups: list[list[Sample]], pace_s: float) -> Cost:
    """Groups one after another; ``pace_s`` apart, or flat out with 0."""
    folder = Path(tempfile.mkdtemp(prefix="unlost-bench-"))
    cost = Cost()
    options = JournalOptions(backlog_max_bytes=512 << 20)
    with JournalWriter.open(folder / "p", PayloadRecord, journal_id="bench", options=options) as writer:
        append = way(writer, groups)
        gc.collect()
        began, used = perf_counter(), process_time()
        for number in range(len(groups)):
            at = perf_counter()
            append(number)
            cost.caller_s.append(perf_counter() - at)
            if pace_s:
                sleep(pace_s)
        writer.sync()
        cost.total_s, cost.cpu_s = perf_counter() - began, process_time() - used
        cost.disk_bytes = writer.metrics().bytes_written
    shutil.rmtree(folder)
    cost.caller_s.sort()
    return cost


def sidecar_cost(groups: list[list[Sample]], pace_s: float) -> Cost:
    """Three files a group, each written and fsynced before the next; the folder's entry is not synced."""
    folder = Path(tempfile.mkdtemp(prefix="unlost-bench-"))
    cost = Cost()
    began, used = perf_counter(), process_time()
    for number, siblings in enumerate(groups):
        at = perf_counter()
        ids = b"".join(s.ids for s in siblings)
        probabilities = np.concatenate([np.frombuffer(s.logprobs, "<f4") for s in siblings]).astype(np.float16)
        masks = np.ones(len(ids) // 4, dtype=np.uint8)
        for name, data in (("tokens", ids), ("logprobs", probabilities.tobytes()), ("masks", masks.tobytes())):
            with open(folder / f"{number:06d}.{name}", "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        cost.caller_s.append(perf_counter() - at)
        if pace_s:
            sleep(pace_s)
    cost.total_s, cost.cpu_s = perf_counter() - began, process_time() - used
    cost.disk_bytes = sum(p.stat().st_size for p in folder.iterdir())
    shutil.rmtree(folder)
    cost.caller_s.sort()
    return cost


WAYS: dict[str, Callable[[list[list[Sample]], float], Cost]] = {
    "journal, one record a sibling": lambda groups, pace: journal_cost(whole, groups, pace),
    "journal, a record every 64 tokens": lambda groups, pace: journal_cost(chunked, groups, pace),
    "journal, one record, built by the caller": lambda groups, pace: journal_cost(built_by_the_caller, groups, pace),
    "sidecar files, fsync each (fp16)": sidecar_cost,
}
COLUMNS = [
    "group", "ids", "way", "caller p50 ms", "caller p99 ms", "bytes/token on disk", "flat out, MB/s durable",
    "CPU µs per 1,000 tokens",
]  # fmt: skip


def run(quick: bool) -> Result:
    """Both group sizes, both id distributions, all ways interleaved."""
    repeats = 1 if quick else 3
    rows: list[list[str | float | int | None]] = []
    figures: dict[tuple[int, str, str], tuple[float, float]] = {}
    for tokens, count in ((1024, 10 if quick else 80), (8192, 4 if quick else 16)):
        for kind in ("zipf", "uniform"):
            groups = make_groups(count, tokens, kind)
            total = count * SIBLINGS * tokens
            paced: dict[str, list[Cost]] = {way: [] for way in WAYS}
            flat: dict[str, list[Cost]] = {way: [] for way in WAYS}
            for _ in range(repeats):
                for way, measure in WAYS.items():
                    paced[way].append(measure(groups, PACE_S * tokens / 1024))
                    flat[way].append(measure(groups, 0.0))
            for way in WAYS:
                p50 = median(percentile(c.caller_s, 0.5) * 1e3 for c in paced[way])
                p99 = median(percentile(c.caller_s, 0.99) * 1e3 for c in paced[way])
                size = median(c.disk_bytes / total for c in paced[way])
                speed = median(total * 8 / c.total_s / 1e6 for c in flat[way])
                cpu = median(c.cpu_s / total * 1e9 for c in flat[way])
                rows.append([f"{SIBLINGS} x {tokens:,}", kind, way, p50, p99, size, speed, cpu])
                figures[tokens, kind, way] = (p50, size)
    return _result(rows, figures, repeats)


def _result(
    rows: list[list[str | float | int | None]], figures: dict[tuple[int, str, str], tuple[float, float]], repeats: int
) -> Result:
    way = "journal, one record a sibling"
    caller = max(figures[1024, kind, way][0] for kind in ("zipf", "uniform"))
    size = max(figures[1024, kind, way][1] for kind in ("zipf", "uniform"))
    return Result(
        name="payload",
        title="Payloads",
        order=40,
        method=(
            f"Groups of {SIBLINGS} siblings with token ids (int32) and exact float32 log-probabilities, "
            f"{PROMPT_TOKENS} prompt tokens each, through the records that workers write (`replay/payload_records.py`: "
            "CRC-32, byte shuffle, one msgpack record, on the flush thread). Log-probabilities are drawn from "
            "soft-maxes of many sharpnesses; ids Zipf-like over a vocabulary of 152,000 in no order of frequency, "
            "or uniform. "
            "`caller`: time on the generating thread for a whole group, a group of 1,024 tokens every "
            f"{PACE_S * 1e3:g} ms and longer ones as much rarer; {repeats} repeats, all ways in turn. `MB/s`: 8 bytes "
            "a token, flat out until durable. The sidecar writer stores half-precision log-probabilities and a mask, "
            "uncompressed, in three files a group, and waits for three fsyncs."
        ),
        tables=[Table("", COLUMNS, rows)],
        targets=[
            Target(
                "payload append, 8 x 1,024 tokens, on the caller", "≤ 0.15 ms", f"{caller:.3f} ms (p50)", caller <= 0.15
            ),
            Target("payload size, log-probabilities exact", "≤ 6.5 bytes/token", f"{size:.2f}", size <= 6.5),
        ],
        limits=(
            "Synthetic tokens: real text repeats itself more, which makes it smaller. Records of 64 tokens compress "
            "each frame's worth together, so their size depends on how many siblings run at a time."
        ),
    )

"""Which segment files make up the journal: the chain of predecessors of its newest segment.

Every segment's preamble names its predecessor and that one's length. The journal is what one reaches by going back
from the newest segment (highest incarnation, then highest offset) to the floor. Other files are told apart here:
zombies of older incarnations, leftovers below the floor, and headless files whose first write never finished.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from .errors import JournalDamaged, JournalMissing
from .format import HEADER_BYTES_LIMIT, Preamble, parse_preamble, segment_name, segment_offset
from .marks import Mark, journal_crc, read_floor, read_watermark
from .scan import FrameWalk, Source, Window
from .storage import Storage, StorageFile, read_exact


class FileSource:
    """A segment file as a scan source; its size is taken once, so that a growing file reads consistently."""

    def __init__(self, file: StorageFile) -> None:
        self.file = file
        self.size = file.size()

    def read(self, offset: int, size: int) -> bytes:
        """``size`` bytes from ``offset``, fewer at the end. OSError passes through: it is never damage."""
        return read_exact(self.file, offset, size)


@dataclass(slots=True)
class SegmentFile:
    """One file with a segment's name, as one survey found it, and never shared with another.

    ``named_bytes`` is the length that its successor states (None for the last).
    """

    first_offset: int
    path: str
    size: int
    preamble: Preamble | None
    problem: str | None
    named_bytes: int | None = None

    @property
    def name(self) -> str:
        return segment_name(self.first_offset)

    def as_found(self) -> SegmentFile:
        """The same for another survey, which finds out itself what is named."""
        return SegmentFile(self.first_offset, self.path, self.size, self.preamble, self.problem)


NOTHING_KNOWN: Final[Mapping[str, SegmentFile]] = MappingProxyType({})


@dataclass(slots=True)
class Survey:
    """What a directory holds. ``watermark`` is the highest offset known durable before any frame is read."""

    directory: str
    journal_id: str | None
    floor: int
    chain: list[SegmentFile]
    headless: list[SegmentFile]
    strays: list[SegmentFile]
    below_floor: list[SegmentFile]
    watermark: int
    watermark_source: str
    notes: list[str] = field(default_factory=list)

    @property
    def strict(self) -> bool:
        """Without a WATERMARK file, any intact later frame proves damage."""
        return self.watermark_source == "in-band"

    @property
    def watermark_of_last(self) -> int:
        """Up to where the chain's last segment must reach: what lies beyond may be in a headless file after it."""
        return min([self.watermark, *(f.first_offset for f in self.headless)])

    @property
    def incarnation(self) -> int:
        """Highest incarnation in a preamble, zombies included; 0 for an empty journal."""
        preambles = (s.preamble for s in (*self.chain, *self.strays, *self.below_floor))
        return max((p.incarnation for p in preambles if p is not None), default=0)

    def newest_image(self, before: int | None = None) -> int | None:
        """Index in ``chain`` of the newest segment that starts with an image at or below offset ``before``."""
        for index in range(len(self.chain) - 1, -1, -1):
            segment = self.chain[index]
            in_time = before is None or segment.first_offset <= before
            if in_time and segment.preamble is not None and segment.preamble.starts_with_image:
                return index
        return None


def survey_again(storage: Storage, directory: str, before: Survey) -> Survey:
    """The directory as it is now, for one who has looked before: only preambles that may be new are read.

    What has a successor is never written again by the same incarnation, so its preamble and size are taken from the
    look before. After a take-over, and when the successor is gone, all is read anew. What this look can't see is what
    no writer does: a known file that decays, or is replaced by a repair, a copy or another release. Its frames are
    judged whenever they are read, by the preamble known before; only a new reader, ``verify`` or an opening looks at
    the preamble itself. Raises what ``survey`` does.
    """
    known = {file.name: file for file in before.chain[:-1]}
    try:
        found = survey(storage, directory, known=known)
    except JournalDamaged:
        return survey(storage, directory)
    went_on = found.incarnation == before.incarnation and not (found.chain and found.chain[-1].name in known)
    return found if went_on else survey(storage, directory)


def survey(
    storage: Storage, directory: str, *, without: Collection[str] = (), known: Mapping[str, SegmentFile] = NOTHING_KNOWN
) -> Survey:
    """Read every preamble (O(segments), no frame) and find the chain, as if the files ``without`` were gone.

    ``known``: files that are not read again, by name.
    Raises JournalMissing when there is no such directory, JournalDamaged when a segment that must exist does not or
    has an unreadable preamble, JournalUnsupported, OSError.
    """
    _must_exist(storage, directory)
    while True:
        floor_mark = read_floor(storage, directory)
        # Beside a pruning writer the floor may have risen between the two looks; then what is missing was pruned.
        try:
            found = _survey_once(storage, directory, floor_mark, without, known)
            if found.chain or found.headless or read_floor(storage, directory) == floor_mark:
                return found
        except JournalDamaged:
            if read_floor(storage, directory) == floor_mark:
                raise


def _survey_once(
    storage: Storage,
    directory: str,
    floor_mark: Mark | None,
    without: Collection[str],
    known: Mapping[str, SegmentFile],
) -> Survey:
    slots = read_watermark(storage, directory)  # before the listing: what it covers must then be there
    files = _segment_files(storage, directory, without, known)
    floor = floor_mark.offset if floor_mark else 0
    kept = [f for f in files if f.first_offset >= floor]
    result = Survey(directory, None, floor, [], [], [], [f for f in files if f.first_offset < floor], floor, "none")
    _find_chain(result, kept)
    _check_identity(result, floor_mark)
    _find_watermark(result, slots, bool(files))
    return result


def _must_exist(storage: Storage, directory: str) -> None:
    try:
        storage.list_names(directory)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise JournalMissing(f"{directory}: no journal here ({error.strerror or error})") from error


def _segment_files(
    storage: Storage, directory: str, without: Collection[str], known: Mapping[str, SegmentFile]
) -> list[SegmentFile]:
    files = []
    for name in sorted(storage.list_names(directory)):
        if (looked_at := known.get(name)) is not None:
            files.append(looked_at.as_found())
            continue
        first = segment_offset(name)
        if first is None or name in without:
            continue
        with contextlib.suppress(FileNotFoundError):  # pruned or cut since the listing
            files.append(look_at(storage, os.path.join(directory, name), first))
    return files


def look_at(storage: Storage, path: str, first_offset: int) -> SegmentFile:
    """A file with a segment's name, by its preamble; one of another offset than the name's is none.

    Raises JournalUnsupported, FileNotFoundError, OSError.
    """
    file = storage.open(path)
    try:
        parsed = read_preamble(file, path)
        if not isinstance(parsed, str) and parsed.first_offset != first_offset:
            parsed = f"preamble of event {parsed.first_offset} in a file named for event {first_offset}"
        if isinstance(parsed, str):
            return SegmentFile(first_offset, path, file.size(), None, parsed)
        return SegmentFile(first_offset, path, file.size(), parsed, None)
    finally:
        file.close()


def read_preamble(file: StorageFile, path: str) -> Preamble | str:
    """The preamble of a segment file, or why there is none. Raises JournalUnsupported, OSError."""
    return parse_preamble(read_exact(file, 0, HEADER_BYTES_LIMIT), path)


def _find_chain(result: Survey, files: list[SegmentFile]) -> None:
    by_offset = {f.first_offset: f for f in files}
    newest: SegmentFile | None = None
    for file in files:
        if file.preamble is not None and (
            newest is None
            or newest.preamble is None
            or (file.preamble.incarnation, file.first_offset) > (newest.preamble.incarnation, newest.first_offset)
        ):
            newest = file
    current = newest
    while current is not None and current.preamble is not None:
        result.chain.append(current)
        current = _predecessor(result, current, current.preamble, by_offset)
    result.chain.reverse()
    on_chain = {f.first_offset for f in result.chain}
    end = result.chain[-1].first_offset if result.chain else -1
    for file in files:
        if file.first_offset in on_chain:
            continue
        if file.preamble is None and file.first_offset > end:
            result.headless.append(file)
        else:
            result.strays.append(file)
            result.notes.append(f"{file.name}: ignored, no later segment names it ({_describe(file)})")


def _describe(file: SegmentFile) -> str:
    if file.preamble is None:
        return f"unreadable: {file.problem}"
    return f"written by incarnation {file.preamble.incarnation}"


def _predecessor(
    result: Survey, current: SegmentFile, preamble: Preamble, by_offset: dict[int, SegmentFile]
) -> SegmentFile | None:
    """The segment before ``current``, None at the floor. Raises JournalDamaged if it is not there or unreadable."""
    if current.first_offset == result.floor:
        return None
    if not preamble.has_predecessor:
        raise JournalDamaged(
            result.directory, current.name, 0, result.floor,
            f"the journal begins at event {result.floor}, but this first segment begins at {current.first_offset}",
        )  # fmt: skip
    name = segment_name(preamble.pred_first_offset)
    if preamble.pred_first_offset >= current.first_offset:
        raise JournalDamaged(
            result.directory, current.name, 0, current.first_offset,
            f"names {name} as predecessor, which does not begin before it",
        )  # fmt: skip
    before = by_offset.get(preamble.pred_first_offset)
    if before is None:
        raise JournalDamaged(
            result.directory, name, 0, max(preamble.pred_first_offset, result.floor),
            f"missing; {current.name} follows it and the journal's floor is event {result.floor}",
        )  # fmt: skip
    if before.preamble is None:
        raise JournalDamaged(result.directory, name, 0, before.first_offset, str(before.problem))
    if before.preamble.incarnation > preamble.incarnation:
        raise JournalDamaged(
            result.directory, current.name, 0, current.first_offset,
            f"names {name} of incarnation {before.preamble.incarnation} as predecessor, itself {preamble.incarnation}",
        )  # fmt: skip
    before.named_bytes = preamble.pred_bytes
    return before


def _check_identity(result: Survey, floor: Mark | None) -> None:
    """All files must be of one journal; one copied in from another is refused, whatever it says."""
    everything = [f for f in (*result.below_floor, *result.chain, *result.strays) if f.preamble is not None]
    everything.sort(key=lambda f: f.first_offset)
    if not everything:
        return
    ids = [f.preamble.journal_id for f in everything if f.preamble is not None]
    result.journal_id = ids[0]
    for file, journal_id in zip(everything, ids, strict=True):
        if journal_id != ids[0]:
            raise JournalDamaged(
                result.directory, file.name, 0, file.first_offset,
                f"belongs to journal {journal_id!r}, the others to {ids[0]!r}",
            )  # fmt: skip
    if floor is not None and floor.journal_crc != journal_crc(ids[0]):
        raise JournalDamaged(
            result.directory, "FLOOR", 0, result.floor, f"it belongs to another journal than {ids[0]!r}"
        )


def _find_watermark(result: Survey, slots: list[Mark], any_files: bool) -> None:
    """Highest durable offset known without reading a frame.

    WATERMARK's slots, each only up to where a newer incarnation begins, and the newest segment's start (a segment is
    begun only when everything before it is durable).
    """
    marks = [_clip(result, slot) for slot in slots if _same_journal(result, slot)]
    in_band = result.chain[-1].first_offset if result.chain else result.floor
    if marks:
        result.watermark, result.watermark_source = max(in_band, *marks), "WATERMARK"
        return
    result.watermark = in_band
    result.watermark_source = "in-band" if any_files else "none"
    if any_files:
        result.notes.append(
            "WATERMARK is missing or unreadable: durability is judged by what the frames themselves say, which cannot "
            "cover the last ones (docs/DURABILITY.md)"
        )


def _same_journal(result: Survey, slot: Mark) -> bool:
    return result.journal_id is None or slot.journal_crc == journal_crc(result.journal_id)


def _clip(result: Survey, slot: Mark) -> int:
    """What a zombie states about events that a newer incarnation replaced does not count."""
    for file in result.chain:
        if file.preamble is not None and file.preamble.incarnation > slot.incarnation:
            return min(slot.offset, file.first_offset)
    return slot.offset


def open_walk(storage: Storage, segment: SegmentFile, directory: str) -> tuple[StorageFile, FrameWalk]:
    """A frame walk over a segment of the chain, up to what its successor names. The caller closes the file."""
    assert segment.preamble is not None
    file = storage.open(segment.path)
    source: Source = FileSource(file)
    return file, FrameWalk(Window(source, segment.named_bytes), segment.preamble, os.path.join(directory, segment.name))

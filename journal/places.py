"""Where frames begin, as a reader's walks have found it: so that the next look costs what is new, not what is there.

One rule says what may be remembered. What is not durable yet may be cut back, or begun anew under the same name, after
a failed write or a power cut; what is durable never changes while the segment's preamble is the same. So a place is
remembered only if everything before it was known durable when it was passed, and believed only under that preamble.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from operator import attrgetter

from .format import FrameHeader, Preamble
from .scan import Position
from .survey import SegmentFile

FRAMES_APART = 32
BYTES_APART = 1 << 18
"""A remembered place at least every so many frames or bytes, whichever is less: what a look-up may have to walk."""

ANYWHERE = sys.maxsize
"""Beyond every offset: ``nearest`` gives the last place."""

_offset = attrgetter("offset")


class Places:
    """For each segment the places passed, some way apart, and the newest one. In memory only; one thread."""

    def __init__(self) -> None:
        self._passed: dict[int, tuple[Preamble | None, list[Position]]] = {}

    def nearest(self, segment: SegmentFile, offset: int) -> Position | None:
        """The last place that is not after ``offset``."""
        preamble, passed = self._passed.get(segment.first_offset, (None, []))
        at = bisect_right(passed, offset, key=_offset)
        return passed[at - 1] if at and preamble == segment.preamble else None

    def passing(self, segment: SegmentFile, place: Position, header: FrameHeader, watermark: int) -> None:
        """A walk has stepped from ``place`` over the frame with this header, which itself says what was durable then.

        ``watermark``: of a survey that was made before the walk.
        """
        if place.offset > max(watermark, header.durable_upto):
            return
        preamble, passed = self._passed.get(segment.first_offset, (None, []))
        if not passed or preamble != segment.preamble:
            self._passed[segment.first_offset] = (segment.preamble, [place])
        elif place.offset > passed[-1].offset:
            if len(passed) > 1 and _close(passed[-2], passed[-1]):
                passed.pop()
            passed.append(place)

    def forget_below(self, floor: int) -> None:
        """Let go of segments that were pruned."""
        for first_offset in [first for first in self._passed if first < floor]:
            del self._passed[first_offset]


def _close(one: Position, other: Position) -> bool:
    return other.frames - one.frames < FRAMES_APART and other.byte - one.byte < BYTES_APART

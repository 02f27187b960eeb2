"""Which group and which attempt a line of a trace speaks of.

A run written by unlost says so itself: by ``group_id`` and ``attempt``, which are the journal's. Anyone else's rows of
different runs match by prompt and generation index alone: attempts are numbered again here, and a group is a prompt
until it is sealed. An abandonment without ``prompt_id`` is matched by what it has (``match_loose``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

from . import events as ev

UNKNOWN: Final = -1


class Try:
    """An attempt as the trace tells of it. ``said``: its number in the trace."""

    __slots__ = ("attempt", "group", "open", "run", "said", "sealed", "sibling")

    def __init__(self, group: int, sibling: int, attempt: int, run: str, said: int) -> None:
        self.group = group
        self.sibling = sibling
        self.attempt = attempt
        self.run = run
        self.said = said
        self.open = True
        self.sealed = False


class Where(NamedTuple):
    """What a line names. ``group``: our number of it, in runs that tell theirs; ``prompt``: "" if it has none."""

    group: int | None
    prompt: str


class Loose(NamedTuple):
    """An abandonment that names no group and no prompt; None is what it does not say."""

    t: int
    sibling: int | None
    said: int | None
    reason: str
    tokens: int
    durable: int


class Matching:
    """Groups and attempts so far. ``count`` gathers what did not match, by kind, for the notes."""

    def __init__(self, count: Counter[str]) -> None:
        self.count = count
        self._numbers: dict[tuple[str, str, int], int] = {}
        self._used: dict[str, set[int]] = {}
        self._free: Counter[str] = Counter()
        self._known: set[int] = set()
        self._groups: dict[str, int] = {}  # by prompt; only of groups that are told by prompt
        self._latest: dict[str, int] = {}  # also of groups that are sealed
        self._epochs: Counter[str] = Counter()
        self._tries: dict[tuple[int, int], list[Try]] = {}
        self._sealed: Counter[int] = Counter()

    def number(self, kind: str, owner: str, told: int) -> int:
        """A number of our own for ``owner``'s: the same, unless another owner has that already."""
        key = (kind, owner, told)
        if key not in self._numbers:
            used = self._used.setdefault(kind, set())
            self._numbers[key] = told if told not in used else self._free[kind]
            used.add(self._numbers[key])
            self._free[kind] = max(self._free[kind], self._numbers[key] + 1)
        return self._numbers[key]

    def another(self, kind: str) -> int:
        """A number that nobody has."""
        return self.number(kind, "", self._free[kind])

    # --- groups ------------------------------------------------------------------------------------------------------

    def knows(self, group: int) -> bool:
        """Whether there is a row of that group."""
        return group in self._known

    def add(self, group: int) -> None:
        """From here on there is that group."""
        self._known.add(group)

    def group_of(self, where: Where) -> int | None:
        """The group that a line speaks of, sealed or not; None, and counted, if its beginning is not in the trace."""
        group = where.group if where.group is not None else self._latest.get(where.prompt)
        if group is not None and group in self._known:
            return group
        self.count["unmatched"] += 1
        return None

    def unsealed(self, prompt: str) -> int | None:
        """The group that a prompt is at present, where groups are told by prompt."""
        return self._groups.get(prompt)

    def latest(self, prompt: str) -> int | None:
        """The group that a prompt was last, likewise."""
        return self._latest.get(prompt)

    def begin(self, t: int, where: Where, generations: int = UNKNOWN, version: int = 0) -> tuple[int, list[ev.Event]]:
        """A group that nobody told of before its first attempt, or that is told by its prompt."""
        prompt = where.prompt
        if where.group is None:
            group = self._groups[prompt] = self._latest[prompt] = self.another("group")
            admission = self.number("admission", "", group)
        else:
            group, admission = where.group, -2 - where.group
        self.add(group)
        reference = ev.PromptRef(prompt, self._epochs[prompt], prompt_index(prompt, group), 0)
        self._epochs[prompt] += 1
        return group, [
            ev.BatchReserved(t, admission, group, (reference,), generations, 0, 0),
            ev.BatchAdmitted(t, admission, UNKNOWN, group, version),
        ]

    def seal(self, prompt: str) -> tuple[int, int] | None:
        """A prompt's group is told to be sealed: (group, siblings sealed). Dispatched again, it is another group."""
        group = self._groups.pop(prompt, None)
        if group is None:
            self.count["unmatched"] += 1
            return None
        return group, self._sealed[group]

    def give_up(self, prompt: str) -> None:
        """Dispatched again, it is another group."""
        self._groups.pop(prompt, None)

    # --- attempts ----------------------------------------------------------------------------------------------------

    def dispatch(self, group: int, sibling: int, said: int | None, run: str, *, own: bool) -> Try | None:
        """A new attempt; None, and counted, if its group told of that one before."""
        tries = self._tries.setdefault((group, sibling), [])
        if own and said is not None and any(tried.attempt == said for tried in tries):
            self.count["again"] += 1
            return None
        attempt = said if own and said is not None else len(tries)
        tried = Try(group, sibling, attempt, run, len(tries) if said is None else said)
        tries.append(tried)
        return tried

    def prompt_of_next(self, sibling: int, said: int | None) -> str | None:
        """Whose next attempt a dispatch without ``prompt_id`` is; None, and counted, if that is not clear."""
        fitting = [
            prompt
            for prompt, group in self._groups.items()
            if (tries := self._tries.get((group, sibling)))
            and not tries[-1].open
            and (said is None or tries[-1].said + 1 == said)
        ]
        if len(fitting) == 1:
            return fitting[0]
        self.count["promptless"] += 1
        return None

    def _find(self, where: Where, sibling: int, said: int | None) -> Try | None:
        """The attempt that a line names: its number in this run, else the last one."""
        group = where.group if where.group is not None else self._latest.get(where.prompt)
        tries = self._tries.get((group, sibling), []) if group is not None else []
        matching = [tried for tried in tries if said is None or tried.said == said]
        return matching[-1] if matching else None

    def end(self, where: Where, sibling: int, said: int | None, *, sealed: bool = False) -> Try | None:
        """The attempt that a line ends; None, and counted, if there is none, or if it had ended."""
        tried = self._find(where, sibling, said)
        if tried is None:
            self.count["unmatched"] += 1
            return None
        if not tried.open:
            self.count["twice"] += 1
            return None
        tried.open = False
        if sealed:
            tried.sealed = True
            self._sealed[tried.group] += 1
        return tried

    def unseal(self, where: Where, sibling: int, said: int | None) -> Try | None:
        """The sealed attempt that a line gives up; None if there is none."""
        tried = self._find(where, sibling, said)
        if tried is None or tried.open or not tried.sealed:
            return None
        tried.sealed = False
        self._sealed[tried.group] -= 1
        if where.group is None:
            self._groups[where.prompt] = tried.group  # unfinished again
        return tried

    def match_loose(self, waiting: Sequence[Loose], run: str) -> list[tuple[Try, Loose]]:
        """Abandonments in a row, by sibling, attempt and reason.

        If several attempts fit and it can't matter which, all are taken, else none is.
        """
        out: list[tuple[Try, Loose]] = []
        kinds: dict[tuple[int | None, int | None, str], list[Loose]] = {}
        for loose in waiting:
            kinds.setdefault((loose.sibling, loose.said, loose.reason), []).append(loose)
        for (sibling, said, reason), lines in kinds.items():
            fitting = [
                tries[-1]
                for (_, index), tries in self._tries.items()
                if tries
                and (sibling is None or index == sibling)
                and tries[-1].open
                and (said is None or tries[-1].said == said)
                and ((tries[-1].run != run) == (reason == ev.ABANDON_RESTART))
            ]
            if len(fitting) > len(lines):
                self.count["ambiguous"] += len(lines)
                continue
            self.count["unmatched"] += len(lines) - len(fitting)
            for tried, loose in zip(fitting, lines, strict=False):
                tried.open = False
                out.append((tried, loose))
        return out


def prompt_index(prompt: str, otherwise: int) -> int:
    """A prompt's index in the data set, which is how prompts are told; ``otherwise`` if it is told in another way."""
    return int(prompt) if prompt.isascii() and prompt.isdecimal() and len(prompt) < 16 else otherwise

"""Finds the pass, then the sites, that make a check fail.

The algorithm alone: it asks a function whether the program is good under a pipeline,
and never looks at a program itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hlo_tools.passes.inline_composites import InlineComposites
from hlo_tools.pipeline import Pass, PassPipeline, spelling

# More culprits than this are not looked for: each takes as many checks as the first.
MAX_CULPRITS = 3


@dataclass(frozen=True)
class Outcome:
    """What a check says about a program.

    Attributes:
      good: whether the program is as it should be.
      detail: what is wrong with it, as a sentence.
      remembered: whether nothing was run: the same program was checked before.
    """

    good: bool
    detail: str = ""
    remembered: bool = False


@dataclass(frozen=True)
class Culprit:
    """The step of a pipeline that makes the check fail.

    Attributes:
      name: of the pass, as the spec spells it.
      position: in the pipeline, from 0.
      before: spec of a pipeline that is good.
      after: spec of the same and this pass, which is bad.
      groups: sets of sites, each as small as it can be and bad by itself, while
        all other sites are left alone; empty if the pass has no sites, or is bad
        without them too.
      reduced: spec of `after` with nothing but the first group treated.
      without: spec of `after` with all sites of `groups` left alone.
      others: whether that is still bad: there are more culprits.
      detail: what is wrong, as the check says about `reduced`.
    """

    name: str
    position: int
    before: str
    after: str
    groups: tuple[tuple[str, ...], ...] = ()
    reduced: str = ""
    without: str = ""
    others: bool = False
    detail: str = ""

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites of all groups."""
        return tuple(site for group in self.groups for site in group)


@dataclass(frozen=True)
class Verdict:
    """What a bisection found.

    Attributes:
      culprit: None if nothing is wrong, or if the check is.
      broken_check: why the check can not tell good from bad, such as that it finds
        the program bad as it is written; "" if it can.
      checks: how many programs were checked.
    """

    culprit: Culprit | None = None
    broken_check: str = ""
    checks: int = 0


class Bisection:
    """One search for a culprit.

    Args:
      pipeline: the passes; what its full run gives is in question.
      check: spec of a pipeline -> outcome. "" stands for the program as it is.
      sites: spec of a pipeline -> ids of the sites that its last pass may treat.
      tell: called with one line on what is being checked.
    """

    def __init__(
        self,
        pipeline: PassPipeline,
        check: Callable[[str], Outcome],
        sites: Callable[[str], Sequence[str]],
        tell: Callable[[str], Any] = lambda line: None,
    ):
        self.passes = pipeline.passes
        self._check, self._sites, self._tell = check, sites, tell
        self._known: dict[str, Outcome] = {}
        self.checks = 0

    def run(self) -> Verdict:
        """Searches; see `Verdict`."""
        self._tell("checking the program as it is written")
        original = self.outcome("")
        if not original.good:
            detail = f": {original.detail}" * bool(original.detail)
            why = f"it fails on the program as it is written{detail}"
            return Verdict(None, why, self.checks)
        self._tell("checking the whole pipeline")
        if self.outcome(self.spec(len(self.passes))).good:
            return Verdict(checks=self.checks)
        count = self._first_bad_prefix()
        culprit = self._blame(count)
        return Verdict(culprit, "", self.checks)

    def outcome(self, spec: str) -> Outcome:
        """What the check says about a pipeline; asked once for each."""
        if spec not in self._known:
            self._known[spec] = found = self._check(spec)
            self.checks += not found.remembered
        return self._known[spec]

    def spec(self, count: int, changes: dict[str, str] | None = None) -> str:
        """The spec of the first passes, in a form that can be run.

        Args:
          count: how many of them.
          changes: options of the last one.
        """
        chosen: list[Pass] = list(self.passes[:count])
        if changes:
            chosen[-1] = dataclasses.replace(chosen[-1], **changes)  # type: ignore
        if not chosen:
            return ""
        # Composites that were not bound become the original operations again. Nothing
        # else is added: a pass must not be blamed, or excused, for another one.
        if not any(isinstance(one, InlineComposites) for one in chosen):
            chosen.append(InlineComposites())
        return str(PassPipeline(tuple(chosen)))

    def _first_bad_prefix(self) -> int:
        """The length of a prefix that is bad, while the next shorter one is good."""
        good, bad = 0, len(self.passes)
        while bad - good > 1:
            middle = self._next_prefix(good, bad)
            name = spelling(self.passes[middle - 1])
            self._tell(f"checking pass {middle} of {len(self.passes)}: {name}")
            if self.outcome(self.spec(middle)).good:
                good = middle
            else:
                bad = middle
        return bad

    def _next_prefix(self, good: int, bad: int) -> int:
        """The length of the prefix to check: before, then after the likely culprits."""
        loose = [
            count
            for count in range(good + 1, bad + 1)
            if self.passes[count - 1].exactness != "bitwise"
        ]
        if 1 <= len(loose) <= 2:
            near = [n for n in (loose[0] - 1, loose[0]) if good < n < bad]
            if near:
                return near[0]
        return (good + bad) // 2

    def _blame(self, count: int) -> Culprit:
        """What is wrong with the last pass of a prefix."""
        guilty = self.passes[count - 1]
        before, after = self.spec(count - 1), self.spec(count)
        culprit = Culprit(
            spelling(guilty),
            count - 1,
            before,
            after,
            detail=self.outcome(after).detail,
        )
        if not hasattr(guilty, "skip_sites"):
            return culprit
        sites = list(self._sites(after))

        def without(left_alone: Sequence[str]) -> str:
            if not left_alone:
                return after
            already = getattr(guilty, "skip_sites", "").split("+")
            ids = [site for site in [*already, *left_alone] if site]
            return self.spec(count, {"skip_sites": "+".join(dict.fromkeys(ids))})

        def fails(treated: Sequence[str]) -> bool:
            left = [site for site in sites if site not in treated]
            self._tell(f"checking {len(treated)} of {len(sites)} sites")
            return not self.outcome(without(left)).good

        if not sites or fails(()):
            return culprit  # it is bad whatever becomes of the sites
        groups: list[tuple[str, ...]] = []
        rest = sites
        while len(groups) < MAX_CULPRITS and fails(rest):
            groups.append(tuple(smallest_failing(rest, fails)))
            rest = [site for site in rest if site not in groups[-1]]
        only = without([site for site in sites if site not in groups[0]])
        return dataclasses.replace(
            culprit,
            groups=tuple(groups),
            reduced=only,
            without=without([site for group in groups for site in group]),
            others=fails(rest),
            detail=self.outcome(only).detail,
        )


def smallest_failing[T](
    items: Sequence[T], fails: Callable[[Sequence[T]], bool]
) -> list[T]:
    """Returns a set of items that fails while no item of it can be left out.

    Args:
      items: they fail together.
      fails: whether a part of them, in the same order, does.

    Returns:
      The set, found in log2(n) + 1 questions if one item is to blame.
    """
    rest, sure = list(items), True
    while len(rest) > 1:
        left, right = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        if fails(left):
            rest, sure = left, True
        else:  # one item alone would have to be here
            rest, sure = right, False
    if sure or fails(rest):
        return rest
    return _delta_debugged(list(items), fails)


def _delta_debugged[T](items: list[T], fails: Callable[[Sequence[T]], bool]) -> list[T]:
    """The same where it takes several items together to fail."""
    parts = 2
    while len(items) > 1:
        size = -(-len(items) // parts)
        chunks = [items[i : i + size] for i in range(0, len(items), size)]
        smaller = next((chunk for chunk in chunks if fails(chunk)), None)
        if smaller is not None:
            items, parts = smaller, 2
            continue
        for chunk in chunks if len(chunks) > 2 else ():
            remaining = [item for item in items if item not in chunk]
            if fails(remaining):
                items, parts = remaining, max(parts - 1, 2)
                break
        else:
            if parts >= len(items):
                return items
            parts = min(2 * parts, len(items))
    return items

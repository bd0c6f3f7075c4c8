"""What the demo found out, and whether it held."""

from __future__ import annotations

from dataclasses import dataclass

from kvpd._kvpd import PageFormat, Reason, Verdict
from kvpd.cli.demo.oracle import Comparison
from kvpd.cli.demo.scenario import Scenario
from kvpd.receive import PlacementChoice
from kvpd.request import Outcome, Ready

# What must be among the reasons when the decoder refuses each offer.
REFUSALS = {
    "untagged": "untagged-peer",
    "other element type": "element-type",
    "other head count": "total-kv-heads",
    "conversion off": "conversion-disabled",
}


@dataclass(frozen=True)
class Refusal:
    """One pair that must not be served.

    Attributes:
        expected_code: the reason that must be among those given.
        was_registered: whether the refusing agent knows the peer nevertheless.
    """

    name: str
    expected_code: str
    reasons: tuple[Reason, ...]
    was_registered: bool

    @property
    def holds(self) -> bool:
        """Refused for the right reason, with nothing of the peer registered."""
        given = {reason.code for reason in self.reasons}
        return self.expected_code in given and not self.was_registered


@dataclass(frozen=True)
class PlacementResult:
    """One pass over all requests.

    Attributes:
        num_alone: requests that were started one after another, so that their times are their
            own; the rest were in flight together.
        notices: release notices that reached the prefill.
    """

    placement: PlacementChoice
    verdict: Verdict
    outcomes: tuple[Outcome, ...]
    num_alone: int
    wall_seconds: float
    notices: tuple[str, ...]
    expected_notices: tuple[str, ...]
    prefill_unchanged: bool
    comparison: Comparison

    @property
    def holds(self) -> bool:
        """All requests ready, each block released once, every byte right on both sides."""
        return (
            all(isinstance(outcome, Ready) for outcome in self.outcomes)
            and len(self.outcomes) == len(self.expected_notices)
            and sorted(self.notices) == sorted(self.expected_notices)
            and self.prefill_unchanged
            and self.comparison.holds
        )


@dataclass(frozen=True)
class DemoResult:
    """Everything the demo found out."""

    scenario: Scenario
    prefill_pid: int
    prefill_format: PageFormat
    decode_format: PageFormat
    placements: tuple[PlacementResult, ...]
    refusals: tuple[Refusal, ...]

    @property
    def holds(self) -> bool:
        """Whether everything that was checked held."""
        if not self.placements or len(self.refusals) != len(REFUSALS):
            return False  # nothing was shown
        return all(p.holds for p in self.placements) and all(r.holds for r in self.refusals)

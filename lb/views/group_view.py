"""The view of a lockstep group as one client sees it, for people and metrics. Pure: states and reports in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.wire.control import Membership
from engine.wire.ids import EngineId
from engine.wire.messages import EngineReport, GroupState


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """One lockstep group at one moment.

    epoch: of the membership in force; 0 before the first. wave: the newest that was started. placement: member -> ids
    of the experts it holds, in the order of the ranks. proposal: the membership that is being prepared. is_direct: it
    is prepared because a member died or is parked.
    """

    epoch: int
    wave: int
    placement: Mapping[EngineId, Sequence[int]]
    proposal: Membership | None = None
    is_direct: bool = False

    def load_imbalance(self, expert_tokens: Sequence[int]) -> float:
        """Return the share of the busiest member over the average one's; 1 is even, also when nothing was counted.

        expert_tokens: how often each expert was chosen. The copies of an expert share what it gets.
        """
        copies = [sum(expert in held for held in self.placement.values()) for expert in range(len(expert_tokens))]
        shares = [
            sum(expert_tokens[expert] / copies[expert] for expert in held if expert < len(expert_tokens))
            for held in self.placement.values()
        ]
        return max(shares) * len(shares) / sum(shares) if sum(shares) else 1.0


def view_group(state: GroupState | None) -> GroupView | None:
    """Return the lockstep group that a state describes; None for independent ranks, and before there was any state."""
    if state is None or not any(m is not None and m.store_address for m in (state.committed, state.proposal)):
        return None
    committed = state.committed
    return GroupView(
        epoch=committed.epoch,
        wave=state.wave_started,
        placement=dict(zip(committed.members, committed.expert_placement, strict=False)),
        proposal=state.proposal,
        is_direct=state.direct,
    )


def experts_of(report: EngineReport) -> Sequence[int]:
    """Return the ids of the experts that an engine holds in the epoch it steps in; none outside a group."""
    if report.member is None or report.member.membership.epoch != report.epoch:
        return ()
    membership = report.member.membership
    placement = dict(zip(membership.members, membership.expert_placement, strict=False))
    return placement.get(report.engine_id, ())

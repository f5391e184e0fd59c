"""What ``/v1/cluster`` says about a lockstep group and each of its members, as plain data."""

from typing import Any

from engine.wire.messages import EngineReport
from lb.views.group_view import GroupView, experts_of
from metrics.deployment import DeploymentReading


def describe_group(group: GroupView | None, reading: DeploymentReading) -> dict[str, Any] | None:
    """Return the group's membership, and the one that is being prepared; None for independent ranks.

    ``load_imbalance`` is what the experts of the busiest rank had to do over that of the average rank; 1 is even.
    """
    if group is None:
        return None
    proposal = group.proposal
    return {
        "epoch": group.epoch,
        "wave": group.wave,
        "members": [member.rank for member in group.placement],
        "experts": {str(member.rank): list(held) for member, held in group.placement.items()},
        "load_imbalance": round(group.load_imbalance(reading.expert_tokens), 3),
        "proposal": None
        if proposal is None
        else {
            "epoch": proposal.epoch,
            "members": [member.rank for member in proposal.members],
            "direct": group.is_direct,
        },
    }


def describe_member(report: EngineReport | None, num_empty_steps: int) -> dict[str, Any] | None:
    """Return what a rank of a lockstep group says of itself; None for an independent one.

    num_empty_steps: over all incarnations of the rank.
    """
    if report is None or report.member is None:
        return None
    return {
        "epoch": report.epoch,
        "ready_epoch": report.ready_epoch,
        "wave": report.wave,
        "experts": list(experts_of(report)),
        "empty_steps": num_empty_steps,
    }

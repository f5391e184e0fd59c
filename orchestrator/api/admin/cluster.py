"""Descriptions of ranks, API processes, settings and the lockstep group, as plain data for the state routes."""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import asdict

from engine.wire.control import ClusterSettings
from engine.wire.load import Load
from engine.wire.messages import EngineReady, EngineReport
from engine.wire.replicas import ReplicaInfo
from engine.wire.states import EngineState
from lb.views.engine_view import EngineView
from lb.views.group_view import GroupView, experts_of
from metrics.deployment import ApiServerView, DeploymentReading

_NO_LOAD = Load()


def describe_rank(view: EngineView, reading: DeploymentReading) -> dict[str, Any]:
    """Return one rank of ``/v1/cluster``; ``in_flight`` and ``picks`` are of all API processes together.

    What an engine has not reported yet is empty or zero: a loading one reports its phase and progress (0..1) before its
    handshake, and its device and pid may come with either. ``lockstep`` is None for an independent rank.
    """
    report, ready = view.report, view.ready
    load = _NO_LOAD if report is None else report.load
    return {
        "engine_id": str(view.engine_id),
        "rank": view.engine_id.rank,
        "incarnation": view.engine_id.incarnation,
        "state": view.state,
        "reason": view.reason,
        "node": _first_known("node", ready, report, view.replica),
        "device": _first_known("device", ready, report),
        "restarts": sum(view.replica.restarts.values()) if view.replica is not None else 0,
        "last_end": view.replica.last_reason if view.replica is not None else "",
        "pid": (ready and ready.pid) or (report and report.pid) or 0,
        "waiting": load.num_queued + load.num_waiting,
        "running": load.num_running,
        "kv_usage": load.kv_usage,
        "in_flight": reading.in_flight.get(view.engine_id.rank, 0),
        "picks": reading.stats.ranks[view.engine_id.rank].num_picks,
        **_describe_phase(report),
        "lockstep": describe_member(report, reading.totals_of(view.engine_id.rank).num_empty_steps),
    }


def describe_api_server(server: ApiServerView) -> dict[str, Any]:
    """Return one API process of ``/v1/cluster``; of a replica without a process only index and starts are of use."""
    return {
        "index": server.index,
        "pid": server.pid,
        "incarnation": server.incarnation,
        "starts": server.num_starts,
        "ready_ranks": server.num_ready,
        "connections": server.num_connections,
        "pending_requests": server.num_open,
        "loop_lag_s": server.lag_s,
        "snapshot_age_s": server.snapshot_age_s,
    }


def describe_settings(settings: ClusterSettings) -> dict[str, Any]:
    """Return what the operator wants, in words."""
    return {
        "seq": settings.seq,
        "pause": settings.pause.name.lower(),
        "sleep_level": settings.sleep_level,
        "cordoned": settings.cordoned,
        "log_level": settings.log_level,
    }


def describe_load(view: EngineView) -> dict[str, Any]:
    """Return one rank of ``/load``: the counters it reported last, and which settings are in force there."""
    report = view.report
    load = _NO_LOAD if report is None else report.load
    return {
        "rank": view.engine_id.rank,
        "engine_id": str(view.engine_id),
        "state": view.state,
        "num_sequences": load.num_sequences,
        **asdict(load),
        "settings_seq": 0 if report is None else report.settings_seq,
        "is_sleeping": report is not None and report.is_sleeping,
    }


def describe_ready(ready: EngineReady | None) -> dict[str, Any]:
    """Return what an engine reported in its handshake; nothing before that."""
    if ready is None:
        return {}
    return asdict(ready) | {"engine_id": str(ready.engine_id), "features": list(ready.features)}


def describe_readiness(views: Sequence[EngineView], draining: bool) -> tuple[bool, dict[str, Any]]:
    """Return whether a request could be served now, and the body that names what is missing."""
    num_ready = sum(view.state is EngineState.READY for view in views)
    missing = ["the server is shutting down"] if draining else []
    if num_ready == 0:
        missing.append("no engine is ready")
        missing += [_describe_missing(view) for view in views]
    ready = num_ready > 0 and not draining
    return ready, {"ready": ready, "ready_ranks": num_ready, "known_ranks": len(views), "missing": missing}


def _describe_phase(report: EngineReport | None) -> dict[str, Any]:
    if report is None:
        return {"phase": "", "detail": "", "progress": 0.0}
    return {"phase": report.phase.name.lower(), "detail": report.detail, "progress": report.progress}


def _describe_missing(view: EngineView) -> str:
    report = view.report
    progress = "" if report is None or not report.detail else f", {report.detail} {report.progress:.0%}"
    reason = f" ({view.reason})" if view.reason else ""
    return f"rank {view.engine_id.rank} is {view.state}{progress}{reason}"


def _first_known(field: str, *sources: EngineReady | EngineReport | ReplicaInfo | None) -> str:
    """Return the first value in this field that is not empty."""
    values = (getattr(source, field, "") for source in sources)
    return next((str(value) for value in values if value), "")


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
    """Return what a rank of a lockstep group reports of itself; None for an independent one.

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

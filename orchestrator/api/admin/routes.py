"""The routes of the admin calls; names and shapes are vLLM's where it has them. Plain FastAPI."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field, model_validator

from engine.wire.build import build_id
from engine.wire.control import PauseMode
from engine.wire.process import LogLevel
from lb.views.engine_view import EngineView
from orchestrator.api.admin.admin import Admin, by_rank
from orchestrator.api.admin.cluster import describe_load, describe_ready, describe_settings
from orchestrator.control.messages import Cordon, Pause, Resume, SetLogLevel, Sleep, WakeUp
from orchestrator.llm.async_llm import AsyncLLM

_DEFAULT_TIMEOUT_S = 60.0
_MAX_TIMEOUT_S = 3_600.0

Timeout = Annotated[
    float, Query(alias="timeout", gt=0, le=_MAX_TIMEOUT_S, description="seconds until the answer is 504")
]


class AbortBody(BaseModel):
    """The requests to end: some by name, or all of them."""

    model_config = ConfigDict(extra="forbid")

    request_ids: list[Annotated[str, Field(min_length=1, max_length=256)]] | None = Field(None, max_length=10_000)
    all: bool = False

    @model_validator(mode="after")
    def _names_or_all(self) -> "AbortBody":
        if (self.request_ids is None) != self.all:
            raise ValueError("give either request_ids or all: true")
        return self


class RpcBody(BaseModel):
    """The registered method to run on every rank."""

    model_config = ConfigDict(extra="forbid")

    method: str = Field(min_length=1, max_length=256)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: float = Field(_DEFAULT_TIMEOUT_S, gt=0, le=_MAX_TIMEOUT_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """The part of ``/server_info`` that does not change. serve_config: the options, without secrets."""

    served_model_name: str
    model_root: str
    api_process: str
    serve_config: Mapping[str, Any]


def admin_router(admin: Admin, llm: AsyncLLM, info: ServerInfo) -> APIRouter:
    """Return the admin routes."""
    router = APIRouter()
    _add_pause_routes(router, admin)
    _add_sleep_routes(router, admin)
    _add_rank_routes(router, admin)
    _add_group_routes(router, admin)
    _add_call_routes(router, admin)
    _add_state_routes(router, admin, llm, info)
    return router


def _add_pause_routes(router: APIRouter, admin: Admin) -> None:
    @router.post("/pause")
    async def pause(
        mode: Literal["abort", "wait", "keep"] = "abort", timeout_s: Timeout = _DEFAULT_TIMEOUT_S
    ) -> dict[str, Any]:
        settings = await admin.change(Pause(PauseMode[mode.upper()]), timeout_s)
        return {"status": "paused", "mode": mode, "settings_seq": settings.seq}

    @router.post("/resume")
    async def resume(timeout_s: Timeout = _DEFAULT_TIMEOUT_S) -> dict[str, Any]:
        settings = await admin.change(Resume(), timeout_s)
        return {"status": "resumed", "settings_seq": settings.seq}

    @router.get("/is_paused")
    async def is_paused() -> dict[str, Any]:
        settings = await admin.settings()
        behind = admin.ranks_behind(settings)
        return {
            "is_paused": settings.pause is not PauseMode.RUN,
            "mode": settings.pause.name.lower(),
            "in_force": not behind,
            "ranks_behind": behind,
        }


def _add_sleep_routes(router: APIRouter, admin: Admin) -> None:
    @router.post("/sleep")
    async def sleep(
        level: Annotated[int, Query(ge=1, le=2)] = 1, timeout_s: Timeout = _DEFAULT_TIMEOUT_S
    ) -> dict[str, Any]:
        settings = await admin.change(Sleep(level), timeout_s)
        return {"status": "sleeping", "level": settings.sleep_level, "settings_seq": settings.seq}

    @router.post("/wake_up")
    async def wake_up(timeout_s: Timeout = _DEFAULT_TIMEOUT_S) -> dict[str, Any]:
        settings = await admin.change(WakeUp(), timeout_s)
        return {"status": "awake", "settings_seq": settings.seq}

    @router.get("/is_sleeping")
    async def is_sleeping() -> dict[str, Any]:
        settings = await admin.settings()
        behind = admin.ranks_behind(settings)
        return {
            "is_sleeping": settings.sleep_level > 0,
            "level": settings.sleep_level,
            "in_force": not behind,
            "ranks_behind": behind,
        }


def _add_rank_routes(router: APIRouter, admin: Admin) -> None:
    @router.post("/v1/cluster/ranks/{rank}/cordon")
    async def cordon(rank: int, timeout_s: Timeout = _DEFAULT_TIMEOUT_S) -> dict[str, Any]:
        settings = await admin.change(Cordon(rank, is_on=True), timeout_s)
        return {"status": "cordoned", "rank": rank, "cordoned": settings.cordoned, "settings_seq": settings.seq}

    @router.post("/v1/cluster/ranks/{rank}/uncordon")
    async def uncordon(rank: int, timeout_s: Timeout = _DEFAULT_TIMEOUT_S) -> dict[str, Any]:
        settings = await admin.change(Cordon(rank, is_on=False), timeout_s)
        return {"status": "uncordoned", "rank": rank, "cordoned": settings.cordoned, "settings_seq": settings.seq}

    @router.post("/v1/cluster/ranks/{rank}/drain")
    async def drain(rank: int, timeout_s: Timeout = _DEFAULT_TIMEOUT_S) -> dict[str, Any]:
        return {"status": "drained", **await admin.drain(rank, timeout_s)}


def _add_group_routes(router: APIRouter, admin: Admin) -> None:
    @router.post("/v1/cluster/rebalance")
    async def rebalance(timeout_s: Timeout = _DEFAULT_TIMEOUT_S) -> dict[str, Any]:
        """Place the experts of a lockstep group anew, by how often each was chosen."""
        return await admin.rebalance(timeout_s)


def _add_call_routes(router: APIRouter, admin: Admin) -> None:
    @router.post("/abort_requests")
    async def abort_requests(body: AbortBody) -> dict[str, Any]:
        return await admin.abort(None if body.all else body.request_ids)

    @router.post("/collective_rpc")
    async def collective_rpc(body: RpcBody) -> dict[str, Any]:
        return {"results": by_rank(await admin.call_ranks(body.method, body.args, body.kwargs, body.timeout))}

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache(timeout_s: Timeout = _DEFAULT_TIMEOUT_S) -> dict[str, Any]:
        """Forget what no running sequence uses; ``success``: nothing is left on any rank."""
        results = await admin.call_ranks("reset_prefix_cache", (), {}, timeout_s)
        return {"success": all(results.values()), "results": by_rank(results)}

    @router.post("/log_level")
    async def log_level(level: Literal["", LogLevel], timeout_s: Timeout = _DEFAULT_TIMEOUT_S) -> dict[str, Any]:
        settings = await admin.change(SetLogLevel(level), timeout_s)
        return {"log_level": settings.log_level, "settings_seq": settings.seq}


def _add_state_routes(router: APIRouter, admin: Admin, llm: AsyncLLM, info: ServerInfo) -> None:
    @router.get("/load")
    async def load() -> dict[str, Any]:
        """Return what each rank has to do; ``server_load`` is the sum, as vLLM calls it."""
        ranks = [describe_load(view) for view in llm.engine_views()]
        return {"server_load": sum(rank["num_sequences"] for rank in ranks), "ranks": ranks}

    @router.get("/server_info")
    async def server_info() -> dict[str, Any]:
        number, _, wire = build_id().partition("+")
        return {
            "version": number,
            "wire": wire,
            "model": info.served_model_name,
            "model_root": info.model_root,
            "api_process": info.api_process,
            "config": dict(info.serve_config),
            "settings": describe_settings(admin.known_settings),
            "engines": [_describe(view) for view in llm.engine_views()],
        }


def _describe(view: EngineView) -> dict[str, Any]:
    return {"rank": view.engine_id.rank, "state": view.state, **describe_ready(view.ready)}

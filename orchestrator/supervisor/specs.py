"""The specs of the child processes, made from the configuration by pure functions: coordinator, engine, API process."""

from dataclasses import dataclass

import msgspec

from client.config import ClientConfig
from client.migration import MigrationConfig
from engine.config.engine_config import EngineConfig
from engine.config.engine_spec import EngineSpec
from engine.model.names import ResolvedModel
from engine.wire.build import build_id, config_hash, config_values
from engine.wire.control import ClusterSettings
from engine.wire.endpoints import WireSecurity
from engine.wire.ids import ClientId, EngineId
from lb.coordinator.config import CoordinatorEndpoints, CoordinatorSpec, LockstepConfig
from metrics.shared_status import StatsMemory
from orchestrator.api.server.config import ApiSpec
from orchestrator.config.serve_config import SECRET_OPTIONS, ServeConfig
from orchestrator.supervisor.endpoints import Endpoints
from orchestrator.supervisor.preflight import Listener

SIM_MODEL_NAME = "sim"

_AT_REST = ClusterSettings()


@dataclass(frozen=True, slots=True)
class Wiring:
    """The endpoints and keys of a deployment.

    chosen: endpoints to bind. coordinator: what its sockets were bound to, as the others reach it. security: None
    leaves all channels plain.
    """

    chosen: Endpoints
    coordinator: CoordinatorEndpoints
    security: WireSecurity | None = None


def served_model_name(config: ServeConfig, model: ResolvedModel | None) -> str:
    """Return the name of the model in the API."""
    return config.served_model_name or (model.display_name if model is not None else config.model or SIM_MODEL_NAME)


def coordinator_spec(config: ServeConfig, chosen: Endpoints, security: WireSecurity | None) -> CoordinatorSpec:
    """Return the spec of the first coordinator; a successor has a higher generation and the endpoints of the first."""
    return CoordinatorSpec(
        generation=1,
        report_endpoint=chosen.report,
        state_endpoint=chosen.state,
        stall_timeout_s=config.stall_timeout,
        log_level=config.log_level,
        security=security,
        lockstep=_lockstep(config),
    )


def engine_spec(
    engine_id: EngineId,
    engine: EngineConfig,
    wiring: Wiring,
    log_level: str,
    settings: ClusterSettings = _AT_REST,
    is_joining: bool = False,
) -> EngineSpec:
    """Return the spec of one engine; its host fills in the node. settings: in force before it is ready."""
    return EngineSpec(
        engine_id=engine_id,
        engine=engine,
        report_endpoint=wiring.coordinator.report_endpoint,
        state_endpoint=wiring.coordinator.state_endpoint,
        build_id=build_id(),
        config_hash=config_hash(engine),
        log_level=log_level,
        settings=settings,
        security=wiring.security.for_connecting() if wiring.security is not None else None,
        is_joining=is_joining,
    )


def api_spec(
    config: ServeConfig,
    engine: EngineConfig,
    wiring: Wiring,
    listener: Listener,
    model: ResolvedModel | None,
    tokenizer_dir: str | None,
    client_id: ClientId,
    stats: StatsMemory,
    control_endpoint: str | None = None,
) -> ApiSpec:
    """Return the spec of one incarnation of an API process; the supervisor keeps the deadline of the start."""
    return ApiSpec(
        client=_client_config(config, engine, wiring, client_id),
        listen_fd=listener.fd,
        host=config.host,
        port=listener.port,
        served_model_name=served_model_name(config, model),
        tokenizer_dir=tokenizer_dir,
        model_root=model.path if model is not None else "",
        shutdown_timeout_s=config.shutdown_timeout,
        start_timeout_s=config.start_timeout,
        max_pending_requests=config.max_pending_requests,
        stats=stats,
        log_level=config.log_level,
        control_endpoint=control_endpoint,
        # Through JSON, because values like paths and sizes are no wire types.
        serve_config=msgspec.json.decode(config.model_dump_json(exclude=set(SECRET_OPTIONS))),
        api_keys=tuple(key.get_secret_value() for key in config.api_key or ()),
        admin_api_key=None if config.admin_api_key is None else config.admin_api_key.get_secret_value(),
    )


def _lockstep(config: ServeConfig) -> LockstepConfig | None:
    if not config.enable_expert_parallel:
        return None
    return LockstepConfig(min_size=config.min_data_parallel_size, num_redundant_experts=config.num_redundant_experts)


def _client_config(config: ServeConfig, engine: EngineConfig, wiring: Wiring, client_id: ClientId) -> ClientConfig:
    request_bind, output_bind = wiring.chosen.of_client(client_id)
    return ClientConfig(
        client_id=client_id,
        report_endpoint=wiring.coordinator.report_endpoint,
        state_endpoint=wiring.coordinator.state_endpoint,
        request_bind=request_bind,
        output_bind=output_bind,
        build_id=build_id(),
        config_hash=config_hash(engine),
        config=config_values(engine),
        security=wiring.security,
        advertise_host=wiring.chosen.advertise_host,
        migrations=MigrationConfig(
            tokens_in_flight=-(-config.move_tokens_in_flight // config.api_server_count),  # the option is a rank's
            timeout_s=config.move_timeout,
            resume_memory_bytes=int(config.resume_memory),
        ),
    )

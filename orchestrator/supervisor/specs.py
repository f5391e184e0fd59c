"""What each kind of child process is told: pure functions from the configuration to the specs."""

from dataclasses import dataclass

import msgspec

from client.config import ClientConfig, MigrationConfig
from engine.config.engine_config import EngineConfig
from engine.config.engine_spec import EngineSpec
from engine.model.names import ResolvedModel
from engine.wire.build import build_id, config_hash, config_values
from engine.wire.control import ClusterSettings
from engine.wire.curve import WireSecurity
from engine.wire.ids import ClientId, EngineId
from lb.coordinator.config import CoordinatorEndpoints
from metrics.memory import StatsMemory
from orchestrator.api.server.config import ApiSpec
from orchestrator.config.serve_config import SECRET_OPTIONS, ServeConfig
from orchestrator.supervisor.endpoints import Endpoints
from orchestrator.supervisor.listen import Listener

SIM_MODEL_NAME = "sim"

_AT_REST = ClusterSettings()


@dataclass(frozen=True, slots=True)
class Wiring:
    """Where the processes of a deployment meet, and the keys they show there.

    chosen: endpoints to bind. coordinator: what its sockets got, as the others reach it. security: None: plain lines.
    """

    chosen: Endpoints
    coordinator: CoordinatorEndpoints
    security: WireSecurity | None = None


def served_model_name(config: ServeConfig, model: ResolvedModel | None) -> str:
    """Return what the API calls the model."""
    return config.served_model_name or (model.display_name if model is not None else config.model or SIM_MODEL_NAME)


def engine_spec(
    engine_id: EngineId,
    engine: EngineConfig,
    wiring: Wiring,
    log_level: str,
    settings: ClusterSettings = _AT_REST,
) -> EngineSpec:
    """Return the spec of one rank; its host fills in the node."""
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
    """Return the spec of one life of an API process; the deadline of the start is the supervisor's to keep."""
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
        serve_config=msgspec.json.decode(config.model_dump_json(exclude=set(SECRET_OPTIONS))),
        api_keys=tuple(key.get_secret_value() for key in config.api_key or ()),
        admin_api_key=None if config.admin_api_key is None else config.admin_api_key.get_secret_value(),
    )


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

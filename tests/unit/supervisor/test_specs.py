"""The specs of each kind of process."""

from pathlib import Path

import msgspec
import pytest
from pydantic import ByteSize

from client.migration import MigrationConfig
from engine.config.engine_config import EngineConfig, EngineKind
from engine.model.names import ResolvedModel
from engine.wire.curve import draw_keys
from engine.wire.errors import AddressError, StartupError
from engine.wire.ids import ClientId, EngineId
from lb.coordinator.config import CoordinatorEndpoints, CoordinatorSpec
from metrics.shared_status import StatsMemory
from orchestrator.api.server.config import ApiSpec
from orchestrator.config.engine_config import engine_config
from orchestrator.config.serve_config import SECRET_OPTIONS, ServeConfig
from orchestrator.supervisor.endpoints import choose_endpoints, choose_security
from orchestrator.supervisor.preflight import Listener
from orchestrator.supervisor.specs import Wiring, api_spec, coordinator_spec, engine_spec, served_model_name

STATS = StatsMemory(status=7, counts=[8, 9, 10])
MODEL = ResolvedModel(path="/models/m", gguf_file="m.gguf", display_name="m", is_local=True)
WIRING = Wiring(
    choose_endpoints(Path("/tmp/r"), None), CoordinatorEndpoints("ipc:///tmp/r/report", "ipc:///tmp/r/state")
)


def test_the_options_of_a_model_reach_the_engine() -> None:
    config = ServeConfig(model="m", dtype="float32", max_model_len=99, num_threads=3, kv_cache_memory=ByteSize(1 << 20))
    engine = engine_config(config, MODEL, "cpu")
    assert engine.kind is EngineKind.TORCH
    assert engine.model is not None
    assert (engine.model.model, engine.model.gguf_file, engine.model.device) == ("/models/m", "m.gguf", "cpu")
    assert (engine.model.dtype, engine.model.max_model_len, engine.model.num_threads) == ("float32", 99, 3)
    assert engine.scheduler.kv_cache_memory_bytes == 1 << 20


@pytest.mark.parametrize("wanted", [True, False])
def test_prefix_caching_is_an_option_of_every_engine(wanted: bool) -> None:
    config = ServeConfig(engine="sim", enable_prefix_caching=wanted)
    assert engine_config(config, None, "cpu").scheduler.enable_prefix_caching is wanted


def test_the_options_of_the_sim_engine_reach_it_in_seconds() -> None:
    config = ServeConfig(engine="sim", sim_step_ms=5, sim_prefill_us_per_token=7, sim_load_s=2, max_model_len=100)
    sim = engine_config(config, None, "cpu").sim
    assert (sim.step_s, sim.prefill_s_per_token, sim.load_s) == pytest.approx((0.005, 7e-6, 2))
    assert sim.max_model_len == 100


def test_engine_and_client_get_the_same_hash_and_endpoints() -> None:
    config = ServeConfig(model="m")
    engine = engine_config(config, MODEL, "cpu")
    listener = Listener("127.0.0.1", 0)
    told = engine_spec(EngineId(1, 1), engine, WIRING, "info")
    api = api_spec(config, engine, WIRING, listener, MODEL, "/cache/m", ClientId(2, 5), STATS)
    assert (told.build_id, told.config_hash) == (api.client.build_id, api.client.config_hash)
    assert told.state_endpoint == api.client.state_endpoint == "ipc:///tmp/r/state"
    assert (api.client.client_id, api.client.request_bind) == (ClientId(2, 5), "ipc:///tmp/r/request-2.5")
    assert api.stats is STATS
    assert (api.listen_fd, api.port, api.tokenizer_dir) == (listener.fd, listener.port, "/cache/m")
    listener.close()


def test_every_option_but_the_keys_travels_to_the_api_process_as_json() -> None:
    options = {
        "engine": "sim",
        "kv_cache_memory": "2MiB",
        "run_dir": "/tmp/r",
        "api_key": "k-one",
        "admin_api_key": "k-two",
    }
    config = ServeConfig(**options)  # type: ignore[arg-type]
    listener = Listener("127.0.0.1", 0)
    spec = api_spec(config, engine_config(config, None, "cpu"), WIRING, listener, None, None, ClientId(0, 1), STATS)
    listener.close()
    told = msgspec.json.decode(msgspec.json.encode(spec), type=ApiSpec)
    assert told.serve_config.keys() == ServeConfig.model_fields.keys() - set(SECRET_OPTIONS)
    assert (told.serve_config["kv_cache_memory"], told.serve_config["run_dir"]) == (2 << 20, "/tmp/r")
    assert (told.api_keys, told.admin_api_key) == (("k-one",), "k-two")


def test_the_options_of_survival_reach_the_client() -> None:
    config = ServeConfig(engine="sim", move_tokens_in_flight=9, move_timeout=3, resume_memory=ByteSize(77))
    listener = Listener("127.0.0.1", 0)
    spec = api_spec(config, engine_config(config, None, "cpu"), WIRING, listener, None, None, ClientId(0, 1), STATS)
    listener.close()
    migrations = spec.client.migrations
    assert (migrations.tokens_in_flight, migrations.timeout_s, migrations.resume_memory_bytes) == (9, 3.0, 77)
    assert msgspec.json.decode(msgspec.json.encode(spec), type=ApiSpec) == spec


def test_the_defaults_of_the_options_are_those_of_the_processes_they_reach() -> None:
    """Client and coordinator know no options: what both sides call a default is one value."""
    config = ServeConfig(engine="sim")
    listener = Listener("127.0.0.1", 0)
    spec = api_spec(config, engine_config(config, None, "cpu"), WIRING, listener, None, None, ClientId(0, 1), STATS)
    listener.close()
    assert spec.client.migrations == MigrationConfig()
    coordinator = coordinator_spec(config, WIRING.chosen, None)
    assert coordinator == CoordinatorSpec(
        generation=1, report_endpoint=WIRING.chosen.report, state_endpoint=WIRING.chosen.state, log_level="info"
    )
    engine, default = engine_config(config, None, "cpu"), EngineConfig(kind=EngineKind.SIM)
    assert (engine.scheduler, engine.parallel) == (default.scheduler, default.parallel)
    assert msgspec.structs.asdict(engine.sim) == pytest.approx(msgspec.structs.asdict(default.sim))  # from ms and us


def test_every_spec_survives_its_way_to_the_process() -> None:
    config = ServeConfig(model="m", kv_cache_memory=ByteSize(1 << 20))
    engine = engine_config(config, MODEL, "cpu")
    listener = Listener("127.0.0.1", 0)
    specs = [
        engine_spec(EngineId(1, 1), engine, WIRING, "info"),
        api_spec(config, engine, WIRING, listener, MODEL, "/cache/m", ClientId(2, 5), STATS),
    ]
    assert [msgspec.json.decode(msgspec.json.encode(spec), type=type(spec)) for spec in specs] == specs
    listener.close()


def test_what_a_rank_computes_anew_is_shared_by_the_api_processes() -> None:
    config = ServeConfig(engine="sim", api_server_count=3, move_tokens_in_flight=100)
    listener = Listener("127.0.0.1", 0)
    engine = engine_config(config, None, "cpu")
    api = api_spec(config, engine, WIRING, listener, None, None, ClientId(2, 1), STATS)
    assert api.client.migrations.tokens_in_flight == 34
    listener.close()


def test_the_model_is_called_as_asked_else_by_its_own_name() -> None:
    assert served_model_name(ServeConfig(model="m", served_model_name="mine"), MODEL) == "mine"
    assert served_model_name(ServeConfig(model="./x/m.gguf"), MODEL) == "m"
    assert served_model_name(ServeConfig(engine="sim"), None) == "sim"
    assert served_model_name(ServeConfig(engine="sim", model="gpt"), None) == "gpt"


def test_lines_are_unix_sockets_on_one_host_and_tcp_between_hosts() -> None:
    assert choose_endpoints(Path("/tmp/r"), None).output == "ipc:///tmp/r/output"
    assert choose_endpoints(Path("/tmp/r"), "10.0.0.1").output == "tcp://10.0.0.1:0"
    assert choose_endpoints(Path("/tmp/r"), "fe80::1").report == "tcp://[fe80::1]:0"
    with pytest.raises(AddressError):
        choose_endpoints(Path("/tmp/" + "r" * 100), None)


def test_each_life_of_a_client_has_unix_sockets_of_its_own() -> None:
    chosen = choose_endpoints(Path("/tmp/r"), None)
    assert chosen.of_client(ClientId(1, 2)) == ("ipc:///tmp/r/request-1.2", "ipc:///tmp/r/output-1.2")
    chosen = choose_endpoints(Path("/tmp/r"), "10.0.0.1")
    assert chosen.of_client(ClientId(1, 2)) == ("tcp://10.0.0.1:0", "tcp://10.0.0.1:0")


def test_what_is_bound_and_what_is_advertised_are_two_things() -> None:
    chosen = choose_endpoints(Path("/tmp/r"), "10.0.0.1", "0.0.0.0", "7000-7010")
    assert (chosen.output, chosen.advertise_host) == ("tcp://0.0.0.0:7000-7010", "10.0.0.1")
    assert choose_endpoints(Path("/tmp/r"), "10.0.0.1", None, "7000-7010").report == "tcp://10.0.0.1:7000-7010"
    named = choose_endpoints(Path("/tmp/r"), "localhost")
    assert (named.report, named.advertise_host, named.leaves_host) in [
        ("tcp://127.0.0.1:0", "localhost", False),
        ("tcp://[::1]:0", "localhost", False),
    ]
    with pytest.raises(StartupError, match=r"--advertise-host x+: "):
        choose_endpoints(Path("/tmp/r"), "x" * 70)  # no name is that long: found out without asking anybody
    assert choose_endpoints(Path("/tmp/r"), None, "eth0").request == "tcp://eth0:0"
    with pytest.raises(StartupError, match="--advertise-host"):
        choose_endpoints(Path("/tmp/r"), None, "0.0.0.0")
    bound = CoordinatorEndpoints("tcp://0.0.0.0:7000", "tcp://0.0.0.0:7001")
    assert bound.under("10.0.0.1") == CoordinatorEndpoints("tcp://10.0.0.1:7000", "tcp://10.0.0.1:7001")
    assert bound.under(None) == bound


@pytest.mark.parametrize(
    ("mode", "address", "is_secured"),
    [
        ("auto", None, False),
        ("auto", "127.0.0.1", False),
        ("auto", "::1", False),
        ("auto", "10.0.0.1", True),
        ("curve", None, False),
        ("curve", "127.0.0.1", True),
        ("none", "10.0.0.1", False),
    ],
)
def test_lines_between_hosts_get_keys_unless_set_otherwise(mode: str, address: str | None, is_secured: bool) -> None:
    keys = choose_security(mode, choose_endpoints(Path("/tmp/r"), address))
    assert (keys is not None) is is_secured


def test_every_process_gets_the_keys_it_needs_and_no_other() -> None:
    config, listener = ServeConfig(engine="sim"), Listener("127.0.0.1", 0)
    engine = engine_config(config, None, "cpu")
    keys = draw_keys()
    wiring = Wiring(choose_endpoints(Path("/tmp/r"), "10.0.0.1", "0.0.0.0"), WIRING.coordinator, keys)
    told = engine_spec(EngineId(1, 1), engine, wiring, "info")
    client = api_spec(config, engine, wiring, listener, None, None, ClientId(0, 1), STATS).client
    listener.close()
    assert told.security == keys.for_connecting()
    assert (client.security, client.advertise_host) == (keys, "10.0.0.1")
    assert keys.member_secret not in repr((wiring, told, client))

"""Keys that were given on the command line or in the environment cannot be read there afterwards."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.config.secrets import spans_to_mask
from orchestrator.config.serve_config import SECRET_OPTIONS, ServeConfig
from orchestrator.config.sources import ConfigError, load

SCRIPT = """
import os, sys
from orchestrator.config.secrets import forget_secrets
forget_secrets()
for name in ("cmdline", "environ"):
    sys.stdout.write(open(f"/proc/self/{name}").read().replace("\\0", " ") + "\\n")
sys.stdout.write(" ".join(sys.argv) + repr(sorted(name for name in os.environ if name.startswith("SHOAL_"))))
"""


def test_what_follows_a_name_is_masked_and_nothing_else() -> None:
    words = [b"shoal", b"--api-key", b"one", b"--port", b"1", b"--api-key=two", b"--api-keys", b"x", b""]
    assert spans_to_mask(words, [b"--api-key"]) == [(2, 0), (5, len(b"--api-key="))]


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel shows a process's own memory there")
def test_neither_the_process_list_nor_the_environment_shows_a_key() -> None:
    seen = subprocess.run(
        [sys.executable, "-c", SCRIPT, "serve", "--api-key", "k-one", "--admin-api-key=k-two", "--port", "1"],
        env={**os.environ, "SHOAL_API_KEY": "k-three,k-four", "SHOAL_ADMIN_API_KEY": "k-five", "SHOAL_PORT": "2"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    assert "k-" not in seen.replace("--api-key", "").replace("--admin-api-key", "")
    assert "--api-key ***** --admin-api-key=***** --port 1" in seen
    assert seen.endswith("['SHOAL_PORT']")


def sim(**flags: object) -> ServeConfig:
    return load({"engine": "sim", **flags}, {})


def values(config: ServeConfig) -> list[str]:
    return [key.get_secret_value() for key in config.api_key or ()]


def test_keys_come_from_repeated_flags_from_a_variable_with_commas_and_from_a_file(tmp_path: Path) -> None:
    assert values(sim(api_key=["a", "b,c"])) == ["a", "b,c"]
    assert values(load({"engine": "sim"}, {"SHOAL_API_KEY": "a,b"})) == ["a", "b"]
    file = tmp_path / "shoal.toml"
    file.write_text('engine = "sim"\napi_key = ["a", "b"]\nadmin_api_key = "c"\n')
    config = load({}, {}, file)
    assert values(config) == ["a", "b"]
    assert config.admin_api_key is not None
    assert config.admin_api_key.get_secret_value() == "c"


@pytest.mark.parametrize("keys", [["with space"], [""], ["\u00fc"], ["ok", "tab\t"]])
def test_what_no_header_can_carry_is_no_key_and_is_not_repeated(keys: list[str]) -> None:
    with pytest.raises(ConfigError, match="printable ASCII") as refused:
        sim(api_key=keys)
    assert not any(key in str(refused.value) for key in keys if key not in ("", "ok"))


def test_the_admin_key_is_no_api_key() -> None:
    with pytest.raises(ConfigError, match="must not be one of --api-key"):
        sim(api_key=["same"], admin_api_key="same")


def test_a_configuration_that_is_printed_shows_no_key() -> None:
    config = sim(api_key=["k-one"], admin_api_key="k-two")
    assert "k-" not in repr(config) + str(config) + config.model_dump_json(exclude=set(SECRET_OPTIONS))

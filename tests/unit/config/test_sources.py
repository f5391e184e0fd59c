"""Where options come from, and what is said about wrong ones."""

from pathlib import Path

import pytest

from orchestrator.config.serve_config import ServeConfig
from orchestrator.config.sources import ConfigError, load

SIM = {"engine": "sim"}


def message_of(flags: dict[str, str], environment: dict[str, str] | None = None, file: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(flags, environment or {}, file)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"), [("a.toml", "port = 1\nblock_size = 8"), ("a.yaml", "port: 1\nblock-size: 8")]
)
def test_a_flag_beats_the_environment_beats_the_file_beats_the_default(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    environment = {"SHOAL_PORT": "2", "SHOAL_MAX_NUM_SEQS": "5"}
    config = load({**SIM, "max_num_seqs": "6"}, environment, file)
    assert (config.block_size, config.port, config.max_num_seqs) == (8, 2, 6)
    assert config.max_num_batched_tokens == ServeConfig(engine="sim").max_num_batched_tokens


def test_the_file_can_be_named_in_the_environment_and_the_flag_wins(tmp_path: Path) -> None:
    named, given = tmp_path / "named.toml", tmp_path / "given.toml"
    named.write_text("port = 1")
    given.write_text("port = 2")
    assert load(SIM, {"SHOAL_CONFIG": str(named)}).port == 1
    assert load(SIM, {"SHOAL_CONFIG": str(named)}, given).port == 2


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    file = tmp_path / "empty.yaml"
    file.write_text("# nothing yet\n")
    assert load(SIM, {}, file) == ServeConfig(engine="sim")


def test_memory_is_read_with_its_unit() -> None:
    assert load({**SIM, "kv_cache_memory": "1GiB"}, {}).kv_cache_memory == 1 << 30
    assert load({**SIM, "kv_cache_memory": "1000"}, {}).kv_cache_memory == 1000
    assert ServeConfig(engine="sim").kv_cache_memory is None


def test_what_is_not_an_option_of_ours_is_left_alone() -> None:
    assert load(SIM, {"SHOAL_PARENT_PID": "1", "PATH": "/bin"}) == ServeConfig(engine="sim")


def test_a_wrong_value_is_named_as_it_was_written_with_what_is_allowed(tmp_path: Path) -> None:
    assert message_of({**SIM, "dtype": "flot32"}).startswith(
        "--dtype: must be 'auto', 'float32', 'bfloat16' or 'float16', not 'flot32'"
    )
    assert message_of(SIM, {"SHOAL_PORT": "many"}).startswith("SHOAL_PORT: must be a valid integer")
    file = tmp_path / "a.toml"
    file.write_text("block_size = 0")
    assert message_of(SIM, file=file).startswith(f"{file}: block_size: must be greater than or equal to 1, not 0")


def test_every_wrong_value_is_named_at_once_in_one_line() -> None:
    message = message_of({**SIM, "port": "70000", "max_num_seqs": "0"})
    assert "--port: " in message
    assert "--max-num-seqs: " in message
    assert "\n" not in message


def test_an_unknown_key_names_the_nearest_known_one(tmp_path: Path) -> None:
    file = tmp_path / "a.yml"
    file.write_text("data_paralel_size: 2")
    assert message_of(SIM, file=file) == f"{file}: unknown key 'data_paralel_size' (did you mean data_parallel_size?)"
    assert message_of(SIM, {"SHOAL_HOTS": "x"}) == "unknown environment variable SHOAL_HOTS (did you mean SHOAL_HOST?)"


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.toml", "port = = 1", "Invalid value"),
        ("a.yaml", "port: [1", "while parsing"),
        ("a.yaml", "- port", "expected keys and values, found a list"),
        ("a.yaml", "port: 2020-99-99", "month must be"),
        ("a.yaml", "[" * 3000, "recursion"),
        ("a.toml", "port = " + "9" * 5000, "digits"),
        ("a.json", "{}", "must end in .toml, .yaml or .yml"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, text: str, expected: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    message = message_of(SIM, file=file)
    assert message.startswith(f"--config {file}: ")
    assert expected in message
    assert "\n" not in message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "No such file" in message_of(SIM, file=tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, "--model is required with --engine torch"),
        ({**SIM, "executor": "local", "ray_address": "a:1"}, "exclude each other"),
        ({**SIM, "ray_address": "ray://a:1"}, "not a ray:// client address"),
        ({"model": "m", "device": "cuda:1"}, "--device cuda:N needs --executor local"),
    ],
)
def test_options_that_contradict_each_other_are_refused(flags: dict[str, str], expected: str) -> None:
    assert expected in message_of(flags)


def test_the_configuration_is_frozen_and_knows_no_other_key() -> None:
    config = ServeConfig(engine="sim")
    with pytest.raises(ValueError, match="frozen"):
        config.port = 1
    with pytest.raises(ValueError, match="Extra inputs"):
        ServeConfig(engine="sim", prot=1)  # type: ignore[call-arg]

"""What cannot start says so in one line, with an exit status that is not 0, and leaves nothing behind."""

import os
import signal
import socket
from pathlib import Path

import pytest

from tests.integration.serving import deployment, eventually, run_shoal

SIM = ("--engine", "sim", "--executor", "local")


def error_of(*arguments: str, status: int, **environment: str) -> str:
    """Run ``shoal serve``; return the one line it fails with."""
    failed = run_shoal("serve", *arguments, **environment)
    assert failed.returncode == status, failed.stderr
    errors = [line for line in failed.stderr.splitlines() if line.startswith("shoal: error: ")]
    assert len(errors) == 1, failed.stderr
    assert errors[0] == failed.stderr.splitlines()[-1]
    return errors[0]


def test_a_taken_port_is_named_with_its_option() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = error_of(*SIM, "--port", str(port), status=1)
    assert line == f"shoal: error: cannot listen on 127.0.0.1:{port} (--host, --port): Address already in use"


@pytest.mark.parametrize("model", ["./no-such-folder", "no-such.gguf", "not a name"])
def test_a_model_that_is_not_there_is_named(model: str) -> None:
    line = error_of("--model", model, "--port", "0", status=1)
    assert model in line
    assert "does not exist" in line


def test_an_unknown_key_of_the_file_is_named_with_the_nearest_known_one(tmp_path: Path) -> None:
    file = tmp_path / "shoal.toml"
    file.write_text("max_model_length = 128\n")
    line = error_of("--config", str(file), status=2)
    assert line == f"shoal: error: {file}: unknown key 'max_model_length' (did you mean max_model_len?)"


def test_an_unknown_variable_is_named_with_the_nearest_known_one() -> None:
    line = error_of(*SIM, status=2, SHOAL_PROT="1")
    assert line == "shoal: error: unknown environment variable SHOAL_PROT (did you mean SHOAL_PORT?)"


def test_a_run_folder_too_deep_for_sockets_is_refused(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 40)
    deep.mkdir()
    assert "choose a shorter --run-dir" in error_of(*SIM, "--port", "0", "--run-dir", str(deep), status=1)
    assert not list(deep.iterdir())


def test_a_run_folder_with_an_impossible_name_is_refused() -> None:
    assert "--run-dir" in error_of(*SIM, "--port", "0", "--run-dir", "/tmp/" + "l" * 300, status=1)


def test_ranks_that_do_not_come_up_in_time_are_named_with_what_they_do() -> None:
    with deployment(*SIM, "--data-parallel-size", "2", "--sim-load-s", "60", "--start-timeout", "4") as served:
        assert served.wait_exit() == 1
        line = served.stderr.splitlines()[-1]
        assert line.startswith("shoal: error: not ready within 4 s (--start-timeout): rank 0: loading")
        assert "rank 1: loading" in line
        served.assert_nothing_left()


def test_an_engine_that_dies_while_it_starts_ends_the_start_with_its_reason() -> None:
    with deployment(*SIM, "--data-parallel-size", "2", "--sim-load-s", "60") as served:
        eventually(lambda: len(served.processes("engine.main")) == 2)
        victim = served.processes("engine.main")[0]
        os.kill(victim.pid, signal.SIGKILL)
        assert served.wait_exit(30) == 1
        assert "ended while it started: killed by SIGKILL" in served.stderr.splitlines()[-1]
        served.assert_nothing_left()


def test_a_foreign_module_of_the_same_name_is_refused_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "client.py").touch()
    line = error_of(*SIM, "--port", "0", status=1, PYTHONPATH=str(tmp_path))
    assert f"the module 'client' is not Shoal's: it resolves to {tmp_path / 'client.py'}" in line


def test_a_status_without_a_deployment_says_how_to_get_one(tmp_path: Path) -> None:
    failed = run_shoal("status", "--run-dir", str(tmp_path))
    assert failed.returncode == 1
    assert failed.stderr.startswith("shoal: error: no deployment is ready on this machine")

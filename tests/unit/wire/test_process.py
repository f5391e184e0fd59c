"""The prelude of every process: it dies with its parent, leaves Ctrl-C alone, reads its spec, logs alike."""

import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import engine
from engine.wire.build import build_id, config_hash, config_values
from engine.wire.errors import StartupError
from engine.wire.process import PARENT_PID_VARIABLE, child_environment, read_spec

ROOT = Path(engine.__file__).parent.parent
DEADLINE_S = 20

CHILD = "from engine.wire.process import *; die_with_parent(); print(os.getpid(), flush=True); signal.pause()"
PARENT = f"""
import subprocess, sys
from engine.wire.process import child_environment
child = subprocess.Popen([sys.executable, "-c", {"import os, signal; " + CHILD!r}], env=child_environment())
child.wait()
"""


class Spec(msgspec.Struct, forbid_unknown_fields=True):
    size: int


def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


def test_a_child_dies_with_its_killed_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    _, status = os.waitpid(child, 0)  # the orphan is ours to wait for; were it alive, this would last
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL


def test_a_child_whose_parent_is_gone_already_does_not_start() -> None:
    ended = run("from engine.wire.process import *; die_with_parent(); print('alive')", **{PARENT_PID_VARIABLE: "1"})
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "the parent process is gone" in ended.stderr


def test_a_process_without_a_parent_of_ours_starts() -> None:
    assert run("from engine.wire.process import *; die_with_parent(); print('alive')").stdout == "alive\n"
    assert child_environment()[PARENT_PID_VARIABLE] == str(os.getpid())


def test_an_interrupt_of_the_foreground_group_is_left_to_the_supervisor() -> None:
    script = (
        "import os, signal; from engine.wire.process import leave_process_group; leave_process_group();"
        "os.kill(os.getpid(), signal.SIGINT); assert os.getpgid(0) == os.getpid()"
    )
    assert run(script + "; print('alive')").stdout == "alive\n"


def test_a_spec_is_read_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"size": 3}')))
    assert read_spec(Spec) == Spec(3)


@pytest.mark.parametrize("text", [b"", b"{}", b'{"size": "x"}', b'{"size": 1, "colour": 2}', b"\xff"])
def test_a_spec_that_is_none_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    with pytest.raises(StartupError, match="no valid Spec"):
        read_spec(Spec)


def test_a_log_line_names_time_level_process_and_module() -> None:
    script = "import logging; from engine.wire.process import *; configure_logging('engine 1.2', 'debug')"
    logged = run(script + "; logging.getLogger('engine.proc').debug('hello')").stderr
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} DEBUG   engine 1\.2 engine\.proc: hello\n", logged)


def test_the_build_id_is_the_same_in_every_process() -> None:
    assert run("from engine.wire.build import build_id; print(build_id())").stdout.strip() == build_id()


def test_the_values_of_a_configuration_are_found_by_their_dotted_names() -> None:
    assert config_values({"a": {"b": None, "c": [1, "x"]}, "d": "y"}) == {"a.b": "null", "a.c": '[1,"x"]', "d": '"y"'}


def test_the_config_hash_sees_values_and_not_the_order_of_keys() -> None:
    assert config_hash({"a": 1, "b": [2]}) == config_hash({"b": [2], "a": 1})
    assert config_hash({"a": 1}) != config_hash({"a": 2})

"""The removal of keys from the command line and the environment of this process, once the configuration has them."""

import ctypes
import os
import sys
from collections.abc import MutableMapping, MutableSequence, Sequence

from orchestrator.config.serve_config import SECRET_OPTIONS
from orchestrator.config.sources import PREFIX, flag_of

_STAT = "/proc/self/stat"
_ARGUMENTS_FIELD = 48  # of /proc/PID/stat, counted from 1: start and end of the arguments, then of the environment
_ENVIRONMENT_FIELD = 50
_FIRST_FIELD_BEHIND_NAME = 3


def forget_secrets() -> None:
    """Take the keys out of the arguments and the environment of this process, as it and as ``ps`` sees them.

    Children inherit the environment that is left. What the kernel shows is this process's own memory (Linux). Between
    the start of the process and this call the keys can be read there; a key in a file cannot.
    """
    _mask_list(sys.argv)
    _mask_environment(os.environ)
    if sys.platform == "linux":
        _mask_memory(_ARGUMENTS_FIELD, [flag_of(name).encode() for name in SECRET_OPTIONS])
        _mask_memory(_ENVIRONMENT_FIELD, [_variable(name).encode() for name in SECRET_OPTIONS])


def spans_to_mask(words: Sequence[bytes], names: Sequence[bytes]) -> list[tuple[int, int]]:
    """Return (word, first character) of what follows one of the names, as ``NAME=KEY`` or as ``NAME``, ``KEY``."""
    spans = []
    for index, word in enumerate(words):
        name, separator, _ = word.partition(b"=")
        if name in names and separator:
            spans.append((index, len(name) + 1))
        elif index > 0 and words[index - 1] in names:
            spans.append((index, 0))
    return spans


def _mask_list(arguments: MutableSequence[str]) -> None:
    words = [argument.encode(errors="surrogateescape") for argument in arguments]
    for index, first in spans_to_mask(words, [flag_of(name).encode() for name in SECRET_OPTIONS]):
        arguments[index] = arguments[index][:first] + "*"


def _mask_environment(environment: MutableMapping[str, str]) -> None:
    for name in SECRET_OPTIONS:
        environment.pop(_variable(name), None)


def _mask_memory(field: int, names: Sequence[bytes]) -> None:
    start, end = _range(field)
    if not 0 < start < end:
        return
    # The kernel shows the memory of the process itself, so overwriting it there changes what ``ps`` shows.
    words = ctypes.string_at(start, end - start).split(b"\0")
    starts = [start + sum(len(word) + 1 for word in words[:index]) for index in range(len(words))]
    for index, first in spans_to_mask(words, names):
        ctypes.memset(starts[index] + first, ord("*"), len(words[index]) - first)


def _range(field: int) -> tuple[int, int]:
    try:
        with open(_STAT, "rb") as stat:
            # The second field is the program's name in parentheses and may hold anything.
            fields = stat.read().rpartition(b")")[2].split()
    except OSError:
        return 0, 0
    index = field - _FIRST_FIELD_BEHIND_NAME
    return int(fields[index]), int(fields[index + 1])


def _variable(name: str) -> str:
    return PREFIX + name.upper()

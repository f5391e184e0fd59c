"""The command ``shoal``: the table of its commands, and their exit status.

What only one command needs is imported when it runs: ``--help`` and ``status`` start fast.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version

from engine.wire.errors import ShoalError
from orchestrator.cli import admin_commands, scale_commands, status
from orchestrator.cli.options import add_options, option_flags
from orchestrator.cli.parser import USAGE_ERROR, Command, make_parser
from orchestrator.config.sources import ConfigError, load
from orchestrator.processes.module_guard import check_packages

_FAILED = 1
_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 1 when it failed, 2 when it was asked for something impossible."""
    options = make_parser(COMMANDS).parse_args(arguments)
    try:
        check_packages()
        return COMMANDS[options.command].run(options, os.environ)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except ShoalError as error:
        print(f"shoal: error: {error}", file=sys.stderr)
        return USAGE_ERROR if isinstance(error, ConfigError) else _FAILED


def _run_serve(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    from orchestrator.config.secrets import forget_secrets
    from orchestrator.supervisor.serve import serve

    config = load(option_flags(options), environment, options.config)
    forget_secrets()  # before anything is started: no child inherits the keys
    return serve(config)


def _run_version(_options: argparse.Namespace, _environment: Mapping[str, str]) -> int:
    print(f"shoal {version('shoal')}")
    return 0


COMMANDS: Mapping[str, Command] = {
    "serve": Command(
        usage="shoal serve [OPTIONS]",
        help="start a deployment and serve until stopped",
        description="Start a deployment and serve it until Ctrl-C or SIGTERM. "
        "Flags win over SHOAL_* environment variables (SHOAL_MAX_MODEL_LEN), those over the file, that over defaults.",
        add_arguments=add_options,
        run=_run_serve,
    ),
    "status": status.COMMAND,
    **admin_commands.COMMANDS,
    **scale_commands.COMMANDS,
    "version": Command(help="print the version", add_arguments=lambda _: None, run=_run_version),
}

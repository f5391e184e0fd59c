"""The command ``shoal``. Imports what a command needs when it runs: ``--help`` and ``status`` start fast."""

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from engine.wire.errors import ShoalError
from orchestrator.cli.admin_commands import COMMANDS, run
from orchestrator.cli.options import USAGE_ERROR, make_parser, option_flags
from orchestrator.cli.scale_command import run_events, run_scale
from orchestrator.config.sources import ConfigError, load
from orchestrator.processes.module_guard import check_packages

_FAILED = 1
_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 1 when it failed, 2 when it was told something impossible."""
    options = make_parser().parse_args(arguments)
    try:
        check_packages()
        if options.command == "serve":
            from orchestrator.config.secrets import forget_secrets
            from orchestrator.supervisor.serve import serve

            config = load(option_flags(options), os.environ, options.config)
            forget_secrets()
            return serve(config)
        if options.command == "status":
            from orchestrator.cli.status import print_status

            return print_status(options.url, options.run_dir, options.key, as_json=options.json)
        if options.command in COMMANDS:
            return run(options, os.environ)
        if options.command == "scale":
            return run_scale(options, os.environ)
        if options.command == "events":
            run_events(options, os.environ)
        print(f"shoal {version('shoal')}")
    except KeyboardInterrupt:
        return _INTERRUPTED
    except ShoalError as error:
        print(f"shoal: error: {error}", file=sys.stderr)
        return USAGE_ERROR if isinstance(error, ConfigError) else _FAILED
    return 0

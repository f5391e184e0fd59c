"""The entry point of an API process: ``python -m orchestrator.api``, its spec as JSON on standard input."""

import asyncio
import gc
import sys
from pathlib import Path

import uvloop

from engine.wire.errors import ShoalError
from engine.wire.process import configure_logging, die_with_parent, leave_process_group, read_spec
from orchestrator.api.server.config import ApiSpec
from orchestrator.api.server.server import ApiServer
from orchestrator.api.server.uvicorn_guard import check_uvicorn
from orchestrator.llm.tokenizer import load_tokenizer
from orchestrator.processes.module_guard import check_packages


def main() -> int:
    """Run one API process to its end; return its exit status."""
    check_packages()
    check_uvicorn()
    die_with_parent()
    leave_process_group()
    spec = read_spec(ApiSpec)
    configure_logging(f"api.{spec.client.client_id}", spec.log_level)
    tokenizer = load_tokenizer(None if spec.tokenizer_dir is None else Path(spec.tokenizer_dir))

    async def serve() -> int:
        server = ApiServer(spec, tokenizer)
        gc.freeze()  # what is built now lives as long as the process: collections need not walk it
        return await server.run()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve())


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ShoalError as error:
        sys.exit(f"the API process cannot run: {error}")

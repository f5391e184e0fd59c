"""What a deployment holds before any process runs: everything that can be found wrong in milliseconds."""

import logging
from typing import Any

from engine.model.names import ResolvedModel, resolve_model
from orchestrator.config.serve_config import ServeConfig
from orchestrator.processes.module_guard import check_packages
from orchestrator.supervisor.listen import Listener
from orchestrator.supervisor.run_dir import RunDir, sweep

_LOG = logging.getLogger(__name__)


class Preflight:
    """The model's place, the HTTP port and the run's folder.

    model: None for the sim engine.

    Raises:
        StartupError: a foreign package, no such model, a taken port or no run folder.
    """

    def __init__(self, config: ServeConfig) -> None:
        check_packages()
        self.model: ResolvedModel | None = None
        if config.engine == "torch":
            assert config.model is not None
            self.model = resolve_model(config.model)
        self.listener = Listener(config.host, config.port)
        try:
            self.run_dir = RunDir(config.run_dir)
            for folder in sweep(config.run_dir):
                _LOG.info("removed %s, left behind by a run that was killed", folder)
        except BaseException:
            self.listener.close()
            raise

    async def stop(self, _force_stop: Any) -> list[str]:
        """Give port and folder back; return a line when the folder could not be removed."""
        self.listener.close()
        return [] if self.run_dir.remove() else [f"the run folder {self.run_dir.path} could not be removed"]

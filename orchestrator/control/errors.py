"""The errors of a call on the control channel."""

from engine.wire.errors import ShoalError
from orchestrator.control.messages import Fault


class ControlError(ShoalError):
    """Root of the errors of the control channel."""


class ControlUnavailableError(ControlError):
    """The other side is not there or does not answer in time. A retry may help; whether it was done is not known."""


class ControlRefusedError(ControlError):
    """The other side refused, with a reason."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault

"""An output processor and its streams, fed by hand."""

from engine.wire.ids import ClientId, EngineId
from engine.wire.messages import EngineCoreOutput, EngineCoreOutputs
from metrics.stats import ServingStats
from orchestrator.llm.detokenizer import Detokenizer, StopChecker
from orchestrator.llm.outputs import OutputProcessor
from orchestrator.llm.stream import Choice, RequestStream
from orchestrator.llm.tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()
RANK = 3


class FedProcessor:
    """One processor and its streams, fed by hand."""

    def __init__(self) -> None:
        self.stats = ServingStats()
        self.processor = OutputProcessor(self.stats)
        self.now = 10.0

    def open(self, request_id: int = 1, num_choices: int = 1, stop: list[str] | None = None) -> RequestStream:
        choices = [
            Choice(
                index=index,
                request_id=request_id,
                sample_index=index,
                num_prompt_tokens=2,
                detokenizer=Detokenizer(TOKENIZER),
                stop=StopChecker(stop) if stop else None,
            )
            for index in range(num_choices)
        ]
        stream = RequestStream(choices, created_at=self.now)
        self.processor.register(stream)
        return stream

    def feed(self, *outputs: EngineCoreOutput) -> list[tuple[int, int]]:
        self.now += 0.5
        return self.processor.process(
            EngineCoreOutputs(EngineId(RANK, 1), ClientId(0, 1), 1, 0, 0, list(outputs)), self.now
        )

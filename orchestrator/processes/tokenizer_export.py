"""The export of a tokenizer to plain files, by a child process, for a model that has none."""

import msgspec

from engine.model.names import ResolvedModel
from engine.model.tokenizer_files import ExportReady, ExportSpec, tokenizer_folder
from orchestrator.processes.child_process import LineSink, start_child

EXPORT_MODULE = "engine.model.export"

_END_S = 5.0


async def find_tokenizer(model: ResolvedModel, on_line: LineSink) -> str:
    """Return the folder with the model's tokenizer files, written now when there is none.

    The export runs in a process of its own: it may need torch, which this process never loads.

    Raises:
        StartupError: the model has no usable tokenizer; with the reason.
    """
    folder = tokenizer_folder(model)
    if folder is not None:
        return str(folder)
    child = await start_child(EXPORT_MODULE, ExportSpec(model=model.path, gguf_file=model.gguf_file), on_line)
    try:
        line = await child.ready_line()
    finally:
        await child.stop(_END_S)
    return msgspec.json.decode(line, type=ExportReady).tokenizer_dir

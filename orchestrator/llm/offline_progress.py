"""What a person sees of offline use, on standard error."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextmanager
def loading_status(*, shown: bool) -> Iterator[Callable[[str], None]]:
    """Show in one line what is being loaded; yields what changes it."""
    if not shown:
        yield lambda _text: None
        return
    with Console(stderr=True).status("loading") as status:
        yield status.update


@contextmanager
def prompts_bar(num_prompts: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """Show a bar of finished prompts and the tokens per second so far.

    Yields what takes the number of tokens of each prompt as it ends, in any thread.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    num_tokens = 0
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as bar:
        bar.add_task("prompts", total=num_prompts, rate="")
        (task,) = bar.tasks

        def on_done(count: int) -> None:
            nonlocal num_tokens
            num_tokens += count
            rate = num_tokens / task.elapsed if task.elapsed else 0.0
            bar.update(task.id, advance=1, rate=f"{rate:,.0f} tokens/s")

        yield on_done

"""What a person sees when the deployment is ready: where it answers, what to try, how to stop it."""

import os

from rich.console import Console


def print_banner(url: str, model: str, num_ranks: int, console: Console | None = None) -> None:
    """Print the ready banner to standard output, with plain lines that can be copied."""
    console = console or Console()
    ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    console.print(f"\n[bold green]Shoal is ready[/]: {model} on {ranks}\n", highlight=False)
    for name, value in (
        ("API", f"{url}/v1"),
        ("ranks", f"{url}/v1/cluster, or: shoal status --url {url}"),
        ("metrics", f"{url}/metrics"),
        ("stop", f"Ctrl-C, or: kill {os.getpid()}"),
    ):
        console.print(f"  [cyan]{name:8}[/] {value}", highlight=False, soft_wrap=True)
    console.print("\n  Try it:\n", highlight=False)
    console.print(_example(url, model), highlight=False, markup=False, soft_wrap=True)
    console.file.flush()


def _example(url: str, model: str) -> str:
    question = '[{"role": "user", "content": "Why do fish swim in schools?"}]'
    body = f'{{"model": "{model}", "messages": {question}, "temperature": 0, "stream": true}}'
    return f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n  -d '{body}'\n"

"""``bench model``: the scripted model as a server of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchflow.cli.apps import make_app

app = make_app("Serve the scripted model.")


@app.callback()
def resource() -> None:
    """Serve the scripted model."""


@app.command("serve")
def serve_model(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Policy file (YAML).", show_default=False)],
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    seed: Annotated[int, typer.Option(help="Seed of calls that bring none.")] = 0,
) -> None:
    """Serve a scripted policy with vLLM's wire format until it is interrupted."""
    import asyncio

    from benchflow.gateway.scripted.policy import load_policy
    from benchflow.gateway.scripted.server import serve

    asyncio.run(serve(load_policy(file), host=host, port=port, seed=seed, ready=_announce))


def _announce(name: str, url: str) -> None:
    print(f"serving {name} at {url}; use it with -m vllm/{name} --policy-url {url}", flush=True)

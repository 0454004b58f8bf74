"""The verb that looks at a model before anything is written with it."""

from dataclasses import asdict
from typing import Annotated

import typer

from graven.verbs.base import JsonOption, show

verbs = typer.Typer()


@verbs.command("doctor")
def doctor(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model directory, a GGUF file or a hub id.")],
    json: JsonOption = False,
) -> int:
    """Try whether a language model works with memories; exit 1 where it does not."""
    import torch

    from graven.doctor import examine

    torch.set_num_threads(1)  # a probe has a dozen columns: threads would wait for each other longer than they work
    found = examine(model)
    show({**asdict(found), "works": found.works, "verdict": found.verdict}, found.lines(), as_json=json)
    return 0 if found.works else 1

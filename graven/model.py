"""A loaded model that writes texts into memory and answers from it: what the command line and a program both call.

`load` gives one of three. A `RecordsModel` was meta-trained (`graven train`) to answer from a few gradient steps; it takes one `key:value` a line, or
a story of a small world.
A `TriplesModel` is a language model that was meta-trained on texts, questions and answers; it takes any text and answers questions about it.
A `TextModel` is any frozen causal language model; it takes any text and learns to recite it, which is not the same as answering questions.
"""

import os
from pathlib import Path

from graven.answer import Answer
from graven.lm.pretrained import load_pretrained
from graven.models.base import Model, Recital, check_numbers
from graven.models.records import RecordsModel
from graven.models.text import PAGE_TOKENS, TextModel
from graven.models.triples import TriplesModel
from graven.tasks.base import cut
from graven.train import load_trained
from graven.train_triples import is_triples
from graven.train_triples import load_trained as load_triples

__all__ = ["PAGE_TOKENS", "SHIPPED", "Answer", "Model", "Recital", "RecordsModel", "TextModel", "TriplesModel", "check_numbers", "cut", "load"]

SHIPPED = Path(__file__).parent / "checkpoints"


def load(name_or_path: str | Path, *, slots: int | None = None) -> Model:
    """A model by name or path.

    Args:
        name_or_path: A shipped checkpoint (`records`, `phonebook`, `stories`), the folder of a finished `graven train`, a Hugging Face model
            directory, a GGUF file, or a hub id. A shipped name wins; write `./records` for a folder of that name.
        slots: Memory vectors for each page of text, where the model lets one choose; from the length of the text where left out.
    Raises:
        ModelError: There is no such model, or it cannot be used behind a memory.
        SpecError: `slots` does not fit the model.
    """
    name = str(name_or_path)
    if name in {place.parent.name for place in SHIPPED.glob("*/model.json")}:
        return RecordsModel(load_trained(SHIPPED / name, name=name), slots=slots)
    if os.path.isfile(Path(name) / "model.json"):  # of `os.path`, which takes a name that is too long for one that is not there
        whole = str(Path(name).resolve())
        if is_triples(Path(name)):
            return TriplesModel(load_triples(Path(name), name=whole), slots=slots)
        return RecordsModel(load_trained(Path(name), name=whole), slots=slots)
    model = load_pretrained(name)
    if os.path.exists(name):
        model.name = str(Path(name).resolve())
    return TextModel(model, slots=slots)

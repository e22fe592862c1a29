"""What all tests share: tests/gpu is skipped without a GPU, and kept ranks end with the session."""

import pytest
import torch

from tests.harness import close_pools


def pytest_collection_modifyitems(config, items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no GPU here: torch.cuda.is_available() is False")
    for item in items:
        if (config.rootpath / "tests" / "gpu") in item.path.parents:
            item.add_marker(skip)


def pytest_sessionfinish():
    close_pools()

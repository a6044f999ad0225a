"""What all tests share: property tests that draw the same examples every run, and the tests that need a GPU."""

import pytest
from hypothesis import settings

settings.register_profile("stable", derandomize=True, deadline=None, database=None, max_examples=25)
settings.load_profile("stable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    waiting = [item for item in items if item.get_closest_marker("gpu")]
    if not waiting:
        return
    import torch

    if not torch.cuda.is_available():
        for item in waiting:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch sees none"))

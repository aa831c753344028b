"""What every test of the pipeline starts from."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """How many threads share an operation is part of its rounding."""
    torch.set_num_threads(1)

"""What a script asks its loader for, it may ask the session's data for."""

import torch

from orchestrator import Session


def test_data_has_the_data_set_of_a_loader() -> None:
    """Examples print how many of its samples were seen."""
    data = torch.utils.data.TensorDataset(torch.arange(12.0)[:, None])
    model = torch.nn.Linear(1, 1)
    session = Session(model, torch.optim.SGD(model.parameters(), 0.1), microbatches=2)
    loader = session.data(torch.utils.data.DataLoader(data, batch_size=4))
    assert loader.dataset is data
    assert (len(loader.dataset), len(loader), loader.batch_size) == (12, 3, 4)

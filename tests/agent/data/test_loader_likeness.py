"""What a script asks its loader for, it may ask the session's data for."""

import torch

from agent.data.batch import Pieces
from orchestrator import Session


def test_data_has_the_data_set_of_a_loader() -> None:
    """Examples print how many of its samples were seen."""
    data = torch.utils.data.TensorDataset(torch.arange(12.0)[:, None])
    model = torch.nn.Linear(1, 1)
    session = Session(model, torch.optim.SGD(model.parameters(), 0.1), microbatches=2)
    loader = session.data(torch.utils.data.DataLoader(data, batch_size=4))
    assert loader.dataset is data
    assert (len(loader.dataset), len(loader), loader.batch_size) == (12, 3, 4)


def test_lists_of_a_batch_go_with_its_rows() -> None:
    """Lengths and captions, as a `collate_fn` returns them; a setting is given to all pieces."""
    batch = (torch.arange(5), [10, 11, 12, 13, 14], ("a", "b", "c", "d", "e"), [0.1, 0.2], 3)
    first, second = Pieces(batch, 0, 2)
    assert [*first[0], *second[0]] == [0, 1, 2, 3, 4]
    assert (first[1] + second[1], first[2] + second[2]) == (batch[1], batch[2])
    assert len(first[0]) == len(first[1]) == len(first[2])
    assert first[3:] == second[3:] == ([0.1, 0.2], 3)

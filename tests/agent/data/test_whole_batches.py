"""Batches as scripts give them to `session.backward`: cut into microbatches, whole, and item by item."""

from collections import UserDict
from types import MappingProxyType
from typing import Any

import pytest
import torch
from samples import Drawn, Owner, Read
from torch.utils.data import TensorDataset

from agent.data import order
from agent.data.batch import Pieces, cut, supervised
from agent.data.data import Data
from agent.errors import Misuse


def test_pieces_of_a_batch_lie_along_one_dimension() -> None:
    x, h = torch.arange(14).view(2, 7), (torch.arange(7).view(1, 7),)
    pieces = Pieces((x, {"h": h}, 3, torch.tensor(0.5)), 1, 3)
    assert [piece[0].shape[1] for piece in pieces] == [3, 2, 2]
    assert torch.equal(torch.cat([piece[0] for piece in pieces], 1), x)
    assert torch.equal(torch.cat([piece[1]["h"][0] for piece in pieces], 1), h[0])
    assert all(piece[2:] == (3, 0.5) for piece in pieces)


def test_that_unlike_microbatches_count_alike_is_said_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Their mean is not the mean over the samples, which a script without microbatches trains on."""
    order.say_unlike.cache_clear()
    rows = torch.ones(6, 1)
    assert [len(piece) for piece in Pieces(rows, 0, 3)] == [2, 2, 2]
    assert not capsys.readouterr().err
    data = Data(Owner(), TensorDataset(rows), batch_size=4, microbatches=2)
    assert [len(one[0]) for step in (0, 1) for one in data.at(step)] == [2, 2, 1, 1]
    assert not capsys.readouterr().err
    for _ in range(2):
        assert [len(piece) for piece in Pieces(rows[1:], 0, 3)] == [2, 2, 1]
    (line,) = capsys.readouterr().err.splitlines()
    assert "a batch that 3 does not divide makes 3 microbatches which differ by a sample" in line
    data = Data(Owner(), TensorDataset(rows), batch_size=5, microbatches=2, drop_last=True)
    assert [len(one[0]) for one in data.at(0)] == [3, 2]
    assert "a batch that 2 does not divide" in capsys.readouterr().err


class Encoding(UserDict[str, Any]):
    """As libraries of language models return it."""

    def __getattr__(self, name: str) -> Any:
        if name == "data":
            raise AttributeError(name)
        return self.data[name]


def target(boxes: int) -> dict[str, Any]:
    return {"boxes": torch.full((boxes, 4), boxes), "name": f"{boxes}.jpg"}


SAMPLES = {
    "lists alone": lambda images, targets: (tuple(images), tuple(targets)),
    "a tensor beside a list": lambda images, targets: (torch.stack(images), targets),
    "named": lambda images, targets: {"images": torch.stack(images), "targets": targets},
    "named by a library": lambda images, targets: Encoding(images=images, targets=targets),
}


@pytest.mark.parametrize("how", SAMPLES)
@pytest.mark.parametrize("boxes", [(1, 3, 2), (2, 2, 2)])
def test_lists_of_samples_of_unlike_sizes_are_cut(how: str, boxes: tuple[int, ...]) -> None:
    """As data sets of detection have them, however many boxes each picture has by chance."""
    images = [torch.full((1, 4, 4), each) for each in range(3)]
    batch = SAMPLES[how](images, [target(each) for each in boxes])
    pieces = [*Pieces(batch, 0, 3)]
    for number, piece in enumerate(pieces):
        assert type(piece) is type(batch)
        image, (found,) = piece.values() if hasattr(piece, "values") else piece
        assert image[0].unique().item() == number
        assert len(found["boxes"]) == boxes[number]
        assert found["name"] == f"{boxes[number]}.jpg"


@pytest.mark.parametrize("alone", [True, False])
def test_dictionaries_of_libraries_are_cut(alone: bool) -> None:
    """And are of their own class in each piece."""
    ids, names = torch.arange(8).view(4, 2), ["a", "b", "c", "d"]
    encoding = Encoding(ids=ids, names=names, deep=Encoding(mask=ids > 3))
    pieces = [
        piece if alone else piece[0]
        for piece in Pieces(encoding if alone else (encoding, torch.zeros(4)), 0, 2)
    ]
    assert {type(piece) for piece in pieces} == {Encoding}
    assert [piece.ids.tolist() for piece in pieces] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert [piece["names"] for piece in pieces] == [["a", "b"], ["c", "d"]]
    assert [piece["deep"].mask.tolist() for piece in pieces] == [
        [[False] * 2] * 2,
        [[True] * 2] * 2,
    ]
    assert encoding.ids is ids


def test_any_other_mapping_is_cut_as_a_dict_is() -> None:
    """Beside other parts of a batch it is settings, which each piece has whole."""
    given = MappingProxyType({"x": torch.arange(4)})
    _, pieces = cut(len, (given,), 0, 2)
    assert [piece["x"].tolist() for piece in pieces] == [[0, 1], [2, 3]]
    _, pieces = cut(len, (torch.arange(4), given), 0, 2)
    assert all(piece[1] is given for piece in pieces)


@pytest.mark.parametrize(
    ("batch", "count", "what"),
    [
        ((torch.zeros(4, 2), torch.zeros(3)), 2, "sizes 3, 4"),
        ((1, 2), 2, "no tensor"),
        ((torch.zeros(3), torch.zeros(3)), 4, "a batch of 3 cannot be cut into 4"),
        ((torch.zeros(4), torch.zeros(4)), 0, "microbatches=8"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused(batch: Any, count: int, what: str) -> None:
    with pytest.raises(Misuse, match=what):
        cut(lambda x, y: x, batch, 0, count)


def test_labels_without_the_dimension_that_is_cut_are_refused() -> None:
    """Each piece would get all of them."""
    with pytest.raises(Misuse, match=r"dimension 1.*of 6 entries.*transpose in loss_of") as refused:
        cut(len, (torch.zeros(4, 6), torch.zeros(6)), 1, 2)
    assert "\n" not in str(refused.value)


def test_a_loss_gets_the_parts_of_a_piece() -> None:
    loss_of, pieces = cut(lambda x, y: x.sum() * y.sum(), (torch.ones(4), torch.ones(4)), 0, 2)
    assert [float(loss_of(piece)) for piece in pieces] == [4.0, 4.0]
    loss_of, pieces = cut(lambda d: d["x"].sum(), ({"x": torch.ones(4)},), 0, 4)
    assert [float(loss_of(piece)) for piece in pieces] == [1.0] * 4


def test_a_sequence_is_given_on_unchanged() -> None:
    given, loss_of = [1, 2, 3], len
    assert cut(loss_of, (given,), 0, 8) == (loss_of, given)


def test_one_tensor_is_a_batch_where_the_session_knows_into_how_many_it_is_cut() -> None:
    """Otherwise its rows are the microbatches, as those of any sequence are."""
    batch = torch.arange(8.0)
    assert cut(len, (batch,), 0, 4)[1] is batch
    assert [piece.tolist() for piece in cut(len, (batch,), 0, 4, whole=True)[1]] == [
        [0.0, 1.0],
        [2.0, 3.0],
        [4.0, 5.0],
        [6.0, 7.0],
    ]
    assert cut(len, ([batch],), 0, 4, whole=True)[1] == [batch]


def test_a_batch_that_is_a_list_is_not_taken_for_its_microbatches() -> None:
    """It is known by the batch that the script was given, wherever it was copied; a list of its own goes on."""
    dataset = TensorDataset(torch.randn(8, 3), torch.randn(8, 3))
    data = Data(Owner(), dataset, batch_size=4, microbatches=2, whole=True)
    pair = [part.clone() for part in data.at(1)]
    with pytest.raises(Misuse, match=r"session\.backward\(loss_of, \*batch\)") as refused:
        cut(len, (pair,), 0, 2, True, [data.given])
    assert "\n" not in str(refused.value)
    with pytest.raises(Misuse, match="2 tensors are the parts of one batch"):
        cut(len, ([torch.zeros(4, 3), torch.zeros(4)],), 0, 2, True)
    for own in ([torch.zeros(2, 3), torch.zeros(2, 3)], [(part,) for part in pair]):
        assert cut(len, (own,), 0, 2, True, [data.given])[1] is own


def test_microbatches_that_collate_fn_makes_are_given_on() -> None:
    def halves(rows: list[Any]) -> list[torch.Tensor]:
        return [torch.tensor([row[0] for row in rows[at::2]]) for at in range(2)]

    data = Data(Owner(), Drawn(8), batch_size=4, microbatches=2, whole=True, collate_fn=halves)
    batch = data.at(0)
    assert cut(len, (batch,), 0, 2, True, [data.given])[1] is batch


def test_a_supervised_loss_measures_the_same_output() -> None:
    calls = []

    def model(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return x + 1

    loss_of = supervised(model, lambda out, y: (out - y).sum(), top=lambda out, y: out.max())
    loss, metrics = loss_of(torch.ones(2), torch.zeros(2))
    assert (float(loss), float(metrics["top"]), len(calls)) == (4.0, 2.0, 1)
    assert float(supervised(model, torch.dot)(torch.ones(2), torch.ones(2))) == 4.0


@pytest.mark.parametrize("dataset", [Drawn(22), Read(22)])
def test_whole_batches_have_the_samples_of_their_microbatches(dataset: Any) -> None:
    whole, parts = (
        Data(Owner(1), dataset, batch_size=5, microbatches=3, whole=whole)
        for whole in (True, False)
    )
    for batch, microbatches in zip(whole, parts, strict=True):
        rows = [int(index) for each in microbatches for index in each[0]]
        assert batch[0].tolist() == rows


def test_whole_batches_are_fetched_ahead_alike() -> None:
    def batches(workers: int) -> list[bytes]:
        data = Data(
            Owner(), Drawn(12), batch_size=4, microbatches=2, whole=True, num_workers=workers
        )
        found = [part.numpy().tobytes() for batch in data for part in batch]
        data.close()
        return found

    assert batches(1) == batches(0)

"""A result is used where the loss of the original script was used."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from agent.errors import Misuse
from agent.step import Result
from agent.store.encoding.plain import packed, unpacked
from agent.store.encoding.values import fill, strip

RESULT = Result(0.5, {"accuracy": 0.75})


def test_a_result_counts_compares_and_prints_as_its_loss() -> None:
    total = 0.0
    total += RESULT
    total += RESULT * 2
    assert (total, min(RESULT, 0.6), RESULT < 1, np.mean([RESULT, 1.0])) == (1.5, 0.5, True, 0.75)
    assert (f"{RESULT:.3f}", RESULT.loss, RESULT["accuracy"]) == (
        "0.500",
        0.5,
        0.75,
    )


def test_a_result_answers_as_a_tensor_without_a_gradient_does() -> None:
    assert RESULT.item() == 0.5
    kept = [RESULT.detach(), RESULT.detach().cpu(), RESULT.data, RESULT.clone()]
    assert torch.stack(kept).mean() == 0.5
    assert RESULT.detach().cpu().numpy() == np.float32(0.5)
    assert copy.deepcopy(RESULT) == RESULT
    assert not hasattr(RESULT, "los_")


def test_a_number_beside_the_loss_answers_as_the_loss_does() -> None:
    """Scripts write `correct += (predicted == target).sum().item()`, and keep such tensors."""
    accuracy = RESULT["accuracy"]
    assert (accuracy.item(), accuracy + 1, f"{accuracy:.1%}") == (0.75, 1.75, "75.0%")
    assert torch.stack([accuracy, accuracy.detach().cpu()]).mean() == 0.75
    assert torch.tensor([accuracy, accuracy]).tolist() == [0.75, 0.75]
    assert same_written({"best": accuracy})


def same_written(value: Any) -> bool:
    return bool(unpacked(packed(value)) == value and pickle.loads(pickle.dumps(value)) == value)


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (lambda x: torch.stack([x, x, torch.tensor(1.5)]).tolist(), [0.5, 0.5, 1.5]),
        (torch.isnan, False),
        (torch.isfinite, True),
        (lambda x: torch.sqrt(torch.square(x)), 0.5),
        (lambda x: torch.maximum(x, torch.tensor(0.25)), 0.5),
        (lambda x: torch.nn.functional.relu(input=x), 0.5),
        (lambda x: torch.nn.functional.mse_loss(x, torch.tensor(1.5)), 1.0),
        (lambda x: torch.full((), x), 0.5),
    ],
)
def test_functions_of_torch_take_a_result_as_a_tensor(found: Any, wanted: object) -> None:
    assert found(RESULT) == wanted
    with pytest.raises(TypeError, match="matmul"):
        torch.matmul(RESULT, "a")


@pytest.mark.parametrize(
    ("reckoned", "wanted"),
    [
        (lambda x, y: 0.5 * x - y, -0.5),
        (lambda x, y: y - x / 2 + 1, 1.5),
        (lambda x, y: 1 / x + (1 - y) * 2.0, 2.5),
        (lambda x, y: abs(-x) + +y, 1.25),
        (lambda x, y: x**2 + 4**x, 2.25),
        (lambda x, y: sum([x, y]), 1.25),
    ],
)
def test_what_is_reckoned_from_results_answers_as_they_do(
    reckoned: Callable[[Result, float], Any], wanted: float
) -> None:
    """Scripts sum up their losses and weigh them, and then ask the sum for its item."""
    found = reckoned(RESULT, RESULT["accuracy"])
    assert found.item() == torch.mean(found).item() == found.detach().item() == float(found)
    assert float(found) == wanted
    assert torch.abs(found).data >= 0 and f"{found:.1f}"


def test_what_is_reckoned_from_a_result_and_something_else_is_of_the_other_s_kind() -> None:
    assert (RESULT * np.ones(2)).tolist() == (np.ones(2) * RESULT).tolist() == [0.5, 0.5]
    assert (RESULT + torch.ones(2)).tolist() == (torch.ones(2) + RESULT).tolist() == [1.5, 1.5]
    assert (-RESULT) ** 0.5 == (-0.5) ** 0.5  # a complex number
    with pytest.raises(TypeError):
        RESULT + "a"


def test_a_result_beside_a_tensor_counts_as_the_number_that_it_is() -> None:
    """With all its bits, and without a say in the type."""
    third = Result(1 / 3)
    wide = torch.ones(2, dtype=torch.float64)
    assert torch.equal(wide * third, wide * (1 / 3))
    assert torch.equal(torch.add(wide, third), wide + 1 / 3)
    assert (torch.ones(2, dtype=torch.bfloat16) * third).dtype == torch.bfloat16
    assert (third * wide).tolist() == [1 / 3, 1 / 3]


def test_a_saved_result_is_read_without_leave() -> None:
    """As torch.load reads by default: the class of no library is needed for it."""
    third, file = Result(1 / 3, {"accuracy": 0.75}), io.BytesIO()
    torch.save({"loss": third, "losses": [third]}, file)
    file.seek(0)
    found = torch.load(file)
    assert (float(found["loss"]), found["losses"]) == (1 / 3, [1 / 3])
    assert pickle.loads(pickle.dumps(third)) == 1 / 3
    assert copy.copy(third)["accuracy"] == copy.deepcopy([third])[0]["accuracy"] == 0.75


def test_a_second_backward_is_told_what_was_done() -> None:
    with pytest.raises(Misuse, match=r"session\.backward\(\.\.\.\) has made the gradients"):
        RESULT.backward()


def test_a_result_is_kept_as_its_loss() -> None:
    """A worker that joins has the number; what was beside it belongs to the step that made it."""
    kept = unpacked(packed({"best": RESULT, "losses": [1.0, RESULT]}))
    assert kept == {"best": 0.5, "losses": [1.0, 0.5]}
    assert type(kept["best"]) is type(kept["losses"][1]) is float


def test_numbers_of_numpy_among_settings_are_written_as_pythons() -> None:
    """A schedule that is computed by NumPy leaves its rate in the optimizer."""
    settings = {
        "lr": np.power(32, -0.5),
        "warm": np.int64(3),
        "nesterov": np.bool_(True),
        "loss": RESULT,
    }
    written = strip(settings, "optimizer", lambda path, value: False)
    assert fill(msgspec.json.decode(msgspec.json.encode(written)), {}.__getitem__) == {
        "lr": 32**-0.5,
        "warm": 3,
        "nesterov": True,
        "loss": 0.5,
    }


@pytest.mark.parametrize("made", [torch.tensor, torch.FloatTensor])
def test_what_torch_takes_for_a_list_is_said_with_the_way_out(made: Callable[..., Any]) -> None:
    """Its own error would be that a Result has no length."""
    with pytest.raises(Misuse, match=r"collect result\.item\(\) for it, or use torch\.stack"):
        made([RESULT, RESULT])
    assert made([RESULT.item(), RESULT.item()]).tolist() == torch.stack([RESULT, RESULT]).tolist()
    assert np.array([RESULT, RESULT]).tolist() == [0.5, 0.5]

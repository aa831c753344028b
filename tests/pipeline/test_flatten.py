"""Microbatches of the script's own objects, which hold others: what is gone through, and how often."""

import torch

from agent.pipeline.flatten import apart, flatten, unflatten


class Node:
    """A node of a tree, as parsers give them out."""

    copies = 0

    def __init__(self, *children: "Node") -> None:
        self.word, self.children = torch.ones(2), [*children]

    def __copy__(self) -> "Node":
        Node.copies += 1
        made = Node.__new__(Node)
        vars(made).update(vars(self))
        return made


def chain(length: int) -> Node:
    node = Node()
    for _ in range(length - 1):
        node = Node(node)
    return node


def test_a_tree_whose_nodes_know_their_parent_is_left_as_it_is() -> None:
    leaf = Node()
    root = Node(leaf)
    leaf.parent = root
    batch = (root, torch.zeros(1))
    leaves, spec = flatten(batch)
    assert leaves[0] is root
    assert unflatten(leaves, spec)[0] is root
    tensors, form = apart(batch)
    assert len(tensors) == 1 and form.kinds == ["Node", "Tensor"]


def test_each_object_of_a_tree_is_taken_apart_once() -> None:
    """Twice for each level would be a thousand times at the tenth."""
    Node.copies = 0
    leaves, spec = flatten(chain(10))
    assert len(leaves) == 10 and Node.copies == 10
    assert unflatten(leaves, spec).children[0].children[0].word is leaves[2]


def test_a_chain_that_is_too_long_to_be_gone_through_is_left_as_it_is() -> None:
    long = chain(2000)
    assert flatten(long)[0] == [long]

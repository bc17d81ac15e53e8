"""Tests for the order of documents."""

import collections
import itertools
import math

import numpy as np
import pytest

from paxon.inputs.streams import document_order


def _order(num_documents: int, *, seed: int | None = 0, epoch: int = 0):
  order = document_order.DocumentOrder(num_documents=num_documents, seed=seed)
  return [order.document(epoch, i) for i in range(num_documents)]


@pytest.mark.parametrize("n", [*range(1, 40), 99, 100, 101, 1000])
def test_each_epoch_is_a_permutation(n):
  for epoch in range(3):
    assert sorted(_order(n, epoch=epoch)) == list(range(n))


def test_seeds_and_epochs_differ():
  orders = {
    tuple(_order(50, seed=seed, epoch=epoch))
    for seed, epoch in itertools.product((0, 1, -1, 2**70), range(4))
  }
  assert len(orders) == 16


def test_no_seed_is_the_order_of_the_source():
  for epoch in range(2):
    assert _order(7, seed=None, epoch=epoch) == list(range(7))


def test_order_is_frozen():
  # A run resumed by a later version must have the same order.
  assert _order(10, seed=1234, epoch=5) == [7, 9, 1, 5, 0, 4, 6, 2, 8, 3]


def test_every_order_of_four_is_about_as_frequent():
  counts = collections.Counter(
    tuple(_order(4, seed=3, epoch=epoch)) for epoch in range(1200)
  )
  assert len(counts) == math.factorial(4)
  # Chi-square with 23 degrees of freedom; 49.7 has probability 0.001.
  assert sum((c - 50) ** 2 / 50 for c in counts.values()) < 49.7


def test_indices_and_documents_are_uncorrelated():
  n = 1500
  for epoch in range(4):
    order = np.array(_order(n, epoch=epoch))
    correlation = np.corrcoef(np.arange(n), order)[0, 1]
    assert abs(correlation) < 4 / math.sqrt(n)
    # A uniform permutation has one fixed point and one pair of neighbours
    # that stay so, on average, both Poisson: 8 has probability 1e-5.
    assert (order == np.arange(n)).sum() < 8
    assert (np.diff(order) == 1).sum() < 8
    neighbours = np.corrcoef(order[1:], order[:-1])[0, 1]
    assert abs(neighbours) < 4 / math.sqrt(n)


def test_a_large_index_creates_no_list():
  order = document_order.DocumentOrder(num_documents=10**12, seed=0)
  documents = {order.document(3, 10**12 - 1 - i) for i in range(100)}
  assert len(documents) == 100
  assert all(0 <= document < 10**12 for document in documents)


def test_rejects_no_documents():
  with pytest.raises(
    ValueError, match=r"num_documents must be positive, got 0"
  ):
    document_order.DocumentOrder(num_documents=0, seed=0)


@pytest.mark.parametrize("index", [-1, 5])
def test_rejects_an_index_out_of_range(index):
  order = document_order.DocumentOrder(num_documents=5, seed=0)
  with pytest.raises(IndexError, match=rf"num_documents \(5\), got {index}"):
    order.document(0, index)

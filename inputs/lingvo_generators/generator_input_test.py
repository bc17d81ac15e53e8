"""Tests for inputs of generators, with a fake of the interface."""

import dataclasses
import importlib
import itertools
import json
import types

import numpy as np
import pytest

from paxon.inputs import base_input
from paxon.inputs.lingvo_generators import generator_input


class _OutOfRangeError(Exception):
  """Imitates the module and the name of TensorFlow's error."""


_OutOfRangeError.__name__ = "OutOfRangeError"
_OutOfRangeError.__module__ = "tensorflow.python.framework.errors_impl"


@dataclasses.dataclass
class Generator:
  """Yields `number` examples 0, 1, ... of two tokens, `size` per batch."""

  size: int
  number: int | None
  begin: int = 0
  next: int = 0

  def GetPreprocessedInputBatch(self):  # noqa: N802
    if self.number is not None and self.next >= self.number:
      raise _OutOfRangeError
    end = self.next + self.size
    if self.number is not None:
      end = min(end, self.number)
    rows = self.begin + np.arange(self.next, end)[:, None]
    self.next = end
    return {
      "ids": rows + np.array([[0, 1]]),
      "labels": rows + np.array([[1, 2]]),
      "paddings": np.zeros(rows.shape) + np.array([[0.0, 1.0]]),
      "inner": {"label": rows[:, 0]},
    }


def _opener(size=3, number=None):
  return lambda: Generator(size, number)


def _input(**given):
  sizes = {"global_batch_size": 4, "length": 2, "repeatable": True}
  return generator_input.GeneratorInput(**(sizes | given))


def _rows(batches):
  return [batch["inputs"][:, 0].tolist() for batch in batches]


def test_batches_are_resized_and_renamed():
  batch = _input(open=_opener()).get_next()
  assert batch["inputs"].tolist() == [[0, 1], [1, 2], [2, 3], [3, 4]]
  assert batch["targets"].tolist() == [[1, 2], [2, 3], [3, 4], [4, 5]]
  assert batch["weights"].tolist() == [[1, 0]] * 4
  assert batch["inner/label"].tolist() == [0, 1, 2, 3]
  assert "paddings" not in batch


def test_repeatable_resumes_from_any_batch_on_any_hosts():
  given = _input(open=_opener())
  states, batches = [], []
  for _ in range(4):
    states.append(json.loads(json.dumps(given.get_state())))
    batches.append(given.get_next())
  for start, hosts in itertools.product((0, 2, 3), (1, 2, 4)):
    rows = []
    for host in range(hosts):
      other = _input(open=_opener())
      other.set_infeed_hosts(infeed_host_index=host, num_infeed_hosts=hosts)
      other.set_state(states[start])
      rows.append(other.get_next()["inputs"])
    np.testing.assert_array_equal(
      np.concatenate(rows), batches[start]["inputs"]
    )


def test_other_generators_are_opened_on_every_host():
  begins = iter((100, 200))

  def opened():
    return Generator(3, None, begin=next(begins))

  given = _input(open=opened, repeatable=False)
  given.set_infeed_hosts(infeed_host_index=1, num_infeed_hosts=2)
  assert given.get_next()["inputs"][:, 0].tolist() == [100, 101]
  state = given.get_state()
  given.set_state(state)
  assert given.get_state() == state
  assert given.get_next()["inputs"][:, 0].tolist() == [200, 201]
  with pytest.raises(ValueError, match="saved with repeatable False"):
    _input(open=_opener()).set_state(state)


@pytest.mark.parametrize("keep_rows", [True, False])
def test_evaluation_reads_every_example_once_and_pads(keep_rows):
  opened = []

  def opener():
    opened.append(Generator(4, 10))
    return opened[-1]

  given = _input(open=opener, num_samples=10, keep_rows=keep_rows)
  batches = list(given)
  assert _rows(batches) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 0]]
  assert batches[2]["example_weights"].tolist() == [1, 1, 0, 0]
  assert batches[2]["weights"][2:].sum() == 0
  with pytest.raises(StopIteration):
    given.get_next()
  given.reset()
  assert _rows(given) == _rows(batches)
  assert len(opened) == (1 if keep_rows else 2)


def test_lazy_examples_are_read_on_demand():
  opened = []

  def opener():
    opened.append(Generator(1, 10))
    return opened[-1]

  given = _input(open=opener, num_samples=10, keep_rows=False)
  given.get_next()
  assert opened[0].next <= 5


def test_training_ends_with_the_last_whole_batch():
  given = _input(open=_opener(size=3, number=10))
  assert _rows(given) == [[0, 1, 2, 3], [4, 5, 6, 7]]
  assert _rows(_input(open=_opener(), num_batches=1)) == [[0, 1, 2, 3]]
  # A run resumed with fewer batches than it has read has ended.
  given = _input(open=_opener(), num_batches=1)
  given.set_state({"batches": 2, "repeatable": True})
  assert not _rows(given)


def test_rejects_generators_that_may_end_at_different_batches():
  given = _input(open=_opener(number=5), repeatable=False)
  given.set_infeed_hosts(infeed_host_index=1, num_infeed_hosts=2)
  given.get_next(), given.get_next()
  with pytest.raises(
    ValueError, match=r"host 1 of 2 ended after 2 batches; .*repeatable is Fal"
  ):
    given.get_next()
  # A `num_batches` that all hosts reach ends them together.
  given = _input(open=_opener(number=5), repeatable=False, num_batches=2)
  given.set_infeed_hosts(infeed_host_index=1, num_infeed_hosts=2)
  assert _rows(given) == [[0, 1], [2, 3]]


def test_rejects_too_few_samples():
  given = _input(open=_opener(number=7), num_samples=10)
  with pytest.raises(ValueError, match=r"num_samples is 10, .* 7 examples"):
    given.get_next()


def test_generator_errors_propagate():
  class Broken:
    def GetPreprocessedInputBatch(self):  # noqa: N802
      raise RuntimeError("no such file")

  with pytest.raises(RuntimeError, match="no such file"):
    _input(open=Broken).get_next()
  assert base_input.is_end(_OutOfRangeError())


@pytest.mark.parametrize(
  ("convert", "message"),
  [
    (lambda b: {"a": b["ids"], "b": b["ids"][:1]}, "the same batch size, got"),
    (lambda b: {"example_weights": b["ids"]}, "has example_weights already"),
  ],
)
def test_rejects_invalid_batches(convert, message):
  given = _input(open=_opener(number=9), num_samples=9, convert=convert)
  with pytest.raises(ValueError, match=message):
    given.get_next()


def test_rejects_a_fixed_seed_for_training():
  params = types.SimpleNamespace(file_random_seed=7)
  opener = generator_input.LingvoGenerator(params=params)
  with pytest.raises(ValueError, match="the fixed file_random_seed 7"):
    _input(open=opener, repeatable=False)
  _input(open=opener, repeatable=False, num_samples=3)
  _input(open=opener)


def test_params_are_instantiated_when_first_read():
  params = types.SimpleNamespace(Instantiate=_opener(number=8))
  opener = generator_input.LingvoGenerator(params=params)
  given = _input(open=opener, num_samples=8)
  assert _rows(given) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
  "state", [{}, {"batches": True, "repeatable": True}, {"batches": -1}]
)
def test_rejects_damaged_states(state):
  with pytest.raises(ValueError, match="batches"):
    _input(open=_opener()).set_state(state)


@pytest.mark.parametrize("name", ["num_samples", "num_batches"])
def test_rejects_nonpositive_numbers(name):
  with pytest.raises(ValueError, match=f"{name} must be positive"):
    _input(open=_opener(), **{name: 0})


def test_lingvos_own_generator_where_it_loads():
  modules = ("lingvo.core.base_input_generator", "lingvo.core.ops")
  try:
    core, _ = (importlib.import_module(name) for name in modules)
  except Exception as error:
    pytest.skip(f"Lingvo does not load here: {error!r}")
  # All of Lingvo's generators have this method.
  assert hasattr(core.BaseInputGenerator, "GetPreprocessedInputBatch")
  assert "batch_size" in core.BaseInputGenerator.Params()

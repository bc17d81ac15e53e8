"""Tests for the base class, with a minimal input."""

import dataclasses
import types
from typing import Any

import numpy as np
import pytest

from paxon.inputs import base_input, byte_tokenizer, checks


@dataclasses.dataclass(kw_only=True, eq=False)
class CountingInput(base_input.BaseInput):
  """Sequences that contain their index; `num_batches` batches."""

  num_batches: int = 3
  _step: int = dataclasses.field(default=0, init=False)

  def get_next(self) -> base_input.Batch:
    if self._step >= self.num_batches:
      raise StopIteration
    first = self._step * self.global_batch_size
    self._step += 1
    numbers = np.arange(first, first + self.global_batch_size, dtype=np.int32)
    return self.host_rows({"inputs": np.tile(numbers[:, None], self.length)})

  def reset(self) -> None:
    self._step = 0

  def get_state(self) -> base_input.State:
    return {"step": self._step}

  def set_state(self, state: base_input.State) -> None:
    self._step = state["step"]


class EditedInput(CountingInput):
  """An input that edits the batches of another."""

  def get_next(self) -> base_input.Batch:
    batch = super().get_next()
    batch["weights"] = (batch["inputs"] % 2).astype(np.float32)
    return batch


def _input(cls=CountingInput, **kwargs):
  return cls(**{"global_batch_size": 4, "length": 2} | kwargs)


@pytest.mark.parametrize("num_hosts", [1, 2, 4])
def test_hosts_together_have_the_global_batch(num_hosts):
  rows = []
  for index in range(num_hosts):
    host = _input()
    host.set_infeed_hosts(infeed_host_index=index, num_infeed_hosts=num_hosts)
    assert host.per_host_batch_size == 4 // num_hosts
    host.get_next()
    rows.append(host.get_next()["inputs"])
    assert rows[-1].shape == (4 // num_hosts, 2)
  np.testing.assert_array_equal(
    np.concatenate(rows), [[4, 4], [5, 5], [6, 6], [7, 7]]
  )


def test_one_host_is_the_default():
  assert (_input().infeed_host_index, _input().num_infeed_hosts) == (0, 1)


def test_iterates_from_the_position_reached():
  counting = _input()
  counting.get_next()
  assert [int(batch["inputs"][0, 0]) for batch in counting] == [4, 8]
  assert list(counting) == []
  counting.reset()
  assert len(list(counting)) == 3


def test_subclass_edits_batches_and_keeps_the_position():
  edited = _input(EditedInput)
  edited.get_next()
  state = edited.get_state()
  expected = edited.get_next()
  np.testing.assert_array_equal(expected["weights"][:, 0], [0, 1, 0, 1])
  other = _input(EditedInput)
  other.set_state(state)
  actual = other.get_next()
  assert actual.keys() == {"inputs", "weights"}
  for key, value in expected.items():
    np.testing.assert_array_equal(actual[key], value)


def test_inputs_are_compared_by_identity():
  assert _input() != _input()
  assert len({_input(), _input()}) == 2


@pytest.mark.parametrize("name", ["global_batch_size", "length"])
@pytest.mark.parametrize("value", [0, -2])
def test_rejects_sizes_that_are_not_positive(name, value):
  message = rf"CountingInput\.{name} must be positive, got {value}"
  with pytest.raises(ValueError, match=message):
    _input(**{name: value})


@pytest.mark.parametrize(
  ("index", "count", "message"),
  [
    (0, 0, r"num_infeed_hosts must be positive, got 0"),
    (2, 2, r"less than num_infeed_hosts \(2\), got 2"),
    (-1, 2, r"must be at least 0 and .* got -1"),
    (1, 3, r"global_batch_size \(4\) must be a multiple .* hosts \(3\)"),
    (7, 8, r"global_batch_size \(4\) must be a multiple .* hosts \(8\)"),
  ],
)
def test_rejects_invalid_hosts(index, count, message):
  counting = _input()
  with pytest.raises(ValueError, match=message):
    counting.set_infeed_hosts(infeed_host_index=index, num_infeed_hosts=count)
  assert (counting.infeed_host_index, counting.num_infeed_hosts) == (0, 1)


@pytest.mark.parametrize("array", [np.zeros((3, 2)), np.float32(0)])
def test_host_rows_rejects_another_batch_size(array):
  with pytest.raises(
    ValueError, match=r"'extra' .* first dimension .* \(4\), got"
  ):
    _input().host_rows({"extra": np.asarray(array)})


def test_abstract_methods_are_required():
  class Half(base_input.BaseInput):
    def reset(self) -> None:
      pass

  half: Any = Half
  with pytest.raises(TypeError, match=r"abstract.*get_next"):
    half(global_batch_size=1, length=1)


def test_the_end_is_recognized_by_name():
  # Imitates TensorFlow's errors without importing it.
  out_of_range = type(
    "OutOfRangeError",
    (Exception,),
    {"__module__": "tensorflow.python.framework.errors_impl"},
  )
  of_another = type("OutOfRangeError", (Exception,), {"__module__": "mine"})
  assert base_input.is_end(StopIteration())
  assert base_input.is_end(out_of_range())
  assert base_input.is_end(type("Mine", (out_of_range,), {})())
  assert not base_input.is_end(of_another())
  assert not base_input.is_end(ValueError("OutOfRangeError"))


def test_decodes_ids_with_a_tokenizer():
  counting = _input()
  with pytest.raises(ValueError, match=r"CountingInput has no tokenizer"):
    counting.ids_to_strings(np.zeros((1, 2), np.int32), [2])
  tokenizer = byte_tokenizer.ByteTokenizer()
  counting.tokenizer = tokenizer
  ids = np.stack([tokenizer.encode("abc"), tokenizer.encode("def")])
  assert counting.ids_to_strings(ids, [3, 1]) == ["abc", "d"]
  assert counting.required_vocab_size() is None


@pytest.mark.parametrize(
  ("kwargs", "message"),
  [
    ({"eval_loop_num_batches": 0}, r"eval_loop_num_batches must be posit.* 0"),
    ({"reset_for_eval": False}, r"requires eval_loop_num_batches"),
  ],
)
def test_invalid_evaluations_are_rejected(kwargs, message):
  with pytest.raises(ValueError, match=message):
    _input(**kwargs)


def test_only_optional_fields_may_be_none():
  owner = types.SimpleNamespace(size=2, limit=None, zero=0)
  checks.check_positive(owner, "size", optional=["limit"])
  with pytest.raises(ValueError, match=r"\.limit must be positive, got None"):
    checks.check_positive(owner, "size", "limit")
  with pytest.raises(ValueError, match=r"\.zero must be positive, got 0"):
    checks.check_positive(owner, optional=["zero"])


def test_ids_are_below_the_vocabulary_size():
  owner = types.SimpleNamespace(token=3, unset=None)
  for size in (None, 4):
    checks.check_ids(owner, "token", "unset", vocab_size=size)
  for size in (0, 3):
    with pytest.raises(ValueError, match=rf"vocab_size \({size}\), got 3"):
      checks.check_ids(owner, "token", vocab_size=size)

"""Batches of an input with a teacher's predictions, computed once.

A folder has, for the first N batches of an input,

  log_probs.npy   float32 [N, B, T, K], of the K most likely tokens
  ids.npy         int32 [N, B, T, K], these tokens
  digests.npy     uint32 [N, B], CRC-32 of each sequence
  facts.json      the teacher's name, the temperature

so that batch n has the same predictions in any run, resumed or not, and other
data, another teacher or another temperature is an error.
"""

from collections.abc import Mapping
import dataclasses
import json
import pathlib
import shutil
import time
from typing import Any, Final
import zlib

import numpy as np

from paxon.inputs import base_input, checks

IDS: Final = "teacher_ids"
LOG_PROBS: Final = "teacher_log_probs"
_FACTS = "facts.json"
_PROGRESS = "progress.json"
_ARRAYS = ("ids", "log_probs", "digests")
# Between records of the batches that are written.
SAVE_SECONDS: Final = 60.0
_DIGESTED = ("inputs", "targets", "segment_ids")
_BATCH, _TEXT = "batch", "text"


@dataclasses.dataclass(kw_only=True, eq=False)
class TeacherInput(base_input.BaseInput):
  """Adds `teacher_ids` int32 and `teacher_log_probs` float32, both [B,T,K].

  Attributes:
    text: The input, in the order in which the folder was computed.
    folder: The folder, written by `Writer`.
    teacher: Name of the teacher's values.
    temperature: By which the teacher's logits were divided.
  """

  text: base_input.BaseInput
  folder: str
  teacher: str
  temperature: float
  _batch: int = dataclasses.field(default=0, init=False, repr=False)
  _stored: dict[str, np.ndarray] | None = dataclasses.field(
    default=None, init=False, repr=False
  )

  def __post_init__(self) -> None:
    super().__post_init__()
    for name, own, given in (
      (
        "global_batch_size",
        self.global_batch_size,
        self.text.global_batch_size,
      ),
      ("length", self.length, self.text.length),
    ):
      if own != given:
        raise ValueError(
          f"TeacherInput.{name} ({own}) must be that of its text, {given}."
        )

  def set_infeed_hosts(
    self, *, infeed_host_index: int, num_infeed_hosts: int
  ) -> None:
    """Sets the host index and count of this input and of its text."""
    hosts = {
      "infeed_host_index": infeed_host_index,
      "num_infeed_hosts": num_infeed_hosts,
    }
    super().set_infeed_hosts(**hosts)
    self.text.set_infeed_hosts(**hosts)

  def get_next(self) -> base_input.Batch:
    """Returns this host's sequences of the next batch.

    Raises:
      StopIteration: The text has ended.
      ValueError: The folder has no such batch, or one of another text.
    """
    stored = self._open()
    count = len(stored["digests"])
    if self._batch >= count:
      raise ValueError(
        f"{self.folder} has the teacher's predictions of {count} batches, and"
        " this is the next one; compute more, or train fewer steps."
      )
    batch = self.text.get_next()
    start = self.infeed_host_index * self.per_host_batch_size
    rows = slice(start, start + self.per_host_batch_size)
    if (_digests(batch) != stored["digests"][self._batch][rows]).any():
      raise ValueError(
        f"{self.folder} has predictions of another text at batch {self._batch}:"
        " the data, its order, the tokenizer, the batch size or length has"
        " changed; compute them again."
      )
    for key, name in ((IDS, "ids"), (LOG_PROBS, "log_probs")):
      batch[key] = np.array(stored[name][self._batch][rows])
    self._batch += 1
    return batch

  def _open(self) -> dict[str, np.ndarray]:
    if self._stored is not None:
      return self._stored
    folder = pathlib.Path(self.folder)
    try:
      facts = json.loads((folder / _FACTS).read_text())
      # Mapped, because it may be larger than memory.
      stored = {
        name: np.load(folder / f"{name}.npy", mmap_mode="r")
        for name in ("digests", "ids", "log_probs")
      }
    except (OSError, ValueError) as error:
      raise ValueError(
        f"{self.folder} has no predictions of a teacher ({error}); compute them"
        " with paxon.tasks.lm.params.teacher_log_probs."
      ) from error
    own = {"teacher": self.teacher, "temperature": self.temperature}
    for name, value in own.items():
      if facts.get(name) != value:
        raise ValueError(
          f"{self.folder} has predictions with {name} {facts.get(name)}, and"
          f" this run has {value}; compute them again."
        )
    shape = self.global_batch_size, self.length
    if stored["ids"].shape[1:3] != shape:
      raise ValueError(
        f"{self.folder} has predictions of batches of {stored['ids'].shape[1]}"
        f" sequences of {stored['ids'].shape[2]} tokens, and this run has"
        f" {shape[0]} of {shape[1]}; compute them again."
      )
    self._stored = stored
    return stored

  @property
  def is_endless(self) -> bool:
    """Whether the text is endless."""
    return self.text.is_endless

  def required_vocab_size(self) -> int | None:
    """Returns the required vocab size of the text."""
    return self.text.required_vocab_size()

  def check_readable(self) -> None:
    """Checks the text and the folder."""
    self.text.check_readable()
    self._open()

  def count_batches(self, num_epochs: int) -> int:
    """Returns the number of batches of the text."""
    return self.text.count_batches(num_epochs)

  def find_problem_of_targets(self) -> str | None:
    """Returns the problem of the text."""
    return self.text.find_problem_of_targets()

  def describe_untrained(self) -> str | None:
    """Returns the description of the text."""
    return self.text.describe_untrained()

  def close(self) -> None:
    """Closes the text."""
    self.text.close()

  def ids_to_strings(self, *args: Any, **kwargs: Any) -> list[str]:
    """Decodes as the text does."""
    return self.text.ids_to_strings(*args, **kwargs)

  def reset(self) -> None:
    """Returns to the first batch."""
    self._batch = 0
    self.text.reset()

  def get_state(self) -> base_input.State:
    """Returns the number of the next batch and the position of the text."""
    return {_BATCH: self._batch, _TEXT: self.text.get_state()}

  def set_state(self, state: base_input.State) -> None:
    """Sets a position.

    Raises:
      ValueError: It is not one of this input.
    """
    checks.check_keys(self, state, (_BATCH, _TEXT))
    self.text.set_state(state[_TEXT])
    self._batch = state[_BATCH]


class Writer:
  """Writes a folder for `TeacherInput`, batch after batch.

  It is complete or absent: until `finish` it is `FOLDER.partial`, which a
  writer with the same arguments continues.

  Attributes:
    done: Number of batches in it.
    digest: The CRC-32 of their digests, see `add_digest`.
  """

  def __init__(
    self,
    folder: str,
    *,
    num_batches: int,
    facts: Mapping[str, Any],
    top: int,
    is_first: bool = True,
  ) -> None:
    """Finds what an earlier writer has left.

    Args:
      folder: The folder.
      num_batches: Batches that it will have.
      facts: `teacher` and `temperature`, see `TeacherInput`.
      top: Tokens of each position.
      is_first: Whether this process writes; the others only count.
    """
    self._folder = pathlib.Path(folder)
    self._partial = pathlib.Path(f"{folder}.partial")
    self._facts = dict(facts)
    self._origin = {**facts, "num_batches": num_batches, "top": top}
    self._num_batches = num_batches
    self._is_first = is_first
    self._arrays: dict[str, np.memmap] = {}
    self._saved = time.monotonic()
    self.done = self.digest = 0
    if not is_first:
      return
    try:
      progress = json.loads((self._partial / _PROGRESS).read_text())
    except (OSError, ValueError):
      progress = {}
    if progress.get("origin") != self._origin:
      self.restart()
      return
    self.done, self.digest = progress["done"], progress["digest"]
    for name in _ARRAYS:
      path = self._partial / f"{name}.npy"
      self._arrays[name] = np.lib.format.open_memmap(path, mode="r+")

  def restart(self) -> None:
    """Forgets all batches."""
    self._arrays = {}
    self.done = self.digest = 0
    if self._is_first:
      shutil.rmtree(self._partial, ignore_errors=True)
      self._partial.mkdir(parents=True)

  def write(
    self,
    index: int,
    batch: base_input.Batch,
    *,
    ids: np.ndarray,
    log_probs: np.ndarray,
  ) -> None:
    """Writes the predictions [B,T,K] of a whole batch."""
    if not self._is_first:
      return
    digests = _digests(batch)
    found = (ids.astype(np.int32), log_probs.astype(np.float32), digests)
    for name, value in zip(_ARRAYS, found, strict=True):
      if name not in self._arrays:
        self._arrays[name] = np.lib.format.open_memmap(
          self._partial / f"{name}.npy",
          mode="w+",
          dtype=value.dtype,
          shape=(self._num_batches, *value.shape),
        )
      self._arrays[name][index] = value
    self.done, self.digest = index + 1, add_digest(batch, self.digest)
    if time.monotonic() - self._saved >= SAVE_SECONDS:
      self._save()

  def _save(self) -> None:
    for array in self._arrays.values():
      array.flush()
    progress = {
      "origin": self._origin,
      "done": self.done,
      "digest": self.digest,
    }
    new = self._partial / f"{_PROGRESS}.new"
    new.write_text(json.dumps(progress))
    new.replace(self._partial / _PROGRESS)
    self._saved = time.monotonic()

  def finish(self) -> None:
    """Gives the folder its name."""
    if not self._is_first:
      return
    (self._partial / _FACTS).write_text(json.dumps(self._facts) + "\n")
    (self._partial / _PROGRESS).unlink(missing_ok=True)
    self._partial.rename(self._folder)


def add_digest(batch: base_input.Batch, before: int) -> int:
  """Returns the CRC-32 of a batch's digests after that of others."""
  return zlib.crc32(_digests(batch).tobytes(), before)


def _digests(batch: base_input.Batch) -> np.ndarray:
  """Returns the CRC-32 of each sequence, uint32 [B]."""
  found = []
  for sequence in zip(*(batch[name] for name in _DIGESTED), strict=True):
    value = 0
    for array in sequence:
      value = zlib.crc32(np.ascontiguousarray(array).tobytes(), value)
    found.append(value)
  return np.asarray(found, np.uint32)

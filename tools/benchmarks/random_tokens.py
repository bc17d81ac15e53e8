"""Batches of random tokens in packed rows, without any file.

A row is documents of random lengths, one after another, and a little padding:
what a language model's input gives, from a stream of random numbers.
"""

import dataclasses

import numpy as np

from paxon.inputs import base_input


@dataclasses.dataclass(kw_only=True, eq=False)
class RandomTokens(base_input.BaseInput):
  """An endless input; batch `n` is a function of the seed and `n`.

  Attributes:
    vocab_size: Ids are below it.
    seed: Of the random numbers.
  """

  vocab_size: int
  seed: int = 0
  _next: int = dataclasses.field(default=0, init=False, repr=False)

  def get_next(self) -> base_input.Batch:
    """Returns this host's rows, with the keys of `PackedLmInput`."""
    random = np.random.default_rng((self.seed, self._next))
    self._next += 1
    shape = self.global_batch_size, self.length
    tokens = random.integers(0, self.vocab_size, (shape[0], shape[1] + 1))
    # A document ends after each place with this chance, four in a row or so.
    ends = random.random(shape) < min(0.5, 4 / self.length)
    segment_ids = 1 + np.cumsum(ends, axis=1) - ends
    places = np.broadcast_to(np.arange(self.length), shape)
    begins = np.pad(ends[:, :-1], ((0, 0), (1, 0)))
    positions = places - np.maximum.accumulate(places * begins, axis=1)
    padding = places >= self.length - random.integers(
      0, max(1, self.length // 32), (shape[0], 1)
    )
    rows = {
      "inputs": tokens[:, :-1],
      "targets": tokens[:, 1:],
      "positions": positions,
      "segment_ids": segment_ids,
      "target_bytes": np.ones(shape),
    }
    batch: base_input.Batch = {
      name: np.where(padding, 0, value).astype(np.int32)
      for name, value in rows.items()
    }
    batch["weights"] = np.where(padding, 0, 1).astype(np.float32)
    begin = self.infeed_host_index * self.per_host_batch_size
    end = begin + self.per_host_batch_size
    return {name: value[begin:end] for name, value in batch.items()}

  def reset(self) -> None:
    """Goes back to the first batch."""
    self._next = 0

  def get_state(self) -> base_input.State:
    """Returns the number of batches read."""
    return {"next": self._next}

  def set_state(self, state: base_input.State) -> None:
    """Goes to a position that `get_state` returned."""
    if set(state) != {"next"}:
      raise ValueError(f"RandomTokens has no such state: {state}.")
    self._next = state["next"]

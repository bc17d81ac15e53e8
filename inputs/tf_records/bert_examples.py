"""BERT's training examples as MLPerf has them in TFRecord files.

A record has `input_ids`, `input_mask` and `segment_ids` [512], with some tokens
hidden, and `masked_lm_positions`, `masked_lm_ids` and `masked_lm_weights` [76],
which say where and what they were. Its second objective, which text comes next,
is not read.
"""

import dataclasses

import numpy as np

from paxon.inputs import example_source
from paxon.inputs.tf_records import tf_example

_KEYS = (
  "input_ids",
  "input_mask",
  "segment_ids",
  "masked_lm_positions",
  "masked_lm_ids",
  "masked_lm_weights",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BertExamples:
  """Texts with hidden tokens, without the padding.

  Attributes:
    rows: The records.
    remask: Whether to give the whole text, of which the model hides other
      tokens in every step (`MaskedLm.masking`), instead of the hidden tokens
      of the record, the same ones in every epoch.
    vocab_size: What ids must be below.
    special_ids: Ids that are not to be hidden when the model hides tokens.
  """

  rows: tf_example.TfExampleRecords
  remask: bool = False
  vocab_size: int = 30_522
  special_ids: tuple[int, ...] = (101, 102)

  def __len__(self) -> int:
    return len(self.rows)

  def required_vocab_size(self) -> int:
    """Returns `vocab_size`."""
    return self.vocab_size

  def __getitem__(self, index: int, /) -> example_source.Example:
    """Returns one example, all [n].

    Returns:
      `inputs`, what the model reads; `targets`, the whole text; `type_ids`, to
      which of the two texts a token belongs; and `weights`, 1 for a token that
      is hidden, or, to be masked anew, may be.

    Raises:
      ValueError: A record has another form; names file and record.
    """
    row = self.rows[index]
    name = self.rows.name(index)
    for key in _KEYS:
      if key not in row:
        raise ValueError(
          f"{name} has no feature {key!r}; it has {sorted(row)}."
        )
    ids = row["input_ids"].astype(np.int32)
    length = int(np.sum(row["input_mask"]))
    if not 0 < length <= len(ids) or len(row["segment_ids"]) != len(ids):
      raise ValueError(
        f"{name}: input_ids {len(ids)}, segment_ids {len(row['segment_ids'])}"
        f" and the sum of input_mask, {length}, do not go together."
      )
    learnt = row["masked_lm_weights"] > 0
    places = row["masked_lm_positions"][learnt]
    if len(places) and not 0 <= places.min() <= places.max() < length:
      raise ValueError(
        f"{name}: masked_lm_positions must be in [0, {length}), got"
        f" {places.min()} to {places.max()}."
      )
    text = ids.copy()
    text[places] = row["masked_lm_ids"][learnt]
    if max(ids.max(), text.max()) >= self.vocab_size or text.min() < 0:
      raise ValueError(
        f"{name} has ids from {text.min()} to {max(ids.max(), text.max())}, and"
        f" BertExamples.vocab_size is {self.vocab_size}; is it of another"
        " vocabulary?"
      )
    if self.remask:
      weights = ~np.isin(text, self.special_ids)
    else:
      weights = np.zeros(len(ids), bool)
      weights[places] = True
    example = {
      "inputs": text if self.remask else ids,
      "targets": text,
      "type_ids": row["segment_ids"].astype(np.int32),
      "weights": weights.astype(np.float32),
    }
    return {key: value[:length] for key, value in example.items()}

"""MLPerf's BERT training examples in TFRecord files.

A record has `input_ids` with masked tokens, `input_mask` and `segment_ids`
[512], and `masked_lm_positions`, `masked_lm_ids` and `masked_lm_weights` [76]
with the masked positions and original ids. The next-sentence label is ignored.
"""

import dataclasses

import numpy as np

from paxon.inputs.sources import example_source
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
  """Texts with masked tokens, without padding.

  Attributes:
    rows: The records.
    remask: Whether to return the original text for dynamic masking by the model
      (`MaskedLm.masking`), instead of the record's static masks.
    vocab_size: The exclusive upper bound of the ids.
    special_ids: Ids that dynamic masking does not mask.
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
      `inputs`; `targets`, the original text; `type_ids`, the index of the text
      (0 or 1) of each token; and `weights`, 1 for tokens that are masked, or
      with `remask` may be masked.

    Raises:
      ValueError: A record is invalid; names the file and the record.
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

"""Readable descriptions of batches: segments, lengths and padding."""

from collections.abc import Iterator, Mapping, Sequence
import itertools

import numpy as np

from paxon.inputs import base_input
from paxon.inputs.sources import example_source

# Characters of a segment, sequences of a batch and segments to print.
_TEXT = 72
_ROWS = 4
_SEGMENTS = 6


def describe(
  source: base_input.BaseInput, batch: Mapping[str, np.ndarray], *, number: int
) -> str:
  """Returns the description of this host's sequences of a batch.

  The batch's input `source` decodes ids; `number` is the batch's, from 0.
  """
  return "\n".join(_lines(source, batch, number))


def _lines(
  source: base_input.BaseInput, batch: Mapping[str, np.ndarray], number: int
) -> Iterator[str]:
  yield f"batch {number}"
  for key in sorted(batch):
    yield f"  {_array(key, batch[key])}"
  for prefix in ("", example_source.ENCODER):
    if prefix + "segment_ids" in batch and prefix + "inputs" in batch:
      yield from _format_packed(source, batch, prefix)


def _array(key: str, value: np.ndarray) -> str:
  words = f"{key}: {value.dtype} {list(value.shape)}"
  if value.size and value.dtype.kind in "iuf":
    words += f" from {value.min():g} to {value.max():g}"
  return words


def _format_packed(
  source: base_input.BaseInput, batch: Mapping[str, np.ndarray], prefix: str
) -> Iterator[str]:
  segments = batch[prefix + "segment_ids"].reshape(
    -1, batch[prefix + "segment_ids"].shape[-1]
  )
  ids = batch[prefix + "inputs"].reshape(segments.shape)
  spans = [_spans(row) for row in segments]
  lengths = [end - begin for row in spans for begin, end in row]
  total, used = segments.size, int((segments > 0).sum())
  words = (
    f"  {prefix}sequences: {len(segments)} x {segments.shape[1]} tokens;"
    f" {total - used:,} of {total:,} are padding, packing efficiency"
    f" {used / total:.1%}"
  )
  if lengths:
    words += (
      f"; {len(lengths)} segments of {min(lengths)} to {max(lengths)} tokens,"
      f" {sum(lengths) / len(lengths):.1f} on average"
    )
  yield words
  if not prefix and "weights" in batch:
    weights = batch["weights"]
    yield f"  targets with a positive weight: {int((weights > 0).sum()):,}"
  for number, (row, found) in enumerate(
    zip(ids[:_ROWS], spans[:_ROWS], strict=True)
  ):
    words = "segment" if len(found) == 1 else "segments"
    yield f"  {prefix}sequence {number}: {len(found)} {words}"
    for begin, end in found[:_SEGMENTS]:
      text = _text(source, row[begin:end], prefix + "inputs")
      yield f"    [{begin}:{end}] {text}"
    if len(found) > _SEGMENTS:
      yield f"    and {len(found) - _SEGMENTS} more"
  if len(ids) > _ROWS:
    yield f"  and {len(ids) - _ROWS} more sequences"


def _spans(segments: np.ndarray) -> Sequence[tuple[int, int]]:
  """Returns the [begin, end) of each segment of a sequence."""
  edges = np.flatnonzero(np.diff(segments)) + 1
  bounds = [0, *edges.tolist(), len(segments)]
  return [
    (begin, end)
    for begin, end in itertools.pairwise(bounds)
    if segments[begin] > 0
  ]


def _text(source: base_input.BaseInput, ids: np.ndarray, key: str) -> str:
  """Returns a segment in one line, truncated if it is long."""
  try:
    (text,) = source.ids_to_strings(ids[None], [len(ids)], key=key)
  except ValueError:  # There is no tokenizer.
    shown = " ".join(str(i) for i in ids[: _TEXT // 4].tolist())
    return shown + (" ..." if len(ids) > _TEXT // 4 else "")
  return repr(text[:_TEXT]) + (" ..." if len(text) > _TEXT else "")

"""Tiny models whose outputs transformers computed once: the golden files.

A case is a configuration for a class of transformers. Its weights are stored
nowhere: each is made from its name, by `weight`, for transformers and for us
alike. `make_goldens` writes, for each case, `goldens/<name>.json` (what
transformers saves as `config.json`) and `goldens/<name>.npz` (inputs, logits,
greedy continuations).
"""

from collections.abc import Mapping
import dataclasses
import json
import pathlib
from typing import Any
import zlib

import numpy as np

FOLDER = pathlib.Path(__file__).parent / "goldens"
ROWS, LENGTH = 2, 20
# Greedy generation reads so many ids of each row, and adds so many.
PROMPT_LENGTH, NEW_IDS = 6, 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """One model.

  Attributes:
    name: Of its files.
    architecture: The class of transformers.
    config: Arguments of its configuration.
    renamed: Names in files, by the name of the parameter, where they differ.
    has_own_head: Whether `lm_head` is untied, though transformers ties it where
      a file has no such tensor.
  """

  name: str
  architecture: str
  config: Mapping[str, Any]
  renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
  has_own_head: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Golden:
  """What was stored of a case.

  Attributes:
    config: The content of `config.json`.
    arrays: Inputs and outputs, by name.
  """

  config: Mapping[str, Any]
  arrays: Mapping[str, np.ndarray]


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
  """Returns the float32 values of a tensor of theirs.

  Nothing is 0 or 1, so that no norm or bias hides. The generator is one whose
  numbers no version of numpy changes.

  Args:
    name: Theirs, whole.
    shape: Its shape.
  """
  values = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(
    shape
  )
  if len(shape) > 1:
    values *= 1.2 / np.sqrt(shape[-1])
  elif name.endswith("weight"):
    values = 1 + 0.2 * values
  else:
    values *= 0.3
  return values.astype(np.float32)


def ids(case: str, *, vocab_size: int, salt: str = "") -> np.ndarray:
  """Returns random ids [ROWS, LENGTH] of a case, int32, never 0.

  Args:
    case: Its name.
    vocab_size: Ids are less.
    salt: Tells several arrays of a case apart.
  """
  random = np.random.RandomState(zlib.crc32(f"{case}{salt}".encode()))
  return random.randint(1, vocab_size, (ROWS, LENGTH)).astype(np.int32)


def mask() -> np.ndarray:
  """Returns which ids of rows are no padding, int32 [ROWS, LENGTH]."""
  lengths = LENGTH - 7 * np.arange(ROWS)
  return (np.arange(LENGTH) < lengths[:, None]).astype(np.int32)


def read(name: str) -> Golden:
  """Returns what was stored of a case.

  Args:
    name: Of the case.
  """
  with np.load(FOLDER / f"{name}.npz") as arrays:
    return Golden(
      config=json.loads((FOLDER / f"{name}.json").read_text()),
      arrays=dict(arrays),
    )


def write(name: str, golden: Golden) -> None:
  """Stores a case.

  Args:
    name: Of the case.
    golden: What to store.
  """
  text = json.dumps(golden.config, indent=2, sort_keys=True)
  (FOLDER / f"{name}.json").write_text(text + "\n")
  arrays: dict[str, Any] = dict(golden.arrays)
  np.savez_compressed(FOLDER / f"{name}.npz", **arrays)

"""Golden files: tiny models with outputs computed by transformers.

A case is a configuration for a class of transformers. Weights are not stored:
`weight` makes each from its name. `make_goldens` writes `goldens/<name>.json`
(the `config.json` of transformers) and `goldens/<name>.npz` (inputs, logits,
greedy continuations) of each case.
"""

from collections.abc import Mapping
import dataclasses
import json
import pathlib
from typing import Any
import zlib

import numpy as np

FOLDER = pathlib.Path(__file__).parent.parent / "goldens"
BATCH, LENGTH = 2, 20
# Greedy generation reads and adds this many ids.
PROMPT_LENGTH, NEW_IDS = 6, 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """One model.

  Attributes:
    name: Name of its files.
    architecture: Class of transformers.
    config: Arguments of its configuration.
    renamed: Parts of names in files, by those in names of parameters, where
      they differ.
    experts: Names of gate, up and down projection in files, where each expert
      has its tensors and the parameters are stacks.
    has_own_head: Whether `lm_head` is untied although transformers ties it in
      files without that tensor.
  """

  name: str
  architecture: str
  config: Mapping[str, Any]
  renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
  experts: tuple[str, ...] = ()
  has_own_head: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Golden:
  """Stored files of a case.

  Attributes:
    config: Content of `config.json`.
    arrays: Inputs and outputs, by name.
  """

  config: Mapping[str, Any]
  arrays: Mapping[str, np.ndarray]


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
  """Returns the float32 values of a Hugging Face tensor.

  No value is 0 or 1, so that norms and biases have an effect. The generator is
  stable across versions of numpy.
  """
  random = np.random.RandomState(zlib.crc32(name.encode()))
  values = np.asarray(random.standard_normal(shape))
  if len(shape) > 1:
    values *= 1.2 / np.sqrt(shape[-1])
  elif name.endswith("weight"):
    values = 1 + 0.2 * values
  else:
    values *= 0.3
  return values.astype(np.float32)


def images(case: str, *, size: int, channels: int) -> np.ndarray:
  """Returns random square images of a case, float32 [BATCH, H, W, C]."""
  random = np.random.RandomState(zlib.crc32(f"{case}images".encode()))
  values = random.standard_normal((BATCH, size, size, channels))
  return values.astype(np.float32)


def features(case: str, *, frames: int, bins: int) -> np.ndarray:
  """Returns random features of a case, float32 [BATCH, frames, bins]."""
  random = np.random.RandomState(zlib.crc32(f"{case}features".encode()))
  return random.standard_normal((BATCH, frames, bins)).astype(np.float32)


def audio(case: str, *, samples: int) -> np.ndarray:
  """Returns random audio of a case, float32 [BATCH, samples]."""
  random = np.random.RandomState(zlib.crc32(f"{case}audio".encode()))
  return random.standard_normal((BATCH, samples)).astype(np.float32)


def ids(case: str, *, vocab_size: int, salt: str = "") -> np.ndarray:
  """Returns random ids [BATCH, LENGTH] of a case, int32, never 0.

  Args:
    case: Name of the case.
    vocab_size: Upper bound of the ids.
    salt: Distinguishes several arrays of a case.
  """
  random = np.random.RandomState(zlib.crc32(f"{case}{salt}".encode()))
  return random.randint(1, vocab_size, (BATCH, LENGTH)).astype(np.int32)


def mask() -> np.ndarray:
  """Returns 1 for ids that are not padding, int32 [BATCH, LENGTH]."""
  lengths = LENGTH - 7 * np.arange(BATCH)
  return (np.arange(LENGTH) < lengths[:, None]).astype(np.int32)


def read(name: str) -> Golden:
  """Returns the stored files of a case."""
  with np.load(FOLDER / f"{name}.npz") as arrays:
    return Golden(
      config=json.loads((FOLDER / f"{name}.json").read_text()),
      arrays=dict(arrays),
    )


def write(name: str, golden: Golden) -> None:
  """Writes the files of a case."""
  text = json.dumps(golden.config, indent=2, sort_keys=True)
  (FOLDER / f"{name}.json").write_text(text + "\n")
  arrays: dict[str, Any] = dict(golden.arrays)
  np.savez_compressed(FOLDER / f"{name}.npz", **arrays)

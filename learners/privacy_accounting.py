"""Accounting of differential privacy, by the library dp-accounting.

Epsilon bounds how much a training run depends on one example: for neighboring
data sets, with or without that example, the probability of any outcome differs
by a factor of at most e^epsilon, except with probability delta.

The accountants assume Poisson sampling: each example is in each batch with the
same probability, independently. Batches of a shuffled data set are sampled
otherwise; their epsilon is usually reported in this way as well, but it is then
an estimate (https://arxiv.org/abs/2303.00654, section 4.3).
"""

import enum
import importlib
from typing import Any

from paxon.learners import privacy as privacy_lib


class Accountant(enum.Enum):
  """The bound that is computed.

  PLD, of privacy loss distributions (https://arxiv.org/abs/1807.02852), is
  tight up to discretization; RDP, of Renyi divergences
  (https://arxiv.org/abs/1702.07476), is looser and known longer.
  """

  PLD = "pld"
  RDP = "rdp"


def compute_epsilon(
  *,
  noise_multiplier: float,
  sampling_probability: float,
  num_steps: int,
  delta: float,
  accountant: Accountant = Accountant.PLD,
) -> float:
  """Returns epsilon after a number of steps; infinity without noise.

  Args:
    noise_multiplier: Standard deviation of the noise by the clipping norm.
    sampling_probability: Probability of an example to be in a batch, in (0, 1].
    num_steps: Number of updates.
    delta: Probability with which epsilon may not hold, in (0, 1).
    accountant: Which bound.

  Raises:
    ValueError: A value is out of range.
    ImportError: dp-accounting is not installed.
  """
  for name, value, fits in (
    ("noise_multiplier", noise_multiplier, noise_multiplier >= 0),
    (
      "sampling_probability",
      sampling_probability,
      0 < sampling_probability <= 1,
    ),
    ("num_steps", num_steps, num_steps >= 0),
    ("delta", delta, 0 < delta < 1),
  ):
    if not fits:
      need = {
        "noise_multiplier": "be at least 0",
        "num_steps": "be at least 0",
        "sampling_probability": "be in (0, 1]",
        "delta": "be in (0, 1)",
      }[name]
      raise ValueError(f"{name} must {need}, got {value}.")
  if num_steps == 0:
    return 0.0
  if noise_multiplier == 0:
    return float("inf")
  library = _load()
  event = library.GaussianDpEvent(noise_multiplier)
  if sampling_probability < 1:
    event = library.PoissonSampledDpEvent(sampling_probability, event)
  if accountant is Accountant.PLD:
    made = library.pld.PLDAccountant()
  else:
    made = library.rdp.RdpAccountant()
  made.compose(library.SelfComposedDpEvent(event, num_steps))
  return float(made.get_epsilon(delta))


def compute_epsilon_of_run(
  privacy: privacy_lib.Privacy, *, batch_size: int, num_steps: int
) -> float:
  """Returns epsilon of a run by the tighter accountant.

  Args:
    privacy: The settings, with `num_examples`.
    batch_size: Number of examples of a batch.
    num_steps: Number of updates so far.

  Raises:
    ValueError: The number of examples is unknown, or less than a batch.
    ImportError: dp-accounting is not installed.
  """
  if privacy.num_examples is None:
    raise ValueError("Privacy.num_examples must be set to compute epsilon.")
  units = batch_size // privacy.examples_per_clip
  if units > privacy.num_examples:
    raise ValueError(
      f"Privacy.num_examples ({privacy.num_examples}) must be at least that of"
      f" a batch, {units}."
    )
  return compute_epsilon(
    noise_multiplier=privacy.noise_multiplier,
    sampling_probability=units / privacy.num_examples,
    num_steps=num_steps,
    delta=privacy.delta,
  )


def describe(
  privacy: privacy_lib.Privacy, *, batch_size: int, num_steps: int
) -> str:
  """Returns one line about the privacy of a run after a number of steps.

  Raises:
    ValueError: The number of examples is less than a batch.
    ImportError: dp-accounting is not installed.
  """
  settings = (
    f"noise {privacy.noise_multiplier:g} x clipping norm"
    f" {privacy.clip_norm:g}, {privacy.clipping.value}"
  )
  if privacy.num_examples is None:
    return f"privacy: {settings}; no epsilon, as num_examples is not set"
  epsilon = compute_epsilon_of_run(
    privacy, batch_size=batch_size, num_steps=num_steps
  )
  return (
    f"privacy: epsilon {epsilon:.4g} at delta {privacy.delta:g} after"
    f" {num_steps:,} steps ({settings}; with Poisson sampling)"
  )


def _load() -> Any:
  """Returns `dp_accounting`."""
  try:
    importlib.import_module("dp_accounting.pld")
    importlib.import_module("dp_accounting.rdp")
    return importlib.import_module("dp_accounting")
  except ModuleNotFoundError as error:
    raise ImportError(
      "Epsilon is computed by dp-accounting, which is not installed: start with"
      " `bazel run --config=privacy ...`, or install paxon with its extra"
      " `privacy`, or set Privacy.num_examples=None to compute none.",
      name="dp_accounting",
    ) from error

"""Lines of text with the figures of a run."""

from collections.abc import Iterator, Mapping

_SHOWN = ("bits_per_byte", "loss", "log_pplx", "accuracy", "tokens_per_second")


def lines(
  step: int, results: Mapping[str, Mapping[str, float]]
) -> Iterator[str]:
  """Yields a line for each split that was evaluated.

  Args:
    step: Of the variables.
    results: Values by metric by split.
  """
  for split, values in results.items():
    shown = [name for name in _SHOWN if name in values]
    shown += [name for name in values if name not in _SHOWN]
    figures = ", ".join(f"{name} {values[name]:.4g}" for name in shown)
    yield f"step {step}: {split}: {figures}"


def comparison(
  results: Mapping[str, Mapping[str, float]], baselines: Mapping[str, float]
) -> Iterator[str]:
  """Yields a line with the bits per byte of the model and of the baselines.

  Args:
    results: Values by metric by split.
    baselines: Bits per byte by name.
  """
  own = {
    f"this model ({split})": values["bits_per_byte"]
    for split, values in results.items()
    if "bits_per_byte" in values
  }
  for name, value in sorted((own | dict(baselines)).items(), key=_by_value):
    yield f"bits per byte: {value:.4f} {name}"


def _by_value(item: tuple[str, float]) -> float:
  return item[1]

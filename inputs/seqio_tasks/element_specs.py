"""Shapes and dtypes of a TensorFlow data set's elements, without reading one.

Strings have NumPy's dtype of objects, booleans stay booleans, and a ragged
tensor has `None` where its sizes differ. What is asked of a spec is its class's
own interface, so TensorFlow is not imported here.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

Spec = tuple[tuple[int | None, ...], np.dtype]


def specs_of(element_spec: Any) -> dict[str, Spec]:
  """Returns shape and dtype of each feature of an element.

  Args:
    element_spec: The `element_spec` of a `tf.data.Dataset` whose elements are
      dictionaries; inner ones give names such as `outer/inner`.

  Raises:
    ValueError: An element is no dictionary, or holds what is no tensor.
  """
  if not isinstance(element_spec, Mapping):
    raise ValueError(
      "The elements of a data set must be dictionaries of features, got"
      f" {type(element_spec).__name__}."
    )
  found: dict[str, Spec] = {}
  for name, spec in element_spec.items():
    if isinstance(spec, Mapping):
      inner = specs_of(spec)
      found |= {f"{name}/{key}": value for key, value in inner.items()}
    else:
      found[str(name)] = _spec_of(str(name), spec)
  return found


def _spec_of(name: str, spec: Any) -> Spec:
  shape, dtype = getattr(spec, "shape", None), getattr(spec, "dtype", None)
  if shape is None or dtype is None:
    raise ValueError(
      f"The feature {name!r} must be a tensor, a ragged or a sparse one, got"
      f" {type(spec).__name__}."
    )
  if shape.rank is None:
    raise ValueError(f"The feature {name!r} has no known number of dimensions.")
  # A property, not a method: `tf.string.as_numpy_dtype` is the type of objects.
  return tuple(shape.as_list()), np.dtype(dtype.as_numpy_dtype)

"""Quantized weights of a model in files, which are read as their values.

`quantized_config` reads `config.json`, `quantized_layouts` has the tensors of
each format. Models and mappings see weights of floating point only.
"""

from collections.abc import Callable, Iterable, Mapping
import dataclasses
import os
from typing import Any

import jax.numpy as jnp
import numpy as np

from paxon.layers.models.hugging_face.files import (
  quantized_config,
  quantized_layouts,
  quantized_parts,
)

Error = quantized_parts.QuantizedWeightsError
Layout = quantized_parts.Layout
Shape = quantized_parts.Shape
Stored = quantized_parts.Stored
Weight = quantized_parts.Weight

# Ends of scales of activations and caches, which are not weights.
_OF_ACTIVATIONS = (
  ".activation_scale",
  ".input_global_scale",
  ".input_scale",
  ".input_scale_ub",
  ".input_zero_point",
  ".k_scale",
  ".kv_scale",
  ".output_scale",
  ".output_zero_point",
  ".prob_output_scale",
  ".q_scale",
  ".v_scale",
)


def find(
  entries: Mapping[str, Stored],
  scheme: quantized_config.Scheme,
  *,
  shapes: Mapping[str, Shape],
  is_transposed: Callable[[str], bool] = lambda name: False,
  dtype: Any = None,
) -> tuple[dict[str, Weight], set[str]]:
  """Returns the quantized weights, by name, and the names of their tensors.

  Scales of activations are among these names.

  Args:
    entries: File and entry of each tensor of the files.
    scheme: The content of `quantization_config`.
    shapes: Shapes of the model's weights, by name.
    is_transposed: Whether the model has a weight as [inputs, outputs].
    dtype: Of the values; None is that of the model.

  Raises:
    QuantizedWeightsError: A tensor is missing, or a shape does not fit.
  """
  found: dict[str, Weight] = {}
  layouts = {form: quantized_layouts.LAYOUTS[form] for form in scheme.forms}
  for name, (path, entry) in entries.items():
    fitting = [
      form
      for form, layout in layouts.items()
      if name.endswith(layout.main)
      and entry.dtype in (layout.dtypes or (entry.dtype,))
    ]
    if not fitting:
      continue
    stem = name.removesuffix(layouts[fitting[0]].main)
    storage = scheme.find(stem, fitting)
    if storage is None:
      raise Error(
        f"{os.fspath(path)}: {name} is quantized, and no target in"
        f" {quantized_config.FIELD} matches {stem}."
      )
    layout = layouts[storage.form]
    # Bfloat16 represents the values of MXFP4 exactly.
    is_exact = storage.form is quantized_config.Form.MXFP4
    weight = Weight(
      stem=stem,
      parts=_find_parts(entries, stem, layout),
      storage=storage,
      layout=layout,
      dtype=np.dtype(jnp.bfloat16 if is_exact else dtype or scheme.dtype),
      is_transposed=is_transposed(stem + layout.weight),
    )
    own = {each for each, _ in weight.parts.values()}
    if weight.name in entries and weight.name not in own:
      raise weight.make_error(
        layout.main, f"and {weight.name} are both there; delete one"
      )
    shape = shapes.get(weight.name)
    if shape is not None and weight.is_transposed:
      shape = shape[::-1]
    found[weight.name] = _describe(weight, shape)
  used = {name for each in found.values() for name, _ in each.parts.values()}
  if scheme.method:
    used |= {name for name in entries if name.endswith(_OF_ACTIVATIONS)}
  _check_rest(entries.keys() - used, entries, layouts.values())
  return found, used


def _find_parts(
  entries: Mapping[str, Stored], stem: str, layout: Layout
) -> dict[str, tuple[str, Stored]]:
  """Returns the tensors of a weight; raises QuantizedWeightsError."""
  name = stem + layout.main
  path, entry = entries[name]
  parts = {layout.main: (name, (path, entry))}
  for ends in (*layout.needed, *((end,) for end in layout.optional)):
    there = [end for end in ends if stem + end in entries]
    if there:
      other = stem + there[0]
      parts[ends[0]] = other, entries[other]
    elif ends in layout.needed:
      missing = " or ".join(stem + end for end in ends)
      # The name does not say that these are quantized.
      kind = {quantized_layouts.FP8: "fp8", quantized_layouts.INT8: "int8"}
      lead = f"is in {kind[entry.dtype]} and " if layout.dtypes else ""
      raise Error(f"{os.fspath(path)}: {name} {lead}has no {missing}.")
  return parts


def _describe(weight: Weight, shape: Shape | None) -> Weight:
  """Returns a weight with its shape; raises QuantizedWeightsError.

  `shape` is that of the model's weight, or None.
  """
  layout, form = weight.layout, weight.storage.form.value
  for end, (name, (_, entry)) in weight.parts.items():
    dtypes = quantized_layouts.find_dtypes(name.removeprefix(weight.stem))
    if entry.dtype not in dtypes:
      raise weight.make_error(
        end, f"has dtype {entry.dtype}; {form} needs {' or '.join(dtypes)}"
      )
  weight = dataclasses.replace(weight, details=layout.details(weight))
  weight = dataclasses.replace(weight, shape=layout.shape(weight, shape))
  if 0 in weight.shape:
    shown = quantized_parts.show(weight.shape)
    raise weight.make_error(layout.main, f"is a weight of shape {shown}")
  for end, supported in layout.shapes(weight).items():
    if end not in weight.parts or weight.entry(end).shape in supported:
      continue
    main = quantized_parts.show(weight.entry(layout.main).shape)
    other = quantized_parts.show(weight.entry(end).shape)
    own = "" if end == layout.main else f" and {weight.parts[end][0]} {other}"
    raise weight.make_error(
      layout.main,
      f"has shape {main}{own}; {form} needs"
      f" {quantized_parts.show(supported[0])} for the weight"
      f" {quantized_parts.show(weight.shape)}",
    )
  return weight


def _check_rest(
  names: Iterable[str], entries: Mapping[str, Stored], layouts: Iterable[Layout]
) -> None:
  """Raises QuantizedWeightsError if tensors belong to no quantized weight."""
  found = [
    (layout, name, end)
    for name in names
    for layout in layouts
    for end in layout.ends
    if end != ".weight" and name.endswith(end)
  ]
  if found:
    layout, name, end = min(found, key=lambda each: each[1])
    main = name.removesuffix(end) + layout.main
    kind = f" of dtype {' or '.join(layout.dtypes)}" * (main in entries)
    raise Error(f"{os.fspath(entries[name][0])}: {name} has no {main}{kind}.")

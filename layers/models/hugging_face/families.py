"""The families that are served, by the `model_type` of `config.json`."""

from collections.abc import Mapping
from typing import Any

from paxon.layers.models.hugging_face import (
  bert,
  config_fields,
  family,
  gemma,
  gemma2,
  gemma3,
  gpt2,
  gpt_neox,
  llama,
  mistral,
  phi3,
  qwen2,
  qwen3,
  t5,
)

_FAMILIES: Mapping[str, family.Family] = {
  each.model_type: each
  for each in (
    bert.FAMILY,
    gemma.FAMILY,
    gemma2.FAMILY,
    gemma3.FAMILY,
    gpt2.FAMILY,
    gpt_neox.FAMILY,
    llama.FAMILY,
    mistral.FAMILY,
    phi3.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    t5.FAMILY,
  )
}


def served() -> tuple[str, ...]:
  """Returns the types of models that are served."""
  return tuple(sorted(_FAMILIES))


def find(config: Mapping[str, Any]) -> family.Family:
  """Returns the family of a `config.json`.

  Args:
    config: The content of the file.

  Raises:
    UnservedConfigError: Its type is not served.
  """
  name = config.get("model_type")
  if name not in _FAMILIES:
    raise config_fields.UnservedConfigError(
      f"config.json: model_type is {name!r}; those served are"
      f" {', '.join(served())}."
    )
  return _FAMILIES[name]

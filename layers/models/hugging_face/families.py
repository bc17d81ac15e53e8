"""The supported families, by `model_type` of `config.json`.

Other packages register theirs as entry points of the group `GROUP`, each with
the `model_type` as its name and a `family.Family` as its value:

```toml
[project.entry-points."paxon.hugging_face_families"]
my_model = "my_package.my_model:FAMILY"
```
"""

from collections.abc import Mapping
from importlib import metadata
from typing import Any, Final

from paxon.layers.models.hugging_face import (
  bert,
  deepseek,
  dense_decoders,
  early_decoders,
  family,
  gemma,
  gpt2,
  llama,
  mamba2,
  mixture_decoders,
  mixtures,
  t5,
  text_configs,
)
from paxon.layers.models.hugging_face.media import (
  image_text,
  vit,
  wav2vec2,
  whisper,
)

# Entry points of other packages.
GROUP: Final = "paxon.hugging_face_families"
_MODULES = (
  bert,
  deepseek,
  dense_decoders,
  early_decoders,
  gemma,
  gpt2,
  image_text,
  llama,
  mamba2,
  mixture_decoders,
  mixtures,
  t5,
  vit,
  wav2vec2,
  whisper,
)
_FAMILIES: Mapping[str, family.Family] = {
  each.model_type: each
  for module in _MODULES
  for each in vars(module).values()
  if isinstance(each, family.Family)
}


def list_supported() -> tuple[str, ...]:
  """Returns the supported values of `model_type`."""
  others = (point.name for point in metadata.entry_points(group=GROUP))
  return tuple(sorted({*_FAMILIES, *others}))


def _find(name: Any) -> family.Family | None:
  """Returns the family of a `model_type`, or None.

  Raises:
    UnsupportedConfigError: Another package registers something else.
  """
  if not isinstance(name, str):
    return None
  if name in _FAMILIES:
    return _FAMILIES[name]
  for point in metadata.entry_points(group=GROUP):
    if point.name == name:
      found = point.load()
      if not isinstance(found, family.Family) or found.model_type != name:
        raise family.UnsupportedConfigError(
          f"{point.value}: the entry point {name!r} must be a Family of that"
          f" model_type, got {found!r}."
        )
      return found
  return None


def to_language_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
  """Returns the `config.json` of the language model, with its class.

  Other configurations are returned as they are.

  Raises:
    UnsupportedConfigError: The model is not supported.
  """
  text = text_configs.extract(config)
  if text is config:
    return config
  return {**text, "architectures": [find(config).architecture]}


def find(config: Mapping[str, Any]) -> family.Family:
  """Returns the family of a `config.json`.

  A model of images and texts has the family of its language model.

  Raises:
    UnsupportedConfigError: Its `model_type` is not supported.
  """
  text = text_configs.extract(config)
  name = text.get("model_type")
  of = _find(name)
  if of is None:
    raise family.UnsupportedConfigError(
      f"config.json: model_type {name!r} is not supported; use one of"
      f" {', '.join(list_supported())}, or, for its language model, one of"
      f" {', '.join(text_configs.list_architectures())}."
    )
  return of if text is config else text_configs.TextFamily(**vars(of))

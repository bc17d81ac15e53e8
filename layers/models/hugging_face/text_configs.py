"""Configurations of the language models in models of images and texts.

The `config.json` of such a model has that of its language model in
`text_config`, or, in the first files of Qwen2-VL, beside `vision_config`. In
texts without images it is a model of the text's family: attention is causal,
and the axes of multimodal positions are equal.
"""

from collections.abc import Mapping
import dataclasses
import re
from typing import Any

from paxon.layers.models.hugging_face import family, mapping

_TEXT = "text_config"
_TIED = "tie_word_embeddings"
# Fields of the whole model that the language model's `config.json` keeps.
_KEPT = [
  "_name_or_path",
  "bos_token_id",
  "eos_token_id",
  "pad_token_id",
  "quantization_config",
  "transformers_version",
]
_DTYPES = ("dtype", "torch_dtype")
# Fields of images in files without `text_config`.
_IMAGES = re.compile(r"(vision|image|video)_\w+")
# Of the axes of positions.
_AXES = ("mrope_section", "mrope_interleaved")
# Sizes that the families need, as transformers has them, in this order.
_SIZES = (
  "vocab_size",
  "hidden_size",
  "intermediate_size",
  "num_hidden_layers",
  "num_attention_heads",
)
_DEFAULTS: Mapping[str, tuple[int, ...]] = {
  "gemma": (256_000, 3072, 24_576, 28, 16),
  "gemma2": (256_000, 2304, 9216, 26, 8),
  "gemma3_text": (262_208, 2304, 9216, 26, 8),
  "llama": (32_000, 4096, 11_008, 32, 32),
  "mistral": (32_000, 4096, 14_336, 32, 32),
  "phi3": (32_064, 3072, 8192, 32, 32),
  "qwen2": (151_936, 4096, 22_016, 32, 32),
  "qwen3": (151_936, 4096, 22_016, 32, 32),
}
# Where the class of the language model has other defaults than its family.
_QWEN2_VL = {
  **dict(zip(_SIZES, (152_064, 8192, 29_568, 80, 64), strict=True)),
  "num_key_value_heads": 8,
  "rms_norm_eps": 1e-5,
  "max_window_layers": 80,
  "rope_theta": 1e6,
}
_QWEN3_VL = {"max_position_embeddings": 128_000, "rope_theta": 500_000.0}
# The language model of a file of Mistral 3 without any.
_MISTRAL3 = {
  **dict(zip(_SIZES, (131_072, 5120, 32_768, 40, 32), strict=True)),
  "head_dim": 128,
  "rms_norm_eps": 1e-5,
  "rope_theta": 1e9,
  "sliding_window": None,
}
# In the layouts of transformers 4 and 5.
_MOVED = (
  (
    r"^(model\.)?(language_model|text_model)\.(model\.)?"
    r"(?=(layers|embed_tokens|norm)\.)",
    "model.",
  ),
  (r"^language_model\.(?=lm_head\.)", ""),
)
# All tensors that are not of the language model.
_OTHERS = r"(?!((model\.)?(layers|embed_tokens|norm)|lm_head)\.).*"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Whole:
  """A model with a language model.

  Attributes:
    architecture: Its class of transformers.
    text: The language model's family; that of files without `model_type`.
    has_class: Whether its class is its own, whatever `model_type` says.
    tied: Default of `tie_word_embeddings` of the whole model.
    defaults: Fields of the language model that differ from the family's.
    absent: Its fields in files without `text_config`.
  """

  architecture: str
  text: str
  has_class: bool = False
  tied: bool = False
  defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  absent: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def _make_qwen_vl(name: str, text: str, defaults: Mapping[str, Any]) -> _Whole:
  return _Whole(
    architecture=f"{name}ForConditionalGeneration",
    text=text,
    has_class=True,
    defaults=defaults,
  )


_WHOLES: Mapping[str, _Whole] = {
  "gemma3": _Whole(
    architecture="Gemma3ForConditionalGeneration",
    text="gemma3_text",
    has_class=True,
    tied=True,
  ),
  "idefics3": _Whole(
    architecture="Idefics3ForConditionalGeneration",
    text="llama",
    absent={"rms_norm_eps": 1e-5},
  ),
  "internvl": _Whole(
    architecture="InternVLForConditionalGeneration", text="qwen2", tied=True
  ),
  "llava": _Whole(architecture="LlavaForConditionalGeneration", text="llama"),
  "llava_next": _Whole(
    architecture="LlavaNextForConditionalGeneration", text="llama"
  ),
  "llava_onevision": _Whole(
    architecture="LlavaOnevisionForConditionalGeneration", text="qwen2"
  ),
  "mistral3": _Whole(
    architecture="Mistral3ForConditionalGeneration",
    text="mistral",
    tied=True,
    absent=_MISTRAL3,
  ),
  "qwen2_vl": _make_qwen_vl("Qwen2VL", "qwen2", _QWEN2_VL),
  "qwen2_5_vl": _make_qwen_vl("Qwen2_5_VL", "qwen2", _QWEN2_VL),
  "qwen3_vl": _make_qwen_vl("Qwen3VL", "qwen3", _QWEN3_VL),
  "smolvlm": _Whole(
    architecture="SmolVLMForConditionalGeneration",
    text="llama",
    absent={"rms_norm_eps": 1e-5},
  ),
}


def list_architectures() -> dict[str, str]:
  """Returns their classes of transformers, by `model_type`."""
  return {name: whole.architecture for name, whole in _WHOLES.items()}


def extract(config: Mapping[str, Any]) -> Mapping[str, Any]:
  """Returns the `config.json` of the language model.

  The configuration of a language model is returned as it is.

  Raises:
    UnsupportedConfigError: The model is of another class, or the language model
      is not of a supported family.
  """
  kind = config.get("model_type")
  whole = _WHOLES.get(kind) if isinstance(kind, str) else None
  if whole is None:
    return config
  classes = config.get("architectures") or [whole.architecture]
  if classes != [whole.architecture]:
    raise family.UnsupportedConfigError(
      f"config.json: architectures is {classes!r}; {kind} supports only"
      f" [{whole.architecture!r}]."
    )
  text = _find_text(config, whole)
  name = whole.text if whole.has_class else text.get("model_type", whole.text)
  if name not in _DEFAULTS:
    raise family.UnsupportedConfigError(
      f"config.json: {_TEXT}.model_type {name!r} is not supported in {kind};"
      f" use one of {', '.join(_DEFAULTS)}."
    )
  found: dict[str, Any] = dict(zip(_SIZES, _DEFAULTS[name], strict=True))
  found |= {**whole.defaults, **text, "model_type": name}
  found.pop("architectures", None)
  kept = (*_KEPT, *_DTYPES)
  if any(config.get(each) is not None for each in _DTYPES):
    found = {k: v for k, v in found.items() if k not in _DTYPES}
  found |= {k: config[k] for k in kept if config.get(k) is not None}
  tied = config.get(_TIED)
  found[_TIED] = bool((whole.tied if tied is None else tied) or text.get(_TIED))
  for field in ("rope_scaling", "rope_parameters"):
    if isinstance(found.get(field), dict):
      found[field] = _drop_axes(found[field])
  return found


def _find_text(config: Mapping[str, Any], whole: _Whole) -> Mapping[str, Any]:
  """Returns the fields of the language model."""
  text = config.get(_TEXT)
  if isinstance(text, dict):
    return text
  if text is not None:
    raise family.UnsupportedConfigError(
      f"config.json: {_TEXT} is {str(text)[:200]!r}; it must be an object."
    )
  if not whole.has_class or "hidden_size" not in config:
    return whole.absent
  outer = ("model_type", "architectures", _TEXT)
  return {
    name: value
    for name, value in config.items()
    if name not in outer and not _IMAGES.fullmatch(name)
  }


def _drop_axes(rope: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the rotary positions of texts, whose axes are equal."""
  found = {name: value for name, value in rope.items() if name not in _AXES}
  for name in ("type", "rope_type"):
    if found.get(name) == "mrope":
      found[name] = "default"
  return found


class TextFamily(family.Family):
  """A family whose weights and `config.json` are those of a larger model."""

  def names(self, config: Mapping[str, Any]) -> mapping.Names:
    """Returns the names of the weights of the language model.

    Raises:
      UnsupportedConfigError: A field has an unsupported value.
    """
    names = super().names(config)
    return dataclasses.replace(
      names, ignored=(*names.ignored, _OTHERS), moved=_MOVED
    )

  def _fields(self, config: Mapping[str, Any]) -> family.Fields:
    return super()._fields(extract(config))

"""Families of Hugging Face models: strict reading of `config.json`.

A family knows every field that the class of transformers has: it reads the
field; or the field does not change the outputs of a model (`INERT`); or any
value that has an effect is an error. Fields that transformers does not have, of
other programs, are ignored and can be listed (`Family.find_ignored`). Null is
the default of a field, unless transformers gives it another meaning.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
from typing import Any, Never, Protocol, TypeVar, runtime_checkable

from flax import linen as nn
import jax.numpy as jnp

from paxon.layers import activations, embedding, unembedding
from paxon.layers.models import decoder_lm
from paxon.layers.models.hugging_face import mapping
from paxon.layers.models.hugging_face.files import quantized_config
from paxon.layers.stacks import stack

T = TypeVar("T")

# Activations by their names in `config.json`.
ACTIVATIONS: Mapping[str, activations.Activation] = {
  "gelu": activations.gelu_exact,
  "gelu_fast": activations.gelu_tanh,
  "gelu_new": activations.gelu_tanh,
  "gelu_python": activations.gelu_exact,
  "gelu_python_tanh": activations.gelu_tanh,
  "gelu_pytorch_tanh": activations.gelu_tanh,
  "quick_gelu": activations.gelu_sigmoid,
  "relu": nn.relu,
  "relu2": activations.squared_relu,
  "silu": nn.silu,
  "swish": nn.silu,
  "tanh": nn.tanh,
}
# Fields that do not change the outputs of a trained model: dropout and
# initialization, ids of special tokens, settings of generation and of other
# heads, versions.
_INERT = """
  _attn_implementation _attn_implementation_autoset _commit_hash
  _flash_attn_2_enabled _name_or_path _num_labels attention_dropout
  attention_probs_dropout_prob attn_implementation attn_pdrop auto_map
  bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward
  classifier_dropout cls_token_id decoder_start_token_id diversity_penalty
  do_sample dtype early_stopping embd_pdrop embedding_dropout
  encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty
  finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing
  hidden_dropout hidden_dropout_prob id2label initializer_factor
  initializer_range label2id length_penalty max_length max_new_tokens min_length
  name_or_path neftune_noise_alpha no_repeat_ngram_size num_beam_groups
  num_beams num_labels num_return_sequences output_attentions
  output_hidden_states output_past output_scores pad_token_id prefix
  pretraining_tp problem_type remove_invalid_values reorder_and_upcast_attn
  repetition_penalty resid_pdrop return_dict return_dict_in_generate
  sep_token_id summary_activation summary_first_dropout summary_proj_to_labels
  summary_type summary_use_proj suppress_tokens task_specific_params temperature
  tf_legacy_loss tokenizer_class top_k top_p torch_dtype torchscript
  transformers.js_config transformers_version typical_p unsloth_fixed
  unsloth_version use_bfloat16 use_cache
  """
INERT = frozenset(_INERT.split())
# Fields that are not supported for any model, with their unset values.
UNSET: Mapping[str, tuple[Any, ...]] = {
  "add_cross_attention": (False, None),
  "cross_attention_hidden_size": (None,),
  "per_layer_config": (None, {}),
  "pruned_heads": ({}, None),
  "tie_encoder_decoder": (False, None),
}


class UnsupportedConfigError(ValueError):
  """A `config.json` describes an unsupported model."""


class _Required:
  """Marks a field without a default."""


_REQUIRED: Any = _Required()
# More would be a list of that length before anything else is checked.
_NUM_LAYERS = ("num_hidden_layers", "n_layer")
_MAX_LAYERS = 10_000


class Fields:
  """The fields of one `config.json`; records which were read.

  Attributes:
    architecture: The class of transformers that the file names.
    model_type: The kind of model that the file names.
  """

  def __init__(
    self,
    values: Mapping[str, Any],
    *,
    architectures: tuple[str, ...],
    aliases: Mapping[str, str] | None = None,
    inert: tuple[str, ...] = (),
    neutral: Mapping[str, tuple[Any, ...]] | None = None,
    packings: tuple[str, ...] = quantized_config.OF_LAYERS,
  ) -> None:
    """Checks the fields that all families share.

    Args:
      values: Content of the file.
      architectures: Supported classes; the first one is the default.
      aliases: Fields by their other names.
      inert: Fields that this family ignores besides `INERT`.
      neutral: Fields that change nothing if they have one of these values.
      packings: Supported values of `quant_method` in `quantization_config`.

    Raises:
      UnsupportedConfigError: The file is of another class, sets a field that
        no family supports, or has two values of one field.
    """
    self._values = values
    self._ignored: list[str] = []
    self.model_type = str(values.get("model_type", "the model"))
    self._read = {"model_type", "architectures", *UNSET, *inert}
    classes = values.get("architectures") or [architectures[0]]
    if classes not in [[each] for each in architectures]:
      self.reject(
        "architectures", " or ".join(f"[{each!r}]" for each in architectures)
      )
    self.architecture = classes[0]
    neutral = {**UNSET, **(neutral or {})}
    self._read |= set(neutral)
    for name, unset in neutral.items():
      if values.get(name) is not None and values[name] not in unset:
        self.reject(name, f"{unset[0]!r}")
    self._read.add(quantized_config.FIELD)
    if quantized_config.get(values) is not None:
      self._check_quantization(packings)
    self._resolve(aliases or {})

  def _check_quantization(self, packings: tuple[str, ...]) -> None:
    name = quantized_config.FIELD
    method = quantized_config.find_method(quantized_config.get(self._values))
    if method is None:
      self.reject(name, f"a quant_method of {', '.join(packings)}")
    if method not in packings:
      raise UnsupportedConfigError(
        f"config.json: {name}.quant_method is {method!r}; {self.model_type}"
        f" supports only {', '.join(packings)}."
      )
    try:
      quantized_config.parse(self._values)
    except quantized_config.QuantizationError as error:
      raise UnsupportedConfigError(f"config.json: {error}") from error

  def _resolve(self, aliases: Mapping[str, str]) -> None:
    """Gives the values of other names to the fields."""
    self._read |= set(aliases)
    for alias, name in aliases.items():
      value = self._values.get(alias)
      if value is None:
        continue
      if self._values.get(name, value) != value:
        self.reject(alias, f"the value of {name} ({self._values[name]!r})")
      self._values = {**self._values, name: value}

  def has(self, name: str) -> bool:
    """Whether the file has a value of a field that is not null."""
    return self._values.get(name) is not None

  def get(self, name: str, default: Any = _REQUIRED) -> Any:
    """Returns the value of a field, which may be null.

    Raises:
      UnsupportedConfigError: A field without a default is missing.
    """
    self._read.add(name)
    if name in self._values:
      return self._values[name]
    if default is _REQUIRED:
      raise UnsupportedConfigError(
        f"config.json: {name} is missing; {self.model_type} needs it."
      )
    return default

  def value(self, name: str, default: Any = _REQUIRED) -> Any:
    """Returns the value of a field; null is the default, if there is one."""
    found = self.get(name, default)
    return default if found is None and default is not _REQUIRED else found

  def size(self, name: str, default: Any = _REQUIRED) -> int:
    """Returns a positive integer."""
    value = self.value(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
      self.reject(name, "a positive integer")
    if name in _NUM_LAYERS and value > _MAX_LAYERS:
      self.reject(name, f"an integer of at most {_MAX_LAYERS:,}")
    return value

  def count(self, name: str, default: Any = _REQUIRED) -> int:
    """Returns an integer of at least zero."""
    value = self.value(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
      self.reject(name, "an integer of at least 0")
    return value

  def optional_size(self, name: str, default: int | None = None) -> int | None:
    """Returns a positive integer, or `None` for null."""
    return None if self.get(name, default) is None else self.size(name, default)

  def number(self, name: str, default: Any = _REQUIRED) -> float:
    """Returns a positive number."""
    value = self.value(name, default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
      self.reject(name, "a positive number")
    return float(value)

  def optional_number(self, name: str, default: float | None) -> float | None:
    """Returns a positive number, or `None` for null."""
    if self.get(name, default) is None:
      return None
    return self.number(name, default)

  def flag(
    self, name: str, default: Any = _REQUIRED, *, null: bool = True
  ) -> bool:
    """Returns true or false.

    `null` False is a field that is false by null although its default is true.
    Other such fields cannot be null: transformers rejects it, and older
    versions took it for false.
    """
    value = self.get(name, default)
    if value is None and (default is False or not null):
      return False
    if not isinstance(value, bool):
      self.reject(name, "true or false")
    return value

  def map_value(self, name: str, default: Any, supported: Mapping[Any, T]) -> T:
    """Returns the supported value to which a field's value maps."""
    value = self.get(name, default)
    if None not in supported:
      value = self.value(name, default)
    if not isinstance(value, str | int | bool | None) or value not in supported:
      self.reject(name, " or ".join(map(repr, supported)))
    return supported[value]

  def activation(self, name: str, default: str) -> activations.Activation:
    """Returns an activation by its name."""
    return self.map_value(name, default, ACTIVATIONS)

  def reject(self, name: str, supported: str) -> Never:
    """Raises UnsupportedConfigError with the supported values of a field."""
    value = repr(self._values.get(name))
    shown = value if len(value) <= 200 else f"{value[:200]}..."
    raise UnsupportedConfigError(
      f"config.json: {name} is {shown}; {self.model_type} supports only"
      f" {supported}."
    )

  def ignore(self, name: str) -> None:
    """Notes a part of a field without effect, for `find_ignored`."""
    if name not in self._ignored:
      self._ignored.append(name)

  def find_ignored(self) -> tuple[str, ...]:
    """Returns the fields that were not read and are not null.

    Raises:
      UnsupportedConfigError: The model is of another kind than the family's.
    """
    # Families that have a use for them read them.
    kinds = {"is_decoder", "is_encoder_decoder"} - self._read
    for kind in sorted(kinds):
      if self._values.get(kind) not in (False, None):
        self.reject(kind, "False")
    rest = set(filter(self.has, self._values)) - self._read - INERT - kinds
    return *self._ignored, *sorted(rest)


@runtime_checkable
class Description(Protocol):
  """A model described by a `config.json`."""

  def model(self, make: Callable[..., Any]) -> Any:
    """Returns the model, built by `make(cls, **fields)`."""
    ...

  def names(self) -> mapping.Names:
    """Returns the names of its weights."""
    ...


def _build(cls: Callable[..., Any], /, **fields: Any) -> Any:
  return cls(**fields)


def _token_example(config: Mapping[str, Any]) -> tuple[Any, ...]:
  """Returns ids, positions and segment ids."""
  del config
  ids = jnp.zeros((1, 2), jnp.int32)
  return ids, ids, ids


# The rule of an untied head.
HEAD = """
  lm_head.weight  params/head/kernel  V D -> D V
"""


def make_decoder(
  make: Callable[..., Any],
  *,
  vocab_size: int,
  embed_dim: int,
  final_norm: Any,
  tied: bool,
  stacks: Sequence[tuple[list[Any], int]],
  input_scale: float | None = None,
  logit_scale: float = 1.0,
  head_bias: bool = False,
  **fields: Any,
) -> Any:
  """Returns a `DecoderLm`, built by `make(cls, **fields)`.

  `tied` shares the embedding table with the head; `stacks` are blocks and
  numbers of layers; `input_scale` is a factor on embedded tokens, `logit_scale`
  one on logits; `head_bias` is whether the head has a bias; `fields` are
  further fields of the model.
  """
  made = [
    make(stack.Stack, blocks=blocks, num_layers=num_layers)
    for blocks, num_layers in stacks
  ]
  scale: dict[str, Any] = (
    {} if input_scale is None else {"input_scale": input_scale}
  )
  head = None
  if not tied:
    of_head: dict[str, Any] = {"use_bias": True} if head_bias else {}
    if logit_scale != 1:
      of_head["input_scale"] = logit_scale
    head = make(unembedding.Unembedding, vocab_size=vocab_size, **of_head)
  elif logit_scale != 1:
    scale["attend_scale"] = logit_scale
  if tied and head_bias:
    scale["use_bias"] = True
  return make(
    decoder_lm.DecoderLm,
    embedding=make(
      embedding.Embedding, vocab_size=vocab_size, embed_dim=embed_dim, **scale
    ),
    stack=made[0] if len(made) == 1 else make(stack.Stacks, stacks=made),
    final_norm=final_norm,
    head=head,
    **fields,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
  """Models of one class of transformers.

  Attributes:
    model_type: Name in `config.json`.
    architecture: Supported class of transformers.
    other_architectures: Further classes whose files the family reads.
    aliases: Fields by their other names in transformers (`attribute_map`).
    read: Reads the fields of a `config.json`.
    inert: Fields that this family ignores besides `INERT`.
    neutral: Fields that change nothing if they have one of these values;
      others are rejected.
    packings: Quantized forms of weights (`quant_method`) that are read, as
      their values.
    further_layers: Field with the number of layers after the last that some
      files leave out; empty is none.
    example: Returns arguments to initialize the model of a configuration with.
  """

  model_type: str
  architecture: str
  read: Callable[[Fields], Description]
  other_architectures: tuple[str, ...] = ()
  aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
  inert: tuple[str, ...] = ()
  neutral: Mapping[str, tuple[Any, ...]] = dataclasses.field(
    default_factory=dict
  )
  packings: tuple[str, ...] = quantized_config.OF_LAYERS
  further_layers: str = ""
  example: Callable[[Mapping[str, Any]], tuple[Any, ...]] = _token_example

  def model(
    self,
    config: Mapping[str, Any],
    make: Callable[..., Any] = _build,
  ) -> Any:
    """Returns the model of a `config.json`.

    `make` is called with a class and its fields, such as `fdl.Config`.

    Raises:
      UnsupportedConfigError: A field has an unsupported value.
    """
    description = self._describe(config)
    try:
      return description.model(make)
    except UnsupportedConfigError:
      raise
    except ValueError as error:
      # A layer does not accept a value.
      raise UnsupportedConfigError(f"config.json: {error}") from error

  def names(self, config: Mapping[str, Any]) -> mapping.Names:
    """Returns the names of the weights.

    Raises:
      UnsupportedConfigError: A field has an unsupported value.
    """
    names = self._describe(config).names()
    quantization = quantized_config.parse(config)
    return dataclasses.replace(names, quantization=quantization)

  def find_ignored(self, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the fields that the class of transformers does not have.

    Raises:
      UnsupportedConfigError: A field has an unsupported value.
    """
    fields = self._fields(config)
    self.read(fields)
    return fields.find_ignored()

  def _fields(self, config: Mapping[str, Any]) -> Fields:
    return Fields(
      config,
      architectures=(self.architecture, *self.other_architectures),
      aliases=self.aliases,
      inert=self.inert,
      neutral=self.neutral,
      packings=self.packings,
    )

  def _describe(self, config: Mapping[str, Any]) -> Description:
    fields = self._fields(config)
    description = self.read(fields)
    fields.find_ignored()
    return description

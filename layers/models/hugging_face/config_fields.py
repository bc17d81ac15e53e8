"""Reads the fields of a `config.json`, and lets none pass unread.

A field that a family reads is honoured or refused; one that changes nothing of
what a model computes is in `INERT`; any other is an error, because it may
change what the model computes without a word.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Never, TypeVar

T = TypeVar("T")

# Fields that change no output of a trained model: what its training was like
# (dropout, first values), the ids of special tokens, settings of generation
# and of other heads, and who wrote the file.
_INERT = """
  _attn_implementation _attn_implementation_autoset _name_or_path
  attention_dropout attn_implementation attn_pdrop auto_map bad_words_ids
  begin_suppress_tokens bos_token_id chunk_size_feed_forward classifier_dropout
  cls_token_id decoder_start_token_id diversity_penalty do_sample dtype
  early_stopping embd_pdrop embedding_dropout encoder_no_repeat_ngram_size
  eos_token_id exponential_decay_length_penalty finetuning_task
  forced_bos_token_id forced_eos_token_id gradient_checkpointing hidden_dropout
  id2label initializer_factor initializer_range label2id length_penalty
  max_length min_length name_or_path no_repeat_ngram_size num_beam_groups
  num_beams num_labels num_return_sequences output_attentions
  output_hidden_states output_past output_scores pad_token_id prefix
  pretraining_tp problem_type remove_invalid_values reorder_and_upcast_attn
  repetition_penalty resid_pdrop return_dict return_dict_in_generate
  sep_token_id summary_activation summary_first_dropout summary_proj_to_labels
  summary_type summary_use_proj suppress_tokens task_specific_params
  temperature tf_legacy_loss tokenizer_class top_k top_p torch_dtype
  torchscript transformers_version typical_p use_bfloat16 use_cache
  """
INERT = frozenset(_INERT.split())
# Fields of any model that must not be set, with the values that do not.
UNSET: Mapping[str, tuple[Any, ...]] = {
  "add_cross_attention": (False, None),
  "cross_attention_hidden_size": (None,),
  "per_layer_config": (None, {}),
  "pruned_heads": ({}, None),
  "quantization_config": (None,),
  "tie_encoder_decoder": (False, None),
}


class UnservedConfigError(ValueError):
  """A `config.json` is of a model that is not served; one line says why."""


class _Required:
  """Stands for a default that there is not."""


_REQUIRED: Any = _Required()


class Fields:
  """The fields of one `config.json`; those that were read are remembered."""

  def __init__(
    self,
    values: Mapping[str, Any],
    *,
    architecture: str,
    inert: Sequence[str] = (),
  ) -> None:
    """Begins to read.

    Args:
      values: Of the file.
      architecture: The class of transformers whose tensors are served.
      inert: More fields that change nothing in this family.

    Raises:
      UnservedConfigError: The file is of another class, or has a field set that
        no model is served with.
    """
    self._values = values
    self._model = str(values.get("model_type", "a model"))
    self._read = {"model_type", "architectures", *UNSET, *inert}
    classes = values.get("architectures") or [architecture]
    if classes != [architecture]:
      self.refuse("architectures", f"[{architecture!r}]")
    for name, unset in UNSET.items():
      if name in values and values[name] not in unset:
        self.refuse(name, f"{unset[0]!r}")

  def has(self, name: str) -> bool:
    """Whether the file gives a field, be it null."""
    return name in self._values

  def any(self, name: str, default: Any = _REQUIRED) -> Any:
    """Returns a field as it is.

    Args:
      name: Its name.
      default: Where the file does not give it.

    Raises:
      UnservedConfigError: It must be given.
    """
    self._read.add(name)
    if name in self._values:
      return self._values[name]
    if default is _REQUIRED:
      raise UnservedConfigError(
        f"config.json: {name} is missing, but {self._model} needs it."
      )
    return default

  def size(self, name: str, default: Any = _REQUIRED) -> int:
    """Returns a positive integer; of any mistake, raises the error."""
    value = self.any(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
      self.refuse(name, "a positive integer")
    return value

  def optional_size(self, name: str, default: int | None = None) -> int | None:
    """Returns a positive integer, or `None` for null."""
    return None if self.any(name, default) is None else self.size(name, default)

  def number(self, name: str, default: Any = _REQUIRED) -> float:
    """Returns a positive number."""
    value = self.any(name, default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not value > 0:
      self.refuse(name, "a positive number")
    return float(value)

  def flag(self, name: str, default: Any = _REQUIRED) -> bool:
    """Returns true or false."""
    value = self.any(name, default)
    if not isinstance(value, bool):
      self.refuse(name, "true or false")
    return value

  def one_of(self, name: str, default: Any, served: Mapping[Any, T]) -> T:
    """Returns what a value stands for.

    Args:
      name: Of the field.
      default: Where the file does not give it.
      served: By value.

    Raises:
      UnservedConfigError: The value is none of those.
    """
    value = self.any(name, default)
    if not isinstance(value, str | int | bool | None) or value not in served:
      self.refuse(name, " or ".join(map(repr, served)))
    return served[value]

  def refuse(self, name: str, served: str) -> Never:
    """Raises the error of a value that is not served.

    Args:
      name: Of the field.
      served: What is.

    Raises:
      UnservedConfigError: Always.
    """
    value = repr(self._values.get(name))
    shown = value if len(value) <= 200 else f"{value[:200]}..."
    raise UnservedConfigError(
      f"config.json: {name} is {shown}, but {self._model} is served with"
      f" {served} only."
    )

  def check_all_read(self) -> None:
    """Ends to read.

    Raises:
      UnservedConfigError: A field is neither read nor known to change nothing.
    """
    kind = "is_encoder_decoder"
    # Which a family with an encoder reads.
    if kind not in self._read and self._values.get(kind, False) is not False:
      self.refuse(kind, "False")
    rest = sorted(set(self._values) - self._read - INERT - {kind})
    if rest:
      value = repr(self._values[rest[0]])
      also = f" (and so are {', '.join(rest[1:])})" if rest[1:] else ""
      raise UnservedConfigError(
        f"config.json: {rest[0]} ({value[:200]}) is not known of"
        f" {self._model}{also}; delete it if it changes nothing that the model"
        " computes."
      )

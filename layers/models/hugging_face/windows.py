"""Which layers see a sliding window, as Qwen's `config.json` says it."""

from paxon.layers.models.hugging_face import config_fields

_FULL, _SLIDING = "full_attention", "sliding_attention"


def read(
  fields: config_fields.Fields, *, num_layers: int
) -> tuple[int | None, ...]:
  """Returns how many positions each layer sees, `None` for all.

  A list of `layer_types` goes before `max_window_layers`, from which on layers
  have a window. Without `use_sliding_window` none has.

  Args:
    fields: Of the file.
    num_layers: The number of layers.

  Raises:
    UnservedConfigError: The list does not name each layer's kind, or a window
      is asked for and not given.
  """
  is_used = fields.flag("use_sliding_window", False)
  window = fields.optional_size("sliding_window", 4096) if is_used else None
  fields.any("sliding_window", None)
  # Zero is a number of layers, too.
  first = fields.any("max_window_layers", 28)
  if not isinstance(first, int) or isinstance(first, bool) or first < 0:
    fields.refuse("max_window_layers", "a number of layers")
  kinds = fields.any("layer_types", None)
  if kinds is None:
    return tuple(window if i >= first else None for i in range(num_layers))
  if not isinstance(kinds, list) or len(kinds) != num_layers:
    fields.refuse("layer_types", f"a list of {num_layers} kinds")
  if set(kinds) - {_FULL, _SLIDING}:
    fields.refuse("layer_types", f"{_FULL!r} or {_SLIDING!r}")
  if _SLIDING in kinds and window is None:
    fields.refuse("layer_types", f"{_FULL!r} where no sliding_window is in use")
  return tuple(window if kind == _SLIDING else None for kind in kinds)

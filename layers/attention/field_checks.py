"""Checks of what attention shares: numbers of heads, scales, shapes."""

import jax

# Numbers of key/value heads that a message proposes.
_MAX_PROPOSED = 256


def check_heads(name: str, num_heads: int, num_kv_heads: int) -> None:
  """Raises ValueError unless the second number divides the first.

  Args:
    name: The layer's class.
    num_heads: Number of query heads, positive.
    num_kv_heads: Number of key/value heads, positive.
  """
  if num_heads % num_kv_heads == 0:
    return
  # The small ones suffice, and a huge number is not worth a search.
  small = range(1, min(num_heads, _MAX_PROPOSED) + 1)
  divisors = [str(n) for n in (*small, num_heads) if num_heads % n == 0]
  divisors = list(dict.fromkeys(divisors))
  choice = " or ".join(filter(None, (", ".join(divisors[:-1]), str(num_heads))))
  raise ValueError(
    f"{name}.num_heads ({num_heads}) must be a multiple of num_kv_heads "
    f"({num_kv_heads}); use {choice}."
  )


def check_positive(part: object, *fields: str) -> None:
  """Raises ValueError unless each field is positive or None.

  Args:
    part: Whose `__post_init__` asks; its class is named in the message.
    *fields: Names of fields that are numbers.
  """
  for field in fields:
    value = getattr(part, field)
    if value is not None and not value > 0:
      raise ValueError(
        f"{type(part).__name__}.{field} must be positive or None, got {value}."
      )


def check_tokens(
  part: object, x: jax.Array, **per_token: jax.Array | None
) -> None:
  """Raises ValueError unless the arrays describe the same tokens.

  Args:
    part: The layer that was called; its class is named in the message.
    x: The tokens, [B,T,D].
    **per_token: What has an entry for each token, [B,T], or None.
  """
  name = type(part).__name__
  if x.ndim != 3:
    raise ValueError(
      f"{name} needs tokens of shape [batch, length, embed], got {x.shape}."
    )
  for field, array in per_token.items():
    if array is not None and array.shape != x.shape[:2]:
      raise ValueError(
        f"{name} needs `{field}` of shape {x.shape[:2]} for tokens of shape "
        f"{x.shape}, got {array.shape}."
      )


def check_arrays(
  name: str,
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  q_positions: jax.Array,
  kv_positions: jax.Array,
) -> None:
  """Raises ValueError unless a kernel's arrays fit each other.

  Args:
    name: The kernel.
    query: Queries [B,T,N,H].
    key: Keys [B,S,K,H], with K dividing N.
    value: Values [B,S,K,H'].
    q_positions: Positions of the mask, [B,T].
    kv_positions: Those of keys, [B,S].
  """
  fits = (
    query.ndim == key.ndim == value.ndim == 4
    and query.shape[0] == key.shape[0]
    and query.shape[3] == key.shape[3]
    and key.shape[:3] == value.shape[:3]
  )
  if not fits:
    raise ValueError(
      f"{name} needs queries [B,T,N,H], keys [B,S,K,H] and values [B,S,K,H'], "
      f"got {query.shape}, {key.shape} and {value.shape}."
    )
  for words, array, positions in (
    ("queries", query, q_positions),
    ("keys", key, kv_positions),
  ):
    if positions.shape != array.shape[:2]:
      raise ValueError(
        f"{name} needs a mask of {array.shape[:2]} {words}, got one of "
        f"{positions.shape}."
      )
  heads, kv_heads = query.shape[2], key.shape[2]
  if heads % kv_heads:
    raise ValueError(
      f"The heads of queries ({heads}) must be a multiple of those of keys "
      f"({kv_heads})."
    )

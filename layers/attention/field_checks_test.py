"""Tests for the checks that attention layers share."""

import jax.numpy as jnp
import pytest

from paxon.layers.attention import field_checks


class _Layer:
  logit_cap = -1.0
  logit_scale = None


def _check(x_shape, **shapes):
  given = {k: jnp.zeros(shape) for k, shape in shapes.items()}
  field_checks.check_tokens(_Layer(), jnp.zeros(x_shape), **given)


def test_tokens_that_fit_pass():
  _check((2, 3, 4), positions=(2, 3), segment_ids=(2, 3))
  field_checks.check_tokens(_Layer(), jnp.zeros((2, 3, 4)), prefix=None)


def test_rejects_tokens_of_another_rank():
  message = r"_Layer needs tokens of shape \[batch, length, embed\], got \(2, 4"
  with pytest.raises(ValueError, match=message):
    _check((2, 4))


@pytest.mark.parametrize("shape", [(2,), (2, 4), (2, 3, 1)])
def test_rejects_what_is_not_per_token(shape):
  message = r"_Layer needs `positions` of shape \(2, 3\) for tokens .*got \("
  with pytest.raises(ValueError, match=message):
    _check((2, 3, 4), positions=shape)


def test_rejects_numbers_that_are_not_positive():
  message = r"_Layer\.logit_cap must be positive or None, got -1\.0"
  with pytest.raises(ValueError, match=message):
    field_checks.check_positive(_Layer(), "logit_scale", "logit_cap")


def test_proposes_numbers_of_heads():
  field_checks.check_heads("Layer", 12, 4)
  message = r"Layer\.num_heads \(6\) must be a multiple .*use 1, 2, 3 or 6\."
  with pytest.raises(ValueError, match=message):
    field_checks.check_heads("Layer", 6, 4)


SHAPES = {
  "query": (2, 3, 4, 8),
  "key": (2, 5, 2, 8),
  "value": (2, 5, 2, 6),
  "q_positions": (2, 3),
  "kv_positions": (2, 5),
}


def _check_arrays(**shapes):
  arrays = {k: jnp.zeros(shape) for k, shape in (SHAPES | shapes).items()}
  field_checks.check_arrays("my_kernel", **arrays)


def test_arrays_that_fit_pass():
  _check_arrays()


@pytest.mark.parametrize(
  ("shapes", "message"),
  [
    ({"query": (2, 3, 32)}, r"queries \[B,T,N,H\].*got \(2, 3, 32\), \(2, 5,"),
    ({"key": (2, 5, 2, 6)}, r"needs queries .*\(2, 5, 2, 6\)"),
    ({"value": (2, 4, 2, 6)}, r"needs queries .*\(2, 4, 2, 6\)"),
    ({"query": (1, 3, 4, 8)}, r"needs queries .*\(1, 3, 4, 8\)"),
    ({"q_positions": (2, 5)}, r"a mask of \(2, 3\) queries, got .*\(2, 5\)"),
    ({"kv_positions": (1, 5)}, r"a mask of \(2, 5\) keys, got .*\(1, 5\)"),
    ({"query": (2, 3, 5, 8)}, r"queries \(5\) must be a multiple .* \(2\)"),
  ],
  ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_rejects_arrays_that_do_not_fit(shapes, message):
  with pytest.raises(ValueError, match=message):
    _check_arrays(**shapes)

"""Tests for what kernels declare, and for what is asked of them."""

import functools

import jax.numpy as jnp
import pytest

from paxon.layers.attention import (
  cudnn_attention,
  kernel_support,
  kernels,
  latent,
  local_blocks,
  position_bias,
  query_chunks,
  ring,
  splash,
)
from paxon.layers.attention import testing as attention_testing
from paxon.layers.positions import rotary_embedding

_Feature = kernel_support.Feature
_Request = kernel_support.Request


@pytest.mark.parametrize(
  "kernel",
  [
    kernels.plain,
    kernels.fused,
    cudnn_attention.cudnn,
    cudnn_attention.one_document,
    splash.Splash(),
    ring.Ring(),
    local_blocks.LocalBlocks(),
    query_chunks.QueryChunks(),
  ],
)
def test_each_kernel_is_declared_under_its_name(kernel):
  support = kernel_support.find_support(kernel)
  assert support in kernel_support.KERNELS
  named = kernel if hasattr(kernel, "__qualname__") else type(kernel)
  assert f"paxon.{support.name}" == f"{named.__module__}.{named.__qualname__}"


def test_a_declaration_goes_with_the_settings():
  def of(**settings):
    return kernel_support.find_support(
      functools.partial(cudnn_attention.cudnn, **settings)
    )

  assert of() == kernel_support.CUDNN
  assert of(packed=False) == kernel_support.CUDNN_ONE_DOCUMENT
  assert of(packed=False, implementation="xla").dtypes == ()
  by_cudnn = functools.partial(kernels.fused, implementation="cudnn")
  assert kernel_support.find_support(by_cudnn) == kernel_support.FUSED_BY_CUDNN
  # The outer of two settings holds.
  outer = functools.partial(by_cudnn, implementation="xla")
  assert kernel_support.find_support(outer) == kernel_support.FUSED


def test_a_kernel_around_a_kernel_serves_what_both_do():
  inner = functools.partial(kernels.fused, implementation="cudnn")
  support = kernel_support.find_support(local_blocks.LocalBlocks(kernel=inner))
  assert support.name == kernel_support.LOCAL_BLOCKS.name
  assert support.dtypes == kernel_support.CUDNN.dtypes
  assert {_Feature.NO_LIMIT, _Feature.LOGIT_CAP} <= set(support.unsupported)
  # Its parts of rows are whole, and have all their keys.
  chunks = query_chunks.QueryChunks(kernel=splash.Splash())
  found = set(kernel_support.find_support(chunks).unsupported)
  assert not found & {_Feature.CACHE, _Feature.SPLIT_SEQUENCES}


def test_a_kernel_without_a_declaration_is_taken_as_it_is():
  def mine(*args, **kwargs):
    raise AssertionError

  assert kernel_support.find_support(mine) is None
  assert kernel_support.find_support(query_chunks.QueryChunks(kernel=mine)) == (
    kernel_support.QUERY_CHUNKS
  )


@pytest.mark.parametrize(
  ("request_", "expected"),
  [
    (
      _Request(dtype="float32"),
      ["its dtype is float32, and the kernel takes b"],
    ),
    (_Request(platform="tpu"), ["it runs on cuda, not on tpu"]),
    (
      _Request(head_dim=60),
      ["its head_dim is 60, and the kernel takes multip"],
    ),
    (_Request(head_dim=264), ["its head_dim is 264"]),
    (_Request(head_dim=64, dtype="float16", platform="cuda"), []),
    (
      _Request(dtype="int8", features={_Feature.SINKS: "there are 4 sinks"}),
      ["its dtype is int8", "there are 4 sinks, but jax.nn.dot_product_att"],
    ),
  ],
)
def test_every_reason_is_told(request_, expected):
  support = kernel_support.find_support(cudnn_attention.cudnn)
  found = list(support.problems(request_))
  assert len(found) == len(expected)
  assert all(f.startswith(e) for f, e in zip(found, expected, strict=True))


def test_an_error_names_the_kernels_that_can():
  request = _Request(
    dtype="bfloat16",
    platform="tpu",
    features={
      _Feature.LOGIT_CAP: "logit_cap is 5.0",
      _Feature.NO_LIMIT: "no window",
    },
  )
  assert kernel_support.explain(kernel_support.PLAIN, request) is None
  with pytest.raises(
    ValueError,
    match=r"^layers\.attention\.kernels\.fused does not support this"
    r" layer: logit_cap is 5\.0, but jax\.nn\.dot_product_attention has no"
    r" soft cap; use"
    r" layers\.attention\.splash\.Splash, layers\.attention\.ring\.Ring,"
    r" layers\.attention\.query_chunks\.QueryChunks or"
    r" layers\.attention\.kernels\.plain\.$",
  ):
    kernel_support.check(kernel_support.FUSED, request)


def test_there_is_always_a_kernel_that_can():
  request = _Request(
    head_dim=3,
    dtype="int8",
    platform="cpu",
    features=dict.fromkeys(_Feature, ""),
  )
  mine = kernel_support.Support(name="mine.kernel", max_head_dim=2)
  message = kernel_support.explain(mine, request)
  assert message == (
    "mine.kernel does not support this layer: its head_dim is 3, and the kernel"
    " takes multiples of 1 up to 2; use"
    " layers.attention.query_chunks.QueryChunks or"
    " layers.attention.kernels.plain."
  )


def _layer(**fields):
  return attention_testing.grouped_query_attention(
    4, num_kv_heads=2, head_dim=64, **fields
  )


@pytest.mark.parametrize(
  ("fields", "expected"),
  [
    ({}, {_Feature.NO_LIMIT}),
    ({"window": 4}, {_Feature.WINDOW}),
    ({"chunk": 4}, {_Feature.CHUNK}),
    ({"causal": False}, {_Feature.BIDIRECTIONAL, _Feature.NO_LIMIT}),
    (
      {"causal": False, "window": 4},
      {_Feature.BIDIRECTIONAL, _Feature.WINDOW, _Feature.TWO_SIDED_WINDOW},
    ),
    (
      {"causal": False, "window": 4, "right_window": 1},
      {_Feature.BIDIRECTIONAL, _Feature.WINDOW, _Feature.RIGHT_WINDOW},
    ),
    ({"window": 4, "logit_cap": 5.0}, {_Feature.WINDOW, _Feature.LOGIT_CAP}),
    (
      {"window": 4, "position_bias": position_bias.Alibi()},
      {_Feature.WINDOW, _Feature.BIAS},
    ),
    (
      {"window": 4, "sinks": kernels.LearnedSinks()},
      {_Feature.WINDOW, _Feature.SINKS},
    ),
  ],
  ids=str,
)
def test_a_layer_asks_for_what_its_fields_say(fields, expected):
  request = kernel_support.from_layer(_layer(dtype=jnp.bfloat16, **fields))
  assert (request.head_dim, request.dtype) == (64, "bfloat16")
  assert set(request.features) == expected


def test_a_layer_without_a_dtype_of_its_own():
  assert kernel_support.from_layer(_layer()).dtype is None
  found = kernel_support.from_layer(_layer(), dtype=jnp.float32)
  assert found.dtype == "float32"


def test_a_latent_layer_has_heads_of_two_parts():
  layer = latent.LatentAttention(
    4,
    head_dim=32,
    rope_dim=16,
    value_dim=32,
    latent_dim=8,
    rotary=rotary_embedding.Rotary(),
  )
  request = kernel_support.from_layer(layer)
  assert request.head_dim == 48
  assert request.features[_Feature.VALUE_WIDTH] == (
    "values are 32 wide and keys 48"
  )

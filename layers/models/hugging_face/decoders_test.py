"""Tests for the families of llama, GPT-2 and GPT-NeoX, against golden files."""

import functools
import json
from typing import Any

import jax
import numpy as np
import pytest

from paxon.layers.decoding import beam_search, model_steps
from paxon.layers.models.hugging_face import (
  dense_decoders,
  gpt2,
  llama,
  mamba2,
)
from paxon.layers.models.hugging_face.golden_models import (
  golden_case,
  testing,
)

Outcome = testing.Outcome
LOGITS = Outcome.OTHER_LOGITS
TENSORS = Outcome.OTHER_TENSORS
REJECTED = Outcome.REJECTED

CASES = {
  "llama2": llama.LLAMA,
  "llama3": llama.LLAMA,
  "llama_biased": llama.LLAMA,
  "llama_dynamic": llama.LLAMA,
  "mistral": llama.MISTRAL,
  "qwen2": llama.QWEN2,
  "qwen3": llama.QWEN3,
  "phi3": llama.PHI3,
  "phi3_longrope": llama.PHI3,
  "phi3_longrope_long": llama.PHI3,
  "gpt2": gpt2.FAMILY,
  "gpt2_scaled": gpt2.FAMILY,
  "gpt_neox": dense_decoders.GPT_NEOX,
  "gpt_neox_sequential": dense_decoders.GPT_NEOX,
  "mamba2": mamba2.FAMILY,
  "mamba2_biased": mamba2.FAMILY,
}
_ALL = pytest.mark.parametrize("case", CASES)


@pytest.mark.nightly(keep=4)
@_ALL
def test_logits(case):
  testing.check_logits(CASES[case], case)


# One of each family: compiling a whole generation takes seconds.
@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize(
  "case",
  [
    "llama2",
    "llama3",
    # Beyond the original length, where cached keys keep their angles.
    "llama_dynamic",
    "mistral",
    "qwen2",
    "qwen3",
    "phi3",
    "gpt2",
    "gpt_neox",
    "mamba2",
  ],
)
def test_greedy(case):
  testing.check_greedy(CASES[case], case)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("case", ["gpt2", "gpt_neox", "llama2", "qwen3"])
def test_beam_search(case):
  """Ids and scores of each length penalty and stop are the stored ones."""
  goldens = json.loads((golden_case.FOLDER / "beams.json").read_text())
  golden = golden_case.read(case)
  model = CASES[case].model(golden.config)
  weights = testing.variables(CASES[case].names(golden.config))
  prefill = _CompiledOnce(
    lambda weights, *args, **kwargs: model_steps.make_prefill(model, weights)(
      *args, **kwargs
    ),
    weights,
  )
  step = _CompiledOnce(
    lambda weights, *args: model_steps.make_decode_step(model, weights)(*args),
    weights,
  )
  prompts = golden.arrays["ids"][:, : golden_case.PROMPT_LENGTH]
  lengths = np.full(len(prompts), prompts.shape[1], np.int32)
  goldens = [each for each in goldens if each["case"] == case]
  assert len(goldens) == 9
  for each in goldens:
    search = beam_search.BeamSearch(
      beam_size=3,
      length_alpha=each["length_penalty"],
      length_offset=0.0,
      pool=beam_search.Pool.TOP,
      stop=beam_search.Stop(each["stop"]),
    )
    # Loops of Python around the two compiled steps, to compile only these.
    with jax.disable_jit():
      found = search.generate(
        prefill,
        step,
        jax.device_put(prompts),
        jax.device_put(lengths),
        max_new_tokens=golden_case.NEW_IDS,
        end_id=each["end_ids"],
        num_samples=3,
      )
    ids = [
      row[:count].tolist()
      for row, count in zip(
        np.asarray(found.ids), found.lengths.tolist(), strict=True
      )
    ]
    assert ids == each["ids"], search
    np.testing.assert_allclose(found.scores, each["scores"], rtol=2e-4)


class _CompiledOnce:
  """A function of weights and arrays that is compiled at its first call."""

  def __init__(self, function, weights):
    self._function, self._weights = function, weights
    self._compiled: Any = None

  def __call__(self, *args, **kwargs):
    static = {k: v for k, v in kwargs.items() if isinstance(v, int)}
    arrays = {k: v for k, v in kwargs.items() if k not in static}
    with jax.disable_jit(False):
      if self._compiled is None:
        function = functools.partial(self._function, **static)
        self._compiled = (
          jax.jit(function)
          .lower(self._weights, *args, **arrays)
          .compile(compiler_options={"xla_backend_optimization_level": 0})
        )
      compiled = self._compiled
      return compiled(self._weights, *args, **arrays)


def test_long_rope_of_each_document():
  # The first document is longer than the original length of 12.
  golden = golden_case.read("phi3_longrope_long")
  ids, logits = golden.arrays["ids"], golden.arrays["logits"]
  model = llama.PHI3.model(golden.config)
  weights = testing.variables(llama.PHI3.names(golden.config))
  short = testing.run(model.apply, weights, *testing.token_args(ids[1:, :8]))
  # Padding, too, has positions.
  row = np.concatenate([ids[0], ids[1, :8], ids[1, :9]])[None]
  positions = np.concatenate([np.arange(20), np.arange(17)])[None]
  segments = np.repeat([1, 2, 0], [20, 8, 9])[None]
  args = (jax.device_put(np.int32(x)) for x in (row, positions, segments))
  found = np.asarray(testing.run(model.apply, weights, *args))[0]
  np.testing.assert_allclose(
    found[:20], logits[0], rtol=0, atol=testing.TOLERANCE
  )
  np.testing.assert_allclose(
    found[20:28], short[0], rtol=0, atol=testing.TOLERANCE
  )
  assert np.abs(short[0] - logits[1, :8]).max() > 10 * testing.TOLERANCE


def test_dynamic_rope_of_each_document():
  """Frequencies depend on the length of the document, not of its neighbors."""
  golden = golden_case.read("llama_dynamic")
  ids, logits = golden.arrays["ids"], golden.arrays["logits"]
  model = llama.LLAMA.model(golden.config)
  weights = testing.variables(llama.LLAMA.names(golden.config))
  # A document of 20 tokens, one of 8 below the original length, and padding.
  row = np.concatenate([ids[0], ids[1, :8], ids[1, :9]])[None]
  positions = np.concatenate([np.arange(20), np.arange(17)])[None]
  segments = np.repeat([1, 2, 0], [20, 8, 9])[None]
  args = (jax.device_put(np.int32(x)) for x in (row, positions, segments))
  found = np.asarray(testing.run(model.apply, weights, *args))[0]
  plain = {**golden.config, "rope_parameters": {"rope_theta": 100.0}}
  short = testing.causal_lm_logits(llama.LLAMA, plain, ids[1:, :8])
  for part, expected in ((found[:20], logits[0]), (found[20:28], short[0])):
    np.testing.assert_allclose(part, expected, rtol=0, atol=testing.TOLERANCE)
  assert np.abs(short[0] - logits[1, :8]).max() > 10 * testing.TOLERANCE


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("prompt_length", [12, 13])
def test_long_rope_decodes_after_long_prompts(prompt_length):
  golden = golden_case.read("phi3_longrope_long")
  ids = golden.arrays["ids"]
  model = llama.PHI3.model(golden.config)
  weights = testing.variables(llama.PHI3.names(golden.config))

  def decode(weights, ids):
    prompt = ids[:, :prompt_length]
    positions = jax.numpy.broadcast_to(
      jax.numpy.arange(ids.shape[1]), ids.shape
    )
    ones = jax.numpy.ones_like(ids)
    _, cache = model_steps.make_prefill(model, weights)(
      prompt,
      positions[:, :prompt_length],
      ones[:, :prompt_length],
      cache_length=ids.shape[1],
    )
    logits = []
    for i in range(prompt_length, ids.shape[1]):
      each = slice(i, i + 1)
      step, cache = model_steps.make_decode_step(model, weights)(
        cache, ids[:, each], positions[:, each], ones[:, each]
      )
      logits.append(step)
    return jax.numpy.concatenate(logits, axis=1)

  found = testing.run(decode, weights, jax.device_put(ids))
  if prompt_length == 12:
    # The first step crosses the original length.
    assert np.isnan(found).all()
    return
  np.testing.assert_allclose(
    found,
    golden.arrays["logits"][:, prompt_length:],
    rtol=0,
    atol=testing.TOLERANCE,
  )


@_ALL
def test_names(case):
  testing.check_names(CASES[case], case)


@_ALL
def test_round_trip(case):
  testing.check_round_trip(CASES[case], case)


def _rope(case, **changes):
  return golden_case.read(case).config["rope_parameters"] | changes


# Changes of all families but the GPTs.
_SIZES = (
  ("hidden_size", 64, TENSORS),
  ("intermediate_size", 32, TENSORS),
  ("num_attention_heads", 2, TENSORS),
  ("num_hidden_layers", 1, TENSORS),
  ("num_key_value_heads", 1, TENSORS),
  ("tie_word_embeddings", "no", REJECTED),
  ("vocab_size", 65, TENSORS),
  ("max_position_embeddings", "long", REJECTED),
  ("hidden_act", "relu", LOGITS),
  ("rms_norm_eps", 0.01, LOGITS),
)
_CHANGES = {
  "llama3": (
    *(each for each in _SIZES if each[0] != "num_hidden_layers"),
    ("attention_bias", False, TENSORS),
    ("head_dim", 8, TENSORS),
    ("hidden_act", "nothing", REJECTED),
    ("max_position_embeddings", 0, REJECTED),
    ("mlp_bias", True, TENSORS),
    ("num_attention_heads", 3, REJECTED),
    ("num_hidden_layers", 2, TENSORS),
    ("num_key_value_heads", 4, TENSORS),
    ("num_key_value_heads", 3, REJECTED),
    ("rope_parameters", None, LOGITS),
    ("rope_parameters", _rope("llama3", factor=4.0), LOGITS),
    ("rope_parameters", _rope("llama3", high_freq_factor=2.0), LOGITS),
    ("rope_parameters", _rope("llama3", low_freq_factor=2.0), LOGITS),
    (
      "rope_parameters",
      _rope("llama3", original_max_position_embeddings=16),
      LOGITS,
    ),
    ("rope_parameters", _rope("llama3", rope_theta=50.0), LOGITS),
    ("rope_parameters", _rope("llama3", rope_type="dynamic"), LOGITS),
    ("rope_parameters", _rope("llama3", rope_type="axial"), REJECTED),
    ("tie_word_embeddings", False, TENSORS),
  ),
  "mistral": (
    *_SIZES,
    ("head_dim", 8, TENSORS),
    ("rope_parameters", _rope("mistral", rope_theta=100.0), LOGITS),
    ("sliding_window", 8, LOGITS),
    ("sliding_window", None, LOGITS),
    ("sliding_window", 0, REJECTED),
    ("tie_word_embeddings", True, TENSORS),
  ),
  "qwen2": (
    *(each for each in _SIZES if each[0] != "num_hidden_layers"),
    ("num_hidden_layers", 3, REJECTED),
    ("layer_types", ["full_attention"] * 4, LOGITS),
    ("layer_types", ["full_attention"] * 3, REJECTED),
    ("layer_types", ["chunked_attention"] * 4, REJECTED),
    ("max_window_layers", -1, REJECTED),
    ("rope_parameters", _rope("qwen2", factor=3.0), LOGITS),
    ("sliding_window", 4, LOGITS),
    ("use_sliding_window", False, REJECTED),
    ("tie_word_embeddings", False, TENSORS),
  ),
  "qwen3": (
    *(each for each in _SIZES if each[0] != "num_hidden_layers"),
    ("num_hidden_layers", 2, REJECTED),
    ("attention_bias", True, TENSORS),
    ("head_dim", 8, TENSORS),
    ("layer_types", ["sliding_attention"] * 3, LOGITS),
    ("max_window_layers", -1, REJECTED),
    ("rope_parameters", _rope("qwen3", factor=3.0), LOGITS),
    ("rope_parameters", _rope("qwen3", beta_fast=8.0), LOGITS),
    ("rope_parameters", _rope("qwen3", beta_slow=0.5), LOGITS),
    ("rope_parameters", _rope("qwen3", truncate=False), LOGITS),
    ("rope_parameters", _rope("qwen3", attention_factor=2.0), LOGITS),
    ("sliding_window", 5, LOGITS),
    ("use_sliding_window", False, REJECTED),
    ("tie_word_embeddings", True, TENSORS),
  ),
  "phi3": (
    *_SIZES,
    ("original_max_position_embeddings", 0, REJECTED),
    ("rope_parameters", _rope("phi3", partial_rotary_factor=1.0), LOGITS),
    ("rope_parameters", _rope("phi3", partial_rotary_factor=0.2), REJECTED),
    ("sliding_window", 8, LOGITS),
    ("tie_word_embeddings", True, TENSORS),
  ),
  "phi3_longrope": (
    ("original_max_position_embeddings", 16, LOGITS),
    ("rope_parameters", _rope("phi3_longrope", rope_theta=50.0), LOGITS),
    (
      "rope_parameters",
      _rope("phi3_longrope", short_factor=[1.0, 1.5, 2.0, 2.5]),
      LOGITS,
    ),
    ("rope_parameters", _rope("phi3_longrope", short_factor=[1.0]), REJECTED),
    ("rope_parameters", _rope("phi3_longrope", long_factor=[1.0]), REJECTED),
    ("tie_word_embeddings", False, TENSORS),
  ),
  "gpt2_scaled": (
    ("activation_function", "relu", LOGITS),
    ("add_cross_attention", True, REJECTED),
    ("layer_norm_epsilon", 0.01, LOGITS),
    ("n_embd", 64, TENSORS),
    ("n_head", 2, LOGITS),
    ("n_head", 3, REJECTED),
    ("n_inner", 64, TENSORS),
    ("n_layer", 2, TENSORS),
    ("n_positions", 32, TENSORS),
    ("scale_attn_by_inverse_layer_idx", False, LOGITS),
    ("scale_attn_weights", False, LOGITS),
    ("tie_word_embeddings", True, TENSORS),
    ("vocab_size", 65, TENSORS),
  ),
  "gpt_neox": (
    ("attention_bias", False, TENSORS),
    ("hidden_act", "relu", LOGITS),
    ("hidden_size", 64, TENSORS),
    ("intermediate_size", 64, TENSORS),
    ("layer_norm_eps", 0.01, LOGITS),
    ("max_position_embeddings", 0, REJECTED),
    ("num_attention_heads", 2, LOGITS),
    ("num_attention_heads", 3, REJECTED),
    ("num_hidden_layers", 1, TENSORS),
    ("rope_parameters", _rope("gpt_neox", rope_theta=50.0), LOGITS),
    ("rope_parameters", _rope("gpt_neox", partial_rotary_factor=1.0), LOGITS),
    ("tie_word_embeddings", True, TENSORS),
    ("use_parallel_residual", False, LOGITS),
    ("vocab_size", 65, TENSORS),
  ),
  "mamba2": (
    ("conv_kernel", 3, TENSORS),
    ("expand", 3, REJECTED),
    ("head_dim", 16, REJECTED),
    ("hidden_act", "relu", LOGITS),
    ("hidden_size", 64, REJECTED),
    ("layer_norm_epsilon", 0.01, LOGITS),
    ("n_groups", 1, TENSORS),
    ("n_groups", 3, REJECTED),
    ("num_heads", 4, REJECTED),
    ("num_hidden_layers", 1, TENSORS),
    ("rms_norm", False, REJECTED),
    ("state_size", 7, TENSORS),
    ("tie_word_embeddings", True, TENSORS),
    ("time_step_limit", [0.5, 0.7], LOGITS),
    ("time_step_limit", [0.7, 0.5], REJECTED),
    ("time_step_limit", 1.0, REJECTED),
    ("use_bias", True, TENSORS),
    ("use_conv_bias", False, TENSORS),
    ("vocab_size", 65, TENSORS),
  ),
}


@pytest.mark.nightly(keep=16)
@pytest.mark.parametrize(
  ("case", "field", "value", "outcome"),
  [(case, *change) for case, each in _CHANGES.items() for change in each],
)
def test_every_field_counts(case, field, value, outcome):
  testing.check_sensitive(CASES[case], case, {field: value}, outcome)


@pytest.mark.parametrize("case", set(_CHANGES) - {"phi3_longrope"})
def test_no_field_is_left_out(case):
  # The fraction of rotated features is also in `rope_parameters`, which takes
  # precedence; `is_decoder` has no effect.
  fields = {"partial_rotary_factor", "is_decoder"}
  if case == "mamba2":
    fields |= {"chunk_size", *mamba2.FAMILY.inert}
  fields |= {field for field, *_ in _CHANGES[case]}
  testing.check_all_covered(case, fields)

"""Tests for the limits of generation."""

import dataclasses

import fiddle as fdl
import numpy as np
import pytest

from paxon.inputs import byte_tokenizer
from paxon.layers.models import policy_lm
from paxon.layers.models import testing as models_testing
from paxon.layers.models.hugging_face import families
from paxon.layers.models.hugging_face.golden_models import golden_case
from paxon.layers.positions import position_embedding
from paxon.layers.stacks import shared
from paxon.runner import files, user_error
from paxon.runner.generation import generation_limits, samples
from paxon.runner.session import session as session_lib
from paxon.runner.training import testing


def _gpt2(length=16):
  positions = position_embedding.LearnedPositions(length)
  return models_testing.tiny_gpt2(positions=positions)


@pytest.mark.parametrize(
  ("case", "field", "source"),
  [
    ("gpt2", "n_positions", None),
    ("llama2", None, None),
    ("t5_v1_1", None, None),
    ("whisper", "max_target_positions", "max_source_positions"),
  ],
)
def test_capacity_of_imported_models(case, field, source):
  config = golden_case.read(case).config
  found = generation_limits.find_capacity(families.find(config).model(config))
  assert found == generation_limits.Capacity(
    tokens=config.get(field), source=config.get(source)
  )


def test_models_whose_angles_depend_on_the_length():
  models = {
    case: families.find(config).model(config)
    for case in ("llama2", "llama_dynamic", "phi3_longrope")
    for config in [golden_case.read(case).config]
  }
  whole = {
    case: generation_limits.reads_whole_prompts(model)
    for case, model in models.items()
  }
  assert whole == {
    "llama2": False,
    "llama_dynamic": True,
    "phi3_longrope": True,
  }
  model, draft = models["llama_dynamic"], models["llama2"]
  generation_limits.check_lengths(model, 6, 10)
  generation_limits.check_lengths(model, 6, 7, draft=draft)
  with pytest.raises(user_error.UserError, match="13 tokens are more than 12"):
    generation_limits.check_lengths(model, 6, 8, draft=draft)


def test_capacity_of_models_in_others():
  policy = policy_lm.PolicyLm(policy=_gpt2(), group_size=2, answer_length=3)
  assert generation_limits.find_capacity(policy).tokens == 16
  assert generation_limits.find_vocab_size(policy) is not None
  draft = generation_limits.find_capacity(policy, draft=_gpt2(9))
  assert draft.tokens == 9
  table = shared.shared("positions", position_embedding.LearnedPositions(7))
  model = models_testing.tiny_gpt2(positions=table)
  assert generation_limits.find_capacity(model).tokens == 7
  grid = position_embedding.GridPositions(height=2, width=3, slots_before=1)
  model = models_testing.tiny_gpt2(positions=grid)
  assert generation_limits.find_capacity(model).tokens == 7
  assert generation_limits.find_capacity(models_testing.tiny_decoder()) == (
    generation_limits.Capacity()
  )


@pytest.mark.parametrize(
  ("size", "count", "message"),
  [
    (16, 1, None),
    (10, 7, None),
    (10, 8, r"need 17 positions .*, and the model has 16; set max_new_tokens"),
    (17, 1, r"A prompt of 17 tokens .* the model has 16; shorten the prompt"),
  ],
)
def test_the_last_token_needs_no_position(size, count, message):
  if message is None:
    generation_limits.check_lengths(_gpt2(), size, count)
    return
  with pytest.raises(user_error.UserError, match=message):
    generation_limits.check_lengths(_gpt2(), size, count)


def test_a_suffix_follows_the_last_token():
  generation_limits.check_lengths(_gpt2(), 8, 5, suffix=3)
  with pytest.raises(
    user_error.UserError,
    match=r"6 new ones with a suffix of 3 need 17 positions, and the model has"
    r" 16; set max_new_tokens to at most 5, or",
  ):
    generation_limits.check_lengths(_gpt2(), 8, 6, suffix=3)


def test_an_encoder_and_its_decoder_have_their_own_limits():
  config = golden_case.read("whisper").config
  model = families.find(config).model(config)
  most, source = config["max_target_positions"], config["max_source_positions"]
  generation_limits.check_lengths(model, source, most)
  with pytest.raises(user_error.UserError, match="encoder has positions for"):
    generation_limits.check_lengths(model, source + 1, most)
  with pytest.raises(
    user_error.UserError, match=rf"max_new_tokens to at most {most}[.]"
  ):
    generation_limits.check_lengths(model, 1, most + 1)


def test_a_nan_is_an_error_and_no_json():
  job = fdl.build(testing.TinyLm(num_layers=1, max_new_tokens=2).job())
  session = session_lib.open_session(job)
  state = session.initial_state()
  table = state.variables["params"]["embedding"]["table"]
  letter = int(byte_tokenizer.ByteTokenizer().encode("b")[0])
  broken = {**state.variables["params"]}
  broken["embedding"] = {"table": table.at[letter].set(np.nan)}
  state = dataclasses.replace(
    state, variables={**state.variables, "params": broken}
  )
  with pytest.raises(
    generation_limits.NonFiniteError,
    match=r"^The log probability of new token 1 after 'abc' is NaN",
  ) as found:
    samples.draw(session, state, prompts=["abc"])
  assert found.value.status == 70
  value = {"a": [float("nan"), (1.5, float("-inf"))], "b": "NaN"}
  assert files.to_json(value) == '{"a": [null, [1.5, null]], "b": "NaN"}'

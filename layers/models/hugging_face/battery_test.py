"""The battery of every family that is a table, and of one from outside.

Run as `oracle_test`, and skipped where torch is not installed.
"""

import dataclasses
from importlib import metadata
import importlib.util
import json
import sys
import types

import pytest

from paxon.layers.models.hugging_face import (
  block_layers,
  decoder,
  decoder_table,
  families,
  family,
)
from paxon.layers.models.hugging_face.golden_models import (
  battery,
  golden_case,
  golden_dense_cases,
)

_ORACLE = pytest.mark.skipif(
  importlib.util.find_spec("torch") is None
  or importlib.util.find_spec("transformers") is None,
  reason="torch and transformers are not here; --config=oracle brings them",
)
pytestmark = pytest.mark.filterwarnings("ignore")

# A family that a user's package has.
_CLOVA = decoder_table.make(
  "hyperclovax",
  "HyperCLOVAXForCausalLM",
  max_length=2048,
  form=decoder_table.map_value(
    "use_post_norm",
    True,
    {
      False: block_layers.PRE_NORM,
      True: block_layers.Form(
        block_layers.SANDWICH.block,
        {
          "attention_norm": "input_layernorm",
          "post_attention_norm": "post_norm1",
          "feed_forward_norm": "post_attention_layernorm",
          "post_feed_forward_norm": "post_norm2",
        },
      ),
    },
  ),
  attention={
    **decoder_table.BIASES,
    "logit_scale": decoder_table.optional_number("attention_multiplier", None),
  },
  mlp=decoder_table.MLP_BIAS,
  input_scale=decoder_table.number("embedding_multiplier", 1.0),
  residual_scale=decoder_table.number("residual_multiplier", 1.0),
  logit_scale=decoder_table.number("logits_scaling", 1.0),
)
_CONFIG = {
  **golden_dense_cases.SIZES,
  "model_type": "hyperclovax",
  "architectures": ["HyperCLOVAXForCausalLM"],
  "head_dim": 12,
  "attention_multiplier": 0.2,
  "embedding_multiplier": 3.0,
  "residual_multiplier": 0.7,
  "logits_scaling": 0.5,
}


@pytest.fixture(name="clova")
def _clova(monkeypatch):
  """A package that registers the family."""
  module = types.ModuleType("someones_family")
  vars(module)["CLOVA"] = _CLOVA
  monkeypatch.setitem(sys.modules, module.__name__, module)
  entries = metadata.EntryPoints(
    [
      metadata.EntryPoint(name, f"someones_family:{value}", families.GROUP)
      for name, value in (("hyperclovax", "CLOVA"), ("wrong", "CLOVA"))
    ]
  )
  monkeypatch.setattr(
    metadata, "entry_points", lambda group: entries.select(group=group)
  )


@_ORACLE
@pytest.mark.parametrize("case", [x.name for x in golden_dense_cases.CASES])
def test_families_equal_transformers(case):
  findings = list(battery.check(golden_case.read(case).config))
  assert not [each for each in findings if each[2]], findings


@_ORACLE
@pytest.mark.usefixtures("clova")
def test_a_family_from_outside_equals_transformers(tmp_path, capsys):
  path = tmp_path / "config.json"
  path.write_text(json.dumps(_CONFIG))
  assert battery.main([str(path)]) == 0, capsys.readouterr().out
  printed = capsys.readouterr().out
  assert "greedy through the cache" in printed


@_ORACLE
def test_a_wrong_table_is_found(monkeypatch):
  config = golden_case.read("granite").config
  right = families.find(config).read

  def read(fields):
    found = right(fields)
    assert isinstance(found, decoder.Decoder)
    return dataclasses.replace(found, residual_scale=0.6)

  wrong = dataclasses.replace(families.find(config), read=read)
  monkeypatch.setattr(families, "find", lambda config: wrong)
  failed = [what for what, _, is_failure in battery.check(config) if is_failure]
  assert "logits" in failed
  assert "packed documents" in failed


@pytest.mark.usefixtures("clova")
def test_families_of_other_packages_are_found():
  assert families.find(_CONFIG) is _CLOVA
  assert "hyperclovax" in families.list_supported()
  with pytest.raises(
    family.UnsupportedConfigError,
    match="the entry point 'wrong' must be a Family of that model_type",
  ):
    families.find({"model_type": "wrong"})

"""Tests of PEFT adapters of all forms, against PEFT's own logits."""

import contextlib
import importlib
import io
import json
from typing import Any

from etils import epath
import fiddle as fdl
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from paxon.layers.models.hugging_face import families
from paxon.layers.models.hugging_face.golden_models import golden_case
from paxon.runner.checkpoints import stored_checkpoint
from paxon.tools.hugging_face import hf_main, peft_adapter

pytestmark = [
  pytest.mark.skipif(
    importlib.util.find_spec("peft") is None,
    reason="peft is not here; --config=oracle brings it",
  ),
  pytest.mark.filterwarnings("ignore"),
]
_ALL = ("attention_projections", "feed_forward", "experts")


class _Base:
  """A model of the goldens, in all its forms."""

  def __init__(self, case: str, folder: epath.Path, **changes: Any) -> None:
    self.golden = golden_case.read(case)
    self.config = {**self.golden.config, **changes}
    self.family = families.find(self.config)
    self.names = self.family.names(self.config)
    self.folder = folder
    tensors = {
      name: golden_case.weight(name, tensor.shape)
      for name, tensor in self.names.tensors.items()
    }
    safetensors_numpy.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(self.config))
    assert _hf("import", folder, "--to", folder / "run") == 0
    self.ids = self.golden.arrays["ids"]
    model = fdl.build(self.family.model(self.config, fdl.Config))
    self._apply = jax.jit(model.apply)

  def arguments(self):
    positions = jnp.broadcast_to(jnp.arange(self.ids.shape[1]), self.ids.shape)
    ids = jnp.asarray(self.ids)
    return ids, positions, jnp.ones_like(ids)

  def logits(self, values):
    """Returns logits of base weights."""
    return np.asarray(self._apply(_nested(values), *self.arguments()))

  def torch_model(self):
    torch, transformers = map(
      importlib.import_module, ("torch", "transformers")
    )
    return transformers.AutoModelForCausalLM.from_pretrained(
      str(self.folder), dtype=torch.float32, attn_implementation="eager"
    )

  def make(self, target, **fields):
    """Makes an adapter with random values; returns the logits with it."""
    torch, peft = map(importlib.import_module, ("torch", "peft"))
    torch.manual_seed(0)
    fields = {"r": 4, "lora_alpha": 6.0, "task_type": "CAUSAL_LM", **fields}
    model = peft.get_peft_model(self.torch_model(), peft.LoraConfig(**fields))
    with torch.no_grad():
      for value in model.parameters():
        if value.requires_grad:
          value += 0.1 * torch.randn(value.shape)
    model.save_pretrained(str(target))
    return self.peft_logits(target)

  def peft_logits(self, adapter):
    torch, peft = map(importlib.import_module, ("torch", "peft"))
    model = peft.PeftModel.from_pretrained(self.torch_model(), str(adapter))
    with torch.no_grad():
      return model.eval()(torch.from_numpy(self.ids).long()).logits.numpy()


@pytest.fixture(name="bases", scope="module")
def _bases(tmp_path_factory):
  made: dict[Any, _Base] = {}

  def get(case, **changes):
    key = (case, *changes.items())
    if key not in made:
      folder = epath.Path(tmp_path_factory.mktemp(case))
      made[key] = _Base(case, folder, **changes)
    return made[key]

  return get


def _hf(*argv):
  return hf_main.main([str(arg) for arg in argv])


def _nested(values):
  given = {name: jnp.asarray(value) for name, value in values.items()}
  return traverse_util.unflatten_dict(given, sep="/")


def _arrays(run):
  found = stored_checkpoint.find_checkpoint(epath.Path(run))
  return stored_checkpoint.read_numpy(found, list(found.variables()))


def _lora_of(run):
  return peft_adapter.read_config(epath.Path(run) / "hugging_face")


_QKV = ["q_proj", "k_proj", "v_proj"]
_MLP = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
_LLAMA = ("llama3", {})
_UNTIED = ("llama3", {"tie_word_embeddings": False})
_BIASED = ("llama3", {"attention_bias": True})
_CASES = {
  "rank_pattern": (
    _LLAMA,
    {
      "target_modules": [*_QKV, "down_proj"],
      "rank_pattern": {"layers.1.self_attn.q_proj": 7, "down_proj": 2},
      "alpha_pattern": {r".*\.k_proj": 11},
    },
  ),
  "rslora_pattern": (
    _LLAMA,
    {"target_modules": _QKV, "use_rslora": True, "rank_pattern": {"q_proj": 7}},
  ),
  "layers_to_transform": (
    _LLAMA,
    {
      "target_modules": _QKV,
      "layers_to_transform": [1],
      "layers_pattern": "layers",
    },
  ),
  "regex": (
    _LLAMA,
    {"target_modules": r".*layers\.[02]\.(self_attn\.q|mlp\.up)_proj"},
  ),
  "exclude": (
    _LLAMA,
    {"target_modules": "all-linear", "exclude_modules": r".*\.0\..*"},
  ),
  "modules_to_save": (
    _UNTIED,
    {"target_modules": _QKV, "modules_to_save": ["lm_head", "norm"]},
  ),
  "head_and_embedding": (
    _UNTIED,
    {"target_modules": ["q_proj", "lm_head", "embed_tokens"]},
  ),
  "head_alone": (_UNTIED, {"target_modules": ["lm_head"]}),
  "pissa": (_LLAMA, {"target_modules": _QKV, "init_lora_weights": "pissa"}),
  "olora": (_LLAMA, {"target_modules": _QKV, "init_lora_weights": "olora"}),
  "dora_rslora": (
    _LLAMA,
    {"target_modules": _QKV, "use_dora": True, "use_rslora": True},
  ),
  "dora_pattern": (
    _LLAMA,
    {
      "target_modules": r".*\.[12]\..*(q|up)_proj",
      "use_dora": True,
      "rank_pattern": {"up_proj": 3},
    },
  ),
  "lora_bias": (_BIASED, {"target_modules": _QKV, "lora_bias": True}),
  "bias": (_BIASED, {"target_modules": _QKV, "bias": "all"}),
  "conv1d": (
    ("gpt2", {}),
    {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True},
  ),
  "shared_tensors": (
    ("phi3", {}),
    {"target_modules": ["qkv_proj", "gate_up_proj"]},
  ),
  "qwen3_moe": (
    ("qwen3_moe", {}),
    {"target_modules": ["q_proj"], "target_parameters": _MLP},
  ),
  "one_parameter": (
    ("qwen3_moe", {}),
    {"target_modules": [], "target_parameters": ["experts.down_proj"]},
  ),
  "mixtral": (
    ("mixtral", {}),
    {"target_modules": [], "target_parameters": _MLP},
  ),
  "gpt_oss": (
    ("gpt_oss", {}),
    {
      "target_modules": ["q_proj"],
      "target_parameters": _MLP,
      "rank_pattern": {"experts.gate_up_proj": 2},
    },
  ),
  "qwen3_next": (
    ("qwen3_next", {}),
    {
      "target_modules": ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj"],
      "target_parameters": _MLP,
    },
  ),
  "deepseek": (
    ("deepseek_v3", {}),
    {
      "target_modules": [
        "q_a_proj",
        "q_b_proj",
        "kv_a_proj_with_mqa",
        "kv_b_proj",
      ],
      "target_parameters": _MLP,
    },
  ),
}


@pytest.mark.parametrize("case", _CASES)
def test_logits_are_those_of_peft(case, bases, tmp_path):
  (name, changes), fields = _CASES[case]
  base = bases(name, **changes)
  adapter, run = tmp_path / "adapter", tmp_path / "run"
  expected = base.make(adapter, **fields)
  plain = base.logits(_arrays(base.folder / "run"))
  assert np.max(np.abs(expected - plain)) > 1e-2
  text = io.StringIO()
  with contextlib.redirect_stdout(text):
    assert (
      _hf("import", adapter, "--base", base.folder / "run", "--to", run) == 0
    )
  values = _arrays(run)
  merged = peft_adapter.merge(values, _lora_of(run))
  np.testing.assert_allclose(base.logits(merged), expected, atol=2e-4)
  # Exported again, it is the same for PEFT, or the line names what changed.
  again = tmp_path / "again"
  error = io.StringIO()
  with contextlib.redirect_stderr(error):
    status = _hf("export", run, "--adapter", "--to", again)
  has_changed = "changed the base model's" in text.getvalue()
  assert status == (2 if has_changed or case == "head_alone" else 0)
  if status:
    assert "export the merged model" in error.getvalue() or case == "head_alone"
    return
  np.testing.assert_allclose(base.peft_logits(again), expected, atol=2e-4)


@pytest.mark.parametrize("module", ["embed_tokens", "lm_head"])
def test_one_of_two_modules_that_share_weights(module, bases, tmp_path, capsys):
  """PEFT copies it, so that the model has two; the base has one."""
  base = bases(*_LLAMA[:1])
  fields = {"target_modules": _QKV, "modules_to_save": [module]}
  base.make(tmp_path / "adapter", **fields)
  argv = ("--base", base.folder / "run", "--to", tmp_path / "run")
  assert _hf("import", tmp_path / "adapter", *argv) == 2
  line = capsys.readouterr().err.splitlines()[-1]
  assert "adapter_config.json: modules_to_save has" in line
  assert f"{module}, whose weights are also those of" in line

"""Tests of adapters against PEFT: 20 steps, and folders in both directions."""

import base64
import contextlib
import importlib.util
import io
import json
import os

from etils import epath
import fiddle as fdl
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from paxon.layers.models.hugging_face import families
from paxon.layers.models.hugging_face.files import safetensors_file
from paxon.layers.models.hugging_face.golden_models import golden_case
from paxon.learners import (
  learner,
  schedules,
  train_state,
  train_step,
  variable_groups,
)
from paxon.learners.optimizers import adamw
from paxon.quantization import lora, number_formats, stored_kernels
from paxon.runner.checkpoints import stored_checkpoint
from paxon.runner.configuration import overrides, resolving, rewrites
from paxon.runner.session import run_files
from paxon.sharding import variables
from paxon.tools.hf_goldens import make_adapter_goldens as goldens
from paxon.tools.hugging_face import (
  hf_main,
  peft_adapter,
  peft_layers,
  peft_reader,
)

GOLDEN = golden_case.read(goldens.CASE)
FAMILY = families.find(GOLDEN.config)
NAMES = FAMILY.names(GOLDEN.config)


def _folder(kind):
  # Bazel's folders have links to the files, which an import does not follow.
  path = os.path.realpath(f"{goldens.FOLDER}/peft_{kind}/results.json")
  return epath.Path(path).parent


def _results(kind):
  return json.loads((_folder(kind) / "results.json").read_text())


def _kernels(names=NAMES):
  def read_rows(name, start, stop):
    shape = names.tensors[name].shape
    return golden_case.weight(name, shape)[start:stop]

  return {
    name: np.asarray(leaf.from_tensors(read_rows))
    for name, leaf in names.leaves.items()
  }


def _model(adapter, matmuls, storage=None, config=GOLDEN.config):
  config = FAMILY.model(config, fdl.Config)
  targets = ("attention_projections", "feed_forward")
  rules = (lora.LoraRule(targets, adapter, matmuls),)
  patterns = rewrites.adapt(config, rules, storage=storage)
  return fdl.build(config), patterns


def _arguments(ids):
  positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
  return jnp.asarray(ids), positions, jnp.ones_like(jnp.asarray(ids))


def _loss_fn(model, ids):
  def loss_fn(values, batch, rngs):
    del batch, rngs
    logits = model.apply(values, *_arguments(ids))
    logs = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))
    at = jnp.asarray(ids[:, 1:])[..., None]
    nll = -jnp.take_along_axis(logs, at, axis=-1)
    loss = jnp.sum(nll), jnp.float32(nll.size)
    return train_step.LossOutput(loss, {}, {}, {})

  return loss_fn


def _learner():
  return learner.Learner(
    optimizer=adamw.AdamW(
      schedule=schedules.Constant(value=goldens.LEARNING_RATE),
      b2=0.999,
      weight_decay=0.0,
    )
  )


def _initial(specs, adapter, names=NAMES):
  """Returns the values with which the goldens begin."""
  given = _kernels(names)
  for name, spec in _flat(specs).items():
    if name in given:
      continue
    value = np.zeros(spec.shape, np.float32)
    if name.endswith(lora.A):
      for layer in peft_layers.find_layers(names).values():
        for part in layer.parts:
          if part.kernel == lora.find_kernel_name(name):
            shape = (adapter.rank, layer.num_inputs)
            a = goldens.initial_a(layer.name, shape)
            value[part.index] = np.moveaxis(a[:, part.inputs], 0, -1)
    given[name] = value
  given = {k: jnp.asarray(v) for k, v in given.items()}
  return traverse_util.unflatten_dict(given, sep="/")


def _flat(tree):
  return traverse_util.flatten_dict(tree, sep="/")


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("kind", goldens.KINDS)
def test_steps_are_those_of_peft(kind, tmp_path):
  read, expected = peft_reader.read(
    _folder(kind), names=NAMES, kernels=_kernels()
  )
  adapter = read.lora
  assert adapter == lora.Lora(
    rank=goldens.RANK, alpha=goldens.ALPHA, kind=lora.Kind(kind)
  )
  assert read.targets == ("down", "key", "out", "query")
  model, patterns = _model(adapter, read.targets)
  ids = GOLDEN.arrays["ids"]
  specs = variable_groups.freeze(
    variables.get_specs(
      jax.eval_shape(model.init, jax.random.key(0), *_arguments(ids))
    ),
    trainable=patterns,
  )
  assert {n for n in _flat(specs) if n not in NAMES.leaves} == set(expected)
  of = _learner()
  step = jax.jit(
    train_step.make_train_step(
      _loss_fn(model, ids), learner=of, specs=specs, seed=0
    )
  )
  state = train_state.make_initial(
    _initial(specs, adapter), learner=of, specs=specs
  )
  losses = []
  for _ in range(goldens.STEPS):
    state, metrics = step(state, {})
    losses.append(float(metrics["loss"][0] / metrics["loss"][1]))
  results = _results(kind)
  np.testing.assert_allclose(losses, results["losses"], atol=1e-4)
  trained = _flat(jax.device_get(state.variables))
  for name, value in expected.items():
    np.testing.assert_allclose(trained[name], value, atol=1e-4, err_msg=name)
  # The imported adapter has the logits of PEFT, and so has the merged kernel.
  values = {**_kernels(), **expected}
  logits = jax.jit(model.apply)(_nested(values), *_arguments(ids))
  np.testing.assert_allclose(logits[0, -1], results["logits"], atol=1e-4)
  merged = peft_adapter.merge(values, adapter)
  assert set(merged) == set(NAMES.leaves)
  base = fdl.build(FAMILY.model(GOLDEN.config, fdl.Config))
  logits = jax.jit(base.apply)(_nested(merged), *_arguments(ids))
  np.testing.assert_allclose(logits[0, -1], results["logits"], atol=1e-4)
  # A written folder has the tensors that were read.
  written = epath.Path(tmp_path)
  peft_adapter.write(
    written, expected, names=NAMES, adapter=adapter, kernels=_kernels()
  )
  found, wanted = (
    safetensors_file.read_header(each / peft_adapter.WEIGHTS)
    for each in (written, _folder(kind))
  )
  assert {k: v.shape for k, v in found.items()} == {
    k: v.shape for k, v in wanted.items()
  }
  _, again = peft_reader.read(written, names=NAMES, kernels=_kernels())
  for name, value in expected.items():
    np.testing.assert_allclose(again[name], value, atol=1e-6)


@pytest.fixture(name="base", scope="module")
def _base(tmp_path_factory):
  """Returns the imported model of the goldens."""
  folder = tmp_path_factory.mktemp("base")
  tensors = {
    name: golden_case.weight(name, tensor.shape)
    for name, tensor in NAMES.tensors.items()
  }
  safetensors_numpy.save_file(tensors, folder / "model.safetensors")
  (folder / "config.json").write_text(json.dumps(GOLDEN.config))
  assert _hf("import", folder, "--to", folder / "run") == 0
  return folder / "run"


def _hf(*argv):
  return hf_main.main([str(arg) for arg in argv])


def _arrays(run):
  found = stored_checkpoint.find_checkpoint(epath.Path(run))
  return stored_checkpoint.read_numpy(found, list(found.variables()))


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("kind", goldens.KINDS)
def test_imported_adapters_have_the_logits_of_peft(kind, base, tmp_path):
  run, adapter, merged = (tmp_path / n for n in ("run", "adapter", "merged"))
  assert _hf("import", _folder(kind), "--base", base, "--to", run) == 0
  values, start = _arrays(run), _arrays(base)
  for name, value in start.items():
    np.testing.assert_array_equal(values[name], value, err_msg=name)
  # What other programs read of the run is enough to make its model.
  settings = run_files.read_settings(epath.Path(run))
  assert settings is not None
  more = [overrides.parse_argument("--fdl.tokenizer=bytes")]
  config = resolving.resolve(
    settings.experiment, [*settings.overrides, *filter(None, more)]
  ).config
  model = fdl.build(config.task.model)
  ids, expected = GOLDEN.arrays["ids"], _results(kind)["logits"]
  logits = jax.jit(model.apply)(_nested(values), *_arguments(ids))
  np.testing.assert_allclose(logits[0, -1], expected, atol=1e-4)
  assert _hf("export", run, "--adapter", "--to", adapter) == 0
  written, given = (
    safetensors_numpy.load_file(each / peft_adapter.WEIGHTS)
    for each in (adapter, _folder(kind))
  )
  assert written.keys() == given.keys()
  for name, value in given.items():
    np.testing.assert_allclose(written[name], value, atol=1e-6, err_msg=name)
  assert _hf("export", run, "--to", merged) == 0
  assert _hf("import", merged, "--to", tmp_path / "again") == 0
  plain = fdl.build(FAMILY.model(GOLDEN.config, fdl.Config))
  again = _nested(_arrays(tmp_path / "again"))
  logits = jax.jit(plain.apply)(again, *_arguments(ids))
  np.testing.assert_allclose(logits[0, -1], expected, atol=1e-4)
  config = json.loads((adapter / "adapter_config.json").read_text())
  assert config["base_model_name_or_path"] == os.fspath(base.parent)
  # Of a base in bfloat16, training stores float32.
  path = run / "hugging_face" / "config.json"
  stated = {**json.loads(path.read_text()), "dtype": "bfloat16"}
  path.write_text(json.dumps(stated))
  half = tmp_path / "half"
  assert _hf("export", run, "--to", half) == 0
  found = safetensors_numpy.load_file(half / "model.safetensors")
  assert {value.dtype.name for value in found.values()} == {"bfloat16"}
  line = _error("import", _folder(kind), "--base", base, "--to", run)
  assert "exists; pass another folder" in line


@pytest.mark.skipif(
  importlib.util.find_spec("peft") is None,
  reason="peft is not here; --config=oracle brings it",
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", goldens.KINDS)
def test_exported_adapters_are_read_by_peft(kind, base, tmp_path):
  import peft  # pyrefly: ignore[missing-import]
  import torch  # pyrefly: ignore[missing-import]
  import transformers  # pyrefly: ignore[missing-import]

  run, adapter = (tmp_path / name for name in ("run", "adapter"))
  assert _hf("import", _folder(kind), "--base", base, "--to", run) == 0
  assert _hf("export", run, "--adapter", "--to", adapter) == 0
  model = transformers.AutoModelForCausalLM.from_pretrained(
    os.fspath(base.parent), dtype=torch.float32
  )
  model = peft.PeftModel.from_pretrained(model, os.fspath(adapter)).eval()
  ids = torch.from_numpy(GOLDEN.arrays["ids"]).long()
  with torch.no_grad():
    logits = model(ids).logits.numpy()
  values = _nested(_arrays(run))
  read, _ = peft_reader.read(_folder(kind), names=NAMES, kernels=_kernels())
  ours, _ = _model(read.lora, read.targets)
  expected = jax.jit(ours.apply)(values, *_arguments(GOLDEN.arrays["ids"]))
  np.testing.assert_allclose(logits, expected, atol=1e-4)


def _error(*argv):
  """Returns the one line on stderr of a command that fails."""
  text = io.StringIO()
  with contextlib.redirect_stderr(text):
    assert _hf(*argv) == 2
  (line,) = text.getvalue().splitlines()
  return line


def test_adapters_that_cannot_be_imported(base, tmp_path):
  of = _folder("lora")
  assert "pass its base model" in _error("import", of, "--to", tmp_path / "a")
  other = dict(GOLDEN.config) | {"intermediate_size": 64}
  (tmp_path / "hugging_face").mkdir()
  for each in base.iterdir():
    if each.name != "hugging_face":
      (tmp_path / each.name).symlink_to(each)
  (tmp_path / "hugging_face/config.json").write_text(json.dumps(other))
  line = _error("import", of, "--base", tmp_path, "--to", tmp_path / "a")
  assert "of another model: base_model.model.model.layers.0.mlp.down" in line
  line = _error("import", base, "--base", base, "--to", tmp_path / "a")
  assert "is not the configuration of a PEFT adapter" in line
  bare = tmp_path / "bare"
  bare.mkdir()
  text = (of / peft_adapter.CONFIG).read_text()
  (bare / peft_adapter.CONFIG).write_text(text)
  line = _error("import", bare, "--base", base, "--to", tmp_path / "a")
  assert "adapter_model.safetensors is missing" in line
  assert not (tmp_path / "a").exists()


def _nested(values):
  given = {name: jnp.asarray(value) for name, value in values.items()}
  return traverse_util.unflatten_dict(given, sep="/")


def _decode(text, dtype):
  return np.frombuffer(base64.b64decode(text), dtype)


def test_nf4_is_that_of_bitsandbytes():
  golden = _results(goldens.QLORA)["weight"]
  table = np.asarray(golden["table"], np.float32)
  np.testing.assert_array_equal(number_formats.NF4.table, table)
  np.testing.assert_allclose(
    stored_kernels.make_dynamic_table(), golden["dynamic_table"], rtol=2e-7
  )
  weight = golden_case.weight(*goldens.WEIGHT)
  # As a kernel with the inputs first and two axes of outputs.
  kernel = jnp.asarray(weight.T.reshape(127, 2, 65))
  fields = stored_kernels.quantize(
    kernel, stored_kernels.Storage.NF4, inputs=(0,)
  )
  packed = _decode(golden["packed"], np.uint8)
  codes = np.stack([packed >> 4, packed & 15], -1).reshape(130, 127)
  # The last axis is odd, so the values are packed along the one before.
  indices = np.asarray(number_formats.unpack(fields["values"], axis=-2))
  np.testing.assert_array_equal(indices.reshape(127, 130).T + 8, codes)
  np.testing.assert_array_equal(
    fields["block_values"], _decode(golden["block_values"], np.uint8)
  )
  for name in ("block_scale", "block_mean"):
    np.testing.assert_allclose(fields[name], golden[name], rtol=1e-6)
  whole = stored_kernels.dequantize(
    fields, stored_kernels.Storage.NF4, shape=kernel.shape, inputs=(0,)
  )
  sums = np.sum(np.asarray(whole, np.float64), axis=(1, 2))
  np.testing.assert_allclose(sums, golden["dequantized"], atol=1e-5)


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_other_formats_are_those_of_numpy(kind):
  """fp8 has scales that are powers of two, and the rounding of ml_dtypes.

  int4 has the range of smallest squared error, from 1 to 0.5 times the largest
  magnitude.
  """
  weight = np.asarray(golden_case.weight("stored", (12, 6)), np.float64)
  largest = np.abs(weight).max(axis=0)
  if kind == "int8":
    scale = largest / 127
    values = np.round(weight / scale)
  elif kind == "int4":
    scales = largest / 7 * (1 - np.arange(11) / 20)[:, None]
    every = np.clip(np.round(weight / scales[:, None]), -7, 7)
    errors = np.square(every * scales[:, None] - weight).sum(axis=1)
    best = errors.argmin(axis=0), np.arange(6)
    scale, values = scales[best], every[best[0], :, best[1]].T
  else:
    scale = 2.0 ** np.ceil(np.log2(largest / 448))
    values = (weight / scale).astype(np.float32)
    values = values.astype(jnp.float8_e4m3fn).astype(np.float64)
  storage = stored_kernels.Storage(kind)
  kernel = jnp.asarray(weight, jnp.float32)
  fields = stored_kernels.quantize(kernel, storage, inputs=(0,))
  found = np.asarray(fields["values"])
  if kind == "int4":
    axis = 1 if found.shape[1] < 6 else 0
    found = np.asarray(number_formats.unpack(fields["values"], axis=axis))
  np.testing.assert_array_equal(found.astype(np.float64), values)
  np.testing.assert_allclose(fields["scale"][0], scale, rtol=1e-6)
  whole = stored_kernels.dequantize(
    fields, storage, shape=kernel.shape, inputs=(0,)
  )
  np.testing.assert_allclose(whole, values * scale, rtol=1e-6)


@pytest.mark.nightly
def test_steps_of_stored_kernels_are_those_of_peft_and_bitsandbytes():
  config = {**GOLDEN.config, **goldens.QLORA_SIZES}
  names = FAMILY.names(config)
  read, expected = peft_reader.read(_folder(goldens.QLORA), names=names)
  storage = stored_kernels.Storage.NF4
  model, patterns = _model(read.lora, read.targets, storage, config)
  ids = GOLDEN.arrays["ids"]
  specs = variables.get_specs(
    jax.eval_shape(model.init, jax.random.key(0), *_arguments(ids))
  )
  specs = _flat(variable_groups.freeze(specs, trainable=patterns))
  parameters = {
    name: stored_kernels.find_parameter(name)
    for name in specs
    if stored_kernels.find_parameter(name)
  }
  values = _flat(_initial(_nested_specs(specs, parameters), read.lora, names))
  for name, parameter in parameters.items():
    spec = specs[parameter]
    made = specs[name].initializer.quantize(
      values[parameter], num_stacked=len(spec.stacked)
    )
    values[name] = made[specs[name].initializer.field]
  absent = {name: specs.pop(name) for name in set(parameters.values())}
  # As in `runner.session.serving`, nothing may read them.
  missing = {name: jnp.full(s.shape, jnp.nan) for name, s in absent.items()}
  values = {name: values[name] for name in specs}
  compute = _loss_fn(model, ids)

  def loss_fn(values, batch, rngs):
    return compute(_nested({**_flat(values), **missing}), batch, rngs)

  tree = traverse_util.unflatten_dict(specs, sep="/")
  of = _learner()
  step = jax.jit(
    train_step.make_train_step(loss_fn, learner=of, specs=tree, seed=0)
  )
  state = train_state.make_initial(_nested(values), learner=of, specs=tree)
  losses = []
  for _ in range(goldens.STEPS):
    state, metrics = step(state, {})
    losses.append(float(metrics["loss"][0] / metrics["loss"][1]))
  results = _results(goldens.QLORA)
  np.testing.assert_allclose(losses, results["losses"], atol=1e-4)
  trained = _flat(jax.device_get(state.variables))
  for name, value in expected.items():
    np.testing.assert_allclose(trained[name], value, atol=1e-4, err_msg=name)


def _nested_specs(specs, without):
  kept = {k: v for k, v in specs.items() if k not in without}
  return traverse_util.unflatten_dict(kept, sep="/")


def test_an_adapter_of_another_model_is_an_error():
  other = dict(GOLDEN.config) | {"intermediate_size": 64}
  names = families.find(other).names(other)
  with pytest.raises(
    peft_adapter.AdapterError,
    match=r"of another model: .*down_proj.lora_A.weight must have shape",
  ):
    peft_reader.read(_folder("lora"), names=names)
  fewer = dict(GOLDEN.config) | {"num_hidden_layers": 2}
  names = families.find(fewer).names(fewer)
  with pytest.raises(peft_adapter.AdapterError, match=r"layers.2.* no linear"):
    peft_reader.read(_folder("lora"), names=names)


@pytest.mark.parametrize(
  ("changes", "error"),
  [
    ({"r": 0}, "rank must be positive, got 0"),
    ({"r": "8"}, "r must be a number, got '8'"),
    ({"peft_type": "LOHA"}, 'peft_type must be "LORA", got "LOHA"'),
    (
      {"init_lora_weights": "loftq"},
      'init_lora_weights must be true or .* or "pissa" or "olora", got "loftq"',
    ),
    ({"layer_replication": [[0, 1]]}, "layer_replication must be null"),
    ({"use_bdlora": {}}, "use_bdlora must be null or false, got {}"),
    (
      {"rank_pattern": {"q": 0}},
      r"rank_pattern\['q'\] must be positive, got 0",
    ),
    ({"alpha_pattern": {"(": 1}}, "is not the configuration of a PEFT adapter"),
  ],
)
def test_unsupported_adapters(changes, error, tmp_path):
  folder = epath.Path(tmp_path)
  config = json.loads((_folder("lora") / peft_adapter.CONFIG).read_text())
  (folder / peft_adapter.CONFIG).write_text(json.dumps(config | changes))
  with pytest.raises(peft_adapter.AdapterError, match=error):
    peft_reader.read(folder, names=NAMES)

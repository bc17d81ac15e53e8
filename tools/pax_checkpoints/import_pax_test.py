"""Tests of `tools/ckpt import-pax` from files to logits and training."""

import pathlib
import re

from etils import epath
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.runner import job as job_lib
from paxon.runner.checkpoints import checkpointer, stored_checkpoint
from paxon.runner.configuration import overrides, resolving
from paxon.runner.session import compiled_steps, restore
from paxon.runner.session import session as session_lib
from paxon.sharding import arrays as arrays_lib
from paxon.tasks.lm import pax_lm
from paxon.tools.checkpoints import ckpt_main
from paxon.tools.pax_checkpoints import testing

LM = "tasks.lm.params.lm_cloud.LmCloudSpmdTest"
KNOBS = (
  *("num_layers=2", "embed_dim=32", "head_dim=8", "vocab_size=264"),
  *("length=16", "global_batch_size=8", "dtype=float32", "exact=true"),
)
B1, B2 = 0.9, 0.99
LAYERS = "lm.transformer.repeat.sub.x_layers_"


def _build(*knobs: str, exp: str = LM) -> job_lib.Job:
  given = [overrides.parse_argument(f"--fdl.{x}") for x in (*KNOBS, *knobs)]
  resolved = resolving.resolve(exp, given, packages=("paxon.tasks",))
  resolved.config.mesh = "data=-1"
  return resolving.build(resolved.config)


def _open(job: job_lib.Job) -> session_lib.Session:
  return session_lib.open_session(job, devices=jax.devices()[:1])


def _import(source, to, *extra, knobs=KNOBS, exp=LM) -> int:
  options = [f"--fdl.{knob}" for knob in knobs]
  return ckpt_main.main(
    ["import-pax", str(source), f"--exp={exp}", f"--to={to}", *options, *extra]
  )


class Glam(pax_lm.SyntheticDataset, pax_lm.Glam):
  """Two layers of GLaM, one with experts that never overflow."""

  num_layers = 2
  embed_dim = 32
  head_dim = 8
  mlp_dim = 48
  vocab_size = 264
  num_experts = 4
  num_groups = 1
  capacity_factor = 8.0
  length = 16
  global_batch_size = 8
  dtype = "float32"
  mesh = "fsdp=1"


def _make_glam() -> dict[str, np.ndarray]:
  rng = np.random.default_rng(3)
  D, N, F, E = 32, 4, 48, 4
  shapes = {"lm.final_ln.scale": (D,), "lm.softmax.embedding.w": (264, D)}
  for start in (f"{LAYERS}0.", f"{LAYERS}1."):
    attention = f"{start}self_attention."
    shapes |= {f"{attention}{x}.w": (1, D, D) for x in ("query", "key")}
    shapes |= {
      f"{start}layer_norm.scale": (1, D),
      f"{attention}value.w": (1, D, D),
      f"{attention}post.w": (1, D, D),
      f"{attention}relative_bias.wrb": (1, N, 32),
      f"{start}ff_layer.layer_norm.scale": (1, D),
    }
  shapes |= {
    f"{LAYERS}0.ff_layer.gate": (1, D, E),
    f"{LAYERS}0.ff_layer.wi_0": (1, E, D, F),
    f"{LAYERS}0.ff_layer.wo_0": (1, E, F, D),
    f"{LAYERS}1.ff_layer.ffn_layer1.linear.w": (1, D, F),
    f"{LAYERS}1.ff_layer.ffn_layer1_gate.linear.w": (1, D, F),
    f"{LAYERS}1.ff_layer.ffn_layer2.linear.w": (1, F, D),
  }
  return {k: rng.normal(0, 0.3, v).astype("f4") for k, v in shapes.items()}


def _rms_norm(x, scale):
  return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def _glam_logits(variables, ids):
  """Returns the logits of Praxis's GLaM in float64."""
  w = {name: value.astype(np.float64) for name, value in variables.items()}
  table, (B, T) = w["lm.softmax.embedding.w"], ids.shape
  x = table[ids]
  distance = np.maximum(np.arange(T)[:, None] - np.arange(T), 0)
  for i in range(2):
    v = {
      name.removeprefix(f"{LAYERS}{i}."): value[0]
      for name, value in w.items()
      if name.startswith(f"{LAYERS}{i}.")
    }
    h = _rms_norm(x, v["layer_norm.scale"])
    query, key, value = (
      (h @ v[f"self_attention.{name}.w"]).reshape(B, T, 4, 8)
      for name in ("query", "key", "value")
    )
    # Distances below 16 have a bucket each.
    bias = v["self_attention.relative_bias.wrb"][:, distance]
    logits = np.einsum("BTNH,BSNH->BNTS", query, key) + bias
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights *= np.tri(T)
    weights /= weights.sum(-1, keepdims=True)
    context = np.einsum("BNTS,BSNH->BTNH", weights, value).reshape(B, T, 32)
    x = x + context @ v["self_attention.post.w"]
    h = _rms_norm(x, v["ff_layer.layer_norm.scale"])
    if i == 0:
      gates = np.exp(h @ v["ff_layer.gate"])
      gates[gates < np.sort(gates, -1)[..., -2:-1]] = 0
      gates /= gates.sum(-1, keepdims=True)
      hidden = testing.gelu(np.einsum("BTD,EDF->BTEF", h, v["ff_layer.wi_0"]))
      x = x + np.einsum("BTE,BTEF,EFD->BTD", gates, hidden, v["ff_layer.wo_0"])
    else:
      gate = testing.gelu(h @ v["ff_layer.ffn_layer1_gate.linear.w"])
      hidden = gate * (h @ v["ff_layer.ffn_layer1.linear.w"])
      x = x + hidden @ v["ff_layer.ffn_layer2.linear.w"]
  return _rms_norm(x, w["lm.final_ln.scale"]) @ table.T / np.sqrt(32)


@pytest.mark.nightly
def test_logits_of_glam_are_those_of_praxis(tmp_path, capsys):
  values = _make_glam()
  testing.write(tmp_path / "pax", testing.make_state(values), kind="zarr")
  exp = f"{Glam.__module__}.Glam"
  assert _import(tmp_path / "pax", tmp_path / "run", knobs=(), exp=exp) == 0
  output = capsys.readouterr().out
  assert "variables: 22 of 22" in output
  assert "post.w is read as (N H) D -> N H D, but D (N H)" in output
  job = resolving.build(resolving.resolve(exp, []).config)
  _, state = restore.read_for_evaluation(
    _open(job), epath.Path(tmp_path / "run" / "checkpoints")
  )
  ids = np.random.default_rng(1).integers(0, 264, (2, 16))
  found = job.task.model.apply(state.variables, jnp.asarray(ids))
  expected = _glam_logits(values, ids)
  np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def _read(run: pathlib.Path) -> dict[str, np.ndarray]:
  found = stored_checkpoint.find_checkpoint(epath.Path(run))
  return stored_checkpoint.read_numpy(found, found.arrays)


def _write_lm(folder, *, kind="zarr", extra=None, **options):
  others, layers = testing.make_lm()
  values = others | testing.stack_layers(layers) | (extra or {})
  testing.write(folder, testing.make_state(values), kind=kind, **options)
  return others, layers


def test_logits_are_those_of_praxis(tmp_path, capsys):
  others, layers = _write_lm(tmp_path / "pax" / "checkpoints")
  run = tmp_path / "run"
  assert _import(tmp_path / "pax", run) == 0
  output = capsys.readouterr()
  assert "variables: 15 of 15" in output.out, output
  assert "not used" not in output.out
  assert ckpt_main.main(["verify", str(run)]) == 0
  job = _build()
  _, state = restore.read_for_evaluation(
    _open(job), epath.Path(run / "checkpoints")
  )
  ids = np.random.default_rng(1).integers(0, 264, (2, 16))
  found = job.task.model.apply(state.variables, jnp.asarray(ids))
  expected = testing.lm_logits(others, layers, ids)
  np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)


class Bert(pax_lm.SyntheticDataset, pax_lm.TransformerBertSpmdAdafactor):
  """Two layers of Pax's BERT."""

  num_layers = 2
  num_heads = 4
  embed_dim = 32
  mlp_dim = 128
  vocab_size = 264
  mask_id = 3
  length = 16
  global_batch_size = 8
  activation = nn.gelu
  mesh = "fsdp=1"


def test_logits_of_bert_are_those_of_praxis(tmp_path, capsys):
  others, layers = _write_lm(tmp_path / "pax")
  exp = f"{Bert.__module__}.Bert"
  assert _import(tmp_path / "pax", tmp_path / "run", knobs=(), exp=exp) == 0
  assert "variables: 15 of 15" in capsys.readouterr().out
  job = resolving.build(resolving.resolve(exp, []).config)
  _, state = restore.read_for_evaluation(
    _open(job), epath.Path(tmp_path / "run" / "checkpoints")
  )
  ids = np.random.default_rng(1).integers(0, 264, (2, 16))
  found = job.task.model.apply(state.variables, jnp.asarray(ids))
  expected = testing.lm_logits(others, layers, ids, causal=False)
  np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("kind", ["OCDBT", "FLAX"])
def test_all_kinds_give_the_same_checkpoint(kind, tmp_path, capsys):
  _write_lm(tmp_path / "zarr")
  _write_lm(tmp_path / "other", kind=kind)
  assert _import(tmp_path / "zarr", tmp_path / "a") == 0
  assert _import(tmp_path / "other", tmp_path / "b") == 0
  assert f": {kind}, version 1.1, 16 arrays" in capsys.readouterr().out
  first, second = _read(tmp_path / "a"), _read(tmp_path / "b")
  assert first.keys() == second.keys()
  for name, value in first.items():
    np.testing.assert_array_equal(value, second[name], name)


def _train(opened, step, state, *, steps: range):
  """Returns the state after some steps, and their losses."""
  batch, losses = opened.job.train_input.get_next(), []
  for number in steps:
    rng = np.random.default_rng(number)
    for name in ("inputs", "targets"):
      batch[name] = rng.integers(0, 264, (8, 16)).astype(np.int32)
    placed = arrays_lib.to_global(batch, opened.layout)
    state, metrics = step(state, placed)
    total, weight = metrics["loss"]
    losses.append(float(total) / float(weight))
  return state, losses


def _to_pax(ours: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
  """Returns what is stored below a prefix with the names of Praxis."""
  block = "params/stack/layers/blocks_0/"
  layers = {
    "layer_norm.scale": "attention_norm/scale",
    "layer_norm.bias": "attention_norm/bias",
    "self_attention.per_dim_scale.per_dim_scale": "attention/query_scale/scale",
    "ff_layer.layer_norm.scale": "feed_forward_norm/scale",
    "ff_layer.layer_norm.bias": "feed_forward_norm/bias",
    "ff_layer.ffn_layer1.linear.w": "feed_forward/up",
    "ff_layer.ffn_layer1.bias.b": "feed_forward/up_bias",
    "ff_layer.ffn_layer2.linear.w": "feed_forward/down",
    "ff_layer.ffn_layer2.bias.b": "feed_forward/down_bias",
  }
  start = "lm.transformer.repeat.sub.x_layers_0."
  found = {start + k: ours[prefix + block + v] for k, v in layers.items()}
  qkv = ours[f"{prefix}{block}attention/qkv"]
  out = ours[f"{prefix}{block}attention/out"]
  table = ours[f"{prefix}params/embedding/table"]
  return {
    **found,
    f"{start}self_attention.combined_qkv.w": np.moveaxis(qkv, 2, 1),
    f"{start}self_attention.post.w": np.moveaxis(out, 3, 1),
    "lm.final_ln.scale": ours[f"{prefix}params/final_norm/scale"],
    "lm.final_ln.bias": ours[f"{prefix}params/final_norm/bias"],
    "lm.softmax.logits_ffn.linear.w": table.T,
    "lm.softmax.logits_ffn.bias.b": ours[f"{prefix}params/embedding/bias"],
  }


@pytest.mark.nightly
def test_training_resumes_as_if_it_had_not_moved(tmp_path, capsys):
  opened = _open(_build("ema_decay=0.9", "warmup_steps=3"))
  step = compiled_steps.compile_train_step(opened)
  state, _ = _train(opened, step, opened.initial_state(), steps=range(5))
  names = [spec.name for spec in jax.tree.leaves(opened.state_specs)]
  leaves = map(np.array, jax.tree.leaves(state))
  ours = dict(zip(names, leaves, strict=True))
  variables = _to_pax(ours, "")
  # As sharded_adam keeps them: corrected for the first steps.
  m = _to_pax(ours, "opt_state/0/mu/")
  v = _to_pax(ours, "opt_state/0/nu/")
  learner = testing.make_adam_state(
    variables,
    count=5,
    m={k: (x / (1 - B1**5)).astype("f4") for k, x in m.items()},
    v={k: (x / (1 - B2**5)).astype("f4") for k, x in v.items()},
    ema=_to_pax(ours, "average/"),
  )
  testing.write(
    tmp_path / "pax",
    testing.make_state(variables, step=5, opt_states=[learner]),
    kind="zarr",
  )
  run = tmp_path / "run"
  knobs = (*KNOBS, "ema_decay=0.9", "warmup_steps=3")
  assert _import(tmp_path / "pax", run, knobs=knobs) == 0
  output = capsys.readouterr().out
  assert "optimizer: Adam, after 5 updates" in output, output
  assert "average: EMA, after 5 updates" in output
  imported = _read(run)
  assert imported["step"] == 5
  for name, value in imported.items():
    np.testing.assert_allclose(value, ours[name], rtol=2e-7, atol=0)
  with checkpointer.Checkpointer(epath.Path(run / "checkpoints")) as opener:
    other = restore.restore_or_start(opened, opener)
  assert "it starts at its beginning" in capsys.readouterr().out
  state, expected = _train(opened, step, state, steps=range(5, 25))
  other, found = _train(opened, step, other, steps=range(5, 25))
  np.testing.assert_allclose(found, expected, rtol=1e-6)
  for a, b in zip(jax.tree.leaves(other), jax.tree.leaves(state), strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


def test_reports_unused_arrays_and_a_new_optimizer_state(tmp_path, capsys):
  extra = {"lm.ngrammer.table": np.ones((3, 2), np.float32)}
  _write_lm(tmp_path / "pax", extra=extra)
  knobs = [knob for knob in KNOBS if not knob.startswith("exact")]
  assert _import(tmp_path / "pax", tmp_path / "run", knobs=knobs) == 0
  output = capsys.readouterr().out
  assert "3 arrays of the model are not used" in output
  assert "mdl_vars.params.lm.ngrammer.table" in output
  assert "--fdl.exact=true" in output
  assert "optimizer: its state starts from zero, because" in output
  imported = _read(tmp_path / "run")
  assert not imported["opt_state/0/nu/params/embedding/table"].any()


def test_a_user_map_comes_first_and_initial_values_stay(tmp_path, capsys):
  rng = np.random.default_rng(2)
  extra = {"lm.other.rows": rng.normal(size=(32, 264)).astype("f4")}
  _write_lm(tmp_path / "pax", extra=extra)
  (tmp_path / "map.toml").write_text(
    '[variables]\n"params/embedding/table" = "lm.other.rows: D V -> V D"\n'
    '"params/embedding/bias" = ""\n'
  )
  option = f"--map={tmp_path / 'map.toml'}"
  assert _import(tmp_path / "pax", tmp_path / "run", option) == 0
  assert "initial values: params/embedding/bias" in capsys.readouterr().out
  found = _read(tmp_path / "run")
  np.testing.assert_array_equal(
    found["params/embedding/table"], extra["lm.other.rows"].T
  )
  assert not found["params/embedding/bias"].any()


def test_rejects_a_rule_that_matches_nothing(tmp_path, capsys):
  _write_lm(tmp_path / "pax")
  (tmp_path / "map.toml").write_text(
    '[variables]\n"params/final_nrom/scale" = "norm(lm.final_ln.scale)"\n'
    # Names may be copied from reports.
    '"params/final_norm/bias" = "mdl_vars.params.lm.final_ln.bias"\n'
  )
  option = f"--map={tmp_path / 'map.toml'}"
  assert _import(tmp_path / "pax", tmp_path / "run", option) == 2
  error = capsys.readouterr().err
  assert "nrom/scale' matches no variable of the experiment" in error
  assert "did you mean 'params/final_norm/scale'" in error
  assert "bias" not in error


@pytest.mark.parametrize("kind", ["file", "pax"])
def test_rejects_outputs_that_are_no_run(kind, tmp_path, capsys):
  _write_lm(tmp_path / "pax" / "checkpoints")
  run = tmp_path / kind
  if kind == "file":
    run.write_text("")
  assert _import(tmp_path / "pax", run) == 2
  assert "--to must be the directory of a run" in capsys.readouterr().err


def test_warns_if_the_name_has_another_step(tmp_path, capsys):
  _write_lm(tmp_path / "pax")
  (path,) = (tmp_path / "pax").iterdir()
  path.rename(path.with_name("checkpoint_00000099"))
  assert _import(tmp_path / "pax", tmp_path / "run", "--dry_run") == 0
  output = capsys.readouterr().out
  assert "step: 7;" in output
  assert "warning: the name of the checkpoint has step 99" in output


def test_imports_variables_into_any_optimizer(tmp_path, capsys):
  _write_lm(tmp_path / "pax", version=0.0)
  (folder,) = tmp_path.glob("pax/*/mdl_vars.params.lm.softmax*linear.w")
  # A chunk that TensorStore omits if it is zero.
  sorted(folder.iterdir())[-1].unlink()
  knobs = (*KNOBS, "ema_decay=0.9")
  options = ["--variables_only"]
  assert _import(tmp_path / "pax", tmp_path / "run", *options, knobs=knobs) == 0
  output = capsys.readouterr().out
  assert "read as zeros: mdl_vars.params.lm.softmax.logits_ffn" in output
  found = _read(tmp_path / "run")
  assert found["step"] == found["average/count"] == 0
  for name in ("params/final_norm/bias", "params/embedding/bias"):
    np.testing.assert_array_equal(found[f"average/{name}"], found[name])
    assert found[name].any()


def test_values_that_are_not_finite_are_an_error_unless_allowed(
  tmp_path, capsys
):
  others, layers = testing.make_lm()
  others["lm.final_ln.bias"][3] = np.nan
  layers[1]["ff_layer.ffn_layer2.bias.b"][0] = -np.inf
  values = others | testing.stack_layers(layers)
  testing.write(tmp_path / "pax", testing.make_state(values), kind="zarr")
  assert _import(tmp_path / "pax", tmp_path / "run") == 2
  error = capsys.readouterr().err
  assert "has values that are NaN or infinite" in error
  assert "--allow_non_finite" in error
  assert _import(tmp_path / "pax", tmp_path / "run", "--allow_non_finite") == 0
  output = capsys.readouterr().out
  (line,) = [x for x in output.splitlines() if "NaN or infinite" in x]
  assert line.startswith("warning: ")
  assert "mdl_vars.params.lm.final_ln.bias" in line
  assert "ff_layer.ffn_layer2.bias.b" in line
  assert np.isnan(_read(tmp_path / "run")["params/final_norm/bias"][3])


def test_the_scales_of_norms_are_reported(tmp_path, capsys):
  others, layers = testing.make_lm()
  del others["lm.final_ln.bias"]
  values = others | testing.stack_layers(layers)
  testing.write(tmp_path / "pax", testing.make_state(values), kind="zarr")
  (tmp_path / "map.toml").write_text(
    '[variables]\n"params/final_norm/bias" = ""\n'
  )
  options = [f"--map={tmp_path / 'map.toml'}", "--dry_run"]
  assert _import(tmp_path / "pax", tmp_path / "run", *options) == 0
  output = capsys.readouterr().out
  assert (
    "norms: 2 scales minus one, as layer norms with a bias; 1 direct scales, as"
    " RMS norms, because they have no bias (layer norms need"
    " --norm_scale=minus_one): mdl_vars.params.lm.final_ln.scale\n"
  ) in output
  options.append("--norm_scale=minus_one")
  assert _import(tmp_path / "pax", tmp_path / "run", *options) == 0
  output = capsys.readouterr().out
  assert "norms: 3 scales minus one (--norm_scale)\n" in output


@pytest.mark.parametrize(
  ("knob", "message"),
  [
    pytest.param("num_layers=3", "belongs to 3 layers.*has 2", id="layers"),
    pytest.param("vocab_size=272", r"needs?|expected \(32, 272\)", id="vocab"),
  ],
)
def test_rejects_another_size(knob, message, tmp_path, capsys):
  _write_lm(tmp_path / "pax")
  knobs = (*KNOBS, knob)
  assert _import(tmp_path / "pax", tmp_path / "run", knobs=knobs) == 2
  error = capsys.readouterr().err
  assert error.count("\n") == 1
  assert re.search(message, error), error
  assert not (tmp_path / "run" / "checkpoints").exists()


def test_rejects_a_lost_variable_and_names_the_closest(tmp_path, capsys):
  others, layers = testing.make_lm()
  values = others | testing.stack_layers(layers)
  values["lm.last_ln.scale"] = values.pop("lm.final_ln.scale")
  testing.write(tmp_path / "pax", testing.make_state(values), kind="zarr")
  assert _import(tmp_path / "pax", tmp_path / "run") == 2
  error = capsys.readouterr().err
  assert "params/final_norm/scale needs params.lm.final_ln.scale" in error
  assert "closest name is params.lm.last_ln.scale" in error


def test_writes_nothing_if_an_array_is_damaged(tmp_path, capsys):
  _write_lm(tmp_path / "pax")
  (folder,) = tmp_path.glob("pax/*/state/mdl_vars.params.lm.softmax*linear.w")
  chunk = next(x for x in folder.iterdir() if not x.name.startswith("."))
  chunk.write_bytes(chunk.read_bytes()[:20])
  assert _import(tmp_path / "pax", tmp_path / "run") == 2
  error = capsys.readouterr().err
  assert (
    "mdl_vars.params.lm.softmax.logits_ffn.linear.w cannot be read" in error
  )
  assert error.count("\n") == 1
  assert not list(tmp_path.glob("run/checkpoints/7"))
  # The next import replaces what is left.
  _write_lm(tmp_path / "sound")
  assert _import(tmp_path / "sound", tmp_path / "run") == 0
  assert _import(tmp_path / "sound", tmp_path / "run") == 2
  assert "--to must be" in capsys.readouterr().err

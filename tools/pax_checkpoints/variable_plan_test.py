"""Tests of the sources of variables, over the layouts of stacks and files."""

import json

from etils import epath
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.runner import user_error
from paxon.sharding import variables
from paxon.tools.pax_checkpoints import (
  name_map,
  pax_files,
  testing,
  variable_plan,
)

SIZES = testing.Sizes(layers=4, embed=6, heads=2, head_dim=4, mlp=10, vocab=9)
D, N, H, F, V = 6, 2, 4, 10, 9
BLOCK = "params/stack/layers/blocks_"


def _spec(name: str, *shape: int, period: int = 1) -> variables.VariableSpec:
  stacked = (("layers", period),) if "blocks_" in name else ()
  return variables.VariableSpec(
    name, shape, jnp.dtype("float32"), (None,) * len(shape), stacked=stacked
  )


def _specs(*, period: int = 1) -> list[variables.VariableSpec]:
  count = SIZES.layers // period
  shapes = {
    "attention/qkv": (D, 3, N, H),
    "attention/out": (N, H, D),
    "attention/query_scale/scale": (H,),
    "attention_norm/scale": (D,),
    "feed_forward/up": (D, F),
  }
  return [
    _spec("params/embedding/table", V, D),
    *(
      _spec(f"{BLOCK}{block}/{name}", count, *shape, period=period)
      for block in range(period)
      for name, shape in shapes.items()
    ),
  ]


def _read(path, specs, *, rules=None, direct_scale=None):
  found = pax_files.open_checkpoint(epath.Path(path))
  arrays = {
    name.removeprefix("mdl_vars."): array
    for name, array in found.arrays.items()
    if name.startswith("mdl_vars.")
  }
  plan = variable_plan.make(
    specs, arrays, rules or name_map.read(None), direct_scale=direct_scale
  )
  return {
    name: each.read(arrays, dtype=np.dtype("f4")).to_numpy()
    for name, each in plan.assignments.items()
  }


def _expected(layers, *, period: int = 1):
  found = {}
  for block in range(period):
    prefix, own = f"{BLOCK}{block}/", layers[block::period]

    def stack(name, own=own):
      return np.stack([layer[name] for layer in own])

    qkv = stack("self_attention.combined_qkv.w")
    scale = stack("layer_norm.scale").astype(np.float64)
    found |= {
      f"{prefix}attention/qkv": np.einsum("LCDNH->LDCNH", qkv),
      f"{prefix}attention/out": np.einsum(
        "LDNH->LNHD", stack("self_attention.post.w")
      ),
      f"{prefix}attention/query_scale/scale": stack(
        "self_attention.per_dim_scale.per_dim_scale"
      ),
      f"{prefix}attention_norm/scale": (1 + scale).astype("f4"),
      f"{prefix}feed_forward/up": stack("ff_layer.ffn_layer1.linear.w"),
    }
  return found


@pytest.mark.parametrize("period", [1, 2])
@pytest.mark.parametrize(
  ("where", "leading", "numbered"),
  [
    pytest.param("repeat.sub.", (4,), 1, id="repeated"),
    pytest.param("repeat.sub.", (2,), 2, id="repeated_pairs"),
    pytest.param("", (), 4, id="not_repeated"),
    pytest.param("pipeline.body.", (2,), 2, id="stages"),
    pytest.param("pipeline.body.", (2, 2), 1, id="circular"),
    pytest.param("pipeline.body.repeat.sub.", (2, 2), 1, id="stages_repeat"),
    pytest.param(
      "pipeline.body.repeat.sub.", (2, 1, 2), 1, id="circular_repeat"
    ),
  ],
)
def test_layers_of_all_stacks(where, leading, numbered, period, tmp_path):
  others, layers = testing.make_lm(SIZES)
  stacked = testing.stack_layers(
    layers, where=where, leading=leading, numbered=numbered
  )
  state = testing.make_state(others | stacked)
  testing.write(tmp_path, state, kind="zarr")
  found = _read(tmp_path, _specs(period=period))
  expected = _expected(layers, period=period)
  expected["params/embedding/table"] = others[
    "lm.softmax.logits_ffn.linear.w"
  ].T
  assert found.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_array_equal(found[name], value, name)


@pytest.mark.parametrize("kind", testing.KINDS)
@pytest.mark.parametrize("version", [0.0, 1.0, 1.1])
def test_versions_and_names_of_directories(kind, version, tmp_path):
  others, layers = testing.make_lm(SIZES)
  values = others | testing.stack_layers(layers)
  old = testing.make_state({k: 0 * v for k, v in values.items()}, step=5)
  testing.write(tmp_path / "checkpoints", old, kind=kind, version=version)
  state = testing.make_state(values, step=12)
  path = testing.write(
    tmp_path / "checkpoints", state, kind=kind, version=version, digits=True
  )
  expected = _expected(layers)[f"{BLOCK}0/attention/out"]
  for place in (tmp_path, path.parent, path):
    found = _read(place, _specs())
    np.testing.assert_array_equal(found[f"{BLOCK}0/attention/out"], expected)
  assert pax_files.open_checkpoint(epath.Path(tmp_path)).step == 12
  first = pax_files.open_checkpoint(epath.Path(tmp_path), step=5)
  assert first.version == (version or None)
  with pytest.raises(user_error.UserError, match=r"no checkpoint of step 6"):
    pax_files.open_checkpoint(epath.Path(tmp_path), step=6)


def test_one_file_of_the_oldest_version(tmp_path):
  state = testing.make_state({"lm.softmax.w": np.ones((V, D))})
  path = testing.write(tmp_path / "new", state, kind="FLAX", version=0.0)
  (tmp_path / "old").mkdir()
  (path / "checkpoint").rename(tmp_path / "old" / "checkpoint_7")
  found = _read(tmp_path / "old", _specs()[:1])
  np.testing.assert_array_equal(found["params/embedding/table"], 1)


@pytest.mark.parametrize("version", [1.0, 1.1])
def test_padding_is_removed(version, tmp_path):
  others, layers = testing.make_lm(SIZES)
  table = "mdl_vars.params.lm.softmax.logits_ffn.linear.w"
  state = testing.make_state(others | testing.stack_layers(layers))
  testing.write(
    tmp_path, state, kind="zarr", version=version, padding={table: (8, 12)}
  )
  found = _read(tmp_path, _specs())
  np.testing.assert_array_equal(
    found["params/embedding/table"],
    others["lm.softmax.logits_ffn.linear.w"].T,
  )


def test_values_beyond_the_shape_are_no_padding(tmp_path):
  larger = testing.Sizes(
    layers=4, embed=6, heads=2, head_dim=4, mlp=10, vocab=12
  )
  others, layers = testing.make_lm(larger)
  state = testing.make_state(others | testing.stack_layers(layers))
  testing.write(tmp_path / "a", state, kind="zarr", version=1.0)
  with pytest.raises(user_error.UserError, match="not zero, so it is no padd"):
    _read(tmp_path / "a", _specs())
  # The metadata tell without reading.
  testing.write(tmp_path / "b", state, kind="zarr", version=1.1)
  with pytest.raises(user_error.UserError, match=r"expected \(6, 9\)"):
    _read(tmp_path / "b", _specs())


def test_separate_projections_from_and_to_combined_ones(tmp_path):
  rng = np.random.default_rng(0)
  parts = {
    f"lm.transformer.x_layers_0.self_attention.{name}.w": rng.normal(
      size=(D, N, H)
    ).astype("f4")
    for name in ("query", "key", "value")
  }
  whole = np.stack(list(parts.values()))
  testing.write(tmp_path / "a", testing.make_state(parts), kind="zarr")
  (name, spec) = f"{BLOCK}0/attention/qkv", (1, D, 3, N, H)
  found = _read(tmp_path / "a", [_spec(name, *spec)])[name]
  np.testing.assert_array_equal(found[0], np.moveaxis(whole, 0, 1))
  # With attention_combine_dims, heads and their features are one dimension.
  combined = {
    "lm.transformer.x_layers_0.self_attention.combined_qkv.w": whole.reshape(
      3, D, N * H
    )
  }
  testing.write(tmp_path / "b", testing.make_state(combined), kind="zarr")
  name = f"{BLOCK}0/attention/value"
  found = _read(tmp_path / "b", [_spec(name, 1, D, N, H)])[name]
  np.testing.assert_array_equal(found[0], whole[2])


def test_one_key_value_head_has_no_axis_in_praxis(tmp_path):
  x = np.random.default_rng(0).normal(size=(3, D, H)).astype("f4")
  where = "lm.transformer.repeat.sub.x_layers_0.self_attention.key."
  values = {f"{where}w": x, f"{where}b": x[:, 0]}
  testing.write(tmp_path, testing.make_state(values), kind="zarr")
  key, bias = f"{BLOCK}0/attention/key", f"{BLOCK}0/attention/key_bias"
  found = _read(tmp_path, [_spec(key, 3, D, 1, H), _spec(bias, 3, 1, H)])
  np.testing.assert_array_equal(found[key], x[:, :, None])
  np.testing.assert_array_equal(found[bias], x[:, :1])


@pytest.mark.parametrize(
  ("width", "warnings"), [(N * H, 1), (N * H + 1, 0)], ids=["square", "not"]
)
def test_combined_output_has_heads_first_and_a_warning(
  width, warnings, tmp_path
):
  x = np.random.default_rng(0).normal(size=(N * H, width)).astype("f4")
  name = "lm.transformer.x_layers_0.self_attention.post.w"
  testing.write(tmp_path, testing.make_state({name: x}), kind="zarr")
  specs = [_spec(f"{BLOCK}0/attention/out", 1, N, H, width)]
  found = _read(tmp_path, specs)
  np.testing.assert_array_equal(found[specs[0].name][0], x.reshape(N, H, width))
  arrays = {
    key.removeprefix("mdl_vars."): each
    for key, each in pax_files.open_checkpoint(
      epath.Path(tmp_path)
    ).arrays.items()
  }
  plan = variable_plan.make(
    specs, arrays, name_map.read(None), direct_scale=None
  )
  assert len(plan.ambiguous) == warnings


@pytest.mark.parametrize("dtype", ["i1", "?", "c8"])
def test_rejects_values_that_are_not_floating_point(dtype, tmp_path):
  state = testing.make_state({"lm.final_ln.bias": np.ones(D, dtype)})
  testing.write(tmp_path, state, kind="zarr")
  with pytest.raises(user_error.UserError, match="needs floating-point values"):
    _read(tmp_path, [_spec("params/final_norm/bias", D)])


@pytest.mark.parametrize(
  ("has_bias", "given", "shift"),
  [(True, None, 1), (False, None, 0), (True, True, 0), (False, False, 1)],
)
def test_scales_of_norms(has_bias, given, shift, tmp_path):
  values = {"lm.final_ln.scale": np.arange(D, dtype="f4")}
  if has_bias:
    values["lm.final_ln.bias"] = np.zeros(D, "f4")
  testing.write(tmp_path, testing.make_state(values), kind="OCDBT")
  name = "params/final_norm/scale"
  found = _read(tmp_path, [_spec(name, D)], direct_scale=given)
  np.testing.assert_array_equal(found[name], np.arange(D) + shift)


def test_padding_of_two_stacks_is_ambiguous(tmp_path):
  _, layers = testing.make_lm(SIZES)
  values = testing.stack_layers(layers) | testing.stack_layers(
    layers, where="pipeline.body.", leading=(4,)
  )
  testing.write(tmp_path, testing.make_state(values), kind="zarr")
  with pytest.raises(user_error.UserError, match="has several sources"):
    _read(tmp_path, [_spec(f"{BLOCK}0/feed_forward/up", 4, D, F)])


def test_rejects_what_is_no_checkpoint(tmp_path):
  with pytest.raises(user_error.UserError, match="does not exist"):
    pax_files.open_checkpoint(epath.Path(tmp_path / "none"))
  with pytest.raises(user_error.UserError, match="has no checkpoint of Pax"):
    pax_files.open_checkpoint(epath.Path(tmp_path))
  (tmp_path / "notes.txt").write_text("")
  with pytest.raises(user_error.UserError, match="is no directory"):
    pax_files.open_checkpoint(epath.Path(tmp_path / "notes.txt"))
  (tmp_path / "12").mkdir()
  with pytest.raises(user_error.UserError, match="neither arrays of TensorSt"):
    pax_files.open_checkpoint(epath.Path(tmp_path))
  (tmp_path / "12" / "weights").mkdir()
  described = {"shape": [1], "dtype": "<f4"}
  (tmp_path / "12" / "weights" / ".zarray").write_text(json.dumps(described))
  with pytest.raises(user_error.UserError, match=r"no arrays with.*weights"):
    pax_files.open_checkpoint(epath.Path(tmp_path))


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("[other]", "must have tables"),
    ('[stacks]\n"params/stack" = 3', "must be a text, got 3"),
    ("[variables", "is not TOML"),
    ('[variables]\n"a" = 3', "must be a text or a list"),
    ('[variables]\n"a" = "b c"', "a source is NAME"),
    ('[variables]\n"a" = "{b,c}.w"', "need an axis pattern"),
    ('[variables]\n"a" = "b: D V -> W"', "must be AXES -> AXES"),
    ('[variables]\n"a/{layer}/b" = "c"', "must be in the name and in its"),
  ],
)
def test_rejects_wrong_maps(text, message, tmp_path):
  path = epath.Path(tmp_path / "map.toml")
  path.write_text(text)
  with pytest.raises(user_error.UserError, match=message):
    name_map.read(path)

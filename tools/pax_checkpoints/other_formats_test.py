"""Tests of imports from other trainers, compared with transformers."""

import itertools
import pickle
import warnings

from etils import epath
import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from paxon.layers.moe import experts, mixture, routers
from paxon.layers.positions import rotary_scaling
from paxon.runner import user_error
from paxon.runner.configuration import resolving
from paxon.runner.session import restore
from paxon.runner.session import session as session_lib
from paxon.tasks.lm import llama_lm, lm_data
from paxon.tools.checkpoints import ckpt_main
from paxon.tools.pax_checkpoints import pax_files

D, N, K, H, F, V, L, E = 32, 4, 2, 8, 48, 96, 2, 4


class Llama(lm_data.Synthetic, llama_lm.LlamaLm):
  """Two layers of Llama with grouped heads."""

  num_layers = L
  embed_dim = D
  num_heads = N
  num_kv_heads = K
  head_dim = H
  mlp_dim = F
  vocab_size = V
  length = 16
  global_batch_size = 8
  learning_rate = 1e-3
  num_train_steps = 10
  checkpoint_every_steps = 10
  eval_every_steps = 10
  summary_every_steps = 10
  warmup_steps = 1
  weight_decay = 0.1
  dtype = "float32"
  mesh = "data=1"


class Mixture(Llama):
  """Experts as in Mixtral, rotary frequencies as in Llama 3.1."""

  rotary_wavelength = 100.0

  def attention(self):
    attention = super().attention()
    attention.rotary.scaling = fdl.Config(
      rotary_scaling.Llama3Scaling, factor=4.0, original_length=32
    )
    return attention

  def feed_forward(self):
    return fdl.Config(
      mixture.MixtureOfExperts,
      num_experts=E,
      router=fdl.Config(routers.TopK, k=2),
      experts=fdl.Config(experts.GatedExperts, mlp_dim=self.mlp_dim),
    )


@pytest.fixture(name="llama", scope="module")
def _llama():
  """A Llama of transformers, and its weights as float32 arrays by name."""
  return _make_oracle("Llama")


def _make_oracle(family, **fields):
  """Returns weights by name, tokens and logits."""
  torch = pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  torch.manual_seed(0)
  config = getattr(transformers, f"{family}Config")(
    vocab_size=V,
    hidden_size=D,
    intermediate_size=F,
    num_hidden_layers=L,
    num_attention_heads=N,
    num_key_value_heads=K,
    head_dim=H,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    initializer_range=0.2,
    attn_implementation="eager",
    **fields,
  )
  model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
  with torch.no_grad():
    for name, value in model.named_parameters():
      if "norm" in name:
        value.uniform_(0.5, 1.5)
    weights = {k: v.numpy().copy() for k, v in model.named_parameters()}
    ids = np.random.default_rng(1).integers(0, V, (2, 16))
    logits = model.double()(torch.from_numpy(ids)).logits.numpy()
  return weights, ids, logits


def _make_layer(weights, i):
  """Returns a layer in the layout of MaxText."""

  def get(name):
    return weights[f"model.layers.{i}.{name}.weight"]

  def project(name, heads):
    return {"kernel": get(f"self_attn.{name}_proj").T.reshape(D, heads, H)}

  query = project("q", N)["kernel"] / np.sqrt(H)
  if f"model.layers.{i}.mlp.gate.weight" in weights:
    experts_of = f"model.layers.{i}.mlp.experts."
    gate, up = np.split(weights[f"{experts_of}gate_up_proj"], 2, axis=1)
    feed_forward = {
      "MoeBlock_0": {
        "gate": {"kernel": get("mlp.gate").T},
        "wi_0": gate.swapaxes(1, 2),
        "wi_1": up.swapaxes(1, 2),
        "wo": weights[f"{experts_of}down_proj"].swapaxes(1, 2),
      }
    }
  else:
    feed_forward = {
      "mlp": {
        "wi_0": {"kernel": get("mlp.gate_proj").T},
        "wi_1": {"kernel": get("mlp.up_proj").T},
        "wo": {"kernel": get("mlp.down_proj").T},
      }
    }
  return feed_forward | {
    "pre_self_attention_layer_norm": {"scale": get("input_layernorm")},
    "post_self_attention_layer_norm": {
      "scale": get("post_attention_layernorm")
    },
    "self_attention": {
      "query": {"kernel": query.astype("f4")},
      "key": project("k", K),
      "value": project("v", K),
      "out": {"kernel": get("self_attn.o_proj").T.reshape(N, H, D)},
    },
  }


def _stack(layers):
  if isinstance(layers[0], dict):
    return {key: _stack([x[key] for x in layers]) for key in layers[0]}
  return np.stack(layers, axis=1)


def _save(path, tree):
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as saver:
    saver.save(epath.Path(path), tree)


def _import_and_compare(source, run, llama, *options, name="Llama", atol=5e-6):
  exp = f"{Llama.__module__}.{name}"
  arguments = [str(source), f"--exp={exp}", f"--to={run}", *options]
  assert ckpt_main.main(["import-pax", *arguments]) == 0
  job = resolving.build(resolving.resolve(exp, []).config)
  _, state = restore.read_for_evaluation(
    session_lib.open_session(job, devices=jax.devices()[:1]),
    epath.Path(run) / "checkpoints",
  )
  _, ids, expected = llama
  found = job.task.model.apply(state.variables, jnp.asarray(ids))
  np.testing.assert_allclose(found, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("scanned", [True, False], ids=["scanned", "not"])
def test_maxtext(scanned, llama, tmp_path, capsys):
  weights = llama[0]
  layers = [_make_layer(weights, i) for i in range(L)]
  decoder = {
    "decoder_norm": {"scale": weights["model.norm.weight"]},
    "logits_dense": {"kernel": weights["lm_head.weight"].T},
  }
  if scanned:
    decoder["layers"] = _stack(layers)
  else:
    decoder |= {f"layers_{i}": layer for i, layer in enumerate(layers)}
  table = {"embedding": weights["model.embed_tokens.weight"]}
  state = {
    "step": np.asarray(30, np.int32),
    "params": {"params": {"decoder": decoder, "token_embedder": table}},
    "opt_state": {"count": np.asarray(30, np.int32)},
  }
  _save(tmp_path / "max" / "checkpoints" / "30" / "items", state)
  _import_and_compare(
    tmp_path / "max", tmp_path / "run", llama, "--format=maxtext"
  )
  output = capsys.readouterr().out
  assert "variables: 12 of 12" in output
  assert "step: 30;" in output
  assert "not used: opt_state.count" in output


def test_maxtext_with_experts_and_neighbours_as_pairs(tmp_path, capsys):
  """MaxText rotates neighbours in checkpoints of Llama 3.1."""
  oracle = _make_oracle(
    "Mixtral",
    num_local_experts=E,
    num_experts_per_tok=2,
    sliding_window=None,
    experts_implementation="eager",
    rope_parameters={
      "rope_type": "llama3",
      "rope_theta": 100.0,
      "factor": 4.0,
      "low_freq_factor": 1.0,
      "high_freq_factor": 4.0,
      "original_max_position_embeddings": 32,
    },
  )
  weights = oracle[0]
  layers = [_make_layer(weights, i) for i in range(L)]
  for layer in layers:
    for name in ("query", "key"):
      kernel = layer["self_attention"][name]["kernel"]
      pairs = kernel.reshape(D, -1, 2, H // 2).swapaxes(2, 3)
      layer["self_attention"][name]["kernel"] = pairs.reshape(D, -1, H)
  decoder = {
    "decoder_norm": {"scale": weights["model.norm.weight"]},
    "logits_dense": {"kernel": weights["lm_head.weight"].T},
    "layers": _stack(layers),
  }
  table = {"embedding": weights["model.embed_tokens.weight"]}
  params = {"decoder": decoder, "token_embedder": table}
  _save(tmp_path / "30" / "items", {"params": {"params": params}})
  start = "pairs(self_attention."
  (tmp_path / "map.toml").write_text(f"""
[layer]
"attention/query" = "{start}query.kernel): D N H -> D N H * sqrt(H)"
"attention/key" = "{start}key.kernel): D K H -> D K H"
""")
  options = ("--format=maxtext", f"--map={tmp_path / 'map.toml'}")
  _import_and_compare(
    tmp_path, tmp_path / "run", oracle, *options, name="Mixture", atol=1e-5
  )
  assert "variables: 13 of 13" in capsys.readouterr().out


def test_any_tree_of_orbax_with_a_map(llama, tmp_path, capsys):
  weights = llama[0]
  tree = {}
  for name, value in weights.items():
    *folders, last = name.replace("layers.", "layers_").split(".")
    node = tree
    for folder in folders:
      node = node.setdefault(folder, {})
    node[last] = value
  _save(tmp_path / "tree", tree)
  (tmp_path / "map.toml").write_text("""
[variables]
"params/embedding/table" = "model.embed_tokens.weight"
"params/head/kernel" = "lm_head.weight: V D -> D V"
"params/final_norm/scale" = "norm(model.norm.weight)"
[stacks]
"params/stack" = "model"
[layer]
"attention_norm/scale" = "norm(input_layernorm.weight)"
"attention/query" = "self_attn.q_proj.weight: (N H) D -> D N H"
"attention/key" = "self_attn.k_proj.weight: (K H) D -> D K H"
"attention/value" = "self_attn.v_proj.weight: (K H) D -> D K H"
"attention/out" = "self_attn.o_proj.weight: D (N H) -> N H D"
"feed_forward_norm/scale" = "norm(post_attention_layernorm.weight)"
"feed_forward/gate" = "mlp.gate_proj.weight: F D -> D F"
"feed_forward/up" = "mlp.up_proj.weight: F D -> D F"
"feed_forward/down" = "mlp.down_proj.weight: D F -> F D"
""")
  options = ("--format=orbax", f"--map={tmp_path / 'map.toml'}")
  _import_and_compare(tmp_path / "tree", tmp_path / "run", llama, *options)
  assert "variables: 12 of 12" in capsys.readouterr().out


def _find_shards(shape):
  """Returns offsets and sizes of shards, of unequal sizes along two axes."""
  cuts = [
    [0, size // 3, size] if size > 2 and i < 2 else [0, size]
    for i, size in enumerate(shape)
  ]
  for ranges in itertools.product(*map(itertools.pairwise, cuts)):
    yield [a for a, _ in ranges], [b - a for a, b in ranges]


def _save_dcp(path, state, *, sharded=True):
  """Writes a checkpoint with torch, as its ranks would."""
  torch = pytest.importorskip("torch")
  dcp = pytest.importorskip("torch.distributed.checkpoint")
  metadata, planner = dcp.metadata, dcp.planner

  class Planner(dcp.DefaultSavePlanner):
    def create_local_plan(self):
      items = [
        planner.WriteItem(
          index=metadata.MetadataIndex(name, offsets, i),
          type=planner.WriteItemType.SHARD,
          tensor_data=planner.TensorWriteData(
            chunk=metadata.ChunkStorageMetadata(
              torch.Size(offsets), torch.Size(sizes)
            ),
            properties=metadata.TensorProperties.create_from_tensor(x),
            size=x.size(),
          ),
        )
        for name, x in self.state_dict.items()
        for i, (offsets, sizes) in enumerate(_find_shards(x.shape))
      ]
      self.plan = planner.SavePlan(items, planner_data=self.mappings)
      return self.plan

    def resolve_data(self, item):
      chunk = item.tensor_data.chunk
      where = zip(chunk.offsets, chunk.sizes, strict=True)
      at = tuple(slice(start, start + size) for start, size in where)
      return self.state_dict[item.index.fqn][at]

  def to_torch(x):
    if isinstance(x, dict):
      return {key: to_torch(value) for key, value in x.items()}
    return torch.from_numpy(x) if isinstance(x, np.ndarray) else x

  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    dcp.save(
      to_torch(state),
      storage_writer=dcp.FileSystemWriter(path, thread_count=2),
      planner=Planner() if sharded else None,
      no_dist=True,
    )


def _to_pairs(x):
  """Returns rows of queries or keys as Meta orders them."""
  return x.reshape(-1, 2, H // 2, D).swapaxes(1, 2).reshape(-1, D)


_TORCHTITAN = {
  "model.embed_tokens": "tok_embeddings",
  "model.norm": "norm",
  "lm_head": "output",
  "model.layers": "layers",
  "self_attn.q_proj": "attention.wq",
  "self_attn.k_proj": "attention.wk",
  "self_attn.v_proj": "attention.wv",
  "self_attn.o_proj": "attention.wo",
  "mlp.gate_proj": "feed_forward.w1",
  "mlp.down_proj": "feed_forward.w2",
  "mlp.up_proj": "feed_forward.w3",
  "input_layernorm": "attention_norm",
  "post_attention_layernorm": "ffn_norm",
}


def test_torchtitan(llama, tmp_path, capsys):
  state = {}
  for name, value in llama[0].items():
    if "q_proj" in name or "k_proj" in name:
      value = _to_pairs(value)
    for ours, theirs in _TORCHTITAN.items():
      name = name.replace(ours, theirs)
    state[name] = value
    state[f"optimizer.state.{name}.exp_avg"] = value
  source = tmp_path / "checkpoint"
  _save_dcp(source / "step-30", state)
  _import_and_compare(source, tmp_path / "run", llama, "--format=dcp")
  output = capsys.readouterr().out
  assert "variables: 12 of 12" in output
  assert "step: 30;" in output
  assert "norms: 5 direct scales\n" in output
  assert "\nnot used: optimizer" in output


def test_hugging_face_names_in_a_wrapped_state(llama, tmp_path, capsys):
  model = {
    # Stored by columns, as torch does for a transposed tensor.
    name: np.asfortranarray(value) if "mlp" in name else value
    for name, value in llama[0].items()
  }
  state = {"app": {"model": model, "step": 3}}
  _save_dcp(tmp_path / "weights", state, sharded=False)
  _import_and_compare(tmp_path, tmp_path / "run", llama, "--format=dcp")
  assert "variables: 12 of 12" in capsys.readouterr().out


def _make_megatron(weights, *, stacked):
  """Returns the tensors of Megatron-Core, with a padded vocabulary."""

  def get(name):
    return weights[f"model.{name}.weight"]

  def pad(x):
    return np.concatenate([x, np.ones((32, D), np.float32)])

  state = {
    "embedding.word_embeddings.weight": pad(get("embed_tokens")),
    "decoder.final_layernorm.weight": get("norm"),
    "output_layer.weight": pad(weights["lm_head.weight"]),
  }
  layers = []
  for i in range(L):
    layer = f"layers.{i}."
    query, key, value = (
      get(f"{layer}self_attn.{name}_proj").reshape(K, -1, D) for name in "qkv"
    )
    fused = np.concatenate([query, key, value], axis=1).reshape(-1, D)
    gate, up = (get(f"{layer}mlp.{name}_proj") for name in ("gate", "up"))
    norms = ("input_layernorm", "post_attention_layernorm")
    attention, mlp = (get(f"{layer}{name}") for name in norms)
    layers.append(
      {
        "self_attention.linear_qkv.layer_norm_weight": attention,
        "self_attention.linear_qkv.weight": fused,
        "self_attention.linear_proj.weight": get(f"{layer}self_attn.o_proj"),
        "mlp.linear_fc1.layer_norm_weight": mlp,
        "mlp.linear_fc1.weight": np.concatenate([gate, up]),
        "mlp.linear_fc2.weight": get(f"{layer}mlp.down_proj"),
      }
    )
  for name in layers[0]:
    values = [layer[name] for layer in layers]
    if stacked:
      state[f"decoder.layers.{name}"] = np.stack(values)
    else:
      state |= {f"decoder.layers.{i}.{name}": x for i, x in enumerate(values)}
  return state


@pytest.mark.parametrize(
  "stacked", [True, pytest.param(False, marks=pytest.mark.nightly)]
)
def test_megatron(stacked, llama, tmp_path, capsys):
  state = _make_megatron(llama[0], stacked=stacked)
  _save_dcp(tmp_path / "iter_0000030", state)
  _import_and_compare(tmp_path, tmp_path / "run", llama, "--format=megatron")
  output = capsys.readouterr().out
  assert "variables: 12 of 12" in output
  assert "step: 30;" in output
  assert "(128, 32), of which (96, 32) are imported" in output


@pytest.mark.parametrize(
  ("option", "message"),
  [
    ("num_kv_heads=1", "uses 3,072 of its 4,096 values (num_kv_heads)"),
    ("mlp_dim=40", "needs 40 entries by first_half(...)"),
    ("num_heads=8", "needs 64 entries by query(...)"),
    ("vocab_size=200", "needs 200 entries by unpad(...)"),
    ("num_layers=3", "belongs to 3 layers, and the checkpoint has 2"),
  ],
)
def test_sizes_that_do_not_fit(option, message, llama, tmp_path, capsys):
  state = _make_megatron(llama[0], stacked=True)
  _save_dcp(tmp_path, state, sharded=False)
  exp = f"--exp={Llama.__module__}.Llama"
  to = f"--to={tmp_path / 'run'}"
  arguments = [str(tmp_path), exp, "--format=megatron", f"--fdl.{option}", to]
  assert ckpt_main.main(["import-pax", *arguments]) == 2
  assert message in capsys.readouterr().err


def test_regions_of_shards(tmp_path):
  rng = np.random.default_rng(0)
  x = rng.normal(size=(7, 10, 3)).astype(np.float32)
  _save_dcp(tmp_path / "sharded", {"x": x, "y": np.full((), 2, np.float32)})
  state = {"x": x.transpose(2, 0, 1).copy().transpose(1, 2, 0)}
  _save_dcp(tmp_path / "whole", state, sharded=False)
  for name in ("sharded", "whole"):
    path = epath.Path(tmp_path / name)
    arrays = pax_files.open_checkpoint(path, is_pax=False).arrays
    for _ in range(20):
      ends = [sorted(rng.choice(n + 1, 2, replace=False)) for n in x.shape]
      region = tuple(slice(int(a), int(b)) for a, b in ends)
      found = arrays["mdl_vars.params.x"].read(region)
      np.testing.assert_array_equal(found, x[region])
    if name == "sharded":
      assert arrays["mdl_vars.params.y"].read() == 2


class _Unknown:
  """A class that no checkpoint of torch has."""

  def __reduce__(self):
    return (print, ("executed",))


def test_damaged_checkpoints_of_torch(llama, tmp_path, capsys):
  path = epath.Path(tmp_path)
  _save_dcp(tmp_path, dict(llama[0]), sharded=False)
  arrays = pax_files.open_checkpoint(path, is_pax=False).arrays
  name = "mdl_vars.params.norm.weight"
  np.testing.assert_array_equal(
    arrays[name].read(), llama[0]["model.norm.weight"]
  )
  content = (tmp_path / "__0_0.distcp").read_bytes()
  (tmp_path / "__0_0.distcp").write_bytes(content[: len(content) // 2])
  (tmp_path / "__0_1.distcp").unlink()
  for name in ("model.norm.weight", "lm_head.weight"):
    (array,) = (x for x in arrays.values() if x.name == name)
    with pytest.raises(user_error.UserError, match=rf"{name} in .*distcp"):
      array.read()
  (tmp_path / "7").mkdir()
  (tmp_path / ".metadata").rename(tmp_path / "7" / ".metadata")
  with pytest.raises(user_error.UserError, match=r"of torch \(--format\)"):
    pax_files.open_checkpoint(path)
  (tmp_path / ".metadata").write_bytes(pickle.dumps(_Unknown()))
  with pytest.raises(user_error.UserError, match=r"class builtins\.print"):
    pax_files.open_checkpoint(path, is_pax=False)
  assert "executed" not in capsys.readouterr().out
  (tmp_path / ".metadata").write_bytes(b"")
  with pytest.raises(user_error.UserError, match="cannot be read"):
    pax_files.open_checkpoint(path, is_pax=False)

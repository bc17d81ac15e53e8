"""Tests of imports from orbax and MaxText, compared with transformers."""

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from paxon.runner.configuration import resolving
from paxon.runner.session import restore
from paxon.runner.session import session as session_lib
from paxon.tasks.lm import llama_lm, lm_data
from paxon.tools.checkpoints import ckpt_main

D, N, K, H, F, V, L = 32, 4, 2, 8, 48, 96, 2


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


@pytest.fixture(name="llama", scope="module")
def _llama():
  """A Llama of transformers, and its weights as float32 arrays by name."""
  torch = pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  torch.manual_seed(0)
  config = transformers.LlamaConfig(
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
  )
  model = transformers.LlamaForCausalLM(config).eval()
  with torch.no_grad():
    for name, value in model.named_parameters():
      if "norm" in name:
        value.uniform_(0.5, 1.5)
    ids = np.random.default_rng(1).integers(0, V, (2, 16))
    logits = model(torch.from_numpy(ids)).logits.numpy()
  weights = {k: v.detach().numpy() for k, v in model.named_parameters()}
  return weights, ids, logits


def _make_layer(weights, i):
  """Returns a layer in the layout of MaxText."""

  def get(name):
    return weights[f"model.layers.{i}.{name}.weight"]

  def project(name, heads):
    return {"kernel": get(f"self_attn.{name}_proj").T.reshape(D, heads, H)}

  query = project("q", N)["kernel"] / np.sqrt(H)
  return {
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
    "mlp": {
      "wi_0": {"kernel": get("mlp.gate_proj").T},
      "wi_1": {"kernel": get("mlp.up_proj").T},
      "wo": {"kernel": get("mlp.down_proj").T},
    },
  }


def _stack(layers):
  if isinstance(layers[0], dict):
    return {key: _stack([x[key] for x in layers]) for key in layers[0]}
  return np.stack(layers, axis=1)


def _save(path, tree):
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as saver:
    saver.save(epath.Path(path), tree)


def _import_and_compare(source, run, llama, *options):
  exp = f"{Llama.__module__}.Llama"
  arguments = [str(source), f"--exp={exp}", f"--to={run}", *options]
  assert ckpt_main.main(["import-pax", *arguments]) == 0
  job = resolving.build(resolving.resolve(exp, []).config)
  _, state = restore.read_for_evaluation(
    session_lib.open_session(job, devices=jax.devices()[:1]),
    epath.Path(run) / "checkpoints",
  )
  _, ids, expected = llama
  found = job.task.model.apply(state.variables, jnp.asarray(ids))
  np.testing.assert_allclose(found, expected, rtol=0, atol=5e-6)


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

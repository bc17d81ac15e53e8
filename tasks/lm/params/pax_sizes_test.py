"""Compares the experiments with a table of Pax's, one line for each."""

import math
import pathlib

import fiddle as fdl
import pytest

from paxon.layers import remat
from paxon.runner.configuration import find_experiment
from paxon.sharding import mesh as meshes
from paxon.tasks import golden

_TABLE = pathlib.Path(__file__).parent / "testdata" / "pax_sizes.txt"
_ROWS = [
  line.split()
  for line in _TABLE.read_text().splitlines()
  if not line.startswith("#")
]
_PACKAGE = "paxon.tasks.lm.params"
_REMAT = {
  "everything": None,
  "nothing": remat.save_nothing,
  "context": remat.save_only(remat.ATTENTION_CONTEXT, remat.ATTENTION_OUTPUT),
}


def _parameters(name: str) -> int:
  """Returns how many the golden file has, which `golden_test` derives anew."""
  text = golden.path_of(f"{_PACKAGE}.{name}").read_text()
  return int(text.rpartition("trainable: ")[2].replace(",", ""))


def _number(text: str) -> float:
  return float(text[:-1]) * {"M": 1e6, "B": 1e9}[text[-1]]


@pytest.mark.parametrize("row", _ROWS, ids=lambda row: row[0])
def test_is_pax_s(row):
  name, layers, width, heads, length, rows, vocab, dtype, *rest = row
  mesh, slices, saved, steps, parameters = rest
  job = find_experiment.find_experiment(f"{_PACKAGE}.{name}")().job()
  model = job.task.model
  (block,) = model.stack.blocks
  assert model.stack.num_layers == int(layers)
  assert model.stack.remat_policy == _REMAT[saved]
  assert model.embedding.embed_dim == int(width)
  assert model.embedding.vocab_size == int(vocab)
  assert block.feed_forward.mlp_dim == 4 * int(width)
  attention = block.attention
  assert f"{attention.num_heads}x{attention.head_dim}" == heads
  assert (attention.logit_cap, model.logit_cap) == (50.0, 30.0)
  assert attention.dtype.name == {"bf16": "bfloat16", "f32": "float32"}[dtype]
  assert job.train_input.length == int(length)
  assert job.train_input.global_batch_size == int(rows)
  if steps != "-":
    assert job.num_train_steps == int(steps)

  spec = meshes.MeshSpec.parse(job.mesh)
  size = math.prod(int(n) for n in mesh.split("x")) * int(slices)
  full = spec.resolve(size)
  names = ("data", "fsdp", "tensor")
  assert "x".join(str(full.ici[axis]) for axis in names) == mesh
  assert full.dcn["data"] == int(slices)

  assert _parameters(name) == pytest.approx(
    _number(parameters), rel=0.01 if parameters[-1] == "B" else 0.1
  )


@pytest.mark.parametrize("name", ["lm_cloud.LmCloudSpmd2B", "c4.C4SpmdAdam"])
def test_learns_as_in_pax(name):
  job = find_experiment.find_experiment(f"{_PACKAGE}.{name}")().job()
  learner = fdl.build(job.task.learner)
  optimizer = learner.optimizer
  assert learner.max_grad_norm == 5.0
  assert (optimizer.b1, optimizer.b2, optimizer.epsilon) == (0.9, 0.99, 1e-6)
  assert (optimizer.weight_decay, optimizer.max_update_rms) == (1e-3, 1.0)
  peak = 2.5e-4 if name.startswith("lm_cloud") else 1e-3
  # Linear for 4,000 steps, exponential to a tenth at step 300,000.
  halfway = (4000 + 300_000) // 2
  for step, share in ((4000, 1), (halfway, 0.1**0.5), (300_000, 0.1)):
    assert float(optimizer.schedule(step)) == pytest.approx(share * peak)
  assert float(optimizer.schedule(1999)) == pytest.approx(peak / 2, rel=1e-3)


@pytest.mark.parametrize(
  ("name", "parameters"),
  [
    # 50,304 rows where GPT-2 has 50,257: 124,439,808 + 47 * 768.
    ("gpt2.Gpt2Small124M", 124_475_904),
    ("llama.Llama2_7B", 6_738_415_616),
    ("llama.Llama3_8B", 8_030_261_248),
  ],
)
def test_has_the_published_number_of_parameters(name, parameters):
  assert _parameters(name) == parameters

"""Tests that experiments match the table of Pax's sizes."""

import functools
import math
import pathlib
import re
from typing import Any

import fiddle as fdl
import pytest

from paxon.layers import remat
from paxon.runner.configuration import find_experiment
from paxon.runner.evaluation import evaluation
from paxon.sharding import mesh as meshes
from paxon.tasks import golden
from paxon.tasks.lm import transformer_lm_spmd

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
  "attention": remat.save_only(*remat.ATTENTION),
  "projections": remat.save_projections,
  "products": remat.save_matmuls,
  "qkv_output": remat.save_only(
    *remat.ATTENTION_INPUTS, remat.ATTENTION_OUTPUT
  ),
}
_AXES = ("data", "fsdp", "tensor")
# Intended differences; docstrings explain them.
_DIFFERS: dict[str, dict[str, Any]] = {
  "c4.C4SpmdGpt3AdamOrgHP": {"vocab_size": 50_304},
  "c4.C4SpmdPipelineGpt3AdamOrgHP": {"vocab_size": 50_304},
  "c4.C4SpmdGpt3L16AdamOrgHP": {"vocab_size": 50_304},
  "c4_multislice.C4SpmdGpt3AdamDataParallel2x16x16": {"vocab_size": 50_304},
  "gpu.Synthetic175B": {"vocab_size": 50_304},
  "gpu.Pile175B": {"vocab_size": 50_304},
  "c4.C4SpmdPipelineGpt3AdamOrgHPBS1p5k768Replicas": {
    "pipeline_microbatch_size": 8,
    "vocab_size": 51_456,
  },
  **{
    f"c4.C4SpmdPipelineGpt3AdamMLPerfHPBS{name}Replicas": {"vocab_size": 51_456}
    for name in ("1p5k768", "3k768")
  },
  "c4.C4SpmdGpt3AdamOrgHPBS1p5k1536Replicas": {"vocab_size": 51_456},
  **{
    f"gpu.{name}": {"num_train_steps": 300_000}
    for name in ("BaseLLaMA", "LLaMA7B", "LLaMA13B", "LLaMA70B")
  },
}


def _load(name: str) -> Any:
  return find_experiment.find_experiment(f"{_PACKAGE}.{name}")()


@functools.cache
def _read(path: pathlib.Path) -> dict[str, str]:
  """Returns the full texts of a golden file, by class name."""
  texts: dict[str, str] = {}
  for part in ("\n" + path.read_text()).split(f"\n{golden.BEGIN}")[1:]:
    title, _, body = part.partition("\n")
    name, _, base = title.partition(golden.AS)
    lines = body.rstrip("\n").splitlines()
    if base:
      gone = {line[2:] for line in lines if line.startswith("- ")}
      come = [line[2:] for line in lines if line.startswith("+ ")]
      before = texts[base].splitlines()
      lines = [line for line in before if line not in gone] + come
    texts[name] = "\n".join(lines) + "\n"
  return texts


def _stored(name: str) -> str:
  path = golden.get_path(f"{_PACKAGE}.{name}")
  return _read(path)[name.rpartition(".")[2]]


def _parameters(name: str) -> int:
  """Returns the number of parameters in the golden file."""
  text = _stored(name)
  found = re.search(r"^trainable: ([\d,]+)$", text, re.MULTILINE)
  assert found is not None
  return int(found[1].replace(",", ""))


def _uncounted(name: str) -> int:
  """Returns parameters that the table omits: positions, separate heads."""
  text = _stored(name)
  shapes = re.findall(
    r"^params/(?:position_embedding|head)/\w+: \w+\[([\d, ]+)\]", text, re.M
  )
  return sum(math.prod(map(int, shape.split(","))) for shape in shapes)


def _expected(row: list[str]) -> dict[str, Any]:
  """Returns the knobs of a line of the table."""
  names = ("num_layers", "embed_dim", "mlp_dim", "heads", "length")
  names += ("global_batch_size", "chips", "vocab_size", "dtype")
  names += ("learning_rate", "ici", "dcn", "pipeline", "remat_policy")
  given = dict(zip(names, row[1:15], strict=True))
  given["num_train_steps"] = row[15]
  found: dict[str, Any] = {
    name: float(value) if "." in value or "e-" in value else int(value)
    for name, value in given.items()
    if name.startswith(("num_", "embed", "mlp", "len", "glob", "voc", "learn"))
    and value != "-"
  }
  if given["heads"] != "-":
    heads, width = given["heads"].split("x")
    found |= {"num_heads": int(heads), "head_dim": int(width)}
  if given["dtype"] != "-":
    found["dtype"] = {"bf16": "bfloat16", "f32": "float32"}[given["dtype"]]
  if given["remat_policy"] != "-":
    found["remat_policy"] = _REMAT[given["remat_policy"]]
  if given["pipeline"] != "-":
    stages, microbatches, around, streams = given["pipeline"].split(":")
    found["num_stages"] = int(stages)
    is_size = microbatches.startswith("size")
    key = "pipeline_microbatch_size" if is_size else "num_pipeline_microbatches"
    found[key] = int(microbatches.removeprefix("size" if is_size else "n"))
    found["circular_repeats"] = None if around == "1" else int(around)
    found["stream_io"] = True if streams == "stream" else None
  return found


@pytest.mark.parametrize("row", _ROWS, ids=lambda row: row[0])
def test_knobs_match_pax(row):
  made = _load(row[0])
  expected = _expected(row) | _DIFFERS.get(row[0], {})
  assert {name: getattr(made, name) for name in expected} == expected


@pytest.mark.parametrize("row", _ROWS, ids=lambda row: row[0])
def test_mesh_matches_pax(row):
  name, chips, ici, dcn, has_stages = row[0], row[7], *row[11:14]
  spec = meshes.MeshSpec.parse(_load(name).mesh)
  full = spec.resolve(int(chips))
  assert math.prod([*full.ici.values(), *full.dcn.values()]) == int(chips)
  if name == "optimal_scaling.OptimalScaling4x24x32":
    ici = "3x256x4"
  axes = (("stage",) if has_stages != "-" else ()) + _AXES
  for given, sizes in ((ici, full.ici), (dcn, full.dcn)):
    if given == "-":
      continue
    names = axes
    if given.count("x") == len(axes):
      names = (*axes[:-1], "expert", axes[-1])
    assert "x".join(str(sizes[axis]) for axis in names) == given


@pytest.mark.parametrize(
  "row", [r for r in _ROWS if r[-1] not in ("MoE", "-")], ids=lambda r: r[0]
)
def test_number_of_parameters_matches_table(row):
  name, layers, width, mlp, heads, vocab = *row[:5], row[8]
  number, made = row[-1], _load(name)
  found = _parameters(name) - _uncounted(name)
  unit = {"M": 1e6, "B": 1e9}[number[-1]]
  decimals = len(number[:-1].partition(".")[2])
  # Half a unit of the table's last digit, and one percent.
  table, rounding = float(number[:-1]) * unit, 0.5 * unit / 10**decimals
  assert abs(found - table) <= 0.01 * table + rounding

  # The formula of the table, without rounding: four attention kernels, the
  # feed-forward kernels and the vocabulary.
  num_heads, head_dim = (int(part) for part in heads.split("x"))
  num_kv_heads = getattr(made, "num_kv_heads", num_heads)
  attention = 2 * int(width) * head_dim * (num_heads + num_kv_heads)
  kernels = 3 if hasattr(made, "num_kv_heads") else 2
  layer = attention + kernels * int(width) * int(mlp)
  expected = int(layers) * layer + int(vocab) * int(width)
  assert found == pytest.approx(expected, rel=0.01)


def test_table_lists_all_experiments():
  modules = {row[0].partition(".")[0] for row in _ROWS}
  short = {name.removeprefix(f"{_PACKAGE}.") for name in golden.names()}
  pax_s = {name for name in short if name.partition(".")[0] in modules}
  # Pax's README launches it, but Pax does not define it.
  readme_s = {"c4.C4SpmdPipelineGpt3SmallAdam64Replicas"}
  assert {row[0] for row in _ROWS} | readme_s == pax_s


def test_experiment_of_pax_readme_has_64_chips():
  name = "c4.C4SpmdPipelineGpt3SmallAdam64Replicas"
  made, eight = _load(name), _load(name.replace("64", "8"))
  assert meshes.MeshSpec.parse(made.mesh).resolve(64)
  assert made.replace(mesh=eight.mesh).without_pipeline().job().task.model == (
    eight.without_pipeline().job().task.model
  )
  assert made.global_batch_size == eight.global_batch_size


@pytest.mark.parametrize(
  ("name", "peak"),
  [
    ("lm_cloud.LmCloudSpmd2B", 2.5e-4),
    ("c4.C4SpmdAdam", 1e-3),
    ("lm_cloud.LmCloudTransformerAdam", 1e-3),
    ("c4.LmCloudSpmdAdam", 1e-3),
  ],
)
def test_learns_as_in_pax(name, peak):
  learner = fdl.build(_load(name).job().task.learner)
  optimizer = learner.optimizer
  assert learner.max_grad_norm == 5.0
  assert (optimizer.b1, optimizer.b2, optimizer.epsilon) == (0.9, 0.99, 1e-6)
  assert (optimizer.weight_decay, optimizer.max_update_rms) == (1e-3, 1.0)
  # Linear for 4,000 steps, exponential to a tenth at step 300,000.
  halfway = (4000 + 300_000) // 2
  for step, share in ((4000, 1), (halfway, 0.1**0.5), (300_000, 0.1)):
    assert float(optimizer.schedule(step)) == pytest.approx(share * peak)
  assert float(optimizer.schedule(1999)) == pytest.approx(peak / 2, rel=1e-3)


@pytest.mark.parametrize(
  ("name", "peak", "warmup", "end"),
  [
    ("c4.C4SpmdGpt3L16AdamOrgHP", 6e-5, 265, 108_600),
    # MLPerf's rule: 2e-5 up to 3,584 sequences, and a fixed total of sequences.
    ("c4.C4SpmdPipelineGpt3AdamMLPerfHPBS2k512Replicas", 2e-5, 199, 81_450),
    ("c4.C4SpmdPipelineGpt3AdamMLPerfHPBS8k1024Replicas", 3e-5, 50, 20_363),
    ("gpu.Synthetic126M", 6e-4, 636, 500_000),
    ("gpu.Pile5B", 1.6e-4, 115, 62_500),
    ("nvidia.NVIDIA1_3B", 6e-4, 0, 500_000),
  ],
)
def test_cosine_schedule_matches_pax(name, peak, warmup, end):
  made = _load(name).without_pipeline()
  learner = fdl.build(made.job().task.learner)
  optimizer = learner.optimizer
  assert (optimizer.b1, optimizer.b2, optimizer.epsilon) == (0.9, 0.95, 1e-8)
  assert learner.max_grad_norm == 1.0
  halfway = (warmup + end) / 2
  for step, share in ((warmup, 1.0), (halfway, 0.55), (end, 0.1)):
    assert float(optimizer.schedule(step)) == pytest.approx(
      share * peak, rel=1e-3
    )


def test_gpt3_is_gpt3():
  made = _load("c4.C4SpmdGpt3L16AdamOrgHP")
  model = made.job().task.model
  (block,) = model.stack.blocks
  assert (block.attention.logits.cap, model.logit_cap) == (None, None)
  assert block.attention.projections.use_bias
  assert block.attention_norm.epsilon == model.final_norm.epsilon == 1e-5
  assert model.position_embedding.max_length == 16_384
  assert model.embedding.embedding_init.stddev == 0.006
  assert made.job().early_stopping is None  # There is no evaluation.
  # The loss per byte is below the target from the start.
  files = {"train_files": "a", "validation_files": "b"}
  assert made.replace(**files).job().early_stopping is None
  files = {"c4_folder": "a", "vocabulary_file": "b"}
  assert made.replace(**files).shrink().target_log_pplx is None
  stopping = fdl.build(made.replace(**files).job().early_stopping)
  assert evaluation.reason_to_stop(stopping, {100: 2.7, 200: 2.69}).startswith(
    "validation/log_pplx is 2.69 at step 200"
  )
  assert evaluation.reason_to_stop(stopping, {100: 2.7, 200: 2.70}) is None
  assert _load("gpu.Pile5B").job().task.model.embedding_dropout.rate == 0.1


@pytest.mark.parametrize(
  ("knobs", "message"),
  [
    ({"c4_folder": "a"}, r"belong together: .* got 'a' and None"),
    ({"vocabulary_file": "b"}, r"belong together: .* got None and 'b'"),
    ({"index_folder": "c"}, r"index_folder requires c4_folder, .* got 'c'"),
  ],
)
def test_c4_knobs_require_each_other(knobs, message):
  with pytest.raises(ValueError, match=message):
    _load("c4.C4SpmdGpt3L16AdamOrgHP").replace(**knobs).job()


def test_named_policies_match_table():
  assert _REMAT["attention"] == transformer_lm_spmd.SAVE_ATTENTION
  assert _REMAT["context"] == transformer_lm_spmd.SAVE_CONTEXT_AND_OUTPUT


@pytest.mark.parametrize(
  ("name", "parameters"),
  [
    # 50,304 tokens instead of GPT-2's 50,257: 124,439,808 + 47 * 768.
    ("gpt2.Gpt2Small124M", 124_475_904),
    ("llama.Llama2_7B", 6_738_415_616),
    ("llama.Llama3_8B", 8_030_261_248),
    # Tables of 4,096 and 1,024 tokens, eight layers and their biases.
    ("lm_cloud.LargeMlp", 4096**2 + 2 * 4096 * 7168 + 6 * 7168**2 + 54_272),
    ("lm_cloud.SmallMlp", 9 * 1024**2 + 8 * 1024),
  ],
)
def test_has_the_published_number_of_parameters(name, parameters):
  assert _parameters(name) == parameters

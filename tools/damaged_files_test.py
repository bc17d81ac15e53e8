"""Damaged files of every format that is read: one clear error, or a result.

Each format has a small valid file. Damages (`file_damages`) are drawn with
fixed seeds. A reader may return, because not each byte is covered by a
checksum; otherwise it must raise an error that the command line prints as one
line, and that names the file. A larger search:

  PAXON_DAMAGES=1500 bazel test //tools:damaged_files_test \
      --test_env=PAXON_DAMAGES
"""

import base64
from collections.abc import Callable
import dataclasses
import gzip
import json
import os
import pathlib
import random
import resource
import time
from typing import Any

from etils import epath
import jax
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
from tokenizers import models, pre_tokenizers

from paxon.inputs.sources import (
  grain_sources,
  json_lines,
  record_columns,
  token_file,
  token_file_writer,
)
from paxon.inputs.tf_records import tf_example, tf_record_files
from paxon.inputs.tokenizers import chats, load, rank_file
from paxon.layers.models.hugging_face import families
from paxon.layers.models.hugging_face.files import (
  safetensors_file,
  weight_files,
)
from paxon.layers.models.hugging_face.golden_models import golden_case
from paxon.runner import user_error
from paxon.runner.checkpoints import checkpointer, golden, stored_checkpoint
from paxon.runner.generation import decode_requests
from paxon.runner.monitoring import goodput, metrics_file
from paxon.runner.session import run_files
from paxon.tools import file_damages
from paxon.tools.hugging_face import hf_files

_MORE = os.environ.get("PAXON_DAMAGES")
_NUM_DAMAGES = int(_MORE or 200)
_MAX_SECONDS = 10
_MAX_BYTES = 1 << 30
# What the command line turns into a line and status 2.
_ERRORS = (
  *(user_error.UserError, ValueError, OSError),
  checkpointer.DamagedCheckpointError,
)


@dataclasses.dataclass(frozen=True)
class _Format:
  """A format of files.

  Attributes:
    name: Name of the damaged file in a folder.
    make: Writes the valid file, and others that it needs, into a folder.
    read: Reads everything from the folder.
    shown: What an error must contain; the name of the file by default.
  """

  name: str
  make: Callable[[pathlib.Path], None]
  read: Callable[[pathlib.Path], Any]
  shown: str | None = None


def _documents():
  return [f"document {i} 🦊 has {'text ' * i}" for i in range(9)]


def _make_safetensors(folder):
  tensors = {
    "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": np.arange(5, dtype=np.int64),
  }
  safetensors.numpy.save_file(tensors, folder / "x.safetensors")


def _read_safetensors(folder):
  path = epath.Path(folder / "x.safetensors")
  for entry in safetensors_file.read_header(path).values():
    if entry.shape:
      safetensors_file.read_rows(path, entry, 0, entry.shape[0])


_CASE = "llama3"


def _make_weights(folder):
  case = golden_case.read(_CASE)
  config = case.config
  names = families.find(config).names(config)
  tensors = {
    tensor.name: np.zeros(tensor.shape, np.float32)
    for leaf in names.leaves.values()
    for tensor, _ in leaf.sources
  }
  safetensors.numpy.save_file(tensors, folder / "model-1.safetensors")
  weight_map = dict.fromkeys(tensors, "model-1.safetensors")
  index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
  (folder / "model.safetensors.index.json").write_text(json.dumps(index))
  (folder / "config.json").write_text(json.dumps(config))


def _read_weights(folder):
  config = golden_case.read(_CASE).config
  names = families.find(config).names(config)
  weight_files.find(epath.Path(folder), names=names).check()


def _make_config(name):
  text = json.dumps(golden_case.read(name).config)
  return lambda folder: (folder / "config.json").write_text(text)


def _read_config(folder):
  config = hf_files.read_config(epath.Path(folder))
  family = families.find(config)
  family.model(config)
  family.names(config)


def _make_tokens(folder):
  rng = np.random.default_rng(0)
  ids = [rng.integers(0, 500, size=n).astype(np.uint16) for n in (3, 9, 1, 30)]
  path = str(folder / "t")
  token_file_writer.write(
    path, ids, dtype=np.dtype(np.uint16), facts={"vocab_size": 500}
  )


def _read_tokens(folder):
  source = token_file.TokenFile(path=str(folder / "t"))
  source.check()
  for i in range(len(source)):
    source[i]


def _lines():
  return "".join(json.dumps({"text": d}) + "\n" for d in _documents()).encode()


def _read_all(source):
  for i in range(len(source)):
    source[i]


def _read_json_lines(name):
  return lambda folder: _read_all(
    json_lines.JsonLines(files=str(folder / name))
  )


def _make_records(folder):
  tf_record_files.write(
    folder / "x.tfrecord",
    [
      tf_example.serialize({"text": np.asarray([d.encode()], object)})
      for d in _documents()
    ],
  )


def _read_records(folder):
  files = tf_record_files.TfRecordFiles(files=str(folder / "x.tfrecord"))
  _read_all(tf_example.TfExampleRecords(files=files))


def _make_parquet(folder):
  arrow = pytest.importorskip("pyarrow")
  parquet = pytest.importorskip("pyarrow.parquet")
  table = arrow.table({"text": _documents()})
  parquet.write_table(table, folder / "x.parquet", row_group_size=4)


def _read_parquet(folder):
  rows = grain_sources.ParquetRows(files=str(folder / "x.parquet"))
  _read_all(record_columns.TextColumn(rows=rows))


def _make_tokenizer(folder):
  vocab = {chr(i): i for i in range(33, 127)}
  library = tokenizers.Tokenizer(
    models.BPE(vocab=vocab, merges=[("a", "b")][:0])
  )
  library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  library.add_special_tokens(["<s>", "</s>"])
  library.save(str(folder / "tokenizer.json"))
  names = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
  }
  (folder / "tokenizer_config.json").write_text(json.dumps(names))


def _read_tokenizer(folder):
  tokenizer = load.load(str(folder))
  ids = tokenizer.encode("a b")
  tokenizer.decode(ids)
  tokenizer.byte_counts(ids)
  _ = tokenizer.end_id


def _make_ranks(folder):
  lines = [f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(256)]
  (folder / "x.tiktoken").write_text("".join(lines))


def _read_ranks(folder):
  tokenizer = rank_file.RankFile(
    path=str(folder / "x.tiktoken"),
    pattern=r"\w+|\W",
    special_tokens={"<|end|>": 300},
    end="<|end|>",
  )
  tokenizer.decode(tokenizer.encode("a b"))


_ATTEMPT = goodput.Attempt(
  begin=1.0,
  end=2.0,
  first_step=0,
  last_step=3,
  finished=False,
  seconds={goodput.Cause.PRODUCTIVE.value: 1.0},
)
_RECORDS = '{"step": 3, "split": "train", "loss": 1.5, "accuracy": "NaN"}\n'


def _write(name, text):
  return lambda folder: (folder / name).write_text(text)


_CHAT = json.dumps(
  {
    "messages": [
      {"role": "user", "content": "hi"},
      {"role": "assistant", "content": "ho"},
    ]
  }
)
_REQUEST = json.dumps(
  {"prompt": "x", "reference": ["y"], "settings": {"temperature": 0.5}}
)


def _read_requests(folder):
  path = epath.Path(folder / "r.jsonl")
  limits = decode_requests.Limits(
    chat=False, has_settings=True, max_new_tokens=8
  )
  list(decode_requests.parse(path.read_bytes(), path, limits))


def _read_checkpoint(folder):
  path, specs = epath.Path(folder), golden.specs()
  device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  shardings = jax.tree.map(lambda _: device, specs)
  stored = stored_checkpoint.find_checkpoint(path, step=golden.STEP)
  stored_checkpoint.verify(stored)
  stored_checkpoint.read_numpy(stored, stored.arrays)
  with checkpointer.Checkpointer(path, read_only=True) as checkpoints:
    checkpoints.restore(
      golden.STEP, specs=specs, shardings=shardings, stored_dtypes=True
    )


_CHECKPOINT_FILES = (
  *("metadata/metadata", "data/metadata", "manifest/files.json"),
  *("state/_METADATA", "state/manifest.ocdbt", "_CHECKPOINT_METADATA"),
)
_FAMILIES = ("llama3", "gemma3", "deepseek_v3", "gpt_oss", "t5", "gpt2", "bert")
_FORMATS = {
  "safetensors": _Format("x.safetensors", _make_safetensors, _read_safetensors),
  "weight index": _Format(
    "model.safetensors.index.json", _make_weights, _read_weights
  ),
  "token index": _Format("t.idx", _make_tokens, _read_tokens),
  "token facts": _Format("t.json", _make_tokens, _read_tokens),
  "JSON lines": _Format(
    "x.jsonl",
    lambda folder: (folder / "x.jsonl").write_bytes(_lines()),
    _read_json_lines("x.jsonl"),
  ),
  "JSON lines, gzip": _Format(
    "x.jsonl.gz",
    lambda folder: (folder / "x.jsonl.gz").write_bytes(gzip.compress(_lines())),
    _read_json_lines("x.jsonl.gz"),
  ),
  "TFRecord": _Format("x.tfrecord", _make_records, _read_records),
  "Parquet": _Format("x.parquet", _make_parquet, _read_parquet),
  "tokenizer.json": _Format("tokenizer.json", _make_tokenizer, _read_tokenizer),
  "tokenizer_config.json": _Format(
    "tokenizer_config.json", _make_tokenizer, _read_tokenizer
  ),
  "rank file": _Format("x.tiktoken", _make_ranks, _read_ranks),
  "metrics": _Format(
    "metrics.jsonl",
    _write("metrics.jsonl", _RECORDS * 3),
    lambda folder: metrics_file.read(folder / "metrics.jsonl"),
  ),
  "settings": _Format(
    "settings.json",
    _write(
      "settings.json",
      json.dumps({"experiment": "a.B", "overrides": ["--fdl.x=3"]}),
    ),
    lambda folder: run_files.read_settings(epath.Path(folder)),
  ),
  "goodput": _Format(
    "goodput.jsonl",
    _write("goodput.jsonl", goodput.to_text([_ATTEMPT] * 2)),
    lambda folder: goodput.account(goodput.read(folder / "goodput.jsonl")),
  ),
  "chats": _Format(
    "c.jsonl",
    _write("c.jsonl", f"{_CHAT}\n" * 3),
    lambda folder: _read_all(chats.ChatLines(files=str(folder / "c.jsonl"))),
  ),
  **{
    f"config.json of {name}": _Format(
      "config.json", _make_config(name), _read_config
    )
    for name in _FAMILIES
  },
  **{
    f"checkpoint, {name}": _Format(
      f"{golden.STEP}/{name}",
      lambda folder: golden.write(epath.Path(folder)),
      _read_checkpoint,
      shown=f"/{golden.STEP}",
    )
    for name in _CHECKPOINT_FILES
  },
  "requests": _Format(
    "r.jsonl", _write("r.jsonl", f"{_REQUEST}\n" * 3), _read_requests
  ),
}


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("name", _FORMATS)
def test_damaged(name, tmp_path):
  kind = _FORMATS[name]
  kind.make(tmp_path)
  kind.read(tmp_path)
  path = tmp_path / kind.name
  valid = path.read_bytes()
  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  wrong = []
  for seed in range(_NUM_DAMAGES):
    path.write_bytes(
      file_damages.damage(valid, random.Random(f"{name} {seed}"))
    )
    start = time.process_time()
    try:
      kind.read(tmp_path)
    except _ERRORS as error:
      text = user_error.one_line(error)
      names = (kind.shown,) if kind.shown else (kind.name, path.stem)
      if not any(name in text for name in names):
        wrong.append((seed, f"does not name the file: {error!r}"[:300]))
    except Exception as error:
      wrong.append((seed, f"{error!r}"[:300]))
    if time.process_time() - start > _MAX_SECONDS:
      wrong.append((seed, "took too long"))
  after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  assert not wrong, "\n".join(map(str, wrong))
  assert (after - before) * 1024 < _MAX_BYTES

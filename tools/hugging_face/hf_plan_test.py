"""Plans of models of Hugging Face, from their config.json."""

import dataclasses
import json
import re
import shlex

import pytest

from paxon.runner.configuration import overrides, resolving
from paxon.runner.plan import result, sample_plan
from paxon.runner.planning import search
from paxon.tools.hugging_face import hf_plan

_GIB = 2**30
_CONFIG = {
  "architectures": ["LlamaForCausalLM"],
  "model_type": "llama",
  "vocab_size": 1024,
  "hidden_size": 256,
  "intermediate_size": 512,
  "num_hidden_layers": 2,
  "num_attention_heads": 2,
  "num_key_value_heads": 1,
  "max_position_embeddings": 2048,
  "rms_norm_eps": 1e-5,
  "tie_word_embeddings": False,
}
# Embedding and head, then for each layer attention with keys and values of one
# head, three matrices of the feed-forward layer, two norms; the last norm.
_PARAMETERS = (
  2 * 1024 * 256
  + 2 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 512 + 2 * 256)
  + 256
)


@pytest.fixture(name="file")
def _config_file(tmp_path, monkeypatch):
  monkeypatch.setenv("PAXON_CACHE_DIR", str(tmp_path / "cache"))
  path = tmp_path / "config.json"
  path.write_text(json.dumps(_CONFIG))
  return path


def test_a_batch_has_about_four_million_tokens():
  # 8 x 64 x 8,192 tokens.
  assert hf_plan.choose_batch(8192, 64) == 512
  # 4 Mi / (2,048 x 24) is 85.3.
  assert hf_plan.choose_batch(2048, 24) == 24 * 85
  # Each device has a sequence.
  assert hf_plan.choose_batch(131072, 1024) == 1024


@pytest.mark.parametrize(
  ("vocabulary", "length", "sequences", "chunk"),
  [
    # 2,048 positions of 128,256 logits are 0.98 GiB.
    (128256, 8192, 1.0, 2048),
    (128256, 8192, 8.0, 256),
    (32000, 8192, 0.5, 8192),
    (1024, 512, 1.0, 512),
  ],
)
def test_the_logits_of_a_chunk_take_at_most_a_gibibyte(
  vocabulary, length, sequences, chunk
):
  found = hf_plan.choose_loss_chunk(
    {"vocab_size": vocabulary}, length=length, sequences=sequences
  )
  assert found == chunk
  assert 4 * vocabulary * found * max(sequences, 1) <= _GIB


def test_answers_come_in_the_order_of_the_questions():
  bound = sample_plan.plan().bound
  assert bound is not None
  step = result.DecodeStep(
    batch=64,
    length=8192,
    parameters=2 * _GIB,
    cache=3 * _GIB,
    fit="fits",
    bound=dataclasses.replace(bound, step=0.02),
  )
  plan = dataclasses.replace(
    sample_plan.plan(), num_parameters=8_030_261_248, decode_steps=(step,)
  )
  found = dict(
    hf_plan.describe(plan, state=90 * _GIB, num_hosts=9, rate=2.0 * _GIB)
  )
  assert list(found) == [
    *("model", "verdict", "step", "layout", "training", "checkpoint"),
    *("data", "serving"),
  ]
  assert found["model"] == "8.03 B parameters"
  assert found["verdict"].endswith("72.00 GiB of 118.00 GiB per device")
  assert found["step"].startswith("900 ms (720 ms to 1.12 s), 72,816 tokens/s")
  # A ninth of it at 2 GiB/s.
  assert found["checkpoint"].startswith("90.00 GiB, 10.00 GiB per host: 5.00 s")
  # Four bytes of each token.
  assert found["data"].startswith("0.29 MB/s")
  assert "at most 3,200 tokens/s" in found["serving"]


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--target=h200:1x3"], r"a host has 1, 2, 4 or 8 GPUs"),
    (["--target=cpu:8"], r"neither the memory nor the rates of cpu:8"),
    (["--target=h200:1x8", "--batch=12"], r"--batch=12 must divide the 8 devi"),
    (["--target=h200:1x8", "--batch=0"], r"--batch: 0 must be a positive int"),
    (["--target=h200:1x8", "--price=2"], r"--price requires --tokens"),
    (["--target=h200:1x8", "--serve=8"], r"--serve=8 must be .* pairs"),
    (["--target=h200:1x8", "--rate=-1"], r"--rate: -1 must be a positive n"),
    (["--target=h200:1x8", "--length=0"], r"--length: 0 must be a positive i"),
  ],
)
def test_wrong_flags_name_the_flag(file, capsys, arguments, message):
  assert hf_plan.main([str(file), *arguments]) == 2
  error = capsys.readouterr().err
  assert re.search(message, error), error
  assert error.count("\n") == 1


@pytest.mark.parametrize(
  ("text", "message"),
  [
    (None, "must be a config.json of Hugging Face"),
    ("{", "must be a config.json of Hugging Face"),
    ("[]", "has no 'model_type'"),
    ('{"model_type": "no_such"}', "no_such"),
    ('{"model_type": "gpt2", "vocab_size": "x"}', "vocab_size 'x' must be an"),
  ],
)
def test_wrong_files_are_named(file, capsys, text, message):
  if text is None:
    file.unlink()
  else:
    file.write_text(text)
  assert hf_plan.main([str(file), "--target=h200:1x1"]) == 2
  assert message in capsys.readouterr().err


def test_a_sequence_is_as_long_as_the_positions():
  assert hf_plan.choose_length({"max_position_embeddings": 131072}) == 8192
  assert hf_plan.choose_length({"n_positions": 64}) == 64
  # GPT-2's default.
  assert hf_plan.choose_length({}) == 1024


def test_a_sequence_longer_than_the_positions_is_one_line(file, capsys):
  file.write_text('{"model_type": "gpt2", "n_positions": 64, "n_layer": 1}')
  arguments = [str(file), "--target=h200:1x1", "--length=128"]
  assert hf_plan.main(arguments) == 2
  error = capsys.readouterr().err
  assert "with length 128 is not a model that can be planned" in error
  assert error.count("\n") == 1


@pytest.mark.nightly
def test_the_first_answer_fits_and_its_command_is_valid(
  file, capsys, tmp_path, monkeypatch
):
  # Each program is compiled for 10 s or more.
  monkeypatch.setattr(search, "_EXPLORE_COMPILES", 2)
  arguments = [
    *("--target=h200:1x1", "--tokens=1e9", "--price=2"),
    *("--batch=64", f"--to={tmp_path / 'to'}"),
  ]
  assert hf_plan.main([str(file.parent), *arguments]) == 0
  text = capsys.readouterr().out
  assert re.search(r"\n  verdict +fits: ", text)
  assert re.search(r"\n  model +0\.00 B parameters\n", text)
  # Parameters and two moments of Adam, in float32, and a few counters.
  size = 3 * 4 * _PARAMETERS / 2**20
  assert f"  checkpoint  {size:.2f} MiB" in text
  (plan,) = result.from_json((tmp_path / "to" / "plan.json").read_text())
  assert plan.num_parameters == _PARAMETERS
  command = text[text.index("\n  paxon ") :].split("\n\n")[0]
  flags = shlex.split(command.replace("\\\n", " "))
  parsed = [
    overrides.parse_argument(flag)
    for flag in flags
    if flag.startswith("--fdl.") and "=runs/" not in flag and "=..." not in flag
  ]
  job = resolving.resolve("tasks.lm.params.hugging_face.HuggingFaceLm", parsed)
  assert job.config.train_input.global_batch_size == 64

"""Cost of training a Hugging Face model, from its config.json alone.

  paxon-plan hf CONFIG.json --target=h200:8x8 --tokens=1e12 --price=2.5

chooses the mesh, the rematerialization policy, the attention kernel and the
microbatches by compiling for the target, and prints memory, time, money, the
size of a checkpoint and the rate of the data. `--serve=64x8192` adds the
decoding of 64 sequences with caches of 8,192 tokens. Nothing is trained, and no
weights are needed.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
import contextlib
import json
import math
import os
import pathlib
import shlex
import sys
import tempfile
from typing import Any, Final

from etils import epath
import jax

from paxon.runner import files, units, user_error
from paxon.runner.configuration import overrides as overrides_lib
from paxon.runner.plan import plan_page, report, result
from paxon.runner.plan import target as targets
from paxon.runner.planning import (
  plan_cache,
  plan_program,
  questions,
  search_space,
)
from paxon.runner.planning import subject as subject_lib
from paxon.tools import command_line

_EXPERIMENT: Final = "tasks.lm.params.hugging_face.HuggingFaceLm"
# Of the experiment: folder of the files of Hugging Face in an imported run.
_FOLDER: Final = "hugging_face"
# Tokens of a step if the batch is not given, as models of this size use.
_TOKENS_PER_STEP: Final = 4 * 2**20
_LENGTH: Final = 8192
# Where a config.json has no number of positions, as GPT-2's may.
_DEFAULT_LENGTH: Final = 1024
# Bytes of the logits of a chunk of the loss.
_LOGITS: Final = 2**30
# Tokenized data are integers of 32 bits.
_TOKEN_BYTES: Final = 4
_GB: Final = 1e9


def main(argv: Sequence[str]) -> int:
  """Plans, prints the answer and the report; returns the exit status."""
  return command_line.catch_user_errors(lambda: _run(list(argv)))


def _run(argv: list[str]) -> int:
  arguments = _parse(argv)
  target = _parse_target(arguments.target)
  asked = _parse_questions(arguments)
  config = _read(arguments.config)
  text = config.get("text_config")
  text = text if isinstance(text, dict) else config
  length = arguments.length or choose_length(text)
  batch = arguments.batch or choose_batch(length, target.num_devices)
  if batch % target.num_devices and target.num_devices % batch:
    raise user_error.UserError(
      f"--batch={batch} must divide the {target.num_devices} devices of"
      f" {target}, or be a multiple of them."
    )
  with _store(config) as weights:
    flags = {
      "weights": weights,
      "dtype": "bfloat16",
      "length": length,
      "global_batch_size": batch,
      "mesh": _choose_mesh(target),
      "loss_chunk_length": choose_loss_chunk(
        text, length=length, sequences=batch / target.num_devices
      ),
    }
    given = [overrides_lib.Override(k, str(v)) for k, v in flags.items()]
    try:
      subject = subject_lib.resolve(_EXPERIMENT, given, target)
    except (ValueError, TypeError, KeyError) as error:
      raise user_error.UserError(
        f"CONFIG {arguments.config} with length {length} is not a model that"
        f" can be planned: {user_error.one_line(error)}"
      ) from error
    plan = plan_program.plan_best(subject, asked)
    state = search_space.Space(subject, work=None).layouts.whole_state_bytes()
  answers = describe(
    plan, state=state, num_hosts=_count_hosts(target), rate=arguments.rate
  )
  print(f"\n{arguments.config} on {target}")
  for name, text in answers:
    print(f"  {name:<11} {text}")
  print(
    f"\nTo train, after `paxon-hf import DIR --to runs/init`:\n  {_join(plan)}"
  )
  print(f"\n{report.to_text(plan)}")
  if arguments.to is not None:
    folder = epath.Path(arguments.to)
    folder.mkdir(parents=True, exist_ok=True)
    files.write_text(folder / plan_program.PLAN, result.to_json((plan,)))
    files.write_text(folder / plan_program.PAGE, plan_page.to_html([plan], []))
  fits = plan.memory.fit is not result.Fit.DOES_NOT_FIT
  return 0 if fits else 1


def describe(
  plan: result.Plan, *, state: int, num_hosts: int, rate: float
) -> Iterator[tuple[str, str]]:
  """Yields the answers in the order in which they are asked, with names.

  Args:
    plan: The plan of the chosen layout.
    state: Bytes of a checkpoint.
    num_hosts: Hosts that write it.
    rate: Bytes that a host writes or reads in a second.
  """
  memory, estimate = plan.memory, plan.estimate
  if plan.num_parameters is not None:
    yield "model", f"{plan.num_parameters / 1e9:,.2f} B parameters"
  peak = "unknown" if memory.peak is None else units.size(memory.peak)
  yield "verdict", f"{plan.fit}: {peak} of {_size(memory.usable)} per device"
  if estimate is not None:
    yield (
      "step",
      f"{units.seconds(estimate.step)} ({_range(estimate)}),"
      f" {estimate.tokens_per_second or 0:,.0f} tokens/s,"
      f" MFU {units.share(estimate.mfu)}",
    )
  elif plan.bound is not None:
    yield "step", f"at least {units.seconds(plan.bound.step)}"
  mesh = ", ".join(f"{axis}={n}" for axis, n in plan.mesh.items())
  yield "layout", f"{mesh or 'one device'}, batch {_batch(plan)}"
  cost = plan.training_cost
  if cost is not None:
    least = "at least " if cost.is_lower_bound else ""
    money = "" if cost.money is None else f", price {cost.money:,.0f}"
    yield (
      "training",
      f"{cost.tokens:,.3g} tokens: {least}{cost.days:,.1f} days,"
      f" {cost.device_hours:,.0f} device-hours{money}",
    )
  share = state / num_hosts
  yield (
    "checkpoint",
    f"{units.size(state)}, {units.size(share)} per host:"
    f" {units.seconds(share / rate)} to save or restore at {rate / _GB:g} GB/s"
    " per host",
  )
  if estimate is not None and estimate.tokens_per_second:
    bytes_per_second = _TOKEN_BYTES * estimate.tokens_per_second
    yield (
      "data",
      f"{bytes_per_second / 1e6:,.2f} MB/s of tokenized data on all hosts",
    )
  for step in plan.decode_steps:
    best = "-" if step.bound is None else f"{step.batch / step.bound.step:,.0f}"
    yield (
      "serving",
      f"{step.batch:,} x {step.length:,}: {step.fit}, parameters"
      f" {_size(step.parameters)} and cache {_size(step.cache)} per device, at"
      f" most {best} tokens/s",
    )


def choose_batch(length: int, num_devices: int) -> int:
  """Returns a number of sequences with about 4 M tokens, of all devices.

  Args:
    length: Of a sequence.
    num_devices: Each has at least one sequence.
  """
  return num_devices * max(1, _TOKENS_PER_STEP // (length * num_devices))


def choose_loss_chunk(
  config: Mapping[str, Any], *, length: int, sequences: float
) -> int:
  """Returns the number of positions per loss chunk: 1 GiB of logits.

  Args:
    config: The `config.json`.
    length: Of a sequence.
    sequences: Of one device.
  """
  vocabulary = config.get("vocab_size") or 1
  if not isinstance(vocabulary, int):
    raise user_error.UserError(
      f"CONFIG: vocab_size {vocabulary!r} must be an integer."
    )
  most = _LOGITS / (4 * vocabulary * max(sequences, 1.0))
  return min(length, 2 ** max(0, math.floor(math.log2(max(most, 1.0)))))


def _parse(argv: list[str]) -> Any:
  parser = command_line.Parser(
    "hf", "Plans the training of a Hugging Face model.", program="paxon-plan"
  )
  parser.add_argument("config", metavar="CONFIG", help="config.json, or folder")
  parser.add_argument(
    "--target", required=True, help="hardware, such as h200:8x8 or v5e:16x16"
  )
  parser.add_argument("--tokens", help="tokens to train on, such as 1e12")
  parser.add_argument("--price", help="price of a device-hour")
  parser.add_argument(
    "--batch",
    type=_positive_or_auto,
    help="sequences of a step; default: auto, about 4 M tokens",
  )
  parser.add_argument(
    "--length",
    type=_positive,
    help="tokens of a sequence; default: the model's, at most 8,192",
  )
  parser.add_argument(
    "--serve", help="sequences x slots of decoding, such as 64x8192"
  )
  parser.add_argument(
    "--rate",
    type=lambda text: _GB * _positive_number(text),
    default=_GB,
    help="GB/s with which a host writes and reads checkpoints; default: 1",
  )
  parser.add_argument("--to", help="folder for plan.json and plan.html")
  return parser.parse_args(argv)


def _positive(text: str) -> int:
  if not (text.isascii() and text.isdigit() and int(text)):
    raise argparse.ArgumentTypeError(f"{text} must be a positive integer")
  return int(text)


def _positive_or_auto(text: str) -> int | None:
  return None if text == "auto" else _positive(text)


def _positive_number(text: str) -> float:
  try:
    value = float(text)
  except ValueError:
    value = math.nan
  if not 0 < value < math.inf:
    raise argparse.ArgumentTypeError(f"{text} must be a positive number")
  return value


def _parse_target(text: str) -> targets.Target:
  try:
    return targets.parse(text)
  except ValueError as error:
    raise user_error.UserError(str(error)) from error


def _parse_questions(arguments: Any) -> questions.Questions:
  try:
    return questions.parse(
      tokens=arguments.tokens,
      price=arguments.price,
      decode=arguments.serve,
      programs="train",
    )
  except ValueError as error:
    message = str(error).replace("--plan_decode", "--serve")
    raise user_error.UserError(message.replace("--plan_", "--")) from error


def _read(text: str) -> Mapping[str, Any]:
  """Returns a config.json, also from a folder with one."""
  path = epath.Path(text)
  try:
    if path.is_dir():
      path /= "config.json"
    found = json.loads(path.read_text())
  except (OSError, ValueError) as error:
    raise user_error.UserError(
      f"CONFIG {text} must be a config.json of Hugging Face, or a folder with"
      f" one: {user_error.one_line(error)}"
    ) from error
  if not isinstance(found, dict) or "model_type" not in found:
    raise user_error.UserError(
      f"CONFIG {text} has no 'model_type'; it must be the config.json of a"
      " model."
    )
  return found


@contextlib.contextmanager
def _store(config: Mapping[str, Any]) -> Iterator[str]:
  """Makes a folder as `paxon-hf import` does.

  It is kept, because plans are found again by its name.
  """
  text = json.dumps(config, indent=2, sort_keys=True)
  with contextlib.ExitStack() as stack:
    cache = plan_cache.folder(os.environ)
    if cache is None:
      scratch = stack.enter_context(tempfile.TemporaryDirectory())
      cache = pathlib.Path(scratch, "plans")
    run = cache.parent / "configs" / plan_cache.digest(text)[:16]
    try:
      (run / _FOLDER).mkdir(parents=True, exist_ok=True)
      (run / _FOLDER / "config.json").write_text(text)
    except OSError as error:
      raise user_error.UserError(
        f"{run} cannot be written ({error.strerror or error}); set"
        f" {plan_cache.CACHE_VARIABLE} to another folder, or to"
        f" {plan_cache.OFF}."
      ) from error
    yield os.fspath(run)


def choose_length(config: Mapping[str, Any]) -> int:
  """Returns the number of positions of a model, at most 8,192.

  Args:
    config: The `config.json`, or its `text_config`.
  """
  names = ("max_position_embeddings", "n_positions")
  known = [config[n] for n in names if isinstance(config.get(n), int)]
  return min(_LENGTH, *known) if known else _DEFAULT_LENGTH


def _choose_mesh(target: targets.Target) -> str:
  if target.slices == 1:
    return "fsdp=-1"
  return f"fsdp=-1,dcn.data={target.slices}"


def _count_hosts(target: targets.Target) -> int:
  return max(1, target.num_devices // target.hardware.devices_per_host)


def _join(plan: result.Plan) -> str:
  """Returns the command that trains as planned."""
  lines = [
    f"paxon --exp={_EXPERIMENT} --job_log_dir=runs/train",
    "--fdl.weights=runs/init --fdl.train_files=...",
    *(shlex.quote(f) for f in plan.overrides if ".weights=" not in f),
  ]
  return " \\\n    ".join(lines)


def _size(number: float | int | None) -> str:
  return "-" if number is None else units.size(number)


def _range(estimate: result.Estimate) -> str:
  low, high = (units.seconds(estimate.step * f) for f in estimate.band)
  return f"{low} to {high}"


def _batch(plan: result.Plan) -> str:
  shape = next(iter(plan.batch.values()), ())
  return " x ".join(f"{n:,}" for n in shape[:2])


if __name__ == "__main__":
  # Accelerators may be in use by a training run.
  jax.config.update("jax_platforms", "cpu")
  sys.exit(main(sys.argv[1:]))

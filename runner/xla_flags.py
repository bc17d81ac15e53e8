"""Compiler flags as users of Pax type them: XLA's, and JAX's of PGLE.

Pax's pages on GPUs set them in the environment, and its command line had JAX's.
Profile-guided latency estimation (PGLE) is `Job.pgle` here, because JAX's own
does not reach steps that are compiled ahead of time, and other options are
`Job.compiler_options`, which are stored with the run. XLA still reads XLA_FLAGS
itself, except for a profile and for flags that it no longer has: those would
end the process without advice.
"""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
import re
import shlex
from typing import Final

PROFILED_STEPS: Final = 3
_XLA: Final = "XLA_FLAGS"
_PROFILE: Final = "xla_gpu_pgle_profile_file_or_directory_path"
_ENABLE: Final = "jax_enable_pgle"
_DETAILS: Final = {
  "jax_pgle_profiling_runs": f"--fdl.pgle=auto profiles {PROFILED_STEPS} steps",
  "jax_pgle_aggregation_percentile": (
    "--fdl.pgle=auto takes the times of one process, without a percentile"
  ),
}
_ASYNC: Final = "remove it; collectives are asynchronous by default"
# Flags of Pax's pages and of NVIDIA's for it that XLA no longer has.
REMOVED: Final[Mapping[str, str]] = {
  "xla_gpu_enable_async_all_gather": _ASYNC,
  "xla_gpu_enable_async_all_reduce": _ASYNC,
  "xla_gpu_enable_async_collectives": _ASYNC,
  "xla_gpu_enable_async_reduce_scatter": _ASYNC,
  "xla_gpu_enable_pgle_accuracy_checker": (
    "--xla_gpu_pgle_accuracy_checker=PGLE_STRICTNESS_LEVEL_WARN"
  ),
  "xla_gpu_graph_level": "--xla_gpu_enable_command_buffer= has no graphs",
  "xla_gpu_simplify_all_fp_conversions": "remove it; XLA always does so",
}
_OPTIONS: Final = "--fdl.compiler_options"


def translate(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
  """Returns a command line with knobs for compiler flags, and notes.

  Args:
    arguments: The arguments, without the program.

  Raises:
    ValueError: XLA no longer has a flag, or `--fdl.compiler_options` is given
      too; the message is one line.
  """
  kept, notes, options = [], [], {}
  rest = list(arguments)
  while rest:
    argument = rest.pop(0)
    match = re.fullmatch(r"--?(xla_\w+|jax_\w*pgle\w*)(?:=(.*))?", argument)
    if match is None:
      kept.append(argument)
      continue
    name, value = match[1], match[2]
    if value is None:
      is_switch = not rest or rest[0].startswith("-")
      value = "true" if is_switch else rest.pop(0)
    _check_exists(f"--{name}={value}", name)
    if name in _DETAILS:
      notes.append(f"--{name}={value}: {_DETAILS[name]}.")
    elif name.startswith("xla_") and name != _PROFILE:
      options[name] = _parse(value)
    elif setting := _find_setting(name, value):
      kept.append(f"--fdl.pgle={setting}")
      notes.append(f"--{name}={value}: read as --fdl.pgle={setting}.")
  if options:
    if any(each.startswith(_OPTIONS) for each in kept):
      raise ValueError(
        f"--{next(iter(options))} and {_OPTIONS} are both given; write all XLA"
        f" options into {_OPTIONS}, such as {shlex.quote(str(options))}."
      )
    kept.append(f"{_OPTIONS}={options}")
    text = shlex.quote(str(options))
    notes.append(f"XLA flags: read as {_OPTIONS}={text}.")
  return kept, notes


def translate_environment(
  environ: Mapping[str, str], *, is_given: bool
) -> tuple[str | None, list[str]]:
  """Returns the value of the knob `pgle`, or None, and notes.

  Args:
    environ: The environment; it is not changed, see `clear`.
    is_given: Whether the command line has the knob, which is then stronger.

  Raises:
    ValueError: XLA no longer has a flag of XLA_FLAGS.
  """
  setting, notes = None, []
  for text, name, value in _iterate_environment(environ):
    _check_exists(f"{_XLA}: {text}" if name.startswith("xla_") else text, name)
    found = _find_setting(name, value)
    if found is not None:
      setting = None if is_given else found
      advice = "--fdl.pgle is given, too, and is used"
      if not is_given:
        advice = f"read as --fdl.pgle={found}"
      notes.append(f"{text}: {advice}.")
    elif name in _DETAILS:
      notes.append(f"{text}: {_DETAILS[name]}.")
  return setting, notes


def clear(environ: MutableMapping[str, str]) -> None:
  """Removes the flags that `translate_environment` has read.

  They are those of a training step, so other modes ignore them.
  """
  for name in (_ENABLE, *_DETAILS):
    environ.pop(name.upper(), None)
  flags = environ.get(_XLA, "").split()
  kept = [flag for flag in flags if not flag.startswith(f"--{_PROFILE}=")]
  if len(kept) < len(flags):
    environ[_XLA] = " ".join(kept)


def _iterate_environment(
  environ: Mapping[str, str],
) -> Iterator[tuple[str, str, str]]:
  """Yields each flag as it is written, its name and its value."""
  for name in (_ENABLE, *_DETAILS):
    value = environ.get(name.upper())
    if value is not None:
      yield f"{name.upper()}={value}", name, value
  for flag in environ.get(_XLA, "").split():
    name, _, value = flag.removeprefix("--").partition("=")
    yield flag, name, value


def _check_exists(text: str, name: str) -> None:
  if name in REMOVED:
    raise ValueError(f"{text}: XLA no longer has this flag; {REMOVED[name]}.")


def _find_setting(name: str, value: str) -> str | None:
  """Returns the value of the knob `pgle` that a flag stands for, or None."""
  if name == _PROFILE:
    return value
  is_on = name == _ENABLE and value.lower() in ("true", "1", "t", "yes", "y")
  return "auto" if is_on else None


def _parse(value: str) -> bool | int | str:
  """Returns the value of an option with its type."""
  if value.lower() in ("true", "false"):
    return value.lower() == "true"
  text = value.strip("'\"")
  return int(text) if re.fullmatch(r"-?\d+", text) else text

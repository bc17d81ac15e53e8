"""Import of a PEFT adapter: a checkpoint of a base model with the adapter.

The new run has the values of the base, so that it trains, generates, evaluates,
and is exported merged or as an adapter again. Those that the adapter replaces,
or changes in a way that ours cannot have, are changed, which a line says.
Several adapters of one base are several such runs.
"""

from collections.abc import Iterator, Mapping
import json
import os
import re
from typing import Any

from etils import epath
import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np

from paxon.layers.models.hugging_face import families, family
from paxon.layers.models.hugging_face.files import safetensors_file
from paxon.quantization import lora, matmuls
from paxon.runner import files as runner_files
from paxon.runner import run_dir, units, user_error
from paxon.runner.checkpoints import checkpointer, stored_checkpoint
from paxon.runner.configuration import overrides, rewrites
from paxon.runner.session import run_files
from paxon.sharding import variables
from paxon.tools.hugging_face import hf_files, peft_adapter, peft_reader

_EXPERIMENT = "paxon.tasks.lm.params.hugging_face.HuggingFaceLm"
# The layers that the knob `lora_rank` covers.
_COVERED = (
  matmuls.ATTENTION_PROJECTIONS,
  matmuls.FEED_FORWARD,
  matmuls.EXPERTS,
)


def run(
  source: epath.Path,
  target: epath.Path,
  *,
  base: stored_checkpoint.StoredCheckpoint,
  dry_run: bool,
) -> Iterator[str]:
  """Imports an adapter, and yields lines to print.

  Args:
    source: A folder of PEFT.
    target: The run directory to make.
    base: A checkpoint of the base model, such as `tools/hf import` makes.
    dry_run: Only print what would be written.

  Raises:
    user_error.UserError: The adapter is not supported, or of another model.
  """
  hf_files.check_links(source)
  folder = base.run_path / hf_files.FOLDER
  config = hf_files.read_config(folder)
  checkpoints = target / run_dir.CHECKPOINTS
  if not dry_run and checkpoints.is_dir():
    raise user_error.UserError(
      f"{os.fspath(checkpoints)} exists; pass another folder, or delete it."
    )
  try:
    adapter, values, specs = _read(source, base, config)
  except (
    family.UnsupportedConfigError,
    peft_adapter.AdapterError,
    safetensors_file.DamagedFileError,
  ) as error:
    raise user_error.UserError(str(error)) from error
  if not dry_run:
    _save(checkpoints, base, values, specs)
    hf_files.copy_beside(folder, target / hf_files.FOLDER)
    for name in (hf_files.SOURCE, hf_files.UNUSED):
      if (folder / name).exists():
        (folder / name).copy(target / hf_files.FOLDER / name, overwrite=True)
    _write_config(source, adapter, target / hf_files.FOLDER)
    _store_settings(adapter if adapter.targets else None, target)
  done = "would write" if dry_run else "wrote"
  if adapter.replaced:
    yield (
      f"{'would change' if dry_run else 'changed'} the base model's"
      f" {', '.join(sorted(adapter.replaced))}: the adapter has other weights"
      " or biases of them, or changes that only a merged kernel can have"
    )
  own = [v for k, v in values.items() if k not in adapter.replaced]
  of = adapter.lora
  yield (
    f"{done} an adapter of rank {of.rank} of"
    f" {', '.join(adapter.targets) or 'no matmul'}, {len(own)} arrays,"
    f" {units.size(sum(value.nbytes for value in own))}, with the base, to"
    f" {os.fspath(checkpoints / '0')}"
  )


def _read(
  source: epath.Path,
  base: stored_checkpoint.StoredCheckpoint,
  config: Mapping[str, Any],
) -> tuple[
  peft_adapter.Adapter,
  dict[str, np.ndarray],
  dict[str, variables.VariableSpec],
]:
  """Returns an adapter, the values of its variables, and specs of all."""
  found = families.find(config)
  names = found.names(config)
  every = lora.Lora(rank=1)
  adaptable = {
    lora.find_kernel_name(name)
    for name in _find_specs(found, config, base, every, None, has_experts=True)
    if re.fullmatch(lora.PATTERN, name)
  }
  adapter, values = peft_reader.read(
    source, names=names, kernels=_Kernels(base), adaptable=adaptable
  )
  specs = _find_specs(
    found,
    config,
    base,
    adapter.lora,
    adapter.targets,
    has_experts=adapter.has_experts,
  )
  if not values:
    # All of it is merged.
    specs = {k: s for k, s in specs.items() if k in base.variables()}
  for name, spec in specs.items():
    if re.fullmatch(lora.PATTERN, name) and name not in values:
      values[name] = np.zeros(spec.shape, np.float32)
  values |= adapter.replaced
  _check(specs, values, base, source)
  return adapter, values, specs


class _Kernels(Mapping[str, np.ndarray]):
  """The arrays of a checkpoint, each read when it is used."""

  def __init__(self, of: stored_checkpoint.StoredCheckpoint) -> None:
    self._of = of

  def __getitem__(self, name: str, /) -> np.ndarray:
    return stored_checkpoint.read_numpy(self._of, [name])[name]

  def __iter__(self) -> Iterator[str]:
    return iter(self._of.variables())

  def __len__(self) -> int:
    return len(self._of.variables())


def _find_specs(
  of: family.Family,
  config: Mapping[str, Any],
  base: stored_checkpoint.StoredCheckpoint,
  adapter: lora.Lora,
  targets: tuple[str, ...] | None,
  *,
  has_experts: bool,
) -> dict[str, variables.VariableSpec]:
  """Returns the specs of the adapted model, with the dtypes of the base."""
  model = of.model(config, fdl.Config)
  if targets is None or targets:
    covered = _COVERED if has_experts else _COVERED[:-1]
    rewrites.adapt(model, (lora.LoraRule(covered, adapter, targets),))
  abstract = jax.eval_shape(
    fdl.build(model).init, jax.random.key(0), *of.example(config)
  )
  stored = base.variables()
  return {
    spec.name: variables.VariableSpec(
      name=spec.name,
      shape=spec.shape,
      # That of jax, which has bfloat16.
      dtype=jnp.dtype(stored.get(spec.name, spec).dtype),
      axes=spec.axes,
    )
    for spec in jax.tree.leaves(variables.get_specs(abstract))
  }


def _check(
  specs: Mapping[str, variables.VariableSpec],
  values: Mapping[str, np.ndarray],
  base: stored_checkpoint.StoredCheckpoint,
  source: epath.Path,
) -> None:
  wanted = {name: spec.shape for name, spec in specs.items()}
  found = {name: value.shape for name, value in values.items()}
  found |= {name: each.shape for name, each in base.variables().items()}
  for name in sorted(wanted.keys() | found.keys()):
    if wanted.get(name) != found.get(name):
      raise peft_adapter.AdapterError(
        f"{os.fspath(source)} cannot be added to {os.fspath(base.path)}: {name}"
        f" has shape {found.get(name)}, and the adapted model of its"
        f" config.json has {wanted.get(name)}."
      )


def _save(
  checkpoints: epath.Path,
  base: stored_checkpoint.StoredCheckpoint,
  values: Mapping[str, np.ndarray],
  specs: Mapping[str, variables.VariableSpec],
) -> None:
  with checkpointer.Checkpointer(base.folder, read_only=True) as opened:
    opened.verify(base.step)
  others = _Kernels(base)
  hf_files.save_imported(
    checkpoints,
    specs,
    lambda name: values[name] if name in values else others[name],
  )


def _write_config(
  source: epath.Path, adapter: peft_adapter.Adapter, folder: epath.Path
) -> None:
  """Writes the adapter's configuration as it is stored in the run."""
  config = json.loads((source / peft_adapter.CONFIG).read_text())
  kept = ("r", "lora_alpha", "use_dora", "use_rslora")
  plain = {
    **{k: v for k, v in adapter.to_config().items() if k in kept},
    "rank_pattern": {},
    "alpha_pattern": {},
    "init_lora_weights": True,
  }
  text = json.dumps(config | plain, indent=2)
  runner_files.write_text(folder / peft_adapter.CONFIG, text + "\n")
  if adapter.replaced:
    text = "\n".join(sorted(adapter.replaced))
    runner_files.write_text(folder / peft_adapter.REPLACED, text + "\n")


def _store_settings(
  adapter: peft_adapter.Adapter | None, target: epath.Path
) -> None:
  """Stores the knobs, so that --job_log_dir is enough for other programs."""
  knobs: dict[str, Any] = {"weights": run_dir.HERE}
  if adapter is not None:
    of = adapter.lora
    assert of.alpha is not None
    knobs |= {
      "lora_rank": of.rank,
      "lora_alpha": of.alpha,
      "lora_kind": of.kind.value,
      "lora_matmuls": adapter.targets,
    }
    if adapter.has_experts:
      knobs["lora_experts"] = True
  found = []
  for knob, value in knobs.items():
    override = overrides.parse_argument(f"--fdl.{knob}={value}")
    assert override is not None
    found.append(override)
  run_files.store_settings(_EXPERIMENT, tuple(found), target)

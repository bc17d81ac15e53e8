"""A golden checkpoint: a small one in the repository that must stay readable.

`goldens/v<version>.zip` contains the checkpoint `7` in the current format.
After a change of the format, replace it with the output of

  tools/python -m paxon.runner.checkpoints.golden

The values are integers and quarters, which every dtype here represents exactly.
"""

import os
import shutil
import sys
import tempfile
from typing import Any

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np

from paxon.runner.checkpoints import checkpointer, named_tree
from paxon.sharding import variables

STEP = 7
DATA = {"epoch": 2, "position": [3, 1, 4], "name": "caf\u00e9"}


def _spec(
  name: str, shape: tuple[int, ...], dtype: str, axes: tuple[str | None, ...]
) -> variables.VariableSpec:
  return variables.VariableSpec(
    name=name, shape=shape, dtype=jnp.dtype(dtype), axes=axes
  )


def specs() -> dict[str, Any]:
  """Returns the specs of the golden checkpoint."""
  layers = ("layers", "embed", "mlp")
  return {
    "step": _spec("step", (), "int32", ()),
    "params": [
      _spec("params/stack/up", (2, 3, 4), "float32", layers),
      _spec("params/stack/half", (2, 3), "bfloat16", layers[:2]),
      _spec("params/eighth", (4,), "float8_e4m3fn", ("mlp",)),
    ],
    "moments": (_spec("opt_state/0/mu/up", (2, 3, 4), "float32", layers),),
    "mask": _spec("tables/mask", (5,), "bool", (None,)),
    "count": _spec("tables/count", (5,), "uint32", (None,)),
  }


def values() -> dict[str, Any]:
  """Returns the arrays, in the structure of `specs`.

  The values of the array number k (in the order of the tree, from 0) are
  (k + i) / 4 at the flat index i; of whole numbers, k + i; of booleans, whether
  i is odd.
  """
  leaves, structure = jax.tree.flatten(specs())
  arrays = []
  for k, spec in enumerate(leaves):
    i = np.arange(int(np.prod(spec.shape))).reshape(spec.shape)
    if spec.dtype == jnp.bool_:
      value = i % 2 == 1
    elif jnp.issubdtype(spec.dtype, jnp.integer):
      value = k + i
    else:
      value = (k + i) / 4
    arrays.append(jnp.asarray(value.astype(spec.dtype)))
  return jax.tree.unflatten(structure, arrays)


def write(folder: epath.Path) -> None:
  """Writes the checkpoint as `folder/7`."""
  with checkpointer.Checkpointer(folder) as checkpoints:
    checkpoints.save(STEP, values(), specs=specs(), data=DATA)
    checkpoints.wait()


def archive_path() -> epath.Path:
  """Returns the path of the golden checkpoint."""
  name = f"v{named_tree.FORMAT_VERSION}.zip"
  return epath.Path(__file__).parent / "goldens" / name


def extract(folder: epath.Path) -> None:
  """Extracts the golden checkpoint as `folder/7`."""
  shutil.unpack_archive(os.fspath(archive_path()), os.fspath(folder))


def main() -> int:
  """Writes the golden checkpoint of the current format."""
  archive = os.fspath(archive_path())
  if os.path.exists(archive):
    print(f"{archive} already exists", file=sys.stderr)
    return 1
  with tempfile.TemporaryDirectory() as temporary:
    # Orbax's files contain the path of their directory.
    write(epath.Path(temporary))
    shutil.make_archive(archive.removesuffix(".zip"), "zip", temporary)
  print(f"wrote {archive}")
  return 0


if __name__ == "__main__":
  sys.exit(main())

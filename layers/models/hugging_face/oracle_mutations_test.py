"""Each field of a table, changed once, does what it does in transformers.

Run as `oracle_test`, and skipped where torch is not installed.
"""

import importlib.util

import numpy as np
import pytest

from paxon.layers.models.hugging_face import (
  families,
  family,
)
from paxon.layers.models.hugging_face.golden_models import (
  golden_case,
  golden_dense_cases,
  testing,
)

pytestmark = [
  pytest.mark.skipif(
    importlib.util.find_spec("torch") is None
    or importlib.util.find_spec("transformers") is None,
    reason="torch and transformers are not here; --config=oracle brings them",
  ),
  pytest.mark.filterwarnings("ignore"),
]


def _change(value):
  """Returns another value of a field, or `None`."""
  if isinstance(value, bool):
    return not value
  if isinstance(value, float):
    return value * 1.5 + 0.01
  if isinstance(value, int):
    return value + 1
  return {"silu": "gelu", "relu2": "silu", "gelu_new": "relu"}.get(str(value))


@pytest.mark.parametrize("case", [x.name for x in golden_dense_cases.CASES])
def test_changed_fields_do_what_they_do_in_transformers(case):
  from paxon.layers.models.hugging_face.golden_models import make_goldens

  golden = golden_case.read(case)
  compared = 0
  for name, value in sorted(golden.config.items()):
    fixed = {*family.INERT, "vocab_size", "max_position_embeddings"}
    changed = None if name in fixed else _change(value)
    if changed is None:
      continue
    try:
      model = make_goldens.torch_model(case, **{name: changed})
      expected = make_goldens.logits(model, golden.arrays)
    except Exception:  # Of any kind: transformers does not check all values.
      continue
    config = model.config.to_dict()
    try:
      found = testing.logits(families.find(config), config, golden.arrays)
    except family.UnsupportedConfigError:
      continue
    np.testing.assert_allclose(
      found,
      expected,
      rtol=0,
      atol=testing.TOLERANCE * max(1.0, float(np.abs(expected).max() / 5)),
      err_msg=f"{case}: {name} {value} -> {changed}",
    )
    compared += 1
  assert compared > 3

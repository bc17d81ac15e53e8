"""Tests that orbax reads and writes stores that it has no driver for."""

from etils import epath
import fsspec
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts

from paxon.inputs.store_servers import memory_store
from paxon.runner.stores import drivers


@pytest.fixture(name="az")
def _az(monkeypatch):
  monkeypatch.setenv("EPATH_USE_TF", "false")
  with memory_store.serve("az") as kind:
    yield kind


class _S3:
  """What `drivers` asks of s3fs."""

  def __init__(self, endpoint, region=None, anon=False):
    self.meta = type(
      "Meta", (), {"endpoint_url": endpoint, "region_name": region}
    )
    self.s3, self.anon = self, anon

  def connect(self):
    """As s3fs does; the client is there afterwards."""


@pytest.mark.parametrize(
  ("store", "environ", "expected"),
  [
    (_S3("https://s3.eu-west-1.amazonaws.com", "eu-west-1"), {}, {}),
    (
      _S3("http://127.0.0.1:8333", "eu-west-1"),
      {"AWS_ACCESS_KEY_ID": "key"},
      {
        "endpoint": "http://127.0.0.1:8333",
        "aws_region": "eu-west-1",
        "aws_credentials": {"type": "environment"},
      },
    ),
    (
      _S3("https://amazonaws.com.example.org", anon=True),
      {},
      {
        "endpoint": "https://amazonaws.com.example.org",
        "aws_region": "us-east-1",
        "aws_credentials": {"type": "anonymous"},
      },
    ),
  ],
)
def test_s3_is_reached_as_s3fs_reaches_it(
  monkeypatch, store, environ, expected
):
  monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
  for name, value in environ.items():
    monkeypatch.setenv(name, value)
  monkeypatch.setattr(fsspec, "filesystem", lambda scheme: store)
  drivers.install()
  spec = drivers.tensorstore_utils.build_kvstore_tspec(
    "s3://box/run/state", "layer.kernel"
  )
  assert spec["driver"] == "ocdbt"
  assert spec["path"] == "layer.kernel"
  base = dict(spec["base"])
  assert base.pop("path").rstrip("/") == "run/state"
  assert base == {"driver": "s3", "bucket": "box", **expected}
  # TensorStore accepts it.
  ts.KvStore.Spec(spec)


def test_other_paths_are_left_to_orbax(tmp_path):
  drivers.install()
  build = drivers.tensorstore_utils.build_kvstore_tspec
  drivers.install()
  assert drivers.tensorstore_utils.build_kvstore_tspec is build
  assert build("gs://box/run")["base"]["driver"] == "gcs"
  assert build(str(tmp_path))["base"]["driver"] == "file"
  with pytest.raises(ValueError, match="absolute"):
    build("relative/path")


def test_a_checkpoint_of_orbax_in_azure(az):
  drivers.install()
  folder = epath.Path("az://box/run")
  tree = {
    "a": np.random.default_rng(0).normal(size=(200, 300)).astype(np.float32),
    "b": np.arange(5),
  }
  options = ocp.CheckpointManagerOptions(
    atomicity_options=ocp.options.AtomicityOptions(
      mode=ocp.options.AtomicityMode.COMMIT_FILE
    )
  )
  with ocp.CheckpointManager(folder, options=options) as manager:
    manager.save(1, args=ocp.args.StandardSave(tree))
    manager.wait_until_finished()
    assert manager.all_steps() == [1]
    restored = manager.restore(1, args=ocp.args.StandardRestore(tree))
  for name, array in tree.items():
    np.testing.assert_array_equal(restored[name], array)
  assert any("manifest.ocdbt" in name for name in az.files)

"""TensorStore drivers for checkpoints in stores that orbax does not know.

Orbax makes the specs of all its arrays in one function, which knows local paths
and `gs://` and takes any other path for a local one. TensorStore itself has a
driver for `s3://`; for `az://` it has none, and gets one by
`gateways.Gateway`.
"""

from collections.abc import Callable, Mapping
import functools
import os
from typing import Any
import urllib.parse

import fsspec

# Private: orbax has no public way to add a driver. `drivers_test` fails
# if a later orbax makes its specs elsewhere.
from orbax.checkpoint._src.serialization import tensorstore_utils

from paxon.runner.stores import gateway as gateways

_Spec = dict[str, Any]


def install() -> None:
  """Lets orbax read and write `s3://` and `az://`, from now on."""
  build = tensorstore_utils.build_kvstore_tspec
  if not isinstance(build, _Builder):
    tensorstore_utils.build_kvstore_tspec = _Builder(build)


def make_kvstore_spec(path: str) -> _Spec:
  """Returns TensorStore's spec of the files below a path, local or remote."""
  install()
  return tensorstore_utils.build_kvstore_tspec(path, use_ocdbt=False)


class _Builder:
  """Orbax's function, for more stores."""

  def __init__(self, build: Callable[..., _Spec]) -> None:
    self._build = build

  def __call__(
    self, directory: str, name: str | None = None, **options: Any
  ) -> _Spec:
    scheme, found, rest = directory.partition("://")
    make = _DRIVERS.get(scheme)
    if not found or make is None:
      return self._build(directory, name, **options)
    # The layout of files and the limits of a store are those of `gs://`.
    spec = self._build(f"gs://{rest}", name, **options)
    return _replace_driver(spec, make())


def _replace_driver(spec: Any, make: Callable[[str, str], _Spec]) -> Any:
  """Returns a spec with another driver than `gcs` in it."""
  if isinstance(spec, Mapping):
    if str(spec.get("driver")).startswith("gcs"):
      return make(spec["bucket"], spec.get("path", ""))
    return {key: _replace_driver(each, make) for key, each in spec.items()}
  if isinstance(spec, list):
    return [_replace_driver(each, make) for each in spec]
  return spec


def _use_s3() -> Callable[[str, str], _Spec]:
  store = fsspec.filesystem("s3")
  # What s3fs has found in the environment and the files of AWS.
  store.connect()
  endpoint, region = store.s3.meta.endpoint_url, store.s3.meta.region_name
  common: _Spec = {"driver": "s3"}
  host = urllib.parse.urlsplit(endpoint).hostname or ""
  # TensorStore finds the region of a bucket of AWS itself.
  if not host.endswith((".amazonaws.com", ".amazonaws.com.cn")):
    common |= {"endpoint": endpoint, "aws_region": region or "us-east-1"}
  if store.anon:
    common["aws_credentials"] = {"type": "anonymous"}
  elif os.environ.get("AWS_ACCESS_KEY_ID"):
    # Without it, TensorStore logs which other files it has not found.
    common["aws_credentials"] = {"type": "environment"}
  return lambda bucket, path: {**common, "bucket": bucket, "path": path}


def _use_az() -> Callable[[str, str], _Spec]:
  gateway = _start_gateway(fsspec.filesystem("az"))
  return lambda bucket, path: gateway.spec(f"{bucket}/{path}")


@functools.cache
def _start_gateway(store: fsspec.AbstractFileSystem) -> gateways.Gateway:
  return gateways.Gateway(store)


_DRIVERS = {"s3": _use_s3, "az": _use_az}

"""Tests of the gateway, with TensorStore and a file system in memory."""

import urllib.error
import urllib.request

import numpy as np
import pytest
import tensorstore as ts

from paxon.inputs.store_servers import memory_store
from paxon.runner.stores import gateway as gateways


@pytest.fixture(name="store")
def _store():
  with memory_store.serve("az") as kind:
    yield kind()


@pytest.fixture(name="gateway")
def _gateway(store):
  gateway = gateways.Gateway(store)
  yield gateway
  gateway.close()


def _open(gateway, path):
  return ts.KvStore.open(gateway.spec(path)).result()


def test_values_are_objects_of_the_store(gateway, store):
  data = np.random.default_rng(0).bytes(10_000_000)
  keys = _open(gateway, "box/run/")
  keys.write("a/b c+d", data).result()
  assert store.cat_file("box/run/a/b c+d") == data
  assert keys.read("a/b c+d").result().value == data
  assert keys.read("a").result().state == "missing"
  assert keys.read("none").result().state == "missing"


def test_ranges(gateway, store):
  store.pipe_file("box/run/x", bytes(range(100)))
  url = (
    gateway.spec("")["endpoint"] + f"/{gateway.spec('')['bucket']}/box/run/x"
  )

  def read(header):
    request = urllib.request.Request(url, headers={"Range": header})
    with urllib.request.urlopen(request) as answer:
      return answer.status, answer.headers["Content-Range"], answer.read()

  assert read("bytes=10-19") == (206, "bytes 10-19/100", bytes(range(10, 20)))
  assert read("bytes=90-") == (206, "bytes 90-99/100", bytes(range(90, 100)))
  assert read("bytes=90-500") == (206, "bytes 90-99/100", bytes(range(90, 100)))
  assert read("bytes=-5") == (206, "bytes 95-99/100", bytes(range(95, 100)))
  for wrong in ("bytes=100-", "bytes=-", "lines=1-2"):
    with pytest.raises(urllib.error.HTTPError, match="416"):
      read(wrong)


def test_keys_are_listed_and_deleted(gateway, store):
  keys = _open(gateway, "box/run/")
  for name in ("a", "b/c", "b/d&e"):
    keys.write(name, b"1").result()
  _open(gateway, "box/run2/").write("z", b"2").result()
  assert sorted(keys.list().result()) == [b"a", b"b/c", b"b/d&e"]
  keys.write("a", None).result()
  keys.write("never there", None).result()
  keys.delete_range(ts.KvStore.KeyRange("b/", "b0")).result()
  assert keys.list().result() == []
  assert store.find("box") == ["box/run2/z"]


def test_conditions(gateway):
  keys = _open(gateway, "box/run/")
  first = keys.write("a", b"1", if_equal=b"").result()
  # Only if there is none; there is one.
  assert keys.write("b", b"1", if_equal=first.generation).result() != first
  assert keys.read("b").result().state == "missing"
  keys.write("a", b"2", if_equal=first.generation).result()
  assert keys.read("a").result().value == b"2"
  keys.write("a", b"3", if_equal=first.generation).result()
  assert keys.read("a").result().value == b"2"


def test_arrays_in_a_database(gateway):
  def open_array(**options):
    base = gateway.spec("box/run/")
    return ts.open(
      {"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": base}},
      **options,
    ).result()

  wanted = np.random.default_rng(0).normal(size=(300, 70)).astype(np.float32)
  array = open_array(create=True, dtype=ts.float32, shape=wanted.shape)
  array.write(wanted).result()
  np.testing.assert_array_equal(
    open_array()[10:20].read().result(), wanted[10:20]
  )


def test_other_users_do_not_know_the_bucket(gateway, store):
  store.pipe_file("box/secret", b"1")
  endpoint = gateway.spec("")["endpoint"]
  for bucket in ("box", "0" * 32, ""):
    for method in ("GET", "PUT", "DELETE"):
      request = urllib.request.Request(
        f"{endpoint}/{bucket}/box/secret",
        method=method,
        data=b"2" if method == "PUT" else None,
      )
      with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(request)
  assert store.cat_file("box/secret") == b"1"


def test_errors_of_the_store_are_repeated(gateway, store, monkeypatch):
  keys = _open(gateway, "box/run/")
  count = 0
  cat = store.cat_file

  def sometimes(path, **options):
    nonlocal count
    count += 1
    if count % 2:
      raise TimeoutError("busy")
    return cat(path, **options)

  monkeypatch.setattr(store, "cat_file", sometimes)
  keys.write("a", b"1").result()
  assert keys.read("a").result().value == b"1"
  assert count == 2


def test_a_read_that_breaks_off_is_repeated(gateway, store, monkeypatch):
  data = np.random.default_rng(0).bytes(9_000_000)
  store.pipe_file("box/run/a", data)
  cat, starts = store.cat_file, []

  def break_off(path, start=None, end=None):
    starts.append(start)
    if len(starts) == 2:
      raise TimeoutError("busy")
    return cat(path, start=start, end=end)

  monkeypatch.setattr(store, "cat_file", break_off)
  assert _open(gateway, "box/run/").read("a").result().value == data
  assert starts[:3] == [0, 1 << 22, 0]


def test_a_rejected_write_is_an_error(gateway, store, monkeypatch):
  def reject(*args, **options):
    raise PermissionError("this container is read-only")

  monkeypatch.setattr(store, "open", reject)
  keys = _open(gateway, "box/run/")
  with pytest.raises(ValueError, match=r"PERMISSION_DENIED.*read-only"):
    keys.write("a", b"1").result()

"""Tests of data in S3: a server of its protocol, failures, and permissions."""

import gzip
import http.client
import http.server
import json
import os
import pickle
import threading

import fsspec
import numpy as np
import pytest

from paxon.inputs import byte_tokenizer, packed_input, stores
from paxon.inputs.sources import (
  corpus_shards,
  corpus_tokenizer,
  example_source,
  grain_sources,
  json_lines,
  record_columns,
  record_files,
  stored_file,
  text_files,
  token_file,
  token_file_writer,
)
from paxon.inputs.store_servers import servers
from paxon.inputs.streams import example_stream
from paxon.inputs.tf_records import tf_record_files

_TEXTS = [f"document {i} " * (i % 7 + 1) for i in range(60)]


class Proxy(http.server.BaseHTTPRequestHandler):
  """Passes requests on to a server; a fault answers some of them instead."""

  protocol_version = "HTTP/1.1"
  port = 0
  count = 0
  fault = staticmethod(lambda count, handler: None)

  def _pass_on(self):
    Proxy.count += 1
    length = int(self.headers.get("Content-Length") or 0)
    body = self.rfile.read(length)
    answer = self.fault(Proxy.count, self)
    if answer is None:
      there = http.client.HTTPConnection("127.0.0.1", self.port)
      there.request(self.command, self.path, body, dict(self.headers))
      found = there.getresponse()
      answer = found.status, dict(found.getheaders()), found.read()
      there.close()
    status, headers, data = answer
    self.send_response(status)
    for name, value in headers.items():
      if name.lower() not in ("connection", "transfer-encoding", "server"):
        self.send_header(name, value)
    if "content-length" not in {name.lower() for name in headers}:
      self.send_header("Content-Length", str(len(data)))
    self.end_headers()
    if self.command != "HEAD":
      self.wfile.write(data)

  do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass_on  # noqa: N815

  def log_message(self, format, *args):  # noqa: A002
    del format, args


def _error(code, status=503):
  text = f"<Error><Code>{code}</Code><Message>{code} here</Message></Error>"
  return status, {"Content-Type": "application/xml"}, text.encode()


@pytest.fixture(scope="module", name="server")
def _server(tmp_path_factory):
  """The port of a server of S3's protocol."""
  with servers.run("s3", tmp_path_factory.mktemp("s3")) as store:
    yield int(store.environ["AWS_ENDPOINT_URL"].rpartition(":")[2])


@pytest.fixture(name="proxy")
def _proxy(server, monkeypatch):
  """A proxy of the server, without faults."""
  monkeypatch.setattr(Proxy, "port", server)
  monkeypatch.setattr(Proxy, "count", 0)
  monkeypatch.setattr(Proxy, "fault", staticmethod(lambda count, handler: None))
  started = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
  threading.Thread(target=started.serve_forever, daemon=True).start()
  yield started.server_address[1]
  started.shutdown()
  started.server_close()


def _connect(port, monkeypatch, tmp_path):
  for name, value in {
    "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_MAX_ATTEMPTS": "1",
    "PAXON_DATA_CACHE": str(tmp_path / "cache"),
  }.items():
    monkeypatch.setenv(name, value)
  monkeypatch.setattr(stored_file, "_CHUNK", 400)
  monkeypatch.setattr(stores, "_WAIT", 0.001)
  # The library would repeat requests itself, for seconds.
  fsspec.get_filesystem_class("s3").clear_instance_cache()
  monkeypatch.setattr(fsspec.get_filesystem_class("s3"), "retries", 1)
  return fsspec.filesystem("s3")


@pytest.fixture(name="bucket")
def _bucket(proxy, monkeypatch, tmp_path):
  """The URL of an empty bucket, and its file system."""
  store = _connect(proxy, monkeypatch, tmp_path)
  name = f"b{abs(hash(str(tmp_path)))}"
  store.mkdir(name)
  return f"s3://{name}"


def _lines() -> bytes:
  return "".join(json.dumps({"text": t}) + "\n" for t in _TEXTS).encode()


def _zstd(data: bytes) -> bytes:
  pyarrow = pytest.importorskip("pyarrow")
  return pyarrow.Codec("zstd").compress(data, asbytes=True)


def _write(folder, kind) -> None:
  """Writes the texts to a folder."""
  folder.mkdir()
  if kind == "tokens":
    ids = [byte_tokenizer.ByteTokenizer().encode(text) for text in _TEXTS]
    token_file_writer.write(
      str(folder / "a"), ids, dtype=np.dtype(np.uint16), facts={}
    )
  elif kind == "parquet":
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(
      pyarrow.table({"text": _TEXTS}), folder / "a", row_group_size=9
    )
  elif kind == "tf_records":
    tf_record_files.write(folder / "a", [text.encode() for text in _TEXTS])
  elif kind == "text":
    (folder / "a").write_text("\n".join(_TEXTS))
  else:
    pack = {"jsonl": bytes, "gz": gzip.compress, "zst": _zstd}[kind]
    (folder / f"a.{kind}").write_bytes(pack(_lines()))


def _source(folder, kind):
  if kind == "tokens":
    return token_file.TokenFile(path=f"{folder}/a", begin_id=1)
  if kind == "parquet":
    rows = grain_sources.ParquetRows(files=f"{folder}/*")
    return record_columns.TextColumn(rows=rows)
  if kind == "tf_records":
    return tf_record_files.TfRecordFiles(files=folder)
  if kind == "text":
    line = text_files.Documents.LINE
    return text_files.TextFiles(files=folder, documents=line)
  return json_lines.JsonLines(files=folder)


def _batches(folder, kind, *, window=None, count=12):
  source = _source(folder, kind)
  common = {"global_batch_size": 4, "length": 64}
  if kind == "tokens":
    examples = example_stream.Examples(source=source, shuffle_seed=3)
    data = packed_input.PackedInput(examples=examples, **common)
  else:
    data = packed_input.pack_documents(
      source=source,
      tokenizer=byte_tokenizer.ByteTokenizer(),
      shuffle_seed=3,
      shuffle_window=window,
      **common,
    )
  found = [data.get_next()["inputs"] for _ in range(count)]
  return np.stack(found), data.get_state()


_KINDS = ("jsonl", "gz", "zst", "text", "parquet", "tf_records", "tokens")
_WINDOWED = ("jsonl", "gz", "zst", "text", "parquet")


@pytest.mark.nightly(keep=5)
@pytest.mark.parametrize(
  ("kind", "window"),
  [(kind, None) for kind in _KINDS] + [(kind, 7) for kind in _WINDOWED],
)
def test_batches_and_positions_are_those_of_a_disk(
  tmp_path, bucket, kind, window
):
  _write(tmp_path / "data", kind)
  store = fsspec.filesystem("s3")
  store.put(str(tmp_path / "data"), bucket, recursive=True)
  here, state = _batches(str(tmp_path / "data"), kind, window=window)
  there, other = _batches(f"{bucket}/data", kind, window=window)
  np.testing.assert_array_equal(there, here)
  assert other == state


def _fail_every_fifth(count, handler):
  return _error("SlowDown") if count % 5 == 0 else None


def _cut_every_fifth(count, handler):
  if count % 5 or handler.command != "GET":
    return None
  # Says more than it sends, and closes the connection.
  handler.close_connection = True
  return 200, {"Content-Length": "400", "ETag": '"x"'}, b"cut off"


@pytest.mark.parametrize("fault", [_fail_every_fifth, _cut_every_fifth])
def test_a_store_that_fails_every_fifth_request(
  tmp_path, bucket, monkeypatch, fault
):
  _write(tmp_path / "data", "jsonl")
  fsspec.filesystem("s3").put(str(tmp_path / "data"), bucket, recursive=True)
  monkeypatch.setattr(Proxy, "fault", staticmethod(fault))
  monkeypatch.setattr(Proxy, "count", 0)
  here, _ = _batches(str(tmp_path / "data"), "jsonl")
  there, _ = _batches(f"{bucket}/data", "jsonl")
  np.testing.assert_array_equal(there, here)
  assert Proxy.count > 25


def test_a_store_that_fails_is_one_line(tmp_path, bucket, monkeypatch):
  fault = staticmethod(lambda count, handler: _error("SlowDown"))
  monkeypatch.setattr(Proxy, "fault", fault)
  with pytest.raises(stores.StoreError, match="in 5 attempts") as caught:
    stored_file.StoredFile(f"{bucket}/a")
  assert "\n" not in str(caught.value)


def test_a_missing_bucket_and_a_missing_file(bucket):
  for url in ("s3://none/a.jsonl", "s3://none/*.jsonl", "s3://none/a/"):
    with pytest.raises(stores.StoreError, match=r"bucket does not exist\)"):
      record_files.find(url, field="Mine.files")
  fsspec.filesystem("s3").pipe(f"{bucket}/data/a.jsonl", _lines())
  # A prefix is no folder.
  for name in ("dat", "data/b.jsonl", "other/*.jsonl"):
    with pytest.raises(FileNotFoundError, match=r"no file has the name 's3://"):
      record_files.find(f"{bucket}/{name}", field="Mine.files")
  for name in ("data", "data/", "data/*", "**/*.jsonl"):
    found = record_files.find(f"{bucket}/{name}", field="Mine.files")
    assert found == (f"{bucket}/data/a.jsonl",)


def test_no_permission_is_one_line(bucket, monkeypatch):
  fsspec.filesystem("s3").pipe(f"{bucket}/a.jsonl", _lines())
  # The server does not know this key.
  monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
  fsspec.get_filesystem_class("s3").clear_instance_cache()
  for name in ("*.jsonl", "a.jsonl"):
    with pytest.raises(stores.StoreError, match="permission denied") as caught:
      record_files.find(f"{bucket}/{name}", field="Mine.files")
    assert "\n" not in str(caught.value)


def test_permission_to_read_but_not_to_list(bucket, monkeypatch):
  fsspec.filesystem("s3").pipe(f"{bucket}/a.jsonl", _lines())

  def deny_lists(count, handler):
    is_list = "list-type" in handler.path
    return _error("AccessDenied", 403) if is_list else None

  monkeypatch.setattr(Proxy, "fault", staticmethod(deny_lists))
  url = f"{bucket}/a.jsonl"
  assert record_files.find(url, field="Mine.files") == (url,)
  assert len(json_lines.JsonLines(files=url)) == len(_TEXTS)
  with pytest.raises(stores.StoreError, match="to list its folder"):
    record_files.find(f"{bucket}/*.jsonl", field="Mine.files")


def test_missing_credentials_are_one_line(bucket, monkeypatch):
  for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
    monkeypatch.delenv(name)
  monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
  monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
  fsspec.get_filesystem_class("s3").clear_instance_cache()
  with pytest.raises(stores.StoreError, match=r"no valid .*AWS_ACCESS_KEY_ID"):
    record_files.find(f"{bucket}/*.jsonl", field="Mine.files")


def test_a_bucket_of_another_region_is_one_line(bucket, monkeypatch):
  def redirect(count, handler):
    status, headers, data = _error("PermanentRedirect", 301)
    return status, {**headers, "x-amz-bucket-region": "eu-west-1"}, data

  monkeypatch.setattr(Proxy, "fault", staticmethod(redirect))
  with pytest.raises(stores.StoreError, match="cannot be read") as caught:
    stored_file.StoredFile(f"{bucket}/a.jsonl")
  assert "\n" not in str(caught.value)


def test_a_listing_that_lacks_files_is_other_data(tmp_path, bucket):
  store = fsspec.filesystem("s3")
  store.pipe(f"{bucket}/a.jsonl", _lines())
  _, state = _batches(bucket, "jsonl", window=7, count=1)
  store.pipe(f"{bucket}/b.jsonl", _lines())
  data = packed_input.pack_documents(
    source=_source(bucket, "jsonl"),
    tokenizer=byte_tokenizer.ByteTokenizer(),
    shuffle_seed=3,
    shuffle_window=7,
    global_batch_size=4,
    length=64,
  )
  # The hosts of a run compare the same signature at their start.
  with pytest.raises(
    ValueError, match=r"saved with num_files 1, but this .* 2"
  ):
    data.set_state(state)


def test_a_replaced_file_is_one_line(bucket):
  store = fsspec.filesystem("s3")
  store.pipe(f"{bucket}/a", b"a" * 1000)
  file = stored_file.StoredFile(f"{bucket}/a")
  assert file.read(0, 5) == b"a" * 5
  store.pipe(f"{bucket}/a", b"b" * 1000)
  assert stored_file.StoredFile(f"{bucket}/a").read(0, 5) == b"b" * 5
  with pytest.raises(stores.StoreError, match="was replaced while it was read"):
    file.read(900, 905)


@pytest.mark.parametrize("kind", ["jsonl", "zst"])
def test_tokenizes_from_and_to_a_store(tmp_path, bucket, kind):
  _write(tmp_path / "data", kind)
  store = fsspec.filesystem("s3")
  store.put(str(tmp_path / "data"), bucket, recursive=True)
  for folder in (str(tmp_path / "data"), f"{bucket}/data"):
    corpus = corpus_tokenizer.Corpus(
      paths=record_files.find(folder, field="--files"),
      form=corpus_shards.Form.JSON_LINE,
      tokenizer=byte_tokenizer.ByteTokenizer(),
      shard_bytes=1000,
    )
    corpus_tokenizer.run(corpus, f"{folder}/out/tokens", num_workers=0)
  for ending in ("bin", "idx", "json"):
    here = (tmp_path / "data" / "out" / f"tokens.{ending}").read_bytes()
    assert store.cat(f"{bucket}/data/out/tokens.{ending}") == here
  there = token_file.TokenFile(path=f"{bucket}/data/out/tokens")
  assert there.check_tokens() > 0
  with pytest.raises(ValueError, match=r"tokens\.bin is there already"):
    corpus_tokenizer.run(corpus, f"{bucket}/data/out/tokens", num_workers=0)


def test_sources_of_several_processes_can_be_pickled(bucket):
  fsspec.filesystem("s3").pipe(f"{bucket}/a.jsonl", _lines())
  source = example_source.TokenizedDocuments(
    source=json_lines.JsonLines(files=bucket),
    tokenizer=byte_tokenizer.ByteTokenizer(),
  )
  expected = source[3]["inputs"]
  copied = pickle.loads(pickle.dumps(source))
  np.testing.assert_array_equal(copied[3]["inputs"], expected)

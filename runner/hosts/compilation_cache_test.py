"""Tests for the compilation cache of runs."""

import os
import subprocess
import sys

import pytest

from paxon.runner.hosts import compilation_cache

# Compiles a program, and prints whether it came from the cache and what it is.
_PROGRAM = """
import os
import jax
import jax.numpy as jnp
from paxon.runner.hosts import compilation_cache

compilation_cache.enable(os.environ)
events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
step = jax.jit(lambda x: jnp.sin(x) @ x, donate_argnums=0)
y = step(jnp.arange(9.0).reshape(3, 3))
print("hit" if "/jax/compilation_cache/cache_hits" in events else "miss")
print(y.tolist())
print(jax.config.jax_compilation_cache_dir)
"""


def _run(**environ):
  names = [name for name in os.environ if name.startswith("JAX_COMPILATION")]
  kept = {k: v for k, v in os.environ.items() if k not in names}
  done = subprocess.run(
    [sys.executable, "-c", _PROGRAM],
    env={**kept, **environ},
    capture_output=True,
    text=True,
    check=True,
  )
  assert "rror" not in done.stderr
  return done.stdout.splitlines()


def test_a_second_process_compiles_nothing(tmp_path):
  home = {"XDG_CACHE_HOME": str(tmp_path)}
  first, second = _run(**home), _run(**home)
  assert (first[0], second[0]) == ("miss", "hit")
  # The same bits.
  assert first[1:] == second[1:]
  folder = compilation_cache.find_folder(home, "1").parent
  assert os.path.dirname(first[2]) == str(folder)


@pytest.mark.nightly
def test_settings_of_jax_come_first(tmp_path):
  own = str(tmp_path / "own")
  given = {"XDG_CACHE_HOME": str(tmp_path), "JAX_COMPILATION_CACHE_DIR": own}
  assert _run(**given)[2] == own
  del given["JAX_COMPILATION_CACHE_DIR"]
  off = _run(**given, JAX_ENABLE_COMPILATION_CACHE="false")
  assert off[2] == "None"
  slow = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1000"}
  home = {"XDG_CACHE_HOME": str(tmp_path / "slow")}
  assert [_run(**home, **slow)[0] for _ in range(2)] == ["miss", "miss"]
  assert not (tmp_path / "paxon").exists()


def test_a_home_that_cannot_be_written_is_no_error(tmp_path):
  (tmp_path / "paxon").write_text("a file where a folder should be")
  assert _run(XDG_CACHE_HOME=str(tmp_path))[2] == "None"


def test_a_user_without_a_home_is_no_error(monkeypatch):
  def fail():
    raise RuntimeError("Could not determine home directory.")

  monkeypatch.setattr(compilation_cache.pathlib.Path, "home", fail)
  compilation_cache.enable({})


def test_each_version_and_each_cpu_has_its_folder(tmp_path, monkeypatch):
  cpus = tmp_path / "cpuinfo"
  core = "processor\t: {}\nflags\t\t: {}\ncpu MHz\t\t: {}\n\n"
  seen = []
  for flags, mhz in (("fma avx2", 1), ("fma avx2", 2), ("fma avx512f", 1)):
    cpus.write_text(core.format(0, flags, mhz) + core.format(1, flags, mhz))
    text = compilation_cache.describe_cpu(str(cpus))
    assert flags in text
    monkeypatch.setattr(compilation_cache, "describe_cpu", lambda t=text: t)
    seen.append(compilation_cache.find_folder({}, "0.10.2"))
    monkeypatch.undo()
  assert seen[0] == seen[1] != seen[2]
  other = compilation_cache.find_folder({}, "0.11.0")
  assert other not in seen
  assert other.name.startswith("0.11.0-")


@pytest.mark.parametrize(
  ("max_size", "kept"), [(30, "012"), (29, "12"), (10, "2"), (9, "")]
)
def test_the_oldest_programs_are_removed(tmp_path, max_size, kept):
  for age, name in enumerate("012"):
    path = tmp_path / name
    path.write_bytes(b"x" * 10)
    os.utime(path, (1000 + age, 1000 + age))
  compilation_cache.remove_oldest(tmp_path, max_size)
  assert sorted(p.name for p in tmp_path.iterdir()) == list(kept)

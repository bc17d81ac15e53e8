"""Locks are read, and imports led to the distribution that has them."""

import pytest

from paxon.tools.dependencies import distributions

_CORE = """# Made by uv.
absl-py==2.5.1 \\
    --hash=sha256:00
    # via
    #   -r requirements.in
    #   Orbax-Checkpoint
colorama==0.4.6 ; sys_platform == 'win32' \\
    --hash=sha256:01
    # via jax
etils[epath,epy]==1.15.0 \\
    --hash=sha256:02
    # via orbax-checkpoint
jax==0.10.2 ; python_full_version < '3.12' \\
    --hash=sha256:03
    # via
    #   -r requirements.in
    #   orbax-checkpoint
jax==0.11.2 ; python_full_version >= '3.12' \\
    --hash=sha256:04
    # via
    #   -r requirements.in
    #   orbax-checkpoint
ml-dtypes==0.6.0 \\
    --hash=sha256:05
    # via jax
orbax-checkpoint==0.12.8 \\
    --hash=sha256:06
    # via -r requirements.in
pyyaml==6.0.3 \\
    --hash=sha256:07
    # via orbax-checkpoint
tensorboardX==2.6.5 \\
    --hash=sha256:08
    # via -r requirements.in
uvloop==0.23.0 ; sys_platform != 'win32' \\
    --hash=sha256:09
    # via orbax-checkpoint
zipp==4.1.2 \\
    --hash=sha256:10
    # via etils[epath]
"""
_TENSORFLOW = """
absl-py==2.5.1 \\
    --hash=sha256:00
    # via
    #   -c requirements_lock.txt
    #   tensorflow-cpu
jax[cuda]==0.11.2 \\
    --hash=sha256:04
    # via -r requirements_tf.in
nvidia-nccl==2.0 \\
    --hash=sha256:13
    # via jax
protobuf==7.36.2 \\
    --hash=sha256:11
    # via tensorflow-cpu
tensorflow-cpu==2.21.0 \\
    --hash=sha256:12
    # via -r requirements_tf.in
"""
_ALL = distributions.parse_locks({"pypi": _CORE, "pypi_tf": _TENSORFLOW})


def test_pins_are_named_like_targets_and_not_those_of_windows():
  assert distributions.pins(_CORE) == {
    "absl_py": {"orbax_checkpoint"},
    "etils": {"orbax_checkpoint"},
    "jax": {"orbax_checkpoint"},
    "ml_dtypes": {"jax"},
    "orbax_checkpoint": set(),
    "pyyaml": {"orbax_checkpoint"},
    "tensorboardx": set(),
    "uvloop": {"orbax_checkpoint"},
    "zipp": {"etils"},
  }


@pytest.mark.parametrize(
  ("names", "closure"),
  [
    (["ml_dtypes"], {"ml_dtypes"}),
    (["jax", "etils"], {"jax", "ml_dtypes", "etils", "zipp"}),
    (["tensorflow_cpu"], {"tensorflow_cpu", "absl_py", "protobuf"}),
    (
      ["orbax_checkpoint"],
      {
        *("absl_py", "etils", "jax", "ml_dtypes", "orbax_checkpoint"),
        *("pyyaml", "uvloop", "zipp"),
      },
    ),
  ],
)
def test_the_closure_is_all_that_a_distribution_needs(names, closure):
  assert _ALL.closure(names) == closure


@pytest.mark.parametrize(
  ("dotted", "label"),
  [
    ("jax", "@pypi//:jax"),
    ("jax.numpy", "@pypi//:jax"),
    ("absl.logging", "@pypi//:absl_py"),
    ("yaml", "@pypi//:pyyaml"),
    ("ml_dtypes", "@pypi//:ml_dtypes"),
    ("orbax.checkpoint", "@pypi//:orbax_checkpoint"),
    ("google.protobuf.text_format", "@pypi_tf//:protobuf"),
    ("tensorboardX.SummaryWriter", "@pypi//:tensorboardx"),
    ("tensorflow.io", "@pypi_tf//:tensorflow_cpu"),
    ("orbax.export", None),
    ("torch", None),
    ("colorama", None),
  ],
)
def test_an_import_leads_to_the_distribution_that_has_it(dotted, label):
  assert _ALL.find_labels(dotted) == ((label,) if label else ())


def test_repositories_may_hold_the_same_but_not_what_the_core_has():
  found = distributions.parse_locks(
    {"pypi": _CORE, "pypi_a": _TENSORFLOW, "pypi_b": _TENSORFLOW}
  )
  assert {"@pypi_a//:protobuf", "@pypi_b//:protobuf"} <= found.labels
  assert "@pypi//:absl_py" in found.labels
  assert "@pypi_a//:absl_py" not in found.labels
  assert "@pypi//:protobuf" not in found.labels
  both = ("@pypi_a//:protobuf", "@pypi_b//:protobuf")
  assert found.find_labels("google.protobuf") == both


def test_top_levels_are_what_import_statements_say():
  assert _ALL.top_levels >= {
    *("absl", "google", "jax", "ml_dtypes", "orbax", "tensorflow", "yaml")
  }
  assert _ALL.top_levels.isdisjoint({"absl_py", "pyyaml", "colorama"})

"""Files of a release: requirements, bill of materials, container, site."""

from collections.abc import Mapping, Sequence
import json
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Final

from packaging import requirements, utils

from paxon.tools.releasing import archives, release_checks

SUMS: Final = "SHA256SUMS"
_CONTAINER: Final = """\
# A container with paxon {version}. In the folder of the release:
#
#   docker build -t paxon:{version} -f Containerfile .
#   docker build -t paxon:{version}-cuda --build-arg PLATFORM=cuda \\
#     -f Containerfile .
#
# PLATFORM is one of {platforms}. CUDA comes with the wheels; the host needs
# NVIDIA's driver and its container toolkit (`docker run --gpus all`). A TPU
# host needs `--privileged`.
ARG PYTHON=3.12
FROM python:${{PYTHON}}-slim
ARG PLATFORM=cpu
COPY {sums} requirements-${{PLATFORM}}.txt {wheel} /release/
RUN cd /release && sha256sum --check --ignore-missing {sums} && \\
    python -m pip install --no-cache-dir --no-deps --require-hashes \\
      --only-binary=:all: -r requirements-${{PLATFORM}}.txt && \\
    python -m pip install --no-cache-dir --no-deps {wheel} && rm -r /release
# The default of --job_log_dir is ./runs.
WORKDIR /
ENTRYPOINT ["paxon"]
"""
# What the quickstart, fine-tuning and the endpoint need, on each platform.
_BASE: Final = ("", "_text", "_serve")
LOCKS: Final[Mapping[str, Sequence[str]]] = {
  "cpu": _BASE,
  "cuda": (*_BASE, "_cuda"),
  "tpu": (*_BASE, "_tpu"),
}
_PIN = re.compile(r"(?m)^(?=[A-Za-z0-9])")
_HASH = re.compile(r"--hash=(\S+)")


def freeze(root: pathlib.Path, platform: str, version: str) -> str:
  """Returns the requirements of a release with hashes, as a file of pip.

  Args:
    root: The checkout.
    platform: A key of `LOCKS`.
    version: The version, for the comment.
  """
  folder = root / "third_party" / "python"
  names = [f"requirements{name}_lock.txt" for name in LOCKS[platform]]
  pins = merge({name: (folder / name).read_text() for name in names})
  return (
    f"# Tested versions of what paxon {version} requires ({platform}):\n"
    "# pip install --no-deps --require-hashes -r FILE\n" + pins
  )


def merge(locks: Mapping[str, str]) -> str:
  """Returns the pins of several locks, each once.

  Args:
    locks: The text of each lock by name.

  Raises:
    ValueError: Two locks pin different versions of a distribution.
  """
  found: dict[tuple[str, str], requirements.Requirement] = {}
  hashes: dict[tuple[str, str], set[str]] = {}
  for name, text in locks.items():
    for block in _PIN.split(text)[1:]:
      pin = requirements.Requirement(block.partition("\\")[0].strip())
      key = utils.canonicalize_name(pin.name), str(pin.marker or "")
      before = found.setdefault(key, pin)
      if before.specifier != pin.specifier:
        raise ValueError(
          f"{name} has {pin}, another lock {before}: they must be equal."
        )
      before.extras |= pin.extras
      hashes.setdefault(key, set()).update(_HASH.findall(block))
  return "".join(
    " \\\n    --hash=".join([str(found[key]), *sorted(hashes[key])]) + "\n"
    for key in sorted(found)
  )


def make_container_file(version: str, wheel: str) -> str:
  """Returns a container file that installs a wheel of a release.

  Args:
    version: The version.
    wheel: File name of the wheel.
  """
  return _CONTAINER.format(
    version=version,
    wheel=wheel,
    sums=SUMS,
    platforms=", ".join(LOCKS),
  )


def write_bill(
  frozen: pathlib.Path, wheel: pathlib.Path, version: str
) -> pathlib.Path:
  """Writes the bill of materials of a file of requirements.

  Args:
    frozen: The file of requirements, whose hashes it takes.
    wheel: The wheel of the release.
    version: The version.

  Returns:
    A CycloneDX file in JSON, checked with its schema.
  """
  platform = frozen.stem.removeprefix("requirements-")
  path = frozen.with_name(f"paxon-{version}-{platform}.cdx.json")
  with tempfile.TemporaryDirectory() as scratch:
    project = pathlib.Path(scratch, "pyproject.toml")
    project.write_text(
      f'[project]\nname = "paxon"\nversion = "{version}"\n'
      'license = {text = "Apache-2.0"}\n'
    )
    subprocess.run(
      [
        # The graph of dependencies is unknown to it, which it warns of.
        *(sys.executable, "-Wignore", "-m", "cyclonedx_py", "requirements"),
        *("--pyproject", str(project), "--mc-type", "library"),
        *("--output-reproducible", "--validate", "--of", "JSON"),
        *("-o", str(path), str(frozen)),
      ],
      check=True,
    )
  content = json.loads(path.read_text())
  content["metadata"]["component"]["hashes"] = [
    {"alg": "SHA-256", "content": archives.digest(wheel)}
  ]
  path.write_text(json.dumps(content, indent=1) + "\n")
  return path


def write_site(
  root: pathlib.Path, commit: str, out: pathlib.Path, version: str
) -> None:
  """Builds the site of a commit, as an archive.

  Args:
    root: The checkout.
    commit: The commit.
    out: Folder of the archive.
    version: The version.
  """
  name = f"paxon-{version}-site"
  path = out / f"{name}.tar.gz"
  with tempfile.TemporaryDirectory() as scratch:
    archives.export(root, commit, pathlib.Path(scratch, "paxon"))
    subprocess.run(
      [f"{scratch}/paxon/tools/site", f"{scratch}/{name}"], check=True
    )
    subprocess.run(
      ["tar", "-C", scratch, "--exclude=.doctrees", "-czf", path, name],
      check=True,
    )
  date = release_checks.run_git(root, "show", "-s", "--format=%ct", commit)
  archives.normalize(path, int(date))

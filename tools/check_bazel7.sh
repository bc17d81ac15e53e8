#!/usr/bin/env bash
# Runs Bazel 7.7.1 on this checkout, where it cannot be downloaded.
#
#   tools/check_bazel7.sh [BAZEL ARGUMENTS]      default: test //...
#   tools/check_bazel7.sh consumer               both forms of tools/consumer
#
# `--config=later` sets the flags that Bazel 8 and 9 flip; the consumer has them.
#
# Debian unstable packages Bazel 7.7.1 and the rules that it would otherwise
# fetch. This makes an unstable root (once; CHECK_BAZEL7_ROOT, by default in
# the user's cache), lays a copy of the checkout into it, and runs there. It
# needs root, debootstrap, and a Debian whose apt sources name a mirror.
# The Python is PAXON_PYTHON or python3, mounted from this machine, because
# unstable's own may be newer than 3.13.
set -euo pipefail

checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
root=${CHECK_BAZEL7_ROOT:-${XDG_CACHE_HOME:-$HOME/.cache}/paxon/bazel7-root}
(($#)) || set -- test //...
command=(tools/bazelw "$@")
[[ $1 != consumer ]] || command=(tools/check_consumer --cold --config=later)

stop() {
  echo "check_bazel7: $1" >&2
  exit 1
}
[[ $(id -u) == 0 ]] || stop "must be root, to make and enter a Debian root"
command -v debootstrap >/dev/null || stop "apt-get install debootstrap"

# The first mirror that apt uses here, in either format of its sources.
find_mirror() {
  cat /etc/apt/sources.list /etc/apt/sources.list.d/*.sources \
    /etc/apt/sources.list.d/*.list 2>/dev/null | awk '
      $1 == "URIs:" { print $2; exit }
      $1 == "deb" { for (i = 2; i <= NF; i++) if ($i ~ /:\/\//) { print $i; exit } }' || true
}

python=$("${PAXON_PYTHON:-python3}" -c \
  'import os, sys; print(os.path.realpath(sys.executable))')
prefix=$("$python" -c 'import sys; print(sys.base_prefix)')

mounts=()
leave() {
  local i
  for ((i = ${#mounts[@]} - 1; i >= 0; i--)); do
    umount -l "${mounts[i]}" 2>/dev/null || true
  done
}
trap leave EXIT
enter() {
  local target=$root$1
  shift
  mkdir -p "$target"
  mount "$@" "$target"
  mounts+=("$target")
}

if [[ ! -e $root/.complete ]]; then
  mirror=$(find_mirror)
  [[ -n $mirror ]] || stop "no mirror in apt's sources"
  echo "check_bazel7: making a Debian unstable root in $root" >&2
  rm -rf --one-file-system "$root"
  mkdir -p "$root"
  debootstrap --variant=minbase --include=ca-certificates unstable \
    "$root" "$mirror" >"$root.log" 2>&1 ||
    { tail -n 20 "$root.log" >&2; stop "debootstrap failed"; }
  cp -r /etc/apt/apt.conf.d/. "$root/etc/apt/apt.conf.d/"
fi
enter /proc -t proc proc
enter /dev --bind /dev
enter /sys --bind /sys
enter /dev/shm -t tmpfs shm
for file in /etc/resolv.conf /etc/hosts /etc/pip.conf \
  /etc/ssl/certs/ca-certificates.crt; do
  [[ -e $file ]] && cp -L "$file" "$root$file"
done
in_root() {
  chroot "$root" /usr/bin/env -i HOME=/root TERM=dumb LANG=C.UTF-8 \
    PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PIP_CERT=/etc/ssl/certs/ca-certificates.crt \
    SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt "$@"
}
if [[ ! -e $root/.complete ]]; then
  in_root bash -c 'apt-get -o Acquire::Check-Valid-Until=false update &&
    DEBIAN_FRONTEND=noninteractive apt-get install --yes \
      --no-install-recommends bazel-bootstrap bazel-rules-cc bazel-rules-java \
      bazel-rules-license bazel-rules-proto bazel-rules-python bazel-skylib \
      bazel-features bazel-platforms python3 python3-venv git procps libffi8 \
      libssl3t64 libbz2-1.0 liblzma5 libsqlite3-0 libreadline8t64' \
    >"$root.log" 2>&1 ||
    { tail -n 20 "$root.log" >&2; stop "apt-get failed in $root"; }
  touch "$root/.complete"
fi

# A Python of the distribution itself cannot be mounted over another's /usr.
if [[ $prefix == /usr ]]; then
  python=/usr/bin/python3
else
  enter "$prefix" --bind "$prefix"
fi
case "$(in_root "$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')" in
  3.11 | 3.12 | 3.13) ;;
  *) stop "$python does not run there as 3.11 to 3.13: name another in PAXON_PYTHON" ;;
esac

# A copy, so that neither Bazel sees the other's links.
work=$root/home/paxon
rm -rf "$work"
mkdir -p "$work"
git -c safe.directory='*' -C "$checkout" ls-files -z --cached --others \
  --exclude-standard --deduplicate |
  tar -C "$checkout" --null --files-from=- --ignore-failed-read -c 2>/dev/null |
  tar -C "$work" -x

# What Bazel 7 would download stands under /usr/share/bazel. For a WORKSPACE, the
# stand-in for the coverage tools, which are only for `bazel coverage`, is made here.
coverage=$root/opt/remote_coverage_tools
mkdir -p "$coverage"
echo 'workspace(name = "remote_coverage_tools")' >"$coverage/WORKSPACE"
for name in coverage_report_generator coverage_output_generator; do
  echo "filegroup(name = \"$name\", visibility = [\"//visibility:public\"])"
done >"$coverage/BUILD"

# For modules, Debian's own rc names the rules that it has. Python needs none of the
# others that Bazel's own module asks for, so they are empty, and no registry is used.
others=()
for name in apple_support buildozer protobuf zlib; do
  mkdir -p "$root/opt/modules/$name"
  echo "module(name = \"$name\")" >"$root/opt/modules/$name/MODULE.bazel"
  touch "$root/opt/modules/$name/BUILD"
  others+=("common --override_module=$name=/opt/modules/$name")
done

# Flags that Bazel 8, 9 or 10 flips, as far as 7.7.1 knows them and its own rules
# bear them.
later=(
  --incompatible_auto_exec_groups
  --incompatible_check_testonly_for_output_files
  --incompatible_check_visibility_for_toolchains
  --incompatible_config_setting_private_default_visibility
  --incompatible_default_to_explicit_init_py
  --incompatible_disable_native_android_rules
  --incompatible_disable_native_repo_rules
  --incompatible_disable_starlark_host_transitions
  --incompatible_disable_target_provider_fields
  --incompatible_disallow_empty_glob
  --incompatible_enable_apple_toolchain_resolution
  --incompatible_enable_proto_toolchain_resolution
  --incompatible_modify_execution_info_additive
  --incompatible_no_implicit_file_export
  --incompatible_no_implicit_watch_label
  --incompatible_python_disallow_native_rules
  --incompatible_strict_action_env
  --incompatible_struct_has_no_methods
  --incompatible_top_level_aspects_require_providers
  --incompatible_use_plus_in_repo_names
)
{
  # It has no module: none may be asked for.
  echo "common --registry=file:///opt/modules"
  printf '%s\n' "${others[@]}"
  echo "common --override_repository=remote_coverage_tools=/opt/remote_coverage_tools"
  for name in rules_cc rules_java rules_license rules_proto rules_python; do
    echo "common --override_repository=$name=/usr/share/bazel/rules/${name#rules_}"
  done
  for name in bazel_skylib bazel_features platforms; do
    echo "common --override_repository=$name=/usr/share/bazel/tools/${name#bazel_}"
  done
  for option in --noenable_workspace "${later[@]}"; do
    echo "common:later $option"
  done
} >"$root/root/.bazelrc"

in_root bash -c 'cd /home/paxon && bazel --version' >&2
in_root PAXON_PYTHON="$python" bash -c 'cd /home/paxon && exec "$0" "$@"' "${command[@]}"

#!/usr/bin/env bash
# Makes the locks of this folder again from their .in files; needs `uv`.
#
#   update_locks.sh            keeps every pin that still fits
#   update_locks.sh --upgrade  takes the newest versions that fit
#
# The other locks are resolved within the versions of the core lock, so that
# what they share is installed once, in @pypi. Run `tools/bazelw test //...`
# and `tools/check` afterwards.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

lock() {
  local name=$1
  shift
  echo "$name.in -> ${name}_lock.txt"
  UV_CUSTOM_COMPILE_COMMAND="third_party/python/update_locks.sh" \
    uv pip compile --quiet --universal --python-version 3.11 \
    --generate-hashes --no-strip-extras \
    --no-emit-index-url --no-emit-find-links --excludes excluded.txt \
    "$name.in" --output-file "${name}_lock.txt" "$@"
}

core=(--constraints requirements_lock.txt)
lock requirements "$@"
lock requirements_tf "${core[@]}" "$@"
# Before the data, whose libraries would take a newer `python-dateutil`.
lock requirements_stores "${core[@]}" \
  --constraints requirements_tf_lock.txt "$@"
lock requirements_servers "${core[@]}" "$@"
lock requirements_data "${core[@]}" \
  --constraints requirements_stores_lock.txt \
  --constraints requirements_tf_lock.txt "$@"
lock requirements_plan_cuda "${core[@]}" "$@"
lock requirements_cuda "${core[@]}" "$@"
lock requirements_plan_cudnn --constraints requirements_cuda_lock.txt \
  --excludes excluded_plan_cudnn.txt "$@"
lock requirements_tpu "${core[@]}" "$@"
lock requirements_text "${core[@]}" \
  --constraints requirements_tf_lock.txt --excludes excluded_text.txt "$@"
lock requirements_serve "${core[@]}" \
  --constraints requirements_data_lock.txt --excludes excluded_serve.txt "$@"
# Not within those of TensorFlow, whose `attrs` is too new for it.
lock requirements_privacy "${core[@]}" "$@"
lock requirements_site "${core[@]}" \
  --constraints requirements_data_lock.txt \
  --constraints requirements_text_lock.txt "$@"
lock requirements_lm_eval "${core[@]}" \
  --constraints requirements_text_lock.txt --excludes excluded_lm_eval.txt "$@"
lock requirements_oracle "${core[@]}" \
  --constraints requirements_tf_lock.txt \
  --constraints requirements_data_lock.txt \
  --constraints requirements_serve_lock.txt \
  --constraints requirements_text_lock.txt \
  --excludes excluded_oracle.txt "$@"
lock requirements_dev "$@"
lock requirements_release --constraints build_tools.txt "$@"

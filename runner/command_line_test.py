"""Tests of the table of flags."""

from paxon.runner import command_line, flag_table


def test_flags_are_the_frozen_list():
  flags = """
    allow_changes allow_run_code chat check_devices checkpoint_step continuous
    coordinator_address decode_batch_size decode_file decode_output eval_file
    exp help host_timeout job_log_dir list liveness_file local_checkpoint_dir
    max_restarts
    metrics_port min_processes mode num_processes plan_batches plan_days
    plan_decode plan_lengths plan_price plan_programs plan_search plan_tokens
    process_id profile_steps profiler_port prompt serve_allowed_hosts
    serve_cache_tokens serve_context serve_host serve_port serve_slots target
    version
  """
  assert sorted(command_line.make_flags()) == flags.split()
  modes = "train eval decode infer serve plan inspect_input check_devices"
  assert tuple(modes.split()) == flag_table.MODES

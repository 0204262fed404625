"""Each module has a test that is found by its name: fastps/ROOM/NAME.py has tests/ROOM/test_NAME.py, and so have kernels/.

Where the behaviour of a module shows only through another, the tables say where: a room as a whole, or a single module.
"""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Rooms whose modules are parts of one thing that is tested as a whole.
ROOMS = {
    "fastps/cli/commands": "tests/cli/test_main.py",  # parsing and printing; what they call has tests of its own
    "fastps/integrations/lightning": "tests/integrations/test_lightning.py",  # a Trainer uses all of them
    "fastps/lab/papers": "tests/lab/papers/test_papers.py",  # tables of the papers' rows, and what runs them
    "fastps/tracing": "tests/tracing/test_trace.py",  # what one part writes, another reads
    "fastps/collectives": "tests/collectives/test_process_group.py",  # parts of one process group
    "kernels/scheduling": "tests/kernels/scheduling/test_scheduler.py",  # parts of one scheduler, compared with its oracles
    "kernels/chaos": "tests/crash/test_chaos.py",  # in the failpoint build alone
}
# Modules that are tested through another, which is named.
MODULES = {
    "kernels/combining/row_fold": "tests/crash/test_die_at_every_store.py",
    "fastps/checkpoint/snapshot": "tests/checkpoint/test_checkpoint.py",
    "fastps/job/plan": "tests/store/test_store.py",
    "fastps/membership/job_memory": "tests/store/test_store.py",
    "fastps/processes/outcome": "tests/processes/test_exit_codes.py",
    "fastps/processes/program": "tests/processes/test_launcher.py",
    "fastps/store/virtual_time": "tests/lab/virtual/test_driver.py",
    "fastps/lab/virtual/hosting": "tests/lab/virtual/test_script.py",
    "fastps/lab/virtual/recorded": "tests/lab/virtual/test_replay.py",
    "fastps/torch/placements/on_device": "tests/torch/placements/test_staged.py",
    "fastps/torch/optimizer_state": "tests/torch/test_optimizer_options.py",
    "fastps/torch/placements/placed": "tests/bench/test_gpu_check.py",
    "fastps/torch/placements/host": "tests/torch/placements/test_staged.py",
    "kernels/protocol/shard_locks": "tests/kernels/protocol/test_lane.py",
    "kernels/combining/fold_call": "tests/device/test_device.py",
    "fastps/system/ports": "tests/processes/test_nodes.py",
    "fastps/system/unix_sockets": "tests/edges/test_strangers.py",
    "kernels/combining/work_item": "tests/kernels/combining/test_shared_fold.py",
    "kernels/shm/offsets": "tests/kernels/shm/test_damage.py",
    "fastps/version": "tests/cli/test_main.py",
    "fastps/checkpoint/format": "tests/checkpoint/test_checkpoint.py",
    "fastps/cli/bench_report": "tests/cli/test_tables.py",
    "fastps/cli/options": "tests/cli/test_main.py",
    "fastps/lab/plots": "tests/lab/test_stragglers.py",
    "fastps/cli/report": "tests/cli/test_main.py",
    "fastps/cli/simulation_report": "tests/simulation/test_simulate.py",
    "fastps/cli/trace_report": "tests/tracing/test_trace.py",
    "fastps/device/arena": "tests/device/test_device.py",
    "fastps/lab/gpus/cuda_calls": "tests/device/test_cuda.py",
    "fastps/lab/gpus/cuda_on_host": "tests/device/test_cuda.py",
    "fastps/lab/gpus/fake_cuda": "tests/device/test_device.py",
    "fastps/lab/gpus/host_streams": "tests/device/test_device.py",
    "fastps/lab/gpus/hazards": "tests/lab/gpus/test_stepped.py",
    "fastps/device/interface": "tests/device/test_device.py",
    "fastps/device/memory": "tests/device/test_device.py",
    "fastps/device/plan": "tests/device/test_several_devices.py",
    "fastps/lab/gpus/regions": "tests/device/test_device.py",
    "fastps/device/store": "tests/device/test_device.py",
    "fastps/lab/worlds/findings": "tests/lab/worlds/test_node_chaos.py",
    "fastps/lab/worlds/device_workers": "tests/lab/worlds/test_device_chaos.py",
    "fastps/lab/worlds/chaos_worlds": "tests/crash/test_chaos.py",
    "fastps/diagnostics/gpu": "tests/diagnostics/test_doctor.py",
    "fastps/diagnostics/finding": "tests/diagnostics/test_doctor.py",
    "fastps/job/fault_policy": "tests/membership/test_membership.py",
    "fastps/job/layout": "tests/job/test_limits.py",
    "fastps/job/specs": "tests/job/test_policy.py",
    "fastps/membership/discovery": "tests/cli/test_top.py",
    "fastps/membership/peers": "tests/membership/test_membership.py",
    "fastps/lab/live_faults": "tests/faults/test_restarts.py",
    "fastps/network/place": "tests/network/test_meeting.py",
    "fastps/processes/on_host": "tests/processes/test_hosts.py",
    "fastps/processes/options": "tests/processes/test_launcher.py",
    "fastps/processes/progress_lines": "tests/processes/test_output.py",
    "fastps/processes/handover": "tests/processes/test_spawn.py",
    "fastps/processes/spawned": "tests/processes/test_spawn.py",
    "fastps/processes/worker_environment": "tests/torch/test_foreign.py",
    "fastps/processes/worker_output": "tests/processes/test_output.py",
    "fastps/report/figure": "tests/report/test_plots.py",
    "fastps/lab/virtual/options": "tests/simulation/test_simulate.py",
    "fastps/lab/virtual/compute_texts": "tests/simulation/test_simulate.py",
    "fastps/store/observer": "tests/cli/test_top.py",
    "fastps/store/server_process": "tests/processes/test_server.py",
    "fastps/store/server_loop": "tests/processes/test_server.py",
    "fastps/lab/worlds/device_worlds": "tests/lab/worlds/test_device_chaos.py",
    "fastps/lab/worlds/served_worlds": "tests/lab/worlds/test_device_chaos.py",
    "fastps/lab/worlds/node_edges": "tests/lab/worlds/test_node_chaos.py",
    "fastps/lab/worlds/node_mutants": "tests/lab/worlds/test_node_chaos.py",
    "fastps/lab/worlds/node_worlds": "tests/lab/worlds/test_node_chaos.py",
    "fastps/network/link": "tests/network/test_edge.py",
    "fastps/network/home": "tests/network/test_agent.py",
    "fastps/network/leaf": "tests/network/test_local_leaf.py",
    "fastps/network/far_home": "tests/network/test_agent.py",
    "fastps/network/serving": "tests/network/test_agent.py",
    "fastps/torch/placements/on_nodes": "tests/network/test_agent.py",
    "fastps/store/drive": "tests/store/test_store.py",
    "fastps/store/attached_lane": "tests/store/test_store.py",
    "fastps/store/worker": "tests/store/test_store.py",
    "fastps/system/extras": "tests/test_docs.py",
    "fastps/system/machine": "tests/bench/test_bench.py",
    "fastps/system/shared_memory": "tests/store/test_store.py",
    "fastps/torch/checkpoint": "tests/checkpoint/test_checkpoint.py",
    "fastps/torch/attachment": "tests/torch/test_optimizer.py",
    "fastps/torch/gradients": "tests/torch/test_optimizer.py",
    "fastps/torch/join": "tests/torch/test_foreign.py",
    "fastps/torch/model_buffers": "tests/torch/test_optimizer.py",
    "fastps/torch/own_optimizers": "tests/torch/test_row_wise_adagrad.py",
    "fastps/torch/sampler": "tests/torch/test_options.py",
    "fastps/torch/schedules": "tests/torch/test_optimizer.py",
    "fastps/torch/state": "tests/torch/test_optimizer.py",
    "fastps/torch/update_rules": "tests/torch/test_optimizer.py",
    "fastps/torch/weights": "tests/torch/test_optimizer.py",
    "fastps/lab/demo/models": "tests/lab/demo/test_training.py",
    "fastps/lab/demo/options": "tests/lab/demo/test_training.py",
    "fastps/lab/demo/runs": "tests/lab/demo/test_training.py",
    "fastps/lab/demo/worker_main": "tests/lab/demo/test_training.py",
    "kernels/baseline/scheduler_load": "tests/kernels/baseline/test_roofline.py",
    "kernels/cuda/launch_args": "tests/kernels/cuda/test_host_fold.py",
    "kernels/combining/batch": "tests/kernels/protocol/test_lane.py",
    "kernels/combining/combiner": "tests/kernels/protocol/test_lane.py",
    "kernels/combining/lock_word": "tests/crash/test_stop_at_every_store.py",
    "kernels/combining/commit": "tests/kernels/protocol/test_lane.py",
    "kernels/protocol/pins": "tests/kernels/protocol/test_lane.py",
    "kernels/shm/counts": "tests/cli/test_main.py",  # help without numpy
    "kernels/shm/arena": "tests/kernels/shm/test_damage.py",
    "kernels/shm/format": "tests/kernels/shm/test_damage.py",
    "kernels/memory/mapping": "tests/kernels/shm/test_damage.py",
    "kernels/memory/numa": "tests/system/test_numa.py",
    "kernels/shm/plan": "tests/kernels/shm/test_damage.py",
    "kernels/shm/view": "tests/kernels/shm/test_damage.py",
    "kernels/simulation/cpu": "tests/simulation/test_simulate.py",
    "kernels/simulation/network": "tests/kernels/simulation/test_simulator.py",
    "kernels/simulation/shards": "tests/simulation/test_simulate.py",
    "kernels/tensors/torch_tensors": "tests/torch/test_tensor_loops.py",
    "kernels/update/jit": "tests/job/test_user_rules.py",
}


def _modules() -> list[str]:
    files = [file for top in ("fastps", "kernels") for file in (ROOT / top).rglob("*") if file.suffix in (".py", ".pyx")]
    names = {file.relative_to(ROOT).with_suffix("").as_posix() for file in files if not file.stem.startswith("__")}
    return sorted(name for name in names if not name.startswith(("fastps/kernels/", "fastps/bench/")))


@pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="tests run without the source tree")
def test_every_module_has_a_test_of_its_name_or_a_place_in_the_tables() -> None:
    missing, superfluous, places = [], [], {*ROOMS.values(), *MODULES.values()}
    for name in _modules():
        folder, _, stem = name.removeprefix("fastps/").rpartition("/")
        has_own = (ROOT / "tests" / folder / f"test_{stem}.py").exists()
        has_place = name in MODULES or name.rpartition("/")[0] in ROOMS
        if not has_own and not has_place:
            missing.append(name)
        if has_own and name in MODULES:
            superfluous.append(name)
    assert missing == [], "modules without a test of their name: add tests/ROOM/test_NAME.py, or a row to MODULES"
    assert superfluous == [], "modules that have a test of their name by now: take the row away"
    assert sorted(set(MODULES) - set(_modules())) == [], "rows of modules that are no more"
    assert [place for place in places if not (ROOT / place).exists()] == []

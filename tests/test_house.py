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
# Modules that are tested through another: the file that tests them, and their names.
TESTED_TOGETHER = {
    "tests/bench/test_bench.py": "fastps/system/machine",
    "tests/bench/test_gpu_check.py": "fastps/torch/placements/placed",
    "tests/checkpoint/test_checkpoint.py": "fastps/checkpoint/format fastps/checkpoint/snapshot fastps/torch/checkpoint",
    # Of counts it is help without numpy.
    "tests/cli/test_main.py": (
        "fastps/cli/options fastps/cli/report fastps/processes/script fastps/lab/measuring/compared_script fastps/version "
        "kernels/shm/counts"
    ),
    "tests/cli/test_tables.py": "fastps/cli/bench_report",
    "tests/cli/test_top.py": "fastps/membership/discovery fastps/store/observer",
    "tests/crash/test_chaos.py": "fastps/lab/worlds/chaos_worlds",
    "tests/crash/test_die_at_every_store.py": "kernels/combining/row_fold",
    "tests/crash/test_stop_at_every_store.py": "kernels/combining/lock_word",
    "tests/device/test_cuda.py": "fastps/lab/gpus/cuda_calls fastps/lab/gpus/cuda_on_host",
    "tests/device/test_device.py": (
        "fastps/device/arena fastps/device/interface fastps/device/memory fastps/device/owner fastps/device/store "
        "fastps/lab/gpus/fake_cuda fastps/lab/gpus/host_streams fastps/lab/gpus/regions kernels/combining/fold_call"
    ),
    "tests/device/test_several_devices.py": "fastps/device/plan",
    "tests/edges/test_strangers.py": "fastps/system/unix_sockets",
    "tests/evaluation/test_loop.py": (
        "fastps/evaluation/best fastps/evaluation/options fastps/evaluation/rows fastps/evaluation/script"
    ),
    "tests/faults/test_restarts.py": "fastps/lab/live_faults",
    "tests/job/test_limits.py": "fastps/job/layout",
    "tests/job/test_policy.py": "fastps/job/specs",
    "tests/job/test_user_rules.py": "kernels/update/jit",
    "tests/kernels/baseline/test_roofline.py": "kernels/baseline/scheduler_load",
    "tests/kernels/combining/test_shared_fold.py": "kernels/combining/work_item",
    "tests/kernels/cuda/test_host_fold.py": "kernels/cuda/launch_args",
    "tests/kernels/protocol/test_lane.py": (
        "kernels/combining/batch kernels/combining/combiner kernels/combining/commit kernels/protocol/pins "
        "kernels/protocol/shard_locks"
    ),
    "tests/kernels/shm/test_damage.py": (
        "kernels/memory/mapping kernels/shm/arena kernels/shm/format kernels/shm/offsets kernels/shm/plan kernels/shm/view"
    ),
    "tests/kernels/simulation/test_simulator.py": "kernels/simulation/network",
    "tests/lab/demo/test_training.py": (
        "fastps/lab/demo/models fastps/lab/demo/options fastps/lab/demo/runs fastps/lab/demo/worker_main"
    ),
    "tests/lab/gpus/test_stepped.py": "fastps/lab/gpus/hazards",
    "tests/lab/test_stragglers.py": "fastps/lab/plots",
    "tests/lab/virtual/test_driver.py": "fastps/store/virtual_time",
    "tests/lab/virtual/test_replay.py": "fastps/lab/virtual/recorded",
    "tests/lab/worlds/test_device_chaos.py": (
        "fastps/lab/worlds/device_workers fastps/lab/worlds/device_worlds fastps/lab/worlds/served_worlds"
    ),
    "tests/lab/worlds/test_node_chaos.py": (
        "fastps/lab/worlds/findings fastps/lab/worlds/node_edges fastps/lab/worlds/node_mutants fastps/lab/worlds/node_worlds"
    ),
    "tests/membership/test_membership.py": "fastps/job/fault_policy fastps/membership/peers",
    "tests/network/test_agent.py": (
        "fastps/network/far_home fastps/network/home fastps/network/serving fastps/torch/placements/on_nodes"
    ),
    "tests/network/test_early.py": "fastps/network/group_sums fastps/torch/early",
    "tests/network/test_edge.py": "fastps/network/link",
    "tests/network/test_local_leaf.py": "fastps/network/leaf",
    "tests/processes/test_exit_codes.py": "fastps/processes/outcome",
    "tests/processes/test_hosts.py": "fastps/processes/on_host",
    "tests/processes/test_launcher.py": "fastps/processes/options fastps/processes/program",
    "tests/processes/test_nodes.py": "fastps/system/ports",
    "tests/processes/test_output.py": "fastps/processes/progress_lines fastps/processes/worker_output",
    "tests/processes/test_server.py": "fastps/store/server_loop fastps/store/server_process",
    "tests/processes/test_spawn.py": "fastps/processes/handover fastps/processes/spawned",
    "tests/report/test_plots.py": "fastps/report/figure",
    "tests/simulation/test_simulate.py": (
        "fastps/cli/simulation_report fastps/lab/virtual/compute_texts fastps/lab/virtual/options kernels/simulation/cpu "
        "kernels/simulation/shards"
    ),
    "tests/store/test_store.py": (
        "fastps/job/plan fastps/membership/job_memory fastps/store/attached_lane fastps/store/combining fastps/store/drive "
        "fastps/store/worker fastps/system/shared_memory"
    ),
    "tests/system/test_numa.py": "kernels/memory/numa",
    "tests/test_docs.py": "fastps/system/extras",
    "tests/torch/placements/test_staged.py": "fastps/torch/placements/host fastps/torch/placements/on_device",
    "tests/torch/test_foreign.py": "fastps/processes/worker_environment fastps/torch/join",
    "tests/torch/any_optimizer/test_fold.py": "fastps/torch/any_optimizer/owner",
    "tests/torch/test_optimizer.py": (
        "fastps/torch/attachment fastps/torch/gradients fastps/torch/model_buffers fastps/torch/schedules "
        "fastps/torch/state fastps/torch/tensors fastps/torch/update_rules fastps/torch/weights"
    ),
    "tests/torch/readers/test_carried.py": "fastps/torch/carried",
    "tests/torch/readers/test_publisher.py": "fastps/torch/publisher",
    "tests/torch/readers/test_reader.py": "fastps/torch/reader",
    "tests/torch/test_workers_that_differ.py": "fastps/store/elsewhere",
    "tests/torch/test_written_weights.py": "fastps/store/agreed_writes",
    "tests/torch/test_optimizer_options.py": "fastps/torch/optimizer_state",
    "tests/torch/test_row_wise_adagrad.py": "fastps/torch/own_optimizers",
    "tests/torch/test_tensor_loops.py": "kernels/tensors/torch_tensors",
    "tests/tracing/test_trace.py": "fastps/cli/trace_report",
}
MODULES = {module for modules in TESTED_TOGETHER.values() for module in modules.split()}


def _modules() -> list[str]:
    files = [file for top in ("fastps", "kernels") for file in (ROOT / top).rglob("*") if file.suffix in (".py", ".pyx")]
    names = {file.relative_to(ROOT).with_suffix("").as_posix() for file in files if not file.stem.startswith("__")}
    return sorted(name for name in names if not name.startswith(("fastps/kernels/", "fastps/bench/")))


@pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="tests run without the source tree")
def test_every_module_has_a_test_of_its_name_or_a_place_in_the_tables() -> None:
    missing, superfluous = [], []
    for name in _modules():
        folder, _, stem = name.removeprefix("fastps/").rpartition("/")
        has_own = (ROOT / "tests" / folder / f"test_{stem}.py").exists()
        has_place = name in MODULES or name.rpartition("/")[0] in ROOMS
        if not has_own and not has_place:
            missing.append(name)
        if has_own and name in MODULES:
            superfluous.append(name)
    assert missing == [], "modules without a test of their name: add tests/ROOM/test_NAME.py, or a name in TESTED_TOGETHER"
    assert superfluous == [], "modules that have a test of their name by now: take their names away"
    assert sorted(MODULES - set(_modules())) == [], "names of modules that are no more"
    assert [place for place in [*ROOMS.values(), *TESTED_TOGETHER] if not (ROOT / place).exists()] == []

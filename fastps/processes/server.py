"""The server of a job (`server="process"`): a process that is the combiner for all pushes, so that workers only push and wait.

The store's creator runs it as `python -m fastps.processes.server`. On a lane of its own it folds due pushes, fires due timers,
and rests until a worker posts. It pushes nothing, and no scheduler counts it. It ends by itself once no worker is left and the
store's creator no longer answers, in whatever order they ended. All its decisions lie in the arena, so its death loses nothing
on the CPU; on devices it owns the memory, and the job ends with it.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from fastps.device.arena import DeviceArena
from fastps.device.interface import DeviceError
from fastps.device.memory import FirstVersion
from fastps.device.store import DeviceStore
from fastps.errors import Error
from fastps.kernels.protocol.lane import Lane
from fastps.store.server_loop import Folds, Server, answer_as_server, run_from_order, with_rule
from fastps.store.server_process import DevicePlan, Order
from fastps.store.store import Store
from fastps.system import shared_memory as memory_of
from fastps.system.clock import SYSTEM_CLOCK
from fastps.tracing.for_replay import log_server


def serve(order: Order) -> None:
    """Run the ordered server until the job is over."""
    layout, compiled = with_rule(order.layout, order.rule)
    kind = Store if order.devices is None else DeviceStore
    store = kind(order.memfd, memory_of.map_shared(order.memfd), layout, order.job, order.timeout_s, SYSTEM_CLOCK, [])
    try:
        answer_as_server(store)
        server = Server(store)
        log_server(server.lane, layout, order.trace)
        if order.more is not None:
            _run_optimizer(store, server, order.more)
        if order.devices is not None:
            assert isinstance(store, DeviceStore)
            _own_memory(store, server, order.devices)
        if not store.arena.serve(os.getpid()):
            raise Error(f"job {order.job}: expected to be its first server, found that it has or had one")
        sys.stdin.read()  # until the creator answers, or has ended
        try:
            server.run()
        except BaseException as error:
            if isinstance(store, DeviceStore):
                store.waits_for_work = False
            store.arena.finish(store.arena.server_lane, f"{type(error).__name__}: {error}")
            raise
        store.arena.finish(store.arena.server_lane)
    finally:
        store.close()
        del compiled  # keeps the rule's code alive until now


class DeviceFolds(Folds):
    """The server folds all shards, on devices whose memory it owns."""

    def __init__(self, lane: Lane, arenas: Sequence[DeviceArena]) -> None:
        self._arenas = arenas
        by_shard = {shard: arena for arena in arenas for shard in arena.own_shards()}
        lane.fold_with(lambda call: by_shard[call.shard].fold(call), by_shard)

    def check(self, server: Server) -> None:
        """Folds run behind the host, which would else find a failure only with the next fold."""
        for arena in self._arenas:
            arena.check()


def _run_optimizer(store: Store, server: Server, order: Any) -> None:
    """Fold by an optimizer in Python. The creator reads the reason of a failure in the server's lane."""
    from fastps.torch.any_optimizer.served import OptimizerFolds  # torch takes a second to import

    try:
        server.folds = OptimizerFolds(store, server.lane, order)
    except Error as error:
        store.arena.finish(store.arena.server_lane, f"the server: {error}")
        raise


def _own_memory(store: DeviceStore, server: Server, devices: DevicePlan) -> None:
    """Allocate the job's memory on devices. The creator reads the reason of a failure in the server's lane."""
    with closing(FirstVersion(store.layout, is_resumed=devices.is_resumed, descriptor=devices.first)) as first:
        try:
            server.folds = DeviceFolds(server.lane, store.own_memory(devices.make(), first))
        except DeviceError as error:
            store.waits_for_work = False
            store.arena.finish(store.arena.server_lane, f"the server: {error}")
            raise


def main() -> int:
    """Read the order and serve. Returns the exit code."""
    return run_from_order(serve, "server", (Error, DeviceError))


if __name__ == "__main__":
    sys.exit(main())

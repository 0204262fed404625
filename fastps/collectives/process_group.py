"""The process group that `torch.distributed.init_process_group("fastps")` makes: torch's methods over one `Group`.

torch's Python functions and its C++ code (DistributedDataParallel) call these methods. The class derives from ProcessGroup
because torch lets no Python class derive from Backend. Methods have the names of torch 2.6 and, where torch renamed them, both
names.
"""

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
from torch.distributed import (  # type: ignore[attr-defined]
    AllreduceOptions,
    BarrierOptions,
    BroadcastOptions,
    PrefixStore,
    ProcessGroup,
    Store,
)

from fastps.collectives import tensors as of
from fastps.collectives.group import Collective, Group
from fastps.collectives.works import GroupWork, Sequencer
from fastps.errors import UnsupportedError, UsageError
from fastps.kernels.collectives.exchange import KINDS, NO_REDUCTION

Tensors = list[torch.Tensor]


def _nanoseconds(timeout: timedelta) -> int:
    return int(timeout.total_seconds() * 1e9)


_Base: Any = ProcessGroup  # torch states overloads of which it calls one, and other names for arguments


class SharedMemoryProcessGroup(_Base):  # type: ignore[misc]
    """A process group of ranks on one machine. `create` makes one for torch.

    A collective that torch calls with async_op=False runs in the calling thread, any other in a thread of the group, in order.
    Errors: UnsupportedError for tensors, types and operations that it does not take; the rest as `Group.run`.
    """

    def __init__(self, group: Group) -> None:
        super().__init__(group.rank, group.size)
        self._group = group
        self._sequencer = Sequencer("fastps-collectives")
        self._name: Any = ""
        self._desc = ""

    def size(self) -> int:
        return self._group.size

    def rank(self) -> int:
        return self._group.rank

    def name(self) -> str:
        return "fastps"

    getBackendName = _get_backend_name = name  # noqa: N815  (torch's name)

    def _set_group_name(self, name: Any) -> None:
        self._name = name
        super()._set_group_name(name)

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc
        super()._set_group_desc(desc)

    @property
    def group_name(self) -> Any:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._desc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def set_timeout(self, timeout: timedelta) -> None:
        self._group.timeout_ns = _nanoseconds(timeout)

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Wait for pending collectives, and leave the group: `destroy_process_group` calls it."""
        self._sequencer.drain()
        self._group.close()

    def abort(self) -> None:
        """Leave the group at once: the other ranks get an error."""
        self._group.fail("called abort")
        self._sequencer.cancel(UnsupportedError("the process group was aborted"))
        self.shutdown()

    def allreduce(self, tensors: Tensors, opts: Any = None) -> GroupWork:
        opts = AllreduceOptions() if opts is None else opts
        memory = of.Memory("all_reduce")
        here = [memory.written(tensor) for tensor in tensors]
        steps = [memory.collective(each, [each], [each], op=opts.reduceOp) for each in here]
        return self._begin(steps, memory, opts, list(tensors))

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> GroupWork:
        memory = of.Memory("reduce")
        (tensor,) = tensors
        is_root = self.rank() == opts.rootRank
        here = memory.written(tensor) if is_root else memory.read(tensor)
        step = memory.collective(here, [here], [here] if is_root else [], root=opts.rootRank, op=opts.reduceOp)
        return self._begin([step], memory, opts, tensors)

    def broadcast(self, tensors: Tensors, opts: Any = None) -> GroupWork:
        opts = BroadcastOptions() if opts is None else opts
        memory = of.Memory("broadcast")
        (tensor,) = tensors
        here = memory.read(tensor) if self.rank() == opts.rootRank else memory.written(tensor)
        step = memory.collective(here, [here], [here], root=opts.rootRank)
        return self._begin([step], memory, opts, tensors)

    def allgather(self, output_tensors: list[Tensors], input_tensors: Tensors, opts: Any = None) -> GroupWork:
        memory = of.Memory("all_gather")
        steps = [self._all_gather(memory, outs, each) for outs, each in zip(output_tensors, input_tensors, strict=True)]
        return self._begin(steps, memory, opts, output_tensors)

    def allgather_coalesced(self, output_lists: list[Tensors], input_list: Tensors, opts: Any = None) -> GroupWork:
        """`allgather` of several tensors, which may differ in size: `output_lists[rank][i]` gets that rank's i-th tensor."""
        if any(len(each) != len(input_list) for each in output_lists):
            raise UsageError(
                f"all_gather_coalesced: expected {len(input_list)} tensors for each rank, as this rank gives, found"
                f" {[len(each) for each in output_lists]}"
            )
        return self.allgather([list(outputs) for outputs in zip(*output_lists, strict=True)], input_list, opts)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> GroupWork:
        """Copy each rank's tensor to all ranks, into one tensor."""
        return self.all_gather_single_coalesced([output], [input], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> GroupWork:
        memory = of.Memory("all_gather")
        steps = [
            self._all_gather(memory, self._parts(memory.written(out), each, "all_gather"), each)
            for out, each in zip(outputs, inputs, strict=True)
        ]
        return self._begin(steps, memory, opts, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, output_tensors: list[Tensors], input_tensors: Tensors, opts: Any) -> GroupWork:
        memory = of.Memory("gather")
        (tensor,) = input_tensors
        here = memory.read(tensor)
        outputs = memory.written_all(output_tensors[0], here) if self.rank() == opts.rootRank else []
        step = memory.collective(here, [here], outputs, root=opts.rootRank)
        return self._begin([step], memory, opts, output_tensors)

    def scatter(self, output_tensors: Tensors, input_tensors: list[Tensors], opts: Any) -> GroupWork:
        memory = of.Memory("scatter")
        (tensor,) = output_tensors
        here = memory.written(tensor)
        inputs = memory.read_all(input_tensors[0], here) if self.rank() == opts.rootRank else []
        step = memory.collective(here, inputs, [here], root=opts.rootRank)
        return self._begin([step], memory, opts, output_tensors)

    def reduce_scatter(self, output_tensors: Tensors, input_tensors: list[Tensors], opts: Any) -> GroupWork:
        memory = of.Memory("reduce_scatter")
        steps = [self._reduce_scatter(memory, out, ins, opts) for out, ins in zip(output_tensors, input_tensors, strict=True)]
        return self._begin(steps, memory, opts, output_tensors)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> GroupWork:
        """`reduce_scatter` of one tensor, which holds the parts of all ranks."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> GroupWork:
        memory = of.Memory("reduce_scatter")
        steps = [
            self._reduce_scatter(memory, out, self._parts(memory.read(each), out, "reduce_scatter"), opts)
            for out, each in zip(outputs, inputs, strict=True)
        ]
        return self._begin(steps, memory, opts, outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, output_tensors: Tensors, input_tensors: Tensors, opts: Any = None) -> GroupWork:
        memory = of.Memory("all_to_all")
        inputs = memory.read_all(input_tensors, input_tensors[0])
        step = memory.collective(inputs[0], inputs, memory.written_all(output_tensors, inputs[0]))
        return self._begin([step], memory, opts, output_tensors)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> GroupWork:
        """`alltoall` of the parts of one tensor, which are equal."""
        if len({*output_split_sizes, *input_split_sizes}) > 1:
            raise UnsupportedError("all_to_all of the backend fastps takes equal parts, found split sizes that differ")
        memory = of.Memory("all_to_all")
        out, here = memory.written(output), memory.read(input)
        if out.numel() != here.numel() or out.dtype != here.dtype or here.numel() % self.size():
            raise UnsupportedError(
                f"all_to_all of the backend fastps takes tensors of {self.size()} equal parts, found {here.numel()} elements of"
                f" {here.dtype} and {out.numel()} of {out.dtype}"
            )
        inputs, outputs = self._split(here), self._split(out)
        step = memory.collective(inputs[0], inputs, outputs)
        return self._begin([step], memory, opts, [output])

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> GroupWork:
        step = Collective(KINDS["barrier"], 255, NO_REDUCTION, 0, 0, [], [])
        return self._begin([step], of.Memory("barrier"), opts, [])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """`barrier`; its errors name the rank that is missing."""
        opts = BarrierOptions()
        if timeout is not None:
            opts.timeout = timeout
        opts.asyncOp = False
        self.barrier(opts).wait()

    def send(self, *_: Any) -> NoReturn:
        raise UnsupportedError(
            "the backend fastps has no send and recv: use a group of gloo for them (new_group(backend='gloo'))"
        )

    recv = recv_anysource = send

    def _all_gather(self, memory: of.Memory, outputs: Tensors, tensor: torch.Tensor) -> Collective:
        here = memory.read(tensor)
        if len(outputs) != self.size():
            raise UnsupportedError(f"all_gather takes {self.size()} tensors for the results, found {len(outputs)}")
        return memory.collective(here, [here], memory.written_all(outputs, here))

    def _reduce_scatter(self, memory: of.Memory, output: torch.Tensor, inputs: Tensors, opts: Any) -> Collective:
        if len(inputs) != self.size():
            raise UnsupportedError(f"reduce_scatter takes {self.size()} tensors, found {len(inputs)}")
        here = memory.written(output)
        return memory.collective(here, memory.read_all(inputs, here), [here], op=opts.reduceOp)

    def _parts(self, whole: torch.Tensor, part: torch.Tensor, what: str) -> Tensors:
        if whole.numel() != part.numel() * self.size() or whole.dtype != part.dtype:
            raise UnsupportedError(
                f"{what} takes one tensor that is {self.size()} times as large as the other, found {whole.numel():,} of"
                f" {whole.dtype} and {part.numel():,} of {part.dtype}"
            )
        return self._split(whole)

    def _split(self, whole: torch.Tensor) -> Tensors:
        return list(whole.view(-1).chunk(self.size())) if whole.numel() else [whole.view(-1)] * self.size()

    def _begin(self, steps: list[Collective], memory: of.Memory, opts: Any, result: list[Any]) -> GroupWork:
        timeout = getattr(opts, "timeout", None)
        timeout_ns = _nanoseconds(timeout) if timeout is not None and timeout > timedelta() else None
        calls = [partial(self._group.run, step, timeout_ns) for step in steps]
        work = GroupWork(result, memory.keeps, memory.finish())
        return self._sequencer.give(work, calls, at_once=not getattr(opts, "asyncOp", True))


def create(store: Store, rank: int, size: int, timeout: timedelta) -> SharedMemoryProcessGroup:
    """The creator that `torch.distributed.Backend.register_backend` calls, on every rank of a new group.

    A group that is made again after it was destroyed may have the same name, and then finds the first one's keys.
    """
    store = PrefixStore(str(size), store)  # each rank of a group counts as often as the others of its size
    store = PrefixStore(str(store.add(f"groups/{rank}", 1)), store)
    return SharedMemoryProcessGroup(Group(store, rank, size, _nanoseconds(timeout)))

"""The process group that `torch.distributed.init_process_group("fastps")` makes: torch's methods over one `Group`.

torch's Python functions and its C++ code (DistributedDataParallel) call these methods. The class derives from ProcessGroup
because torch lets no Python class derive from Backend. Methods have the names of torch 2.7 and, where torch renamed them, both
names.

A collective reads and writes contiguous memory of the CPU. A tensor that is not contiguous gets a contiguous copy, and a result
is copied back. What a collective does not take is refused.
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
    ReduceOp,
    Store,
)

from fastps.collectives.group import Collective, Group
from fastps.collectives.works import GroupWork, Sequencer
from fastps.errors import UnsupportedError, UsageError
from fastps.kernels.collectives.exchange import ELEMENTS, KINDS, NO_REDUCTION, REDUCTIONS, can_reduce

Tensors = list[torch.Tensor]
_NAMES = {getattr(torch, name): name for name in ELEMENTS} | {torch.bool: "uint8"}
# Types that are moved and not reduced have numbers of their own, so that ranks notice if theirs differ.
_MOVED = (
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    *(getattr(torch, name) for name in ("uint16", "uint32", "uint64") if hasattr(torch, name)),
)
_REDUCTION_NAMES = {
    ReduceOp.SUM: "sum", ReduceOp.AVG: "average", ReduceOp.PRODUCT: "product", ReduceOp.MIN: "min", ReduceOp.MAX: "max",
    ReduceOp.BAND: "and", ReduceOp.BOR: "or", ReduceOp.BXOR: "xor",
}  # fmt: skip
_OF_BOOLS = {"sum": "max", "max": "max", "or": "max", "product": "min", "min": "min", "and": "min", "xor": "xor"}


def check(tensor: torch.Tensor, what: str) -> None:
    """Raise UnsupportedError for a tensor that is sparse, quantized or not in the memory of the CPU."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_quantized:
        found = f"on {tensor.device}" if tensor.device.type != "cpu" else "sparse or quantized"
        raise UnsupportedError(
            f"{what} of the backend fastps takes dense tensors of the CPU, found one that is {found}: copy it, or use another"
            " backend for it"
        )


def moved_element(dtype: torch.dtype, what: str) -> int:
    """The number of a type in a collective that reduces nothing."""
    if dtype in _MOVED:
        return 128 + _MOVED.index(dtype)
    if dtype in _NAMES:
        return ELEMENTS[_NAMES[dtype]]
    raise UnsupportedError(f"{what} of the backend fastps does not take {dtype}: use another type")


def reduction_of(op: Any, dtype: torch.dtype, what: str) -> tuple[int, int]:
    """The numbers of an element type and a reduction. Raises UnsupportedError."""
    kind = getattr(op, "op", op)
    name = _REDUCTION_NAMES.get(kind)
    if name is not None and dtype == torch.bool:
        name = _OF_BOOLS.get(name)
    element = ELEMENTS.get(_NAMES.get(dtype, ""))
    if name is None or element is None or not can_reduce(element, REDUCTIONS[name]):
        raise UnsupportedError(
            f"{what} of the backend fastps does not reduce {dtype} by {kind}: it has SUM, PRODUCT, MIN and MAX of floats and"
            " integers, AVG of floats, and BAND, BOR and BXOR of integers"
        )
    return element, REDUCTIONS[name]


class Memory:
    """The contiguous memory of the tensors of one collective, and the copies that go back when it is done."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._backs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._keeps: list[torch.Tensor] = []

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous tensor with these values."""
        check(tensor, self._what)
        self._keeps.append(tensor.detach().contiguous())
        return self._keeps[-1]

    def written(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous tensor whose values `copy_back` brings into this one; it begins with the tensor's own values."""
        made = self.read(tensor)
        if not tensor.is_contiguous():
            self._backs.append((tensor.detach(), made))
        return made

    def read_all(self, tensors: Sequence[torch.Tensor], like: torch.Tensor) -> list[torch.Tensor]:
        """`read` for tensors of the size and the type of one."""
        same_size(tensors, like, self._what)
        return [self.read(tensor) for tensor in tensors]

    def written_all(self, tensors: Sequence[torch.Tensor], like: torch.Tensor) -> list[torch.Tensor]:
        """`written` for tensors of the size and the type of one."""
        same_size(tensors, like, self._what)
        return [self.written(tensor) for tensor in tensors]

    def collective(
        self, like: torch.Tensor, inputs: list[torch.Tensor], outputs: list[torch.Tensor], *, root: int = 0, op: Any = None
    ) -> Collective:
        """The collective over contiguous tensors. `like` has the size and the type of what one rank gives another."""
        element, reduction = (
            reduction_of(op, like.dtype, self._what)
            if op is not None
            else (moved_element(like.dtype, self._what), NO_REDUCTION)
        )
        here, there = ([tensor.data_ptr() for tensor in tensors] for tensors in (inputs, outputs))
        return Collective(KINDS[self._what], element, reduction, root, like.nbytes, here, there)

    def copy_back(self) -> None:
        """Copy results into the tensors that are not contiguous."""
        for tensor, copy in self._backs:
            tensor.copy_(copy)


def same_size(tensors: Sequence[torch.Tensor], like: torch.Tensor, what: str) -> None:
    """Raise UnsupportedError unless all tensors have the type and the number of elements of one."""
    for tensor in tensors:
        if tensor.dtype != like.dtype or tensor.numel() != like.numel():
            raise UnsupportedError(
                f"{what} of the backend fastps takes tensors of one type and size, found {tensor.numel():,} of {tensor.dtype}"
                f" beside {like.numel():,} of {like.dtype}"
            )


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
        memory = Memory("all_reduce")
        here = [memory.written(tensor) for tensor in tensors]
        steps = [memory.collective(each, [each], [each], op=opts.reduceOp) for each in here]
        return self._begin(steps, memory, opts, list(tensors))

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> GroupWork:
        memory = Memory("reduce")
        (tensor,) = tensors
        is_root = self.rank() == opts.rootRank
        here = memory.written(tensor) if is_root else memory.read(tensor)
        step = memory.collective(here, [here], [here] if is_root else [], root=opts.rootRank, op=opts.reduceOp)
        return self._begin([step], memory, opts, tensors)

    def broadcast(self, tensors: Tensors, opts: Any = None) -> GroupWork:
        opts = BroadcastOptions() if opts is None else opts
        memory = Memory("broadcast")
        (tensor,) = tensors
        here = memory.read(tensor) if self.rank() == opts.rootRank else memory.written(tensor)
        step = memory.collective(here, [here], [here], root=opts.rootRank)
        return self._begin([step], memory, opts, tensors)

    def allgather(self, output_tensors: list[Tensors], input_tensors: Tensors, opts: Any = None) -> GroupWork:
        memory = Memory("all_gather")
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
        memory = Memory("all_gather")
        steps = [
            self._all_gather(memory, self._parts(memory.written(out), each, "all_gather"), each)
            for out, each in zip(outputs, inputs, strict=True)
        ]
        return self._begin(steps, memory, opts, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, output_tensors: list[Tensors], input_tensors: Tensors, opts: Any) -> GroupWork:
        memory = Memory("gather")
        (tensor,) = input_tensors
        here = memory.read(tensor)
        outputs = memory.written_all(output_tensors[0], here) if self.rank() == opts.rootRank else []
        step = memory.collective(here, [here], outputs, root=opts.rootRank)
        return self._begin([step], memory, opts, output_tensors)

    def scatter(self, output_tensors: Tensors, input_tensors: list[Tensors], opts: Any) -> GroupWork:
        memory = Memory("scatter")
        (tensor,) = output_tensors
        here = memory.written(tensor)
        inputs = memory.read_all(input_tensors[0], here) if self.rank() == opts.rootRank else []
        step = memory.collective(here, inputs, [here], root=opts.rootRank)
        return self._begin([step], memory, opts, output_tensors)

    def reduce_scatter(self, output_tensors: Tensors, input_tensors: list[Tensors], opts: Any) -> GroupWork:
        memory = Memory("reduce_scatter")
        steps = [self._reduce_scatter(memory, out, ins, opts) for out, ins in zip(output_tensors, input_tensors, strict=True)]
        return self._begin(steps, memory, opts, output_tensors)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> GroupWork:
        """`reduce_scatter` of one tensor, which holds the parts of all ranks."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> GroupWork:
        memory = Memory("reduce_scatter")
        steps = [
            self._reduce_scatter(memory, out, self._parts(memory.read(each), out, "reduce_scatter"), opts)
            for out, each in zip(outputs, inputs, strict=True)
        ]
        return self._begin(steps, memory, opts, outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, output_tensors: Tensors, input_tensors: Tensors, opts: Any = None) -> GroupWork:
        memory = Memory("all_to_all")
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
        memory = Memory("all_to_all")
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
        return self._begin([step], Memory("barrier"), opts, [])

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

    def _all_gather(self, memory: Memory, outputs: Tensors, tensor: torch.Tensor) -> Collective:
        here = memory.read(tensor)
        if len(outputs) != self.size():
            raise UnsupportedError(f"all_gather takes {self.size()} tensors for the results, found {len(outputs)}")
        return memory.collective(here, [here], memory.written_all(outputs, here))

    def _reduce_scatter(self, memory: Memory, output: torch.Tensor, inputs: Tensors, opts: Any) -> Collective:
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

    def _begin(self, steps: list[Collective], memory: Memory, opts: Any, result: list[Any]) -> GroupWork:
        timeout = getattr(opts, "timeout", None)
        timeout_ns = _nanoseconds(timeout) if timeout is not None and timeout > timedelta() else None
        calls = [partial(self._group.run, step, timeout_ns) for step in steps]
        return self._sequencer.give(GroupWork(result, memory), calls, at_once=not getattr(opts, "asyncOp", True))


def create(store: Store, rank: int, size: int, timeout: timedelta) -> SharedMemoryProcessGroup:
    """The creator that `torch.distributed.Backend.register_backend` calls, on every rank of a new group.

    A group that is made again after it was destroyed may have the same name, and then finds the first one's keys.
    """
    store = PrefixStore(str(size), store)  # each rank of a group counts as often as the others of its size
    store = PrefixStore(str(store.add(f"groups/{rank}", 1)), store)
    return SharedMemoryProcessGroup(Group(store, rank, size, _nanoseconds(timeout)))

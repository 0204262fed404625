"""fastps.reader: a torch model that shows the newest weights of a running job, in a process that is no worker of the job."""

import logging
import os
import threading
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch

from fastps.errors import LayoutError, UnsupportedError, UsageError
from fastps.job.layout import TAG, Parameter
from fastps.store.reader import OPEN_S, WeightsReader
from fastps.system.clock import SYSTEM_CLOCK, Clock
from fastps.system.deadline import Deadline
from fastps.torch import carried, foreign
from fastps.torch.names import UNNAMED, of_model
from fastps.torch.tensors import Tensors, shaped_tensors
from fastps.torch.update_rules import check_parameter
from fastps.torch.weights import Weights

logger = logging.getLogger("fastps.reader")

_POLL_NS = 50_000_000  # so often an update that waits for buffers asks whether the job has ended


@dataclass
class _Shown:
    """A model that shows a reader's weights. `own`: the numbers of what the model has not, or has otherwise."""

    prefix: str
    weights: Weights
    own: set[int] = field(default_factory=set)


class Reader(WeightsReader):
    """The newest weights of a running job. `fastps.reader` opens it; only one thread may use it.

    Attributes:
        job: the job's name.
        follow: whether it goes on with a job that takes the name once this one has ended.
        buffers: the weights buffer of each shard that this reader has pinned.
    """

    def __init__(self, job: str, timeout_s: float, clock: Clock, *, follow: bool = False) -> None:
        self._models: WeakKeyDictionary[torch.nn.Module, _Shown] = WeakKeyDictionary()
        self._thread = 0  # that models are moved in
        self._left: set[str] = set()  # buffers that the log has named
        self._timeout_ns, self._is_warned = int(timeout_s * 1e9), False
        self._present = -1, -1  # the buffer and version into which a worker of this thread has written its model's buffers
        super().__init__(job, timeout_s, clock, follow=follow)

    def _open(self, timeout_s: float) -> None:
        super()._open(timeout_s)
        self._frozen = len(self._memory.frozen)  # parameters that the job has not trained, when the models were last moved
        before = list(self._models.items())
        self._leave_memory()
        for model, shown in before:
            self._models[model] = self._show(model, shown.prefix)

    def update(self, model: torch.nn.Module | None = None, *, prefix: str = "", copy: bool = False) -> int:
        """Take the newest weights, point `model`'s parameters and buffers at them without a copy, and return their version.

        `prefix`: of the job's tensors take only those whose names begin so, and leave it out: `prefix="actor."` for an actor
        whose job trains the critic, too.

        With `copy` they get copies, which no later update changes: for a model on another device, on "meta" or in memory that
        processes share, for a state dict that is kept, and for threads, each with a model of its own: a forward that runs
        during an update of its model mixes two versions.

        All tensors of a shard have one version, which stays until the next `update`; every model that this reader was given
        before moves, too. They are found by name. The buffers (BatchNorm) of a job that trains are those of its lowest worker;
        they come with its first push after this reader, which `update` waits for. Parameters that the job does not have stay as
        they are. What this process writes into these tensors stays its own, until the next `update`. Autograd refuses a
        backward through a graph of an earlier version. After `close`, and in a forked child, they are copies of their own.

        Raises LayoutError if the job's tensors are not in the model or of another type, UnsupportedError for a parameter
        that is not on the CPU, UsageError in a forked child, after close, or in another thread, ProtocolError if the arena is
        damaged.
        """
        self._check_usable()
        if model is not None and copy:
            self._models.pop(model, None)
        elif model is not None:
            self._check_thread()
            if model not in self._models or self._models[model].prefix != prefix:
                self._models[model] = self._show(model, prefix)
        self.pull()
        if self._carried and model is not None:
            self._wait_for_carried()
        has_carried = self._has_carried()
        self._view.renew()
        frozen = len(self._memory.frozen)
        for shown in self._models.values():
            own = shown.own if has_carried else shown.own | self._carried_numbers
            if frozen != self._frozen or own != shown.weights.own:
                shown.weights.leave_alone(own)  # of another buffer from now on
            shown.weights.show(self.buffers, range(len(shown.weights.tensors)))
        self._frozen = frozen
        if model is not None and copy:
            self._copy_into(model, prefix, has_carried)
        return self.version

    def _check_thread(self) -> None:
        """A model moves in one thread: another may be within a forward pass of it."""
        self._thread = self._thread or threading.get_ident()
        if self._thread != threading.get_ident():
            raise UsageError(
                f"update() of job {self.job}'s reader in another thread than before: expected one thread that moves models,"
                " because a forward pass meanwhile mixes two versions; give each thread a model of its own, and copies:"
                " update(model, copy=True)"
            )

    def _has_carried(self) -> bool:
        return self._present == (self.buffers[-1], self.versions[-1]) or super()._has_carried()

    @property
    def _carried_numbers(self) -> set[int]:
        return {index for index, each in enumerate(self._memory.parameters) if each.is_carried}

    def _wait_for_carried(self) -> None:
        """Wait for a version that has the model's buffers: the first after this reader came. Without one, the log says so.

        A worker of this thread writes them for this reader alone. No process waits for its own push.
        """
        if self._has_carried():
            return
        assert self._identity is not None
        if carried.write_present(self._identity, self.buffers[-1]):
            self._present = self.buffers[-1], self.versions[-1]
        if self._is_warned:  # of a model with other buffers than when it was wrapped, say: no update waits for them again
            return
        arena, deadline = self._memory.arena, Deadline(self._clock.now_ns(), self._timeout_ns)
        is_own = os.getpid() in [arena.process_id(lane) for lane in range(arena.lanes)]
        while not self._has_carried() and not is_own and not deadline.is_over(self._clock.now_ns()) and not self.over:
            self._pins.wait(self.version + 1, _POLL_NS)
            self._pin()
        if not self._has_carried() and not self._is_warned:
            self._is_warned = True
            logger.warning(
                "job %s has made no version with its model's buffers since this reader came: the model's own stay as they are",
                self.job,
            )

    @torch.no_grad()
    def _copy_into(self, model: torch.nn.Module, prefix: str, has_carried: bool) -> None:
        """Give the model's tensors copies of the weights: in place where the memory is shared, else in new memory."""
        tensors, own = self._tensors_of(model, prefix)
        self._check_shapes(tensors, own)
        places = {
            id(each): (module, name)
            for module in model.modules()
            for held in (module._parameters, module._buffers)
            for name, each in held.items()
        }
        types = [each.stored for each in self._memory.parameters]
        values = shaped_tensors(self._memory, self._memory.weight_views(self.buffers), types)
        for index, (tensor, value) in enumerate(zip(tensors, values, strict=True)):
            if index in own or (self._memory.parameters[index].is_carried and not has_carried):
                continue
            if tensor.is_meta:
                module, name = places[id(tensor)]
                made = value.to(tensor.dtype, copy=True)
                is_parameter = isinstance(tensor, torch.nn.Parameter)
                setattr(module, name, torch.nn.Parameter(made, tensor.requires_grad) if is_parameter else made)
            elif tensor.device.type == "cpu" and tensor.is_shared():  # type: ignore[no-untyped-call]
                tensor.copy_(value)
            else:
                tensor.data = value.to(tensor.device, tensor.dtype, copy=True)

    def _check_shapes(self, tensors: list[torch.Tensor], own: set[int]) -> None:
        for index, (tensor, parameter) in enumerate(zip(tensors, self._memory.parameters, strict=True)):
            if index not in own and tuple(tensor.shape) != parameter.shape:
                raise LayoutError(
                    f"{_kind(parameter)} {parameter.name!r}: expected shape {parameter.shape} as in job {self.job}, found"
                    f" {tuple(tensor.shape)}; build the job's model"
                )

    def _show(self, model: torch.nn.Module, prefix: str) -> _Shown:
        tensors, own = self._tensors_of(model, prefix)
        shown = [(each, tensors[index]) for index, each in enumerate(self._memory.parameters) if index not in own]
        self._check_shapes(tensors, own)
        for parameter, tensor in shown:
            self._check_tensor(parameter, tensor)
        foreign.check_memory([tensor for _, tensor in shown], [each.name for each, _ in shown])
        return _Shown(prefix, Weights(Tensors(tensors).enter(self._memory, self._view), own), own)

    def _check_tensor(self, parameter: Parameter, tensor: torch.Tensor) -> None:
        where = "" if tensor.device.type == "cpu" else f"memory of {tensor.device}"
        if not where and tensor.is_shared():  # type: ignore[no-untyped-call]
            where = "memory that torch shares between processes (share_memory)"
        if tensor.is_inference():
            where = "torch.inference_mode(), in which the model was built"
        if where:
            raise UnsupportedError(
                f"{_kind(parameter)} {parameter.name!r}: expected a tensor of this process on the CPU, found one in {where};"
                " give it copies: update(model, copy=True)"
            )
        if not parameter.is_carried:
            check_parameter(parameter.name, tensor)
        if tensor.dtype not in (getattr(torch, parameter.stored), getattr(torch, parameter.type)):
            expected = " or ".join(sorted({parameter.type, parameter.stored}))
            raise LayoutError(
                f"{_kind(parameter)} {parameter.name!r}: expected {expected}, found"
                f" {str(tensor.dtype).removeprefix('torch.')}; convert the model as job {self.job} has it, or give it copies:"
                " update(model, copy=True)"
            )

    def _tensors_of(self, model: torch.nn.Module, prefix: str) -> tuple[list[torch.Tensor], set[int]]:
        """The model's tensor for each of the job's, by name; and the numbers of those that it has not, which are empty.

        Without names in the job, by place. Raises LayoutError for what the model lacks; a buffer of a trained model may.
        """
        named = of_model(dict(model.named_parameters(remove_duplicate=False)))
        wanted = self._memory.parameters
        trained = [each for each in wanted if not each.is_carried]
        if trained and all(each.name.startswith(UNNAMED) for each in trained):
            named = {each.name: tensor for each, tensor in zip(trained, self._all_of(model, len(trained)), strict=True)}
        named |= of_model(dict(model.named_buffers(remove_duplicate=False)))
        tensors, own, missing = [], set(), []
        for index, each in enumerate(wanted):
            found = named.get(each.name.removeprefix(prefix)) if each.name.startswith(prefix) and each.name != TAG else None
            if found is not None and not (each.is_carried and trained and not _fits(each, found)):
                tensors.append(found)
                continue
            tensors.append(torch.empty(0, dtype=getattr(torch, each.stored)))
            own.add(index)
            if not each.name.startswith(prefix) or each.name == TAG:
                continue
            if not (each.is_carried and trained):
                missing.append(each.name)
            elif each.name not in self._left:
                self._left.add(each.name)
                logger.info("job %s: buffer %r is not in this model, or of another shape or type", self.job, each.name)
        if missing or len(own) == len(wanted):
            what = repr(missing[0]) if missing else f"nothing that begins with {prefix!r}"
            raise LayoutError(
                f"job {self.job} has {what}: expected a model with that parameter or buffer, found"
                f" {', '.join(list(named)[:4]) or 'none'}{', ...' if len(named) > 4 else ''}; build the job's model, give the"
                " prefix= of its part, and let the job know its names (model=)"
            )
        return tensors, own

    def _all_of(self, model: torch.nn.Module, count: int) -> list[torch.Tensor]:
        """The parameters of a model for a job whose parameters have no names. Raises LayoutError for another number of them."""
        found: list[torch.Tensor] = list(model.parameters())
        if len(found) != count:
            raise LayoutError(
                f"job {self.job} trains {count} parameters without names: expected a model with as many, found"
                f" {len(found)}; wrap the job's optimizer with model=, so that parameters have names"
            )
        return found

    def end_in_child(self) -> None:
        """End in a forked child: its models keep copies, whole ones unless the parent has moved on within these moments."""
        super().end_in_child()
        is_whole = True
        for shown in self._models.values():
            shown.weights.show_copies()
            is_whole = is_whole and self._pins.holds(self.buffers)
        self._models.clear()
        if not is_whole:
            logger.error("this process was forked beside an update of job %s: its model may mix two versions", self.job)

    def _leave_memory(self) -> None:
        for shown in self._models.values():
            shown.weights.show_copies()
            shown.weights.leave()
        self._models.clear()


def _fits(parameter: Parameter, tensor: torch.Tensor) -> bool:
    return tuple(tensor.shape) == parameter.shape and tensor.dtype == getattr(torch, parameter.type)


def _kind(parameter: Parameter) -> str:
    return "buffer" if parameter.is_carried else "parameter"


def reader(job: str, timeout_s: float = OPEN_S, clock: Clock = SYSTEM_CLOCK, *, follow: bool = False) -> Reader:
    """Open a reader of the running job `job` of this user: a model that shows the job's newest weights, without a copy.

    The job is a training whose optimizer fastps wraps, or a `fastps.Publisher`. The calling process is no worker: no discipline
    counts it, and no fold waits for it, however slow it is, and if it is stopped or killed. It costs the job a weights buffer,
    which goes back when it closes or dies. A job has at most `max_readers` readers at a time.

    With `follow` the reader goes on with a job that takes the name once this one has ended, as a trainer that is started again.

    Waits up to `timeout_s` seconds for the job to start. Raises AttachError if no process answers for it by then, if the job
    belongs to another user or another version of fastps, or has no place left; ArenaError if there is no memory for the buffer;
    UnsupportedError if GPUs hold the weights.

    >>> import fastps
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> optimizer = fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model=model, job="reader-example")
    >>> other = torch.nn.Linear(2, 1, bias=False)
    >>> with fastps.reader("reader-example") as reader:
    ...     model(torch.ones(1, 2)).sum().backward(); optimizer.step()
    ...     reader.wait(1), reader.update(other), torch.equal(other.weight, model.weight)
    (True, 1, True)
    >>> optimizer.close()
    """
    return Reader(job, timeout_s, clock, follow=follow)

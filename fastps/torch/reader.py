"""fastps.reader: a torch model that shows the newest weights of a running job, in a process that is no worker of the job."""

from weakref import WeakKeyDictionary

import torch

from fastps.errors import LayoutError, UnsupportedError
from fastps.store.reader import WeightsReader
from fastps.system.clock import SYSTEM_CLOCK, Clock
from fastps.torch import foreign
from fastps.torch.names import UNNAMED, of_model
from fastps.torch.tensors import Tensors
from fastps.torch.update_rules import check_parameter
from fastps.torch.weights import Weights


class Reader(WeightsReader):
    """The newest weights of a running job. `fastps.reader` opens it; only one thread may use it.

    Attributes:
        job: the job's name.
        buffers: the weights buffer of each shard that this reader has pinned.
    """

    def __init__(self, job: str, timeout_s: float, clock: Clock) -> None:
        super().__init__(job, timeout_s, clock)
        self._models: WeakKeyDictionary[torch.nn.Module, Weights] = WeakKeyDictionary()
        self._frozen = len(self._memory.frozen)  # parameters that the job has not trained, when the models were last moved

    def update(self, model: torch.nn.Module | None = None, *, copy: bool = False) -> int:
        """Take the newest weights, point `model`'s parameters at them without a copy, and return their version.

        With `copy` they get copies, which no later update changes: for a model on another device, on "meta" or in memory that
        processes share, for a state dict that is kept, and for threads, each with a model of its own: a forward that runs
        during an update of its model mixes two versions.

        All parameters of a shard have one version, which stays until the next `update`; every model that this reader was given
        before moves, too. Parameters are found by name. Those that the job does not train, and buffers (BatchNorm), stay as
        they are. What this process writes into these parameters stays its own, until the next `update`. Autograd refuses a
        backward through a graph of an earlier version. After `close` they are copies of their own.

        A model in the job's half precision shows the halves, and a float32 model shows the master weights.

        Raises LayoutError if the job's parameters are not in the model or of another type, UnsupportedError for a parameter
        that is not on the CPU, UsageError in a forked child or after close, ProtocolError if the arena is damaged.
        """
        self._check_usable()
        if model is not None and copy:
            self._models.pop(model, None)
        elif model is not None and model not in self._models:
            self._models[model] = self._weights_of(model)
        self.pull()
        self._view.renew()
        frozen = len(self._memory.frozen)
        for weights in self._models.values():
            if frozen != self._frozen:
                weights.leave_alone(())  # of another buffer from now on
            weights.show(self.buffers, range(len(weights.tensors)))
        self._frozen = frozen
        if model is not None and copy:
            self._copy_into(model)
        return self.version

    @torch.no_grad()
    def _copy_into(self, model: torch.nn.Module) -> None:
        """Give the model's parameters copies of the weights: in place where the memory is shared, else in new memory."""
        tensors = self._tensors_of(model)
        self._check_shapes(tensors)
        places = {id(each): (module, name) for module in model.modules() for name, each in module._parameters.items()}
        for tensor, value in zip(tensors, tensors.enter(self._memory).weights(self.buffers), strict=True):
            if tensor.is_meta:
                module, name = places[id(tensor)]
                setattr(module, name, torch.nn.Parameter(value.to(tensor.dtype, copy=True), tensor.requires_grad))
            elif tensor.device.type == "cpu" and tensor.is_shared():
                tensor.copy_(value)
            else:
                tensor.data = value.to(tensor.device, tensor.dtype, copy=True)

    def _check_shapes(self, tensors: Tensors) -> None:
        for tensor, parameter in zip(tensors, self._memory.parameters, strict=True):
            if tuple(tensor.shape) != parameter.shape:
                raise LayoutError(
                    f"parameter {parameter.name!r}: expected shape {parameter.shape} as in job {self.job}, found"
                    f" {tuple(tensor.shape)}; build the job's model"
                )

    def _weights_of(self, model: torch.nn.Module) -> Weights:
        tensors = self._tensors_of(model)
        names = [parameter.name for parameter in self._memory.parameters]
        foreign.check_memory(tensors, names)
        self._check_shapes(tensors)
        for name, tensor, parameter in zip(names, tensors, self._memory.parameters, strict=True):
            check_parameter(name, tensor)
            if tensor.dtype not in (getattr(torch, parameter.stored), getattr(torch, parameter.type)):
                expected = " or ".join(sorted({parameter.type, parameter.stored}))
                raise LayoutError(
                    f"parameter {name!r}: expected {expected}, found"
                    f" {str(tensor.dtype).removeprefix('torch.')}; convert the model as job {self.job} has it"
                )
            if tensor.device.type != "cpu":
                raise UnsupportedError(
                    f"parameter {name!r}: expected a tensor on the CPU, found one on {tensor.device}; give it copies:"
                    " update(model, copy=True)"
                )
        return Weights(tensors.enter(self._memory, self._view))

    def _tensors_of(self, model: torch.nn.Module) -> Tensors:
        """The model's parameter for each of the job's: by name, or by place if the job's have no names."""
        named = of_model(dict(model.named_parameters()))
        wanted = [parameter.name for parameter in self._memory.parameters]
        if all(name.startswith(UNNAMED) for name in wanted):
            if len(named) != len(wanted):
                raise LayoutError(
                    f"job {self.job} trains {len(wanted)} parameters without names: expected a model with as many, found"
                    f" {len(named)}; wrap the job's optimizer with model=, so that parameters have names"
                )
            return Tensors(list(named.values()))
        missing = [name for name in wanted if name not in named]
        if missing:
            raise LayoutError(
                f"job {self.job} trains {missing[0]!r}: expected a model with that parameter, found"
                f" {', '.join(list(named)[:4]) or 'none'}{', ...' if len(named) > 4 else ''}; build the job's model, and wrap"
                " its optimizer with model="
            )
        return Tensors([named[name] for name in wanted])

    def _leave_memory(self) -> None:
        for weights in self._models.values():
            weights.show_copies()
            weights.leave()
        self._models.clear()


def reader(job: str, timeout_s: float = 0.1, clock: Clock = SYSTEM_CLOCK) -> Reader:
    """Open a reader of the running job `job` of this user: a model that shows the job's newest weights, without a copy.

    The calling process is no worker: no discipline counts it, and no fold waits for it, however slow it is, and if it is
    stopped or killed. It costs the job a weights buffer. A job has at most `max_readers` readers at a time.

    Raises AttachError if no process answers for the job within `timeout_s` seconds, if the job belongs to another user or
    another version of fastps, or has no place left; ArenaError if there is no memory for the buffer; UnsupportedError if GPUs
    hold the weights.

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
    return Reader(job, timeout_s, clock)

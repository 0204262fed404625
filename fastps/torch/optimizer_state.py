"""A wrapped optimizer's state and weights in torch's own terms: state_dict, load_state_dict, param groups."""

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from fastps.checkpoint.snapshot import Pinned
from fastps.errors import UnsupportedError, UsageError
from fastps.job.update_rules import Rule
from fastps.job.user_rules import UserRule
from fastps.torch import state
from fastps.torch.any_optimizer import saved, service
from fastps.torch.any_optimizer.fold import TorchFold, inside
from fastps.torch.any_optimizer.owner import OwnerCombining, state_of
from fastps.torch.attachment import Attachment
from fastps.torch.job_state import Entry, JobState
from fastps.torch.names import of_model
from fastps.torch.update_rules import HALVES, MASTER, WRAP_ANEW, Hypers, check_scalars, names_of, round_state

logger = logging.getLogger("fastps.torch")

_HOOKS = [f"_optimizer_{call}_{when}_hooks" for call in ("step", "state_dict", "load_state_dict") for when in ("pre", "post")]


class OptimizerState(torch.optim.Optimizer):
    """The state and the weights of a DistributedOptimizer, as torch loads and saves them."""

    _job: Attachment
    _model: torch.nn.Module | None
    _tensors: list[Any]
    _rule: Rule
    _hypers_read: Hypers
    _inner: torch.optim.Optimizer
    _groups: list[dict[str, Any]]
    _left_out: dict[int, str]
    _state: JobState
    _options_sent: list[dict[str, Any]]
    _is_own = False  # whether the wrapped optimizer runs in Python, and its state is its own
    _untaken: str | None = "the worker left with an error, or at the program's exit, and kept no state"

    def take_newest(self) -> None:
        """Take the newest weights now, not only with the next step: for an evaluation that the workers begin together.

        Workers that must show one version call it between two barriers, while none of them pushes.

        >>> import fastps
        >>> model = torch.nn.Linear(2, 1)
        >>> with fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)) as optimizer:
        ...     optimizer.take_newest()

        Raises UsageError after close, and after many calls without a step under a discipline that waits for the slowest worker;
        ParameterChangedError if newer weights take the place of what the script wrote.
        """
        self._job.worker.check_open()
        self._job.worker.try_combine()
        if self._job.worker.is_behind:
            self._job.check_writes()
            self._job.take_weights()

    take_newest_weights = take_newest

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise UsageError: pickle and copy would make an optimizer that belongs to no job."""
        raise UsageError(
            "a DistributedOptimizer cannot be copied or pickled, because it is a worker of a job: expected its state_dict() or"
            " the torch optimizer, found the worker; wrap the torch optimizer in the process that trains with it"
        )

    @property
    def state(self) -> JobState:
        """Each parameter's entry in the state, as torch has it, read from the job at the first access after a step.

        What a script changes in it is the job's at the next `step()`, under all shard locks: worker 0's changes, so let every
        worker make the same, as with `load_state_dict`.

        >>> import fastps
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> with fastps.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1, momentum=0.9)) as optimizer:
        ...     weight.sum().backward()
        ...     optimizer.step()
        ...     optimizer.state[weight]["momentum_buffer"].zero_()
        tensor([0., 0.])
        """
        if not self._is_own:
            return self._state
        if not self._job.worker.closed and not self._runs_here:
            return saved.entries_of(self._read_own(), self.param_groups)  # type: ignore[return-value]
        return self._inner.state  # type: ignore[return-value]

    @state.setter
    def state(self, entries: Mapping[Any, Entry]) -> None:
        if self._is_own:
            self._inner.state = entries  # type: ignore[assignment]
            return
        if "_state" not in self.__dict__:
            self._state = JobState()
        self._state.replace(entries)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take these attributes, as torch's optimizers do; "state" becomes the job's at the next step.

        The wrapped optimizer's class adds the options that an older state dict lacks, and sets its own: AdamW's kind of decay.
        """
        if self._is_own:
            self._inner.__setstate__(state)
            self.param_groups = self._groups = self._inner.param_groups
            return
        others = dict(state)
        self.state = others.pop("state", self.state)
        super().__setstate__(others)
        self._inner.__setstate__({"state": self._state, "param_groups": self.param_groups})
        self._groups = self.param_groups

    def _entries(self) -> list[Entry]:
        """The job's part of each parameter's entry in the torch optimizer's state; empty if it has none."""
        if self._rule.runs_in_python:
            return []
        names, found = names_of(self._rule, self.param_groups), [self.state.get(tensor, {}) for tensor in self._tensors]
        return [{name: value for name, value in entry.items() if name in names} for entry in found]

    @property
    def _runs_here(self) -> bool:
        """Whether this worker runs the wrapped optimizer, and so has its state."""
        return isinstance(self._job.worker.combining, OwnerCombining)

    def _read_own(self) -> saved.Saved:
        """The state of the optimizer in whatever process runs it, at the published version. Raises WorkerDiedError."""
        worker = self._job.worker
        worker.check_moment("optimizer.state")
        with worker.locked():
            return state_of(worker, worker.combining)

    def adopt_first(self) -> None:
        """Make what the script has written before its first step the job's weights now. Raises ParameterChangedError."""
        self._job.worker.check_open()
        self._job.adopt_first()

    def _pin_with_state(self, pin: Callable[..., Pinned]) -> Pinned:
        """Pin a version with the optimizer's state at it."""
        worker = self._job.worker
        with worker.locked():
            return pin(more=saved.for_checkpoint(state_of(worker, worker.combining)))

    def _closure_of_step(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure that step() gets, with gradients on. Raises UnsupportedError if another process would have to call it."""
        worker = self._job.worker
        if self._is_own and worker.combining.is_driven and worker.store.layout.lanes == 1:
            raise UnsupportedError(
                f"{type(self._inner).__name__} in virtual time: a single worker's optimizer calls the closure of step(closure)"
                " itself, and here another process runs it: expected backward() before step(), or several workers"
            )
        return torch.enable_grad()(closure)

    def _load_own(self, state_dict: dict[str, Any]) -> None:
        """Load into the wrapped optimizer, and if another process runs it, worker 0's there."""
        self._inner.load_state_dict(state_dict)
        self.param_groups = self._groups = self._inner.param_groups
        self._hypers_read = Hypers(self._rule)
        if self._job.worker.rank == 0 and not self._runs_here:
            service.load(self._job.store.job, saved.saved(self._inner), self._job.store.timeout_s)

    def _call_own(self, name: str, *arguments: Any, **named: Any) -> Any:
        """Call a method that the wrapped optimizer alone has: with a copy of the state, if another process has it."""
        worker = self._job.worker
        if worker.closed or not worker.posts or self._runs_here:
            return getattr(self._inner, name)(*arguments, **named)
        own, self._inner.state = self._inner.state, defaultdict(dict, self.state)
        try:
            return getattr(self._inner, name)(*arguments, **named)
        finally:
            self._inner.state = own

    def _options(self) -> list[dict[str, Any]]:
        """The options of each group that no push carries."""
        return [{name: value for name, value in group.items() if name not in ("params", "lr")} for group in self.param_groups]

    def _send_options(self) -> None:
        """Send the options that the script has changed to the server that runs the optimizer."""
        if self._runs_here:
            return
        now, changed = self._options(), []
        for new, old in zip(now, self._options_sent, strict=True):
            changed.append({name: value for name, value in new.items() if name not in old or not _is_same(value, old[name])})
        if any(changed):
            names = ", ".join(sorted({name for each in changed for name in each}))
            self._job.worker.check_moment(f"another {names} in param_groups")
            service.set_options(self._job.store.job, changed, self._job.store.timeout_s)
        self._options_sent = now

    def __getattr__(self, name: str) -> Any:
        """An attribute that only the wrapped optimizer has, such as a count of its class. Raises AttributeError."""
        inner = self.__dict__.get("_inner")
        if inner is None or name.startswith("_") or not hasattr(inner, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if self._is_own and not self._job.worker.closed and not self._runs_here:
            raise AttributeError(
                f"{name!r} is an attribute of the wrapped {type(inner).__name__}, which another process runs: read it after"
                " close() or unwrap()"
            )
        return getattr(inner, name)

    def _read_state(self) -> Iterable[tuple[Any, Entry]]:
        """The entries of the job's state, each with its parameter. In a job of several nodes none: no worker reaches them."""
        self._job.worker.check_open()
        if self._job.worker.store.layout.has_no_state:
            return []
        self._job.worker.check_moment("optimizer.state")
        found = state.entries(self._job.worker, self._job.tensors, self._rule, self._group_of_each())
        return [(tensor, entry) for tensor, entry in zip(self._tensors, found, strict=True) if entry is not None]

    def _group_of_each(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups for each in group["params"] if id(each) not in self._left_out]

    def _share_state(self) -> None:
        self.param_groups = self._groups = self._inner.param_groups
        self._is_own, self._options_sent = self._rule.runs_in_python, self._options()
        for name in dir(type(self._inner)) if self._is_own else ():  # its own methods, such as train() and eval()
            if not (name.startswith("_") or hasattr(self, name)) and callable(getattr(type(self._inner), name)):
                self.__dict__[name] = partial(self._call_own, name)
        if not self._is_own:
            self.state = self._inner.state
            self._inner.state = self._state
        for name in _HOOKS:
            setattr(self, name, self._inner.__dict__.setdefault(name, OrderedDict()))  # a wrapper of an optimizer may have none

    def _follow_state(self, is_late: bool) -> None:
        """Read the state from the job from now on. `is_late`: the entries up to now become the job's first."""
        if self._is_own:
            return
        if is_late and any(self._entries()):
            self._publish_state(self._entries())
        self._state.attach(self._read_state, self._tensors, names_of(self._rule, self.param_groups))
        hooks = self._inner._optimizer_step_pre_hooks
        for key in [key for key, hook in hooks.items() if hook is round_state]:
            del hooks[key]  # of an earlier job

    def _take_writes(self) -> None:
        """Check gradients of what was left out, and make what the script has changed in `state` the job's."""
        for tensor in [each for group in self.param_groups for each in group["params"] if id(each) in self._left_out]:
            if tensor.grad is not None:
                raise UnsupportedError(
                    f"a parameter of shape {tuple(tensor.shape)} has a gradient, but was frozen when the optimizer was wrapped,"
                    f" and was left out: {self._left_out[id(tensor)]}; give it an optimizer of its own"
                )
        if self._inner.param_groups is not self.param_groups:
            given = self.param_groups if self.param_groups is not self._groups else self._inner.param_groups
            self.param_groups = self._inner.param_groups = self._groups = given
        if not self._is_own and (self._state.is_lent or self._inner.state is not self._state):
            self._write_state()

    def _write_state(self) -> None:
        """Make what the script has changed in `state` since the last step the job's. Raises ValueError, UnsupportedError."""
        self._state.replace(self._inner.state)
        self._inner.state = self._state
        changes = self._state.take_changes(self._tensors)
        if all(entry is None for entry in changes):
            return
        check_scalars(self._rule, [(group, entry or {}) for group, entry in zip(self._group_of_each(), changes, strict=False)])
        self._publish_state(changes)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise UsageError, because the arena has its size: end this job and begin one with the new parameters."""
        if "_job" in self.__dict__:  # else torch's constructor calls
            raise UsageError(
                "add_param_group() after wrapping is not supported, because the arena exists already: add the group to the"
                f" torch optimizer first, then wrap it; {WRAP_ANEW}"
            )
        super().add_param_group(param_group)

    @torch.inference_mode(mode=False)
    def state_dict(self) -> dict[str, Any]:
        """Copies of the optimizer's state at one version, in a form that the wrapped optimizer can load.

        In the process that runs an optimizer in Python (docs/reference/optimizers.md) it is no copy, as in torch.
        After `close()` it is the state at that moment. Raises UsageError if that could not be taken, and says why.
        """
        if self._job.worker.closed:
            if self._untaken is not None:
                raise UsageError(f"state_dict() after close(): {self._untaken}")
            return self._inner.state_dict() if self._is_own else super().state_dict()
        if self._is_own:
            return self._inner.state_dict() if self._runs_here else saved.state_of(self._read_own())
        self._job.worker.check_open()
        self._job.worker.store.layout.check_has_state("the optimizer's state")
        with self._state.handed_out():
            return super().state_dict()

    def _keep_state(self) -> None:
        """Take the state for the time after close. No error leaves this: the training is over."""
        try:
            self._job.worker.store.layout.check_has_state("the optimizer's state")
            self._job.worker.leave_virtual_time()  # the last state is there once every worker has
            if self._is_own:
                if not self._runs_here:
                    saved.load(self._inner, self._read_own())
                self._untaken = None
                return
            self._state.detach()
            self._untaken = None
            if MASTER in names_of(self._rule, self.param_groups) and not isinstance(self._rule, UserRule):
                self._inner.register_step_pre_hook(round_state)
        except Exception as error:  # of any kind: param_groups may have changed since the last step
            self._untaken = f"the state could not be taken at close: {type(error).__name__}: {error}"

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this or of the wrapped optimizer, at any time between steps. Every worker calls it.

        Worker 0's state becomes the job's, under all shard locks: each fold sees the old state or the new one. The options (lr
        and others) are each worker's own, and travel with its next push. Weights, version and the number of updates stay.

        Raises ValueError for another model's state, UnsupportedError for state that the fold would compute differently, or if
        node 0 of several alone has the job's state, and ParameterChangedError as step() does.
        """
        self._job.worker.check_usable()
        self._job.worker.check_moment("load_state_dict()")
        self._job.worker.store.layout.check_has_state("load_state_dict()")
        self._job.check_takes()
        if self._is_own:
            return self._load_own(state_dict)
        taken = [state_dict]

        def check(optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> None:
            """Runs last of the hooks, each of which may put another state dict in the place of the one that was given."""
            entries = [(group, given["state"].get(index, {})) for group in given["param_groups"] for index in group["params"]]
            check_scalars(self._rule, entries)
            taken[0] = given

        with self.register_load_state_dict_pre_hook(check):
            super().load_state_dict(state_dict)
        self._keep_floats(taken[0])
        self._hypers_read = Hypers(self._rule)
        self._publish_state(self._entries())
        self._state.forget()

    def _keep_floats(self, state_dict: dict[str, Any]) -> None:
        """Give the state of parameters in half precision back the digits that torch rounds off when it loads."""
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        for index, tensor in zip(saved, (each for group in self.param_groups for each in group["params"]), strict=True):
            if tensor.dtype not in HALVES:
                continue
            for name, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
                    self.state[tensor][name] = value.detach().clone()

    def replace_weights(
        self,
        values: Iterable[torch.Tensor] | Mapping[str, torch.Tensor] | Callable[[list[torch.Tensor]], Iterable[torch.Tensor]],
    ) -> None:
        """Make these tensors the weights of the whole job. One worker calls it, at any time between steps.

        They are one for each parameter in the order of the param_groups, or a state dict of the model that was given as
        `model=`. Its entries for buffers (BatchNorm) and for parameters that this optimizer does not train are loaded into this
        worker's model alone. The others take the weights with their next pull, and pushes that are under way apply to them.

        A function receives copies of the newest weights and returns their replacements, so no update is lost:
        `optimizer.replace_weights(lambda weights: [w.clamp(-c, c) for w in weights])` clamps as WGAN does. The optimizer's
        state, the version and the step counts stay.

        Raises ValueError for tensors of other shapes or names, UsageError for names without `model=`, for a function
        ParameterChangedError as step() does, and the errors of waiting for the shard locks; nothing changes then.
        """
        self._job.worker.check_usable()
        self._job.worker.check_moment("replace_weights()")
        if callable(values):  # others take the place of what a script has written
            self._job.check_writes()
        given: Any = values
        others: list[Pair] = []
        if isinstance(values, Mapping):
            given, others = in_order(self._model, self._tensors, values)
        make = given if callable(given) else lambda _: given
        state.publish_weights(self._job.worker, self._job.tensors, lambda newest: list(make(newest)))
        with torch.no_grad():
            for tensor, value in others:
                tensor.copy_(value)
        self._job.take_weights(range(len(self._tensors)))
        self._job.weights.remember()

    def _publish_state(self, entries: Sequence[Entry | None]) -> None:
        """Make worker 0's entries, of which those that are None stay, the job's.

        Not those of its replacement, whose script loads before its first step.
        """
        if self._job.worker.rank == 0 and (not self._job.worker.generation or self._job.worker.own_steps):
            state.publish(self._job.worker, self._job.tensors, self._rule, entries)
            self._job.show_newest()


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values of an option are equal, as far as that can be told."""
    try:
        return bool(torch.equal(one, other)) if isinstance(one, torch.Tensor) else bool(one == other)
    except Exception:  # of any kind: a script's own type
        return one is other


def check_kind(optimizer: object) -> None:
    """Raise UsageError for anything but a torch optimizer."""
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, OptimizerState):
        raise UsageError(
            "expected a torch optimizer, as in DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)), found"
            f" {type(optimizer).__name__}{', wrapped already' if isinstance(optimizer, OptimizerState) else ''}"
        )
    patched = optimizer.__dict__.get("step")
    if patched is not None and not hasattr(patched, "_wrapped_by_lr_sched"):
        logger.warning(
            "step() of the torch optimizer was replaced by %s, which DistributedOptimizer does not call: replace its step()",
            getattr(patched, "__qualname__", patched),
        )


def refuse_calls(inner: torch.optim.Optimizer, fold: TorchFold | None = None, *, loads: bool = False) -> list[Any]:
    """Let step() and load_state_dict() of a wrapped optimizer raise UsageError, until the hooks that this returns are removed.

    The DistributedOptimizer has the same hooks. `loads`: load_state_dict() is allowed. Inside `fold` it may step others.
    """

    def refusal(text: str) -> Callable[..., None]:
        def refuse(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if optimizer is inner:
                raise UsageError(text)

        return refuse

    refuse_step = refusal(
        "step() of an optimizer that is wrapped pushes nothing, and would write into memory that other workers read: call"
        " step() of the DistributedOptimizer"
    )
    refuse_load = refusal(
        "load_state_dict() of an optimizer that is wrapped changes nothing in the job: load before wrapping it, or into the"
        " DistributedOptimizer"
    )

    def refuse_inside(_: torch.optim.Optimizer, *__: Any) -> None:
        if fold is None or not fold.is_stepping:
            raise UsageError(
                f"step() of an optimizer inside {type(inner).__name__}, which is wrapped, was called outside of step() of the"
                " DistributedOptimizer, and would change the weights of this worker alone: with one worker call step(closure)"
                f" of that; with several wrap the inner optimizer, and make {type(inner).__name__} around it"
            )

    handles = [
        inner.register_step_pre_hook(refuse_step),
        *(each.register_step_pre_hook(refuse_inside) for each in inside(inner)),
    ]
    return handles if loads else [*handles, inner.register_load_state_dict_pre_hook(refuse_load)]


Pair = tuple[torch.Tensor, torch.Tensor]


def in_order(
    model: torch.nn.Module | None, tensors: Sequence[torch.Tensor], values: Mapping[str, torch.Tensor]
) -> tuple[list[torch.Tensor], list[Pair]]:
    """The values of the job's parameters `tensors`, in their order; and each other tensor of the model with its value.

    Raises UsageError without a model, which gives the names; ValueError if an entry is missing, unknown, no tensor, or of
    another shape.

    >>> model = torch.nn.Linear(2, 1)
    >>> in_order(model, [model.bias], {"weight": torch.ones(1, 2), "bias": torch.zeros(1)})[0]
    [tensor([0.])]
    """
    if model is None:
        raise UsageError(
            "expected the model of these names, found that the optimizer was wrapped without it: pass model= to"
            " DistributedOptimizer, or a list of tensors in the order of the param_groups"
        )
    own, values = of_model(model.state_dict(keep_vars=True)), of_model(values)
    names = {id(tensor): name for name, tensor in reversed(own.items())}  # of tied ones the first name
    wanted = [names.get(id(tensor)) for tensor in tensors]
    missing = [name or "a parameter outside the model" for name in wanted if name not in values]
    unknown = [name for name in values if name not in own]
    if missing or unknown:
        raise ValueError(
            f"expected an entry for each of the job's {len(wanted)} parameters and only names of the model, found"
            f" {'none for ' + ', '.join(missing) if missing else 'all'}"
            f"{' and the unknown ' + ', '.join(unknown) if unknown else ''}; use model.state_dict() of the same model"
        )
    for name, value in values.items():
        tensor = own[name]
        if not isinstance(value, torch.Tensor) or not isinstance(tensor, torch.Tensor) or value.shape != tensor.shape:
            shape = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else "that is loaded into the model itself"
            found = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(f"entry {name!r}: expected a tensor of shape {shape}, found {found}")
    trained = {id(tensor) for tensor in tensors}
    others = [(own[name], value) for name, value in values.items() if id(own[name]) not in trained]
    return [values[name] for name in wanted if name is not None], others

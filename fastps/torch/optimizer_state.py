"""A wrapped optimizer's state and weights in torch's own terms: state_dict, load_state_dict, param groups."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from fastps.errors import UsageError
from fastps.job.update_rules import Rule
from fastps.store.worker import Worker
from fastps.torch import state
from fastps.torch.named_weights import NamedWeights
from fastps.torch.update_rules import WRAP_ANEW, Hypers, check_saved
from fastps.torch.weights import Weights


class OptimizerState(torch.optim.Optimizer):
    """The part of a DistributedOptimizer that loads and saves state and weights."""

    _worker: Worker
    _model: torch.nn.Module | None
    _weights: Weights
    _wrapped: bool
    _tensors: list[Any]
    _rule: Rule
    _hypers_read: Hypers
    _inner: torch.optim.Optimizer
    _untaken: str | None = "the worker left with an error, or at the program's exit, and kept no state"

    @property
    def _total_steps(self) -> int:
        return self._worker.earlier_steps + self._worker.own_steps

    def _tensor_views(self, views: list[Any]) -> list[torch.Tensor]:
        """Tensors over flat views of the arena, one per parameter."""
        raise NotImplementedError

    def _take_weights(self) -> None:
        """Update every parameter to the newest version."""
        raise NotImplementedError

    def take_newest_weights(self) -> None:
        """Show the newest version between two steps, as `step()` does, without a push.

        Workers that must show one version, for an evaluation say, call it between two barriers, while none of them pushes.

        >>> import fastps
        >>> model = torch.nn.Linear(2, 1)
        >>> with fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)) as optimizer:
        ...     optimizer.take_newest_weights()

        Raises UsageError after close, and after many calls without a step under a discipline that waits for the slowest worker.
        """
        self._worker.check_open()
        if self._worker.store.version != self._worker.version:
            self._take_weights()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise UsageError: pickle and copy would make an optimizer that belongs to no job."""
        raise UsageError(
            "a DistributedOptimizer cannot be copied or pickled, because it is a worker of a job: expected its state_dict() or"
            " the torch optimizer, found the worker; wrap the torch optimizer in the process that trains with it"
        )

    def _entries(self) -> list[dict[str, Any]]:
        """Each parameter's entry in the torch optimizer's state; empty if it has none."""
        return [self.state.get(tensor, {}) for tensor in self._tensors]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise UsageError, because the arena has its size: end this job and begin one with the new parameters."""
        if self._wrapped:
            raise UsageError(
                "add_param_group() after wrapping is not supported, because the arena exists already: add the group to the"
                f" torch optimizer first, then wrap it; {WRAP_ANEW}"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Copies of the optimizer's state at one version, in a form that the wrapped optimizer can load.

        After `close()` it is the state at that moment. Raises UsageError if that could not be taken, and says why.
        """
        if not self._worker.closed:
            self._take_state()
        elif self._untaken is not None:
            raise UsageError(f"state_dict() after close(): {self._untaken}")
        return super().state_dict()

    def _take_state(self) -> None:
        """Copy the job's state into `state`, which the wrapped optimizer shares."""
        self._worker.check_open()
        groups = [group for group in self.param_groups for _ in group["params"]]
        found = state.entries(self._worker, self._tensor_views, self._rule, groups)
        self.state.update({tensor: entry for tensor, entry in zip(self._tensors, found, strict=True) if entry is not None})

    def _keep_state(self) -> None:
        """Take the state for the time after close. No error leaves this: the training is over."""
        try:
            self._take_state()
            self._untaken = None
        except Exception as error:  # of any kind: param_groups may have changed since the last step
            self._untaken = f"the state could not be taken at close: {type(error).__name__}: {error}"

    def unwrap(self) -> torch.optim.Optimizer:
        """End the job, and return the torch optimizer with the job's last state. Every worker calls it, after the same step.

        The parameters are private copies of the weights. Worker 0 waits until the others have called it or closed, so it has
        what all of them pushed. To go on with more parameters, add them to the torch optimizer, and wrap it again: the new job
        begins with worker 0's weights and state. If every worker calls `wait_for_others()` before, all have the job's last
        weights and state.

        >>> import fastps
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        >>> optimizer = fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        >>> inner = optimizer.unwrap()
        >>> inner.add_param_group({"params": model.append(torch.nn.Linear(2, 1))[1].parameters(), "lr": 0.01})
        >>> fastps.DistributedOptimizer(inner).close()

        After `close()`, the torch optimizer has the state of that moment.

        Raises UnsupportedError in a job of several nodes, WorkerDiedError, TimeoutExceededError.
        """
        if not self._worker.closed:
            self._worker.store.layout.check_has_state("unwrap()")
            if self._worker.rank == 0:
                self.wait_for_others()
            self.close()
        if self._untaken is not None:
            raise UsageError(f"unwrap(): {self._untaken}")
        return self._inner

    def wait_for_others(self) -> None:
        """Wait until every other worker has closed, and take the final weights."""
        raise NotImplementedError

    def close(self, failure: str | None = None) -> None:
        """Leave the job."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this or of the wrapped optimizer, at any time between steps. Every worker calls it.

        Worker 0's state becomes the job's, under all shard locks: each fold sees the old state or the new one. The options (lr
        and others) are each worker's own, and travel with its next push. Weights, version and the number of updates stay.

        Raises ValueError for another model's state, and UnsupportedError for state that the fold would compute differently.
        """
        self._worker.check_usable()
        check_saved(self._rule, state_dict)
        super().load_state_dict(state_dict)
        self._keep_floats(state_dict)
        self._hypers_read = Hypers(self._rule)
        self._inner.param_groups = self.param_groups
        self._inner.state = self.state
        self._publish_state()

    def _keep_floats(self, state_dict: dict[str, Any]) -> None:
        """Give the state of parameters in half precision back the digits that torch rounds off when it loads."""
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        for index, tensor in zip(saved, self._tensors, strict=True):
            if tensor.dtype not in (torch.float16, torch.bfloat16):
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

        Raises ValueError for tensors of other shapes or names, UsageError for names without `model=`, and the errors of waiting
        for the shard locks; nothing changes then.
        """
        self._worker.check_usable()
        named = NamedWeights(self._model, self._tensors, values) if isinstance(values, Mapping) else None
        given: Any = values if named is None else named.in_order()
        make = given if callable(given) else lambda _: given
        state.publish_weights(self._worker, self._tensor_views, lambda newest: list(make(newest)))
        if named is not None:
            named.load_others()
        self._take_weights()
        self._weights.remember()

    def _publish_state(self) -> None:
        """Make worker 0's optimizer state the job's; not that of its replacement, whose script loads before its first step."""
        if self._worker.rank == 0 and (not self._worker.generation or self._worker.own_steps):
            state.publish(self._worker, self._tensor_views, self._rule, self._entries())
            self._take_weights()


def check_kind(optimizer: object) -> None:
    """Raise UsageError for anything but a torch optimizer."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            "expected a torch optimizer, as in DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)), found"
            f" {type(optimizer).__name__}"
        )


def refuse_load(inner: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Raise UsageError. The wrapped optimizer's load_state_dict calls it, until `close`."""
    raise UsageError(
        "load_state_dict() of an optimizer that is wrapped changes nothing in the job: load before wrapping it, or into the"
        " DistributedOptimizer"
    )

"""Checks for uses of a model by the program or by other libraries that would silently give wrong results.

Detected: wrappers that average gradients themselves, and memory that other processes share. Each check raises an error that
names the cause, and changes nothing. Layers with sparse gradients are found, too. `push_hook` is the communication hook
with which DistributedDataParallel averages nothing: it knows no optimizer, because the optimizer finds the wrapper.
"""

import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from fastps.errors import ParameterChangedError, UnsupportedError, UsageError
from fastps.job import environment
from fastps.job.policy import Policy
from fastps.store import jobs_of_process
from fastps.system import garbage

logger = logging.getLogger("fastps.torch")

_untraced: list[str] = []  # the packages that torch.compile was told not to trace
_SPARSE_LAYERS = (torch.nn.Embedding, torch.nn.EmbeddingBag)
_CURE = (
    "pass the bare module to both, and let nothing else average: under Accelerate, Lightning or the Trainer start with"
    " `fastps run --env fastps`, which shows them no process group to join; DistributedDataParallel averages nothing with"
    " register_comm_hook(None, fastps.push_hook)"
)
_OTHER_WEIGHTS = (
    "to evaluate other weights use `with optimizer.shown_weights(tensors)`, to change the job's weights for all workers call"
    " optimizer.replace_weights(tensors), and to go on with others after the training call close() first; to perturb and"
    " restore them between steps (SAM) do so inside `with optimizer.private_weights():`, backward included, and call step()"
    " after the block"
)


_KINDS: dict[str, tuple[Any, str]] = {
    "sync": ((str, Policy), 'a spec such as "dssp:3,15", or a Policy'),
    "model": (torch.nn.Module, "the model, a torch.nn.Module"),
    "batch_size": (Integral, "a whole number"),
    "job": (str, "a name"),
    "rank": (Integral, "a whole number"),
    "workers": (Integral, "a whole number"),
    "seeds": (Mapping, "a mapping of names to seeds"),
}


def check_kinds(**given: object) -> None:
    """Raise UsageError for an argument of DistributedOptimizer that is of another kind, and is not None."""
    for name, value in given.items():
        kind, expected = _KINDS[name]
        if value is not None and not isinstance(value, kind):
            raise UsageError(f"DistributedOptimizer: expected {name}= to be {expected}, found {value!r}"[:300])


def check_model(model: torch.nn.Module | None, tensors: Sequence[torch.Tensor]) -> None:
    """Raise UnsupportedError for a model whose wrapper averages gradients or shards parameters; warn of another model's."""
    if model is None:
        return
    if (wrapper := _wrapper_of(model)) is not None and not _pushes(model):
        raise UnsupportedError(f"the model is wrapped by {wrapper}, which averages gradients itself: {_CURE}")
    own = {id(each) for each in model.parameters()}
    if own and not any(id(tensor) in own for tensor in tensors):
        logger.warning(
            "model= has none of the optimizer's parameters, so the names and buffers of checkpoints and readers are not those"
            " of the model that trains: give the model whose parameters() the optimizer got"
        )


def keep_untraced() -> None:
    """Let torch.compile call fastps's own functions and trace none of them: their counters would become constants of a graph.

    A step inside a compiled function then breaks its graph there; with fullgraph=True torch raises an error that names it.
    """
    rules = sys.modules.get("torch._dynamo.trace_rules")  # every torch optimizer imports it
    if rules is not None and not _untraced:
        rules.add("fastps")
        _untraced.append("fastps")


def check_memory(tensors: Sequence[torch.Tensor], names: Sequence[str]) -> None:
    """Raise UnsupportedError for a parameter that other processes share, or that is a part of a sharded one."""
    for tensor, name in zip(tensors, names, strict=True):
        kind = "FlatParameter" if getattr(tensor, "_is_flat_param", False) else type(tensor.data).__name__
        if kind in ("DTensor", "FlatParameter"):
            raise UnsupportedError(
                f"parameter {name!r} is a {kind}, a part that fully_shard or FullyShardedDataParallel keeps: expected whole"
                " parameters; leave sharding out, because fastps keeps one copy for all workers"
            )
        if tensor.device.type == "cpu" and tensor.is_shared():  # type: ignore[no-untyped-call]
            raise UnsupportedError(
                f"parameter {name!r} lies in memory that torch shares between processes (by share_memory(), or as an argument"
                " of a torch.multiprocessing process): fastps would point it elsewhere, and the other processes would keep the"
                " first weights; start the workers by fastps.spawn(fn, args, workers=N, model=model), which leaves the final"
                " weights in the model, or wrap an optimizer of copy.deepcopy(model)"
            )


def sparse_parameters(tensors: Sequence[torch.Tensor], modules: Sequence[torch.nn.Module]) -> set[int]:
    """The numbers of the parameters that belong to one of the modules with sparse=True, which makes sparse gradients."""
    places = {id(tensor): index for index, tensor in enumerate(tensors)}
    found = set()
    for layer in modules:
        if isinstance(layer, _SPARSE_LAYERS) and layer.sparse and id(layer._parameters.get("weight")) in places:
            found.add(places[id(layer._parameters["weight"])])
    return found


def check_not_averaged(tensors: Sequence[torch.Tensor]) -> None:
    """Raise UnsupportedError if a wrapper around these parameters averages their gradients over a process group.

    The check is cheap when torch.distributed has no group of several processes, because such a wrapper needs one.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    if torch.distributed.get_world_size() < 2:
        return
    own = {id(tensor) for tensor in tensors}
    for module in _objects_of((torch.nn.Module,)):
        wrapper = _wrapper_of(module)
        if wrapper is None or not any(id(parameter) in own for parameter in module.parameters()):
            continue
        if _pushes(module):
            _check_pushing(module, own)
        else:
            raise UnsupportedError(
                f"these parameters are inside {wrapper}, which averages their gradients over"
                f" {torch.distributed.get_world_size()} processes before each push: every gradient would be counted once a"
                f" worker; {_CURE}"
            )


def warn_at_first_step(model: torch.nn.Module | None, tensors: Sequence[torch.Tensor]) -> None:
    """Warn of what several workers would do otherwise than one, as far as that is known at the first step."""
    warn_of_trained_apart(model, tensors)
    warn_of_undivided()


def warn_of_trained_apart(model: torch.nn.Module | None, tensors: Sequence[torch.Tensor]) -> None:
    """Warn of parameters of the model that a torch optimizer trains beside this one: each worker trains its own copy."""
    named = dict(model.named_parameters()) if model is not None else {}
    own = {id(tensor) for tensor in tensors} | jobs_of_process.trained()
    others = {id(tensor): name for name, tensor in named.items() if tensor.requires_grad and id(tensor) not in own}
    groups = [group for each in _objects_of((torch.optim.Optimizer,)) for group in each.param_groups] if others else []
    apart = [others[id(tensor)] for group in groups for tensor in group["params"] if id(tensor) in others]
    if apart:
        logger.warning(
            "parameter %r%s of the model is trained by an optimizer that fastps does not wrap: each worker trains its own copy,"
            " and they drift apart; wrap that optimizer, too (of a complex parameter, train torch.view_as_real of it)",
            apart[0],
            f" and {len(apart) - 1} more" if len(apart) > 1 else "",
        )


def warn_of_undivided() -> None:
    """Warn, on worker 0, of a sampler that shuffles a whole data set, where the script never asks which worker it is."""
    if environment.own_rank() or not environment.is_undivided():
        return
    for sampler in _objects_of((torch.utils.data.RandomSampler,)):
        logger.warning(
            "a DataLoader shuffles all %d samples, and so does that of each other worker, unless the script divides them by"
            " itself: each of the %d workers trains on everything; use loader = fastps.shard(loader) after wrapping",
            len(sampler),
            environment.own_world_size(),
        )
        return


def _check_pushing(wrapper: torch.nn.Module, own: set[int]) -> None:
    """Raise UnsupportedError if a DDP wrapper whose hook pushes has parameters that no push carries, or broadcasts buffers."""
    for name, parameter in wrapper.named_parameters():
        if parameter.requires_grad and id(parameter) not in own:
            raise UnsupportedError(
                f"parameter {name!r} of the DistributedDataParallel model is not in the optimizer, and fastps.push_hook"
                " averages nothing: every worker would train it alone; give the optimizer all parameters, or freeze this one"
            )
    if getattr(wrapper, "broadcast_buffers", False) and next(wrapper.buffers(), None) is not None:
        raise UnsupportedError(
            "the DistributedDataParallel model broadcasts its buffers in each forward, so every worker waits for all others:"
            " construct it with broadcast_buffers=False; model= of the optimizer averages buffers"
        )


def _wrapper_of(module: torch.nn.Module) -> str | None:
    """The class name of the wrapper that averages or shards this module's gradients; None without one."""
    for kind in type(module).__mro__:
        if kind is DistributedDataParallel or kind.__name__ in ("FullyShardedDataParallel", "FSDPModule"):
            return kind.__name__
    return None


def _objects_of(kinds: tuple[type, ...]) -> Iterable[Any]:
    """All instances of these types that the garbage collector tracks, or has frozen.

    Compares type(), not __class__: asking a proxy for its __class__ may be expensive.
    """
    return [each for each in garbage.objects() if issubclass(type(each), kinds)]


# Torch refuses a hook whose annotations are others than these. Its stubs do not have the class.
def push_hook(
    state: Any,
    bucket: torch.distributed.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Let DDP average nothing, so that each worker pushes its own gradient. Register it before the optimizer is wrapped.

    `opt.step()` of the DistributedOptimizer then pushes it to the store, under any discipline. `state` is not used. All
    parameters that DDP synchronizes must be the optimizer's, and `broadcast_buffers` must be False if the model has buffers;
    the constructor of DistributedOptimizer raises UnsupportedError otherwise.

    Example::

        ddp_model = DistributedDataParallel(model)
        ddp_model.register_comm_hook(None, fastps.push_hook)
        opt = fastps.DistributedOptimizer(torch.optim.SGD(ddp_model.parameters(), lr=0.1), sync="asp")
    """
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _pushes(wrapper: torch.nn.Module) -> bool:
    """Whether this hook is registered with a DDP wrapper. `_comm_hooks` is where torch keeps hooks; it has no public name."""
    return any(hook is push_hook for hook, _ in getattr(wrapper, "_comm_hooks", ()))


def write_error(name: str, *, is_undone: bool = False, has_moved: bool = False, why: str = "") -> ParameterChangedError:
    """The error for a parameter that something else than step() has changed.

    `is_undone` says that the next pull writes over it, `has_moved` that it was pointed at memory that cannot follow it, and
    `why` why the write is not taken.
    """
    if is_undone:
        return ParameterChangedError(
            f"parameter {name!r} was written to outside of step() (in place, or by load_state_dict), which the next pull would"
            " undo: load weights before wrapping, or by optimizer.replace_weights(tensors) in all workers, and avoid layers"
            " that renormalize weights (max_norm)"
        )
    if has_moved:
        return ParameterChangedError(
            f"parameter {name!r} was pointed at other memory (of another type or form, a part of a larger tensor, or memory"
            " that torch shares: model.to(), share_memory(), a state dict sent through a queue of torch.multiprocessing, which"
            " moves it: send copies): expected memory of its own, because the next step points it back at the job's weights; to"
            f" change its type or form call optimizer.unwrap() first, and wrap again; {_OTHER_WEIGHTS}"
        )
    reason = why or "other workers read the same memory"
    return ParameterChangedError(
        f"parameter {name!r} was written to outside of step() (in place, or by load_state_dict): {reason}; {_OTHER_WEIGHTS};"
        " register parametrizations before wrapping, avoid layers that renormalize their weights (max_norm), and give the"
        " optimizer only what trains: no average or target that the script writes"
    )

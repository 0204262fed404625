"""TorchRL's collectors with weights that travel by fastps: a WeightSyncScheme over a Publisher and readers (TorchRL 0.14).

python examples/torchrl_scheme.py

`collector.update_policy_weights_()` publishes. A collector's process takes the newest version before it calls its policy, whole
and without a copy; nothing is sent, no thread waits for weights, and no acknowledgement comes back.
"""

import os
from typing import Any

import torch
from torchrl.weight_update import WeightSyncScheme
from torchrl.weight_update.utils import _resolve_model

import fastps


class FastpsScheme(WeightSyncScheme):
    """Give one to a collector: `weight_sync_schemes={"policy": FastpsScheme()}`."""

    def __init__(self, job: str = "", readers: int = 8) -> None:
        super().__init__("state_dict")
        self.job, self.readers = job or f"torchrl-{os.getpid()}-{id(self)}", readers
        self.publisher: fastps.Publisher | None = None
        self.reader: fastps.Reader | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "publisher": None, "reader": None, "_policy": None}

    def create_transport(self, **_: Any) -> Any:
        """None: the arena is the transport."""

    def _init_on_sender_impl(self, *, model_id: Any = None, context: Any = None, model: Any = None, **_: Any) -> None:
        self.model_id, self.context = model_id, context
        self._policy = model if model is not None else _resolve_model(context, model_id)
        self.publisher = fastps.Publisher(self._policy, self.job, readers=self.readers)

    def _setup_connection_and_weights_on_sender_impl(self, **_: Any) -> None:
        """The publisher has published the first version."""

    def send(self, weights: Any = None, worker_ids: Any = None) -> None:
        """Publish the policy, or these weights of it: a module, or a mapping of its names."""
        assert self.publisher is not None, "initialize the sender first"
        if isinstance(weights, torch.nn.Module):
            weights = {**dict(weights.named_parameters()), **dict(weights.named_buffers())}
        elif weights is not None and not isinstance(weights, dict):
            weights = dict(weights.flatten_keys(".").items())  # a TensorDict
        self.publisher.publish(weights)

    def _init_on_receiver_impl(self, *, model_id: Any, context: Any = None, model: Any = None, **more: Any) -> None:
        self.model_id, self.context = model_id, context
        self.worker_idx = more.get("worker_idx")
        self.model = model if model is not None else _resolve_model(context, model_id)

    def _setup_connection_and_weights_on_receiver_impl(self, *, worker_idx: Any = None) -> None:
        self.reader = fastps.reader(self.job, follow=True)
        policy = self.model
        if any(each.is_meta for each in policy.parameters()):
            policy.to_empty(device="cpu")  # collectors send a policy without its weights
        self.reader.update(policy)
        policy.register_forward_pre_hook(lambda *_: self.receive())

    def receive(self, timeout: float | None = None) -> None:
        """Take the newest version, if there is another than the policy shows."""
        if self.reader is not None and self.reader.is_behind:
            self.reader.update()

    def shutdown(self) -> None:
        """Give back what this process has of the job."""
        for part in (self.publisher, self.reader):
            if part is not None:
                part.close()
        self.publisher = self.reader = None
        super().shutdown()


def main() -> None:
    """Collect frames while the policy's weights change, and show that the collector's process plays with the new ones."""
    from tensordict.nn import TensorDictModule
    from torchrl.collectors import MultiSyncCollector
    from torchrl.testing.mocking_classes import ContinuousActionVecMockEnv

    env = ContinuousActionVecMockEnv()
    inputs, outputs = env.observation_spec["observation"].shape[-1], env.action_spec.shape[-1]
    policy = TensorDictModule(torch.nn.Linear(inputs, outputs), in_keys=["observation"], out_keys=["action"])
    options: Any = {"frames_per_batch": 20, "total_frames": 100, "weight_sync_schemes": {"policy": FastpsScheme()}}
    collector = MultiSyncCollector([ContinuousActionVecMockEnv] * 2, policy, **options)
    try:
        for number, batch in enumerate(collector):
            with torch.no_grad():
                expected = policy.module(batch["observation"])
                is_newest = torch.allclose(batch["action"], expected, atol=1e-5)
                print(f"batch {number}: {'the newest weights' if is_newest else 'other weights'} were played with")
                policy.module.weight.normal_()
            collector.update_policy_weights_()
    finally:
        collector.shutdown()


if __name__ == "__main__":
    main()

"""timm's training loop, as its train.py has it: one worker has plain torch's digits, with timm's own optimizers, too."""

import copy
import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.torch_optimizers import alone, with_and_without  # noqa: F401 - a fixture

OWN = ["lookahead_adamw", "lamb", "nadamw", "lion"]  # optimizers of timm's own


class _Named(type):
    """A class of torchvision's, of which timm's modules want the name, and of an enumeration the members' names."""

    def __getattr__(cls, name: str) -> str:
        return name


def _class_named(name: str) -> type:
    if not name[0].isupper():  # a module, or what Python asks of one
        raise AttributeError(name)
    return _Named(name, (), {})


@pytest.fixture(scope="module")
def timm() -> Iterator[Any]:
    """The library. Its modules import torchvision, whose binary of PyPI does not load beside a torch without CUDA.

    What these tests run uses none of it: names stand for it, for as long as they run.
    """
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed")
    parts = ["", ".datasets", ".ops", ".ops.misc", ".transforms", ".transforms.functional"]
    with pytest.MonkeyPatch.context() as patch:
        for name in [f"torchvision{part}" for part in parts]:
            patch.setitem(sys.modules, name, module := types.ModuleType(name))
            patch.setattr(module, "__getattr__", _class_named, raising=False)
        import timm.data
        import timm.loss
        import timm.models
        import timm.optim
        import timm.scheduler
        import timm.utils

        yield timm


def _train(timm: Any, name: str, wrap: Any, clip: str = "norm", scaled: bool = False, **options: Any) -> list[torch.Tensor]:
    """Two epochs: mixed images, a warm-up and a cosine, clipped gradients, a moving average, a checkpoint after each epoch."""
    torch.manual_seed(0)
    np.random.seed(0)  # of which Mixup draws
    draw = torch.Generator().manual_seed(1)
    # Of the keys' bias the gradient is rounding alone, which Adam makes as large as any.
    model = timm.create_model(name, num_classes=4, **({"qkv_bias": False} if name == "test_vit" else {}))
    optimizer = wrap(timm.optim.create_optimizer_v2(model, lr=1e-3, weight_decay=0.05, **options))
    schedule, _ = timm.scheduler.create_scheduler_v2(
        optimizer, "cosine", 2, warmup_epochs=1, warmup_lr=1e-5, step_on_epochs=False, updates_per_epoch=3
    )
    average = timm.utils.ModelEmaV3(model, decay=0.9)
    mixup = timm.data.Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=4)
    scaler = timm.utils.NativeScaler(device="cpu") if scaled else None
    clipped = list(timm.models.model_parameters(model, exclude_head="agc" in clip))
    steps, saved = 0, []
    schedule.step_update(0)
    for epoch in range(2):
        for _ in range(3):
            images, labels = mixup(torch.randn(4, 3, 160, 160, generator=draw), torch.randint(4, (4,), generator=draw))
            loss = timm.loss.SoftTargetCrossEntropy()(model(images), labels)
            if scaler is None:
                loss.backward()
                timm.utils.dispatch_clip_grad(clipped, 1.0, mode=clip)
                optimizer.step()
            else:
                scaler(loss, optimizer, 1.0, clip, clipped)
            optimizer.zero_grad()
            steps += 1
            average.update(model, step=steps)
            schedule.step_update(steps)
        schedule.step(epoch + 1)
        saved = copy.deepcopy([model.state_dict(), average.module.state_dict(), optimizer.state_dict()])
        optimizer.load_state_dict(saved[2])
    state = [value for entry in saved[2]["state"].values() for value in entry.values() if isinstance(value, torch.Tensor)]
    return [*saved[0].values(), *saved[1].values(), *state]


@pytest.mark.parametrize(
    "options",
    [
        {"name": "test_resnet", "opt": "sgd"},
        {"name": "test_vit", "opt": "adamw", "clip": "agc", "layer_decay": 0.7},
        {"name": "test_vit", "opt": "adamw", "scaled": True},
        {"name": "test_resnet", "opt": "sgd", "scaled": True},
        *({"name": "test_vit", "opt": opt} for opt in OWN),
    ],
    ids=["resnet", "vit", "vit-scaled", "resnet-scaled", *OWN],
)
@pytest.mark.usefixtures("alone")
def test_one_worker_has_the_digits_of_plain_torch(timm: Any, options: dict[str, Any]) -> None:
    for found, expected in zip(*with_and_without(lambda wrap: _train(timm, wrap=wrap, **options)), strict=True):
        assert (
            torch.allclose(found, expected, rtol=2e-6, atol=1e-7) if options["opt"] == "adamw" else torch.equal(found, expected)
        )

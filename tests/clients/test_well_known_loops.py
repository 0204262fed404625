"""Loops that many people have copied, and libraries' own. One worker has plain torch's digits, with equal data."""

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.support.torch_optimizers import alone, with_and_without  # noqa: F401 - a fixture

Wrap = Callable[[torch.optim.Optimizer], Any]
Weights = list[torch.Tensor]


def _word2vec(wrap: Wrap) -> Weights:
    """Skip-gram with negative samples: sparse embeddings, and a new SparseAdam with a schedule in each epoch."""
    draw = torch.Generator().manual_seed(1)
    words, size = 40, 8
    centre, context = nn.Embedding(words, size, sparse=True), nn.Embedding(words, size, sparse=True)
    nn.init.zeros_(context.weight)
    optimizer: Any = None
    for epoch in range(3):
        optimizer = wrap(torch.optim.SparseAdam([*centre.parameters(), *context.parameters()], lr=0.05 / (epoch + 1)))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
        for _ in range(6):
            at = torch.randint(words, (16,), generator=draw)
            near, noise = (at + 1) % words, torch.randint(words, (16, 3), generator=draw)
            optimizer.zero_grad()
            found = centre(at)
            loss = -functional.logsigmoid((found * context(near)).sum(1)).mean()
            loss -= functional.logsigmoid(-(context(noise) @ found[:, :, None]).squeeze(2)).sum(1).mean()
            loss.backward()
            optimizer.step()
            schedule.step()
    return [centre.weight.detach().clone(), context.weight.detach().clone()]


def _wgan(wrap: Wrap) -> Weights:
    """Two optimizers, a critic whose weights are clamped through `.data` after each of its steps, and several steps of it."""
    draw = torch.Generator().manual_seed(1)
    maker, critic = (
        nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)),
        nn.Sequential(nn.Linear(2, 16), nn.Linear(16, 1)),
    )
    of_maker = wrap(torch.optim.RMSprop(maker.parameters(), lr=5e-4))
    of_critic = wrap(torch.optim.RMSprop(critic.parameters(), lr=5e-4))
    for _ in range(5):
        for _ in range(3):
            real, noise = torch.randn(16, 2, generator=draw) + 2, torch.randn(16, 4, generator=draw)
            of_critic.zero_grad()
            (critic(maker(noise).detach()).mean() - critic(real).mean()).backward()
            of_critic.step()
            for parameter in critic.parameters():
                parameter.data.clamp_(-0.1, 0.1)
        of_maker.zero_grad()
        (-critic(maker(torch.randn(16, 4, generator=draw))).mean()).backward()
        of_maker.step()
    return [each.detach().clone() for model in (maker, critic) for each in model.parameters()]


class SmallGPT(nn.Module):
    """One block, with tied weights of the embedding and of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(20, 16), nn.Embedding(8, 16)
        # Without biases, as nanoGPT: the gradient of the keys' bias is rounding alone, which Adam makes as large as any.
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True, bias=False)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(text) + self.places(torch.arange(text.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        found: torch.Tensor = self.head(self.block(hidden, src_mask=mask, is_causal=True))
        return found


def _small_gpt(wrap: Wrap) -> Weights:
    """nanoGPT's loop: groups with and without decay, accumulation, clipping, a rate set by hand, evaluation, a checkpoint."""
    draw = torch.Generator().manual_seed(1)
    model = SmallGPT()
    decayed = [each for each in model.parameters() if each.dim() >= 2]
    others = [each for each in model.parameters() if each.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = wrap(torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95)))
    saved: dict[str, Any] = {}
    for step in range(8):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * 0.5 * (1 + math.cos(math.pi * step / 8))
        for _ in range(2):
            text = torch.randint(20, (4, 8), generator=draw)
            loss = functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()) / 2
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step == 3:
            saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    again = SmallGPT()
    again.load_state_dict(saved["model"])
    state = [value for entry in saved["optimizer"]["state"].values() for value in entry.values()]
    return [each.detach().clone() for each in (*model.parameters(), *again.parameters(), *state)]


def _ppo(wrap: Wrap) -> Weights:
    """CartPole by PPO; the library saves the model once training has ended, which asks the optimizer for its state."""
    library = pytest.importorskip("stable_baselines3", reason="the extra fastps[clients] is not installed")
    model = library.PPO("MlpPolicy", "CartPole-v1", n_steps=64, batch_size=32, n_epochs=2, seed=3, device="cpu")
    model.policy.optimizer = wrap(model.policy.optimizer)
    model.learn(total_timesteps=192)
    getattr(model.policy.optimizer, "close", lambda: None)()
    saved = io.BytesIO()
    model.save(saved)
    again = library.PPO.load(saved, device="cpu")
    state = again.policy.optimizer.state_dict()["state"]
    assert len(state) == len(list(again.policy.parameters()))
    moments = [entry[name] for entry in state.values() for name in ("exp_avg", "exp_avg_sq", "step")]
    return [each.detach().clone() for each in (*model.policy.parameters(), *again.policy.parameters(), *moments)]


@pytest.mark.parametrize("script", [_word2vec, _wgan, _small_gpt, _ppo])
@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_one_worker_has_the_digits_of_plain_torch(script: Callable[[Wrap], Weights], sync: str) -> None:
    def seeded(wrap: Wrap) -> Weights:
        torch.manual_seed(0)
        return script(wrap)

    for own, plain in zip(*with_and_without(seeded, sync=sync), strict=True):
        assert torch.allclose(own, plain, rtol=2e-6, atol=1e-7)

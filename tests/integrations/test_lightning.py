"""FastpsStrategy in Lightning's Trainer: what Lightning's own tests ask of ddp on the CPU, and what fastps promises besides."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.clients import programs

programs.needs("lightning", "torchmetrics")

from lightning.pytorch.callbacks import (  # noqa: E402
    EarlyStopping,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torchmetrics import MeanMetric  # noqa: E402

from fastps.integrations.lightning import FastpsStrategy  # noqa: E402
from tests.integrations.lightning_modules import Line, Noted, data, fit, loader, results, single, trainer  # noqa: E402


def _forked(sync: str = "bsp", **options: Any) -> FastpsStrategy:
    return FastpsStrategy(sync, start_method="fork", **options)


def _flat(lists: list[list[int]]) -> list[int]:
    return [number for numbers in lists for number in numbers]


def _weights(module: Line) -> list[float]:
    return module.net.weight.detach().float().view(-1).tolist()


# -- training -----------------------------------------------------------------------------------------


class _Scheduled(Noted):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "step"}]


@pytest.mark.parametrize(("kind", "options", "averages", "steps"), [
    (Noted, {"max_epochs": 3}, False, 24),
    (Noted, {"max_epochs": 2, "accumulate_grad_batches": 3}, False, 6),  # in each epoch twice three batches, and the last two
    (_Scheduled, {}, False, 8),
    (Noted, {"max_epochs": 4}, True, 32),
], ids=["plain", "accumulated", "scheduled in each step", "stochastic weight averaging"])  # fmt: skip
def test_two_workers_under_bsp_train_like_one_process_with_both_batches(
    kind: type[Noted], options: dict[str, Any], averages: bool, steps: int, tmp_path: Path
) -> None:
    def callbacks() -> list[Any]:
        return [StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)] if averages else []

    module, both = kind(tmp_path), kind(tmp_path)
    found = fit(module, loader(batch=4), callbacks=callbacks(), **options)
    single(tmp_path, callbacks=callbacks(), **options).fit(both, loader(batch=8))
    assert _weights(module) == pytest.approx(_weights(both), rel=1e-5), "the main process has the trained weights"
    assert [each["steps"] for each in found] == [steps] * 2
    assert found[0]["weight"] == found[1]["weight"]


_DISCIPLINES = ["asp", "ssp:3", "dssp:3,15", "backup:1", "softsync:1", "hardsync:8", "adv*:1", "r2sp:1", "auto"]


@pytest.mark.parametrize("sync", _DISCIPLINES)
def test_all_workers_end_with_the_same_weights_under_every_discipline(sync: str, tmp_path: Path) -> None:
    module = Noted(tmp_path, learning_rate=0.02)
    found = fit(module, loader(batch=2), loader(16), strategy=_forked(sync), max_epochs=3)
    assert [each["steps"] for each in found] == [48, 48]
    assert found[0]["weight"] == found[1]["weight"] == _weights(module)
    assert found[0]["metrics"]["val_loss"] < 0.7 * float(Line().loss(data(16)[:])), "it has learnt"


def test_each_worker_sees_its_share_of_the_data_shuffled_anew_each_epoch(tmp_path: Path) -> None:
    shuffled = torch.utils.data.DataLoader(data(32), batch_size=4, shuffle=True)
    first, second = fit(Noted(tmp_path), shuffled, max_epochs=2, use_distributed_sampler=True)
    epochs = [[_flat(each["seen"][4 * epoch : 4 * epoch + 4]) for each in (first, second)] for epoch in (0, 1)]
    for own, other in epochs:
        assert sorted(own + other) == list(range(32))
    assert epochs[0][0] != epochs[1][0]


def test_sampler_stays_as_it_is_where_the_trainer_is_told_so(tmp_path: Path) -> None:
    found = fit(Noted(tmp_path), torch.utils.data.DataLoader(data(16), batch_size=4))
    assert [_flat(each["seen"]) for each in found] == [list(range(16))] * 2


def test_parameters_and_buffers_begin_as_those_of_worker_0(tmp_path: Path) -> None:
    class Apart(Noted):
        def setup(self, stage: str) -> None:
            self.net.weight.data.fill_(1.0 + self.global_rank)
            self.frozen = torch.nn.Parameter(torch.full((2,), 5.0 + self.global_rank), requires_grad=False)

    found = fit(Apart(tmp_path, lambda it: it.frozen.tolist(), learning_rate=0.0), loader(16))
    assert [(each["weight"], each["note"]) for each in found] == [([1.0] * 4, [5.0, 5.0])] * 2


def test_validation_alone_begins_with_the_weights_of_worker_0(tmp_path: Path) -> None:
    class Apart(Line):
        def setup(self, stage: str) -> None:
            assert torch.distributed.is_initialized(), "as with ddp"
            self.net.weight.data.fill_(1.0 + self.global_rank)

        def on_validation_end(self) -> None:
            assert self.net.weight.view(-1).tolist() == [1.0] * 4

    trainer(tmp_path).validate(Apart(), loader(16), verbose=False)


def test_parameters_that_no_loss_uses_need_no_flag(tmp_path: Path) -> None:
    torch.nn.init.ones_((unused := torch.nn.Linear(1, 1)).weight)
    module = Noted(tmp_path, lambda it: it.unused.weight.view(-1).tolist(), unused=unused)
    assert [each["note"] for each in fit(module, loader(16))] == [[1.0], [1.0]]


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-true"])
def test_precision(precision: Any, tmp_path: Path) -> None:
    module = Noted(tmp_path, lambda it: str(it.net.weight.dtype))
    found = fit(module, loader(batch=4), precision=precision, max_epochs=4)
    expected = {"bf16-mixed": "torch.float32", "bf16-true": "torch.bfloat16", "16-true": "torch.float16"}[precision]
    assert [each["note"] for each in found] == [expected] * 2
    assert found[0]["weight"] == found[1]["weight"]
    assert torch.tensor(found[0]["weight"]) == pytest.approx(torch.ones(4), abs=0.2)


@pytest.mark.parametrize(("algorithm", "value"), [("norm", 0.01), ("value", 0.002)])
def test_gradients_of_each_worker_are_clipped_before_they_are_pushed(algorithm: str, value: float, tmp_path: Path) -> None:
    module = Noted(tmp_path, learning_rate=1.0)
    trainer(tmp_path, gradient_clip_val=value, gradient_clip_algorithm=algorithm, max_steps=1).fit(module, loader(16))
    weight, bias = module.net.weight.detach(), module.net.bias.detach()
    moved = torch.cat([(weight - Line().net.weight.detach()).view(-1), bias])
    if algorithm == "value":
        shares = moved.abs() / value  # two workers' signs agree, or not
        assert shares.round().tolist() == pytest.approx(shares.tolist(), abs=1e-3) and 1.0 in shares.round().tolist()
    else:
        assert 0.5 * value < float(moved.norm()) <= value * 1.001, "the mean of two gradients of this norm"


def test_manual_optimization_of_two_optimizers_is_two_jobs(tmp_path: Path) -> None:
    class Two(Noted):
        automatic_optimization = False

        def training_step(self, batch: Any, index: int) -> None:
            first, second = self.optimizers()
            first.zero_grad()
            self.manual_backward(self.loss(batch))
            first.step()
            second.zero_grad()
            self.manual_backward(torch.nn.functional.mse_loss(self.other(batch[0]), batch[1]))
            second.step()
            self.trained = [optimizer.optimizer.version for optimizer in (first, second)]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net.parameters(), lr=0.05), torch.optim.Adam(self.other.parameters(), lr=0.1)

    torch.nn.init.zeros_((other := torch.nn.Linear(4, 1, bias=False)).weight)
    module = Two(tmp_path, lambda it: it.trained, other=other)
    assert fit(module, loader(batch=4), max_epochs=2)[0]["note"] == [16, 16]
    assert other.weight.view(-1).tolist() == pytest.approx([1.0] * 4, abs=0.5)


# -- metrics ------------------------------------------------------------------------------------------


def test_logged_values_are_reduced_over_the_workers(tmp_path: Path) -> None:
    class Logs(Noted):
        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            self.log("rank", float(self.global_rank), sync_dist=True, on_epoch=True, on_step=True)
            self.log("sum", 1.0, sync_dist=True, reduce_fx="sum", on_epoch=True, on_step=False)
            self.log("mine", float(self.global_rank), on_epoch=True, on_step=False)
            self.mean(float(self.global_rank))
            self.log("mean", self.mean, on_epoch=True, on_step=False)
            return self.loss(batch)

    module = Logs(tmp_path, lambda it: it.all_gather(torch.tensor([it.global_rank])).tolist(), mean=MeanMetric())
    for rank, each in enumerate(fit(module, loader(16))):
        assert each["note"] == [[0], [1]]
        metrics = each["metrics"]
        assert metrics["rank"] == metrics["rank_epoch"] == metrics["mean"] == 0.5
        assert (metrics["sum"], metrics["mine"]) == (4.0, rank), "2 batches of 2 workers"


def test_strategy_reduces_gathers_and_broadcasts(tmp_path: Path) -> None:
    def note(module: Noted) -> Any:
        strategy, rank = module.trainer.strategy, module.global_rank
        own = torch.tensor([1.0 + rank])
        return {
            "mean": strategy.reduce(own.clone()).item(),
            "sum": strategy.reduce(own.clone(), reduce_op="sum").item(),
            "max": strategy.reduce(torch.tensor(rank), reduce_op="max").item(),
            "other": strategy.reduce("text"),
            "all": [strategy.reduce_boolean_decision(rank == 0), strategy.reduce_boolean_decision(rank == 0, all=False)],
            "object": strategy.broadcast({"from": rank}, src=1),
            "gathered": strategy.all_gather(own).tolist(),
        }

    expected = {"mean": 1.5, "sum": 3.0, "max": 1, "other": "text", "all": [False, True], "object": {"from": 1}}
    found = fit(Noted(tmp_path, note), loader(8))
    assert [each["note"] for each in found] == [{**expected, "gathered": [[1.0], [2.0]]}] * 2


def test_every_worker_validates_the_same_weights_under_asp(tmp_path: Path) -> None:
    class Watch(Noted):
        def on_validation_epoch_start(self) -> None:
            own = self.net.weight.detach().clone()
            self.same.append(bool((self.all_gather(own) == own).all()))

        def on_fit_start(self) -> None:
            self.same: list[bool] = []

    module = Watch(tmp_path, lambda it: it.same)
    found = fit(module, loader(), loader(8), strategy=_forked("asp"), max_epochs=3, val_check_interval=4)
    assert [each["note"] for each in found] == [[True] * 7] * 2, "once before training, and twice in each epoch"


def test_batch_norm_has_the_mean_of_all_workers_statistics(tmp_path: Path) -> None:
    class Normed(Noted):
        def loss(self, batch: Any) -> torch.Tensor:
            return torch.nn.functional.mse_loss(self.net(self.norm(batch[0])), batch[1])

    module = Normed(tmp_path, lambda it: it.norm.running_mean.tolist(), norm=torch.nn.BatchNorm1d(4, momentum=1.0))
    found = fit(module, loader(16, batch=8))
    expected = data(16).tensors[0].mean(0).tolist()
    assert [each["note"] for each in found] == [pytest.approx(expected, abs=1e-6)] * 2
    assert module.norm.running_mean is not None
    assert module.norm.running_mean.tolist() == pytest.approx(expected, abs=1e-6)


def test_validate_test_and_predict_share_the_data(tmp_path: Path) -> None:
    module = Line()
    alone = single(tmp_path)
    expected = alone.validate(module, loader(16), verbose=False)[0]["val_loss"]
    assert trainer(tmp_path).validate(module, loader(16), verbose=False)[0]["val_loss"] == pytest.approx(expected, rel=1e-5)
    assert trainer(tmp_path).test(module, loader(16), verbose=False)[0]["test_loss"] == pytest.approx(expected, rel=1e-5)

    class Predicts(Line):
        def on_predict_epoch_end(self) -> None:
            assert sorted(self.all_gather(torch.tensor(self.seen)).view(-1).tolist()) == list(range(16))

        def predict_step(self, batch: Any, index: int) -> None:
            self.seen.append(batch[2].tolist())

    trainer(tmp_path).predict(Predicts(), loader(16), return_predictions=False)


# -- checkpoints and callbacks ------------------------------------------------------------------------


class _Adam(Noted):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.learning_rate)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_checkpoint_has_weights_and_optimizer_of_one_version_and_plain_lightning_loads_it(sync: str, tmp_path: Path) -> None:
    kept = ModelCheckpoint(tmp_path / "kept", save_top_k=-1, every_n_train_steps=4, save_last=True)
    module = _Adam(tmp_path)
    trainer(tmp_path, _forked(sync), enable_checkpointing=True, callbacks=[kept], max_epochs=2).fit(module, loader())
    files = sorted((tmp_path / "kept").glob("*.ckpt"))
    names = [f"epoch={epoch}-step={step}.ckpt" for epoch, step in ((0, 4), (0, 8), (1, 12), (1, 16))]
    assert [file.name for file in files] == [*names, "last.ckpt"]
    last = torch.load(files[-1], weights_only=False)
    assert last["state_dict"]["net.weight"].view(-1).tolist() == _weights(module)
    steps = {float(entry["step"]) for entry in last["optimizer_states"][0]["state"].values()}
    assert steps == {16.0 if sync == "bsp" else 32.0}, "every push is an update under asp"
    alone = _Adam(tmp_path)
    single(tmp_path, max_epochs=3).fit(alone, loader(batch=8), ckpt_path=files[-1])
    assert results(tmp_path)[0]["steps"] == 24, "8 more, of its own"


def test_resumed_run_ends_with_the_bits_of_one_that_was_not_interrupted(tmp_path: Path) -> None:
    def fit(epochs: int, folder: str, path: Path | None = None) -> _Adam:
        kept = ModelCheckpoint(tmp_path / folder, save_last=True)
        module = _Adam(tmp_path)
        its = trainer(tmp_path, enable_checkpointing=True, callbacks=[kept], max_epochs=epochs)
        its.fit(module, loader(), ckpt_path=path)
        return module

    whole = fit(4, "whole")
    fit(2, "half")
    resumed = fit(4, "resumed", tmp_path / "half" / "last.ckpt")
    assert _weights(resumed) == _weights(whole)
    states = [torch.load(tmp_path / name / "last.ckpt", weights_only=False) for name in ("whole", "resumed")]
    for whole_entry, entry in zip(*(state["optimizer_states"][0]["state"].values() for state in states), strict=True):
        assert all(torch.equal(whole_entry[name], entry[name]) for name in ("exp_avg", "exp_avg_sq", "step"))
    assert states[0]["lr_schedulers"][0]["last_epoch"] == states[1]["lr_schedulers"][0]["last_epoch"] == 4


def test_best_checkpoint_is_known_and_tested_in_the_main_process(tmp_path: Path) -> None:
    best = ModelCheckpoint(tmp_path / "best", monitor="val_loss")
    its = trainer(tmp_path, enable_checkpointing=True, callbacks=[best], max_epochs=2)
    its.fit(Line(), loader(), loader(16))
    assert Path(best.best_model_path).name == "epoch=1-step=16.ckpt"
    assert its.state.finished
    torch.save(its.model.net, tmp_path / "net.pt")
    assert torch.equal(torch.load(tmp_path / "net.pt", weights_only=False).weight, its.model.net.weight)
    found = its.test(Line(), loader(16), ckpt_path=best.best_model_path, verbose=False)
    assert found[0]["test_loss"] == pytest.approx(float(its.callback_metrics["test_loss"]))


def test_early_stopping_ends_all_workers_though_one_alone_wants_it(tmp_path: Path) -> None:
    class Uneven(Noted):
        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val", float(self.current_epoch if self.global_rank else -self.current_epoch))

    stopping = EarlyStopping("val", patience=1)
    found = fit(Uneven(tmp_path), loader(16), loader(8), callbacks=[stopping], max_epochs=9)
    assert [each["steps"] for each in found] == [4, 4], "worker 1 sees no improvement after the first epoch"


def test_only_worker_0_logs(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    trainer(tmp_path, logger=CSVLogger(tmp_path, name="log"), log_every_n_steps=1).fit(Line(), loader(16))
    assert len((tmp_path / "log" / "version_0" / "metrics.csv").read_text().splitlines()) == 3
    assert not (tmp_path / "log" / "version_1").exists()


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_averaged_weights_are_validated_and_kept_and_training_goes_on_with_its_own(sync: str, tmp_path: Path) -> None:
    class Watch(Noted):
        def on_validation_epoch_start(self) -> None:
            self.shown.append(self.net.weight.detach().view(-1).tolist())

        def on_train_epoch_start(self) -> None:
            self.shown = getattr(self, "shown", [])

    from torch.optim.swa_utils import get_ema_avg_fn

    average = WeightAveraging(avg_fn=get_ema_avg_fn(0.5))
    module = Watch(tmp_path, lambda it: it.shown)
    options: dict[str, Any] = {"callbacks": [average], "num_sanity_val_steps": 0}
    found = fit(module, loader(), loader(8), strategy=_forked(sync), max_epochs=3, **options)
    plain = Noted(tmp_path)
    fit(plain, loader(), loader(8), strategy=_forked(sync), max_epochs=3)
    assert found[0]["weight"] == found[0]["note"][-1], "the average, which the last validation saw"
    assert found[0]["weight"] != _weights(plain)
    assert found[0]["weight"] == pytest.approx(_weights(plain), abs=0.1)


def test_learning_rate_finder_trains_before_and_the_fit_begins_with_the_first_weights(tmp_path: Path) -> None:
    first: list[list[float]] = []

    class Finds(Noted):
        def on_train_start(self) -> None:
            first.append(_weights(self))

    finder = LearningRateFinder(num_training_steps=8, max_lr=0.1)
    found = fit(Finds(tmp_path, lambda it: first), loader(batch=4), callbacks=[finder], max_epochs=2)
    assert found[0]["weight"] == found[1]["weight"] != _weights(Line())
    assert found[0]["note"] == found[1]["note"] == [_weights(Line())] * 2, "the finder's run, and the fit"
    assert found[0]["steps"] == 16


def test_trainer_saves_a_checkpoint_after_its_fit(tmp_path: Path) -> None:
    class Saves(_Adam):
        def on_fit_end(self) -> None:
            self.trainer.save_checkpoint(self.folder / "after.ckpt")

    module = Saves(tmp_path)
    trainer(tmp_path).fit(module, loader())
    saved = torch.load(tmp_path / "after.ckpt", weights_only=False)
    assert saved["state_dict"]["net.weight"].view(-1).tolist() == _weights(module)
    assert {float(entry["step"]) for entry in saved["optimizer_states"][0]["state"].values()} == {8.0}


# -- unequal epochs -----------------------------------------------------------------------------------


class _Short(torch.utils.data.IterableDataset[Any]):
    """Samples of which worker 0 gets few and the others many."""

    def __iter__(self) -> Any:
        import fastps

        yield from data(12 if fastps.rank() == 0 else 40)


@pytest.mark.parametrize("sync", ["bsp", "ssp:2", "dssp:2,4", "asp"])
def test_workers_whose_epochs_differ_in_length_do_not_wait_for_each_other_for_ever(sync: str, tmp_path: Path) -> None:
    class Metric(Noted):
        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            self.mean(1.0)
            self.log("mean", self.mean, on_epoch=True, on_step=False)
            return super().training_step(batch, index)

    short = torch.utils.data.DataLoader(_Short(), batch_size=4)
    module = Metric(tmp_path, mean=MeanMetric())
    found = fit(module, short, loader(8), strategy=_forked(sync, timeout_s=30), max_epochs=3)
    assert [each["steps"] for each in found] == [9, 30]
    assert found[0]["weight"] == found[1]["weight"]


# -- a straggler --------------------------------------------------------------------------------------


@pytest.mark.timing
def test_workers_do_not_wait_for_a_slow_worker_0_within_an_epoch_under_asp(tmp_path: Path) -> None:
    class Slow(Noted):
        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            import time

            time.sleep(0.05 if self.global_rank == 0 else 0.0)
            self.times.append(time.monotonic())
            return super().training_step(batch, index)

        def on_fit_start(self) -> None:
            self.times: list[float] = []

    found = fit(Slow(tmp_path, lambda it: it.times[-1] - it.times[0]), loader(128), strategy=_forked("asp"))
    slow, fast = (each["note"] for each in found)
    assert slow >= 15 * 0.05
    assert fast < slow / 2

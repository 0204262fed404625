"""Models with sparse layers: their rows are pushed, and folded in place, as torch's own optimizers update them."""

import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastps
from tests.support import processes
from tests.support.table_models import MAKERS, ROWS, TableModel, batches_of, loss_of, train_on, wrapped
from tests.support.torch_optimizers import OPTIMIZERS, as_in_torch, one_worker, relative_difference, share_of

pytestmark = [pytest.mark.usefixtures("alone"), pytest.mark.filterwarnings("ignore:Sparse invariant checks")]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", MAKERS)
def test_one_worker_equals_torch_for_200_steps(name: str) -> None:
    plain, model = TableModel(), TableModel()
    batches = batches_of(200, 32)
    train_on(plain, MAKERS[name](plain), batches)
    with wrapped(model, name) as optimizers:
        train_on(model, optimizers, batches)
    assert relative_difference(model, plain) < 1e-5


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["sgd", "adagrad", "sparse-adam", "row-wise-adagrad"])
def test_three_workers_under_bsp_equal_one_process_with_the_batches_of_all(name: str) -> None:
    batches = batches_of(30, 3 * 16)

    def work(rank: int) -> list[float]:
        model = TableModel(seed=rank)  # worker 0's weights are everyone's first
        with wrapped(model, name) as optimizers:
            train_on(model, optimizers, share_of(batches, rank, 16))
        return [float(value) for value in torch.nn.utils.parameters_to_vector(model.parameters())]

    found, *others = processes.results(processes.start_job(work, 3), 60)
    assert others == [found] * 2, "all workers end with the same bits"
    plain = TableModel(seed=0)
    train_on(plain, MAKERS[name](plain), batches)
    expected = torch.nn.utils.parameters_to_vector(plain.parameters()).detach()
    assert float((torch.tensor(found) - expected).abs().max() / expected.abs().max()) < 1e-5


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["sgd", "adagrad", "sparse-adam", "row-wise-adagrad"])
def test_optimizer_state_loads_into_torchs_optimizer_which_continues_the_same(name: str) -> None:
    batches = batches_of(20, 16)
    through, model = TableModel(), TableModel()
    plain = MAKERS[name](through)
    train_on(through, plain, batches)
    with wrapped(model, name) as optimizers:
        train_on(model, optimizers, batches[:10])
        saved = [pickle.loads(pickle.dumps(optimizer.state_dict())) for optimizer in optimizers]
    continued = MAKERS[name](model)
    for optimizer, state in zip(continued, saved, strict=True):
        optimizer.load_state_dict(state)
    train_on(model, continued, batches[10:])
    assert relative_difference(model, through) < 1e-5


@pytest.mark.parametrize("name", ["adagrad", "sparse-adam"])
def test_state_that_torch_made_before_wrapping_goes_on(name: str) -> None:
    batches = batches_of(20, 16)
    through, model = TableModel(), TableModel()
    train_on(through, MAKERS[name](through), batches)
    plain = MAKERS[name](model)
    train_on(model, plain, batches[:10])
    optimizers = [fastps.DistributedOptimizer(optimizer, "bsp") for optimizer in plain]
    train_on(model, optimizers, batches[10:])
    for optimizer in optimizers:
        optimizer.close()
    assert relative_difference(model, through) < 1e-5


def test_gradients_of_several_backwards_are_summed() -> None:
    def run(model: TableModel, optimizer: Any) -> None:
        batches = batches_of(8, 16)
        for first, second in zip(batches[::2], batches[1::2], strict=True):
            optimizer.zero_grad()
            loss_of(model, first).backward()
            loss_of(model, second).backward()
            optimizer.step()

    as_in_torch(run, OPTIMIZERS["sgd"], most=1e-5, model=TableModel, sync="bsp")


def test_a_clipped_push_has_the_norm_over_dense_parameters_and_rows() -> None:
    plain, model = TableModel(), TableModel()
    batch = batches_of(1, 16)[0]
    loss_of(plain, batch).backward()
    for parameter in plain.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    with fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), "bsp:clip=0.01") as optimizer:
        train_on(model, [optimizer], [batch])
    assert relative_difference(model, plain) < 1e-6


def test_a_table_without_a_gradient_stays_and_takes_no_step() -> None:
    with one_worker(TableModel(), OPTIMIZERS["adagrad"], sync="bsp") as (model, optimizer):
        before = model.one.weight.detach().clone()
        model.bag(torch.zeros(1, 1, dtype=torch.long)).sum().backward()
        optimizer.step()
        assert torch.equal(model.one.weight, before)
        steps = [int(entry["step"]) for entry in optimizer.state_dict()["state"].values()]
        assert steps == [1, 0, 0, 0]  # the bag's
    assert torch.equal(model.one.weight, before)


def test_rows_that_are_not_finite_are_rejected_whole_with_the_dense_part() -> None:
    with one_worker(TableModel(), sync="bsp", nonfinite="reject") as (model, optimizer):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        loss_of(model, batches_of(1, 8)[0]).backward()
        assert model.bag.weight.grad is not None
        model.bag.weight.grad._values()[3, 2] = float("nan")
        optimizer.step()
        assert all(torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))
        train_on(model, [optimizer], batches_of(1, 8))
        assert not torch.equal(model.bag.weight, before[0])


def test_a_reader_reads_rows_in_place() -> None:
    other, job = TableModel(seed=1), f"test-tables-reader-{os.getpid()}"
    with one_worker(TableModel(), sync="bsp", named=True, job=job) as (model, optimizer), fastps.reader(job) as reader:
        reader.update(other)
        train_on(model, [optimizer], batches_of(3, 8))
        reader.update(other)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(model.parameters(), other.parameters(), strict=True))


def test_weights_replaced_by_one_worker_reach_the_table() -> None:
    with one_worker(TableModel(), OPTIMIZERS["adagrad"], sync="bsp", named=True) as (model, optimizer):
        train_on(model, [optimizer], batches_of(2, 8))
        optimizer.replace_weights(lambda weights: [weight * 0 + 2 for weight in weights])
        assert torch.equal(model.bag.weight.detach(), torch.full((ROWS, 16), 2.0))
        train_on(model, [optimizer], batches_of(1, 8))


class _Tied(torch.nn.Module):
    """An embedding whose weight is also the output layer's: its gradient is dense."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(20, 4, sparse=True)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.table(rows) @ self.table.weight.T


def test_a_dense_gradient_of_a_table_is_refused_by_name() -> None:
    with one_worker(_Tied(), named=True) as (model, optimizer):
        model(torch.tensor([1, 2])).sum().backward()
        with pytest.raises(fastps.UnsupportedError, match=r"'table.weight'.*expected a sparse gradient.*tied"):
            optimizer.step()
        assert optimizer.version == 0


def test_a_dense_matrix_given_to_sparse_adam_is_told_to_take_another_optimizer() -> None:
    with one_worker(torch.nn.Linear(4, 2, bias=False), torch.optim.SparseAdam, named=True) as (model, optimizer):
        model(torch.ones(1, 4)).sum().backward()
        with pytest.raises(fastps.UnsupportedError, match=r"'weight'.*it is a table.*Adam beside SparseAdam"):
            optimizer.step()


REFUSED: list[tuple[Callable[[TableModel], torch.optim.Optimizer], str, str]] = [
    (lambda model: torch.optim.Adam(model.parameters()), "bsp", r"a rule for rows of tables .* found adam"),
    (lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), "bsp", "expected momentum 0"),
    (lambda model: torch.optim.Adagrad(model.parameters(), weight_decay=0.1), "bsp", "weight_decay=0.1"),
    (lambda model: torch.optim.SGD(model.parameters(), lr=0.1), "bsp:ema=0.9", "no moving average"),
    (lambda model: torch.optim.SGD(model.parameters(), lr=0.1), "auto", "moves the job to another arena"),
    (lambda model: torch.optim.SparseAdam(list(model.parameters())), "bsp", "expected a matrix.*Adam beside SparseAdam"),
]


@pytest.mark.parametrize(("make", "sync", "message"), REFUSED)
def test_what_tables_cannot_have_is_refused_at_wrapping(
    make: Callable[[TableModel], torch.optim.Optimizer], sync: str, message: str
) -> None:
    model = TableModel()
    with pytest.raises(fastps.UnsupportedError, match=message):
        fastps.DistributedOptimizer(make(model), sync, model=model)
    assert model.bag.weight.shape == (ROWS, 16)


def test_a_users_rule_of_the_name_of_another_has_no_tables() -> None:
    """The rows would be updated by the other rule's arithmetic."""

    @fastps.rule(hyper=("learning_rate",))
    def sgd(weight: float, gradient: float, learning_rate: float) -> float:
        return weight - 10 * learning_rate * gradient

    table = torch.nn.Embedding(4, 2, sparse=True)
    with pytest.raises(fastps.UnsupportedError, match="expected a rule for rows of tables"):
        fastps.DistributedOptimizer(fastps.RuleOptimizer(table.parameters(), sgd, learning_rate=1.0))

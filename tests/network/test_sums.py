"""The sum of a node's pushes against NumPy: factors, absent parameters, and the parts in which it travels."""

import numpy as np
import pytest
import torch

import fastps
from fastps.job.update_rules import Hyper
from fastps.kernels.combining.fold_call import FoldedPush
from fastps.network.edge import CHUNK_FLOATS
from fastps.network.sums import Sums, pack, payload_bytes, unpack
from fastps.store.row_slots import presence_of

SHAPES = {"a": (3, 5), "b": (CHUNK_FLOATS + 7,), "c": (2,)}


@pytest.mark.parametrize("scales", [(1.0,), (1.0, 1.0), (0.5, 1.0, 0.25), (1.0, 1.0, 1.0, 1.0)])
@pytest.mark.parametrize("absent", [{}, {0: [1]}, {0: [1], 1: [0, 1]}])
def test_a_sum_is_numpys(scales: tuple[float, ...], absent: dict[int, list[int]]) -> None:
    workers, random = len(scales), np.random.default_rng(7)
    absent = {lane: which for lane, which in absent.items() if lane < workers}
    values = [{name: random.standard_normal(shape, np.float32) for name, shape in SHAPES.items()} for _ in range(workers)]
    weights = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    with fastps.Store.create(weights, fastps.SGD(lr=0.5, momentum=0.9), workers=workers) as store:
        attached = [store.attach(lane) for lane in range(workers)]
        for lane, worker in enumerate(attached):
            present = [index for index in range(len(SHAPES)) if index not in absent.get(lane, [])]
            for name, view in worker.gradients.items():
                view[...] = values[lane][name]
            worker._write_slot_header(0, store.hypers, presence_of(present, len(SHAPES)))
        out = torch.full((store.layout.buffer_floats,), 7.0)
        pushes = [FoldedPush(lane, 0, scale, 1.0, 0) for lane, scale in reversed(list(enumerate(scales)))]
        terms, parts = Sums(store).begin(pushes, [out[:CHUNK_FLOATS], out[CHUNK_FLOATS:]], 0)
        found = torch.cat([part.clone() for part in parts]).numpy()
        assert len(found) == store.layout.buffer_floats
        for index, parameter in enumerate(store.layout.parameters):
            having = [lane for lane in range(workers) if index not in absent.get(lane, [])]
            assert terms.present[index] == bool(having)
            expected = sum((values[lane][parameter.name] * np.float32(scales[lane]) for lane in having), np.float32(0))
            span = found[parameter.offset : parameter.offset + parameter.length]
            assert np.allclose(span, np.ravel(expected) if having else 0, rtol=1e-6, atol=1e-6)
        assert terms.hypers == store.hypers
        for worker in attached:
            worker.close()


def test_the_terms_of_a_sum_survive_the_journey() -> None:
    with fastps.Store.create({str(i): np.ones(1, np.float32) for i in range(70)}, fastps.Adam(lr=0.5), workers=1) as store:
        worker = store.attach(0)
        worker._write_slot_header(0, store.hypers, presence_of([0, 64, 69], 70))
        terms, _ = Sums(store).begin([FoldedPush(0, 0, 1.0, 1.0, 0)], [torch.zeros(store.layout.buffer_floats)], 0)
        data = pack(terms)
        found = unpack(data, store.layout.rule, 1, 70)
        worker.close()
    assert len(data) == payload_bytes(1, 70)
    assert found.hypers == [Hyper(0.5, beta1=0.9, beta2=0.999, epsilon=1e-8, flags=found.hypers[0].flags)]
    assert np.flatnonzero(found.present).tolist() == [0, 64, 69]
    assert found.presence == terms.presence == presence_of([0, 64, 69], 70)

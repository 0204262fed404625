"""Buffers that an agent writes outside a fold: published only if they were made, as another version or as the same."""

import pytest

from fastps.kernels.protocol.lane import Lane
from fastps.network.spare import spare_of
from tests.store.test_lane_room import _store


def test_what_is_made_is_published_and_what_raises_is_not() -> None:
    with _store(1, 0) as store, store.attach(0) as worker:
        spare = spare_of(store, Lane(store.arena, 0))
        with spare() as buffers:
            assert (buffers.weights_in, buffers.state_in) == (store.committed()[0][0], store.committed()[1][0])
            store.weight_views(buffers.weights_out)[0][:] = 3.0
        assert store.version == 0
        with pytest.raises(KeyError), spare() as buffers:
            buffers.is_made = True
            raise KeyError
        assert store.version == 0
        with spare() as buffers:
            store.weight_views(buffers.weights_out)[0][:] = 4.0
            buffers.is_made, buffers.advances = True, False
        worker.pull()
        assert (store.version, worker.weights["w"].tolist()) == (0, [4.0] * 4)
        with spare() as buffers:
            store.weight_views(buffers.weights_out)[0][:] = 5.0
            buffers.is_made = True
        worker.pull()
        assert (store.version, worker.weights["w"].tolist()) == (1, [5.0] * 4)

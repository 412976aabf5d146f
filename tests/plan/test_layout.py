from __future__ import annotations

import os
import pickle
import subprocess
import sys
from itertools import pairwise, product

import pytest
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from hflow.plan.layout import Layout, Mesh, Only, Replicate, Shard, split
from hflow.units import device_text


@pytest.mark.parametrize("first", [Shard(0), Shard(1), Replicate()])
@pytest.mark.parametrize("second", [Shard(0), Shard(1), Replicate()])
def test_boxes_equal_dtensor(first: Shard | Replicate, second: Shard | Replicate) -> None:
    """Even splits: the local shape and offset of every device are DTensor's."""
    mesh = Mesh(tuple(range(6)), (("a", 2), ("b", 3)))
    boxes = Layout(mesh, (first, second)).boxes((24, 12))
    theirs = [TorchShard(p.dim) if isinstance(p, Shard) else TorchReplicate() for p in (first, second)]
    for device, at in enumerate(product(range(2), range(3))):
        shape, offset = _compute_local_shape_and_global_offset((24, 12), (2, 3), list(at), theirs)
        assert boxes[device] == tuple((o, o + s) for o, s in zip(offset, shape))


def test_only_one_index_holds_a_value() -> None:
    """Of 2 x 3 devices in reverse order the last of the first axis have it, split over the second."""
    mesh = Mesh((5, 4, 3, 2, 1, 0), (("a", 2), ("b", 3)))
    boxes = Layout(mesh, (Only(1), Shard(0, unit=2))).boxes((8, 5))
    assert boxes == {2: ((0, 2), (0, 5)), 1: ((2, 4), (0, 5)), 0: ((4, 8), (0, 5))}


def test_uneven_split_covers_everything_once() -> None:
    for total, parts, unit in product((0, 1, 7, 40), (1, 2, 3, 7), (1, 4)):
        spans = [split((0, total * unit), parts, i, unit) for i in range(parts)]
        assert spans[0][0] == 0 and spans[-1][1] == total * unit
        assert all(a[1] == b[0] for a, b in pairwise(spans))
        assert all((stop - start) % unit == 0 for start, stop in spans)
        sizes = [stop - start for start, stop in spans]
        assert max(sizes) - min(sizes) <= unit


def test_mesh_groups_follow_megatron_rank_order() -> None:
    """rank = (pp_index * dp + dp_index) * tp + tp_index."""
    mesh = Mesh.of(tuple(range(8)), pp=2, dp=2, tp=2)
    assert mesh.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.groups("dp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert mesh.groups("pp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert mesh.groups("pp", "tp") == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert mesh.replica(1, 0) == (4, 5)
    assert mesh.coordinates(6) == {"pp": 1, "dp": 1, "tp": 0}


def test_context_parallel_ranks_lie_between_dp_and_tp() -> None:
    """Megatron's order tp-cp-dp-pp; an axis of one rank is none, so plans without it are as they were."""
    mesh = Mesh.of(tuple(range(16)), pp=2, dp=2, cp=2, tp=2)
    assert mesh.groups("tp")[:2] == ((0, 1), (2, 3))
    assert mesh.groups("cp")[:2] == ((0, 2), (1, 3))
    assert mesh.groups("dp")[:2] == ((0, 4), (1, 5))
    assert mesh.groups("dp", "cp")[0] == (0, 2, 4, 6)
    assert mesh.groups("pp")[0] == (0, 8)
    assert mesh.replica(1, 0) == (8, 9, 10, 11)
    assert str(mesh) == "pp2 dp2 cp2 tp2 @0-15" and mesh.has_plan_axes
    assert Mesh.of((0, 1), dp=2, cp=1).axes == (("pp", 1), ("dp", 2), ("tp", 1))


def test_device_text_keeps_order() -> None:
    assert device_text((0, 1, 2, 5)) == "0-2,5"
    assert device_text((0, 2, 1, 3)) == "0,2,1,3"


def test_a_kept_hash_does_not_travel() -> None:
    """String hashes differ between processes: a mesh that another process has hashed is still a key here."""
    code = "import pickle, sys; from hflow.plan.layout import Mesh; mesh = Mesh.of((0, 1), tp=2); hash(mesh)"
    code += "; sys.stdout.buffer.write(pickle.dumps(mesh))"
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    sent = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
    assert pickle.loads(sent.stdout) in {Mesh.of((0, 1), tp=2)}

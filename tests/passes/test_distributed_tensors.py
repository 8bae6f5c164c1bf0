"""Parameters that are DTensors: the op takes the parts that `to_local` gives, which the graph has names for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map
from torch.testing._internal.distributed.fake_pg import FakeStore

from .support import assert_same, compiled, run

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 4, 6, 5, 2


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
    dist.destroy_process_group()


class Layer(nn.Module):
    """An MoE layer whose experts are sharded over a mesh; routing is done on DTensors if `whole` is set."""

    def __init__(self, mesh: DeviceMesh, whole: bool) -> None:
        super().__init__()
        self.mesh, self.whole = mesh, whole
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        shapes = {"up": (HIDDEN, INTERMEDIATE), "gated": (HIDDEN, INTERMEDIATE), "down": (INTERMEDIATE, HIDDEN)}
        for name, shape in shapes.items():
            weight = distribute_tensor(torch.randn(EXPERTS, *shape), mesh, [Shard(0)])
            self.register_parameter(name, nn.Parameter(weight))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = torch.topk(F.linear(x, self.gate.weight).softmax(-1), TOP_K)
        if not self.whole:
            return self.routed(x, weights, ids)
        everywhere = [Replicate()]
        spread = [DTensor.from_local(t, self.mesh, everywhere) for t in (x, weights, ids)]
        mapped = local_map(self.routed, out_placements=everywhere, in_placements=(everywhere,) * 3)
        y: Tensor = mapped(*spread).to_local()
        return y

    def routed(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        up, gated, down = (w.to_local() for w in (self.up, self.gated, self.down))
        order = ids.flatten().argsort(stable=True)
        counts = F.one_hot(ids.flatten(), EXPERTS).sum(0).tolist()
        rows = x[order // TOP_K].split(counts)
        out = torch.cat([(F.silu(r @ gated[e]) * (r @ up[e])) @ down[e] for e, r in enumerate(rows)])
        scaled = out * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, order // TOP_K, scaled)


@pytest.mark.parametrize("whole", [False, True], ids=["plain routing", "local_map"])
def test_experts_that_are_distributed_tensors(mesh: DeviceMesh, whole: bool) -> None:
    torch.manual_seed(0)
    layer = Layer(mesh, whole).double()
    x = torch.randn(9, HIDDEN, dtype=torch.float64, requires_grad=True)
    wanted = run(layer, layer, x)
    with compiled(layer) as (function, record):
        got = run(function, layer, x)
    assert [miss.reason for miss in record.outcome.misses] == []
    assert len(record.calls) == 1
    local = [{k: v.to_local() if isinstance(v, DTensor) else v for k, v in r.gradients.items()} for r in (got, wanted)]
    for r, gradients in zip((got, wanted), local, strict=True):
        r.gradients = gradients
    assert_same(got, wanted)

"""torchtitan's MoE layers and models at sizes for a CPU, from the package's own config builders.

torchtitan's language models attend with FlexAttention or varlen attention, which need a GPU to train; the models here
take its `ScaledDotProductAttention`. What it calls its device type is "cuda" where there is no accelerator.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, TOKENS, VOCABULARY = 32, 24, 8, 2, 24, 64
SEED = 0

Config = Any
"""A config of torchtitan, which has no type hints for us: it may not be installed."""

NORMAL = partial(nn.init.normal_, std=0.2)
LINEAR: dict[str, Callable[..., Any]] = {"weight": NORMAL, "bias": nn.init.zeros_}
NORM: dict[str, Callable[..., Any]] = {"weight": nn.init.ones_}


def moe(
    *,
    score: Literal["sigmoid", "softmax"] = "sigmoid",
    normalise: bool = True,
    groups: int | None = None,
    shared: bool = True,
    top_k: int = TOP_K,
    scale: float = 2.5,
    balanced: bool = True,
) -> Config:
    """The config of torchtitan's `MoE`; `balanced`: with the bias and the counts of its load balancing."""
    from torchtitan.models.common import config_utils as make

    return make.make_moe_config(
        num_experts=EXPERTS,
        router=make.make_router_config(
            dim=HIDDEN, num_experts=EXPERTS, gate_param_init=LINEAR, top_k=top_k, score_func=score,
            route_norm=normalise, route_scale=scale, num_expert_groups=groups,
            num_limited_groups=groups and groups // 2,
        ),
        routed_experts=make.make_routed_experts_config(
            dim=HIDDEN, hidden_dim=INTERMEDIATE, num_experts=EXPERTS, top_k=top_k, comm_backend="standard",
            param_init=dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), NORMAL),
        ),
        shared_experts=feed_forward() if shared else None,
        load_balance_coeff=1e-3 if balanced else None,
    )


def feed_forward() -> Config:
    from torchtitan.models.common.config_utils import make_ffn_config

    return make_ffn_config(dim=HIDDEN, hidden_dim=48, w1_param_init=LINEAR, w2w3_param_init=LINEAR)


def qwen3_moe() -> Config:
    return moe(score="softmax", shared=False, scale=1.0)


def deepseek_v3_moe() -> Config:
    return moe(groups=4)


def gpt_oss_moe() -> Config:
    from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts, GptOssMoE

    config = moe(score="softmax", shared=False, scale=1.0)
    names = ("mlp1_weight_EGD", "mlp1_bias_EG", "mlp2_weight_EDF", "mlp2_bias_ED")
    config.routed_experts.inner_experts = GptOssGroupedExperts.Config(
        dim=HIDDEN, hidden_dim=INTERMEDIATE, num_experts=EXPERTS, param_init=dict.fromkeys(names, NORMAL)
    )
    return GptOssMoE.Config(
        num_experts=EXPERTS, routed_experts=config.routed_experts, router=config.router, load_balance_coeff=1e-3
    )


# -- models ------------------------------------------------------------------------------------------------------------


def norm(size: int) -> Config:
    from torchtitan.models.common.nn_modules import RMSNorm

    return RMSNorm.Config(normalized_shape=size, eps=1e-6, param_init=NORM)


def ends() -> dict[str, Config]:
    """What every decoder has around its blocks."""
    from torchtitan.models.common import Embedding, Linear

    return {
        "vocab_size": VOCABULARY,
        "dim": HIDDEN,
        "norm": norm(HIDDEN),
        "tok_embeddings": Embedding.Config(num_embeddings=VOCABULARY, embedding_dim=HIDDEN, param_init=LINEAR),
        "lm_head": Linear.Config(in_features=HIDDEN, out_features=VOCABULARY, param_init=LINEAR),
    }


def qwen3_model(layers: int = 3, dense: int = 1) -> Config:
    """A Qwen3 decoder whose first `dense` blocks have no experts."""
    from torchtitan.models.common import CosSinRoPE
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.config_utils import make_gqa_config
    from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock

    def block(layer: int) -> Config:
        attention = make_gqa_config(
            dim=HIDDEN, n_heads=4, n_kv_heads=2, head_dim=8, wqkv_param_init=LINEAR, wo_param_init=LINEAR,
            inner_attention=ScaledDotProductAttention.Config(), fuse_qkv=True, qk_norm=norm(8),
            rope=CosSinRoPE.Config(dim=8, max_seq_len=TOKENS, theta=10000.0),
        )
        inner = {"feed_forward": feed_forward()} if layer < dense else {"moe": qwen3_moe()}
        return Qwen3TransformerBlock.Config(
            attention=attention, attention_norm=norm(HIDDEN), ffn_norm=norm(HIDDEN), **inner
        )

    return Qwen3Model.Config(**ends(), layers=[block(layer) for layer in range(layers)])


def deepseek_v3_model(layers: int = 3, dense: int = 1) -> Config:
    """A DeepSeek-V3 decoder: latent attention, and shared experts."""
    from torchtitan.models.common import ComplexRoPE
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.deepseek_v3 import DeepSeekV3Model, build_mla_moe_layers

    blocks = build_mla_moe_layers(
        n_layers=layers, n_dense_layers=dense, dim=HIDDEN, n_heads=4, q_lora_rank=0, kv_lora_rank=16,
        qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, mscale=1.0, dense_hidden_dim=48,
        moe_hidden_dim=INTERMEDIATE, num_experts=EXPERTS, num_shared_experts=2, router_top_k=TOP_K,
        router_score_func="sigmoid", router_num_expert_groups=4, router_num_limited_groups=2, router_route_scale=2.5,
        router_route_norm=True, attn_backend="flex", moe_comm_backend="standard", non_blocking_capacity_factor=None,
        linear_init=LINEAR, norm_init=NORM, depth_init=lambda layer: LINEAR,
        depth_experts_init=lambda layer: dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), NORMAL),
        rope=ComplexRoPE.Config(dim=8, max_seq_len=TOKENS, theta=10000.0),
    )
    for block in blocks:
        block.attention.inner_attention = ScaledDotProductAttention.Config()
    return DeepSeekV3Model.Config(**ends(), layers=blocks, mtp_layers=[])


def built(config: Config, dtype: torch.dtype | None = None, seed: int = SEED) -> nn.Module:
    """What a config describes, with the same weights at each call and on each rank."""
    torch.manual_seed(seed)
    model: nn.Module = config.build()
    model.init_states()  # type: ignore[operator]
    return model if dtype is None else model.to(dtype)


def tokens(rank: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of token ids [2, TOKENS / 2], and their positions."""
    torch.manual_seed(SEED + 1 + rank)
    shape = (2, TOKENS // 2)
    return torch.randint(0, VOCABULARY, shape), torch.arange(shape[1]).expand(shape)


# -- several ranks -----------------------------------------------------------------------------------------------------


def parallelism(expert_parallel: int) -> tuple[Any, Any]:
    """(config, meshes): data is sharded over all ranks, and experts over `expert_parallel` of them.

    DTensor parameters ("partial_dtensor"): the default of torchtitan 0.3, "spmd_types", hands FSDP plain parameters
    with a mesh, which `fully_shard` of torch 2.13 does not take.
    """
    from torchtitan.config import ParallelismConfig
    from torchtitan.distributed import parallel_dims, utils

    logging.getLogger("torchtitan").setLevel(logging.WARNING)
    logging.getLogger().setLevel(logging.WARNING)
    parallel_dims.device_type = "cpu"
    utils.set_spmd_backend("partial_dtensor")
    config = ParallelismConfig(
        data_parallel_shard_degree=dist.get_world_size(),
        expert_parallel_degree=expert_parallel,
        spmd_backend="partial_dtensor",
    )
    return config, parallel_dims.ParallelDims.from_config(config, dist.get_world_size())


class ExpertParallel(nn.Module):
    """A layer after torchtitan's own `parallelize`, its experts DTensors on the expert-parallel mesh.

    `parallelize` ties a layer's forward to the layer itself, so a copy is made by building it again.
    """

    def __init__(self, config: Callable[[], Config], dtype: torch.dtype) -> None:
        super().__init__()
        from torchtitan.models.common.moe_sharding import set_moe_sharding_config

        self.again = (config, dtype)
        layer_config = config()
        names = layer_config.routed_experts.inner_experts.param_init
        # Where tensor parallelism would put them; there is none here.
        layout = dict.fromkeys(names)
        set_moe_sharding_config(layer_config, enable_ep=True, enable_sp=False, expert_param_layout=layout)
        self.layer = built(layer_config, dtype)
        self.layer.parallelize(parallelism(dist.get_world_size())[1])  # type: ignore[operator]

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertParallel:
        return ExpertParallel(*self.again)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        return y


def trained(
    config: Callable[[], Config],
    parallelize: Callable[..., Any],
    expert_parallel: int,
    backend: str | None,
    checkpoint: Any = None,
) -> nn.Module:
    """A model after torchtitan's parallelize function: expert parallelism, checkpoints, a compile for each block, FSDP.

    Args:
        backend: what compiles each block; None for eager.
        checkpoint: torchtitan's config of activation checkpointing.
    """
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.config import CompileConfig, TrainingConfig

    settings, meshes = parallelism(expert_parallel)
    model_config = config()
    model_config.update_from_config(config=SimpleNamespace(parallelism=settings))
    model: nn.Module = parallelize(
        built(model_config),
        parallel_dims=meshes,
        training=TrainingConfig(mixed_precision_param="float32"),
        parallelism=settings,
        compile_config=CompileConfig(enable=backend is not None, backend=backend or ""),
        ac_config=copy.deepcopy(checkpoint),
        dump_folder="",
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    return model

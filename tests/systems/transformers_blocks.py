"""Every MoE block that the installed transformers has, found by reading the package, and built tiny."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from .row import Case

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 32, 16, 6, 2

SIZES: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model"), HIDDEN),
    **dict.fromkeys(
        ("intermediate_size", "moe_intermediate_size", "expert_ffn_hidden_size", "ffn_hidden_size", "d_ff"),
        INTERMEDIATE,
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k", "top_k_experts", "top_k"),
        TOP_K,
    ),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 24),
    "n_group": 2,
    "topk_group": 1,
    "num_hidden_layers": 2,
    "vocab_size": 64,
}
"""What configurations call the sizes of an MoE model, made small."""

SETTINGS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": TOP_K, "topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1},
    "deepseek_ocr2": {"num_experts_per_tok": TOP_K},
    "deepseek_v4": {"mlp_layer_types": ["moe", "moe"]},
    "dots1": {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": TOP_K},
    "switch_transformers": {"dropout_rate": 0.0, "router_jitter_noise": 0.0},
    "nllb_moe": {"activation_dropout": 0.0, "dropout": 0.0, "moe_token_dropout": 0.0},
    "phimoe": {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    "longcat_flash": {"zero_expert_num": 2},
    "qwen3_omni_moe": {"shared_expert_intermediate_size": 24},
}
"""What a family's defaults leave out, or draw at random in training."""

SIZED_WHEN_MADE: dict[str, dict[str, Any]] = {
    "Dots3NoteVisionMoE": {
        "hidden_size": HIDDEN,
        "adapter_in_dim": HIDDEN,
        "moe_intermediate_size": INTERMEDIATE,
        "num_local_experts": EXPERTS,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "mlp_layer_types": ["sparse", "sparse"],
    },
}
"""Configurations that make those of their layers when they are made."""

ARGUMENTS: dict[str, Mapping[str, Any]] = {
    "Ernie4_5_VLMoeSparseMoeBlock": {"intermediate_size": INTERMEDIATE},
    "NllbMoeSparseMLP": {"ffn_dim": INTERMEDIATE},
}
"""What a block is built with besides a configuration (a `layer_idx` is 0)."""


ELSEWHERE = {
    *("Gemma4TextDecoderLayer", "DiffusionGemmaEncoderTextLayer", "DiffusionGemmaDecoderTextLayer"),
    "JetMoeMoA",
}
"""Experts that are no block of their own: whole models have them (the layers of DiffusionGemma are Gemma4's)."""

WITHOUT_EXPERTS = ("DogeCDMoE",)
"""Blocks that call their experts something else."""


@cache
def blocks() -> dict[str, str]:
    """The class of each MoE block: what makes experts, with its family. Empty without the package."""
    return {name: path.parent.name for path, text in _sources().items() for name in _blocks_in(text)}


def dispatches(name: str) -> bool:
    """Whether a block's experts run by whatever implementation a user names."""
    family = blocks()[name]
    return any(path.parent.name == family and "use_experts_implementation" in text for path, text in _sources().items())


@cache
def _sources() -> dict[Path, str]:
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        return {}
    models = Path(spec.origin).parent / "models"
    texts = ((path, path.read_text()) for path in sorted(models.glob("*/modeling_*.py")))
    return {path: text for path, text in texts if "xpert" in text}


def _blocks_in(text: str) -> Iterator[str]:
    classes = re.split(r"^class (\w+)\(", text, flags=re.MULTILINE)[1:]
    bodies = dict(zip(classes[::2], classes[1::2], strict=True))
    experts = "|".join(name for name in bodies if name.endswith("Experts"))
    for name, body in bodies.items():
        if name in WITHOUT_EXPERTS or (experts and name not in ELSEWHERE and re.search(rf"= ({experts})\(", body)):
            yield name


def build_block(name: str, experts: str, dtype: torch.dtype) -> Case:
    """A block with random weights, whose experts run by the implementation that the package calls `experts`."""
    family = blocks()[name]
    torch.manual_seed(0)
    block = getattr(import_module(f"transformers.models.{family}.modeling_{family}"), name)
    with default_dtype(dtype):  # as `from_pretrained(dtype=...)` does: a router that asks for float32 has it
        layer = _built(block, family, experts)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.2)
        for buffer_name, buffer in layer.named_buffers():
            if "bias" in buffer_name:  # of the choice of experts: zeros would hide it
                buffer.normal_(std=0.2)
    return Case(layer, (torch.randn(2, 12, HIDDEN, dtype=dtype, requires_grad=True),))


def distributed_block(name: str, experts: str, exchange: str, dtype: torch.dtype) -> Case:
    """A block with its experts on two ranks, by the package's own way, and other tokens on each rank."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    import mokfx.integrations.transformers  # noqa: F401 (registers "mok")

    case = build_block(name, experts, dtype)
    meshes = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("ep", "tp"))
    weights = dict(case.model.get_submodule("experts").named_parameters())
    plan = {f"experts.{weight}": "grouped_gemm" for weight in weights} | {"experts": "ep_dispatch_experts"}
    model = apply_expert_parallelism(case.model, meshes["ep"], meshes["tp"], plan, ep_implementation=exchange)
    torch.manual_seed(1 + dist.get_rank())
    return Case(model, (torch.randn(2, 9 + 3 * dist.get_rank(), HIDDEN, dtype=dtype, requires_grad=True),))


def _built(block: type[nn.Module], family: str, experts: str) -> nn.Module:
    """The block, made from the first of its family's configurations that has what it asks for."""
    module = import_module(f"transformers.models.{family}.configuration_{family}")
    whys = []
    for config_class in _configurations(module):
        try:
            made = SIZED_WHEN_MADE.get(block.__name__)
            config = config_class(**made) if made else tiny(config_class, SETTINGS.get(family, {}))
            config._experts_implementation = experts
            arguments = dict(ARGUMENTS.get(block.__name__, {}))
            if "layer_idx" in inspect.signature(block.__init__).parameters:
                arguments["layer_idx"] = 0
            return block(config, **arguments)
        except Exception as why:  # whatever the code of seventy families does with a configuration of another model
            whys.append(f"{config_class.__name__}: {why}")
    raise AssertionError(f"{block.__name__} could not be built: {whys}")


def tiny(config_class: Any, settings: Mapping[str, Any]) -> Any:
    """A configuration with the class's defaults, but of small sizes."""
    config = config_class()
    _shrink(config)
    for name, value in settings.items():
        setattr(config, name, value)
    return config


def _shrink(config: Any) -> None:
    for name, size in SIZES.items():
        if type(getattr(config, name, None)) is int:
            setattr(config, name, size)
    for name, value in vars(config).items():
        if name.endswith("_config") and hasattr(value, "to_dict"):
            _shrink(value)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """What `torch.empty` makes, meanwhile."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _configurations(module: ModuleType) -> list[Any]:
    from transformers import PretrainedConfig

    classes = [each for each in vars(module).values() if inspect.isclass(each)]
    return [each for each in classes if issubclass(each, PretrainedConfig) and each.__module__ == module.__name__]

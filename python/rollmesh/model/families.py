"""The model families: what the config of each means, one entry of FAMILIES for each model_type of
transformers.

A key that changes the numbers of some family is read where the family's own code in transformers
reads it, with the default of the family's config class; elsewhere it is an unknown key. How a
family is added: docs/models.md.
"""

from __future__ import annotations

from dataclasses import replace

from rollmesh.model.family import HIDDEN_BY_HEADS, Experts, Family
from rollmesh.model.family_rules import (
    afmoe_factors,
    delta_net_sizes,
    ernie_layers,
    every,
    first_layers_dense,
    from_a_layer_on,
    gemma3_ropes,
    gemma_factors,
    gpt_oss_ropes,
    granite_factors,
    hunyuan_moe_top_k,
    hunyuan_ropes,
    hybrid_layers,
    latent_layers,
    layers_with_rope,
    olmo3_ropes,
    olmoe_heads,
    one_switched_window,
    one_window,
    patterned_windows,
    phi3_ropes,
    rope_in_windows,
    rope_is_given,
    shared_experts,
    silu_in_delta_nets,
    sparse_layers,
    switched_windows_where,
    text_ropes,
    windows_where,
    without_rope,
)
from rollmesh.model.reader import MAX_WIDTH

_QWEN = "use_sliding_window sliding_window max_window_layers layer_types"
_QWEN_WINDOWS = switched_windows_where(from_a_layer_on(28))
_QWEN_MOE = (
    "decoder_sparse_step moe_intermediate_size num_experts_per_tok num_experts "
    "num_local_experts norm_topk_prob mlp_only_layers"
)
_GEMMA = (
    "attention_bias hidden_activation query_pre_attn_scalar final_logit_softcapping "
    "sliding_window layer_types"
)
_AFMOE_WINDOWS = patterned_windows(1024, 4, "global_attn_every_n_layers")
_GRANITE = "embedding_multiplier residual_multiplier attention_multiplier logits_scaling"


def _mlp(kind: str, module: str) -> dict[str, str]:
    """The names of the weights of an MLP: a shared expert, or an expert."""
    return {f"{kind}_{part}": f"{module}.{part}_proj.weight" for part in ("gate", "up", "down")}


_MIXTRAL = {
    "router": "block_sparse_moe.gate.weight",
    "expert_gate": "block_sparse_moe.experts.#.w1.weight",
    "expert_down": "block_sparse_moe.experts.#.w2.weight",
    "expert_up": "block_sparse_moe.experts.#.w3.weight",
}
# The router and experts of DeepSeek-V3, as in GLM-4-MoE.
_DEEPSEEK_KEYS = (
    "moe_intermediate_size num_experts_per_tok n_shared_experts n_routed_experts num_local_experts "
    "routed_scaling_factor n_group topk_group first_k_dense_replace norm_topk_prob"
)
_DEEPSEEK = Experts(
    number=("n_routed_experts", 1, 128),
    top_k=8,
    renormalize_default=True,
    score_func="sigmoid",
    router_bias=True,
    groups=(1, 1),
    scaling="routed_scaling_factor",
    shared_width=shared_experts("n_shared_experts"),
)
_EXAONE = "sliding_window sliding_window_pattern layer_types"
_EXAONE_WINDOWS = patterned_windows(4096, 4, "sliding_window_pattern")

_GLM = Family(
    "GlmForCausalLM",
    "attention_bias",
    head_dim=128,
    num_key_value_heads=2,
    max_position_embeddings=131072,
    rms_norm_eps=1.5625e-7,
    eos_token_id=(151329, 151336, 151338),
    partial_rotary_factor=0.5,
    attention_bias=True,
    o_bias=False,
    rope_neighbours=True,
)
_ERNIE = Family(
    "Ernie4_5ForCausalLM",
    head_dim=128,
    num_key_value_heads=2,
    max_position_embeddings=131072,
    rope_theta=500000.0,
    rms_norm_eps=1e-5,
    tied=True,
    rope_neighbours=True,
    fixed={"use_bias": False},
)
_OLMO2 = Family(
    "Olmo2ForCausalLM",
    "attention_bias",
    eos_token_id=50279,
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
    qk_norm="whole",
    norm_before=False,
    norm_after=True,
    names={"post_attn_norm": "post_attention_layernorm.weight"},
)
_GEMMA2 = Family(
    "Gemma2ForCausalLM",
    f"{_GEMMA} attn_logit_softcapping",
    eos_token_id=1,
    head_dim=256,
    num_key_value_heads=4,
    max_position_embeddings=8192,
    tied=True,
    hidden_act="gelu_pytorch_tanh",
    activation_key="hidden_activation",
    norm_after=True,
    zero_centered_norms=True,
    windows=patterned_windows(4096, 2),
    factors=gemma_factors(50.0, 30.0),
    names={
        "post_attn_norm": "post_attention_layernorm.weight",
        "pre_mlp_norm": "pre_feedforward_layernorm.weight",
    },
)
_QWEN3_5 = Family(
    "Qwen3_5ForCausalLM",
    "layer_types full_attention_interval linear_num_key_heads linear_num_value_heads "
    "linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim",
    "mtp_num_hidden_layers mtp_use_dedicated_embeddings mlp_only_layers",
    eos_token_id=None,
    head_dim=256,
    num_key_value_heads=4,
    partial_rotary_factor=0.25,
    qk_norm="head",
    zero_centered_norms=True,
    attention_gate=True,
    gate_in_q=True,
    names={  # of the parts of q_proj
        "q": "self_attn.q_proj.query.weight",
        "attn_gate": "self_attn.q_proj.gate.weight",
    },
    wq_rows="halves",
    layer_kinds=hybrid_layers,
    ropes=text_ropes,
    factors=delta_net_sizes,
    check=silu_in_delta_nets,
    fixed={"attention_bias": False, "attn_output_gate": True, "mamba_ssm_dtype": "float32"},
)
_QWEN3_5_EXPERTS = Experts(
    number=("num_experts", 1, 256),
    top_k=8,
    renormalize=True,
    shared_width=lambda c: c.integer("shared_expert_intermediate_size", default=512),
    shared_switch=True,
)
_QWEN3_5_MOE_KEYS = (
    "shared_expert_intermediate_size moe_intermediate_size num_experts num_local_experts "
    "num_experts_per_tok"
)
_HUNYUAN = Family(
    "HunYuanDenseV1ForCausalLM",
    "attention_bias",
    "eod_token_id",
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
    qk_norm="head",
    qk_norm_last=True,
    ropes=hunyuan_ropes,
    names={
        "q_norm": "self_attn.query_layernorm.weight",
        "k_norm": "self_attn.key_layernorm.weight",
    },
)

_LATENT = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
_LATENT_KEYS = f"rope_interleave qk_head_dim {' '.join(_LATENT)} {_DEEPSEEK_KEYS}"
_DEEPSEEK_V3 = Family(
    "DeepseekV3ForCausalLM",
    _LATENT_KEYS,
    "num_mtp_layers num_nextn_predict_layers aux_loss_alpha seq_aux ep_size",
    num_key_value_heads=128,
    max_position_embeddings=4096,
    eos_token_id=1,
    rope_neighbours=True,
    layer_kinds=latent_layers,
    latent=_LATENT,
    moe_layers=first_layers_dense(3),
    experts=replace(
        _DEEPSEEK,
        number=("n_routed_experts", 1, 256),
        groups=(8, 4),
        scaling_default=2.5,
    ),
    fixed={
        "attention_bias": False,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    },
)

FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM", "attention_bias", max_position_embeddings=2048, wq_rows="neighbours"
    ),
    "mistral": Family(
        "MistralForCausalLM",
        "sliding_window",
        num_key_value_heads=8,
        max_position_embeddings=131072,
        windows=one_window(4096),
        wq_rows="neighbours",
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        _QWEN,
        "num_nextn_predict_layers",
        eos_token_id=None,
        num_key_value_heads=32,
        attention_bias=True,
        o_bias=False,
        windows=_QWEN_WINDOWS,
        fixed={"attention_bias": True},
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        f"attention_bias {_QWEN}",
        _QWEN_MOE,
        eos_token_id=None,
        head_dim=128,
        num_key_value_heads=32,
        qk_norm="head",
        wq_rows="halves",
        windows=_QWEN_WINDOWS,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        f"attention_bias use_sliding_window sliding_window {_QWEN_MOE}",
        "max_window_layers layer_types",
        eos_token_id=None,
        num_key_value_heads=4,
        qk_norm="head",
        wq_rows="halves",
        windows=one_switched_window,
        moe_layers=sparse_layers,
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        "attention_bias no_rope_layers no_rope_layer_interval use_sliding_window sliding_window "
        "layer_types",
        "max_window_layers",
        eos_token_id=128001,
        num_key_value_heads=4,
        rope_theta=2000000.0,
        tied=True,
        windows=switched_windows_where(without_rope, None),
        rope_layers=layers_with_rope,
    ),
    "olmo2": _OLMO2,
    "olmo3": replace(
        _OLMO2,
        architecture="Olmo3ForCausalLM",
        keys="attention_bias sliding_window layer_types",
        rope_theta=500000.0,
        windows=patterned_windows(4096, 4),
        ropes=olmo3_ropes,
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        "sliding_window num_local_experts num_experts num_experts_per_tok",
        "router_jitter_noise",
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rope_theta=1000000.0,
        rms_norm_eps=1e-5,
        windows=one_window(None),
        moe_layers=every,
        experts=Experts(top_k=2, width="intermediate_size", renormalize=True),
        wq_rows="neighbours",
        names=_MIXTRAL,
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        f"qkv_bias shared_expert_intermediate_size {_QWEN} {_QWEN_MOE}",
        eos_token_id=None,
        num_key_value_heads=16,
        bias_key="qkv_bias",
        attention_bias=True,
        o_bias=False,
        windows=switched_windows_where(lambda c, i: i % 2 == 0 and not from_a_layer_on(28)(c, i)),
        moe_layers=sparse_layers,
        experts=Experts(
            top_k=4,
            shared_width=lambda c: c.integer(
                "shared_expert_intermediate_size", high=MAX_WIDTH, default=5632
            ),
            shared_switch=True,
        ),
        names=_mlp("shared", "mlp.shared_expert"),
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        "attention_bias clip_qkv num_experts num_local_experts num_experts_per_tok norm_topk_prob",
        eos_token_id=50279,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        qk_norm="whole",
        moe_layers=every,
        experts=Experts(top_k=8, width="intermediate_size"),
        check=olmoe_heads,
    ),
    "arcee": Family(
        "ArceeForCausalLM",
        "attention_bias",
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        eos_token_id=128001,
        hidden_act="relu2",
        ungated=True,
    ),
    "glm4": replace(
        _GLM,
        architecture="Glm4ForCausalLM",
        norm_after=True,
        names={"post_mlp_norm": "post_mlp_layernorm.weight"},
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        f"attention_bias use_qk_norm {_DEEPSEEK_KEYS}",
        "num_experts num_mtp_layers num_nextn_predict_layers",
        eos_token_id=None,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        partial_rotary_factor=0.5,
        qk_norm=lambda c: "head" if c.boolean("use_qk_norm", False) else "none",
        o_bias=False,
        moe_layers=first_layers_dense(1),
        experts=_DEEPSEEK,
    ),
    "glm": _GLM,
    "seed_oss": Family(
        "SeedOssForCausalLM",
        "attention_bias attention_out_bias",
        "residual_dropout",
        head_dim=128,
        num_key_value_heads=8,
        max_position_embeddings=524288,
        attention_bias=True,
        o_bias="attention_out_bias",
    ),
    "minimax_m2": Family(
        "MiniMaxM2ForCausalLM",
        "rotary_dim num_local_experts num_experts num_experts_per_tok",
        "router_jitter_noise use_mtp num_mtp_modules mtp_transformer_layers",
        head_dim=128,
        num_key_value_heads=8,
        max_position_embeddings=196608,
        rope_theta=5000000.0,
        eos_token_id=200020,
        partial_rotary_factor=1.0,
        qk_norm="whole",
        moe_layers=every,
        experts=Experts(
            number=("num_experts", 1, 256),
            top_k=8,
            width="intermediate_size",
            renormalize=True,
            score_func="sigmoid",
            router_bias=True,
        ),
        names=_MIXTRAL | {"router_bias": "block_sparse_moe.e_score_correction_bias"},
        fixed={
            "attn_type_list": 1,
            "qk_norm_type": "per_layer",
            "scoring_func": "sigmoid",
            "shared_intermediate_size": 0,
            "use_qk_norm": True,
            "use_routing_bias": True,
        },
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        "attention_bias sliding_window layer_types num_local_experts num_experts "
        "num_experts_per_tok swiglu_alpha swiglu_limit",
        "experts_per_token initial_context_length",
        eos_token_id=None,
        head_dim=64,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rope_theta=150000.0,
        ropes=gpt_oss_ropes,
        rms_norm_eps=1e-5,
        attention_bias=True,
        windows=windows_where(lambda c, i: i % 2 == 0, 128),
        moe_layers=every,
        experts=Experts(
            number=("num_experts", 1, 128),
            top_k=4,
            width="intermediate_size",
            renormalize=True,
            bias=True,
        ),
        names={"router": "mlp.router.weight", "router_logit_bias": "mlp.router.bias"},
        activation="swiglu_oai",
        sinks=True,
        mxfp4=True,
        experts_interleaved=True,
    ),
    "dots1": Family(
        "Dots1ForCausalLM",
        f"attention_bias sliding_window max_window_layers layer_types {_DEEPSEEK_KEYS}",
        eos_token_id=None,
        num_key_value_heads=32,
        max_position_embeddings=2048,
        qk_norm="head",
        windows=windows_where(from_a_layer_on(62)),
        moe_layers=first_layers_dense(0),
        experts=replace(
            _DEEPSEEK,
            number=("n_routed_experts", 1, None),
            top_k=None,
            renormalize_default=False,
            shared_width=shared_experts("n_shared_experts", None),
        ),
    ),
    "solar_open": Family(
        "SolarOpenForCausalLM",
        f"attention_bias {_DEEPSEEK_KEYS}",
        eos_token_id=None,
        head_dim=128,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rope_theta=1000000.0,
        rms_norm_eps=1e-5,
        o_bias=False,
        moe_layers=every,
        experts=_DEEPSEEK,
        fixed={"first_k_dense_replace": 0, "use_qk_norm": False},
    ),
    "hy_v3": Family(
        "HYV3ForCausalLM",
        "attention_bias moe_intermediate_size num_experts_per_tok num_experts num_local_experts "
        "num_shared_experts router_scaling_factor mlp_layer_types",
        "enable_moe_fp32_combine",
        eos_token_id=None,
        head_dim=128,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rope_theta=11158840.0,
        rms_norm_eps=1e-5,
        qk_norm="head",
        moe_layers=first_layers_dense(1),
        experts=Experts(
            number=("num_experts", 1, 192),
            top_k=8,
            renormalize=True,
            score_func="sigmoid",
            router_bias=True,
            scaling="router_scaling_factor",
            scaling_default=2.826,
            shared_width=shared_experts("num_shared_experts"),
        ),
        names={"router": "mlp.router.gate.weight"} | _mlp("shared", "mlp.shared_mlp"),
    ),
    "exaone4": Family(
        "Exaone4ForCausalLM",
        _EXAONE,
        num_key_value_heads=32,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        qk_norm="head",
        norm_before=False,
        norm_after=True,
        windows=_EXAONE_WINDOWS,
        rope_layers=rope_in_windows(_EXAONE_WINDOWS),
        names={"post_attn_norm": "post_attention_layernorm.weight"},
    ),
    "exaone_moe": Family(
        "ExaoneMoeForCausalLM",
        f"{_EXAONE} moe_intermediate_size num_experts_per_tok num_experts num_shared_experts "
        "routed_scaling_factor n_group topk_group first_k_dense_replace norm_topk_prob "
        "mlp_layer_types",
        eos_token_id=53,
        num_key_value_heads=32,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        qk_norm="head",
        windows=_EXAONE_WINDOWS,
        rope_layers=rope_in_windows(_EXAONE_WINDOWS),
        moe_layers=first_layers_dense(1),
        experts=replace(
            _DEEPSEEK,
            number=("num_experts", 1, 64),
            scaling_default=2.5,
            shared_width=shared_experts("num_shared_experts"),
        ),
    ),
    "flex_olmo": replace(
        _OLMO2,
        architecture="FlexOlmoForCausalLM",
        keys="attention_bias num_experts num_local_experts num_experts_per_tok norm_topk_prob",
        eos_token_id=100257,
        max_position_embeddings=4096,
        rope_theta=500000.0,
        rms_norm_eps=1e-6,
        moe_layers=every,
        experts=Experts(number=("num_experts", 1, 7), top_k=5, width="intermediate_size"),
    ),
    "ernie4_5": _ERNIE,
    "cwm": Family(
        "CwmForCausalLM",
        "sliding_window layer_types",
        eos_token_id=(128001, 128008, 128009),
        head_dim=128,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rope_theta=1000000.0,
        rms_norm_eps=1e-5,
        windows=windows_where(lambda c, i: i % 4 != 0, 8192),
        check=rope_is_given,
    ),
    "ernie4_5_moe": replace(
        _ERNIE,
        architecture="Ernie4_5_MoeForCausalLM",
        keys="moe_intermediate_size moe_k moe_num_experts moe_num_shared_experts moe_norm_min "
        "moe_layer_start_index moe_layer_end_index moe_layer_interval",
        inert="moe_capacity num_nextn_predict_layers",
        head_dim=HIDDEN_BY_HEADS,
        num_key_value_heads=4,
        moe_layers=ernie_layers,
        experts=Experts(
            number=("moe_num_experts", 1, 64),
            top_k=6,
            top_k_key="moe_k",
            renormalize=True,
            router_bias=True,
            min_sum=True,
            shared_width=shared_experts("moe_num_shared_experts", 2),
        ),
        names={"router_bias": "mlp.moe_statics.e_score_correction_bias"},
        fixed=_ERNIE.fixed | {"moe_use_aux_free": True},
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        "sliding_window",
        "resid_pdrop embd_pdrop",
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        eos_token_id=32000,
        partial_rotary_factor=1.0,
        windows=one_window(None),
        ropes=phi3_ropes,
    ),
    "ministral": Family(
        "MinistralForCausalLM",
        "sliding_window layer_types",
        num_key_value_heads=8,
        max_position_embeddings=131072,
        windows=windows_where(lambda c, i: True),
    ),
    "gemma2": _GEMMA2,
    "gemma3_text": replace(
        _GEMMA2,
        architecture="Gemma3ForCausalLM",
        keys=f"{_GEMMA} sliding_window_pattern rope_local_base_freq",
        inert="_sliding_window_pattern",
        max_position_embeddings=131072,
        rope_theta=1000000.0,
        qk_norm="head",
        windows=patterned_windows(4096, 6, "sliding_window_pattern"),
        factors=gemma_factors(None, None),
        ropes=gemma3_ropes,
    ),
    "granite": Family(
        "GraniteForCausalLM",
        f"attention_bias {_GRANITE}",
        max_position_embeddings=2048,
        factors=granite_factors,
    ),
    "granitemoe": Family(
        "GraniteMoeForCausalLM",
        f"attention_bias num_local_experts num_experts_per_tok {_GRANITE}",
        max_position_embeddings=2048,
        moe_layers=every,
        experts=Experts(
            number=("num_local_experts", 1, 8),
            top_k=2,
            width="intermediate_size",
            renormalize=True,
        ),
        factors=granite_factors,
        names={"router": "block_sparse_moe.router.layer.weight"}
        | _mlp("expert", "block_sparse_moe.experts.#"),
    ),
    "afmoe": Family(
        "AfmoeForCausalLM",
        "attention_bias moe_intermediate_size num_dense_layers num_experts num_experts_per_tok "
        "num_local_experts num_shared_experts route_scale global_attn_every_n_layers "
        "sliding_window layer_types mup_enabled",
        eos_token_id=None,
        head_dim=128,
        max_position_embeddings=16384,
        rms_norm_eps=1e-5,
        qk_norm="head",
        norm_after=True,
        attention_gate=True,
        windows=_AFMOE_WINDOWS,
        rope_layers=lambda c, layers: tuple(int(w > 0) for w in _AFMOE_WINDOWS(c, layers)),
        moe_layers=first_layers_dense(1, "num_dense_layers"),
        experts=Experts(
            number=("num_experts", 1, 64),
            top_k=6,
            renormalize=True,
            score_func="sigmoid",
            router_bias=True,
            scaling="route_scale",
            shared_width=shared_experts("num_shared_experts", 2),
        ),
        factors=afmoe_factors,
        names={
            "post_attn_norm": "post_attention_layernorm.weight",
            "pre_mlp_norm": "pre_mlp_layernorm.weight",
            "post_mlp_norm": "post_mlp_layernorm.weight",
            "router": "mlp.router.gate.weight",
            "router_bias": "mlp.expert_bias",
        },
    ),
    "qwen3_next": replace(
        _QWEN3_5,
        architecture="Qwen3NextForCausalLM",
        keys=f"{_QWEN3_5.keys} {_QWEN3_5_MOE_KEYS} decoder_sparse_step norm_topk_prob "
        "mlp_only_layers",
        inert="",
        num_key_value_heads=2,
        delta_alternates=True,
        moe_layers=sparse_layers,
        experts=replace(
            _QWEN3_5_EXPERTS,
            number=("num_experts", 0, 512),
            top_k=10,
            renormalize="norm_topk_prob",
            renormalize_default=True,
        ),
        names=_QWEN3_5.names | _mlp("shared", "mlp.shared_expert"),
        fixed={"attention_bias": False},
    ),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": replace(
        _QWEN3_5,
        architecture="Qwen3_5MoeForCausalLM",
        keys=f"{_QWEN3_5.keys} {_QWEN3_5_MOE_KEYS}",
        num_key_value_heads=2,
        moe_layers=every,
        experts=_QWEN3_5_EXPERTS,
        names=_QWEN3_5.names | _mlp("shared", "mlp.shared_expert"),
    ),
    "hunyuan_v1_dense": _HUNYUAN,
    "deepseek_v3": _DEEPSEEK_V3,
    "glm4_moe_lite": replace(
        _DEEPSEEK_V3,
        architecture="Glm4MoeLiteForCausalLM",
        keys=f"{_LATENT_KEYS} mlp_layer_types".replace("first_k_dense_replace", ""),
        num_key_value_heads=20,
        max_position_embeddings=202752,
        rms_norm_eps=1e-5,
        moe_layers=first_layers_dense(1),
        experts=replace(
            _DEEPSEEK,
            number=("n_routed_experts", 1, 64),
            top_k=4,
            scaling_default=1.8,
        ),
        latent=_LATENT | {"q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256},
        fixed=_DEEPSEEK_V3.fixed | {"first_k_dense_replace": 1},
    ),
    "hunyuan_v1_moe": replace(
        _HUNYUAN,
        architecture="HunYuanMoEV1ForCausalLM",
        keys="attention_bias num_experts num_local_experts moe_topk num_experts_per_tok",
        moe_layers=every,
        experts=Experts(
            number=("num_experts", 1, 1),
            top_k=1,
            width="intermediate_size",
            renormalize=True,
            shared_width=lambda c: c.integer("intermediate_size"),
        ),
        factors=hunyuan_moe_top_k,
        names=_HUNYUAN.names | {"router": "mlp.gate.wg.weight"} | _mlp("shared", "mlp.shared_mlp"),
    ),
}
# model_types without a class in transformers, and the family that their checkpoints' code computes.
SAME_AS = {"mimo": "qwen2", "kimi_k2": "deepseek_v3"}
# model_types of multimodal models whose text_config is read, and its family.
MULTIMODAL = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}

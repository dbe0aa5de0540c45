"""The generator's ops as differentiable functions of torch tensors: the bits of the forward pass
are those of a rollout.

    embedding · linear · rms_norm · add_rms_norm · attention · latent_attention · rope_table ·
    delta_net · swiglu · activate · moe · decoder_layer · lm_head · token_logprobs

Activations are [rows, width] tensors of bfloat16 or float32. Rows of several sequences follow each
other; only attention and delta_net have to know which (`Sequences`). Weights are the trainer's own,
in any float dtype: an op converts them to the activations' dtype as a weight sync does, and their
gradients have their own dtype. So a bfloat16 forward pass works on float32 masters; the rounding of
a weight counts as the identity. Each call packs the weights that it is given.

A backward pass is torch's: matmuls of what the forward pass saved, in its dtype where this
processor has the instructions, else in float32; norms, softmax and activations in float32. Its bits
are torch's, not the contract's.

NumericsError: keys, values or logits that are not finite, which a generator would refuse too.
"""

from rollmesh.torch.functions.attention import (
    Heads,
    Latent,
    attention,
    latent_attention,
    rope_table,
)
from rollmesh.torch.functions.common import How, how_for
from rollmesh.torch.functions.delta import DeltaHeads, delta_net
from rollmesh.torch.functions.dense import (
    activate,
    add,
    add_rms_norm,
    decoder_layer,
    embedding,
    linear,
    rms_norm,
    sigmoid_gate,
    swiglu,
)
from rollmesh.torch.functions.logits import TokenLogprobs, lm_head, token_logprobs
from rollmesh.torch.functions.moe import Routed, moe

__all__ = [
    "DeltaHeads",
    "Heads",
    "How",
    "Latent",
    "Routed",
    "TokenLogprobs",
    "activate",
    "add",
    "add_rms_norm",
    "attention",
    "decoder_layer",
    "delta_net",
    "embedding",
    "how_for",
    "latent_attention",
    "linear",
    "lm_head",
    "moe",
    "rms_norm",
    "rope_table",
    "sigmoid_gate",
    "swiglu",
    "token_logprobs",
]

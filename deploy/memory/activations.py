"""What one forward and backward pass of the trainer allocates, from the model's sizes.

Legend: `T` packed tokens of a micro-batch, all of which carry loss and have no prompt in common (the most that a batch
can ask for); `H` hidden size, `I` the MLP's inner size, `V` vocabulary, `s` bytes of an element of the computation,
`r` the adapter's rank. Every term names what of the trainer's code allocates it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from deploy.memory.shapes import ModelShape, Quantization

_FLOAT32, _BOOL = 4, 1
_POSITIONS_AT_ONCE = 1024
"""Positions of a tile of the LM head (`trainer/logprobs.py`)."""
_TILE = {"cpu": 1 << 21, "cuda": 1 << 25}
"""Elements of such a tile, by the device."""
_CHUNK, _TENSORS_OF_A_CHUNK = 1 << 24, 8
"""Elements of a chunk of the self-distillation's logits, and how many tensors of it there are at a time
(`trainer/divergence.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One pass over T tokens of a model with an adapter, or several, which are computed side by side as one."""

    shape: ModelShape
    num_tokens: int
    element_bytes: int
    """2 for bf16, 4 for fp32."""
    rank: int
    target_modules: Sequence[str]
    num_adapters: int
    quantization: Quantization | None
    device: str
    """`cpu` or `cuda`."""
    checkpointing: bool
    distils: bool
    """Whether hints are trained on: their divergence needs the teacher's hidden states and larger pieces of logits."""

    @property
    def kept_bytes(self) -> int:
        """What the forward pass keeps for the backward pass at most: every layer's, or with checkpointing every
        layer's input and one layer's rest."""
        of_all = 2 * self._tokens(self.shape.head_dim)  # rotary
        if self.num_adapters > 1:
            of_all += self._tokens(self.num_adapters, _BOOL)  # which of them are shut for a token
        if not self.checkpointing:
            return self.shape.num_layers * self.layer_bytes + of_all
        return self.shape.num_layers * self._tokens(self.shape.hidden_size) + self.layer_bytes + of_all

    @property
    def working_bytes(self) -> int:
        """What is there only for a while, at the end of the forward or the start of the backward pass. With
        checkpointing the LM head has the memory to itself that a layer's rest takes later."""
        head, mlp = self._head_bytes(), self._mlp_backward_bytes()
        return max(head - self.layer_bytes, mlp) if self.checkpointing else max(head, mlp)

    @property
    def dequantized_bytes(self) -> int:
        """The largest weight as it is made for one product, and what making it takes besides; nothing where the base
        is not quantized. One exists at a time."""
        if self.quantization is None:
            return 0
        largest = max(math.prod(shape) for shape in self.shape.linears.values())
        # Beside the weight: NF4's float32 scales of 64 weights; NVFP4's codes as int32 and float32 scales of 16.
        besides = {"nf4": largest // 16, "fp8": 0, "nvfp4": 2 * largest + largest // 4}[self.quantization]
        return largest * self.element_bytes + besides

    @property
    def layer_bytes(self) -> int:
        """What one layer keeps for its backward pass."""
        return self._norms_bytes() + self._attention_bytes() + self._mlp_bytes() + self._adapter_bytes()

    def _norms_bytes(self) -> int:
        """Both RMSNorms keep their input in float32 (which is the residual stream itself where that is float32), and
        the adapters behind them their common input."""
        adapted = [{"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"}]
        inputs = sum(bool(names & set(self.target_modules)) for names in adapted)
        wide = 2 * self._tokens(self.shape.hidden_size, _FLOAT32)
        return wide + inputs * self._tokens(self.shape.hidden_size)

    def _attention_bytes(self) -> int:
        """Queries and keys in float32 before their norms; queries, keys, values, the output and a float32 normaliser a
        head for the attention. On a CPU it computes on padded copies in float32, and `o_proj`'s adapter keeps the
        output without padding; on a GPU that is the same tensor."""
        shape, on_cpu = self.shape, self.device == "cpu"
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        normed = self._tokens(queries + keys, _FLOAT32) if shape.norms_queries else 0
        streams = self._tokens(2 * queries + 2 * keys, _FLOAT32 if on_cpu else self.element_bytes)
        output = self._tokens(queries) if on_cpu and "o_proj" in self.target_modules else 0
        return normed + streams + output + self._tokens(shape.num_heads, _FLOAT32)

    def _mlp_bytes(self) -> int:
        """The gate's output for SiLU, its result and `up_proj`'s output for their product, and that for `down_proj`'s
        adapter."""
        return self._tokens((3 + ("down_proj" in self.target_modules)) * self.shape.intermediate_size)

    def _adapter_bytes(self) -> int:
        """x Aᵀ of each target; and where the computation is not in float32 the rounded A and B, where there are several
        adapters theirs side by side."""
        matrices = self.num_adapters * sum(self.shape.adapter(self.rank, self.target_modules)) // self.shape.num_layers
        copied = self.element_bytes < _FLOAT32 or self.num_adapters > 1
        down = self._tokens(self.num_adapters * self.rank * len(self.target_modules))
        return down + (matrices * self.element_bytes if copied else 0)

    def _mlp_backward_bytes(self) -> int:
        """Gradients of SiLU's result and of `up_proj`'s output beside that of their product, whose place was kept; and
        of the residual stream twice. All layers' kept tensors are there yet."""
        return self._tokens(2 * self.shape.intermediate_size + 2 * self.shape.hidden_size)

    def _head_bytes(self) -> int:
        """The final hidden states, those before the targets, and their slopes (`token_logprobs`); a tile of logits in
        float32 and, where the computation is not, in its type too; the sums of a tile's positions."""
        hidden = 3 * self._tokens(self.shape.hidden_size)
        rows = min(self.num_tokens, _POSITIONS_AT_ONCE)
        tile = rows * min(self.shape.vocab_size, _TILE[self.device] // rows)
        narrow = self.element_bytes if self.element_bytes < _FLOAT32 else 0
        policy = hidden + tile * (_FLOAT32 + narrow) + 2 * rows * self.shape.hidden_size * _FLOAT32
        if not self.distils:
            return policy
        teacher = self._tokens(self.shape.hidden_size)
        chunk = min(_CHUNK, self.num_tokens * self.shape.vocab_size)
        return max(policy, hidden + teacher + _TENSORS_OF_A_CHUNK * chunk * _FLOAT32)

    def _tokens(self, width: int, element_bytes: int | None = None) -> int:
        """Bytes of [T, width], in the type of the computation where no other is given."""
        return self.num_tokens * width * (element_bytes or self.element_bytes)

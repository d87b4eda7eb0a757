"""The model's shape, as a run file states it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from tenfold.config.base import Section
from tenfold.config.presets import PRESETS


class MoEConfig(Section):
    """Mixture of experts with expert prototyping in place of the dense feed-forward (M6-T, arXiv 2105.15082)."""

    experts: int = Field(0, ge=0, le=10**7, description="Experts in a layer, over all prototypes; 0 is a dense model.")
    prototypes: int = Field(
        1, ge=1, le=10**7, description="Groups the experts are split into; a token goes to top_k of each."
    )
    top_k: int = Field(1, ge=1, le=10**7, description="Experts each token is sent to inside every prototype.")
    ffn: int = Field(0, ge=0, le=10**7, description="Hidden width of one expert; 0 takes model.ffn.")
    shared_experts: int = Field(
        0, ge=0, le=10**7, description="Experts that every token passes besides the routed ones."
    )
    capacity: Literal["dropless", "k", "one"] = Field(
        "dropless",
        description="Tokens one expert takes from a sequence of T: dropless (no limit), k (C x T / experts x "
        "capacity_factor for the C = prototypes x top_k choices of a token) or one (T / experts x capacity_factor: no "
        "more work than top-1). Tokens over it pass by the residual alone, in training: evaluation and generation drop "
        "none.",
    )
    capacity_factor: float = Field(1.25, gt=0, description="Slack of the capacity over the fair share.")
    balance_loss: float = Field(0.0, ge=0, description="Weight of the load-balance loss of each layer; 0 is off.")
    z_loss: float = Field(0.0, ge=0, description="Weight of the router z-loss of each layer; 0 is off.")
    bias_rate: float = Field(
        0.0,
        ge=0,
        description="Step of the balancing bias that needs no loss (added when choosing only); 0 is off.",
    )

    @model_validator(mode="after")
    def _check(self) -> MoEConfig:
        if self.experts and self.experts % self.prototypes:
            raise ValueError(
                f"experts = {self.experts} does not divide into prototypes = {self.prototypes} groups of equal size"
            )
        if self.experts and self.top_k > self.experts // self.prototypes:
            raise ValueError(
                f"top_k = {self.top_k} is more than the {self.experts // self.prototypes} experts of one prototype "
                f"(experts = {self.experts}, prototypes = {self.prototypes})"
            )
        if self.experts == 0 and self.shared_experts:
            raise ValueError(f"shared_experts = {self.shared_experts} needs experts > 0; a dense model has none")
        return self


class ModelConfig(Section):
    """A decoder (GPT-2- or Llama-shaped) or encoder (BERT- or ALBERT-shaped), dense or mixture of experts.

    Widths are in elements.
    """

    preset: str | None = Field(None, description="Start from a named shape: " + ", ".join(PRESETS) + ".")
    vocab_size: int | None = Field(
        None, gt=0, le=10**7, description="Rows of the vocabulary; unset takes the tokenizer's."
    )
    vocab_multiple: int = Field(
        64, gt=0, le=10**7, description="The vocabulary is padded to a multiple of this many rows."
    )
    objective: Literal["next-token", "masked"] = Field(
        "next-token",
        description="What is predicted: the next token (a decoder), or masked tokens from all others (an encoder).",
    )
    mask_share: float = Field(0.15, gt=0, lt=1, description="Share of a sequence's tokens that an encoder predicts.")
    mask_token: int | None = Field(
        None,
        ge=0,
        description="Id read at masked places; unset: the tokenizer's [MASK] or <mask>, else a row of its own.",
    )
    layers: int = Field(6, gt=0, le=10**4, description="Transformer layers, by depth.")
    hidden: int = Field(256, gt=0, le=10**7, description="Width of the residual stream.")
    heads: int = Field(4, gt=0, le=10**7, description="Query heads.")
    kv_heads: int | None = Field(
        None, gt=0, le=10**7, description="Key and value heads (grouped-query); unset equals heads."
    )
    head_dim: int | None = Field(None, gt=0, le=10**7, description="Width of one head; unset is hidden / heads.")
    ffn: int = Field(1024, gt=0, le=10**7, description="Hidden width of the feed-forward.")
    max_positions: int | None = Field(
        None, gt=0, le=10**7, description="Rows of learned positions; unset: sequence_length."
    )
    norm: Literal["layernorm", "rmsnorm"] = Field("rmsnorm", description="Norm of attention and feed-forward.")
    norm_position: Literal["pre", "post"] = Field(
        "pre", description="Norm before each of them and at the end (GPT-2, Megatron), or after adding them (BERT)."
    )
    norm_eps: float = Field(1e-5, gt=0, description="Epsilon of the norms.")
    activation: Literal["gelu", "swiglu"] = Field("swiglu", description="Feed-forward: two or three matrices.")
    positions: Literal["learned", "rotary"] = Field("rotary", description="How a token knows its place.")
    document_end: int | None = Field(
        None,
        ge=0,
        description="The token id after which attention and positions begin anew; `data.document_mask` sets it.",
    )
    rope_theta: float = Field(10000.0, gt=0, description="Base of the rotary frequencies.")
    qk_norm: bool = Field(False, description="RMSNorm of each query and key head before attention.")
    bias: bool = Field(False, description="Biases in linear layers (GPT-2 has them, Llama has not).")
    embedding_norm: bool = Field(False, description="Norm of the embeddings before the first layer (BERT).")
    embedding_width: int | None = Field(
        None, gt=0, le=10**7, description="Width of a factorised embedding (ALBERT): a matrix leads from it to hidden."
    )
    tie_embeddings: bool = Field(True, description="The output matrix is the embedding matrix.")
    init_std: float = Field(0.02, gt=0, description="Standard deviation of initial weights.")
    moe: MoEConfig = MoEConfig()

    @model_validator(mode="before")
    @classmethod
    def _expand_preset(cls, given: Any) -> Any:
        """Fields of the preset, under whatever is written beside it."""
        if not isinstance(given, dict) or given.get("preset") is None:
            return given
        if given["preset"] not in list(PRESETS):  # a list, since what is given may not be hashable
            raise ValueError(f"there is no preset {given['preset']!r}; there are {', '.join(PRESETS)}")
        base = PRESETS[given["preset"]]
        moe = given.get("moe", {})
        if isinstance(moe, Section):
            moe = moe.model_dump()
        expanded = {**base, **given, "moe": {**base.get("moe", {}), **moe} if isinstance(moe, dict) else moe}
        if any(expanded[key] is None for key in base):  # TOML cannot say None, so the rest is written without the name
            expanded["preset"] = None
        return expanded

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        if self.head_dim is None and self.hidden % self.heads:
            raise ValueError(
                f"hidden = {self.hidden} does not divide into heads = {self.heads}; set head_dim to differ"
            )
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"heads = {self.heads} is not a multiple of kv_heads = {self.kv_heads}")
        if self.positions == "rotary" and self.head_width % 2:
            raise ValueError(f"rotary positions need an even head width; it is {self.head_width}")
        if self.mask_token is not None and self.objective != "masked":
            raise ValueError(f'mask_token = {self.mask_token} is for objective = "masked"; leave it out')
        if self.mask_token is not None and self.mask_token >= (self.vocab_size or 10**12):
            raise ValueError(f"mask_token = {self.mask_token} has no row in vocab_size = {self.vocab_size}")
        return self

    @property
    def head_width(self) -> int:
        """Elements of one attention head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def key_heads(self) -> int:
        """Key and value heads."""
        return self.kv_heads or self.heads

    @property
    def embedding_columns(self) -> int:
        """Width of a token's embedding."""
        return self.embedding_width or self.hidden

    @property
    def expert_ffn(self) -> int:
        """Hidden width of one expert."""
        return self.moe.ffn or self.ffn

    def padded_vocab(self) -> int:
        """Rows of the embedding: `vocab_size` (which must be known by now) rounded up to `vocab_multiple`."""
        assert self.vocab_size is not None, "the vocabulary is known once the tokenizer is"
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

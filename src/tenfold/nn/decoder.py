"""The model, decoder or encoder: embedding, layers, final norm and output matrix."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tenfold.config.model import ModelConfig
from tenfold.nn.attend import Context
from tenfold.nn.attention import Attention, rotary_table
from tenfold.nn.cache import KeyValueCache, LayerCache
from tenfold.nn.documents import documents_of
from tenfold.nn.layers import Linear, Norm
from tenfold.nn.moe import FeedForward, MixtureOfExperts
from tenfold.nn.ranks import ALONE, Ranks, Stage
from tenfold.nn.recompute import KEEP_ALL, Mode, Recompute, recomputed
from tenfold.nn.slices import LayerSlice, SliceCache


class Block(nn.Module):
    """One layer: attention and feed-forward, with norms. `recompute` tells what is kept for its backward pass."""

    def __init__(self, config: ModelConfig, recompute: Mode = "none", ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.recompute = recompute
        self.post_norm = config.norm_position == "post"
        self.attention_norm = Norm(config, config.hidden)
        self.attention = Attention(config, ranks)
        self.ffn_norm = Norm(config, config.hidden)
        routed = config.moe.experts > 0
        self.ffn = MixtureOfExperts(config, ranks) if routed else FeedForward(config, config.ffn, ranks)

    def forward(self, x_BTD: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """The layer's output, and its statistics (see `nn.moe`; empty for a dense layer)."""
        if self.recompute != "none" and torch.is_grad_enabled():
            out: tuple[Tensor, Tensor] = recomputed(self.recompute, self.post_norm, self._compute, x_BTD, context)
            return out
        return self._compute(x_BTD, context)

    def _compute(self, x_BTD: Tensor, context: Context, decision: list[Tensor] | None = None) -> tuple[Tensor, Tensor]:
        if self.post_norm:
            x_BTD = self.attention_norm(x_BTD + self.attention(x_BTD, context))
            y_BTD, statistics = self._feed_forward(x_BTD, decision)
            return self.ffn_norm(x_BTD + y_BTD), statistics
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), context)
        y_BTD, statistics = self._feed_forward(self.ffn_norm(x_BTD), decision)
        return x_BTD + y_BTD, statistics

    def _feed_forward(self, x_BTD: Tensor, decision: list[Tensor] | None) -> tuple[Tensor, Tensor]:
        if isinstance(self.ffn, MixtureOfExperts):
            y_BTD, statistics = self.ffn(x_BTD, decision)
            return y_BTD, statistics
        return self.ffn(x_BTD), x_BTD.new_empty(0, dtype=torch.float32)


class Transform(nn.Module):
    """From the last layer's width to the embedding's; for masked places BERT's dense layer, GELU and norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        masked = config.objective == "masked"
        self.dense = Linear(config.hidden, config.embedding_columns, bias=masked or config.bias)
        self.norm = Norm(config, config.embedding_columns) if masked else None

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.dense(hidden)
        return hidden if self.norm is None else self.norm(F.gelu(hidden))


class Decoder(nn.Module):
    """A GPT-2- or Llama-shaped language model; with `objective = "masked"` an encoder of BERT's or ALBERT's shape, in
    which every position sees all others.

    `dtype` is the dtype of activations; weights are fp32. Layers that share hold the same parameters
    (`sharing.tying`), and `named_parameters` has each once, under the first layer that uses it
    (`layers.0.attention.wq.weight`).
    """

    def __init__(
        self,
        config: ModelConfig,
        max_positions: int,
        dtype: torch.dtype = torch.float32,
        recompute: Recompute = KEEP_ALL,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__()
        self.config, self.ranks = config, ranks
        self.dtype = dtype
        assert config.vocab_size is not None
        self.vocab_size = config.vocab_size
        self.max_positions = config.max_positions or max_positions
        columns, factorised = config.embedding_columns, config.embedding_width is not None
        masked, post_norm = config.objective == "masked", config.norm_position == "post"
        self.embedding = nn.Embedding(config.padded_vocab(), columns)
        learned = config.positions == "learned"
        self.positions = nn.Embedding(self.max_positions, columns) if learned else None
        self.embedding_norm = Norm(config, columns) if config.embedding_norm else None
        self.projection = Linear(columns, config.hidden, bias=config.bias) if factorised else None
        self.layers = nn.ModuleList(
            Block(config, recompute.of(layer, config.layers), ranks) for layer in range(config.layers)
        )
        self.norm = None if post_norm else Norm(config, config.hidden)
        self.transform = Transform(config) if masked or factorised else None
        self.head = None if config.tie_embeddings else Linear(columns, config.padded_vocab(), bias=False)
        self.output_bias = nn.Parameter(torch.zeros(config.padded_vocab())) if masked else None

    def set_recompute(self, recompute: Recompute) -> None:
        """Have layers recompute so from now on."""
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, Block)
            layer.recompute = recompute.of(number, self.config.layers)

    def forward(
        self,
        tokens_BT: Tensor,
        cache: KeyValueCache | SliceCache | None = None,
        stage: Stage | None = None,
        x_BTD: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The final hidden states [B, T, D] and the statistics of every layer [L, columns of `nn.moe`] in fp32.

        With `cache` the tokens go on from those that it holds, and are held from then on. Where ranks split sequences
        all of them are given whole ones, and each gets the hidden states of its own positions.

        Where ranks split the layers, those of this one's stages alone are gone through, and statistics of others are
        zeros; hidden states are final on the rank of the last stage alone. In training they travel by a schedule
        (`parallel.pipeline`): `stage` alone is gone through, from the hidden states `x_BTD` of the stage before.
        """
        ranks, length, positions_BT, starts = self.ranks, tokens_BT.shape[1], None, None
        caches: tuple[LayerCache | LayerSlice, ...] = () if cache is None else cache.begin(tokens_BT)
        if caches:
            length, positions_BT = caches[0].end, caches[0].positions
        elif self.config.document_end is not None:
            starts, positions_BT = documents_of(ranks.tensor.sequences(tokens_BT), self.config.document_end)
        if ranks.split and ranks.context.size > 1:
            if positions_BT is None:
                positions_BT = torch.arange(length, device=tokens_BT.device)[None]
            tokens_BT, positions_BT = ranks.context.own(tokens_BT), ranks.context.own(positions_BT)
        rotary = None
        if self.config.positions == "rotary":
            rotary = rotary_table(length, self.config.head_width, self.config.rope_theta, tokens_BT.device)
            if positions_BT is not None:
                rotary = rotary[:, positions_BT].unsqueeze(2)  # [2, B, 1, T, W / 2]
        context = Context(rotary, caches, self.config.objective != "masked", starts)
        statistics: dict[int, Tensor] = {}
        for each in ranks.pipeline.stages(len(self.layers)) if stage is None else (stage,):
            if each.first:
                x_BTD = self._embed(tokens_BT, positions_BT, length)
            elif stage is None:
                x_BTD = ranks.pipeline.receive(each, x_BTD, ((*tokens_BT.shape, self.config.hidden), self.dtype))
            assert x_BTD is not None
            for layer in each.layers:
                x_BTD, statistics[layer] = self.layers.get_submodule(str(layer))(x_BTD, context)
                context = context.above()
            if each.last and self.norm is not None:
                x_BTD = self.norm(x_BTD)
            if stage is None:
                ranks.pipeline.send(each, x_BTD)
        assert x_BTD is not None
        if len(statistics) < self.config.layers:
            nothing = torch.zeros_like(next(iter(statistics.values())))
            statistics = dict.fromkeys(range(self.config.layers), nothing) | statistics
        return x_BTD, torch.stack(list(statistics.values()))

    def _embed(self, tokens_BT: Tensor, positions_BT: Tensor | None, length: int) -> Tensor:
        x_BTD = self.ranks.tensor.embed(tokens_BT, self.embedding.weight)
        if self.positions is not None:
            rows = self.positions.weight[:length]
            own = self.ranks.tensor.own
            x_BTD = x_BTD + own(rows[None] if positions_BT is None else F.embedding(positions_BT, rows))
        x_BTD = x_BTD.to(self.dtype)
        if self.embedding_norm is not None:
            x_BTD = self.embedding_norm(x_BTD)
        return x_BTD if self.projection is None else self.projection(x_BTD)

    @property
    def device(self) -> torch.device:
        """That of its weights."""
        return next(self.parameters()).device

    def new_cache(self, sequences: int, positions: int) -> KeyValueCache:
        """Room for the keys and values that this rank has of `positions` positions of `sequences` sequences."""
        key_heads = self.ranks.tensor.key_heads(self.config)
        layers = len(self.layers)
        return KeyValueCache(self.config, layers, key_heads, sequences, positions, self.dtype, self.device)

    @property
    def output_weight(self) -> Tensor:
        """The matrix from `before_output` to logits, fp32 [padded vocabulary, D, or the embedding's width]."""
        return self.ranks.tensor.columns(self.embedding.weight if self.head is None else self.head.weight)

    def before_output(self, hidden: Tensor) -> Tensor:
        """What the output matrix multiplies, of final hidden states [..., D]: themselves, or their transform."""
        return hidden if self.transform is None else self.transform(hidden)

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Logits [B, T, vocabulary] in fp32, without the rows that only pad the vocabulary."""
        dtype = torch.promote_types(hidden_BTD.dtype, torch.float32)
        shape = (*hidden_BTD.shape[:-1], self.vocab_size)
        return self.ranks.pipeline.from_last(lambda: self._logits(hidden_BTD), shape, dtype)

    def _logits(self, hidden_BTD: Tensor) -> Tensor:
        inner = self.before_output(hidden_BTD)
        logits = F.linear(inner, self.output_weight.to(inner.dtype))
        logits = logits.to(torch.promote_types(inner.dtype, torch.float32))
        logits = logits if self.output_bias is None else logits + self.output_bias
        return self.ranks.tensor.gather_vocabulary(logits)[..., : self.vocab_size]

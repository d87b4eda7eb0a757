"""Hugging Face's Llama model of the benchmark's shape, for the peers that train it."""

from common import LENGTH, SHAPE, VOCABULARY, check_parameters
from transformers import LlamaConfig, LlamaForCausalLM


def llama() -> LlamaForCausalLM:
    """The model, its parameters counted."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=SHAPE["hidden"],
            intermediate_size=SHAPE["ffn"],
            num_hidden_layers=SHAPE["layers"],
            num_attention_heads=SHAPE["heads"],
            num_key_value_heads=SHAPE["heads"],
            max_position_embeddings=LENGTH,
            tie_word_embeddings=False,
            use_cache=False,
            attn_implementation="sdpa",
        )
    )
    check_parameters(model)
    return model

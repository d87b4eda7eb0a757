"""Tokenizers: training a byte-level BPE, or taking a tokenizer.json made elsewhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tenfold.data.reading import reading
from tenfold.errors import TenfoldError

END_OF_TEXT = "<|endoftext|>"
_ENDS = (END_OF_TEXT, "</s>", "<eos>", "[SEP]")
_MASKS = ("[MASK]", "<mask>")

_WORDS = "|".join(
    (
        r" ?\p{Han}{1,4}",
        r" ?[\p{L}\p{M}&&[^\p{Han}]]{1,24}",
        r" ?\p{N}{1,3}",
        r" ?[^\s\p{L}\p{M}\p{N}]{1,16}",
        r"\s{1,16}(?!\S)",
        r"\s{1,16}",
    )
)
"""What merges stay inside: runs of letters, digits, signs or blanks, with the space before them. The runs are bounded,
since training time grows with the number and length of different words: text written without spaces would be all
long, different words."""


def train_bpe(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE (Sennrich et al., arXiv 1508.07909) of at most `vocab_size` entries; `<|endoftext|>` is id 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json, set to read whole documents as they are.

    Truncation and padding are off, and the text of a special token inside a document is ordinary text.
    """
    with reading(path):
        if path.is_dir():
            raise TenfoldError(f"{path} is a folder; give the tokenizer.json in it")
        content = path.read_bytes()
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # tokenizers raises plain Exception
        raise TenfoldError(f"{path} is not a tokenizer.json that `tokenizers` can read: {error}") from None
    return for_documents(tokenizer)


def for_documents(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer, set to read whole documents as they are."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def end_of_text(tokenizer: Tokenizer, path: Path) -> int:
    """The id of the token that ends a document."""
    if (found := find_end_of_text(tokenizer)) is None:
        raise TenfoldError(f"{path} has no token that ends a document: add one of {' '.join(_ENDS)} to it")
    return found


def find_end_of_text(tokenizer: Tokenizer) -> int | None:
    """The id of the token that ends a document, if the tokenizer has one."""
    return next((found for token in _ENDS if (found := tokenizer.token_to_id(token)) is not None), None)


def token_bytes(tokenizer: Tokenizer, end_of_text: int | None, vocab_size: int) -> npt.NDArray[np.int64] | None:
    """The bytes of text that each id stands for: int64 [vocab_size]; the end of text stands for none.

    None for tokenizers other than byte-level ones: what their tokens stand for hangs on their neighbours.
    """
    decoder = json.loads(tokenizer.to_str())["decoder"]
    if decoder is None or decoder["type"] != "ByteLevel":
        return None
    added = tokenizer.get_added_tokens_decoder()
    sizes = np.zeros(vocab_size, np.int64)
    for token, place in tokenizer.get_vocab(with_added_tokens=True).items():
        # Every byte is written as one character; added tokens stand for themselves.
        sizes[place] = len(token.encode()) if place in added else len(token)
    if end_of_text is not None:
        sizes[end_of_text] = 0
    return sizes


def mask_token(tokenizer: Tokenizer) -> int | None:
    """The id of the token that stands for a masked one, if the tokenizer has one."""
    return next((found for token in _MASKS if (found := tokenizer.token_to_id(token)) is not None), None)


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """One more than the largest id."""
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())

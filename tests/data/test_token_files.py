"""Token files of other programs, written here byte by byte as their formats are described, or by NumPy itself."""

from __future__ import annotations

import itertools
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from tenfold.config.run import DataConfig, PrepareConfig
from tenfold.data.prepare import as_prepared, ensure_prepared, prepare
from tenfold.data.shards import TokenData
from tenfold.data.vocabulary import train_bpe
from tenfold.errors import TenfoldError

DOCUMENTS = [[5, 9, 3, 0], [7, 0], [1, 2, 3, 4, 5, 6, 0], [], [8, 8, 0], [299, 4, 0]]
FORMATS = {1: "<B", 2: "<b", 3: "<h", 4: "<i", 5: "<q", 8: "<H"}


def megatron(prefix: Path, documents: list[list[list[int]]], code: int = 8, modes: bool = False) -> Path:
    """Documents of sequences as `X.bin` and `X.idx`, field by field."""
    sequences = [sequence for document in documents for sequence in document]
    size = struct.calcsize(FORMATS[code])
    prefix.parent.mkdir(exist_ok=True)
    body = b"".join(struct.pack(FORMATS[code], token) for sequence in sequences for token in sequence)
    Path(f"{prefix}.bin").write_bytes(body)
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
    index += struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(documents) + 1)
    index += b"".join(struct.pack("<i", len(sequence)) for sequence in sequences)
    place = 0
    for sequence in sequences:
        index += struct.pack("<q", place)
        place += size * len(sequence)
    for bound in itertools.accumulate(map(len, documents), initial=0):
        index += struct.pack("<q", bound)
    Path(f"{prefix}.idx").write_bytes(index + bytes(len(sequences) if modes else 0))
    return prefix


def raw(path: Path, tokens: list[int], form: str = "<H", header: bytes = b"") -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(header + b"".join(struct.pack(form, token) for token in tokens))
    return path


def opened(tmp_path: Path, path: Path, **keys: Any) -> TokenData:
    return ensure_prepared(DataConfig(path=str(path), cache=str(tmp_path / "cache"), **keys), show_progress=False)


def rows(data: TokenData, split: Any) -> list[list[int]]:
    """The split's documents."""
    found = data.split(split)
    parts = np.split(found.read(0, found.tokens), found.document_starts()[1:])
    assert found.documents == len(parts)
    assert found.max_token == max(int(part.max()) for part in parts)
    return [part.tolist() for part in parts]


FLAT = [token for document in DOCUMENTS for token in document]
FULL = [document for document in DOCUMENTS if document]


# Megatron


@pytest.mark.parametrize("code", [3, 4, 5, 8])
@pytest.mark.parametrize("name", ["corpus", "corpus.bin", "corpus.idx", "."])
def test_megatron_documents_are_read_where_they_are(tmp_path: Path, code: int, name: str) -> None:
    prefix = megatron(tmp_path / "m" / "corpus", [[document] for document in DOCUMENTS], code)
    data = opened(tmp_path, tmp_path / "m" / name, validation_fraction=0.0)
    assert rows(data, "train") == FULL
    assert data.vocab_size == 300
    assert data.index.layout == "megatron"
    assert [shard.file for shard in data.index.splits["train"]] == [f"{prefix}.bin"]
    assert sum(file.stat().st_size for file in data.path.iterdir()) < 4000  # an index, no copy


def test_megatron_documents_of_several_sequences_are_one_document_each(tmp_path: Path) -> None:
    prefix = megatron(tmp_path / "c", [[[1, 2], [3]], [[4]], [[5, 6], [], [7]]], modes=True)
    assert rows(opened(tmp_path, prefix, validation_fraction=0.0), "train") == [[1, 2, 3], [4], [5, 6, 7]]


def test_the_last_documents_are_held_out_whole(tmp_path: Path) -> None:
    data = opened(tmp_path, megatron(tmp_path / "c", [[document] for document in DOCUMENTS]), validation_fraction=0.3)
    assert rows(data, "train") == FULL[:3]  # 30 % of 19 tokens: from token 13 on, where the fourth begins
    assert rows(data, "validation") == FULL[3:]


def test_several_megatron_files_are_one_row_and_names_tell_the_splits(tmp_path: Path) -> None:
    megatron(tmp_path / "m" / "a_text_document", [[[1, 2]], [[3]]])
    megatron(tmp_path / "m" / "b_text_document", [[[4]]])
    assert rows(opened(tmp_path, tmp_path / "m", validation_fraction=0.0), "train") == [[1, 2], [3], [4]]
    megatron(tmp_path / "m" / "valid_text_document", [[[5]]])
    data = opened(tmp_path, tmp_path / "m", validation_fraction=0.5)
    assert rows(data, "train") == [[1, 2], [3], [4]]
    assert rows(data, "validation") == [[5]]


def edit(file: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_bytes(change((folder / file).read_bytes()))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (edit("c.idx", lambda b: b[:20]), r"c\.idx is cut short within its header"),
        (edit("c.idx", lambda b: b[:-8]), r"c\.idx has \d+ bytes, its header says \d+"),
        (edit("c.idx", lambda b: b[:9] + b"\2" + b[10:]), r"version 2; version 1 is read"),
        (edit("c.idx", lambda b: b[:17] + b"\7" + b[18:]), r"dtype code 7; codes of token ids are 1 uint8"),
        (edit("c.idx", lambda b: b[:34] + b"\3" + b[35:]), r"do not lie end to end in c\.bin"),
        (edit("c.idx", lambda b: b[:-8] + b"\1" + b[-7:]), r"documents do not begin and end with the sequences"),
        (edit("c.bin", lambda b: b[:-2]), r"c\.bin has 36 bytes, c\.idx says 38"),
    ],
)
def test_a_damaged_megatron_pair_is_named(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    prefix = megatron(tmp_path / "c", [[document] for document in DOCUMENTS])
    damage(tmp_path)
    with pytest.raises(TenfoldError, match=message):
        opened(tmp_path, prefix)


# nanoGPT


def test_nanogpt_takes_train_and_val_as_they_are(tmp_path: Path) -> None:
    raw(tmp_path / "n" / "train.bin", FLAT)
    raw(tmp_path / "n" / "val.bin", [1, 2, 0, 3, 0])
    (tmp_path / "n" / "input.txt").write_text("the text they were made from")
    data = opened(tmp_path, tmp_path / "n", end_of_text=0, vocab_size=50304)
    assert rows(data, "train") == FULL
    assert rows(data, "validation") == [[1, 2, 0], [3, 0]]
    assert (data.vocab_size, data.end_of_text, data.index.layout) == (50304, 0, "nanogpt")
    assert data.split("train").text_bytes is None


def test_without_an_end_of_text_the_tail_is_held_out(tmp_path: Path) -> None:
    data = opened(tmp_path, raw(tmp_path / "a.bin", list(range(100))), validation_fraction=0.25)
    assert rows(data, "train") == [list(range(75))]
    assert rows(data, "validation") == [list(range(75, 100))]
    assert data.end_of_text is None


@pytest.mark.parametrize(("magic", "form", "version"), [(20240520, "<H", 1), (20240801, "<I", 7)])
def test_the_header_of_llm_c_is_no_text(tmp_path: Path, magic: int, form: str, version: int) -> None:
    header = struct.pack("<256i", magic, version, 5, *[0] * 253)
    for name, tokens in (("fineweb_train_000001.bin", [0, 5, 6, 0, 7]), ("fineweb_val_000000.bin", [0, 8, 0, 9, 9])):
        raw(tmp_path / "f" / name, tokens, form, header)
    data = opened(tmp_path, tmp_path / "f", end_of_text=0)
    assert rows(data, "train") == [[0], [5, 6, 0], [7]]
    assert data.split("validation").read(0, 5).tolist() == [0, 8, 0, 9, 9]
    raw(tmp_path / "f" / "fineweb_val_000000.bin", [1], form, header)
    with pytest.raises(TenfoldError, match="its header says"):
        opened(tmp_path, tmp_path / "f")


# OLMo


def test_olmo_files_are_raw_and_their_dtype_is_told(tmp_path: Path) -> None:
    raw(tmp_path / "o" / "part-0-00000.npy", [70_000, 5, 1], "<I")
    raw(tmp_path / "o" / "part-1-00000.npy", [6, 1], "<I")
    (tmp_path / "o" / "README.md").write_text("what this is")
    data = opened(tmp_path, tmp_path / "o", dtype="uint32", end_of_text=1, validation_fraction=0.0)
    assert rows(data, "train") == [[70_000, 5, 1], [6, 1]]
    assert data.index.layout == "olmo"


def test_real_numpy_files_tell_their_dtype(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array(FLAT, np.uint32))
    data = opened(tmp_path, tmp_path / "a.npy", end_of_text=0, validation_fraction=0.0)
    assert rows(data, "train") == FULL
    with pytest.raises(TenfoldError, match=r"says that it is of uint32, and data\.dtype is 'uint16'"):
        opened(tmp_path, tmp_path / "a.npy", dtype="uint16")


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 2), np.uint16), r"of <u2 with 2 dimension"),
        (np.zeros(2, np.float32), r"of <f4 with 1 dimension"),
        (np.zeros(2, ">u4"), r"of >u4"),
        (np.zeros(0, np.uint16), r"holds no tokens"),
    ],
)
def test_numpy_files_that_hold_no_ids_are_refused(tmp_path: Path, array: Any, message: str) -> None:
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(TenfoldError, match=message):
        opened(tmp_path, tmp_path / "a.npy")


def test_a_numpy_file_with_a_damaged_header_or_cut_short_is_named(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(50, dtype=np.uint16))
    content = (tmp_path / "a.npy").read_bytes()
    (tmp_path / "a.npy").write_bytes(content[:-2])
    with pytest.raises(TenfoldError, match=r"a\.npy has \d+ bytes, its header says"):
        opened(tmp_path, tmp_path / "a.npy")
    (tmp_path / "a.npy").write_bytes(content[:30])
    with pytest.raises(TenfoldError, match=r"a\.npy has a damaged NumPy header"):
        opened(tmp_path, tmp_path / "a.npy")


@pytest.mark.parametrize(
    ("form", "tokens", "keys", "message"),
    [
        ("<I", [300, 5000, 7, 20, 100_000, 9, 40_000, 3] * 64, {}, r'set data\.dtype = "uint32"'),
        ("<I", [300, 5000, 7, 20, 1000, 9, 4000, 3] * 64, {}, r'set data\.dtype = "uint32"'),
        ("<H", [1, 2, 3], {"dtype": "uint32"}, r"6 bytes, no multiple of the 4 of uint32"),
        ("<H", [1, 5000, 3], {"vocab_size": 5000}, r"a\.npy holds token id 5000 at token 1, but data\.vocab_size has"),
        ("<H", [500, 9000, 20, 900] * 5, {"dtype": "uint32"}, r"holds token id \d+ at token 0, but no vocabulary is"),
        ("<i", [1, -100, 3], {"dtype": "int32"}, r"holds token id -100 at token 1"),
        ("<H", [1, 2, 3], {"end_of_text": 900, "vocab_size": 500}, r"data\.end_of_text = 900, but data\.vocab_size"),
        ("<H", [1, 2, 3], {"dedup": True}, r"data\.dedup = true, but .* holds tokens"),
    ],
)
def test_ids_that_do_not_fit_are_an_error_before_any_step(
    tmp_path: Path, form: str, tokens: list[int], keys: dict[str, Any], message: str
) -> None:
    raw(tmp_path / "a.npy", tokens, form)
    with pytest.raises(TenfoldError, match=message):
        opened(tmp_path, tmp_path / "a.npy", **keys)
    assert not list((tmp_path / "cache").glob("*"))


def test_a_vocabulary_told_later_is_checked_against_the_index_that_is_there(tmp_path: Path) -> None:
    path = raw(tmp_path / "a.npy", [1, 800, 3] * 40)
    assert opened(tmp_path, path).vocab_size == 801
    with pytest.raises(TenfoldError, match=r"a\.npy holds token id 800, but data\.vocab_size has ids below 500"):
        opened(tmp_path, path, vocab_size=500)
    assert opened(tmp_path, path, vocab_size=1024).vocab_size == 1024
    assert len(list((tmp_path / "cache").iterdir())) == 1
    config = DataConfig(path=str(path), cache=str(tmp_path / "cache"))
    assert as_prepared(config, opened(tmp_path, path)).vocab_size == 801


def test_files_of_different_dtypes_are_not_one_row(tmp_path: Path) -> None:
    (tmp_path / "o").mkdir()
    np.save(tmp_path / "o" / "a.npy", np.arange(5, dtype=np.uint16))
    np.save(tmp_path / "o" / "b.npy", np.arange(5, dtype=np.uint32))
    with pytest.raises(TenfoldError, match=r"b\.npy is of uint32 and .*a\.npy of uint16"):
        opened(tmp_path, tmp_path / "o")


# All of them


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    texts = ["a ship sails north", "三国 演义 the sea", "naïve \U0001f642 wind"] * 20
    train_bpe(texts, 300).save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_a_tokenizer_gives_vocabulary_end_of_text_and_bytes(tmp_path: Path, tokenizer: Path) -> None:
    texts = ["a ship 三国", "the wind \U0001f642", "sea"]
    encode = Tokenizer.from_file(str(tokenizer)).encode
    tokens = [token for text in texts for token in [*encode(text).ids, 0]]
    data = opened(tmp_path, raw(tmp_path / "a.bin", tokens), tokenizer=str(tokenizer), validation_fraction=0.0)
    assert data.end_of_text == 0
    assert data.vocab_size == Tokenizer.from_file(str(tokenizer)).get_vocab_size()
    assert data.split("train").documents == 3
    assert data.split("train").text_bytes == len("".join(texts).encode())
    first = data.split("train").read(0, tokens.index(0)).tolist()
    assert data.tokenizer().decode(first) == texts[0]


def test_ids_outside_the_tokenizer_are_an_error(tmp_path: Path, tokenizer: Path) -> None:
    path = raw(tmp_path / "a.bin", [1, 2, 60_000])
    with pytest.raises(TenfoldError, match=r"a\.bin holds token id 60000 at token 2, but the tokenizer .* has"):
        opened(tmp_path, path, tokenizer=str(tokenizer))


def test_without_a_tokenizer_text_cannot_be_shown(tmp_path: Path) -> None:
    with pytest.raises(TenfoldError, match=r"is not known; name it as data\.tokenizer"):
        opened(tmp_path, raw(tmp_path / "a.bin", FLAT)).tokenizer()


def test_the_index_is_made_once_and_anew_when_a_file_changes(tmp_path: Path) -> None:
    path = raw(tmp_path / "a.bin", FLAT)
    first = opened(tmp_path, path)
    made = (first.path / "index.json").stat().st_mtime_ns
    assert opened(tmp_path, path).fingerprint == first.fingerprint
    assert (first.path / "index.json").stat().st_mtime_ns == made
    (tmp_path / "moved").mkdir()
    raw(tmp_path / "moved" / "a.bin", FLAT)
    assert opened(tmp_path, tmp_path / "moved" / "a.bin").fingerprint == first.fingerprint
    raw(path, [1, *FLAT[1:]])
    os.utime(path, ns=(1, 1))
    assert opened(tmp_path, path).fingerprint != first.fingerprint


def test_a_file_that_changes_under_its_index_is_found_when_the_index_is_opened(tmp_path: Path) -> None:
    path = raw(tmp_path / "a.bin", FLAT)
    data = opened(tmp_path, path)
    raw(path, [1, *FLAT[1:]])
    with pytest.raises(TenfoldError, match=r"a\.bin is damaged: its sha256"):
        TokenData.open(data.path)
    raw(path, FLAT[:-1])
    with pytest.raises(TenfoldError, match=r"a\.bin has 36 bytes, the index says 38"):
        TokenData.open(data.path)


def test_a_folder_of_text_with_arrays_beside_it_is_text(tmp_path: Path) -> None:
    raw(tmp_path / "t" / "a.npy", FLAT)
    (tmp_path / "t" / "a.txt").write_text("a ship sails north " * 20)
    assert opened(tmp_path, tmp_path / "t", vocab_size=260).index.layout == "tenfold"


def test_tokens_need_no_preparation_and_text_no_keys_of_tokens(tmp_path: Path) -> None:
    path = raw(tmp_path / "a.bin", FLAT)
    with pytest.raises(TenfoldError, match="holds tokens already"):
        prepare(str(path), tmp_path / "out", PrepareConfig(), False)
    (tmp_path / "a.txt").write_text("a ship sails north " * 20)
    for keys in ({"dtype": "uint16"}, {"end_of_text": 3}):
        with pytest.raises(TenfoldError, match=r"is for token files, and data\.path = .* is text"):
            opened(tmp_path, tmp_path / "a.txt", **keys)


def test_the_index_names_what_was_told(tmp_path: Path) -> None:
    data = opened(tmp_path, raw(tmp_path / "a.bin", FLAT), end_of_text=0)
    index = json.loads((data.path / "index.json").read_text())
    assert index["layout"] == "nanogpt"
    assert index["end_of_text"] == 0
    assert index["tokenizer"] is None


def test_a_document_mask_needs_the_id_that_ends_every_document(tmp_path: Path) -> None:
    prefix = megatron(tmp_path / "c", [[[1, 2, 0]], [[3, 4]], [[5, 0]]])
    assert opened(tmp_path, prefix, end_of_text=0).end_of_text == 0
    with pytest.raises(TenfoldError, match=r"1 documents of .* do not end in id 0"):
        opened(tmp_path, prefix, end_of_text=0, document_mask=True)
    ended = megatron(tmp_path / "d", [[[1, 2, 0]], [[5, 0]]])
    assert opened(tmp_path, ended, end_of_text=0, document_mask=True).split("train").documents > 0

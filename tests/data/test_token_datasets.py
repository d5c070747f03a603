"""Datasets of tokens: text and token files."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from framework.data.source import Source
from framework.data.text import Text
from framework.data.tokens import Tokens

SPLITS = ("train", "val", "test")


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def stream(source: Source) -> np.ndarray:
    """The tokens that a source's samples cover."""
    inputs, targets = source.gather(np.arange(len(source)))
    return np.append(inputs.reshape(-1), targets[-1, -1])


def test_text_is_the_bytes_of_the_files_in_order(tmp_path: Path):
    (tmp_path / "b").mkdir()
    parts = [bytes(np.random.default_rng(i).integers(0, 256, 500, dtype=np.uint8)) for i in range(2)]
    (tmp_path / "b" / "x.txt").write_bytes(parts[1])
    (tmp_path / "a.txt").write_bytes(parts[0])
    (tmp_path / "a.md").write_bytes(b"no")
    dataset = Text(root=str(tmp_path), pattern="*.txt", seq_len=7)
    assert dataset.problems() == []
    joined = np.frombuffer(b"".join(parts), dtype=np.uint8)
    for split, start, stop in (("train", 0, 900), ("val", 900, 950), ("test", 950, 1000)):
        tokens = stream(dataset.load(split))
        assert np.array_equal(tokens, joined[start:stop][: len(tokens)])
        assert stop - start - len(tokens) < 7
    assert len(Text(root=str(tmp_path), pattern=["*.md", "*.txt"], seq_len=1).load("train")) == 1002 * 9 // 10 - 1
    assert len(Text(root=str(tmp_path), pattern="*.txt", max_bytes=600, seq_len=1).load("train")) == 539


def test_text_of_the_standard_library_is_python_and_megabytes():
    dataset = Text()
    assert dataset.problems() == []
    source = dataset.load("train")
    assert len(source) * 128 > 4_000_000
    inputs, targets = source.gather(np.array([5]))
    model_inputs, model_targets = dataset.transform(torch.from_numpy(inputs), torch.from_numpy(targets), keys=None)
    assert model_inputs.dtype == model_targets.dtype == torch.int64
    assert b"import " in stream(source)[:10_000].tobytes()


def test_text_problems_say_what_is_missing(tmp_path: Path):
    assert Text(root=str(tmp_path / "x")).problems() == [f"dataset.root: {tmp_path}/x is no folder (give one with text files)"]
    assert "see dataset.pattern" in Text(root=str(tmp_path)).problems()[0]
    (tmp_path / "x.py").write_text("pass\n" * 100)
    assert "hold no sample of seq_len=128" in Text(root=str(tmp_path)).problems()[0]


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_tokens_are_those_of_the_files(tmp_path: Path, dtype: str):
    ids = np.random.default_rng(0).integers(0, 50_000, 3000).astype(dtype)
    ids[:1000].tofile(tmp_path / "train.bin")
    ids[1000:].tofile(tmp_path / "val.bin")
    dataset = Tokens(root=str(tmp_path), dtype=dtype, vocab_size=50_000, seq_len=1)
    assert dataset.problems() == []
    assert dataset.info == {"vocab_size": 50_000, "seq_len": 1}
    for split, start in (("train", 0), ("val", 1000), ("test", 2000)):  # without test.bin, half of val.bin
        assert np.array_equal(stream(dataset.load(split)), ids[start : start + 1000])
    ids[:10].tofile(tmp_path / "test.bin")
    assert [len(dataset.load(split)) for split in SPLITS] == [999, 1999, 9]


def test_tokens_of_one_file_are_cut_90_5_5(tmp_path: Path):
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "all.bin")
    dataset = Tokens(root=str(tmp_path / "all.bin"), vocab_size=1000, seq_len=1)
    assert np.array_equal(np.concatenate([stream(dataset.load(split)) for split in SPLITS]), np.arange(1000))
    inputs, _ = dataset.load("val").gather(np.array([0]))
    assert inputs.tolist() == [[900]]


def test_tokens_are_neither_read_into_memory_nor_pickled(tmp_path: Path):
    with open(tmp_path / "all.bin", "wb") as file:
        file.truncate(2**31)  # a sparse file of 1 Gi tokens
    code = f"""
import pickle, resource
import numpy as np
from framework.data.loader import arrays_of
from framework.data.tokens import Tokens
source = Tokens(root={str(tmp_path / "all.bin")!r}, vocab_size=10).load("train")
source = pickle.loads(pickle.dumps(source))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
source.gather(np.linspace(0, len(source) - 1, 100).astype(int))
print(arrays_of(source), len(source), len(pickle.dumps(source)) < 1000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024)
"""
    assert run_python(code) == f"{{}} {(2**30 * 9 // 10 - 1) // 128} True\nTrue\n"


def test_tokens_problems_name_the_file(tmp_path: Path):
    no_vocab_size, no_files = Tokens(root=str(tmp_path)).problems()
    assert no_vocab_size.startswith("dataset.vocab_size: is null")
    assert str(tmp_path / "train.bin") in no_files and str(tmp_path / "val.bin") in no_files
    for name in ("train", "val"):
        np.full(1000, 70, dtype=np.uint16).tofile(tmp_path / f"{name}.bin")
    (train, val) = Tokens(root=str(tmp_path), vocab_size=70).problems()
    assert "train.bin has id 70" in train and "val.bin has id 70" in val
    assert "500 tokens of val" in Tokens(root=str(tmp_path), vocab_size=71, seq_len=500).problems()[0]
    (tmp_path / "train.bin").write_bytes(b"odd")
    assert "3 bytes" in Tokens(root=str(tmp_path), vocab_size=71).problems()[0]


def test_token_ids_that_the_preflight_does_not_see_are_refused_when_read(tmp_path: Path):
    ids = np.zeros(3 * 2**20, dtype=np.uint16)
    ids[3 * 2**19] = 99
    ids.tofile(tmp_path / "all.bin")
    source = Tokens(root=str(tmp_path / "all.bin"), vocab_size=99).load("train")
    with pytest.raises(ValueError, match=r"token id 99: dataset\.vocab_size=99"):
        source.gather(np.array([3 * 2**19 // 128]))

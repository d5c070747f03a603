"""Datasets of tokens: text and token files."""

import fractions
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from framework.data.source import Source
from framework.data.text import Text, TokenizedRecords
from framework.data.tokens import Tokens
from tests.data.test_datasets import SPLITS
from tests.harness import assert_close, finished


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
    assert Text(root=str(tmp_path / "x")).problems() == [
        f"dataset.root: {tmp_path}/x is not a folder (give one with text files)"
    ]
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


def test_a_batch_of_tokens_is_one_array_and_its_file_is_mapped_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    opened, memmap = list[object](), np.memmap
    monkeypatch.setattr(np, "memmap", lambda *args, **kwargs: (opened.append(args), memmap(*args, **kwargs))[1])
    dataset = Tokens(root=str(tmp_path / "tokens.bin"), vocab_size=1000, dtype="uint16", seq_len=7)
    source = dataset.load("train")
    batches = [source.gather(np.array([0, number])) for number in range(20)]
    assert all(inputs.dtype == np.uint16 and np.shares_memory(inputs, targets) for inputs, targets in batches)
    assert len(opened) == 1


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


# --- a tokenizer of Hugging Face


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of a tokenizer of bytes and their pairs, of 400 ids, learnt from Python's sources."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    learnt = Tokenizer(models.BPE())
    learnt.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learnt.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<end>"], show_progress=False
    )
    learnt.train([json.__file__, fractions.__file__], trainer)
    learnt.enable_truncation(5)  # as files of a hub may have it: a text is not cut for that
    learnt.save(str(path := tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"))
    return path


def test_text_is_the_tokens_of_a_tokenizer(tokenizer: Path, tmp_path: Path):
    text = Path(fractions.__file__).read_text() + "ü 東\n"
    (tmp_path / "a.py").write_text(text)
    dataset = Text(root=str(tmp_path), seq_len=7, tokenizer=str(tokenizer.parent))
    assert dataset.problems() == [] and dataset.info == {"vocab_size": 400, "seq_len": 7} and dataset.bytes_per_token is None
    tokens = stream(dataset.load("train"))
    assert tokens.dtype == np.uint16 and len(tokens) < 0.7 * 0.9 * len(text.encode())
    assert text.startswith(dataset.decode(tokens)) and len(dataset.decode(tokens)) > 0.89 * len(text)
    assert dataset.decode(dataset.encode("def ü(東):\n")) == "def ü(東):\n"
    for path, why in ((tmp_path / "no.json", "does not exist"), (tmp_path / "a.py", "is not a tokenizer of Hugging Face")):
        (problem,) = Text(root=str(tmp_path), tokenizer=str(path)).problems()
        assert problem.startswith("dataset.tokenizer: ") and why in problem
    (tmp_path / "short.py").write_text("import json\n" * 50)
    count = len(dataset.encode(("import json\n" * 50)[-30:]))  # a sample has a target more
    with pytest.raises(ValueError, match=f"the {count} tokens of test hold no sample of seq_len={count}"):
        Text(root=str(tmp_path), pattern="short.py", seq_len=count, tokenizer=str(tokenizer)).load("test")


def test_records_become_samples_whose_filler_does_not_count(tokenizer: Path):
    collate = TokenizedRecords(tokenizer=str(tokenizer), length=12)
    short, long, none = zip(*collate([{"text": "def f():"}, {"text": "import json; " * 20}, {"text": ""}]))
    known = int((short[1] != -100).sum())
    assert 0 < known < 12 and (short[1][known:] == -100).all() and np.array_equal(short[0][1:known], short[1][: known - 1])
    assert (long[1] != -100).all() and np.array_equal(long[0][1:], long[1][:-1]) and (none[1] == -100).all()


@pytest.mark.slow
def test_a_run_with_a_tokenizer_is_the_same_on_two_processes(tokenizer: Path, tmp_path: Path):
    line = ["dataset=text", f"dataset.tokenizer={tokenizer}", f"dataset.root={Path(json.__file__).parent}", "dataset.seq_len=16",
            "model=gpt", "model.dim=16", "model.num_layers=1", "model.num_heads=2", "trainer.max_epochs=null", "trainer.max_steps=3",
            "global_batch_size=8", "precision=fp64", "part=text_samples", "part.text_samples.prompt=import", "part.text_samples.tokens=5"]  # fmt: skip
    one = finished(*line, root=tmp_path / "one")
    two = finished(*line, "parallel=ddp", "launch.nproc_per_node=2", root=tmp_path / "two")
    assert_close(one, two)
    texts = [(run.directory / "samples" / "3.txt").read_text() for run in (one, two)]
    assert texts[0].startswith("import") and texts[0] == texts[1]

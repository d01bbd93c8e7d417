"""Where rows come from: files of every kind, folders, the hub, and what is said of those that cannot be read."""

import json
import os
import pickle
import socket
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pytest

from tlora.errors import DataError
from tlora.sources import read_rows


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def read(path: Path | str, split: str = "train", name: str | None = None) -> list[dict[str, Any]]:
    return list(read_rows(str(path), name, split, "job a"))


def refusal(path: Path | str, **options: str) -> str:
    with pytest.raises(DataError) as caught:
        read(path, **options)
    text = str(caught.value)
    assert text.startswith("job a: ")
    assert str(pickle.loads(pickle.dumps(caught.value))) == text
    return text


def numbered(count: int) -> list[dict[str, str]]:
    return [{"text": f"row {index}"} for index in range(count)]


# Sources


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path, suffix: str) -> None:
    rows = [{"prompt": "007", "completion": "NA"}, {"prompt": 'say "é,\n"', "completion": "null"}]
    path = tmp_path / f"odd [name]{suffix}"
    table = datasets.Dataset.from_list(rows)
    match suffix:
        case ".jsonl":
            write(path, rows)
        case ".json":
            path.write_text(json.dumps(rows, indent=1))
        case ".csv":
            table.to_csv(path)
        case ".parquet":
            table.to_parquet(path)
    data = load(path)
    assert texts(data.train) == ["007NA</s>", 'say "é,\n"null</s>']
    assert target_texts(data.train) == ["NA</s>", "null</s>"]
    assert data.train[0].ids.dtype == np.int32
    assert data.train[0].is_target.dtype == bool


def test_split_may_be_sliced(tmp_path: Path) -> None:
    data = load(write(tmp_path / "d.jsonl", numbered(10)), split="train[:40%]", eval_split="train[8:]")
    assert texts(data.train) == [f"row 00{index}</s>" for index in range(4)]
    assert texts(data.eval) == ["row 008</s>", "row 009</s>"]
    assert data.report.num_rows == 4
    assert data.eval_report is not None
    assert data.eval_report.num_rows == 2


def test_folder_has_the_splits_that_its_files_are_named_after(tmp_path: Path) -> None:
    write(tmp_path / "train-0.jsonl", numbered(2))
    write(tmp_path / "train-1.jsonl", [{"text": "more"}])
    write(tmp_path / "test.jsonl", [{"text": "unseen"}])
    data = load(tmp_path, eval_split="test")
    assert texts(data.train) == ["row 000</s>", "row 001</s>", "more</s>"]
    assert texts(data.eval) == ["unseen</s>"]


def test_types_that_change_late_in_a_large_file_are_read(tmp_path: Path) -> None:
    rows = [chat(asked="x" * 1_000_000) for _ in range(11)]
    rows.append(
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "late"}], "name": "n"},
                rows[0]["messages"][1],
            ]
        }
    )
    data = load(write(tmp_path / "d.jsonl", rows), CHAT)
    assert data.report.dropped == {"longer than 2048 tokens": 11}
    assert "late" in texts(data.train, CHAT)[0]


def test_local_files_need_no_network_and_leave_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    cache = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    datasets.enable_progress_bars()
    (tmp_path / "data").mkdir()
    path = write(tmp_path / "data" / "d.jsonl", numbered(3))
    before = os.listdir(tmp_path)
    for source in (path, path.parent):
        assert len(load(source).train) == 3
    assert os.listdir(tmp_path) == before
    assert not cache.exists()
    assert capfd.readouterr() == ("", "")
    assert not datasets.are_progress_bars_disabled()


def test_what_cannot_be_found_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = tmp_path / "nope.jsonl"
    assert f"there is no such file. Looked for {missing}" in refusal(missing)
    (tmp_path / "notes.txt").write_text("hi")
    assert "got files of kinds .txt; want one of .jsonl, .json, .csv, .parquet" in refusal(tmp_path / "notes.txt")
    (tmp_path / "empty").mkdir()
    assert "got files of kinds none" in refusal(tmp_path / "empty")
    write(tmp_path / "a.jsonl", numbered(1))
    (tmp_path / "b.csv").write_text("text\nb\n")
    assert "got files of kinds .csv, .jsonl" in refusal(tmp_path)
    assert 'Unknown split "test"' in refusal(tmp_path / "a.jsonl", split="test")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    text = refusal("nobody/nothing", name="en", split="train[:9]")
    assert "nobody/nothing: there is no such file or folder here, and the hub did not give dataset" in text
    assert "configuration 'en', split 'train[:9]' (ConnectionError: " in text


def test_a_hub_dataset_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answer(*names: str | None, split: str) -> datasets.Dataset:
        asked.append((*names, split))
        return datasets.Dataset.from_list(numbered(2))

    monkeypatch.setattr(datasets, "load_dataset", answer)
    assert len(load("some/set", name="en", split="train[:2]", eval_split="test").eval) == 2
    assert asked == [("some/set", "en", "train[:2]"), ("some/set", "en", "test")]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("d.jsonl", b"", "the file is empty; want at least one row"),
        ("d.jsonl", b"\n\n", "split 'train' has no rows"),
        ("d.json", b"[]", "split 'train' has no rows"),
        ("d.csv", b"text\n", "split 'train' has no rows"),
        (
            "d.jsonl",
            b'{"text": "a"}\n\n{"text": "b"\n{"text": "c"}\n',
            "d.jsonl: line 3 is no JSON (Expecting ',' deli",
        ),
        ("d.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', "d.jsonl: line 2 is no UTF-8"),
        ("d.jsonl", b'{"text": "a"}\n[1, 2]\n"b"\n', "d.jsonl: line 2: got [1, 2]; want a JSON object"),
        ("d.json", b'[\n {"text": "a"},\n {"text": "b"\n]\n', "d.json: line 4 is no JSON"),
        ("d.csv", b"text,x\na,b,c\n", "rows have more fields than the header"),
        ("d.csv", b"text\na\nb,c\n", "Expected 1 fields in line 3, saw 2"),
        ("d.parquet", b"no parquet", "cannot be read as rows of one table"),
    ],
)
def test_broken_files_are_refused_with_the_place(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, content: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    assert said in refusal(tmp_path / name)
    assert capfd.readouterr().err == ""



"""Where rows come from: files of every kind, folders, the hub, and what is said of those that cannot be read."""

import json
import os
import pickle
import socket
import tempfile
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


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path, suffix: str) -> None:
    rows = [{"prompt": "007", "completion": "NA"}, {"prompt": 'say "é,\n"', "completion": ""}]
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
    assert read(path) == rows


def test_split_may_be_sliced(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", numbered(10))
    assert read(path, split="train[:40%]") == numbered(4)
    assert read(path, split="train[8:]") == numbered(10)[8:]


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_folder_has_the_splits_that_its_files_are_named_after(tmp_path: Path, kind: str) -> None:
    for name, texts in {"train-0": ["1", "02"], "train-1": ["more"], "test": ["unseen"]}.items():
        table = datasets.Dataset.from_list([{"text": text} for text in texts])
        (table.to_json if kind == "jsonl" else table.to_csv)(tmp_path / f"{name}.{kind}")
    assert [row["text"] for row in read(tmp_path)] == ["1", "02", "more"]
    assert [row["text"] for row in read(tmp_path, split="test")] == ["unseen"]


def test_other_files_of_a_folder_are_no_data(tmp_path: Path) -> None:
    folder = tmp_path / "odd [name]"
    (folder / ".hidden").mkdir(parents=True)
    for name in ("LICENSE.txt", "NOTES.txt", "dataset_infos.json"):
        (folder / name).write_text("{}")
    write(folder / ".hidden" / "old.jsonl", numbered(9))
    write(folder / "chats.jsonl", numbered(2))
    write(folder / "more.JSONL", numbered(1))
    assert read(folder) == numbered(2) + numbered(1)


def test_file_of_a_folder_that_is_in_no_split_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", numbered(2))
    write(tmp_path / "more.jsonl", numbered(3))
    text = refusal(tmp_path)
    assert "1 of 2 files belong to no split (first: more.jsonl), while other names have one in them" in text
    assert "Name it or its folder after a split, as train.jsonl is for train, or move it away." in text
    (tmp_path / "more.jsonl").rename(tmp_path / "train-more.jsonl")
    assert len(read(tmp_path)) == 5


@pytest.mark.parametrize("name", ["b.jsonl.gz", "b.ndjson"])
def test_rows_of_a_kind_that_is_not_read_are_not_lost(tmp_path: Path, name: str) -> None:
    write(tmp_path / "a.jsonl", numbered(2))
    (tmp_path / name).write_bytes(b"rows")
    assert f"got files of kinds {', '.join(sorted(['.jsonl', Path(name).suffix]))}" in refusal(tmp_path)


def test_dataset_card_says_which_folder_is_read(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"v{number}").mkdir()
        write(tmp_path / f"v{number}" / "rows.jsonl", numbered(number))
    (tmp_path / "README.md").write_text("---\nconfigs:\n- config_name: default\n  data_dir: v2\n---\nRows.\n")
    assert read(tmp_path) == numbered(2)


def test_dataset_card_says_which_files_make_a_split(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", numbered(2))
    write(tmp_path / "b.jsonl", numbered(3))
    card = "---\nconfigs:\n- config_name: default\n  data_files:\n  - {split: train, path: b.jsonl}\n---\nRows.\n"
    (tmp_path / "README.md").write_text(card)
    assert read(tmp_path) == numbered(3)


def test_rows_that_look_like_agent_traces_are_rows(tmp_path: Path) -> None:
    said = {"id": "1", "source": "web", "model": "m", "system_prompt": "s"}
    rows = [{**said, "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}]
    assert read(write(tmp_path / "d.jsonl", rows)) == rows


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_texts_that_are_dates_stay_as_they_are(tmp_path: Path, suffix: str) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "1945-07-12", "turns": [{"role": "user", "content": "1945-07-12T10:00:00Z"}], "n": 1},
        {"prompt": None, "turns": [{"role": "user", "content": "1945-07-12 10:00"}], "n": 2},
    ]
    path = tmp_path / f"d{suffix}"
    path.write_text(json.dumps(rows)) if suffix == ".json" else write(path, rows)
    assert read(path) == rows
    assert read(path, split="train[1:]") == rows[1:]


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_texts_of_which_one_file_has_dates_only_stay_as_they_are(tmp_path: Path, names: tuple[str, str]) -> None:
    for name, text in zip(names, ("1945-07-12", "hello"), strict=True):
        write(tmp_path / f"{name}.jsonl", [{"text": text}])
    (tmp_path / "0.jsonl").write_text("")
    assert sorted(row["text"] for row in read(tmp_path)) == ["1945-07-12", "hello"]


def test_types_that_differ_are_read_wherever_they_change(tmp_path: Path) -> None:
    """`datasets` infers types from 10 MB."""
    rows: list[dict[str, Any]] = [
        {"note": "x" * 1_000_000, "parts": [{"role": "a", "content": "b"}]} for _ in range(11)
    ]
    rows.append({"note": 5, "parts": [{"role": "a", "content": ["b"], "name": "c"}]})
    assert read(write(tmp_path / "d.jsonl", rows))[11]["parts"] == rows[11]["parts"]
    assert read(write(tmp_path / "e.jsonl", [{"text": "a"}, {"text": {"b": [1]}}]))[1] == {"text": {"b": [1]}}


def test_types_that_make_no_table_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "train-0.jsonl", [{"text": ["a"]}])
    write(tmp_path / "train-1.jsonl", [{"text": "b"}])
    assert "cannot be read as rows of one table" in refusal(tmp_path)


def test_local_files_need_no_network_and_leave_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    reached = []

    def refuse(*address: object, **_: object) -> None:
        reached.append(address)
        raise OSError("no network here")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    cache = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    for folder in ("data", "tmp"):
        (tmp_path / folder).mkdir()
    path = write(tmp_path / "data" / "d.jsonl", numbered(3))
    datasets.enable_progress_bars()
    datasets.logging.set_verbosity_warning()
    for source in (path, path.parent):
        rows = read_rows(str(source), None, "train", "job a")
        assert list(rows) == numbered(3)
        assert not rows.cache_files
    assert not reached
    assert not cache.exists()
    assert [os.listdir(tmp_path / folder) for folder in ("data", "tmp")] == [["d.jsonl"], []]
    assert capfd.readouterr() == ("", "")
    assert not datasets.are_progress_bars_disabled()
    assert datasets.logging.get_verbosity() == datasets.logging.WARNING


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
    assert read("some/set", name="en", split="train[:2]") == numbered(2)
    assert asked == [("some/set", "en", "train[:2]")]


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
        ("d.jsonl", b'{"a": 1}\n"' + b"x" * 38 + 'é"\n'.encode(), 'line 2: got "xxxx'),
        ("d.json", b'[\n {"text": "a"},\n {"text": "b"\n]\n', "d.json: line 4 is no JSON"),
        ("d.json", b'[{"text": "a"}, 5]', "d.json: cannot be read as rows of one table"),
        ("d.csv", b"text,x\na,b,c\n", "rows have more fields than the header"),
        ("d.csv", b"text\na\nb,c\n", "Expected 1 fields in line 3, saw 2"),
        ("d.parquet", b"no parquet", "cannot be read as rows of one table"),
    ],
)
def test_broken_files_are_refused_with_the_place(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    content: bytes,
    said: str,
) -> None:
    monkeypatch.setattr(datasets.logging.get_logger("datasets"), "handlers", [caplog.handler])
    (tmp_path / name).write_bytes(content)
    assert said in refusal(tmp_path / name)
    assert not caplog.records

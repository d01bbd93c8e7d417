"""Where rows come from: files, folders and hub datasets, all read through the `datasets` library.

Called by `tlora.data`, which says what a row must hold. Local files touch neither the network nor the user's cache.
"""

import errno
import glob
import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial, reduce
from itertools import chain
from os.path import expanduser, relpath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tlora.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

KINDS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
_OF_ROWS = {*KINDS, ".ndjson", ".geoparquet", ".gpq"}
"""Parts of names of files that hold rows, of which some are refused, rather than lost."""
_MAX_CHUNK_BYTES = 1 << 30
_DATE = re.compile(rb'"\d{4}-\d\d-\d\d')


def read_rows(path: str, name: str | None, split: str, where: str) -> "Dataset":
    """All rows of one split. Whatever exists here or ends like a data file is local; the rest is a hub dataset's name.

    `split` may be sliced (`train[:90%]`). Every row of a single file belongs to the split `train`; the files of a
    folder belong to the splits that they or their folders are named after, all to `train` where none is named so, or
    to those that the folder's own dataset card gives them. Raises DataError.
    """
    local = Path(expanduser(path))
    try:
        local.stat()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise DataError(f"{where}: data.path = {path[:60]!r}: cannot be read: {error.strerror}.") from None
    if local.is_dir():
        files = [file for file in _resolve("**", local) if _OF_ROWS & {*map(str.lower, file.suffixes)}]
    elif local.exists() or local.suffix.lower() in KINDS:
        files = [local]
    else:
        return _read_hub(path, name, split, where)
    kinds = {KINDS.get(file.suffix.lower(), "other") for file in files}
    if len(kinds) != 1 or "other" in kinds:
        found = ", ".join(sorted({file.suffix or file.name for file in files})) or "none"
        raise DataError(f"{where}: {path}: got files of kinds {found}; want one of {', '.join(KINDS)}.")
    if not files[0].exists():
        raise DataError(f"{where}: {path}: there is no such file. Looked for {local.absolute()}.")
    if not any(file.stat().st_size for file in files):
        raise DataError(f"{where}: {path}: the file is empty; want at least one row.")
    return _read_local(local, files, kinds.pop(), split, where)


def _read_local(local: Path, files: list[Path], kind: str, split: str, where: str) -> "Dataset":
    from datasets import Dataset, load_dataset

    with _quiet(), tempfile.TemporaryDirectory(prefix="tlora-rows-") as cache:
        try:
            options = {**_parser_options(kind, files), "split": split, "cache_dir": cache, "keep_in_memory": True}
            if _has_card(local):
                rows = load_dataset(str(local), **options)
            else:
                read = {"json": Dataset.from_json, "csv": Dataset.from_csv, "parquet": Dataset.from_parquet}[kind]
                splits = _splits(local, files, where) if local.is_dir() else {"train": files}
                paths = {name: [glob.escape(str(file)) for file in members] for name, members in splits.items()}
                if kind == "json":
                    options |= _text_features(list(chain(*splits.values())), options)
                rows = read(paths, **options)
            rows.data.validate(full=True)  # text that is no UTF-8 is read, and would fail when it is used
        except DataError:
            raise
        except Exception as error:  # each of its back ends raises what it likes
            if "corresponds to no data" in str(error):
                raise DataError(f"{where}: {local}: split '{split}' has no rows; want at least one.") from error
            fault = next(filter(None, map(_broken_line, files)), None) if kind == "json" else None
            fault = fault or f"{local}: cannot be read as rows of one table: {_one_line(error.__cause__ or error)}"
            raise DataError(f"{where}: {fault}. Mend the file.") from error
    return rows


def _resolve(pattern: str, folder: Path) -> list[Path]:
    """Files of a folder as the library finds them: none that are hidden, none that describe the others."""
    from datasets.data_files import resolve_pattern

    try:
        return sorted(map(Path, resolve_pattern(pattern, glob.escape(str(folder.absolute())))))
    except FileNotFoundError:
        return []


def _has_card(folder: Path) -> bool:
    """Whether a README.md says, as on the hub, which files make which split."""
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import DatasetCard

    readme = folder / "README.md"
    if not readme.is_file():
        return False
    configs = MetadataConfigs.from_dataset_card_data(DatasetCard.load(readme).data)
    return any({"data_files", "data_dir"} & config.keys() for config in configs.values())


def _splits(folder: Path, files: list[Path], where: str) -> dict[str, list[Path]]:
    """The files of each split. Those of other kinds, such as a licence, are no data; a file of no split is refused."""
    from datasets.data_files import get_data_patterns

    splits: dict[str, list[Path]] = {}
    for split, patterns in get_data_patterns(glob.escape(str(folder.absolute()))).items():
        found = {file for pattern in patterns for file in _resolve(pattern, folder)}
        if members := [file for file in files if file in found]:
            splits[str(split)] = members
    loose = [file for file in files if not any(file in members for members in splits.values())]
    if loose:
        split, members = next(iter(splits.items()), ("train", []))
        pattern = f", as {relpath(members[0], folder)} is for {split}" if members else ""
        raise DataError(
            f"{where}: {folder}: {len(loose)} of {len(files)} files belong to no split (first: "
            f"{relpath(loose[0], folder)}), while other names have one in them; want all or none. "
            f"Name it or its folder after a split{pattern}, or move it away."
        )
    return splits


def _parser_options(kind: str, files: list[Path]) -> dict[str, Any]:
    if kind == "json":  # types are inferred from the first chunk alone, so let it be a whole file
        largest = max(file.stat().st_size for file in files)
        return {"chunksize": min(largest, _MAX_CHUNK_BYTES), "parse_agent_traces": False}
    if kind == "parquet":
        return {}
    from datasets import Features, Value
    from pandas import RangeIndex, read_csv  # type: ignore[import-untyped]

    start = read_csv(files[0], nrows=1, dtype=str)
    if not isinstance(start.index, RangeIndex):
        raise ValueError("rows have more fields than the header; text with commas wants quotes")
    text = Features({str(column): Value("string") for column in start.columns})
    return {"features": text, "keep_default_na": False}  # "007" and "NA" stay as they are


def _text_features(files: list[Path], options: dict[str, Any]) -> dict[str, Any]:
    """The types to read JSON with, if some file has nothing but dates in a place: Arrow takes these for times."""
    from datasets import Dataset, Features

    files = [file for file in files if file.stat().st_size]
    dated = [file for file in files if _DATE.search(file.read_bytes())]
    if not dated:
        return {}
    read = partial(Dataset.from_json, **options | {"split": "train"})
    found = [read({"train": [glob.escape(str(file))]}).features for file in (files[0], *dated)]
    text = reduce(_as_text, found, dict(found[0]))
    return {} if text == found[0] else {"features": Features(text)}


def _as_text(kept: Any, found: Any) -> Any:
    """The type `kept`, with JSON's own values wherever `found`, that of the same place in some file, is a time."""
    from datasets import Json, List, Value

    if isinstance(found, Value) and found.dtype.startswith("timestamp"):
        return Json()
    if isinstance(kept, dict) and isinstance(found, dict):
        return {key: _as_text(inner, found.get(key)) for key, inner in kept.items()}
    if isinstance(kept, List) and isinstance(found, List):
        return List(_as_text(kept.feature, found.feature))
    return kept


def _read_hub(path: str, name: str | None, split: str, where: str) -> "Dataset":
    from datasets import load_dataset

    try:
        with _quiet():
            return load_dataset(path, name, split=split)
    except Exception as error:  # network, hub, cache and parsers each raise their own
        asked = f"dataset '{path}'" + (f", configuration '{name}'" if name else "") + f", split '{split}'"
        raise DataError(
            f"{where}: {path}: there is no such file or folder here, and the hub did not give {asked} "
            f"({type(error).__name__}: {_one_line(error)}). Check the name and the network, or give a local file."
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and no log lines beside our own error."""
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars, logging

    had_bars, verbosity = not are_progress_bars_disabled(), logging.get_verbosity()
    disable_progress_bars()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            enable_progress_bars()


def _broken_line(file: Path) -> str | None:
    """What is wrong with the first line that is no JSON object, if there is one."""
    content = file.read_bytes()
    is_array = content.lstrip().startswith(b"[")
    pieces = [content] if is_array else content.splitlines()
    for number, piece in enumerate(pieces, 1):
        try:
            row = json.loads(piece) if piece.strip() else {}
        except RecursionError:
            return f"{file}: line {number} is nested too deep"
        except json.JSONDecodeError as error:
            return f"{file}: line {number + error.lineno - 1} is no JSON ({error.msg}, column {error.colno})"
        except UnicodeDecodeError as error:
            return f"{file}: line {number} is no UTF-8 ({error.reason})"
        if not is_array and not isinstance(row, dict):
            return f"{file}: line {number}: got {piece[:40].decode(errors='replace')}; want a JSON object"
    return None


def _one_line(error: BaseException) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:300].rstrip(".")

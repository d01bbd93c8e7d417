"""The way that an op goes: measured once for a shape, never one that fails or is wrong, kept where it can be."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tlora.kernels import product, routes
from tlora.kernels.routes import Tile

GPU = "NVIDIA Fake 9000"
NAMES = {tile: name for name, tile in routes._TILES.items()}
Run = Callable[[Tile], None]


class OnGpu(torch.Tensor):
    """A tensor that says that it lies on a GPU."""

    is_cuda = property(lambda self: True)


class Ways:
    """Counts its calls; each way takes the milliseconds that it is given, and writes what it is told to write."""

    def __init__(self, **times_ms: float):
        self.times_ms = {"library": 5.0, "128x256": 6.0, "128x128": 7.0, "64x128": 8.0, **times_ms}
        self.y = torch.zeros(8, 4).as_subclass(OnGpu)
        self.right = torch.arange(32.0).view(8, 4)
        self.written = dict.fromkeys(self.times_ms, self.right)
        self.errors: dict[str, Exception] = {}
        self.calls: list[str] = []

    def take(self, way: str) -> None:
        self.calls.append(way)
        if way in self.errors:
            raise self.errors[way]
        self.y.copy_(self.written[way])

    def tiled(self, tile: Tile) -> None:
        self.take(NAMES[tile])

    def library(self) -> None:
        self.take("library")

    def median_ms(self, run: Callable[[], None]) -> float:
        run()
        return self.times_ms[self.calls[-1]]

    def run(self, key: str = "a", *, bulk: bool = True, pinned: bool = False) -> list[str]:
        """The ways taken, the last of them for the result."""
        self.calls.clear()
        routes.run_fastest(key, self.y, self.tiled, self.library, bulk=bulk, pinned=pinned)
        return list(self.calls)


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Ways]:
    ways = Ways()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(routes, "_medians_ms", lambda runs: {name: ways.median_ms(run) for name, run in runs.items()})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: GPU)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    routes._choices.cache_clear()
    yield ways
    routes._choices.cache_clear()


def start_again(ways: Ways) -> None:
    """What a new process would find."""
    routes._choices.cache_clear()
    ways.y.zero_()


@pytest.mark.parametrize("fastest", ["library", *routes._TILES])
def test_the_fastest_way_is_measured_once_and_taken_from_then_on(ways: Ways, fastest: str) -> None:
    ways.times_ms[fastest] = 1.0
    first = ways.run()
    assert set(first) == set(ways.times_ms)
    assert first[-1] == fastest
    assert torch.equal(ways.y, ways.right)
    assert ways.run() == [fastest]


def test_each_shape_has_its_own_choice(ways: Ways) -> None:
    assert ways.run("a")[-1] == "library"
    ways.times_ms["64x128"] = 1.0
    assert ways.run("b")[-1] == "64x128"
    assert ways.run("a") == ["library"]
    assert ways.run("b") == ["64x128"]


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("no such instruction"),
        routes.triton.runtime.errors.OutOfResources(300, 228, "shared"),
        routes.triton.runtime.errors.PTXASError("ptxas stopped"),
    ],
)
def test_a_way_that_raises_is_never_chosen(ways: Ways, error: Exception) -> None:
    ways.times_ms |= {"128x256": 1.0, "128x128": 2.0}
    ways.errors["128x256"] = error
    assert ways.run()[-1] == "128x128"
    assert ways.run() == ["128x128"]


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, 0.0, 1.05], ids=str)
def test_a_way_that_is_wrong_is_never_chosen(ways: Ways, wrong: float) -> None:
    ways.times_ms |= {"128x256": 1.0, "64x128": 2.0}
    ways.written["128x256"] = ways.right * wrong
    assert ways.run()[-1] == "64x128"
    assert torch.equal(ways.y, ways.right)


def test_a_way_that_writes_a_part_is_never_chosen(ways: Ways) -> None:
    """What it left out must not be what the way before it wrote."""
    ways.times_ms["128x256"] = 1.0
    ways.take = (
        lambda way, real=ways.take: (  # type: ignore[method-assign]
            (ways.calls.append(way), ways.y[:-1].copy_(ways.right[:-1])) if way == "128x256" else real(way)
        )
    )
    assert ways.run()[-1] == "library"


def test_where_all_tiles_fail_the_library_is_left(ways: Ways) -> None:
    ways.errors = dict.fromkeys(routes._TILES, RuntimeError("no bulk copies here"))
    assert ways.run()[-1] == "library"
    assert torch.equal(ways.y, ways.right)


def test_without_bulk_copies_it_is_the_library_and_pinned_is_one_tile(ways: Ways) -> None:
    assert ways.run(bulk=False) == ["library"]
    assert ways.run(bulk=False, pinned=True) == ["library"]
    assert ways.run(pinned=True) == [NAMES[routes.PINNED]]
    assert not list(routes._file(GPU).parent.glob("*"))


def test_nothing_is_measured_while_a_graph_is_captured(ways: Ways, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert ways.run() == ["128x256"]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert ways.run()[-1] == "library"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert ways.run() == ["library"]


def test_choices_are_kept_and_read_again(ways: Ways, tmp_path: Path) -> None:
    ways.times_ms["128x128"] = 1.0
    ways.run("a")
    ways.times_ms["64x128"] = 0.5
    ways.run("b")
    (file,) = (tmp_path / "tlora" / "products").iterdir()
    assert GPU.replace(" ", "-") in file.name
    assert json.loads(file.read_text()) == {"a": "128x128", "b": "64x128"}
    start_again(ways)
    assert ways.run("a") == ["128x128"]
    assert ways.run("b") == ["64x128"]


def test_choices_of_other_kernels_are_not_read(ways: Ways, monkeypatch: pytest.MonkeyPatch) -> None:
    ways.run()
    monkeypatch.setattr(routes.hashlib, "sha256", lambda code, real=hashlib.sha256: real(code + b"# mended"))
    start_again(ways)
    assert len(ways.run()) > 1


def test_another_gpu_has_its_own_choices(ways: Ways, monkeypatch: pytest.MonkeyPatch) -> None:
    ways.run()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Other")
    ways.times_ms["64x128"] = 1.0
    assert ways.run()[-1] == "64x128"
    assert json.loads(routes._file(GPU).read_text()) == {"a": "library"}


@pytest.mark.parametrize(
    "text",
    ["", "{", "[1, 2]", "7", '{"a": "a way that is gone"}', '{"a": 3, "b": null}', '{"a": ["library"]}', "\x00\xff"],
    ids=repr,
)
def test_a_damaged_file_is_measured_anew(ways: Ways, text: str) -> None:
    ways.run()
    routes._file(GPU).write_bytes(text.encode("latin-1"))
    start_again(ways)
    assert ways.run()[-1] == "library"
    assert len(ways.calls) > 1
    assert json.loads(routes._file(GPU).read_text())["a"] == "library"


def test_a_file_where_the_folder_should_be_does_no_harm(
    ways: Ways, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tlora").write_text("in the way")
    assert ways.run()[-1] == "library"
    assert ways.run() == ["library"]
    assert "measured again at each start" in caplog.text
    start_again(ways)
    assert len(ways.run()) > 1


def test_without_a_home_it_is_measured_again(
    ways: Ways, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In a container whose user is in no list."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: Path("~").expanduser())
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert ways.run()[-1] == "library"
    assert ways.run() == ["library"]
    assert "measured again at each start" in caplog.text


def test_what_was_measured_depends_on_all_that_the_products_are_made_of() -> None:
    source = Path(product.__file__).read_text()
    assert {f"{name}.py" for name in re.findall(r"from tlora\.kernels\.(\w+) import", source)} < set(routes._MEASURED)


def test_only_sound_entries_of_a_file_are_read(ways: Ways) -> None:
    ways.run()
    routes._file(GPU).write_text('{"a": "64x128", "b": "1x1"}')
    start_again(ways)
    assert ways.run("a") == ["64x128"]
    assert len(ways.run("b")) > 1


def test_who_goes_through_the_kernels() -> None:
    x = torch.zeros(4, 8, dtype=torch.float16)
    assert not routes.is_fused(x)
    assert routes.is_fused(x.as_subclass(OnGpu))
    assert not routes.is_fused(x.double().as_subclass(OnGpu))
    assert routes.has_descriptors(x, torch.zeros(16, 8))
    assert not routes.has_descriptors(x, torch.zeros(16, 12))
    assert not routes.has_descriptors(x, torch.zeros(12, 8))
    assert not routes.has_descriptors(x.float(), torch.zeros(16, 8))
    assert routes.is_bulky(x)
    assert routes.is_bulky(x, (0, 16, 24))
    assert not routes.is_bulky(x, (0, 5))
    assert not routes.is_bulky(x[:, :4])
    assert not routes.is_bulky(x.float())

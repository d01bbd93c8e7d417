"""The command line as a user meets it: a tiny model and tokenizer in a folder, jobs in YAML."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import peft
import pytest
import torch
import toy
import yaml
from rich.console import Console
from toy_tokenizers import CHATML, byte_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from tlora.cli import main
from tlora.cli_tools import stop_on_signal
from tlora.console import LiveTable, print_preview
from tlora.job import JobRecord
from tlora.local import Progress
from tlora.tracking import read_metrics

Tlora = Callable[..., str]

ENV = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": os.pathsep.join(sys.path),
    "NO_COLOR": "1",
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tokenizer = byte_tokenizer(CHATML, special=("<|im_start|>", "<|im_end|>"), eos="<|im_end|>")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(toy.config(vocab_size=len(tokenizer), max_position_embeddings=512))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def desk(base: Path, tmp_path: Path) -> Path:
    """A folder with a data file and two jobs."""
    rows = [
        {"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": str(n)}]}
        for n in range(24)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, rank in (("small", 2), ("large", 16)):
        (tmp_path / f"{name}.yaml").write_text(
            f"base: {{model: {base}}}\n"
            f"data: {{path: rows.jsonl, eval_fraction: 0.2}}\n"
            f"adapter: {{rank: {rank}, targets: all-linear}}\n"
            "optim: {lr: 1e-3}\nbatch_size: 4\nsteps: 6\nsave_every: 2\n"
        )
    return tmp_path


@pytest.fixture
def tlora(desk: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Tlora:
    """Runs the command in the jobs' folder; gives what it said, both streams."""
    monkeypatch.chdir(desk)
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*arguments: str, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["tlora", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        said = "".join(capfd.readouterr())
        assert (end.value.code or 0) == code, said
        return said

    return run


def test_check_shows_the_plan_for_several_gpus(tlora: Tlora) -> None:
    """A small base is replicated where it fits; two parts at most, since it has two heads of keys."""
    said = tlora("check", "small.yaml", "large.yaml", "--gpus", "4", "--gpu-memory", "1").splitlines()
    (first,) = (at for at, line in enumerate(said) if "on 4 GPU(s)" in line)
    plans = [line.split("B")[0].rsplit(maxsplit=2)[0].strip() for line in said[first + 2 :]]
    assert plans == ["4 × 1 × 1", "2 × 2 × 1", "1 × 4 × 1", "2 × 1 × 2", "1 × 2 × 2"]
    assert [line.endswith("← taken") for line in said[first + 2 :]] == [True, False, False, False, False]
    said = tlora("check", "small.yaml", "--gpus", "2", "--gpu-memory", "0.001").splitlines()
    assert said[-1].strip().startswith("No plan fits.")
    assert "equal to 1" in tlora("check", "small.yaml", "--gpus", "0", code=2)


def test_check_goes_by_measured_ticks(tlora: Tlora, desk: Path) -> None:
    tlora("profile", yaml.safe_load((desk / "small.yaml").read_text())["base"]["model"])
    (path,) = (desk / "profiles").iterdir()
    content = json.loads(path.read_text())
    for row in content["ticks"]:
        row["tick_ms"] = 1e6
    path.write_text(json.dumps(content))
    said = tlora("check", "small.yaml", "--gpus", "1", "--gpu-memory", "1", "--profile", str(path)).splitlines()
    (rate,) = (int(line.split()[-3].replace(",", "")) for line in said if line.endswith("← taken"))
    assert 0 < rate < 100


def test_check_preview_train_resume_export(tlora: Tlora, desk: Path, base: Path) -> None:
    said = tlora("check", "small.yaml", "large.yaml")
    assert "all-linear → 14 modules" in said
    assert "24 rows (messages) gave 24 sequences" in said
    assert not (desk / "outputs").exists()

    said = tlora("preview", "small.yaml", "-n", "1")
    assert "⟦" in said
    assert "<|im_end|>⟧" in said

    said = tlora("train", "small.yaml", "large.yaml")
    assert "small: finished, adapter in outputs/small" in said
    for name in ("small", "large"):
        folder = desk / "outputs" / name
        assert [row["step"] for row in read_metrics(folder) if "loss" in row] == [1, 2, 3, 4, 5, 6]
        loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
        assert any(weight.any() for key, weight in loaded.named_parameters() if "lora_B" in key)
        assert AutoTokenizer.from_pretrained(folder).chat_template == CHATML
        assert {"adapter_model.safetensors", "adapter_config.json"} <= {
            path.name for path in (folder / "best").iterdir()
        }

    assert "holds a saved state already" in tlora("train", "small.yaml", code=2)
    assert "small: finished" in tlora("train", "--resume", "small.yaml")

    tlora("export", "outputs/small", "again")
    assert (desk / "again/adapter_model.safetensors").read_bytes() == (
        desk / "outputs/small/adapter_model.safetensors"
    ).read_bytes()
    tlora("export", "--merge", "outputs/small", "merged")
    assert json.loads((desk / "merged/tlora.json").read_text())["base_model"] == str(base)
    ids = torch.arange(2, 40)[None]
    adapted = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), desk / "outputs/small")
    torch.testing.assert_close(
        AutoModelForCausalLM.from_pretrained(desk / "merged")(ids).logits, adapted(ids).logits, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_saves_and_resume_goes_on(number: signal.Signals, tlora: Tlora, desk: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tlora",
        "train",
        "--deterministic",
        "small.yaml",
        "large.yaml",
        "--set",
        "steps=80",
    ]
    child = subprocess.Popen(command, cwd=desk, env=ENV, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    metrics, deadline_s = desk / "outputs/small/metrics.jsonl", time.monotonic() + 120
    while child.poll() is None and not (metrics.exists() and len(metrics.read_text().splitlines()) >= 3):
        assert time.monotonic() < deadline_s, "no step was taken"
        time.sleep(0.02)
    child.send_signal(number)
    said, _ = child.communicate(timeout=120)
    assert child.returncode == 130, said
    assert "saving and pausing after this tick" in said
    assert "paused at step" in said
    assert "go on with --resume" in said
    tlora("train", "--deterministic", "--resume", "small.yaml", "large.yaml", "--set", "steps=80")
    interrupted = [row["loss"] for row in read_metrics(desk / "outputs/small") if "loss" in row]
    tlora("train", "--deterministic", "small.yaml", "--set", "steps=80", "--set", "output=solo")
    assert interrupted == [row["loss"] for row in read_metrics(desk / "solo") if "loss" in row]


def test_rows_that_are_left_out_are_told_of(tlora: Tlora, desk: Path) -> None:
    with (desk / "rows.jsonl").open("a") as file:
        turns = [{"role": "user", "content": "long"}, {"role": "assistant", "content": "word " * 200}]
        file.write(json.dumps({"messages": turns}) + "\n")
    said = tlora("train", "small.yaml", "--set", "data.max_length=64")
    assert re.search(r"small: .* Dropped: .*", said)


def test_a_terminal_without_our_signs_ends_nothing(desk: Path) -> None:
    environment = {**ENV, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "tlora", "check", "small.yaml"]
    child = subprocess.run(command, cwd=desk, env=environment, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    assert "targets   all-linear ?" in child.stdout


def test_a_dumb_terminal_gets_plain_lines() -> None:
    said = StringIO()
    console = Console(file=said, force_terminal=True, _environ={"TERM": "dumb"})
    spec = toy.job(Path("out"), steps=9)
    with LiveTable(console) as table:
        table.show([Progress(spec, JobRecord(spec.name))], None)
        assert spec.name in said.getvalue()


def test_signal_is_taken_amid_a_write(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    class Busy(StringIO):
        def write(self, text: str) -> int:
            raise RuntimeError("reentrant call")

    monkeypatch.setattr(sys, "stderr", Busy())
    with stop_on_signal() as stopped:
        signal.raise_signal(signal.SIGTERM)
    assert stopped == [signal.SIGTERM]
    assert "saving and pausing after this tick" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("optim.learning_rate=1e-4", "small.yaml: unknown key 'optim.learning_rate'. Did you mean 'optim.lr'?"),
        ("adapter.rank=0", "small.yaml: adapter.rank = 0: want an integer from 1 to 256."),
        ("adapter.targets=[q_proj, nope_proj]", "job small: adapter.targets: 'nope_proj' matches none of the"),
        ("data.path=absent.jsonl", "absent.jsonl"),
        ("base.model=./absent", "base.model = './absent': cannot be loaded"),
        ("data.format=alpaca", "alpaca"),
        ("data.max_length=4", "job small"),
        ("adapter.use_dora=true", "DoRA is not supported yet"),
    ],
)
def test_mistakes_are_named_before_anything_is_trained(change: str, said: str, tlora: Tlora, desk: Path) -> None:
    for command in ("check", "train"):
        output = tlora(command, "small.yaml", "--set", change, code=2)
        assert said in output
        assert not (desk / "outputs").exists()


def test_every_faulty_job_is_named_at_once(tlora: Tlora, desk: Path) -> None:
    (desk / "broken.yaml").write_text("base: [")
    output = tlora("check", "broken.yaml", "small.yaml", "--set", "batch_size=0", code=2)
    assert "broken.yaml: is no YAML" in output
    assert "small.yaml: batch_size = 0: want at least 1." in output


def test_set_is_for_every_file_wherever_it_stands(tlora: Tlora, desk: Path) -> None:
    for arguments in (
        ["small.yaml", "large.yaml", "--set", "steps=3"],
        ["--set", "steps=3", "small.yaml", "large.yaml"],
    ):
        assert tlora("check", *arguments).count("steps     3 of 4 sequences") == 2


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["small.yaml", "./small.yaml"], "small.yaml: is given twice. Name each job file once."),
        (["outputs"], "outputs: is a folder; want a job file, as in outputs/*.yaml."),
        (["absent.yaml"], "absent.yaml: cannot be read: [Errno 2] No such file or directory: 'absent.yaml'"),
        (["empty.yaml"], "empty.yaml: got nothing; want a mapping with at least 'base' and 'data'."),
        (["list.yaml"], "list.yaml: got ['a']; want a mapping with at least 'base' and 'data'."),
    ],
)
def test_a_file_that_is_no_job_has_one_line(files: list[str], said: str, tlora: Tlora, desk: Path) -> None:
    (desk / "outputs").mkdir()
    (desk / "empty.yaml").touch()
    (desk / "list.yaml").write_text("- a\n")
    assert tlora("check", *files, code=2) == f"{said}\n"


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("gpu", "--device gpu: want cpu, cuda or cuda:N."),
        ("", "--device : want cpu, cuda or cuda:N."),
        ("cpu:1", "--device cpu:1: want cpu, cuda or cuda:N."),
        ("meta", "--device meta: want cpu, cuda or cuda:N."),
        ("cuda:99", f"--device cuda:99: torch finds {torch.cuda.device_count()} GPUs here; want"),
    ],
)
@pytest.mark.parametrize("command", ["check", "train"])
def test_a_device_that_is_none_has_one_line(command: str, device: str, said: str, tlora: Tlora, desk: Path) -> None:
    output = tlora(command, "small.yaml", "--device", device, code=2)
    assert output.startswith(said)
    assert output.count("\n") == 1
    assert "adapter.rank" in tlora(command, "small.yaml", "--set", "adapter.rank=0", "--device", device, code=2)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "it is quantised (fp8). Quantised bases are not supported"),
        ({"quantization_config": {"load_in_4bit": True}}, "it is quantised. Quantised bases are not supported"),
        ({"attention_chunk_size": 8}, "its attention is cut into chunks of 8 tokens, which would not begin"),
    ],
)
def test_a_base_that_cannot_be_trained_is_refused(
    setting: dict[str, object], said: str, tlora: Tlora, desk: Path, base: Path
) -> None:
    folder = desk / "unfit"
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    config = json.loads((base / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **setting}))
    assert f"job small: base.model = 'unfit': {said}" in tlora(
        "check", "small.yaml", "--set", "base.model=unfit", code=2
    )


@pytest.mark.parametrize("is_full", [False, True])
def test_training_outlives_its_reader(is_full: bool, desk: Path) -> None:
    """Lines into a closed pipe; a live table onto a full disk."""
    reader, writer = os.pipe()
    os.close(reader)
    output, env = (os.open("/dev/full", os.O_WRONLY), {**ENV, "FORCE_COLOR": "1"}) if is_full else (writer, ENV)
    command = [sys.executable, "-m", "tlora", "train", "small.yaml", "large.yaml"]
    done = subprocess.run(command, cwd=desk, env=env, stdout=output, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for name in ("small", "large"):
        assert read_metrics(desk / "outputs" / name)[-1]["step"] == 6


def test_preview_marks_targets_without_colour(base: Path) -> None:
    for no_color in (True, False):
        shown = StringIO()
        console = Console(file=shown, force_terminal=True, color_system="standard", no_color=no_color)
        print_preview(console, toy.sequences(1), AutoTokenizer.from_pretrained(base))
        assert ("⟦" in shown.getvalue()) == no_color


def test_a_bad_yaml_never_loads_torch(desk: Path) -> None:
    code = (
        "import sys; sys.argv = ['tlora', 'check', 'small.yaml', '--device', 'cuda', '--set', 'adapter.rank=0']\n"
        "from tlora.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 2, end.code\n"
        "assert not {'torch', 'transformers', 'datasets', 'peft'} & sys.modules.keys(), sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=desk, env=ENV, check=True)


def test_jobs_that_differ_in_their_base_do_not_share_it(tlora: Tlora, desk: Path) -> None:
    """Precision is part of a base: each job trains over its own, in one command."""
    wide = (desk / "small.yaml").read_text().replace("base: {", "base: {dtype: float64, ")
    (desk / "wide.yaml").write_text(wide)
    said = tlora("train", "--deterministic", "small.yaml", "wide.yaml", "large.yaml")
    assert said.count(": finished, adapter in") == 3
    losses = {name: [row.get("loss") for row in read_metrics(desk / "outputs" / name)] for name in ("small", "wide")}
    assert losses["small"] != losses["wide"]
    assert losses["small"][0] == pytest.approx(losses["wide"][0], rel=1e-5)
    tlora("train", "--deterministic", "small.yaml", "--set", "output=solo")
    assert losses["small"] == [row.get("loss") for row in read_metrics(desk / "solo")]

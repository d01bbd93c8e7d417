"""A job file is checked once, and what is wrong with it is said in one line each."""

import re
from pathlib import Path

import pytest
import yaml

from tlora.errors import SpecError
from tlora.spec import AdapterSpec, DataSpec, JobSpec, OptimSpec, differences, load_job, parse_job, refuse_clashes

GOOD = {"name": "a", "base": {"model": "m"}, "data": {"path": "p"}}
TARGETS = "want a list of module names, a regular expression for the full name, or all-linear."


def job(**changes: object) -> JobSpec:
    return parse_job({**GOOD, **changes})


def complaint(text: str) -> str:
    """What is said of a good job with this YAML over it."""
    with pytest.raises(SpecError) as caught:
        parse_job({**GOOD, **yaml.safe_load(text)}, where="jobs/a.yaml")
    return str(caught.value)


WRONG = {
    "adapter: {rank: 0}": "adapter.rank = 0: want an integer from 1 to 256.",
    "adapter: {rank: 257}": "adapter.rank = 257: want an integer from 1 to 256.",
    "adapter: {rank: true}": "adapter.rank = True: want an integer from 1 to 256.",
    "adapter: {rank: 8.5}": "adapter.rank = 8.5: want an integer from 1 to 256.",
    "adapter: {rank_pattern: {'layers.[01].q': 300}}":
        "adapter.rank_pattern.layers.[01].q = 300: want an integer from 1 to 256.",
    "adapter: {alpha: 0}": "adapter.alpha = 0: want more than 0.",
    "adapter: {alpha: .inf}": "adapter.alpha = inf: want a finite number.",
    "adapter: {dropout: 1}": "adapter.dropout = 1: want less than 1.",
    "adapter: {rslora: maybe}": "adapter.rslora = 'maybe': want true or false.",
    "adapter: {targets: []}": f"adapter.targets = []: {TARGETS}",
    "adapter: {targets: 3}": f"adapter.targets = 3: {TARGETS}",
    "adapter: {targets: ''}": f"adapter.targets = '': {TARGETS}",
    "adapter: {targets: [q_proj, 3]}": f"adapter.targets = ['q_proj', 3]: {TARGETS}",
    "adapter: {targets: '(['}": "adapter.targets = '([': want a regular expression; this is none "
        "(unterminated character set at position 1).",
    "adapter: 3": "adapter = 3: want a mapping.",
    "base:": "'base.model' is missing. Name the model: a hub name or a folder.",
    "optim: {lr: yes}": "optim.lr = True: want a number.",
    "optim: {lr: fast}": "optim.lr = 'fast': want a number.",
    "optim: {lr: -1}": "optim.lr = -1: want at least 0.",
    "optim: {lr: .nan}": "optim.lr = nan: want a finite number.",
    "optim: {eps: 1.0e-40}": "optim.eps = 1e-40: want at least 1e-30.",
    "share: true": "share = True: want a number.",
    "optim: {betas: [0.9, 1.0]}": "optim.betas.1 = 1.0: want less than 1.",
    "batch_size: true": "batch_size = True: want an integer.",
    "batch_size: 8.0": "batch_size = 8.0: want an integer.",
    "seed: 9223372036854775808": "seed = 9223372036854775808: want less than 2**63.",
    "schedule: {name: quadratic}": "schedule.name = 'quadratic': want one of 'constant', 'linear' or 'cosine'.",
    "data: {path: p, eval_split: a, eval_fraction: 0.1}": "data: got eval_split and eval_fraction; want one of them.",
    "data: {path: ''}": "data.path = '': want a string that is not empty.",
    "data: {}": "'data.path' is missing. Name the data: a file or a hub dataset.",
    "name: ../x": "name = '../x': want letters, digits, '.', '_' and '-', at most 128, a letter or digit first.",
    "on: 3": "key True: want a string. Put it in quotes.",
}  # fmt: skip


@pytest.mark.parametrize("text", WRONG)
def test_wrong_value_is_one_line(text: str) -> None:
    assert complaint(text) == f"jobs/a.yaml: {WRONG[text]}"


@pytest.mark.parametrize(
    ("text", "known"),
    {
        "adapter: {r: 8}": "adapter.rank",
        "adapter: {lora_alpha: 8}": "adapter.alpha",
        "adapter: {target_modules: [q_proj]}": "adapter.targets",
        "lora: {r: 8}": "adapter",
        "optim: {learning_rate: 1}": "optim.lr",
        "learning_rate: 1": "optim.lr",
        "lr_scheduler_type: cosine": "schedule.name",
        "num_train_epochs: 3": "epochs",
        "gradient_accumulation_steps: 2": "batch_size",
        "per_device_train_batch_size: 2": "batch_size",
        "model_name_or_path: m": "base.model",
        "data: {path: p, max_seq_length: 9}": "data.max_length",
        "output_dir: x": "output",
        "optim: {weight_deacy: 1}": "optim.weight_decay",
        "adapter: {ranks: 3}": "adapter.rank",
        "rank: 3": "adapter.rank",
        "batchsize: 3": "batch_size",
    }.items(),
)
def test_unknown_key_names_the_one_meant(text: str, known: str) -> None:
    key = next(iter(yaml.safe_load(text)))
    inner = yaml.safe_load(text)[key]
    path = f"{key}.{list(inner)[-1]}" if isinstance(inner, dict) and key != "lora" else key
    assert complaint(text) == f"jobs/a.yaml: unknown key '{path}'. Did you mean '{known}'?"


def test_unknown_key_like_none_guesses_nothing() -> None:
    assert complaint("zzz: 1") == "jobs/a.yaml: unknown key 'zzz'."


def test_every_guess_is_a_field() -> None:
    from tlora.spec import _SPOKEN_ELSEWHERE, fields

    assert set(_SPOKEN_ELSEWHERE.values()) <= set(fields(JobSpec))


@pytest.mark.parametrize(
    ("text", "reason"),
    {
        "adapter: {use_dora: true}": "'adapter.use_dora': DoRA is not supported yet",
        "adapter: {modules_to_save: [lm_head]}": "'adapter.modules_to_save': training whole modules",
        "adapter: {bias: all}": "'adapter.bias': training biases is not supported yet",
        "adapter: {init_lora_weights: pissa}": "only PEFT's default initialisation",
        "base: {model: m, load_in_4bit: true}": "'base.load_in_4bit': quantised bases are not supported yet",
        "packing: true": "'packing': packing is always on",
    }.items(),
)
def test_refused_features_say_why(text: str, reason: str) -> None:
    assert reason in complaint(text)


def test_every_fault_is_reported_at_once() -> None:
    lines = complaint("{adapter: {rank: 0, r: 3}, optim: {lr: -1}, data: {}}").splitlines()
    assert len(lines) == 4
    assert all(line.startswith("jobs/a.yaml: ") for line in lines)


def test_defaults_are_those_of_peft_and_transformers() -> None:
    from peft import LoraConfig
    from transformers import TrainingArguments

    ours, peft, training = job(), LoraConfig(), TrainingArguments
    field = {name: part.default for name, part in training.__dataclass_fields__.items()}
    assert (ours.adapter.rank, ours.adapter.alpha, ours.adapter.dropout) == (peft.r, peft.lora_alpha, peft.lora_dropout)
    assert ours.optim == OptimSpec(
        lr=field["learning_rate"], weight_decay=field["weight_decay"], betas=(field["adam_beta1"], field["adam_beta2"]),
        eps=field["adam_epsilon"], max_grad_norm=field["max_grad_norm"],
    )  # fmt: skip
    assert (ours.epochs, ours.schedule.name, ours.seed) == (field["num_train_epochs"], field["lr_scheduler_type"], 42)


def test_numbers_as_yaml_writes_them() -> None:
    """YAML 1.1 reads 1e-4 as text."""
    assert isinstance(yaml.safe_load("1e-4"), str)
    assert job(optim={"lr": "1e-4"}).optim.lr == 1e-4
    assert job(adapter={"alpha": 16}).adapter.alpha == 16.0
    assert job(seed=2**63 - 1).seed == 2**63 - 1


def test_a_section_left_empty_is_its_default() -> None:
    assert job(adapter=None, optim=None, schedule=None, tracking=None) == job()


@pytest.mark.parametrize("targets", ["all-linear", r".*layers\.[01]\..*_proj", ["q_proj", "v_proj"], None])
def test_targets_may_be_written_in_four_ways(targets: object) -> None:
    assert job(adapter={"targets": targets}).adapter.targets == targets


def test_load(tmp_path: Path) -> None:
    path = tmp_path / "sum-3.yaml"
    path.write_text("base: {model: m}\ndata: {path: p}\noptim: {lr: 1e-3}\n")
    spec = load_job(path, ["optim.lr=1e-4", "adapter.targets=[q_proj]", "data.path=a=b.jsonl", "schedule.name=cosine"])
    assert (spec.name, spec.output) == ("sum-3", "outputs/sum-3")
    assert (spec.optim.lr, spec.adapter.targets, spec.schedule.name) == (1e-4, ["q_proj"], "cosine")
    assert spec.data.path == "a=b.jsonl"
    assert parse_job(yaml.safe_load(yaml.safe_dump(spec.model_dump(mode="json")))) == spec


@pytest.mark.parametrize(
    ("text", "override", "said"),
    [
        ("a: [1", "", "{path}: is no YAML: "),
        ("- 1", "", "{path}: got [1]; want a mapping with at least 'base' and 'data'."),
        ("", "", "{path}: got nothing; want a mapping with at least 'base' and 'data'."),
        ("# later", "", "{path}: got nothing; want a mapping with at least 'base' and 'data'."),
        ("a: 1\nb: 2\na: 3", "", "{path}: is no YAML: key 'a' is given twice, line 3."),
        ("a: {b: {c: 1, c: 1}}", "", "{path}: is no YAML: key 'c' is given twice, line 1."),
        ("{[a]: 1}", "", "{path}: is no YAML: "),
        ("a: !!timestamp 2024-13-45", "", "{path}: is no YAML: month must be in 1..12"),
        ("base: {model: m}", "", "{path}: 'data' is missing. Name the data: data: {{path: <file or hub name>}}."),
        ("base: {model: m}", "optim.lr", "--set optim.lr: want key=value, such as optim.lr=1e-4."),
        ("base: m", "base.model=x", "--set base.model=x: 'base' has no fields."),
        ("{base: {model: m}, data: {path: p}}", "optim.rate=1", "{path}: unknown key 'optim.rate'."),
        ("{base: {model: m}, data: {path: p}}", "optim={lr: 1, lr: 2}", "{path}: optim = '{{lr: 1, lr: 2}}'"),
        (
            "{base: {model: m}, data: {path: p}, eval_every: 2}",
            "",
            "{path}: eval_every = 2: the job names no evaluation rows. Set data.eval_fraction, data.eval_split or "
            "data.eval_path, or remove eval_every.",
        ),
    ],
)
def test_load_complains_of_the_file(tmp_path: Path, text: str, override: str, said: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        load_job(path, [override] if override else [])
    assert str(caught.value).startswith(said.format(path=path))
    assert "\n" not in str(caught.value)


def test_load_complains_of_no_file(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"none\.yaml: cannot be read"):
        load_job(tmp_path / "none.yaml")
    with pytest.raises(SpecError) as caught:
        load_job(tmp_path)
    assert str(caught.value) == f"{tmp_path}: is a folder; want a job file, as in {tmp_path}/*.yaml."


@pytest.mark.parametrize("day", ["2024-12-01", "2024-13-45"])
def test_a_name_may_look_like_a_date(tmp_path: Path, day: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"name: {day}\nbase: {{model: m}}\ndata: {{path: p}}\n")
    assert load_job(path).name == day
    assert load_job(path, [f"name={day}-b"]).name == f"{day}-b"


def test_keys_merged_in_may_be_given_anew(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(
        "adapter: &first {rank: 4}\nbase: {model: m}\ndata: {path: p}\n"
        "optim: {<<: &slow {lr: 1.0e-5, eps: 1.0e-6}, lr: 1.0e-3}\nschedule: {<<: {name: cosine}, name: linear}\n"
    )
    spec = load_job(path)
    assert (spec.optim.lr, spec.optim.eps, spec.schedule.name) == (1e-3, 1e-6, "linear")


def test_override_reaches_into_an_empty_section(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("base: {model: m}\ndata: {path: p, eval_fraction: 0.1}\neval_every: 2\noptim:\n")
    assert load_job(path, ["optim.lr=1"]).optim.lr == 1
    assert load_job(path).optim == OptimSpec()


def test_differences_are_of_what_is_computed() -> None:
    old = job()
    free = job(output="elsewhere", save_every=7, share=2, tracking={"wandb": "offline"})
    assert differences(old, free) == []
    new = job(optim={"lr": 1e-3}, adapter={"rank_pattern": {"a.b": 3}}, seed=1)
    assert differences(old, new) == [
        "adapter.rank_pattern: {} was, {'a.b': 3} is asked",
        "optim.lr: 5e-05 was, 0.001 is asked",
        "seed: 42 was, 1 is asked",
    ]


def test_clashes(tmp_path: Path) -> None:
    there = str(tmp_path / "x")
    refuse_clashes([job(name="a"), job(name="b")])
    with pytest.raises(SpecError, match=r"two jobs have one name, a: want one each\. Change 'name'"):
        refuse_clashes([job(name="a"), job(name="a", output=there)])
    for other in (f"{tmp_path}/y/../x", f"{there}/best"):
        with pytest.raises(SpecError, match=r"output = .* is, or lies in, the output folder of job [ab] .*'output'"):
            refuse_clashes([job(name="a", output=there), job(name="b", output=other)])
    base = tmp_path / "base"
    base.mkdir()
    for output in (base, base / "x"):
        with pytest.raises(SpecError, match="the folder of a base model"):
            refuse_clashes([job(base={"model": str(base)}, output=str(output))])


def test_specs_are_frozen_and_strict() -> None:
    with pytest.raises(ValueError, match="frozen"):
        job().seed = 3
    with pytest.raises(ValueError, match="Extra inputs"):
        AdapterSpec(r=3)
    assert DataSpec(path="p", eval_fraction=0.1).has_evaluation
    assert not DataSpec(path="p").has_evaluation


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optim": {"lr": 1e39}}, "optim.lr = 1e+39: want at most 1e+09."),
        ({"adapter": {"alpha": 1e39}}, "adapter.alpha = 1e+39: want at most 1e+09."),
        ({"steps": 10**400}, "steps = "),
        ({"data": {"path": "p", "max_length": 10**400}}, "data.max_length = "),
        ({"batch_size": 10**400}, "batch_size = "),
        ({"epochs": 1e308}, "epochs = 1e+308: want at most 1e+09."),
        ({"schedule": {"warmup_steps": 10**400}}, "schedule.warmup_steps = "),
        ({"output": "a\0b"}, "want a path that a file can have."),
        ({"adapter": {"targets": "a{99999999999}"}}, "want a regular expression"),
    ],
)
def test_what_would_leave_the_range_of_numbers_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(SpecError, match=re.escape(said)):
        job(**changes)


def test_deep_yaml_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep.yaml"
    path.write_text("a: " + "[" * 3000)
    with pytest.raises(SpecError, match="nested too deep"):
        load_job(path)

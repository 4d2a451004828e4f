"""scripts/preflight.py prints each error in one line, and what a run will do as a plan.

Nothing is written. The inputs are the tables of preflight_cases.py. A check is the same text for
all scripts: an entry is tried with one of those that it is for, the next with the next.
"""

import contextlib
import itertools
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import fork
import huggingface_hub
import preflight
import preflight_cases as cases
import pytest
import torch
import transformers
import yaml
from accelerate.commands import launch as launcher
from helpers import LORA, REPO, SCRIPTS, modules
from helpers.files import write_text
from helpers.processes import environment
from internal import model_paths

import ppo_vllm_async

ASK_VLLM, LOAD_SCRIPT = preflight.ask_vllm, preflight.load_script
CHECK_HEAD = preflight.check_head


def each_with_a_script(table):
    """Parametrize a test with the names of a table, each with one of its scripts."""
    params = []
    for number, (name, (_, _, *more)) in enumerate(table.items()):
        scripts = more[0] if more else SCRIPTS
        params.append(pytest.param(name, scripts[number % len(scripts)], id=name))
    return pytest.mark.parametrize(("name", "script"), params)


@pytest.fixture(autouse=True)
def folder(assets, tmp_path_factory, monkeypatch, request):
    """Change to a folder whose name, unlike that of tmp_path, has no word of a case in it."""
    folder = tmp_path_factory.mktemp("t")
    monkeypatch.chdir(folder)
    cases.call_rewards_here(monkeypatch)
    monkeypatch.setattr(preflight, "check_head", lambda run: None)
    if "slow" in request.keywords:  # these call rewards in processes
        monkeypatch.setattr(preflight, "load_script", LOAD_SCRIPT)
    with modules.put_back(["__mp_main__", "r"]):
        yield folder


def files_of(folder):
    """Return the files of a folder with their contents, except Python's caches."""
    paths = [path for path in folder.rglob("*") if "__pycache__" not in str(path)]
    return {path: path.read_bytes() if path.is_file() else None for path in paths}


@pytest.fixture
def ask(folder, import_fork, capsys):
    """Return ask("ppo_sync.py", {"num_gpus": 8}), which returns status, plan and errors.

    It takes options of the script and of the launch, or functions from the folder to them.
    ask.launch is what follows the plan.
    """

    def ask(script, *given, **more):
        options = cases.good_options(folder, script)
        for each in (*given, more):
            options |= each(folder) if callable(each) else each
        known = preflight.Options.__dataclass_fields__
        launch = {name: options.pop(name) for name in [*options] if name in known}
        path = import_fork("lora", LORA[script]).__file__ if script in LORA else REPO / script
        words = [*cases.words_of(launch), str(path), *cases.words_of(options)]
        before = files_of(folder)
        capsys.readouterr()
        status = preflight.main(words)
        said, mistakes = capsys.readouterr()
        assert files_of(folder) == before
        plan, _, ask.launch = said.partition("Launch")
        assert bool(ask.launch) == (status == 0)
        return status, plan, mistakes

    return ask


def check_mistake(answer, words):
    """Check that one line has all the words, which bars separate, and that it is the only one."""
    status, plan, mistakes = answer
    assert status == 2, plan
    assert mistakes.startswith("preflight: error: ") and mistakes.count("\n") == 1, mistakes
    assert len(mistakes) < 500 and mistakes[:-1].isprintable()
    assert [word for word in words.split(" | ") if word not in mistakes] == [], mistakes


def check_plan(answer, words):
    """Check that there is no error, and that the plan has all words before a "!" and none after."""
    status, plan, mistakes = answer
    assert (status, mistakes) == (0, ""), plan + mistakes
    assert f"Errors: 0. Warnings: {plan.count('  warning ')}." in plan
    in_one_line = " ".join(plan.split())
    words, _, others = words.partition("! ")
    assert [word for word in words.strip().split(" | ") if word not in in_one_line] == [], plan
    assert [word for word in others.split(" | ") if word and word in in_one_line] == [], plan


@each_with_a_script(cases.MISTAKES)
def test_mistake_is_told_in_one_line(name, script, ask):
    make, words, *_ = cases.MISTAKES[name]
    check_mistake(ask(script, make), words)


@each_with_a_script(cases.PLANS)
def test_plan_says_what_will_be_done_and_what_is_odd(name, script, ask):
    make, words, *_ = cases.PLANS[name]
    check_plan(ask(script, make), words)


@each_with_a_script(cases.OTHER_RUNS | cases.RESUMED)
def test_checkpoint_is_told_or_planned_with(name, script, ask, folder):
    make, words, *more = (cases.OTHER_RUNS | cases.RESUMED)[name]
    cases.save_run(folder, script)
    for happened in more[1:]:
        happened(folder / "output" / "run")
    step = {"resume_from_checkpoint": "output/run/checkpoints/step_3"}
    check_answer = check_plan if name in cases.RESUMED else check_mistake
    check_answer(ask(script, cases.options_of_run(folder, script), step, make), words)


# ------------------------------------------------------------------------------- paths, and lengths


@pytest.mark.parametrize("flag", ["dataset", "eval_dataset", "chat_template"])
def test_pointer_of_git_lfs_is_named_by_its_flag(flag, ask, folder):
    for number, ending in enumerate((".jsonl", ".parquet", ".jinja", "/a/b.jsonl")):
        path = write_text(
            folder / f"{number}{ending}", f"{model_paths.POINTER.decode()}.com/spec/v1\n"
        )
        if "/" in ending:
            path = folder / str(number) if "dataset" in flag else path
        check_mistake(ask("ppo_sync.py", {flag: path}), f"--{flag} {path}: | a pointer of git-lfs")


FLAGS_OF_MODELS = ["model_name_or_path", "tokenizer_name_or_path", "reward_model_path"]
FLAGS_OF_MODELS += ["value_model_path"]
HARMS = {
    "cut short": lambda file: file.write_bytes(file.read_bytes()[:-9]),
    "pointer": lambda file: file.write_bytes(model_paths.POINTER + b".github.com/spec/v1\n"),
    "broken link": lambda file: file.unlink() or file.symlink_to("blobs/0123"),
}


@pytest.mark.parametrize("flag", FLAGS_OF_MODELS)
@pytest.mark.parametrize("harm", HARMS)
def test_model_with_a_damaged_file_is_told_once_and_by_its_flag(flag, harm, ask):
    """Several checks read it, and transformers' own words for the last two lead nowhere."""
    files = ["tokenizer.json"]  # no other file of the folder is needed
    files += ["config.json"] * (flag != "tokenizer_name_or_path")
    files += ["model.safetensors"] * (flag == "model_name_or_path")
    for name in files:
        make = cases.model(lambda folder, name=name: HARMS[harm](folder / name), flag=flag, to=name)
        answer = ask("ppo_sync.py", make)
        check_mistake(answer, f"--{flag}" + f" | {name}: {name} is" * (harm != "cut short"))


def test_model_below_the_folder_is_found(assets, folder):
    for below in ("model", "checkpoint-9", "checkpoint-10", "a--b/snapshots/0123", "snapshots/0"):
        shutil.copytree(assets / "model", folder / "run" / below)
        said = model_paths.trouble_with("model_name_or_path", str(folder / "run"))
        assert said.endswith("its model is in " + str(folder / "run/model")) == (below == "model")
        shutil.rmtree(folder / "run" / "model", ignore_errors=True)
    assert said.endswith("run/checkpoint-10")


def test_path_that_is_not_there_is_told_before_anything_is_imported(folder):
    """With the imports and the Hub this took 42 seconds."""
    flags = ["--dataset=a.jsonl", "--eval-dataset", "b/c/d", "--chat_template", "chatml"]
    flags += ["--reward_fn", "r.py:f", "--model_name_or_path", "./none", "--output_dir", "none"]
    command = [sys.executable, "-X", "importtime", REPO / "scripts" / "preflight.py"]
    words = ["--config_file", "x.yaml", "mine.py", *flags, "--reward_model_path", "me/model"]
    done = subprocess.run([*command, *words], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 2 and "torch" not in done.stderr
    said = re.findall(r"^preflight: error: (.*): (?:no such|it is)", done.stderr, re.MULTILINE)
    assert said == [
        "mine.py",
        "--config_file x.yaml",
        "--dataset a.jsonl",
        "--eval_dataset b/c/d",
        "--chat_template chatml",
        "--reward_fn r.py:f",
        "--model_name_or_path ./none",
    ]


@pytest.mark.parametrize("script", cases.EVERY)
def test_limit_that_is_named_keeps_all_rows(script, ask):
    """Of prompts, and of pairs."""
    lengths = [3] * 56 + [30] * 7 + [40] * 7
    both = cases.ROW | cases.PAIR
    make = cases.rows(*[both | {"prompt": [cases.ASK | {"content": "1" * n}]} for n in lengths])
    limit = "max_token_length" if script in cases.TRAINER else "max_prompt_token_length"

    def ask_with(number):
        answer = ask(script, make, {limit: number}, local_mini_batch_size=8)
        check_plan(answer, "learners 1")
        return answer[1]

    assert " are dropped" not in ask_with(39)  # a tenth of the rows
    (enough,) = re.findall(rf"and 14 as longer .*--{limit} (\d+) would keep those", ask_with(20))
    assert int(enough) == (48 if script in cases.TRAINER else 42)  # with what is around the text
    assert " are dropped" not in ask_with(int(enough))


# ------------------------------------------------------------------------- the launch, and machines


def test_default_file_of_accelerate_is_read_as_by_its_launcher(ask, folder, monkeypatch):
    """Without --config_file. Once the launcher started what the preflight had not checked."""
    path = folder / "default_config.yaml"
    monkeypatch.setattr(preflight.config_args, "default_config_file", str(path))
    kinds = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA")
    for kind, script in zip(kinds, cases.EVERY, strict=True):
        config = {"distributed_type": kind, "fsdp_config": {"fsdp_version": 1}}
        write_text(path, yaml.dump(config))
        check_mistake(ask(script), f"{path} asks | --config_file scripts/accelerate/one_gpu.yaml")
        check_plan(ask(script, config_file=cases.ONE_GPU), "learners 1")


def little_room(patch, size=10 << 20, where=""):
    """Let all disks, or only that of a path, have this much free space."""
    real = shutil.disk_usage

    def usage(path):
        return real(path)._replace(free=size) if where in ("", str(path)) else real(path)

    patch.setattr(shutil, "disk_usage", usage)


def test_disk_is_that_of_the_machine_where_it_runs(ask, monkeypatch):
    """If the GPUs are not on this machine, only --disk can say what is free."""
    little_room(monkeypatch)
    not_checked = "disk space was not checked | --disk"
    check_plan(ask("ppo_sync.py", cases.ONE), not_checked)
    check_mistake(ask("ppo_sync.py", cases.ONE, disk=0.01), "--output_dir | 9.5 MiB free")
    check_plan(ask("ppo_sync.py", cases.ONE, disk=1.0), "learners 1 ! checked")
    monkeypatch.setattr(preflight.torch.cuda, "device_count", lambda: 1)
    check_mistake(ask("ppo_sync.py", gpu_memory=24.0), "10.0 MiB free")
    check_plan(ask("ppo_sync.py", cases.TWO, num_processes=2), not_checked)


def test_shared_memory_has_little_room_for_nccl(ask, monkeypatch):
    """One rank without GPUs needs none, because its weights go through a pipe."""
    two, free = cases.TWO | {"num_processes": 2}, "/dev/shm has only 64.0 MiB free"
    little_room(monkeypatch, 64 << 20, "/dev/shm")
    check_plan(ask("ppo_sync.py"), "learners 1")
    check_plan(ask("ppo_sync.py", two), f"learners 2 ! {free}")  # of another machine
    monkeypatch.setattr(preflight.torch.cuda, "device_count", lambda: 2)
    check_plan(ask("ppo_sync.py", two), f"{free} | docker run | NCCL")
    check_plan(ask("ppo_sync.py", cases.TWO, vllm_gpus="1"), free)


@pytest.mark.parametrize("flag", ["with_tracking", "push_to_hub"])
def test_account_is_looked_at(flag, ask, folder, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", folder / "home" / "token")
    for name in ("HOME", "NETRC"):
        monkeypatch.setenv(name, str(folder / "home"))
    words = {"with_tracking": "wandb login", "push_to_hub": "hf auth login"}[flag]
    check_mistake(ask("ppo_sync.py", **{flag: True}), f"--{flag} | {words}")


def test_upload_has_its_program(ask, folder):
    """A copied script without it would upload nothing at the end, and say nothing."""
    text = (REPO / "ppo_sync.py").read_text()
    lacks = "--push_to_hub needs scripts/push_to_hub.py beside the script"
    check_mistake(ask(write_text(folder / "copy.py", text), push_to_hub=True), lacks)


def test_models_without_their_weights_are_planned_with(ask, folder, monkeypatch):
    """For another machine, whose folders are not checked, and from the Hub, by the config."""
    file = {"output_dir": write_text(folder / "file", "") / "x"}
    plan_of_model = "learners 1 | AdamW's moments | 0.3 MiB for the final model"
    for number, script in enumerate(("ppo_sync.py", *cases.TRAINER)):
        make = cases.model(lambda model: (model / "model.safetensors").unlink(), to=str(number))
        check_plan(
            ask(script, make, file, cases.ONE), f"{plan_of_model} | has no weights, so the plan"
        )
        with monkeypatch.context() as patch:
            patch.setattr(preflight, "is_local", lambda path: False)
            check_plan(ask(script), plan_of_model)


def test_memory_is_the_sum_of_its_parts(ask):
    _, said, _ = ask("ppo_sync.py", vllm_gpus="2", num_processes=2, num_gpus=3, gpu_memory=80.0)
    whole, of_vllm = re.search(r"memory .* about ([\d.]+) MiB", said), said.index("  vLLM ")
    parts = re.findall(r"^ +([\d.]+) MiB  ", said[:of_vllm], re.MULTILINE)
    assert len(parts) >= 5
    assert sum(map(float, parts)) == pytest.approx(float(whole[1]), abs=0.3)  # because of rounding


BY_DDP = {"config_file": "ddp.yaml", "multi_gpu": True, "num_machines": 1}
TWO_NODES = str(cases.SHARDED.with_name("fsdp2_two_nodes.yaml"))
# (launch options of the preflight, what the launcher then does)
COMMANDS = [
    ({}, {"config_file": "one_gpu.yaml", "num_processes": 1, "multi_gpu": False}),
    ({"num_processes": 2}, BY_DDP | {"num_processes": 2}),
    ({"config_file": "~/fsdp2.yaml"}, {"num_processes": 8, "use_fsdp": True, "fsdp_version": 2}),
    ({"num_machines": 2, "num_processes": 4}, BY_DDP | {"num_machines": 2, "machine_rank": 0}),
    ({"config_file": TWO_NODES, "num_processes": 12}, {"num_machines": 2, "num_processes": 12}),
]


@pytest.mark.parametrize(("given", "expected"), COMMANDS)
def test_plan_ends_with_the_command_that_launches_it(given, expected, ask, folder, monkeypatch):
    """The launcher reads it like the preflight, and passes on every flag."""
    monkeypatch.setenv("HOME", str(cases.SHARDED.parent))
    options = {"local_mini_batch_size": 32, "exp_name": "it's $HOME", "temperature": 0.5}
    ask("ppo_sync.py", options, {"num_gpus": 16}, given)
    head, command = ask.launch.splitlines()
    program, launch, quiet, *words = shlex.split(command)
    assert Path(program).resolve() == Path(sys.executable).with_name("accelerate").resolve()
    assert (launch, quiet) == ("launch", "--quiet")
    args = launcher.launch_command_parser().parse_args(words)
    assert args.training_script == str(REPO / "ppo_sync.py")
    options = cases.good_options(folder, "ppo_sync.py") | options
    assert args.training_script_args == cases.words_of(options)
    args.nondefault = set()
    args, *_ = launcher._validate_launch_command(args)
    args.config_file = Path(args.config_file).name
    assert {name: getattr(args, name) for name in expected} == expected
    assert (" on HOST," in head) == (args.num_machines > 1)


# ----------------------------------------------------------------------------------- models of vLLM


@pytest.mark.slow
def test_vllm_says_that_it_has_not_a_model(assets):
    """That it has the debug model says test_script_and_reward_import_their_own_neighbours."""
    config = transformers.AutoConfig.from_pretrained(assets / "model", architectures=["MyModel"])
    assert "'MyModel'" in ASK_VLLM(config, "float32")


# A small model by this config, with the script's PolicyModel or one that forgets a field
HEADS = [("llama", {}, ""), ("cohere", {"logit_scale": 0.25}, "logit_scale")]
HEADS += [("gemma2", {"final_logit_softcapping": 30.0}, "final_logit_softcapping")]


@pytest.mark.parametrize(("kind", "changes", "forgotten"), HEADS)
def test_head_that_policy_model_reads_wrongly_is_refused(kind, changes, forgotten):
    """check_sampler sees no multiplier within 2% of 1 in bfloat16, and no cap far above 100."""

    class Forgetful(ppo_vllm_async.PolicyModel):
        def forward(self, input_ids, mask):
            with mock.patch.dict(vars(self.model.config), dict.fromkeys([forgotten])):
                return super().forward(input_ids, mask)

    module = SimpleNamespace(**vars(ppo_vllm_async) | {"PolicyModel": Forgetful})
    config = transformers.AutoConfig.for_model(kind, **changes)
    options = {"model": SimpleNamespace(config=config), "args": module.Args(temperature=0.5)}
    right, wrong = (
        SimpleNamespace(script=one, notes=[], **options) for one in (ppo_vllm_async, module)
    )
    CHECK_HEAD(right)
    assert right.notes == []
    refusal = pytest.raises(preflight.Mistake, match=r"PolicyModel's .* a cap of its own")
    with refusal if forgotten else contextlib.nullcontext():
        CHECK_HEAD(wrong)


def test_model_that_vllm_has_not_is_refused(ask, monkeypatch):
    monkeypatch.setattr(preflight, "ask_vllm", lambda *_: "no such architecture")
    check_mistake(ask("ppo_sync.py"), "vLLM cannot serve a Qwen2ForCausalLM: no such architecture")
    lacks, not_asked = "ModuleNotFoundError: No module named ", "vLLM here was not asked"
    monkeypatch.setattr(preflight, "ask_vllm", lambda *_: f"{lacks}'torchvision'")
    check_mistake(ask("ppo_sync.py"), f"a Qwen2ForCausalLM: {lacks}'torchvision'")
    check_plan(ask("ppo_sync.py", cases.ONE), not_asked)  # of another machine
    monkeypatch.setattr(preflight, "ask_vllm", lambda *_: f"{lacks}'vllm'")
    check_plan(ask("ppo_sync.py"), not_asked)


@pytest.mark.parametrize(
    ("capability", "rank", "assembler", "is_refused"),
    [
        ((9, 0), 64, None, True),
        ((9, 0), 33, None, True),
        ((9, 0), 32, None, False),
        ((9, 0), 64, "/opt/ptxas", False),
        ((8, 0), 64, None, False),
    ],
)
def test_adapters_that_vllm_would_compute_wrongly_are_refused(
    capability, rank, assembler, is_refused, monkeypatch
):
    """Long prompts give NaN, or numbers that are silently wrong (vllm issue 48590)."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    variables = {"TRITON_PTXAS_PATH": assembler} if assembler else {}
    options = preflight.Options(num_gpus=1, variables=variables)
    args = SimpleNamespace(lora_rank=rank, dtype="bfloat16", learning_rate=1e-5)
    run = SimpleNamespace(args=args, options=options, warnings=[])
    refused = pytest.raises(preflight.Mistake, match="48590")
    with refused if is_refused else contextlib.nullcontext():
        preflight.check_adapters(run)
    assert run.warnings == []


# ---------------------------------------------------------------------------------- forks, rewards


@pytest.fixture
def write_fork(folder):
    """Return write_fork("inflight"), which returns the path of the fork in this folder."""

    def write(name):
        fork.write_fork(name, folder / "grpo_vllm_async.py")
        return folder / "grpo_vllm_async.py"

    return write


def test_fork_is_checked_as_it_is(ask, folder):
    """With its own flag, columns and reward, which is tried on all rows."""
    text = (REPO / "ppo_sync.py").read_text()
    rule = '    if data_source == "debug/sorting":'
    mine = '    if data_source == "mine":\n        return float(ground_truth in response)\n'
    for old, new in (
        ("    seed: int = 1", '    my_flag: str = "images"\n    seed: int = 1'),
        (rule, mine + rule),
        ("args.gradient_checkpointing", "True"),
        ("    gradient_checkpointing:", "    my_checkpointing:"),
    ):
        text = text.replace(old, new)
    path = write_text(folder / "plan.py", text)
    mine = {"data_source": "mine"} | cases.IMAGE
    good = [cases.truth(f"{number}", **mine) for number in range(69)]
    said = "Plan of plan.py | mine the ground truth scores 1 | no attribute "
    said += "'gradient_checkpointing' ! nobody reads"
    check_plan(ask(path, cases.rows(*good), my_flag="3"), said)
    answer = ask(path, cases.rows(*good, cases.truth("", **mine)))
    check_mistake(answer, "row 69: the ground truth is empty, so any answer")
    check_mistake(
        ask(write_text(folder / "fork.py", "x = 1\n")),
        "fork.py is not one of the training scripts | Args",
    )


PARTS = fork.names_in(fork.DELETIONS)
SETS = [names for n in range(1, len(PARTS) + 1) for names in itertools.combinations(PARTS, n)]


@pytest.mark.parametrize("names", SETS, ids="-".join)
def test_copy_without_parts_is_planned_as_the_script(names, ask, folder):
    """Memory, hours and advice are the same, except for what the copy cannot do."""
    path, whole = folder / "copy.py", (REPO / "grpo_vllm_async.py").read_text()
    launches = [cases.ONE]
    if len(names) == 1:  # nothing fits the second, and the third shards models
        launches += [{}, {"num_gpus": 2, "num_processes": 2, "gpu_memory": 0.5}]
        launches += [cases.EIGHT | {"num_processes": 8, "config_file": cases.SHARDED}]
    for launch in launches:
        copy, script = (ask(write_text(path, t), launch) for t in (fork.leave_out(names), whole))
        if names == ("fsdp2",) and "config_file" in launch:
            check_mistake(copy, "if the script shards models")
            continue
        assert (" no checkpoints, because " in copy[1]) == ("resume" not in names)
        plans = [re.sub(r".* no checkpoints, .*\n.*\n", "", plan) for _, plan, _ in (copy, script)]
        assert (plans[0], *copy[::2]) == (plans[1], *script[::2])
        assert copy[0] == (2 if launch.get("gpu_memory") == 0.5 else 0)


def program_of(page, pattern):
    """Return the program that a page shows."""
    (block,) = re.findall(pattern, (REPO / "docs" / page).read_text(), re.DOTALL)
    return textwrap.dedent(block)


@pytest.mark.slow
def test_rewards_and_environments_run_in_a_process(ask, folder, write_fork):
    """So do those that the pages show."""
    late = cases.call("time.sleep(99)")
    check_mistake(ask("ppo_sync.py", late, reward_timeout=0.5), "TimeoutError | 0.5 s")
    mine = program_of("rewards.md", r"    # my_rewards.py\n((?:    [^\n]*\n)+)")
    write_text(folder / "my_rewards.py", mine)
    check_plan(ask("ppo_sync.py", reward_fn="my_rewards.py:score"), "an incorrect answer 0")
    step = program_of("ready_made_forks.md", r"```python\n(def step.*?)```")
    write_text(folder / "tools.py", f"import re\n\n\n{step}")
    path, before = write_fork("multiturn"), threading.enumerate()
    check_mistake(ask(path, env_fn="tools.py:walk", max_turns=2), "no attribute 'walk'")
    check_plan(ask(path, env_fn="tools.py:step", max_turns=2), "learners 1")
    # A thread that is left may close a pipe while Python ends
    assert [each for each in threading.enumerate() if each not in before] == []


def test_rows_that_are_tried_have_every_kind_of_truth():
    def rows_tried(prompts, reward_fn="r.py:f"):
        run = SimpleNamespace(args=SimpleNamespace(reward_fn=reward_fn))
        return [prompt.origin for prompt in preflight.rows_to_try(run, prompts)]

    same = {"data_source": "a", "extra_info": None}
    many = [SimpleNamespace(origin=i, ground_truth=str(i), **same) for i in range(1000)]
    assert rows_tried(many) == list(range(0, 1000, 50))
    many[7].ground_truth, many[501].ground_truth = "", 501
    many[502].ground_truth, many[503].data_source, many[504].extra_info = " ", "b", "text"
    assert sorted(rows_tried(many)) == sorted([*range(0, 1000, 50), 7, 501, 503, 504])
    assert rows_tried(many)[-1] == 7  # it is compared with others
    assert rows_tried(many, reward_fn=None) == list(range(1000))  # which costs nothing


# -------------------------------------------------------------------------------- the real command


@pytest.mark.slow
def test_script_and_reward_import_their_own_neighbours(folder):
    """Modules beside the preflight have the same names. Python writes nothing beside them."""
    text = (REPO / "ppo_sync.py").read_text()
    first = "import contextlib"
    text = text.replace(first, f"import internal; assert internal.IS_MINE\n{first}", 1)
    write_text(folder / "mine" / "my.fork.py", text)
    write_text(folder / "mine" / "internal.py", "IS_MINE = True\n")
    write_text(folder / "rewards" / "fork.py", "SCORE = 0.75\n")
    call = "def f(solution_str, ground_truth): return fork.SCORE * (solution_str == ground_truth)\n"
    write_text(folder / "rewards" / "random.py", f"import fork\n{call}")
    options = cases.good_options(folder, "ppo_sync.py") | {"reward_fn": "rewards/random.py:f"}
    launch = {"config_file": cases.ONE_GPU, "num_gpus": 0}
    words = [*cases.words_of(launch), "mine/my.fork.py", *cases.words_of(options)]
    command = [sys.executable, REPO / "scripts" / "preflight.py", *words]
    env = environment({})
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    answer = done.returncode, done.stdout, done.stderr
    check_plan(
        answer, "Plan of my.fork.py | scores 0.75 | an incorrect answer 0, and an empty answer 0"
    )
    assert [*folder.rglob("__pycache__")] == []

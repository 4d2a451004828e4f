"""scripts/preflight.py: what is wrong is told in one line, what will be done in a plan.

Nothing is written. The inputs are the tables of preflight_cases.py. A check is the same text for
all scripts: an entry is tried with one of those that it is for, the next with the next.
test_mistakes.py has what scripts refuse by themselves, test_plan.py the plan's arithmetic.
"""

import contextlib
import multiprocessing.spawn
import pickle
import queue
import re
import shlex
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import fork
import huggingface_hub
import odd_data
import plan
import preflight
import preflight_cases as cases
import pytest
import torch
import transformers
import yaml
from accelerate.commands import launch as launcher
from helpers import ASYNC, REPO, SCRIPTS, modules
from helpers.files import write_text
from helpers.loops import options_of
from helpers.processes import environment

import ppo_vllm_async


def one_script_each(table):
    """The names of a table, each with one of its scripts."""
    params = []
    for number, (name, entry) in enumerate(table.items()):
        scripts = SCRIPTS if isinstance(entry[-1], str) else entry[-1]
        marks = pytest.mark.slow if name.startswith("process: ") else ()
        params.append(pytest.param(name, scripts[number % len(scripts)], id=name, marks=marks))
    return pytest.mark.parametrize(("name", "script"), params)


@pytest.fixture(autouse=True)
def folder(assets, tmp_path_factory, monkeypatch):
    """Where preflight is called. Its name has no word of a case in it, as tmp_path's would."""
    folder = tmp_path_factory.mktemp("t")
    monkeypatch.chdir(folder)
    # These take seconds, and a tenth of one
    monkeypatch.setattr(preflight, "ask_vllm", lambda config, dtype: "")
    monkeypatch.setattr(preflight, "check_head", lambda run: None)
    with modules.put_back(["__mp_main__", "neighbour", "r"]):
        yield folder


def files_of(folder):
    """All that is in a folder, but for what Python keeps of files that it has imported."""
    paths = [path for path in folder.rglob("*") if "__pycache__" not in str(path)]
    return {path: path.read_bytes() if path.is_file() else None for path in paths}


@pytest.fixture
def ask(folder, capsys):
    """ask("ppo_sync.py", options, num_gpus=8): status, plan and lines of the mistakes.

    ask.launch has what follows the plan.
    """

    def ask(script, options, *flags, **launch):
        words = [*cases.words_of(launch), str(REPO / script), *cases.words_of(options), *flags]
        before = files_of(folder)
        capsys.readouterr()
        status = preflight.main(words)
        said, mistakes = capsys.readouterr()
        assert files_of(folder) == before
        plan, _, ask.launch = said.partition("Launch")
        assert bool(ask.launch) == (status == 0)
        return status, plan, mistakes

    return ask


@pytest.fixture
def in_process(monkeypatch):
    """in_process(): from now on rewards are called in this process, which takes no seconds."""

    def call_here():
        load = preflight.load_script

        def load_script(path):
            script = load(path)

            def start_reward_worker(*names):
                for name in filter(None, names):
                    script.load_reward_fn(name)
                return SimpleNamespace(shutdown=lambda: None), 0

            if hasattr(script, "call_worker"):
                script.start_reward_worker = start_reward_worker
                # The fork multiturn has other parameters
                script.call_worker = lambda workers, response, args: script.call_reward_fn(
                    args if hasattr(args, "env_fn") else args.reward_fn, response
                )
            return script

        monkeypatch.setattr(preflight, "load_script", load_script)

    return call_here


def check_mistake(answer, words):
    """One line has all the words, which bars separate, and there is no other line."""
    status, plan, mistakes = answer
    assert status == 2, plan
    assert mistakes.startswith("preflight: error: ") and mistakes.count("\n") == 1, mistakes
    assert len(mistakes) < 500 and mistakes[:-1].isprintable()
    assert [word for word in words.split(" | ") if word not in mistakes] == [], mistakes


def check_plan(answer, words):
    """Nothing is wrong, and the plan has all the words, which bars separate."""
    status, plan, mistakes = answer
    assert (status, mistakes) == (0, ""), plan + mistakes
    in_one_line = " ".join(plan.split())
    assert [word for word in words.split(" | ") if word not in in_one_line] == [], plan


# ---------------------------------------------------------------------------------------- mistakes


@one_script_each(cases.CASES)
def test_mistake_is_told_in_one_line(name, script, ask, folder, in_process):
    make, words, _ = cases.CASES[name]
    if not name.startswith("process: "):
        in_process()
    check_mistake(ask(script, cases.good_options(folder, script) | make(folder)), words)


@one_script_each(cases.LAUNCHES)
def test_machines_that_do_not_fit_are_told_after_the_plan(name, script, ask, folder):
    launch, options, words, *_ = cases.LAUNCHES[name]
    answer = ask(script, cases.good_options(folder, script) | options, **launch(folder))
    check_mistake(answer, words)
    assert "memory" not in name or "memory" in answer[1]


@pytest.fixture
def accelerate_config(folder, monkeypatch):
    """accelerate_config(distributed_type="NO"): what `accelerate config` wrote on this machine."""

    def write(**content):
        path = write_text(folder / "default_config.yaml", yaml.dump(content))
        monkeypatch.setattr(preflight.config_args, "default_config_file", str(path))

    return write


FSDP_1 = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 1}}
BY_DEFAULT = "reads {folder}/default_config.yaml | --config_file scripts/accelerate/one_gpu.yaml"


def test_default_file_of_accelerate_is_read_as_by_its_launcher(ask, folder, accelerate_config):
    """Where no other is named. It has started what the preflight had not looked at."""
    kinds = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA")
    for kind, script in zip(kinds, cases.EVERY, strict=True):
        accelerate_config(**FSDP_1 | {"distributed_type": kind})
        options = cases.good_options(folder, script)
        check_mistake(ask(script, options), BY_DEFAULT.format(folder=folder))
        check_plan(ask(script, options, config_file=cases.ONE_GPU), "learners 1")
    for kind, learners in (("NO", 1), ("MULTI_GPU", 2)):  # these do no harm
        accelerate_config(distributed_type=kind, num_processes=2, mixed_precision="fp16")
        options = cases.good_options(folder, "ppo_sync.py")
        check_plan(ask("ppo_sync.py", options, num_gpus=2), f"learners {learners} ")


@pytest.mark.parametrize("name", cases.FORKS)
def test_fork_that_cannot_be_checked_says_what_it_lacks(name, ask, folder):
    make, words = cases.FORKS[name]
    check_mistake(ask(make(folder), cases.good_options(folder, ASYNC[0])), words)


UNKNOWN = {
    "--bogus 3": "--bogus is no flag of ppo_sync.py",
    "--learning_rat 1": "--learning_rat is no | did you mean --learning_rate?",
    "--num_processes 8": "such as --num_processes, go before the script",
    "--gradient_checkpointing True": "True is no flag | it is --NAME or --no-NAME",
    "--run_name a b": "b is no flag | takes one value",
}


def test_unknown_flag_is_named(ask, folder):
    options = cases.good_options(folder, "ppo_sync.py")
    for flags, words in UNKNOWN.items():
        check_mistake(ask("ppo_sync.py", options, *flags.split()), words)


def test_each_part_tells_its_first_mistake(ask, folder):
    options = cases.good_options(folder, "ppo_sync.py") | {"seed": -1, "beta": -1}
    options |= {"dataset": "no.jsonl", "attn_implementation": "none"}
    status, plan, mistakes = ask("ppo_sync.py", options, "--bogus", "3")
    assert status == 2 and "Plan of ppo_sync.py" in plan
    starts = ("--bogus is no flag", "--beta", "no.jsonl", "--model_name_or_path")
    for line, start in zip(mistakes.splitlines(), starts, strict=True):
        assert line.startswith(f"preflight: error: {start}")


def little_room(patch, folder):
    usage = shutil.disk_usage(folder)
    patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10 << 20))


def nobody(patch, folder):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        patch.delenv(name, raising=False)
    patch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", folder / "home" / "token")
    for name in ("HOME", "NETRC"):
        patch.setenv(name, str(folder / "home"))


@pytest.mark.parametrize(
    ("arrange", "options", "words"),
    [
        (little_room, {}, "--output_dir | 10.0 MiB free"),
        (nobody, {"with_tracking": True}, "--with_tracking | wandb login"),
        (nobody, {"push_to_hub": True}, "--push_to_hub | hf auth login"),
    ],
)
def test_disk_and_accounts_are_looked_at(arrange, options, words, ask, folder, monkeypatch):
    arrange(monkeypatch, folder)
    check_mistake(ask("ppo_sync.py", cases.good_options(folder, "ppo_sync.py") | options), words)


def test_disk_is_that_of_the_machine_where_it_runs(ask, folder, monkeypatch):
    """This one's counts where the GPUs are here, or none; else it is named, or not known."""
    little_room(monkeypatch, folder)
    options = cases.good_options(folder, "ppo_sync.py")
    elsewhere = {"num_gpus": 1, "gpu_memory": 24.0}
    not_checked = "the other machine's disk is not checked | --disk"
    check_plan(ask("ppo_sync.py", options, **elsewhere), not_checked)
    check_mistake(ask("ppo_sync.py", options, **elsewhere, disk=0.01), "9.5 MiB free")
    assert "checked" not in ask("ppo_sync.py", options, **elsewhere, disk=1.0)[1]
    monkeypatch.setattr(preflight.torch.cuda, "device_count", lambda: 1)
    check_mistake(ask("ppo_sync.py", options, gpu_memory=24.0), "10.0 MiB free")
    two = elsewhere | {"num_gpus": 2, "num_processes": 2}  # of which this machine has one
    check_plan(ask("ppo_sync.py", options, **two), not_checked)


@pytest.mark.parametrize("script", [SCRIPTS[0], *cases.TRAINER])
def test_other_machine_is_planned_for_without_weights_and_its_folders(script, ask, folder):
    """Each is a mistake of a run on this machine: see cases."""
    elsewhere = {"num_gpus": 1, "gpu_memory": 24.0}
    write_text(folder / "file", "")
    options = cases.good_options(folder, script) | cases.WITHOUT_WEIGHTS(folder)
    options["output_dir"] = folder / "file" / "x"
    _, said, _ = answer = ask(script, options, **elsewhere)
    check_plan(answer, "0.5 MiB for the final model | has no weights: the plan is by its config")
    assert said.count("has no weights") == 1  # also where a value model starts from it
    # What is there is compared with the config
    options |= cases.model(cases.config(intermediate_size=7), to="other")(folder)
    check_mistake(ask(script, options, **elsewhere), "down_proj.weight")


# ------------------------------------------------------------------------------ the launch command

TWO_NODES = str(cases.SHARDED.with_name("fsdp2_two_nodes.yaml"))
BY_DDP = {"config_file": "ddp.yaml", "multi_gpu": True}
# (how the preflight is told of the launch, what the launcher then does)
COMMANDS = [
    ({}, {"config_file": "one_gpu.yaml", "num_processes": 1, "multi_gpu": False}),
    ({"num_processes": 2}, BY_DDP | {"num_processes": 2, "num_machines": 1}),
    ({"config_file": "~/fsdp2.yaml"}, {"num_processes": 8, "use_fsdp": True, "fsdp_version": 2}),
    (
        {"num_machines": 2, "num_processes": 4},
        BY_DDP | {"num_machines": 2, "num_processes": 4, "machine_rank": 0},
    ),
    (
        {"config_file": TWO_NODES, "num_processes": 12},
        {"num_machines": 2, "num_processes": 12, "main_process_ip": "HOST"},
    ),
]


@pytest.mark.parametrize(("told", "expected"), COMMANDS, ids=map(str, range(len(COMMANDS))))
def test_plan_ends_with_the_command_that_launches_it(told, expected, ask, folder, monkeypatch):
    """The launcher understands it as the preflight has read it, and passes on every flag."""
    monkeypatch.setenv("HOME", str(cases.SHARDED.parent))
    options = cases.good_options(folder, "ppo_sync.py") | {"local_mini_batch_size": 32}
    options |= {"exp_name": "it's $HOME", "temperature": 0.5}
    ask("ppo_sync.py", options, **{"num_gpus": 16} | told)
    head, command = ask.launch.splitlines()
    program, launch, quiet, *words = shlex.split(command)
    assert Path(program).resolve() == Path(sys.executable).with_name("accelerate").resolve()
    assert (launch, quiet) == ("launch", "--quiet")
    args = launcher.launch_command_parser().parse_args(words)
    assert args.training_script == str(REPO / "ppo_sync.py")
    assert args.training_script_args == cases.words_of(options)
    args.nondefault = set()
    args, *_ = launcher._validate_launch_command(args)
    args.config_file = Path(args.config_file).name
    assert {name: getattr(args, name) for name in expected} == expected
    assert (" on HOST," in head) == (args.num_machines > 1)


def test_launcher_is_named_as_it_is_found(folder, monkeypatch):
    """By its name alone if that is the one; else by where it is from here."""
    options = preflight.Options(num_processes=1, num_machines=1)
    monkeypatch.setattr(sys, "executable", str(folder / "venv" / "bin" / "python"))
    own = str(folder / "venv" / "bin" / "accelerate")
    for found, name in ((own, "accelerate"), ("/usr/bin/accelerate", "venv/bin/accelerate")):
        monkeypatch.setattr(shutil, "which", lambda _, found=found: found)
        assert preflight.launch_command(options, ["x.py"]).split()[0] == name


def test_hub_that_does_not_answer_is_asked_once(ask, folder, monkeypatch):
    constants = huggingface_hub.constants
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    preflight.hub_answers.cache_clear()
    answer = ask("ppo_sync.py", cases.good_options(folder, "ppo_sync.py") | {"dataset": "no/such"})
    check_mistake(answer, "no/such")
    assert "the hub does not answer" in answer[1]
    assert preflight.hub_answers.cache_info().misses == 1
    preflight.hub_answers.cache_clear()


# -------------------------------------------------------------------------------------- good plans


@one_script_each(cases.PLANS | cases.ODD)
def test_plan_says_what_will_be_done_and_what_is_odd(name, script, ask, folder, in_process):
    make, words, *_ = (cases.PLANS | cases.ODD)[name]
    in_process()
    check_plan(ask(script, cases.good_options(folder, script) | make(folder)), words)


@one_script_each(cases.NOT_ODD)
def test_what_is_not_odd_is_not_noted(name, script, ask, folder):
    make, words, *_ = cases.NOT_ODD[name]
    answer = ask(script, cases.good_options(folder, script) | make(folder))
    check_plan(answer, "learners 1")
    assert [word for word in words.split(" | ") if word in answer[1]] == [], answer[1]


def test_column_that_a_fork_reads_is_not_said_to_be_read_by_nobody(ask, folder):
    text = (REPO / "ppo_sync.py").read_text()
    fork = write_text(folder / "fork.py", f'{text}\nCOLUMN = "images"\n')
    options = cases.good_options(folder, "ppo_sync.py") | cases.prompts("1=", **cases.IMAGE)(folder)
    assert "nobody reads" in ask("ppo_sync.py", options)[1]
    assert "nobody reads" not in ask(fork, options)[1]


@one_script_each(cases.LAUNCHED)
def test_plan_is_of_the_machines_that_are_named(name, script, ask, folder):
    launch, options, words = cases.LAUNCHED[name]
    check_plan(ask(script, cases.good_options(folder, script) | options, **launch), words)


def test_model_of_the_hub_is_built_from_its_config(ask, folder, monkeypatch):
    monkeypatch.setattr(preflight, "is_local", lambda path: False)
    for script in ("ppo_sync.py", *cases.TRAINER):
        answer = ask(script, cases.good_options(folder, script))
        check_plan(answer, "learners 1 | AdamW's moments | 0.5 MiB for the final model")


ASK_VLLM, CHECK_HEAD = preflight.ask_vllm, preflight.check_head
MISSING = "ModuleNotFoundError: No module named 'vllm'"


@pytest.mark.slow
def test_vllm_is_asked_whether_it_has_the_model(assets):
    """In a process of its own, by the config that the engine would read."""
    config = transformers.AutoConfig.from_pretrained(assets / "model")
    assert ASK_VLLM(config, "float32") == ""
    config.architectures = ["NoSuchForCausalLM"]
    assert "NoSuchForCausalLM" in ASK_VLLM(config, "float32")


def test_model_that_vllm_has_not_is_refused(ask, folder, monkeypatch):
    monkeypatch.setattr(preflight, "ask_vllm", lambda config, dtype: "no such architecture")
    answer = ask("ppo_sync.py", cases.good_options(folder, "ppo_sync.py"))
    check_mistake(answer, "vLLM cannot serve a Qwen2ForCausalLM: no such architecture")
    monkeypatch.setattr(preflight, "ask_vllm", lambda *_: MISSING)
    answer = ask("ppo_sync.py", cases.good_options(folder, "ppo_sync.py"))
    check_plan(answer, "vLLM here was not asked whether it has the model: | vllm")


def test_ground_truth_that_is_a_rule_is_not_shown_as_an_answer(ask, folder):
    options = cases.good_options(folder, "ppo_sync.py") | cases.rows(*[cases.RULE] * 64)(folder)
    assert "scores" not in ask("ppo_sync.py", options)[1]
    assert not any(map(odd_data.is_rule, ("x + 1", 7, "7")))
    assert all(map(odd_data.is_rule, ('["a"]', [1])))


def test_values_that_are_warm_are_not_warned_of(ask, folder):
    options = cases.good_options(folder, "ppo_sync.py") | {"lam": 0.95}
    for warm in ({"lam": 1.0}, {"value_warmup_steps": 2}, {"value_model_path": cases.MODEL}):
        assert "--lam" not in ask("ppo_sync.py", options | warm)[1]


def own_rule(folder, score):
    """A fork whose rule for the source "mine" is this, with a flag of its own."""
    text, debug = (REPO / "ppo_sync.py").read_text(), 'if data_source == "debug/sorting":'
    for old, new in (
        ("import contextlib", "import contextlib\nimport neighbour"),
        ("    seed: int = 1", "    my_flag: int = 0\n    seed: int = 1"),
        (debug, f'if data_source == "mine":\n        return {score}\n    {debug}'),
    ):
        text = text.replace(old, new)
    write_text(folder / "neighbour.py", "SCORE = 0.75\n")
    return write_text(folder / "fork.py", text)


def test_fork_is_checked_as_it_is(ask, folder):
    """With its own flag, reward and neighbours; of its own rule all rows are tried."""
    options = cases.good_options(folder, "ppo_sync.py") | {"my_flag": 3}
    mine = [row | {"data_source": "mine"} for row in [*[cases.ROW] * 69, cases.EMPTY]]
    options |= cases.rows(*mine[:-1])(folder)
    fork = own_rule(folder, "neighbour.SCORE")
    check_plan(ask(fork, options), "Plan of fork.py | mine scores 0.75")
    options |= cases.rows(*mine)(folder)
    fork = own_rule(folder, "float(ground_truth in response)")
    check_mistake(ask(fork, options), "row 69: the ground truth is empty, and any answer")


def test_fork_without_an_argument_has_a_plan_without_it(ask, folder):
    fork = cases.rename("gradient_checkpointing")(folder)
    words = "learners 1 | no attribute 'gradient_checkpointing' | reward 1 x compute_score"
    check_plan(ask(fork, cases.good_options(folder, "ppo_sync.py")), words)


# ---------------------------------------------------------------------------- forks, and any name


@pytest.fixture
def write_fork(git, folder):
    """write_fork("inflight"): the path of the fork, in the folder where preflight is called."""

    def write(name, output="fork.py"):
        fork.write_fork(name, folder / output)
        return folder / output

    return write


def options_of_fork(folder, **options):
    return cases.good_options(folder, "grpo_vllm_async.py") | options


def test_script_may_have_any_name(ask, folder):
    path = shutil.copy(REPO / "ppo_sync.py", folder / "plan.py")
    answer = ask(path, cases.good_options(folder, "ppo_sync.py"))
    check_plan(answer, "Plan of plan.py | a row of debug/sorting scores 1")


def test_processes_that_a_reward_is_tried_in_load_the_script(folder):
    """By its path, as those of a run do, and not the preflight, whose modules they then had."""
    path = shutil.copy(REPO / "ppo_sync.py", folder / "my.fork.py")
    script = preflight.load_script(path)
    before = sys.modules["__main__"]
    with preflight.as_main(script):
        data = multiprocessing.spawn.get_preparation_data("a child")
    assert data["init_main_from_path"] == str(path) and "init_main_from_name" not in data
    assert sys.modules["__main__"] is before
    function = pickle.loads(pickle.dumps(script.call_reward_fn))
    assert function is script.call_reward_fn and function.__module__ == "__mp_main__"


def beside(name):
    """The modules beside the preflight that one of them imports, and those that they import."""
    text = (REPO / "scripts" / f"{name}.py").read_text()
    names = set(re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE))
    own = {name for name in names if (REPO / "scripts" / f"{name}.py").exists()}
    return own.union(*map(beside, own))


def test_modules_beside_the_preflight_are_forgotten():
    """Of a name that is forgotten, a script or a reward gets its own neighbour."""
    constants = preflight.forget_neighbours.__code__.co_consts
    assert {*filter(None, constants[1])} == beside("preflight")


def test_number_of_a_fork_may_be_zero_and_a_size_may_not(ask, folder, write_fork):
    path = write_fork("inflight")
    check_plan(ask(path, options_of_fork(folder, max_staleness=0)), "learners 1")
    answer = ask(path, options_of_fork(folder, vllm_tensor_parallel_size=0))
    check_mistake(answer, "--vllm_tensor_parallel_size is 0; it must be from 1")


@pytest.mark.parametrize("name", ["inflight", "multiturn", "refill"])
def test_reward_of_a_fork_reads_the_answer(name, ask, folder, write_fork, in_process):
    """The fork's Response has other fields in other places."""
    in_process()
    path, reward = write_fork(name), cases.IS_IN(folder)
    answer = ask(path, options_of_fork(folder, **reward))
    check_plan(answer, "scores 1, a wrong answer 0, an empty one 0")


ENVIRONMENTS = {
    "none.py:step": "none.py:step: it must be path/to/file.py:function",
    "tools.py:walk": "tools.py:walk: | no attribute 'walk'",
}


@pytest.mark.slow
@pytest.mark.parametrize("env_fn", ENVIRONMENTS)
def test_environment_that_is_missing_is_told(env_fn, ask, folder, write_fork):
    path = write_fork("multiturn")
    write_text(folder / "tools.py", "def step(text, ground_truth, turn): return None\n")
    environment = {"env_fn": env_fn, "max_turns": 2}
    check_mistake(ask(path, options_of_fork(folder, **environment)), ENVIRONMENTS[env_fn])
    good, before = environment | {"env_fn": "tools.py:step"}, threading.enumerate()
    check_plan(ask(path, options_of_fork(folder, **good)), "learners 1")
    # Else Python's end may come while it closes a pipe
    assert [each for each in threading.enumerate() if each not in before] == []


def test_every_function_of_a_fork_is_given_to_its_worker():
    given, script = [], SimpleNamespace(start_reward_worker=lambda *names: given.append(names))
    here = f"{__file__}:test"
    for flags in ({"reward_fn": None, "env_fn": here}, {"reward_fn": here}, {"reward_fn": None}):
        run = SimpleNamespace(script=script, args=SimpleNamespace(**flags))
        preflight.start_worker(run, queue.Queue())
    assert given == [(None, here), (here,)]
    run.args = SimpleNamespace(reward_fn=None, env_fn="none.py:step")
    with pytest.raises(preflight.Mistake, match=r"--env_fn none.py:step: it must be path"):
        preflight.start_worker(run, queue.Queue())


def test_paths_that_a_message_names_are_there():
    text = (REPO / "scripts" / "preflight.py").read_text()
    named = re.findall(r"\bscripts/[\w/]+\.(?:py|yaml)", text)
    assert len(named) > 5 and [path for path in named if not (REPO / path).exists()] == []


# -------------------------------------------------------------------------- which rows are tried


def prompts(*truths):
    """Prompts of these ground truths, by row."""
    same = {"data_source": "a", "extra_info": None}
    return [SimpleNamespace(origin=i, ground_truth=it, **same) for i, it in enumerate(truths)]


def rows_tried(prompts, reward_fn="r.py:f"):
    run = SimpleNamespace(args=SimpleNamespace(reward_fn=reward_fn))
    return [prompt.origin for prompt in preflight.rows_to_try(run, prompts)]


def test_rows_that_are_tried_have_every_kind_of_truth():
    many = prompts(*map(str, range(1000)))
    assert rows_tried(many) == list(range(0, 1000, 50))
    many[7].ground_truth, many[501].ground_truth = "", 501
    many[502].ground_truth, many[503].data_source, many[504].extra_info = " ", "b", "text"
    assert sorted(rows_tried(many)) == sorted([*range(0, 1000, 50), 7, 501, 503, 504])
    assert rows_tried(many)[-1] == 7  # it is compared with others
    assert rows_tried(many, reward_fn=None) == list(range(1000))  # which costs nothing
    assert rows_tried([]) == []


def test_rows_are_no_longer_tried_when_a_reward_takes_long(monkeypatch):
    clock = iter(range(0, 1000, 5))
    monkeypatch.setattr(preflight.time, "perf_counter", lambda: next(clock))
    one = SimpleNamespace(verifiable=1.0, reward_metrics={}, text="a")
    monkeypatch.setattr(preflight, "score", lambda *given: one)
    args = SimpleNamespace(reward_fn="r.py:f", reward_timeout=10.0)
    script = SimpleNamespace(response_text=lambda *given: "a")
    run = SimpleNamespace(args=args, script=script, notes=[], answers={}, longest_call=0)
    run.tokenizer = lambda text, **options: {"input_ids": []}
    preflight.try_reward(run, None, prompts(*"abcdefghijklmno"))
    assert run.notes[0] == "the reward is slow: tried on 4 of 15 rows"
    assert run.notes[1].startswith("0, and so 4 of 4 that were tried: ")


def test_empty_truths_of_a_source_that_has_no_others_are_let_be(ask, folder, in_process):
    """Such as of a reward that asks a judge."""
    in_process()
    options = cases.good_options(folder, "ppo_sync.py") | cases.call("return len(text)")(folder)
    judged = cases.EMPTY | {"data_source": "judged"}
    options |= cases.rows(*[cases.ROW] * 35, *[judged] * 35)(folder)
    check_plan(ask("ppo_sync.py", options), "a row of judged scores")


# ---------------------------------------------------------------------------------- shared memory


def shared_memory_of(monkeypatch, size):
    """From now on /dev/shm has this room, and the disk what it has."""
    real = shutil.disk_usage

    def usage(path):
        free = real(path)
        return free._replace(free=size) if str(path) == "/dev/shm" else free

    monkeypatch.setattr(shutil, "disk_usage", usage)


def test_model_that_shared_memory_has_no_room_for_is_told(ask, folder, monkeypatch):
    """Without a GPU: random weights in float32 and the next, in --dtype, for each engine."""
    options = cases.good_options(folder, "ppo_sync.py")
    model = transformers.AutoModelForCausalLM.from_pretrained(cases.MODEL)
    for dtype, size in (("float32", 8), ("bfloat16", 6)):
        options["dtype"], needed = dtype, size * plan.count_parameters(model)
        shared_memory_of(monkeypatch, needed - 1)
        told = "/dev/shm: | free; docker run | Weights go to vLLM by files there"
        check_mistake(ask("ppo_sync.py", options), told)
        assert ask("ppo_sync.py", options | {"lora_rank": 1})[2] == ""
        shared_memory_of(monkeypatch, needed)
        check_plan(ask("ppo_sync.py", options), "learners 1")
        check_mistake(ask("ppo_sync.py", options, num_processes=2, num_gpus=0), "/dev/shm")


def test_little_shared_memory_of_several_processes_is_noted(ask, folder, monkeypatch):
    """As a plain container has. Of another machine nothing is known."""
    shared_memory_of(monkeypatch, 64 << 20)
    options, free = cases.good_options(folder, "ppo_sync.py"), "/dev/shm: 64.0 MiB free"
    two = {"num_processes": 2, "num_gpus": 2, "gpu_memory": 24.0}
    assert free not in ask("ppo_sync.py", options, **two)[1]
    monkeypatch.setattr(preflight.torch.cuda, "device_count", lambda: 2)
    check_plan(ask("ppo_sync.py", options, **two), f"{free}; docker run | NCCL")
    assert free not in ask("ppo_sync.py", options, **two | {"num_processes": 1, "num_gpus": 1})[1]
    check_plan(ask("ppo_sync.py", options | {"vllm_gpus": "1"}, **two | {"num_processes": 1}), free)


# ------------------------------------------------------------------------------------------- heads


def check_head(kind, script=ppo_vllm_async, temperature=1.0, **changes):
    """The preflight's check_head of an architecture with this config; returns the notes."""
    config = transformers.AutoConfig.for_model(kind, **changes)
    policy = SimpleNamespace(config=config)
    run = SimpleNamespace(script=script, model=policy, notes=[])
    run.args = script.Args(temperature=temperature)
    CHECK_HEAD(run)
    return run.notes


@pytest.mark.parametrize("kind", cases.HEADS)
def test_head_is_right_or_refused(kind):
    """With the sizes of the real models."""
    changes, is_right = cases.HEADS[kind]
    right = contextlib.nullcontext()
    wrong = pytest.raises(preflight.Mistake, match=r"PolicyModel's .* a cap of its own")
    state = torch.get_rng_state()
    with right if is_right else wrong:
        assert check_head(kind.partition(":")[0], temperature=0.5, **changes) == []
    assert torch.equal(torch.get_rng_state(), state)


FORGOTTEN = {"cohere": {"logit_scale": 0.25}, "gemma2": {"final_logit_softcapping": 30.0}}


@pytest.mark.parametrize("kind", FORGOTTEN)
def test_fork_that_forgets_what_a_config_says_of_its_head_is_refused(kind):
    class Forgetful(ppo_vllm_async.PolicyModel):
        def forward(self, input_ids, mask):
            config = self.model.config
            kept = {option: getattr(config, option, None) for option in FORGOTTEN[kind]}
            vars(config).update(dict.fromkeys(kept))
            outputs = super().forward(input_ids, mask)
            vars(config).update(kept)
            return outputs

    module = SimpleNamespace(**vars(ppo_vllm_async) | {"PolicyModel": Forgetful})
    assert check_head("llama", module) == []
    with pytest.raises(preflight.Mistake, match="PolicyModel's log-probabilities"):
        check_head(kind, module, **FORGOTTEN[kind])


def test_model_that_cannot_be_made_small_is_noted():
    (note,) = check_head("mamba2")
    assert "not compared with PolicyModel (AttributeError" in note


# ------------------------------------------------------------------------------------- checkpoints


def options_to_resume(folder, script, make):
    resume = {"resume_from_checkpoint": "output/run/checkpoints/step_3"}
    return cases.options_of_run(folder, script) | resume | make(folder)


@one_script_each(cases.CHECKPOINTS | cases.RESUMED)
def test_checkpoint_is_told_or_planned_with(name, script, ask, folder):
    happened, make, words, *_ = (cases.CHECKPOINTS | cases.RESUMED)[name]
    cases.save_run(folder, script)
    happened(folder / "output" / "run")
    check_answer = check_plan if name in cases.RESUMED else check_mistake
    check_answer(ask(script, options_to_resume(folder, script, make)), words)


def test_what_a_fork_refuses_on_resume_is_refused(ask, folder):
    cases.save_run(folder, "grpo_vllm_async.py")
    options = options_to_resume(folder, "grpo_vllm_async.py", cases.given(temperature=0.5))
    check_plan(ask("grpo_vllm_async.py", options), "temperature was 1.0 and is 0.5")
    text = (REPO / "grpo_vllm_async.py").read_text()
    more = text.replace('"seed",\n    "model', '"seed", "temperature", "model')
    write_text(folder / "fork.py", more)
    check_mistake(ask(folder / "fork.py", options), "temperature was 1.0 and is 0.5")


def test_checkpoint_of_one_rank_is_one_of_two_with_half_the_batch(ask, folder):
    cases.save_run(folder, "ppo_sync.py")
    halves = cases.given(local_rollout_batch_size=32, local_mini_batch_size=32)
    options = options_to_resume(folder, "ppo_sync.py", halves)
    check_plan(ask("ppo_sync.py", options, num_processes=2), "resumes | world_size was 1 and is 2")
    answer = ask("ppo_sync.py", options | {"local_mini_batch_size": 16}, num_processes=2)
    check_mistake(answer, "mini_batch_size was 64 and is 32; | num_updates was 10 and is 20")


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_checkpoint_that_a_script_has_written_is_good(script, ask, few_prompts, run_main, folder):
    changes = {"output_dir": folder, "eval_dataset": few_prompts / "test.parquet", "save_freq": 1}
    run_main(script, **changes)
    options = options_of(script, few_prompts, folder) | changes
    options["resume_from_checkpoint"] = "latest"
    check_plan(ask(script, options), "resumes | run/checkpoints/step_2")
    check_mistake(ask(script, options | {"seed": 7}), "seed was")


# -------------------------------------------------------------------------------- the real command


@pytest.mark.slow
def test_command_ends_with_status_2_and_a_line_for_each_mistake(folder):
    """After the plan. With the defaults the debug model is trained."""

    write_text(folder / "accelerate" / "default_config.yaml", yaml.dump(FSDP_1))
    command = [sys.executable, "scripts/preflight.py", "ppo_sync.py"]
    wrong = ["--seed=-1", "--eval_dataset", "no.jsonl"]
    env = environment({"HF_HOME": str(folder)})
    done = subprocess.run([*command, *wrong], cwd=REPO, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout.startswith("Plan of ppo_sync.py")
    first, second, third = done.stderr.splitlines()
    assert f"reads {folder}/accelerate/default_config.yaml" in first
    assert "--seed is -1" in second and "no.jsonl" in third


@pytest.mark.slow
def test_script_and_reward_import_their_own_neighbours(folder):
    """Of names that modules beside the preflight have. Python leaves nothing beside them."""
    text = (REPO / "ppo_sync.py").read_text()
    first = "import contextlib"
    text = text.replace(first, f"import provenance; assert provenance.IS_MINE\n{first}", 1)
    write_text(folder / "mine" / "my.fork.py", text)
    write_text(folder / "mine" / "provenance.py", "IS_MINE = True\n")
    write_text(folder / "rewards" / "plan.py", "SCORE = 0.75\n")
    call = "def f(solution_str, ground_truth): return plan.SCORE * (solution_str == ground_truth)\n"
    write_text(folder / "rewards" / "random.py", f"import plan\n{call}")
    options = cases.good_options(folder, "ppo_sync.py") | {"reward_fn": "rewards/random.py:f"}
    launch = {"config_file": cases.ONE_GPU, "num_gpus": 0}
    words = [*cases.words_of(launch), "mine/my.fork.py", *cases.words_of(options)]
    command = [sys.executable, REPO / "scripts" / "preflight.py", *words]
    env = environment({})
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    answer = done.returncode, done.stdout, done.stderr
    check_plan(answer, "Plan of my.fork.py | scores 0.75, a wrong answer 0, an empty one 0")
    assert [*folder.rglob("__pycache__")] == []


def test_memory_is_the_sum_of_its_parts(ask, folder):
    options = cases.good_options(folder, "ppo_sync.py") | {"vllm_gpus": "2"}
    _, said, _ = ask("ppo_sync.py", options, num_processes=2, num_gpus=3, gpu_memory=80.0)
    whole, of_vllm = re.search(r"memory .* about ([\d.]+) MiB", said), said.index("of vLLM:")
    parts = re.findall(r"^ +([\d.]+) MiB  ", said[:of_vllm], re.MULTILINE)
    assert len(parts) >= 5
    assert sum(map(float, parts)) == pytest.approx(float(whole[1]), abs=0.3)  # as it is rounded

"""scripts/preflight.py: what is wrong in one line, what will be done in a plan, nothing written.

The cases are those of preflight_cases.py. A check is the same text for all scripts, so a case is
tried with one of those that it is for, and the next case with the next.
"""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import fits
import huggingface_hub
import peft
import plan
import preflight
import preflight_cases as cases
import pytest
import torch
import transformers
from helpers import ASYNC, REPO, SCRIPTS, modules
from helpers.files import write_rows, write_text
from helpers.loops import options_of
from helpers.processes import environment
from plan import GIB

LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Those that find a mistake in two parts
TWO_LINES = ("model: config that is a list",)
# Those that are waited for
SLOW = ("data: template that runs for ever", "reward: file hangs")
SLOW += ("model: adapters without vLLM's",)


def one_script_each(table, scripts_of):
    """The names of a table, each with one of its scripts."""
    return [
        pytest.param(
            name,
            scripts[number % len(scripts)],
            id=name,
            marks=pytest.mark.slow if name in SLOW else (),
        )
        for number, name in enumerate(table)
        for scripts in [scripts_of(table[name])]
    ]


def given_scripts(entry):
    """Of an entry (..., words), or (..., words, scripts)."""
    return SCRIPTS if isinstance(entry[-1], str) else entry[-1]


@pytest.fixture(autouse=True)
def folder(assets, tmp_path_factory, monkeypatch):
    """An empty folder, in which preflight is called, with nothing of a launcher around it.

    Its name has no word of a case in it, as that of tmp_path would.
    """
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path_factory.mktemp("t")
    monkeypatch.chdir(folder)
    with modules.put_back([*(Path(script).stem for script in cases.EVERY), "fork", "neighbour"]):
        yield folder


def files_of(folder):
    """All that is in a folder, but for what Python keeps of files that it has imported."""
    found = {}
    for path, folders, files in os.walk(folder):
        for name in folders + files:
            one = Path(path, name)
            is_text = one.is_file() and not one.is_symlink()
            found[one] = one.read_bytes() if is_text else os.lstat(one).st_mode
    return {path: content for path, content in found.items() if "__pycache__" not in str(path)}


@contextlib.contextmanager
def streams():
    """stdout and stderr as a process has them; what pytest has put there a fork would write to."""
    with (
        open(1, "w", closefd=False) as stdout,
        open(2, "w", closefd=False) as stderr,
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        yield


@pytest.fixture
def ask(folder, capfd):
    """ask("ppo_sync.py", options, num_gpus=8): status, plan and lines of the mistakes."""

    def ask(script, options, *flags, **launch):
        words = [*cases.words_of(launch), str(REPO / script), *cases.words_of(options), *flags]
        before = files_of(folder)
        capfd.readouterr()
        with streams():
            try:
                status = preflight.main(words)
            except SystemExit as ended:  # by tyro, where a flag's value cannot be parsed
                status = ended.code
        plan, mistakes = capfd.readouterr()
        assert files_of(folder) == before
        return status, plan, mistakes

    return ask


def check_mistake(answer, words, name=None):
    """One line has all the words, which bars separate, and there is no other line."""
    status, plan, mistakes = answer
    lines = mistakes.splitlines()
    assert status == 2, plan + mistakes
    for line in lines:
        assert line.startswith("preflight: error: "), mistakes
        assert len(line) < 500 and line.isprintable(), mistakes
    wanted = words if isinstance(words, list) else words.split(" | ")
    assert any(all(word in line for word in wanted) for line in lines), f"{wanted}\n{mistakes}"
    assert len(lines) == 1 or name in TWO_LINES, mistakes


def check_plan(answer, words):
    """Nothing is wrong, and the plan has all the words, which bars separate."""
    status, plan, mistakes = answer
    assert (status, mistakes) == (0, ""), plan + mistakes
    in_one_line = " ".join(plan.split())
    assert [word for word in words.split(" | ") if word not in in_one_line] == [], plan
    assert all(line.isprintable() for line in plan.splitlines())


# ---------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("name", "script"), one_script_each(cases.CASES, lambda entry: (*entry[2:],)[0])
)
def test_mistake_is_told_in_one_line(name, script, ask, folder, monkeypatch):
    make, words, *_ = cases.CASES[name]
    if name == "reward: file hangs":
        monkeypatch.setattr(preflight, "IMPORT_TIMEOUT", 2)
    launch = cases.EIGHT_GPUS if name.startswith("GPUs") else {}
    options = cases.good_options(folder, script) | make(folder)
    check_mistake(ask(script, options, **launch), words, name)


@pytest.mark.parametrize(("name", "script"), one_script_each(cases.LAUNCHES, given_scripts))
def test_machines_that_do_not_fit_are_told_after_the_plan(name, script, ask, folder):
    launch, options, words, *_ = cases.LAUNCHES[name]
    launch = launch(folder) if callable(launch) else launch
    answer = ask(script, cases.good_options(folder, script) | options, **launch)
    check_mistake(answer, words)
    if "memory" in name:
        assert "memory" in answer[1]


@pytest.mark.parametrize("name", cases.FORKS)
def test_fork_that_cannot_be_checked_says_what_it_lacks(name, ask, folder):
    make, words = cases.FORKS[name]
    options = cases.good_options(folder, ASYNC[0])
    check_mistake(ask(make(folder), options), words, name)


@pytest.mark.parametrize("name", cases.FLAGS)
def test_flag_that_cannot_be_parsed_is_named(name, ask, folder):
    flags, words = cases.FLAGS[name]
    answer = ask("ppo_sync.py", cases.good_options(folder, "ppo_sync.py"), *flags.split())
    if name in ("unknown", "misspelt"):
        check_mistake(answer, words)
    status, _, mistakes = answer
    assert status == 2
    assert "Traceback" not in mistakes
    assert [word for word in words.split(" | ") if word not in mistakes] == []


@pytest.mark.parametrize(
    ("name", "script"),
    one_script_each(cases.ENVIRONMENTS, lambda entry: (*entry[2:], cases.EVERY)[0]),
)
def test_what_another_launcher_has_left_is_named(name, script, ask, folder, monkeypatch):
    variables, words, *_ = cases.ENVIRONMENTS[name]
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    check_mistake(ask(script, cases.good_options(folder, script)), words)


@pytest.mark.parametrize(
    ("name", "script"), one_script_each(cases.SURROUNDINGS, lambda _: cases.EVERY)
)
def test_disk_and_accounts_are_looked_at(name, script, ask, folder, monkeypatch):
    arrange, options, words = cases.SURROUNDINGS[name]
    arrange(monkeypatch, folder)
    check_mistake(ask(script, cases.good_options(folder, script) | options), words)


def test_disk_is_that_of_the_machine_where_it_runs(ask, folder, monkeypatch):
    """This one's is a mistake where the GPUs are here, or none, else a note; or it is named."""
    cases.little_room(monkeypatch, folder)
    options = cases.good_options(folder, "ppo_sync.py")
    elsewhere = {"num_gpus": 1, "gpu_memory": 24.0}
    check_plan(ask("ppo_sync.py", options, **elsewhere), "10 MiB free | needed | say --disk")
    check_mistake(ask("ppo_sync.py", options, **elsewhere, disk=0.01), "9 MiB free")
    status, plan, mistakes = ask("ppo_sync.py", options, **elsewhere, disk=1.0)
    assert (status, mistakes) == (0, "") and "MiB free" not in plan
    monkeypatch.setattr(preflight.torch.cuda, "device_count", lambda: 1)
    check_mistake(ask("ppo_sync.py", options, gpu_memory=24.0), "10 MiB free")


@pytest.mark.parametrize("rate", [1e-6, 1e-5])
def test_rate_that_is_low_for_adapters_is_noted(rate, ask, folder, monkeypatch):
    monkeypatch.setattr(preflight, "ASK_VLLM", "")
    options = cases.good_options(folder, "ppo_sync.py") | {"learning_rate": rate}
    assert "ten times" not in ask("ppo_sync.py", options)[1]
    answer = ask("ppo_sync.py", options | {"lora_rank": 8})
    check_plan(answer, "adapters of policy and value model | policy, frozen")
    note = f"--learning_rate {rate:g}: with adapters the rate is about ten times"
    assert (note in answer[1]) == (rate == 1e-6)


def test_adapters_in_float32_are_for_cpus(ask, folder, monkeypatch):
    """vLLM's kernels on a GPU refuse them, when all models are loaded."""
    monkeypatch.setattr(preflight, "ASK_VLLM", "")
    options = cases.good_options(folder, "ppo_sync.py") | {"lora_rank": 8, "dtype": "float32"}
    check_plan(ask("ppo_sync.py", options), "adapters of policy")
    on_gpu = {"num_gpus": 1, "gpu_memory": 24.0, "disk": 100.0}
    check_mistake(ask("ppo_sync.py", options, **on_gpu), "--lora_rank | --dtype bfloat16")
    options["dtype"] = "bfloat16"
    check_plan(ask("ppo_sync.py", options, **on_gpu), "adapters of policy")


@pytest.mark.parametrize("is_there", [True, False])
def test_vllm_is_asked_where_it_is(is_there, ask, folder, monkeypatch):
    """A laptop may lack it."""
    monkeypatch.setattr(preflight, "ASK_VLLM", "import sys; sys.exit(3)")
    if not is_there:
        monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: None)
    options = cases.good_options(folder, "ppo_sync.py")
    check_plan(ask("ppo_sync.py", options), "weights of policy")  # it is not asked in vain
    answer = ask("ppo_sync.py", options | {"lora_rank": 8})
    if is_there:
        check_mistake(answer, "--lora_rank | vLLM's Qwen2ForCausalLM takes no adapters")
    else:
        check_plan(answer, "adapters of policy")


@pytest.mark.parametrize(("name", "script"), one_script_each(cases.SHARED_GPUS, lambda _: SCRIPTS))
def test_gpu_that_cannot_be_shared_is_told(name, script, ask, folder, monkeypatch):
    """Nothing is wrong where vLLM has one of its own."""
    arrange, words = cases.SHARED_GPUS[name]
    arrange(monkeypatch, folder)
    monkeypatch.setattr(preflight.torch.cuda, "device_count", lambda: 2)
    options = cases.good_options(folder, script)
    shared = ask(script, options, gpu_memory=24.0)
    if words is None:
        check_plan(shared, "learners 1")
    else:
        check_mistake(shared, f"{words} | or give vLLM GPUs of its own (--vllm_gpus)")
    check_plan(ask(script, options | {"vllm_gpus": "1"}, gpu_memory=24.0), "learners 1")


def test_gpus_of_another_machine_may_be_shared_whatever_this_one_is(ask, folder, monkeypatch):
    cases.wsl(monkeypatch, folder)
    cases.exclusive(monkeypatch, folder)
    options = cases.good_options(folder, "ppo_sync.py")
    check_plan(ask("ppo_sync.py", options, num_gpus=1, gpu_memory=24.0), "learners 1")


@pytest.fixture
def hub_that_does_not_work(request, monkeypatch):
    constants = huggingface_hub.constants
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    preflight.hub_answers.cache_clear()
    with cases.hub(request.param) as address:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        yield
    preflight.hub_answers.cache_clear()


HUBS = [
    pytest.param(kind, marks=pytest.mark.slow if kind in ("silent", "full") else ())
    for kind in cases.HUBS[1]
]


@pytest.mark.parametrize("hub_that_does_not_work", HUBS, indirect=True)
def test_hub_that_does_not_work_is_asked_once(hub_that_does_not_work, ask, folder):
    options = cases.good_options(folder, "ppo_sync.py") | {"dataset": "no/such"}
    check_mistake(ask("ppo_sync.py", options), cases.HUBS[0])
    assert preflight.hub_answers.cache_info().misses == 1


# -------------------------------------------------------------------------------------- good plans


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "script"),
    [
        pytest.param(name, script, id=f"{name}, {Path(script).stem}")
        for name, entry in cases.PLANS.items()
        for script in given_scripts(entry)
    ],
)
def test_plan_says_what_will_be_done(name, script, ask, folder):
    make, words, *_ = cases.PLANS[name]
    check_plan(ask(script, cases.good_options(folder, script) | make(folder)), words)


@pytest.mark.parametrize(("name", "script"), one_script_each(cases.LAUNCHED, lambda _: SCRIPTS))
def test_plan_is_of_the_machines_that_are_named(name, script, ask, folder):
    launch, options, words = cases.LAUNCHED[name]
    check_plan(ask(script, cases.good_options(folder, script) | options, **launch), words)


@pytest.mark.parametrize("script", cases.EVERY)
def test_model_of_the_hub_is_built_from_its_config(script, ask, folder, monkeypatch):
    monkeypatch.setattr(preflight, "is_local", lambda path: False)
    plan = ask(script, cases.good_options(folder, script))
    check_plan(plan, "learners 1 | AdamW's moments | 0.5 MiB for the final model")


def test_mistakes_are_printed_where_there_can_be_no_plan_of_engines(ask, folder):
    options = cases.good_options(folder, "ppo_sync.py") | {"vllm_tensor_parallel_size": 0}
    answer = ask("ppo_sync.py", options | {"vllm_gpus": "1"}, num_gpus=2)
    check_mistake(answer, "--vllm_tensor_parallel_size is 0")


def test_empty_truth_is_no_wrong_answer(ask, folder):
    rows = [cases.ROW, cases.ROW | {"reward_model": {"ground_truth": ""}}] * 35
    options = cases.good_options(folder, "ppo_sync.py")
    options["dataset"] = write_rows(folder / "empty.jsonl", rows)
    check_plan(ask("ppo_sync.py", options), "debug/sorting scores 1, a wrong answer 0")


@pytest.mark.slow
@pytest.mark.parametrize("script", ["ppo_vllm_async.py", *cases.TRAINER])
def test_defaults_train_a_model(script, ask, monkeypatch):
    monkeypatch.chdir(REPO)  # which has debug assets
    before = files_of(REPO / "debug_assets") | dict.fromkeys(REPO.iterdir())
    check_plan(ask(script, {}), "learners 1")
    assert files_of(REPO / "debug_assets") | dict.fromkeys(REPO.iterdir()) == before


def test_memory_is_the_sum_of_its_parts(ask, folder):
    options = cases.good_options(folder, "ppo_sync.py")
    options["vllm_gpus"] = "2"
    _, plan, _ = ask("ppo_sync.py", options, num_processes=2, num_gpus=3, gpu_memory=80.0)
    units = {"GiB": 1024, "MiB": 1}
    whole, of_vllm = re.search(r"memory .*?([\d.]+) (GiB)", plan), plan.index("of vLLM:")
    parts = re.findall(r"^ +([\d.]+) (GiB|MiB)  ", plan[:of_vllm], re.MULTILINE)
    assert len(parts) >= 5
    total = sum(float(number) * units[unit] for number, unit in parts)
    assert total == pytest.approx(float(whole[1]) * units[whole[2]], abs=60)  # as it is rounded


@pytest.mark.parametrize("file", ["one_gpu.yaml", "ddp.yaml"])
def test_gradients_are_there_once_in_every_pass(file):
    """Also in those of models that are not trained, of which there are none."""
    run = fits.launch("ppo_sync", "0.6", 80, file, learners=2 if file == "ddp.yaml" else 1)
    trained = sum(map(plan.count_parameters, (run.model, run.value_model)))
    for rows in (1, 1000):
        changes = {"micro_batch_tokens": 0, "local_rollout_forward_batch_size": rows}
        other = plan.with_changes(run, changes)
        name, parts = plan.learner_memory(other)
        assert ("reference policy" in name) == (rows > 1)
        assert parts["gradients"] == 4 * trained


@pytest.mark.parametrize(("gpu_memory", "chunk"), [(80, 2**27), (None, 2**25)])
def test_logits_are_in_the_chunks_of_the_device(gpu_memory, chunk):
    run = fits.launch("grpo_vllm_async", "0.6", gpu_memory, "one_gpu.yaml")
    assert plan.pass_parts(run, run.model, 4, is_trained=False)["logits"] == 16 * chunk


def test_mask_takes_memory_beyond_a_sliding_window_alone(monkeypatch):
    run = fits.launch("ppo_sync", "0.6", 80, "one_gpu.yaml")
    config = run.value_model.config
    activations = []
    for window in (None, run.max_length(), 512):
        monkeypatch.setattr(config, "sliding_window", window)
        parts = plan.pass_parts(run, run.value_model, 4, is_trained=False)
        activations.append(parts["activations"])
    without, at_most, beyond = activations
    assert without == at_most
    # In bfloat16, of half a layer
    assert beyond - without == pytest.approx(4 * run.max_length() ** 2)


def test_scores_take_memory_in_float32_with_fewer_key_heads(monkeypatch):
    run = fits.launch("ppo_sync", "0.6", 80, "one_gpu.yaml")
    config, activations = run.value_model.config, {}
    for dtype in ("bfloat16", "float32"):
        monkeypatch.setattr(run.args, "dtype", dtype)
        for key_heads in (8, 16):
            monkeypatch.setattr(config, "num_key_value_heads", key_heads)
            parts = plan.pass_parts(run, run.value_model, 4, is_trained=False)
            activations[dtype, key_heads] = parts["activations"]
    assert activations["bfloat16", 8] == activations["bfloat16", 16]
    # Of half a layer, as the mask
    scores = 4 * 16 * run.max_length() ** 2 * 4 / 2
    assert activations["float32", 8] - activations["float32", 16] == pytest.approx(scores)


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_shared_gpu_leaves_two_gib_to_cuda(share):
    """As set_per_process_memory_fraction in the scripts; one of its own has one context."""
    run = fits.launch("grpo_vllm_async", "0.6", 24, "one_gpu.yaml")
    run.args.vllm_gpu_memory_utilization = share
    assert plan.learner_room(run) == pytest.approx(24 * (1 - share) * GIB - 2**31)
    assert "CUDA" not in plan.learner_memory(run)[1]
    run.args.vllm_gpus = (1,)
    assert plan.learner_room(run) == 24 * GIB
    assert plan.learner_memory(run)[1]["CUDA"] == GIB


def test_keys_and_values_have_the_head_size_of_the_config():
    """Which in Qwen3-0.6B is not the hidden size by the heads: 128, and not 64."""
    run = fits.launch("grpo_vllm_async", "0.6", 24, "one_gpu.yaml")
    of_token = 28 * 8 * 128 * 2 * 2  # layers, key-value heads, head size, keys and values, bytes
    assert plan.cache_memory(run) == of_token * run.max_length()


def test_share_is_proposed_where_few_responses_are_sampled_at_once():
    run = fits.launch("grpo_vllm_async", "0.6", 24, "one_gpu.yaml")
    assert 25 <= plan.responses_at_once(run) <= 40
    share, words = plan.propose_share(run), preflight.room_for_responses(run)
    other = plan.with_changes(run, {"vllm_gpu_memory_utilization": share})
    more = plan.responses_at_once(other)
    assert more > plan.responses_at_once(run)
    assert words.endswith(f": few; with {share:g} there is room for {more}")
    preflight.check_memory(other)
    # A hundredth more would take what the learner is to keep
    assert plan.learner_room(other) - 1.1 * plan.learner_needs(other) < 0.24 * GIB


def test_share_is_not_larger_than_all_responses_need():
    run = fits.launch("grpo_vllm_async", "0.6", 24, "one_gpu.yaml")
    run.args.local_rollout_batch_size = 4  # of 8 responses
    share = plan.propose_share(run)
    enough = plan.with_changes(run, {"vllm_gpu_memory_utilization": share})
    fewer = plan.with_changes(run, {"vllm_gpu_memory_utilization": share - 0.01})
    assert plan.responses_at_once(enough) == 32 > plan.responses_at_once(fewer)


@pytest.mark.parametrize(
    ("name", "gpu_memory", "end"),
    [("grpo_vllm_async", 80, "prompts"), ("ppo_vllm_async", 24, "the rest; see --vllm_gpus")],
)
def test_no_share_is_proposed_without_need_or_room(name, gpu_memory, end):
    run = fits.launch(name, "0.6", gpu_memory, "one_gpu.yaml")
    assert preflight.room_for_responses(run).endswith(end)


# What is launched, on which GPUs: (script, size, GiB, launch, GPUs of a machine)
TOO_LARGE = {
    "a GPU": ("ppo_vllm_async", "0.6", 24, {"file": "one_gpu.yaml"}, 1),
    "one of eight": ("ppo_vllm_async", "8", 80, {"file": "one_gpu.yaml"}, 8),
    "eight": ("grpo_vllm_async", "4", 40, {"file": "ddp.yaml", "learners": 8}, 8),
    "eight, shared out": ("ppo_vllm_async", "14", 40, {"file": "fsdp2.yaml", "learners": 8}, 8),
    "two nodes": ("ppo_vllm_async", "8", 40, {"file": "ddp.yaml", "learners": 4, "nodes": 2}, 4),
}


def too_large(name):
    script, size, gpu_memory, launch, num_gpus = TOO_LARGE[name]
    run = fits.launch(script, size, gpu_memory, **launch)
    run.options.num_gpus = num_gpus
    return run


def words_to_launch(flags):
    """What the flags of a measure change in arguments, and in the launch."""
    launch = {name: flags[name] for name in ("num_processes", "num_machines") if name in flags}
    if "config_file" in flags:
        launch["variables"] = {"ACCELERATE_USE_FSDP": "true"}
    known = {*launch, "config_file"}
    arguments = {name: value for name, value in flags.items() if name not in known}
    if "vllm_gpus" in arguments:
        arguments["vllm_gpus"] = tuple(map(int, arguments["vllm_gpus"].split()))
    return arguments, launch


@pytest.mark.parametrize("name", TOO_LARGE)
def test_what_is_named_fits_and_has_no_flag_too_many(name):
    run = too_large(name)
    assert not plan.fits(run)
    found = plan.what_fits(run)
    assert found
    assert [len(flags) for flags, _ in found] == sorted(len(flags) for flags, _ in found)
    for flags, changed in found:
        arguments, launch = words_to_launch(flags)
        again = plan.with_changes(run, arguments, **launch)
        assert plan.fits(changed) and plan.fits(again), flags
        assert plan.learner_needs(again) == plan.learner_needs(changed)
        for flag in arguments.keys() - {"vllm_gpus"}:
            fewer = {key: value for key, value in arguments.items() if key != flag}
            assert not plan.fits(plan.with_changes(run, fewer, **launch)), (flags, flag)


@pytest.mark.parametrize("name", TOO_LARGE)
def test_only_gpus_that_are_there_are_named(name):
    run = too_large(name)
    machines, num_gpus = run.options.num_machines, run.options.num_gpus
    for flags, changed in plan.what_fits(run):
        own = changed.args.vllm_gpus
        assert changed.options.num_machines == machines
        assert changed.options.local_processes() + len(own) <= num_gpus, flags
        assert all(changed.options.local_processes() <= gpu < num_gpus for gpu in own)


@pytest.mark.parametrize("name", ["one of eight", "eight", "two nodes"])
def test_gpus_that_are_there_are_shared_out(name):
    run = too_large(name)
    changed = [changed for _, changed in plan.what_fits(run) if changed.options.num_shards()]
    whole = run.options.num_machines * run.options.num_gpus
    assert whole in [each.options.num_shards() for each in changed]


def test_newcomer_with_a_gpu_of_24_gb_is_told_what_fits(monkeypatch):
    """Adapters, and what needs no adapters but less of vLLM."""
    monkeypatch.setattr(fits, "RESPONSE", 64)
    monkeypatch.setattr(fits, "PROMPT", 64)
    run = fits.launch("ppo_vllm_async", "0.6", 24, "one_gpu.yaml")
    run = plan.with_changes(run, {"micro_batch_tokens": 128})
    with pytest.raises(preflight.Mistake) as raised:
        preflight.check_memory(run)
    message = preflight.one_line(raised.value)
    assert "this fits: --lora_rank 16: " in message
    assert re.search(r"; --beta 0 --vllm_gpu_memory_utilization 0\.1\d?: [\d.]+ GiB of", message)
    assert "num_processes" not in message and "vllm_gpus" not in message


@pytest.mark.parametrize(("share", "is_larger"), [(0.05, True), (0.8, False)])
def test_share_of_vllm_is_named_where_it_alone_is_wrong(share, is_larger):
    """A learner would fit, or the engine; with the share that is named both do."""
    run = fits.launch("grpo_vllm_async", "0.6", 24, "one_gpu.yaml")
    run.args.vllm_gpu_memory_utilization = share
    flags, changed = plan.what_fits(run)[0]
    assert list(flags) == ["vllm_gpu_memory_utilization"]
    assert (flags["vllm_gpu_memory_utilization"] > share) == is_larger
    assert plan.engine_needs(changed) <= plan.engine_room(changed)


def test_engine_that_its_own_gpu_is_too_small_for_gets_two():
    run = fits.launch(
        "grpo_vllm_async", "14", 24, "fsdp2.yaml", learners=6, vllm_gpus=(6, 7), rank=16
    )
    assert plan.what_fits(run)[0][0] == {"vllm_tensor_parallel_size": 2}


def test_largest_model_that_fits_is_named_where_no_flags_help():
    run = fits.launch("ppo_vllm_async", "4", 24, "one_gpu.yaml")
    with pytest.raises(preflight.Mistake, match=r"no flags .*Qwen3-1\.7B, with --lora_rank 16: "):
        preflight.check_memory(run)
    assert plan.fits(fits.launch("ppo_vllm_async", "1.7", 24, "one_gpu.yaml", rank=16))
    run.options.gpu_memory = 2
    with pytest.raises(preflight.Mistake, match=r"no flags .*; it takes a smaller model"):
        preflight.check_memory(run)


ADVICE = [
    ("ppo_vllm_async.py", {"gradient_checkpointing": False}, {"num_processes": 1}),
    ("ppo_sync.py", {"beta": 0.1}, {"num_processes": 8}),
    ("grpo_vllm_async.py", {"dtype": "float32"}, {"config_file": cases.SHARDED}),
]


@pytest.mark.parametrize(("script", "options", "launch"), ADVICE)
def test_advice_on_memory_is_what_the_plan_says_then(
    script, options, launch, ask, folder, monkeypatch
):
    monkeypatch.setattr(preflight, "in_words", lambda count: f"{round(count)} bytes")
    monkeypatch.setattr(preflight, "ASK_VLLM", "")
    launch = launch | {"num_gpus": 16, "gpu_memory": 1.5}
    options = cases.good_options(folder, script) | options | {"response_length": 500}
    options["vllm_gpu_memory_utilization"] = 0.9
    _, _, mistakes = ask(script, options, **launch)
    _, _, advice = mistakes.partition("this fits: ")
    advice = re.findall(r"(--[^:]*): (\d+ bytes) of (\d+ bytes)", advice)
    assert advice, mistakes
    for flags, need, room in advice:
        words = dict(re.findall(r"--(\w+)((?: [^-\s]\S*)*)", flags))
        words = {name: value.strip() or True for name, value in words.items()}
        changes = {}
        for name in ("num_processes", "config_file"):
            if name in words:
                changes[name] = words.pop(name)
        answer = ask(script, options | words, **launch | changes)
        check_plan(answer, f"of a learner: about {need}, of the {room}")


def adapted(name, size, gpu_memory, file="one_gpu.yaml", **numbers):
    return fits.launch(name, size, gpu_memory, file, rank=16, **numbers)


@pytest.mark.parametrize("rank", [0, 4])
def test_trained_parameters_are_those_that_peft_trains(rank, monkeypatch):
    shape = (64, 2, 4, 2, 128, True)
    run = fits.launch("ppo_vllm_async", "0.6", 24, "one_gpu.yaml", rank=rank)
    for model in plan.build(transformers.Qwen2Config, shape, vocab_size=50):
        expected = plan.count_trained(run, model)
        if rank:
            model.requires_grad_(False)
            config = peft.LoraConfig(
                r=rank,
                target_modules="all-linear",
                exclude_modules=["score"],
                task_type="CAUSAL_LM",
            )
            peft.inject_adapter_in_model(config, model)
            if hasattr(model, "score"):
                model.score.requires_grad_(True)
        assert sum(p.numel() for p in model.parameters() if p.requires_grad) == expected


def test_adapters_take_16_bytes_a_parameter_and_the_base_two():
    run = adapted("ppo_vllm_async", "0.6", 24)
    # Queries, keys and values, output; gate and up, down: of 28 layers
    features = (1024 + 2048) + 2 * (1024 + 1024) + (2048 + 1024) + 3 * (1024 + 3072)
    trained = 2 * 16 * 28 * features + 1024  # with the value head
    _, parts = plan.learner_memory(run)
    assert parts["adapters of policy and value model"] == parts["gradients"] == 4 * trained
    assert parts["AdamW's moments"] == 8 * trained
    assert parts["policy, frozen"] == 2 * plan.count_parameters(run.model)
    assert parts["value model, frozen"] == 2 * plan.count_parameters(run.value_model)
    assert plan.checkpoints_on_disk(run)[1] == 12 * trained
    own = (trained - 1024) // 2
    assert plan.final_model(run) == 4 * (plan.count_parameters(run.model) + own)


def test_reference_policy_is_the_policy_without_its_adapter():
    run = adapted("grpo_vllm_async", "0.6", 24)
    without = plan.with_changes(run, {"beta": 0.0})
    with_one = plan.with_changes(run, {"beta": 0.1})
    assert plan.learner_memory(with_one) == plan.learner_memory(without)
    # It has a pass of its own, with more rows
    rows = {"beta": 0.1, "micro_batch_tokens": 0, "local_rollout_forward_batch_size": 1000}
    name, parts = plan.learner_memory(plan.with_changes(run, rows))
    assert "passes of the reference policy" in name and "reference policy, frozen" not in parts


def test_frozen_head_has_a_copy_in_float32_and_no_gradient():
    run = adapted("grpo_vllm_async", "8", 80)
    parts = plan.pass_parts(run, run.model, 2, is_trained=True)
    assert parts["float32 copy of the head"] == 4 * 151_936 * 4096
    assert "gradients of embedding and head" not in parts


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 1.05), ("float32", 1.15)])
def test_activations_of_adapters_are_what_pytorch_keeps(dtype, most, monkeypatch):
    """The difference of four layers and two, by what autograd saves on a CPU."""
    monkeypatch.setattr(fits, "PROMPT", 64)
    monkeypatch.setattr(fits, "RESPONSE", 64)
    run = fits.launch("grpo_vllm_async", "0.6", None, "one_gpu.yaml", rank=4)
    run = plan.with_changes(run, {"dtype": dtype, "gradient_checkpointing": False})
    kept, planned = [], []
    for layers in (2, 4):
        shape = (64, layers, 4, 4, 192, True)
        planned.append(
            plan.pass_parts(run, plan.build(transformers.Qwen2Config, shape, 50)[0], 2, True)
        )
        config = transformers.Qwen2Config(
            vocab_size=50,
            hidden_size=64,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            intermediate_size=192,
        )
        model = transformers.AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype))
        model.requires_grad_(False)
        adapters = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        peft.inject_adapter_in_model(adapters, model)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        kept.append(saved_bytes(model.train(), dtype))
    measured = kept[1] - kept[0]
    expected = sum(planned[1].values()) - sum(planned[0].values())
    assert 0.95 * measured <= expected <= most * measured


def saved_bytes(model, dtype):
    """Bytes that autograd keeps of a forward pass over two rows of 128 tokens, but weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = (storage.nbytes(), tensor)  # which keeps it
        return tensor

    token_ids = torch.zeros(2, 128, dtype=torch.int64)
    with (
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"),
    ):
        hidden = model.base_model(token_ids, use_cache=False).last_hidden_state
    assert hidden.dtype == getattr(torch, dtype)  # the residual stream
    return sum(size for size, _ in saved.values())


def test_adapters_are_shared_out_with_the_rest():
    run = adapted("ppo_vllm_async", "8", 80, "fsdp2.yaml", learners=8)
    alone = adapted("ppo_vllm_async", "8", 80)
    _, parts = plan.learner_memory(run)
    _, whole = plan.learner_memory(alone)
    for part in ("policy, frozen", "adapters of policy and value model", "AdamW's moments"):
        assert 8 * parts[part] == pytest.approx(whole[part])
    # Gathered in bfloat16 and without gradients: less than of weights that are trained
    full = fits.launch("ppo_vllm_async", "8", 80, "fsdp2.yaml", learners=8)
    assert parts["gathered by FSDP2"] < plan.learner_memory(full)[1]["gathered by FSDP2"] / 2


@pytest.mark.parametrize("gpu_memory", [80, None])
def test_merged_model_is_in_the_memory_of_the_machine(gpu_memory):
    """Which without GPUs is the learner's."""
    run = adapted("grpo_vllm_async", "8", gpu_memory)
    name, parts = plan.learner_memory(run)
    assert ("merged" in name) == (gpu_memory is None)
    merged = 4 * plan.count_parameters(run.model)
    assert parts.get("merged model, float32", merged) == merged


def test_vllm_has_two_versions_of_an_adapter():
    run = adapted("grpo_vllm_async", "0.6", 24)
    without = plan.with_changes(run, {"lora_rank": 0})
    more = plan.engine_memory(run) - plan.engine_memory(without)
    assert more == 2 * 2 * plan.count_trained(run, run.model)


@pytest.mark.parametrize("script", SCRIPTS)
def test_reference_policy_takes_memory_where_there_is_one(script, ask, folder):
    options = cases.good_options(folder, script)
    for beta in (0.0, 0.01):
        _, plan, _ = ask(script, options | {"beta": beta})
        assert ("  reference policy" in plan) == (beta > 0)


WARM = [
    {"lam": 1.0},
    {"lam": 0.95, "value_warmup_steps": 2},
    {"lam": 0.95, "value_model_path": cases.MODEL},
]


@pytest.mark.parametrize("options", WARM, ids=["lambda 1", "warm-up", "value model"])
def test_values_that_are_warm_are_not_warned_of(options, ask, folder):
    _, plan, mistakes = ask("ppo_sync.py", cases.good_options(folder, "ppo_sync.py") | options)
    assert mistakes == "" and "--lam" not in plan


def test_fork_is_checked_as_it_is(ask, folder):
    """With its own flag, reward and neighbours."""
    text = (REPO / "ppo_sync.py").read_text()
    own_reward = 'if data_source == "mine":\n        return neighbour.SCORE\n    '
    for old, new in (
        ("import contextlib\n", "import contextlib\nimport neighbour\n"),
        ("    seed: int = 1\n", '    my_flag: int = 0\n    """mine"""\n    seed: int = 1\n'),
        (
            'if data_source == "debug/sorting":\n',
            own_reward + 'if data_source == "debug/sorting":\n',
        ),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    write_text(folder / "fork.py", text)
    write_text(folder / "neighbour.py", "SCORE = 0.75\n")
    rows = [cases.ROW | {"data_source": "mine"}] * 70
    options = cases.good_options(folder, "ppo_sync.py") | {"my_flag": 3}
    options["dataset"] = write_rows(folder / "mine.jsonl", rows)
    check_plan(ask(folder / "fork.py", options), "Plan of fork.py | mine scores 0.75")


def test_fork_without_an_argument_has_a_plan_without_it(ask, folder):
    fork = cases.rename("gradient_checkpointing")(folder)
    words = "learners 1 | Args have no gradient_checkpointing | reward 1 x compute_score"
    check_plan(ask(fork, cases.good_options(folder, "ppo_sync.py")), words)


# ------------------------------------------------------------------------------------- checkpoints


STEP_3 = {"resume_from_checkpoint": "output/run/checkpoints/step_3"}


def options_to_resume(folder, script, changes):
    changes = changes(folder) if callable(changes) else changes
    return cases.options_of_run(folder, script) | STEP_3 | changes


@pytest.mark.slow
@pytest.mark.parametrize(("name", "script"), one_script_each(cases.CHECKPOINTS, given_scripts))
def test_checkpoint_that_cannot_be_resumed_is_told(name, script, ask, folder):
    damage, changes, words, *_ = cases.CHECKPOINTS[name]
    cases.save_run(folder, script)
    damage(folder / "output" / "run")
    check_mistake(ask(script, options_to_resume(folder, script, changes)), words, name)


@pytest.mark.parametrize("name", cases.OTHER_SCRIPTS)
def test_checkpoint_of_another_script_is_told(name, ask, folder):
    writer, script, words = cases.OTHER_SCRIPTS[name]
    cases.save_run(folder, writer)
    check_mistake(ask(script, options_to_resume(folder, script, {})), words)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "script"),
    [
        pytest.param(name, script, id=f"{name}, {Path(script).stem}")
        for name, entry in cases.RESUMED.items()
        for script in given_scripts(entry)
    ],
)
def test_plan_says_what_is_resumed(name, script, ask, folder):
    happened, changes, words, *_ = cases.RESUMED[name]
    cases.save_run(folder, script)
    happened(folder / "output" / "run")
    check_plan(ask(script, options_to_resume(folder, script, changes)), words)


def test_checkpoint_of_one_rank_is_one_of_two_with_half_the_batch(ask, folder):
    cases.save_run(folder, "ppo_sync.py")
    options = options_to_resume(folder, "ppo_sync.py", {})
    halves = {"local_rollout_batch_size": 32, "local_mini_batch_size": 32}
    check_plan(ask("ppo_sync.py", options | halves, num_processes=2), "resumes")
    quarter = halves | {"local_mini_batch_size": 16}
    answer = ask("ppo_sync.py", options | quarter, num_processes=2)
    check_mistake(answer, "; mini_batch_size was 64 and is 32; num_updates was 10 and is 20")


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_checkpoint_that_a_script_has_written_is_good(script, ask, few_prompts, run_main, folder):
    changes = {"output_dir": folder, "eval_dataset": few_prompts / "test.parquet", "save_freq": 1}
    changes["eval_prompts"] = 2
    run_main(script, **changes)
    options = options_of(script, few_prompts, folder) | changes
    options["resume_from_checkpoint"] = "latest"
    check_plan(ask(script, options), "resumes | run/checkpoints/step_2")
    check_mistake(ask(script, options | {"eval_prompts": 0}), "eval_prompts was 2 and is 0")


# -------------------------------------------------------------------------------- the real command


def run_command(words, variables=None):
    command = [sys.executable, str(REPO / "scripts" / "preflight.py"), *map(str, words)]
    result = subprocess.run(
        command, env=environment(variables), capture_output=True, text=True, timeout=120
    )
    return result.returncode, result.stdout, result.stderr


def command_words(folder, script, **changes):
    options = cases.good_options(folder, script) | changes
    return [REPO / script, *cases.words_of(options)]


@pytest.mark.slow
@pytest.mark.parametrize("script", ["grpo_vllm_async.py", *cases.TRAINER])
def test_command_prints_the_plan_and_writes_nothing(script, folder):
    words = ["--num_processes", "1", *command_words(folder, script)]
    before = files_of(folder)
    check_plan(run_command(words), "learners 1")
    assert files_of(folder) == before


@pytest.mark.slow
def test_command_ends_with_status_2_and_a_line_for_each_mistake(folder):
    """In a terminal that knows ASCII alone."""
    data = write_rows(folder / "data.jsonl", cases.TWO)
    changes = {"seed": -1, "dataset": data, "eval_dataset": "donn\u00e9es.jsonl"}
    words = command_words(folder, "ppo_sync.py", **changes)
    status, plan, mistakes = run_command(words, {"PYTHONIOENCODING": "ascii:strict"})
    assert status == 2
    assert r"\x1b[31mgsm8k, fran\xe7ais scores 1" in " ".join(plan.split())
    first, second = mistakes.splitlines()
    assert "--seed is -1" in first and r"donn\xe9es.jsonl: no such file" in second


@pytest.mark.parametrize(
    ("truth", "expected"),
    [
        ("12358", True),
        ("x + 1", True),
        (7, True),
        ('{"N": 3}', False),
        ('["a"]', False),
        ([1], False),
    ],
)
def test_ground_truth_that_is_a_rule_is_not_tried_as_an_answer(truth, expected):
    assert preflight.is_answer(SimpleNamespace(ground_truth=truth)) == expected

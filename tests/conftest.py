"""How this suite works.

Fast and slow. A test that starts vLLM or other processes, or waits for seconds, has the mark
`slow`; the others take two minutes together.
    bash scripts/test.sh                          all of them
    bash scripts/test.sh fast                     those without the mark
    .venv/bin/python -m pytest -k gae             some, by name
    .venv/bin/python -m pytest tests/test_engine.py::test_seed_reaches_the_engine
Fast tests run on a CPU with one process; what needs a real run of a script gets it from a fixture
(vllm_run below, grpo_run in test_grpo.py, ...), so that many tests look at one run.

Three scripts, one text. Functions that the scripts share are tested through ppo_sync.py alone;
test_scripts_agree.py holds the other scripts to the same text. What the scripts do not share, the
order of the steps in main(), is tested in each of them in test_loop.py, with a stub in place of
vLLM, in seconds. What vLLM and a process of its own add to that is shown for real in test_runs_*.py
and test_faults.py, by one script, or by a synchronous and an asynchronous one.
Until the other two follow, ppo_vllm_async.py has another text: what has changed in its functions is
tested in test_async_parts.py, and what it refuses in test_mistakes.py.

Which file.
    test_losses         masked statistics, GAE, losses, KL, learning rate, group advantages
    test_forward        log-probabilities, values, padding, gradients, micro-batches, ranks
    test_checkpoints    what is read from a model's folder and written to it
    test_dataset        prompts from files, and which of them a step takes
    test_scoring        from a response to its score
    test_graders        the rules that say whether an answer is right
    test_engine         class VLLM, its process and its weights; the transformers backend
    test_weight_sync    weights that travel by CUDA's ways, on a device that is faked
    test_ranks          which engines are where, who answers what, ranks that wait for each other
    test_loop           main() of the three scripts with a stub of vLLM: its steps, what ends it
    test_resume         checkpoints: a run that was interrupted goes on as if it had not been
    test_grpo           GRPO's own: its loss, and a run
    test_runs_sync, test_runs_transformers, test_runs_async
                        real runs: metrics recomputed, two ranks, the same bits, staleness
    test_runs_ranks     runs of several ranks, engines and nodes, and how they end together
    test_faults         how a run can end: dead engine, hung reward, Ctrl-C, ...
    test_gpu_check      scripts/gpu_check.sh: its first parts on this machine, and a part that fails
    test_bad_input      one line and status 2 for what a user gets wrong
    test_closed_doors   the same for what disks, downloads, launchers and hubs do to users
    test_mistakes       what ppo_vllm_async.py refuses, by exceptions
    test_async_parts    its functions, where ppo_sync.py's are others
    test_ends_async     how its runs can end, and that nothing is left of them
    test_rewards_async  its reward workers, and all that a reward can do to them
    test_weight_sync_async
                        its weights by CUDA's ways, on a device that is faked
    test_reward_model, test_code_sandbox, test_if_constraints, test_data_preprocess
                        a script of scripts/ each
    test_pictures       the curves and the last lines of a run
    test_scripts_agree, test_doctests, test_budget
    test_docs           README.md and docs/: what they point at is there

Helpers, in tests/helpers.
    rollouts            tiny models and a made-up batch of unequal lengths
    preference_pairs    the same for the reward model's training
    formulas            definitions written out, to compare with
    runs                what is in the folder of a run
    files               rows and texts for the scripts to read
    processes           starting, watching and ending processes
    engines             an engine without vLLM: at the other end of its pipe is the test
    loops               main() of a script with a stub of vLLM, and what was seen of it
    hooks               all places where tests stand in the way of a script's functions
    saving_batches, wrapped_async, on_ranks, broken_sync, vllm_answers,
    two_rank_gradient, two_rank_waiting, two_rank_sync
                        programs that tests start
    faked_cuda, faked_cuda_async, stub_vllm
                        in place of CUDA, and of vLLM
    endings, async_hooks
                        what is left of a run of ppo_vllm_async.py; where tests stand in its way

How a fault is injected. In a function: monkeypatch. In a run: run_wrapped_script(script, fault,
folder) starts wrapped_async.py, which lays its fault into the script by a hook of hooks.py and then
calls main(); a new fault is a function there. From outside: start_script(...), and a signal to the
process or to one of its children (test_faults.py).

A new test: break what it tests once, and see it fail.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from helpers import REPO
from helpers.processes import end, environment, finish, flags_of
from helpers.runs import VLLM_OPTIONS

# The hub is out of bounds for tests; a name that is not a folder fails at once instead of after
# retries.
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="session")
def assets():
    subprocess.run(
        [sys.executable, "scripts/make_debug_assets.py"], cwd=REPO, check=True, capture_output=True
    )
    return REPO / "debug_assets"


@pytest.fixture(scope="session")
def small_eval(assets, tmp_path_factory):
    import datasets

    path = tmp_path_factory.mktemp("data") / "eval.parquet"
    datasets.Dataset.from_parquet(str(assets / "test.parquet")).select(range(32)).to_parquet(
        str(path)
    )
    return path


@pytest.fixture(scope="session")
def reward_model(assets, tmp_path_factory):
    """A one-label classifier of random weights, as transformers writes it."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    path = tmp_path_factory.mktemp("reward_model")
    config = AutoConfig.from_pretrained(assets / "model", num_labels=1, initializer_range=0.3)
    torch.manual_seed(5)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(path)
    AutoTokenizer.from_pretrained(assets / "model").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def accelerator():
    from accelerate import Accelerator

    return Accelerator(cpu=True)


@pytest.fixture
def saved_policy(tmp_path):
    """The folder of a policy with a wide head and with dropout."""
    from helpers.rollouts import tiny_language_model

    model = tiny_language_model(hidden_size=512, num_hidden_layers=1, attention_dropout=0.3)
    model.save_pretrained(tmp_path / "policy")
    return tmp_path / "policy"


@pytest.fixture(scope="session")
def start_script_of_session(assets):
    """Starts a script of the repository on the debug assets."""

    def start(script, folder, *extra, launcher=(), env=None, save_batches=False, **options):
        folder.mkdir(parents=True, exist_ok=True)
        defaults = {
            "output_dir": folder,
            "run_name": "run",
            "dataset": assets / "train.parquet",
            "model_name_or_path": assets / "model",
            "dtype": "float32",
            "response_length": 8,
            "total_episodes": 64,
            "local_rollout_batch_size": 16,
            "number_samples_per_prompt": 2,
            "local_mini_batch_size": 32,
            "per_device_train_batch_size": 8,
            "local_rollout_forward_batch_size": 32,
            "learning_rate": 5e-4,
            "value_learning_rate": 1e-3,
        }
        if save_batches:
            launcher = (*launcher, str(REPO / "tests" / "helpers" / "saving_batches.py"))
        if any("grpo" in str(part) for part in (script, *launcher)):
            del defaults["value_learning_rate"]
        command = [sys.executable, *launcher, str(script), *flags_of(defaults | options), *extra]
        with open(folder / "stdout", "w") as stdout, open(folder / "stderr", "w") as stderr:
            streams = {"stdin": subprocess.DEVNULL, "stdout": stdout, "stderr": stderr}
            # A session of its own, so that a test can press Ctrl-C; which a shell in the background
            # had us ignore.
            own = {
                "start_new_session": True,
                "preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            }
            process = subprocess.Popen(command, cwd=REPO, env=environment(env), **streams, **own)
        process.folder, process.run_dir = folder, folder / "run"
        return process

    return start


@pytest.fixture
def start_script(start_script_of_session):
    """The same, for a test that may leave the script running: it ends with the test."""
    started = []

    def start(*args, **options):
        started.append(start_script_of_session(*args, **options))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            end(process)


@pytest.fixture(scope="session")
def run_script(start_script_of_session):
    """Runs a script to its end: run_script("ppo_sync.py", tmp_path, beta=0.1) -> Run."""

    def run(script, folder, *extra, timeout=300, **options):
        started_at = time.monotonic()
        return finish(
            start_script_of_session(script, folder, *extra, **options), timeout, started_at
        )

    return run


@pytest.fixture(scope="session")
def run_wrapped_script(run_script):
    """run_wrapped_script("ppo_vllm_async.py", "generator", tmp_path) -> Run; wrapped_async.py."""
    wrapped = str(REPO / "tests" / "helpers" / "wrapped_async.py")

    def run(script, fault, folder, launcher=(), **options):
        return run_script(fault, folder, launcher=(*launcher, wrapped, script), **options)

    return run


@pytest.fixture(scope="session")
def vllm_run(run_script, small_eval, tmp_path_factory):
    run = run_script(
        "ppo_sync.py", tmp_path_factory.mktemp("vllm"), eval_dataset=small_eval, **VLLM_OPTIONS
    )
    assert run.returncode == 0, run.output
    return run


@pytest.fixture
def mount_disk(tmp_path):
    """mount_disk(2**20): the folder of a file system of its own, of so many bytes."""
    folder = tmp_path / "disk"

    def mount(size):
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("no right to mount a file system")
        return folder

    yield mount
    if folder.is_mount():
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="session")
def few_prompts(assets, tmp_path_factory):
    """Two small files of the debug prompts, and a model whose generation config names more."""
    import datasets

    folder = tmp_path_factory.mktemp("few_prompts")
    for name, count in (("train.parquet", 64), ("test.parquet", 8)):
        rows = datasets.Dataset.from_parquet(str(assets / name)).select(range(count))
        rows.to_parquet(str(folder / name))
    shutil.copytree(assets / "model", folder / "model")
    path = folder / "model" / "generation_config.json"
    # Without do_sample: transformers refuses to save it
    sampling = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
    path.write_text(json.dumps(json.loads(path.read_text()) | sampling))
    return folder


@pytest.fixture(scope="session")
def run_main(few_prompts, tmp_path_factory):
    """run_main("ppo_sync.py", score, beta=0.1): what was seen of a run; loops.py."""
    from helpers.loops import run_loop

    def run(name, score=None, **changes):
        return run_loop(name, few_prompts, tmp_path_factory.mktemp("loop"), score, **changes)

    return run

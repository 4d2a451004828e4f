"""How this suite works.

A test that starts vLLM or other processes, or waits for seconds, has the mark `slow`; the others
take two minutes together.
    bash scripts/test.sh                      all of them, two files at a time
    bash scripts/test.sh fast                 those without the mark
    .venv/bin/python -m pytest -k gae         some, by name
The tests of a file run in their order, in one process. What needs a real run of a script gets it
from a fixture, so that many tests look at one run. Functions that the scripts share are tested
through ppo_vllm_async.py alone; test_scripts_agree.py holds the other scripts to the same text.
main() is each script's own: test_loop.py and test_resume.py run it in all three, in seconds.

Which folder.
    algorithm    mathematics, passes, gradients; main() with a stub of vLLM, step by step
    data         from files to prompts, from responses to scores; what the scripts refuse
    engine       class VLLM, weight syncs, adapters, GPUs, several ranks
    life         how a run starts, resumes and ends; what machines lack
    programs     scripts/, each in a file of its own; recipes and the commands of the docs
    forks        scripts/forks, and the changes of docs/worked_changes*.md
    promise      what two documents name, one text in three scripts, budgets, docs
net.py makes the wrong changes of net.toml, each of which tests must notice.
Comparisons that are equal to the bit are made with commit 384dc96: scripts/dev/bits.py 384dc96.

What several files need is in helpers; what a file there has, its first line says.
A fault in a function: monkeypatch; in a run: a function of run_with_fault.py, by its fixture.
A new test: break what it tests once, and see it fail.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import pytest
import torch
from helpers import LORA, REPO
from helpers.processes import TWO_RANKS, end, environment, finish, flags_of

# The hub is out of bounds for tests; a name that is not a folder fails at once instead of after
# retries.
os.environ["HF_HUB_OFFLINE"] = "1"
# `datasets` would take a folder for another folder of its name in an earlier run
CACHE = tempfile.TemporaryDirectory(prefix="datasets_of_tests_")
os.environ["HF_DATASETS_CACHE"] = CACHE.name
# Models are tiny. One thread per core would wait for the others, on a busy machine for minutes
torch.set_num_threads(1)
# nohup ignores SIGHUP, and a shell in the background ignores SIGINT. Processes would inherit that,
# but tests send both
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
HANDLERS = [signal.getsignal(number) for number in SIGNALS]


@pytest.fixture(autouse=True)
def signals_as_before():
    """Restore what start_ranks sets, because processes of later tests would inherit it."""
    yield
    for number, handler in zip(SIGNALS, HANDLERS, strict=True):
        signal.signal(number, handler)
    os.environ.pop("FSDP_CPU_RAM_EFFICIENT_LOADING", None)


LONG = ["ends", "runs", "inflight", "adapters", "engine", "ranks", "fsdp2", "multiturn", "refill"]
LONG += ["preflight", "rewards", "resume", "failures", "gpu_check", "launch"]


def pytest_collection_modifyitems(items):
    """Run long files first, because the other process would wait for a long one at the end."""
    rank = {f"test_{name}": i for i, name in enumerate(LONG)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(LONG)))


@pytest.fixture(scope="session", autouse=True)
def no_default_of_accelerate():
    """Ignore what a user has set by `accelerate config`."""
    from accelerate.commands.config import config_args

    config_args.default_config_file = os.devnull


@pytest.fixture(scope="session")
def git():
    """Skip tests that call git if it is not installed."""
    if not shutil.which("git"):
        pytest.skip("git is not installed, and these tests call it")


@pytest.fixture(scope="session")
def import_fork():
    """import_fork("refill"): the module grpo_refill, which vLLM's process finds, too."""
    import fork

    return fork.import_fork


@pytest.fixture(scope="session")
def lora_forks(import_fork):
    """Return {file name: module} of each script's fork lora. run_main takes these names."""
    return {name: import_fork("lora", script) for name, script in LORA.items()}


@pytest.fixture(scope="session")
def assets():
    subprocess.run(
        [sys.executable, "scripts/train/debug/make_debug_assets.py"],
        cwd=REPO,
        check=True,
        capture_output=True,
    )
    return REPO / "debug_assets"


@pytest.fixture(scope="session")
def take_rows(assets, tmp_path_factory):
    """take_rows({"test.parquet": 8}): a folder with the first rows of the debug prompts."""
    import datasets

    def take(counts):
        folder = tmp_path_factory.mktemp("prompts")
        for name, count in counts.items():
            rows = datasets.Dataset.from_parquet(str(assets / name)).select(range(count))
            rows.to_parquet(str(folder / name))
        return folder

    return take


@pytest.fixture(scope="session")
def small_eval(take_rows):
    return take_rows({"test.parquet": 32}) / "test.parquet"


@pytest.fixture(scope="session")
def few_prompts(take_rows):
    return take_rows({"train.parquet": 64, "test.parquet": 8})


@pytest.fixture(scope="session")
def reward_model(assets, tmp_path_factory):
    """Return the folder of a classifier with one label and random weights."""
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
    """Return the folder of a policy with a wide head and with dropout."""
    from helpers.rollouts import tiny_language_model

    model = tiny_language_model(hidden_size=512, num_hidden_layers=1, attention_dropout=0.3)
    model.save_pretrained(tmp_path / "policy")
    return tmp_path / "policy"


@pytest.fixture(scope="session")
def start_script(assets, take_rows):
    """Start a script on the debug assets. The end of the session ends it, if nothing else does.

    Without a launcher, Python starts one rank, and torchrun starts two.
    """
    started = []
    defaults = {
        "run_name": "run",
        # All 20,000 prompts would take two seconds to read, on each rank
        "dataset": take_rows({"train.parquet": 1000}) / "train.parquet",
        "model_name_or_path": assets / "model",
        "dtype": "float32",
        "response_length": 8,
        "total_episodes": 64,
        "local_rollout_batch_size": 16,
        "number_samples_per_prompt": 2,
        "local_mini_batch_size": 32,
        "per_device_train_batch_size": 8,
        "reward_workers": 1,
        "learning_rate": 5e-4,
    }

    def start(
        script, folder, launcher=None, ranks=1, env=None, program=(), save_batches=False, **options
    ):
        folder.mkdir(parents=True, exist_ok=True)
        if save_batches:
            program = (REPO / "tests" / "helpers" / "saving_batches.py",)
        words = [*map(str, (*program, script))]
        of_ppo = {} if "grpo" in "".join(words) else {"value_learning_rate": 1e-3}
        argv = [*words, *flags_of(defaults | of_ppo | {"output_dir": folder} | options)]
        if launcher is None:
            launcher = {1: (), 2: TWO_RANKS}[ranks]
        with open(folder / "stdout", "w") as stdout, open(folder / "stderr", "w") as stderr:
            process = subprocess.Popen(
                [sys.executable, *launcher, *argv],
                cwd=REPO,
                env=environment(env),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,  # so that a test can press Ctrl-C
            )
        process.folder, process.run_dir = folder, folder / "run"
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            end(process)


@pytest.fixture(scope="session")
def run_script(start_script):
    """Run a script to its end: run_script("ppo_sync.py", tmp_path, beta=0.1) -> Run."""

    def run(script, folder, launcher=None, **options):
        started_at = time.monotonic()
        return finish(start_script(script, folder, launcher, **options), 900, started_at)

    return run


@pytest.fixture(scope="session")
def run_with_fault(run_script):
    """run_with_fault("ppo_vllm_async.py", "SIGKILL", tmp_path) -> Run."""
    program = str(REPO / "tests" / "helpers" / "run_with_fault.py")

    def run(script, fault, folder, **options):
        return run_script(fault, folder, program=(program, script), **options)

    return run


@pytest.fixture(scope="session")
def run_main(few_prompts, tmp_path_factory):
    """run_main("ppo_sync.py", score, beta=0.1): what was seen of a run; loops.py."""
    from helpers.loops import run_loop

    def run(name, score=None, **changes):
        return run_loop(name, few_prompts, tmp_path_factory.mktemp("loop"), score, **changes)

    return run

"""grpo_vllm_async.py against TRL's GRPOTrainer: the same model, prompts, reward, batches and
updates, on this machine.

    python scripts/benchmark/vs_trl.py                  # throughput and memory: two workloads

Float32, learning rate 0, no KL term, one update a step, all cores for either side, no gradient
checkpointing; a random model of 0.5 M parameters. "varied": responses end by themselves, after a
third of 256 tokens on average. "equal": the end token is out of the model's reach, 64 tokens each.
Our learner has one thread, as `accelerate launch` gives it, and micro-batches of 8 rows of like
length; TRL has all threads and micro-batches of 32, which it does not sort.

The sides take turns. Episodes a second are counted from the end of step WARM_UP to the end of the
last step but one (the last async step overlaps with nothing). Memory is the peak, over the whole
run, of the sum over all processes of a side: what this script starts and all that comes from it, so
on our side vLLM's process and the reward workers too. It is Linux's PSS: a page that processes
share is divided among them, also with a process of neither side, so nothing else should run from
the same environments meanwhile. Both sides make the same number of updates; response tokens, over
all pairs, must be as many within 2%.

TRL runs in .venv_trl, which the first call makes.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import psutil
from run import REPO, flags_of, run

TRL_VERSION = "1.16.0"
WARM_UP = 3
MEMORY_EVERY = 0.2  # seconds
PROMPTS, GROUP = 16, 8
WORKLOADS = {"varied": 256, "equal": 64}  # response caps
REWARD = """
def score(data_source, response, ground_truth, extra_info=None):
    return float(len(response) % 2)
"""


def run_trl(run_dir, model, dataset, length, updates, seed):
    """TRL's side, in .venv_trl: writes metrics.jsonl with what the comparison needs."""
    import datasets
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(os.cpu_count())
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    rows = datasets.Dataset.from_parquet(dataset).to_list()
    template = {"tokenize": False, "add_generation_prompt": True}
    texts = [tokenizer.apply_chat_template(row["prompt"], **template) for row in rows]
    run_dir.mkdir()

    def parity(completions, **_):
        return [float(len(text) % 2) for text in completions]

    class Log(TrainerCallback):
        def on_train_begin(self, *_, **__):
            self.start = time.perf_counter()

        def on_log(self, args, state, control, logs, **_):
            if "completions/mean_length" in logs:
                line = {"time/from_scratch": time.perf_counter() - self.start}
                line["objective/sequence_lengths"] = logs["completions/mean_length"]
                with open(run_dir / "metrics.jsonl", "a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")

    config = GRPOConfig(
        output_dir=str(run_dir / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        seed=seed,
        per_device_train_batch_size=32,
        gradient_accumulation_steps=PROMPTS * GROUP // 32,
        steps_per_generation=PROMPTS * GROUP // 32,
        num_generations=GROUP,
        max_completion_length=length,
        max_steps=updates,
        temperature=1.0,
        beta=0.0,
        learning_rate=0.0,
    )
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        parity,
        args=config,
        train_dataset=datasets.Dataset.from_dict({"prompt": texts}),
        processing_class=tokenizer,
    )
    trainer.add_callback(Log())
    trainer.train()


def words_of_ours(folder, model, dataset, length, updates, seed):
    """The script and its flags for the same."""
    flags = {
        "model_name_or_path": model,
        "dataset": dataset,
        "dtype": "float32",
        "gradient_checkpointing": False,
        "seed": seed,
        "response_length": length,
        "total_episodes": updates * PROMPTS * GROUP,
        "local_rollout_batch_size": PROMPTS,
        "number_samples_per_prompt": GROUP,
        "local_mini_batch_size": PROMPTS * GROUP,
        "per_device_train_batch_size": 8,
        "local_rollout_forward_batch_size": 8,
        "beta": 0.0,
        "learning_rate": 0.0,
        "reward_fn": f"{folder / 'reward.py'}:score",
    }
    return [REPO / "grpo_vllm_async.py", *flags_of(flags)]


def trl_python():
    """The interpreter of .venv_trl; makes it if need be, with this environment's packages."""
    from importlib.metadata import version

    home = REPO / ".venv_trl"
    python, done = home / "bin" / "python", home / ".complete"
    if not done.exists():
        print(f"Making {home.name} with TRL {TRL_VERSION}, some minutes ...", flush=True)
        shutil.rmtree(home, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", home], check=True)
        names = ("torch", "transformers", "accelerate", "datasets", "psutil")
        pins = [f"trl=={TRL_VERSION}", *(f"{name}=={version(name)}" for name in names)]
        install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *pins]
        if subprocess.run(install, stderr=subprocess.DEVNULL).returncode:
            # PyPI has no CPU builds of torch
            index = ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]
            subprocess.run([*install, *index], check=True)
        done.touch()
    return python


def make_assets(folder):
    """Model and training prompts of each workload, and the reward."""
    sys.path.insert(0, str(REPO / "scripts" / "dev"))
    import make_debug_assets
    import torch
    from datasets import Dataset

    torch.manual_seed(1)
    # With 6 special tokens: 90
    make_debug_assets.CHARACTERS = "".join(chr(33 + i) for i in range(84))
    tokenizer = make_debug_assets.make_tokenizer()
    model = make_debug_assets.make_model(tokenizer, {"hidden_size": 128, "num_layers": 2})
    model.config.max_position_embeddings = 512
    model.save_pretrained(folder / "varied" / "model")
    # One dimension of the residual stream is the same large number everywhere, and speaks against
    # the end token.
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0.0
        model.lm_head.weight[tokenizer.eos_token_id, 0] = -100.0
    model.save_pretrained(folder / "equal" / "model")
    rng = random.Random(1)
    rows = []
    for _ in range(4000):
        text = "".join(rng.choices(make_debug_assets.CHARACTERS, k=rng.randint(5, 20)))
        row = {"prompt": [{"role": "user", "content": text}], "data_source": "none"}
        rows.append(row | {"reward_model": {"ground_truth": "0"}})
    for workload in WORKLOADS:
        tokenizer.save_pretrained(folder / workload / "model")
        Dataset.from_list(rows).to_parquet(str(folder / workload / "train.parquet"))
    (folder / "reward.py").write_text(REWARD, "utf-8")


def memory_of(process):
    """What a process and all that comes from it have in memory now, in bytes: the sum of PSS."""
    total = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                total += one.memory_full_info().pss
    return total


def measure(side, folder, *settings):
    """A run: its episodes a second, its memory at the peak in MiB, its tokens a response."""
    peak = 0

    def watch(process):
        nonlocal peak
        while process.poll() is None:
            peak = max(peak, memory_of(psutil.Process(process.pid)))
            time.sleep(MEMORY_EVERY)

    with tempfile.TemporaryDirectory() as name:
        if side == "trl":
            words = [__file__, "--trl", f"{name}/run", json.dumps(settings)]
            lines, _ = run(words, name, os.cpu_count(), watch=watch, python=trl_python())
        else:
            lines, _ = run(words_of_ours(folder, *settings), name, watch=watch)
    _, _, _, updates, _ = settings
    if len(lines) != updates:
        sys.exit(f"{side} made {len(lines)} updates")
    seconds = [line["time/from_scratch"] for line in lines]
    speed = PROMPTS * GROUP * (updates - 1 - WARM_UP) / (seconds[-2] - seconds[WARM_UP - 1])
    length = statistics.mean(line["objective/sequence_lengths"] for line in lines)
    return speed, peak / 2**20, length


def compare(workload, folder, pairs, updates):
    rows = []  # (ours, TRL's) of each pair, by figure
    paths = [str(folder / workload / name) for name in ("model", "train.parquet")]
    for seed in range(1, pairs + 1):
        settings = (*paths, WORKLOADS[workload], updates, seed)
        sides = [measure(side, folder, *settings) for side in ("tandem", "trl")]
        rows.append(list(zip(*sides, strict=True)))
        speeds, memory, lengths = rows[-1]
        print(
            f"{workload}, pair {seed}: {speeds[0]:.1f} against {speeds[1]:.1f} episodes/s; "
            f"memory {memory[0]:.0f} against {memory[1]:.0f} MiB at the peak; "
            f"{lengths[0]:.1f} and {lengths[1]:.1f} tokens a response",
            flush=True,
        )
    speeds, memory, lengths = zip(*rows, strict=True)
    speed, space = (
        statistics.median(ours / theirs for ours, theirs in figures) for figures in (speeds, memory)
    )
    ours, theirs = map(sum, zip(*lengths, strict=True))
    is_same = abs(ours / theirs - 1) <= 0.02
    print(
        f"{workload}: median {speed:.2f} times the episodes/s, {space:.2f} times the memory; "
        f"tokens in all {ours / theirs:.3f} to 1, "
        + ("as they must be" if is_same else "NOT the same work: take more --steps")
    )


def main():
    if sys.argv[1:2] == ["--trl"]:
        run_trl(Path(sys.argv[2]), *json.loads(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        with ProcessPoolExecutor(max_workers=1) as pool:  # so that torch's pages are not ours too
            pool.submit(make_assets, Path(name)).result()
        for workload in WORKLOADS:
            compare(workload, Path(name), args.pairs, args.steps)


if __name__ == "__main__":
    main()

"""grpo_vllm_async.py against TRL's GRPOTrainer: the same model, prompts, reward, batches and
updates, on this machine.

    python scripts/benchmark/vs_trl.py                  # throughput and memory: two workloads
    python scripts/benchmark/vs_trl.py --what learning  # held-out rate against time, and a picture

Throughput: float32, learning rate 0, no KL term, one update a step, all cores for either side, no
gradient checkpointing; a random model of 0.5 M parameters. "varied": responses end by themselves,
after a third of 256 tokens on average. "equal": the end token is out of the model's reach, 64
tokens each. Our learner has one thread, as `accelerate launch` gives it, and micro-batches of 8
rows of like length; TRL has all threads and micro-batches of 32, which it does not sort.
The sides take turns. Episodes a second are counted from the end
of step WARM_UP to the end of the last step but one (the last async step overlaps with nothing).
Memory is the peak, over the whole run, of the sum over all processes of a side: what this script
starts and all that comes from it, so on our side vLLM's process and the reward workers too. It is
Linux's PSS: a page that processes share is divided among them. RSS would count it in full for each.
Pages shared with a process of neither side are divided too, so nothing else should run from the
same environments meanwhile.
Both sides make the same number of updates; response tokens, over all pairs, must be as many within
2%.

Learning: the debug task with the flags of scripts/train/debug/grpo.sh, but for a learning rate
with which it takes more than a few steps (--learning_rate 5e-4 --updates 100 is what is there).
Seconds of training, without evaluations, until 0.9 of the held-out prompts are answered right; and
seconds since the imports, which on our side have the start of vLLM and the evaluations in them, on
TRL's the loading of the model.

TRL runs in .venv_trl, which the first call makes.
"""

import argparse
import contextlib
import itertools
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

REPO = Path(__file__).resolve().parent.parent.parent
TRL_VERSION = "1.16.0"
WARM_UP = 3
MEMORY_EVERY = 0.2  # seconds
PROMPTS, GROUP = 16, 8
WORKLOADS = {"varied": 256, "equal": 64}  # response caps
REWARD = """
def score(data_source, response, ground_truth, extra_info=None):
    return float(len(response) % 2)
"""


# ------------------------------------------------------------------------------------- TRL's side


def run_trl(folder, settings):
    """TRL's side: writes metrics.jsonl lines with what the comparison needs."""
    import datasets
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    imported = time.perf_counter()
    torch.set_num_threads(os.cpu_count())
    tokenizer = AutoTokenizer.from_pretrained(settings["model"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)

    def load(path):
        """Prompts as text, and their ground truths."""
        rows = datasets.Dataset.from_parquet(path).to_list() if path else []
        template = {"tokenize": False, "add_generation_prompt": True}
        texts = [tokenizer.apply_chat_template(row["prompt"], **template) for row in rows]
        return texts, [row["reward_model"]["ground_truth"] for row in rows]

    texts, truths = load(settings["dataset"])
    train = datasets.Dataset.from_dict({"prompt": texts, "ground_truth": truths})
    held_out, held_out_truths = load(settings.get("eval_dataset"))

    def reward(completions, ground_truth, completion_ids, **_):
        if settings["reward"] == "parity":
            return [float(len(text) % 2) for text in completions]
        ends = [tokenizer.eos_token_id in ids for ids in completion_ids]
        right = map(is_right, completions, ground_truth)
        return [float(score) if end else -1.0 for score, end in zip(right, ends, strict=True)]

    def is_right(text, truth):
        return text.strip() == truth

    def correct_rate():
        inputs = tokenizer(held_out, return_tensors="pt", padding=True, add_special_tokens=False)
        options = {"do_sample": False, "max_new_tokens": settings["response_length"]}
        with torch.no_grad():
            output = model.generate(**inputs, **options)
        new = output[:, inputs["input_ids"].shape[1] :]
        answers = tokenizer.batch_decode(new, skip_special_tokens=True)
        return statistics.mean(map(is_right, answers, held_out_truths))

    class Log(TrainerCallback):
        def on_train_begin(self, *_, **__):
            self.start, self.lines, self.paused = time.perf_counter(), [], 0.0
            if held_out:
                self.evaluate(step=0)

        def evaluate(self, step):
            before = time.perf_counter()
            line = {"training_step": step, "seconds": before - self.start - self.paused}
            line["since_imports"] = before - imported - self.paused
            self.lines.append(json.dumps(line | {"eval/verifiable_correct_rate": correct_rate()}))
            self.paused += time.perf_counter() - before

        def on_step_end(self, args, state, control, **_):
            if held_out and state.global_step % settings["eval_every"] == 0:
                self.evaluate(state.global_step)

        def on_log(self, args, state, control, logs, **_):
            if not held_out and "completions/mean_length" in logs:
                seconds = time.perf_counter() - self.start
                line = {"training_step": state.global_step, "seconds": seconds}
                line["objective/sequence_lengths"] = logs["completions/mean_length"]
                self.lines.append(json.dumps(line))

        def on_train_end(self, *_, **__):
            (folder / "metrics.jsonl").write_text("\n".join(self.lines), "utf-8")

    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        seed=settings["seed"],
        per_device_train_batch_size=settings["micro_batch"],
        gradient_accumulation_steps=settings["mini_batch"] // settings["micro_batch"],
        steps_per_generation=settings["episodes"] // settings["micro_batch"],
        num_generations=settings["group"],
        max_completion_length=settings["response_length"],
        max_steps=settings["updates"],
        temperature=1.0,
        beta=settings["beta"],
        learning_rate=settings["learning_rate"],
        warmup_steps=settings["warm_up"],
    )
    trainer = GRPOTrainer(
        model, reward, args=config, train_dataset=train, processing_class=tokenizer
    )
    trainer.add_callback(Log())
    trainer.train()


# ----------------------------------------------------------------------------------- the comparison


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


def run_side(side, settings):
    """One run in processes of its own; returns its metrics and their memory at the peak, in MiB."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if side == "trl":
            (folder / "settings.json").write_text(json.dumps(settings), "utf-8")
            command, threads = [trl_python(), __file__, "--trl_folder", folder], os.cpu_count()
        else:
            command = [sys.executable, REPO / "grpo_vllm_async.py", *flags_of(settings, folder)]
            threads = 1
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        output, peak = folder / "output.txt", 0
        with (
            output.open("w", encoding="utf-8") as file,
            psutil.Popen(command, stdout=file, stderr=file, env=environment) as process,
        ):
            while process.poll() is None:
                peak = max(peak, memory_of(process))
                time.sleep(MEMORY_EVERY)
        if process.returncode:
            sys.exit(output.read_text("utf-8"))
        path = folder / ("metrics.jsonl" if side == "trl" else "run/metrics.jsonl")
        return [json.loads(line) for line in path.read_text("utf-8").splitlines()], peak / 2**20


def flags_of(settings, folder):
    """The flags of grpo_vllm_async.py for these settings."""
    episodes, group = settings["episodes"], settings["group"]
    steps = settings["updates"] * settings["mini_batch"] // episodes
    flags = {
        "model_name_or_path": settings["model"],
        "dataset": settings["dataset"],
        "dtype": "float32",
        "output_dir": folder,
        "run_name": "run",
        "seed": settings["seed"],
        "response_length": settings["response_length"],
        "total_episodes": steps * episodes,
        "local_rollout_batch_size": episodes // group,
        "number_samples_per_prompt": group,
        "local_mini_batch_size": settings["mini_batch"],
        "per_device_train_batch_size": settings["micro_batch"],
        "local_rollout_forward_batch_size": settings["micro_batch"],
        "beta": settings["beta"],
        "learning_rate": settings["learning_rate"],
        "warm_up_steps": settings["warm_up"],
        "lr_scheduler_type": "linear",  # as TRL's
    }
    if settings["reward"] == "parity":
        flags["reward_fn"] = f"{Path(settings['dataset']).parent.parent / 'reward.py'}:score"
    else:
        flags |= {"eval_dataset": settings["eval_dataset"], "penalty_reward_value": -1}
        flags["num_evals"] = settings["updates"] // settings["eval_every"]
    extra = ["--no-gradient_checkpointing"]
    if settings["reward"] != "parity":
        extra.append("--non_stop_penalty")
    return [text for name, value in flags.items() for text in (f"--{name}", str(value))] + extra


def speed(lines):
    """Episodes a second after the first WARM_UP steps and without the last."""
    seconds = [line.get("seconds", line.get("time/from_scratch")) for line in lines]
    return PROMPTS * GROUP * (len(lines) - 1 - WARM_UP) / (seconds[-2] - seconds[WARM_UP - 1])


def compare_throughput(args):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with ProcessPoolExecutor(max_workers=1) as pool:  # so that torch's pages are not ours too
            pool.submit(make_assets, folder).result()
        for workload in WORKLOADS:
            settings = {
                "model": str(folder / workload / "model"),
                "dataset": str(folder / workload / "train.parquet"),
                "reward": "parity",
                "response_length": WORKLOADS[workload],
                "episodes": PROMPTS * GROUP,
                "mini_batch": PROMPTS * GROUP,
                "group": GROUP,
                "updates": args.steps,
                "learning_rate": 0.0,
                "warm_up": 0,
                "beta": 0.0,
            }
            pairs = []
            for seed in range(1, args.pairs + 1):
                pairs.append(run_pair(settings | {"seed": seed}))
                speeds, memory, lengths = (
                    pairs[-1][name] for name in ("speed", "memory", "length")
                )
                print(
                    f"{workload}, pair {seed}: {speeds[0]:.1f} against {speeds[1]:.1f} episodes/s; "
                    f"memory {memory[0]:.0f} against {memory[1]:.0f} MiB at the peak; "
                    f"{lengths[0]:.1f} and {lengths[1]:.1f} tokens a response",
                    flush=True,
                )
            ratios = {}
            for name in ("speed", "memory"):
                ratios[name] = statistics.median(pair[name][0] / pair[name][1] for pair in pairs)
            ours, theirs = (sum(pair["length"][side] for pair in pairs) for side in (0, 1))
            is_same = abs(ours / theirs - 1) <= 0.02
            print(
                f"{workload}: median {ratios['speed']:.2f} times the episodes/s, "
                f"{ratios['memory']:.2f} times the memory; tokens in all {ours / theirs:.3f} to 1, "
                + ("as they must be" if is_same else "NOT the same work: take more --steps")
            )


def run_pair(settings):
    """{figure: (ours, TRL's)}: episodes a second, peak in MiB, tokens of a response."""
    figures = {"speed": [], "memory": [], "length": []}
    for side, micro_batch in (("tandem", 8), ("trl", 32)):
        lines, peak = run_side(side, settings | {"micro_batch": micro_batch})
        if len(lines) != settings["updates"]:
            sys.exit(f"{side} made {len(lines)} updates")
        figures["speed"].append(speed(lines))
        figures["memory"].append(peak)
        lengths = (line["objective/sequence_lengths"] for line in lines)
        figures["length"].append(statistics.mean(lengths))
    return figures


def compare_learning(args):
    from matplotlib.figure import Figure

    command = [sys.executable, REPO / "scripts" / "dev" / "make_debug_assets.py"]
    subprocess.run(command, cwd=REPO, check=True)
    assets = REPO / "debug_assets"
    settings = {
        "model": str(assets / "model"),
        "dataset": str(assets / "train.parquet"),
        "eval_dataset": str(assets / "test.parquet"),
        "reward": "debug",
        "response_length": 8,
        "episodes": 512,
        "mini_batch": 256,
        "micro_batch": 128,
        "group": 8,
        "updates": args.updates,
        "eval_every": 4,
        "learning_rate": args.learning_rate,
        "warm_up": 10,
        "beta": 0.01,
        "seed": args.seed,
    }
    axes, key = (figure := Figure(figsize=(7, 4))).subplots(), "eval/verifiable_correct_rate"
    labels = {"tandem": "grpo_vllm_async.py", "trl": f"TRL {TRL_VERSION} GRPOTrainer"}
    for side, label in labels.items():
        lines, _ = run_side(side, settings)
        evaluated = [line for line in lines if key in line]
        if side == "tandem":
            # Reported a step late; and nothing is left out since the imports
            after = [0.0, *itertools.accumulate(line["time/training"] for line in lines)]
            for line in evaluated:
                line["seconds"] = after[int(line["eval/policy_version"])]
                line["since_imports"] = line["time/from_scratch"]
        reached = next((line for line in evaluated if line[key] >= 0.9), None)
        when = "0.9 not reached"
        if reached:
            when = (
                f"0.9 after {reached['seconds']:.1f} s "
                f"({reached['since_imports']:.1f} s since the imports)"
            )
        points = [(line["seconds"], line[key]) for line in evaluated]
        (_, first), (end, last) = points[0], points[-1]
        print(
            f"{label}: held-out rate {first:.3f} at first, {when}, {last:.3f} after {end:.1f} s",
            flush=True,
        )
        axes.plot(*zip(*points, strict=True), marker=".", label=label)
    axes.set_xlabel("seconds of training (evaluation left out)")
    axes.set_ylabel("held-out prompts answered right")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(args.output.expanduser(), dpi=120, bbox_inches="tight")
    print(f"Picture: {args.output}")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--what", choices=["throughput", "learning"], default="throughput")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15)
    learning = "in the comparison of learning"
    parser.add_argument("--seed", type=int, default=1, help=learning)
    parser.add_argument("--learning_rate", type=float, default=1e-4, help=learning)
    parser.add_argument("--updates", type=int, default=200, help=learning)
    parser.add_argument("--output", type=Path, default=Path("vs_trl.png"), help=learning)
    parser.add_argument("--trl_folder", type=Path, help=argparse.SUPPRESS)  # a run of TRL's side
    args = parser.parse_args()
    if args.trl_folder:
        run_trl(args.trl_folder, json.loads((args.trl_folder / "settings.json").read_bytes()))
    elif args.what == "learning":
        compare_learning(args)
    else:
        compare_throughput(args)


if __name__ == "__main__":
    main()

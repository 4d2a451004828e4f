"""grpo_vllm_async.py against TRL's GRPOTrainer: the same model, prompts, reward, batches and
updates, on this machine.

    python scripts/benchmark/vs_trl.py                  # throughput and memory: two workloads
    python scripts/benchmark/vs_trl.py --what learning  # held-out rate against time, and a picture

Throughput: float32, learning rate 0, no KL term, one update a step, all cores for either side, no
gradient checkpointing; a random model of 0.5 M parameters. "varied": responses end by themselves,
after a third of 256 tokens on average. "equal": the end token is out of the model's reach, 64
tokens each. Our learner has one thread, as `accelerate launch` gives it, and micro-batches of 8
rows of like length; TRL has all threads and micro-batches of 32, which it does not sort
(--trl_micro_batch to try others). The sides take turns. Episodes a second are counted from the end
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
    rows = datasets.Dataset.from_parquet(settings["dataset"]).to_list()
    texts = [
        tokenizer.apply_chat_template(r["prompt"], tokenize=False, add_generation_prompt=True)
        for r in rows
    ]
    truths = [row["reward_model"]["ground_truth"] for row in rows]
    train = datasets.Dataset.from_dict({"prompt": texts, "ground_truth": truths})

    def reward(completions, ground_truth, completion_ids, **_):
        if settings["reward"] == "parity":
            return [float(len(text) % 2) for text in completions]
        ends = [tokenizer.eos_token_id in ids for ids in completion_ids]
        right = [
            float(text.strip() == truth)
            for text, truth in zip(completions, ground_truth, strict=True)
        ]
        return [score if end else -1.0 for score, end in zip(right, ends, strict=True)]

    held_out = []
    if settings.get("eval_dataset"):
        rows = datasets.Dataset.from_parquet(settings["eval_dataset"]).to_list()
        held_out = [
            (
                tokenizer.apply_chat_template(
                    r["prompt"], tokenize=False, add_generation_prompt=True
                ),
                r["reward_model"],
            )
            for r in rows
        ]

    def correct_rate():
        prompts = [prompt for prompt, _ in held_out]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
        with torch.no_grad():
            output = model.generate(
                **inputs, do_sample=False, max_new_tokens=settings["response_length"]
            )
        answers = tokenizer.batch_decode(
            output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        truths = [truth["ground_truth"] for _, truth in held_out]
        return sum(a.strip() == t for a, t in zip(answers, truths, strict=True)) / len(truths)

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
                line = {
                    "training_step": state.global_step,
                    "seconds": time.perf_counter() - self.start,
                }
                self.lines.append(
                    json.dumps(
                        line | {"objective/sequence_lengths": logs["completions/mean_length"]}
                    )
                )

        def on_train_end(self, *_, **__):
            (folder / "metrics.jsonl").write_text("\n".join(self.lines))

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
        if subprocess.run(
            install, stderr=subprocess.DEVNULL
        ).returncode:  # PyPI has no CPU builds of torch
            subprocess.run(
                [*install, "--extra-index-url", "https://download.pytorch.org/whl/cpu"], check=True
            )
        done.touch()
    return python


def make_assets(folder):
    """Model and training prompts of each workload, and the reward."""
    sys.path.insert(0, str(REPO / "scripts" / "dev"))
    import make_debug_assets
    import torch
    from datasets import Dataset

    torch.manual_seed(1)
    make_debug_assets.CHARACTERS = "".join(
        chr(33 + i) for i in range(84)
    )  # with 6 special tokens: 90
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
    texts = [
        "".join(rng.choices(make_debug_assets.CHARACTERS, k=rng.randint(5, 20)))
        for _ in range(4000)
    ]
    rows = [
        {
            "prompt": [{"role": "user", "content": text}],
            "data_source": "none",
            "reward_model": {"ground_truth": "0"},
        }
        for text in texts
    ]
    for workload in WORKLOADS:
        tokenizer.save_pretrained(folder / workload / "model")
        Dataset.from_list(rows).to_parquet(str(folder / workload / "train.parquet"))
    (folder / "reward.py").write_text(REWARD)


def memory_of(process):
    """What a process and all that comes from it have in memory now, in bytes: the sum of PSS."""
    total = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                total += one.memory_full_info().pss
    return total


def run_side(side, settings, threads):
    """One run in processes of its own; returns its metrics and their memory at the peak, in MiB."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if side == "trl":
            (folder / "settings.json").write_text(json.dumps(settings))
            command = [trl_python(), __file__, "--trl_folder", folder]
        else:
            command = [sys.executable, REPO / "grpo_vllm_async.py", *flags_of(settings, folder)]
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads if side == "tandem" else os.cpu_count())
        }
        output, peak = folder / "output.txt", 0
        with (
            output.open("w") as file,
            psutil.Popen(command, stdout=file, stderr=file, env=environment) as process,
        ):
            while process.poll() is None:
                peak = max(peak, memory_of(process))
                time.sleep(MEMORY_EVERY)
        if process.returncode:
            sys.exit(output.read_text())
        path = folder / ("metrics.jsonl" if side == "trl" else "run/metrics.jsonl")
        return [json.loads(line) for line in path.read_text().splitlines()], peak / 2**20


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
        for workload in args.workloads:
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
            ratios, memory, tokens_of = [], [], {"tandem": 0.0, "trl": 0.0}
            for pair in range(1, args.pairs + 1):
                found = {}
                for side in ("tandem", "trl"):
                    micro_batch = args.micro_batch if side == "tandem" else args.trl_micro_batch
                    run = settings | {"seed": pair, "micro_batch": micro_batch}
                    lines, peak = run_side(side, run, args.threads)
                    tokens = (
                        PROMPTS * GROUP * sum(line["objective/sequence_lengths"] for line in lines)
                    )
                    found[side] = (speed(lines), peak, len(lines), tokens)
                (ours, our_memory, *_), (theirs, their_memory, *_) = found["tandem"], found["trl"]
                same = found["tandem"][2] == found["trl"][2] == args.steps
                token_ratio = found["tandem"][3] / found["trl"][3]
                if not same:
                    sys.exit(f"not as many updates: {found}")
                tokens_of = {side: tokens_of[side] + found[side][3] for side in found}
                ratios.append(ours / theirs)
                memory.append(our_memory / their_memory)
                print(
                    f"{workload}, pair {pair}: {ours:.1f} against {theirs:.1f} episodes/s: "
                    f"{ratios[-1]:.2f} times; "
                    f"memory {our_memory:.0f} against {their_memory:.0f} MiB at the peak: "
                    f"{memory[-1]:.2f} times; "
                    f"{args.steps} updates, "
                    f"{found['trl'][3] / args.steps / PROMPTS / GROUP:.1f} tokens a response, "
                    f"ratio {token_ratio:.3f}",
                    flush=True,
                )
            token_ratio = tokens_of["tandem"] / tokens_of["trl"]
            verdict = (
                "as they must be"
                if abs(token_ratio - 1) <= 0.02
                else "NOT the same work: take more --steps"
            )
            print(
                f"{workload}: median {statistics.median(ratios):.2f} times the episodes/s, "
                f"{statistics.median(memory):.2f} times the memory; "
                f"tokens in all {token_ratio:.3f} to 1, {verdict}"
            )


def compare_learning(args):
    from matplotlib.figure import Figure

    subprocess.run(
        [sys.executable, REPO / "scripts" / "dev" / "make_debug_assets.py"], cwd=REPO, check=True
    )
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
    for side, label in (
        ("tandem", "grpo_vllm_async.py"),
        ("trl", f"TRL {TRL_VERSION} GRPOTrainer"),
    ):
        lines, _ = run_side(side, settings, args.threads)
        evaluated = [line for line in lines if key in line]
        if side == "tandem":
            after = [
                0.0,
                *itertools.accumulate(line["time/training"] for line in lines),
            ]  # so many steps
            for (
                line
            ) in evaluated:  # reported a step late, and nothing is left out since the imports
                line |= {
                    "seconds": after[line["eval/policy_version"]],
                    "since_imports": line["time/from_scratch"],
                }
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
    axes.set(
        xlabel="seconds of training (evaluation left out)",
        ylabel="held-out prompts answered right",
        ylim=(0, 1),
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(args.output, dpi=120, bbox_inches="tight")
    print(f"Picture: {args.output}")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--what", choices=["throughput", "learning"], default="throughput")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--micro_batch", type=int, default=8, help="of our side")
    parser.add_argument("--trl_micro_batch", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1, help="OMP_NUM_THREADS of our learner")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--learning_rate", type=float, default=1e-4, help="in the comparison of learning"
    )
    parser.add_argument("--updates", type=int, default=200, help="in the comparison of learning")
    parser.add_argument("--output", type=Path, default=Path("vs_trl.png"))
    parser.add_argument("--trl_folder", type=Path, help=argparse.SUPPRESS)  # a run of TRL's side
    args = parser.parse_args()
    if args.trl_folder:
        run_trl(args.trl_folder, json.loads((args.trl_folder / "settings.json").read_text()))
    elif args.what == "learning":
        compare_learning(args)
    else:
        compare_throughput(args)


if __name__ == "__main__":
    main()
